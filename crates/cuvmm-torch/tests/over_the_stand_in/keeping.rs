//! Memory under tags that a discarding sleep keeps, timeouts, and memory that goes back to the
//! driver, over the stand-in for libcuda.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::{null, null_mut, without_provenance};

use crate::common::tags::{KeepFn, Tags};
use crate::common::{Cuda, Handle, MIB, over_the_stand_in, refused};

fn end(tags: &Tags, token: u64) {
    let end: unsafe extern "C" fn(u64) = tags.torch.function("cuvmm_keep_end");
    // SAFETY: it takes any number.
    unsafe { end(token) };
}

fn kept(tags: &Tags) -> u64 {
    tags.torch.number("cuvmm_stats", "kept")
}

/// Allocates some bytes under the tag `a`.
fn allocate(tags: &Tags, size: usize) -> usize {
    // SAFETY: the text is terminated, and streams have no requirement.
    unsafe {
        assert_eq!((tags.enter)(c"a".as_ptr()), 0);
        let address = (tags.malloc)(size.try_into().unwrap(), 0, null_mut()).addr();
        (tags.leave)();
        address
    }
}

/// The name of the tag of an address; empty for memory of none.
fn tag_of(tags: &Tags, address: usize) -> String {
    let write: unsafe extern "C" fn(*const c_void, *mut c_char, usize) -> usize =
        tags.torch.function("cuvmm_tag_of");
    let mut text = [0_u8; 16];
    // SAFETY: the buffer has this number of bytes.
    let length = unsafe { write(without_provenance(address), text.as_mut_ptr().cast(), 16) };
    String::from_utf8(text[..length.saturating_sub(1)].to_vec()).unwrap()
}

/// Puts all tags to sleep with their contents discarded, lets other memory be written, and wakes them.
fn sleep_and_wake(tags: &Tags, cuda: &Cuda, stream: Handle) {
    tags.sleep("null", false).unwrap();
    let other = tags.torch.mib(230, stream);
    cuda.fill(other, 0xEE, 230 * MIB, stream);
    tags.torch.free(other, stream);
    cuda.synchronize(stream);
    tags.torch.reset();
    tags.wake("null").unwrap();
}

over_the_stand_in! {
    marked_memory_is_kept [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let stream = cuda.stream();
        let (whole, other) = (allocate(&tags, 6 * MIB), allocate(&tags, 4 * MIB));
        let (small, beside) = (allocate(&tags, 1000), allocate(&tags, 2000));
        for (address, byte, size) in [(whole, 1, 6 * MIB), (other, 2, 4 * MIB), (small, 3, 1000), (beside, 4, 2000)] {
            cuda.fill(address, byte, size, stream);
        }
        cuda.synchronize(stream);
        // Within an allocation, as PyTorch divides it; two of them overlap.
        let first = tags.keep(whole + MIB, 2 * MIB).unwrap();
        let second = tags.keep(whole + 2 * MIB, 3 * MIB).unwrap();
        let part = tags.keep(small, 1000).unwrap();
        assert_eq!(kept(&tags), 4 * MIB as u64 + 1000);
        for _ in 0..2 {
            sleep_and_wake(&tags, &cuda, stream);
            cuda.expect(whole + MIB, 1, 4 * MIB);
            cuda.expect(small, 3, 1000);
            // What is not marked is as new, and no bytes of others are there.
            cuda.expect(other, 0, 4 * MIB);
            cuda.expect(whole, 0, MIB);
            cuda.expect(beside, 0, 2000);
        }
        // Two parts for the large block, and one for the shared one.
        assert_eq!(tags.host(), 6);
        end(&tags, second);
        end(&tags, second);
        assert_eq!(kept(&tags), 2 * MIB as u64 + 1000);
        sleep_and_wake(&tags, &cuda, stream);
        cuda.expect(whole + MIB, 1, 2 * MIB);
        cuda.expect(whole + 3 * MIB, 0, 2 * MIB);
        // A mark ends with its allocation, asleep too. The next one there has none.
        tags.keep(beside, 2000).unwrap();
        tags.sleep("null", false).unwrap();
        tags.free(small);
        assert_eq!(kept(&tags), 2 * MIB as u64 + 2000);
        tags.wake("null").unwrap();
        cuda.expect(beside, 0, 2000);
        tags.free(whole);
        assert_eq!(kept(&tags), 2000);
        for token in [first, part] {
            end(&tags, token);
        }
        tags.free(beside);
        assert_eq!(kept(&tags), 0);
        sleep_and_wake(&tags, &cuda, stream);
        tags.free(other);
        tags.torch.reset();
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
    }

    only_memory_under_a_tag_is_marked [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let (first, second) = (allocate(&tags, 4 * MIB), allocate(&tags, 700));
        let heap = tags.torch.malloc(isize::try_from(MIB).unwrap(), cuda.stream());
        for (address, size) in [
            (0, 1), (heap, 1), (first - 1, 2), (first, 4 * MIB + 1), (first + 4 * MIB, 1),
            (second, 701), (second + 700, 1), (usize::MAX, usize::MAX),
        ] {
            refused(tags.keep(address, size), "no pool has the memory");
        }
        let names = [(first, "a"), (first + 4 * MIB - 1, "a"), (second + 699, "a"), (second + 700, ""), (heap, "")];
        for (address, name) in names {
            assert_eq!(tag_of(&tags, address), name, "{address:#x}");
        }
        let function: KeepFn = tags.torch.function("cuvmm_keep");
        // SAFETY: a null address is allowed.
        let code = unsafe { function(without_provenance(first), 1, null_mut()) };
        assert!(tags.outcome(code).unwrap_err().contains("null address"));
        end(&tags, 77);
        tags.sleep("null", false).unwrap();
        refused(tags.keep(first, 1), "the tag \"a\" is asleep");
        tags.wake("null").unwrap();
        assert_eq!((kept(&tags), tags.host()), (0, 0));
        tags.keep(first, 4 * MIB).unwrap();
        // Too little host memory for what is marked.
        tags.limit_host(2);
        refused(tags.sleep("null", false), "cannot keep 4 MiB");
        assert_eq!(tags.asleep(), "[]");
    }

    sleep_and_wake_wait_as_long_as_they_are_told ["CUVMM_TORCH_LIMIT" = "64MiB"] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let sleep: unsafe extern "C" fn(*const c_char, c_int, f64) -> c_int =
            tags.torch.function("cuvmm_sleep_within");
        let wake: unsafe extern "C" fn(*const c_char, f64) -> c_int =
            tags.torch.function("cuvmm_wake_within");
        // SAFETY: null stands for all tags, and no work uses memory that sleeps.
        let sleep = |seconds| tags.outcome(unsafe { sleep(null(), 1, seconds) });
        // SAFETY: null stands for all tags.
        let wake = |seconds| tags.outcome(unsafe { wake(null(), seconds) });
        let stream = cuda.stream();
        let address = allocate(&tags, 40 * MIB);
        cuda.hold(stream, true);
        cuda.fill(address, 5, 40 * MIB, stream);
        refused(sleep(0.0), "work may use 1 block");
        assert_eq!(tags.asleep(), "[]");
        cuda.hold(stream, false);
        cuda.synchronize(stream);
        for wrong in [-1.0, f64::NAN, f64::NEG_INFINITY] {
            assert!(sleep(wrong).unwrap_err().contains("must not be negative"));
            assert!(wake(wrong).unwrap_err().contains("must not be negative"));
        }
        sleep(f64::INFINITY).unwrap();
        let other = tags.torch.mib(40, stream);
        refused(wake(0.0), "cannot wake 40 MiB");
        tags.torch.free(other, stream);
        cuda.synchronize(stream);
        wake(1e300).unwrap();
        cuda.expect(address, 5, 40 * MIB);
    }

    what_is_free_goes_back_to_the_driver [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let trim: unsafe extern "C" fn(c_int, *mut u64) -> c_int = tags.torch.function("cuvmm_trim");
        let mut bytes = 7;
        // SAFETY: the number can be written.
        let mut trim = |device| tags.outcome(unsafe { trim(device, &raw mut bytes) }).map(|()| bytes);
        assert_eq!(trim(0), Ok(0), "no heap yet");
        assert_eq!(trim(-1), Ok(0));
        let stream = cuda.stream();
        let (first, second) = (allocate(&tags, 32 * MIB), allocate(&tags, 16 * MIB));
        cuda.hold(stream, true);
        cuda.fill(first, 1, 32 * MIB, stream);
        cuda.fill(second, 2, 16 * MIB, stream);
        tags.free(first);
        let (before, mut mapped) = (cuda.physicals_and_mappings(), Vec::new());
        let handle = stream.expose_provenance();
        std::thread::scope(|scope| {
            let trimmed = scope.spawn(|| {
                cuda.enter(0);
                trim(0)
            });
            for _ in 0..100 {
                std::thread::yield_now();
                mapped.push(cuda.physicals_and_mappings());
            }
            cuda.hold(std::ptr::with_exposed_provenance_mut(handle), false);
            assert_eq!(trimmed.join().unwrap(), Ok(32 << 20));
        });
        assert_eq!(mapped, [before; 100], "unmapped under a kernel");
        assert_ne!(cuda.physicals_and_mappings(), before);
        cuda.expect(second, 2, 16 * MIB);
    }
}
