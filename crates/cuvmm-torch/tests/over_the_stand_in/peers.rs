//! Memory that other devices may use, over the stand-in for libcuda, which has two.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{CString, c_char, c_int, c_void};

use crate::common::tags::Tags;
use crate::common::{Cuda, Handle, MIB, Torch, over_the_stand_in};

/// Makes both devices peers of each other.
fn with_peers() -> (Tags, Cuda) {
    let (tags, cuda) = (Tags::load(), Cuda::load());
    let configure: unsafe extern "C" fn(*const c_char) -> c_int =
        tags.torch.function("cuvmm_configure");
    let json = CString::new(r#"{"peers": [0, 1]}"#).unwrap();
    // SAFETY: the text is terminated.
    assert_eq!(unsafe { configure(json.as_ptr()) }, 0);
    (tags, cuda)
}

/// Returns the access that a device has at an address.
fn access(torch: &Torch, address: usize, device: c_int) -> c_int {
    let ask: unsafe extern "C" fn(*const c_void, c_int) -> c_int = torch.function("cuvmm_access");
    // SAFETY: it may be called with any address.
    unsafe { ask(std::ptr::without_provenance(address), device) }
}

/// Creates a stream of device 1. Device 0 stays current.
fn stream_of_peer(cuda: &Cuda) -> Handle {
    cuda.enter(1);
    let stream = cuda.stream();
    cuda.enter(0);
    stream
}

/// Fills memory from device 1, and waits for it.
fn fill_from_peer(cuda: &Cuda, address: usize, byte: u8, mib: usize, stream: Handle) {
    cuda.enter(1);
    cuda.fill(address, byte, mib * MIB, stream);
    cuda.synchronize(stream);
    cuda.enter(0);
}

over_the_stand_in! {
    memory_under_a_tag_is_open_to_peers [] says [] {
        let (tags, cuda) = with_peers();
        let elsewhere = stream_of_peer(&cuda);
        let (large, small) = (tags.allocate("a", 6), tags.allocate("a", 1));
        for address in [large, small] {
            assert_eq!((access(&tags.torch, address, 0), access(&tags.torch, address, 1)), (3, 3));
        }
        fill_from_peer(&cuda, large, 7, 6, elsewhere);
        fill_from_peer(&cuda, small, 8, 1, elsewhere);
        for keep in [true, false] {
            tags.sleep(r#"["a"]"#, keep).unwrap();
            assert_eq!(access(&tags.torch, large, 1), -1, "nothing is mapped");
            tags.wake("null").unwrap();
            for address in [large, small] {
                let found = (access(&tags.torch, address, 0), access(&tags.torch, address, 1));
                assert_eq!(found, (3, 3));
            }
            if keep {
                cuda.expect(large, 7, 6 * MIB);
                cuda.expect(small, 8, MIB);
            }
            fill_from_peer(&cuda, large, 9, 6, elsewhere);
            cuda.expect(large, 9, 6 * MIB);
        }
        tags.free(large);
        tags.free(small);
        tags.torch.reset();
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
    }

    without_peers_a_tag_has_none [] says [] {
        let (tags, _cuda) = (Tags::load(), Cuda::load());
        let address = tags.allocate("a", 2);
        assert_eq!((access(&tags.torch, address, 0), access(&tags.torch, address, 1)), (3, 0));
    }

    work_of_a_peer_is_waited_for [] says [] {
        let (tags, cuda) = with_peers();
        let elsewhere = stream_of_peer(&cuda);
        let (first, second) = (tags.allocate("a", 200), tags.allocate("b", 2));
        let handle = elsewhere.expose_provenance();
        // The library does not know the stream.
        let hold = |held| {
            cuda.enter(1);
            cuda.hold(std::ptr::with_exposed_provenance_mut(handle), held);
        };
        hold(true);
        cuda.fill(second, 5, 2 * MIB, elsewhere);
        cuda.fill(first, 6, 200 * MIB, elsewhere);
        cuda.enter(0);
        tags.free(first);
        let mapped = cuda.physicals_and_mappings();
        std::thread::scope(|scope| {
            let asleep = scope.spawn(|| {
                cuda.enter(0);
                tags.sleep(r#"["b"]"#, true)
            });
            for _ in 0..100 {
                std::thread::yield_now();
                assert_eq!(cuda.physicals_and_mappings(), mapped, "unmapped under a kernel");
            }
            hold(false);
            asleep.join().unwrap().unwrap();
        });
        cuda.enter(0);
        tags.wake("null").unwrap();
        cuda.expect(second, 5, 2 * MIB);
        let first = tags.allocate("a", 200);
        hold(true);
        cuda.fill(first, 6, 200 * MIB, elsewhere);
        cuda.enter(0);
        tags.free(first);
        std::thread::scope(|scope| {
            scope.spawn(|| hold(false));
            // The heap of the device gets the memory when the peer's work is complete.
            let made = tags.torch.malloc(isize::try_from(200 * MIB).unwrap(), cuda.stream());
            assert_ne!(made, 0);
        });
    }
}
