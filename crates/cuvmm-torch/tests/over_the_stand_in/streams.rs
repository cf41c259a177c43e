//! Streams that come and go, over the stand-in for libcuda.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{c_int, c_void};

use crate::common::{Cuda, Handle, MIB, Torch, over_the_stand_in};

fn size(bytes: usize) -> isize {
    isize::try_from(bytes).unwrap()
}

/// Calls `cuvmm_stream_end`.
fn end(torch: &Torch, stream: Handle, wait: bool) -> c_int {
    let end: unsafe extern "C" fn(*mut c_void, c_int) -> c_int = torch.function("cuvmm_stream_end");
    // SAFETY: the tests use the stream no more.
    unsafe { end(stream, c_int::from(wait)) }
}

fn destroy(cuda: &Cuda, stream: Handle) {
    let destroy: unsafe extern "C" fn(Handle) -> c_int = cuda.function("cuStreamDestroy_v2");
    // SAFETY: the tests use the stream no more.
    assert_eq!(unsafe { destroy(stream) }, 0);
}

over_the_stand_in! {
    other_memory_stays_usable_after_a_stream_was_destroyed ["CUVMM_TORCH_LIMIT" = "64MiB"] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let (stream, other) = (cuda.stream(), cuda.stream());
        let (freed, live) = (torch.malloc(size(20 * MIB), stream), torch.malloc(size(20 * MIB), stream));
        cuda.fill(freed, 1, 20 * MIB, stream);
        torch.free(freed, stream);
        assert_eq!(end(&torch, stream, true), 0);
        destroy(&cuda, stream);
        for number in 0..5000 {
            let bytes = size((number % 40 + 1) * MIB);
            let address = torch.malloc(bytes, other);
            assert_ne!(address, 0, "{number}: {}", torch.last_error());
            torch.free(address, other);
        }
        // PyTorch frees memory with the stream that it was allocated for.
        torch.free(live, stream);
        let all = torch.malloc(size(60 * MIB), other);
        assert_ne!(all, 0, "{}", torch.last_error());
        torch.free(all, other);
    }

    a_stream_that_is_busy_ends_only_if_it_is_waited_for [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let address = torch.malloc(size(8 * MIB), stream);
        cuda.hold(stream, true);
        cuda.fill(address, 1, 8 * MIB, stream);
        assert_eq!(end(&torch, stream, false), 1);
        cuda.hold(stream, false);
        assert_eq!(end(&torch, stream, true), 0);
        // It is not known any more, and no stream that is unknown is asked for.
        assert_eq!(end(&torch, stream, true), 0);
        torch.free(address, stream);
        cuda.capture(stream, || {
            let captured = torch.malloc(size(MIB), stream);
            assert_eq!(end(&torch, stream, true), -1);
            assert_eq!(end(&torch, stream, false), 1);
            torch.free(captured, stream);
        });
    }

    // Nothing is asked of the driver for that, so it may be a capture that uses the memory.
    memory_of_a_stream_that_has_ended_serves_all_at_once [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let (stream, other) = (cuda.stream(), cuda.stream());
        let freed = torch.malloc(size(20 * MIB), stream);
        cuda.fill(freed, 1, 20 * MIB, stream);
        torch.free(freed, stream);
        assert_eq!(end(&torch, stream, true), 0);
        cuda.capture(other, || assert_eq!(torch.malloc(size(20 * MIB), other), freed));
    }

    // The new stream's work is not the old one's, and the other way round.
    a_handle_that_is_used_again_is_another_stream ["CUVMM_TORCH_STREAM_WAITS" = "off"] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let (stream, other) = (cuda.stream(), cuda.stream());
        let (first, second) = (torch.malloc(size(8 * MIB), stream), torch.malloc(size(8 * MIB), stream));
        torch.free(first, stream);
        assert_eq!(end(&torch, stream, true), 0);
        // As if the driver had given the next stream the same handle.
        let next = torch.malloc(size(8 * MIB), stream);
        cuda.hold(stream, true);
        for address in [second, next] {
            cuda.fill(address, 1, 8 * MIB, stream);
            torch.free(address, stream);
        }
        let made: Vec<usize> = (0..4).map(|_| torch.malloc(size(8 * MIB), other)).collect();
        assert!(!made.contains(&next) && !made.contains(&second), "{made:?}: {second}, {next}");
        cuda.hold(stream, false);
        cuda.synchronize(stream);
        for address in made {
            torch.free(address, other);
        }
    }

    // As PyTorch's own allocator does: `test_record_stream` of its tests.
    recorded_memory_is_used_again_once_its_work_is_complete [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let (side, main) = (cuda.stream(), cuda.stream());
        // Memory beside which nothing lives may be used again at once, behind the work of both.
        let beside = torch.malloc(512, main);
        for bytes in [512, 64 << 10] {
            let first = torch.malloc(size(bytes), side);
            torch.record(first, main);
            cuda.hold(main, true);
            cuda.fill(first, 1, bytes, main);
            torch.free(first, side);
            let second = torch.malloc(size(bytes), side);
            assert_ne!(second, first, "used again too soon");
            cuda.hold(main, false);
            cuda.synchronize(main);
            let third = torch.malloc(size(bytes), side);
            assert_eq!(third, first, "not used again");
            torch.free(second, side);
            torch.free(third, side);
        }
        torch.free(beside, main);
    }

    streams_that_come_and_go_keep_nothing [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let mut most = 0;
        for _ in 0..2000 {
            let stream = cuda.stream();
            let address = torch.malloc(size(4 * MIB), stream);
            assert_ne!(address, 0, "{}", torch.last_error());
            torch.free(address, stream);
            most = most.max(torch.number("cuvmm_stats", "total.held"));
            assert_eq!(end(&torch, stream, false), 0);
            destroy(&cuda, stream);
        }
        assert!(most <= 16 << 20, "{most}");
    }

    streams_that_nothing_uses_are_dropped [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let streams: Vec<Handle> = (0..300).map(|_| cuda.stream()).collect();
        let live: unsafe extern "C" fn(*mut [u64; 8]) -> c_int = cuda.function("fakecuda_live");
        let mut events = 0;
        for &stream in &streams {
            let address = torch.malloc(size(2 * MIB), stream);
            // An event is recorded behind work that is asked for.
            cuda.hold(stream, true);
            cuda.fill(address, 1, 2 * MIB, stream);
            torch.free(address, stream);
            torch.reset();
            cuda.hold(stream, false);
            cuda.synchronize(stream);
            let mut counts = [0_u64; 8];
            // SAFETY: the counts are written to a local array of the right size.
            assert_eq!(unsafe { live(&mut counts) }, 0);
            events = events.max(counts[5]);
        }
        assert!((2..=160).contains(&events), "{events} events");
        // One that was dropped is found again.
        let address = torch.malloc(size(2 * MIB), streams[0]);
        assert_ne!(address, 0);
        torch.free(address, streams[0]);
    }
}
