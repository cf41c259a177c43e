//! Pools of graphs and the captures that they are opened for, over the stand-in for libcuda.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};

use crate::common::graphs::Graphs;
use crate::common::sharing::Sharing;
use crate::common::tags::Tags;
use crate::common::{Cuda, Handle, MIB, Torch, compiled, loaded, over_the_stand_in, refused};

fn size(bytes: usize) -> isize {
    isize::try_from(bytes).unwrap()
}

/// Runs a function on another thread, with the context of a device.
fn elsewhere<T: Send>(cuda: Cuda, device: c_int, body: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            cuda.enter(device);
            body()
        });
        thread.join().unwrap()
    })
}

over_the_stand_in! {
    a_second_capture_into_an_open_pool_is_refused [] says [] {
        // The address of the function that opens a pool, first.
        type Begin = unsafe extern "C" fn(usize, u64, u64, Handle, *mut c_char, usize) -> c_int;
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let graphs = Graphs::of(&torch, &cuda);
        let (first, second) = (cuda.stream(), cuda.stream());
        let folder = tempfile::tempdir().unwrap();
        let options = ["-Wl,-soname,libc10.so"];
        let Some(c10) = compiled(folder.path(), "c10.cpp", "libc10.so", &options) else {
            return;
        };
        // SAFETY: the function has this type.
        let begin = unsafe { *loaded(c10).get::<Begin>("c10_begin").unwrap() };
        let opener: usize = torch.function("cuvmm_begin_allocate_to_pool");
        let begin = |stream| {
            let mut text = [0; 4096];
            // SAFETY: the text is written to a local of this length.
            let code = unsafe { begin(opener, 0, 1, stream, text.as_mut_ptr(), text.len()) };
            // SAFETY: the text is terminated, if there is one.
            (code, unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap().to_owned())
        };
        assert_eq!(begin(first), (0, String::new()));
        graphs.start(first);
        for round in 0..2 {
            let (code, text) = begin(second);
            assert_eq!(code, 2, "{text}");
            assert!(text.starts_with("already recording to the memory pool (0, 1)"), "{text}");
            assert!(text.contains("raised from cuvmm_begin_allocate_to_pool"), "{text}");
            assert!(torch.last_error().starts_with("already recording"), "{}", torch.last_error());
            // The first capture has its pool as before, and the other stream has none.
            let mine = torch.malloc(size(4 * MIB), first);
            assert_eq!(torch.figure("live"), round * 4 * MIB as u64);
            assert_ne!(torch.malloc(size(4 * MIB), second), 0);
            assert_eq!(torch.figure("live"), (round + 1) * 4 * MIB as u64);
            torch.free(mine, first);
        }
        // Another thread is refused too.
        let (handle, begin) = (second.expose_provenance(), &begin);
        let refused = elsewhere(cuda, 0, move || begin(std::ptr::with_exposed_provenance_mut(handle)));
        assert_eq!(refused.0, 2);
        assert_eq!(graphs.stop(first), 0);
        graphs.end(1);
        assert_eq!(begin(second).0, 0, "the pool is closed");
        graphs.end(1);
        // It has the two users that it was opened for.
        torch.reset();
        let before = cuda.physicals_and_mappings().0;
        graphs.release(1);
        torch.reset();
        assert_eq!(cuda.physicals_and_mappings().0, before, "a user is left");
        graphs.release(1);
        torch.reset();
        assert!(cuda.physicals_and_mappings().0 < before, "the last user has gone");
    }

    a_second_capture_without_pytorch_is_an_error [] says [
        "memory pool (0, 1) of device 0: already recording to the memory pool (0, 1)",
        "memory pool (0, 1) of device 0: the memory pool (0, 1) is not open",
        "memory pool (0, 1) of device 0: there is no memory pool (0, 1)",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let graphs = Graphs::of(&torch, &cuda);
        let stream = cuda.stream();
        graphs.begin(1, stream);
        graphs.begin(1, stream);
        assert!(torch.last_error().contains("already recording"), "{}", torch.last_error());
        graphs.end(1);
        graphs.end(1);
        graphs.release(1);
        graphs.release(1);
    }

    captures_that_failed_disable_nothing [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let (graphs, sharing) = (Graphs::of(&torch, &cuda), Sharing::of(torch));
        let stream = cuda.stream();
        graphs.fail(1, stream, || {});
        graphs.fail(2, stream, || {
            let address = torch.malloc(size(20 * MIB), stream);
            assert_ne!(address, 0);
            assert_eq!(torch.figure("live"), 0, "it is of the pool");
            torch.free(address, stream);
        });
        for id in 3..6 {
            graphs.capture(id, stream, || {
                let address = torch.malloc(size(20 * MIB), stream);
                cuda.fill(address, 7, 20 * MIB, stream);
                torch.free(address, stream);
            });
            graphs.release(id);
        }
        // Only what lives is left: no memory of a pool of graphs, and none that waits for its end.
        torch.reset();
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
        let source = torch.malloc(size(4 * MIB), stream);
        cuda.fill(source, 3, 4 * MIB, stream);
        assert_eq!(sharing.publish(&sharing.request("model", source, 4 * MIB)), Ok(1));
    }

    the_filter_of_a_capture_that_failed_is_not_called_again [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let graphs = Graphs::of(&torch, &cuda);
        let (stream, other) = (cuda.stream(), cuda.stream());
        graphs.fail(1, stream, || {
            assert_ne!(torch.malloc(4096, stream), 0);
            assert_eq!(torch.figure("live"), 0, "it is of the pool");
        });
        // The graph may be gone now.
        assert_ne!(torch.malloc(4096, stream), 0);
        assert_ne!(torch.malloc(4096, other), 0);
        assert_eq!(torch.figure("live"), 2 * 4096, "it is of no pool");
        assert_eq!(graphs.filters(), (1, true));
        torch.reset();
        assert_eq!(graphs.filters(), (1, false), "the pool is closed");
        // Nothing was allocated after the next failure when another thread captures on the stream.
        graphs.fail(1, stream, || assert_ne!(torch.malloc(4096, stream), 0));
        let handle = stream.expose_provenance();
        elsewhere(cuda, 0, move || {
            let stream = std::ptr::with_exposed_provenance_mut(handle);
            graphs.capture(2, stream, || {
                assert_ne!(torch.malloc(4096, stream), 0);
                assert_ne!(torch.malloc(4096, null_mut()), 0);
            });
        });
        assert_eq!(graphs.filters().0, 4, "of the other thread's filter, twice");
    }

    a_pool_whose_capture_failed_is_opened_again [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let graphs = Graphs::of(&torch, &cuda);
        let stream = cuda.stream();
        let handle = stream.expose_provenance();
        let allocate = move |stream| {
            let address = torch.malloc(size(8 * MIB), stream);
            assert_eq!(torch.figure("live"), 0, "it is of the pool");
            torch.free(address, stream);
        };
        for _ in 0..3 {
            graphs.fail(1, stream, || allocate(stream));
        }
        // Another thread, whose capture runs while the end of the failed one comes late.
        elsewhere(cuda, 0, move || {
            let stream = std::ptr::with_exposed_provenance_mut(handle);
            graphs.begin(1, stream);
            graphs.start(stream);
            allocate(stream);
        });
        graphs.end(1);
        allocate(stream);
        elsewhere(cuda, 0, move || graphs.end(1));
        let address = torch.malloc(size(8 * MIB), stream);
        assert_eq!(torch.figure("live"), 8 * MIB as u64, "the pool is closed");
        torch.free(address, stream);
        // The two users that are left: the end that came late, and the other thread's.
        graphs.release(1);
        torch.reset();
        assert!(cuda.physicals_and_mappings().0 > 0, "a user is left");
        graphs.release(1);
    }

    a_capture_is_over_when_none_of_its_streams_captures [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let graphs = Graphs::of(&torch, &cuda);
        let (one, two) = (cuda.stream(), cuda.stream());
        let begin: unsafe extern "C" fn(c_int, [u64; 2], *const c_void) =
            torch.function("cuvmm_begin_allocate_to_pool");
        // SAFETY: a null function accepts all streams.
        unsafe { begin(0, [0, 1], null()) };
        let of_the_pool = |stream| {
            let before = torch.figure("live");
            assert_ne!(torch.malloc(size(4 * MIB), stream), 0);
            torch.figure("live") == before
        };
        for stream in [one, two] {
            graphs.start(stream);
            assert!(of_the_pool(stream));
        }
        assert_eq!(graphs.stop(one), 0);
        assert!(of_the_pool(two));
        assert_eq!(graphs.stop(two), 0);
        assert!(!of_the_pool(two));
        graphs.end(1);
    }

    a_pool_without_a_capture_keeps_nothing_from_waiting [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let (graphs, sharing) = (Graphs::of(&torch, &cuda), Sharing::of(torch));
        let stream = cuda.stream();
        graphs.begin(1, stream);
        let refused = sharing.publish(&sharing.request("model", 4096, 4096)).unwrap_err();
        assert!(refused.1.contains("a graph is captured"), "{}", refused.1);
        let source = torch.malloc(size(4 * MIB), stream);
        cuda.fill(source, 3, 4 * MIB, stream);
        assert_eq!(sharing.publish(&sharing.request("model", source, 4 * MIB)), Ok(1));
        let number = sharing.attach("model", Some(&sharing.path())).unwrap();
        // A capture that allocates is one nevertheless.
        graphs.start(stream);
        assert_ne!(torch.malloc(4096, stream), 0);
        let refused = sharing.detach(number).unwrap_err();
        assert!(refused.1.contains("a graph is captured"), "{}", refused.1);
        assert_eq!(graphs.stop(stream), 0);
        assert_eq!(sharing.detach(number), Ok(0));
        graphs.end(1);
        graphs.release(1);
    }

    a_copy_on_a_stream_that_captures_is_refused_and_breaks_nothing [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let graphs = Graphs::of(&torch, &cuda);
        let stream = cuda.stream();
        let address = torch.malloc(size(4096), stream);
        let write: unsafe extern "C" fn(c_int, u64, *const u8, usize, Handle) -> c_int =
            torch.function("cuvmm_write");
        let read: unsafe extern "C" fn(c_int, *mut u8, u64, usize, Handle) -> c_int =
            torch.function("cuvmm_read");
        let mut bytes = [5_u8; 64];
        // SAFETY: both ranges have the size that is passed.
        let mut copy = |writes: bool| unsafe {
            match writes {
                true => write(0, address as u64, bytes.as_ptr(), 64, stream),
                false => read(0, bytes.as_mut_ptr(), address as u64, 64, stream),
            }
        };
        assert_eq!((copy(true), copy(false)), (0, 0));
        // Of another library: no pool is open for it.
        graphs.start(stream);
        for writes in [true, false] {
            assert_eq!(copy(writes), -1);
            assert!(torch.last_error().contains("a graph is captured"), "{}", torch.last_error());
        }
        assert_eq!(graphs.stop(stream), 0, "the capture was broken");
        assert_eq!((copy(true), copy(false)), (0, 0));
        let theirs = cuda.stream();
        graphs.start(theirs);
        assert_eq!(copy(true), 0, "{}", torch.last_error());
        assert_eq!(graphs.stop(theirs), 0, "the capture was broken");
    }

    a_wait_for_a_stream_breaks_no_capture [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let graphs = Graphs::of(&torch, &cuda);
        let per_thread: Handle = std::ptr::without_provenance_mut(2);
        let [stream, other] = [(); 2].map(|()| cuda.stream());
        assert_ne!(torch.malloc(4096, stream), 0);
        let wait: unsafe extern "C" fn(c_int, Handle) -> c_int = torch.function("cuvmm_synchronize");
        let settle: unsafe extern "C" fn(c_int, Handle) -> c_int = torch.function("cuvmm_settle");
        // Of another library: no pool is open for it.
        for captures in [stream, per_thread] {
            graphs.start(captures);
            // SAFETY: the streams are alive.
            unsafe {
                assert_eq!((wait(0, other), settle(0, other)), (0, 0));
                assert_eq!((wait(0, stream) == 0, settle(0, stream) == 0), (captures != stream, captures != stream));
                assert_eq!(settle(0, captures), 1);
                assert_eq!(settle(0, per_thread), c_int::from(captures == per_thread));
            }
            assert_eq!(graphs.stop(captures), 0, "the capture was broken");
            // SAFETY: the stream is alive.
            unsafe { assert_eq!((settle(0, stream), settle(0, per_thread)), (0, 0)) };
        }
    }

    what_waits_is_put_off_or_refused_while_a_graph_is_captured ["CUVMM_TORCH_MAPPER" = "off"] says [
        "allocation of 200 MiB on device 0 failed: a capture is running, and only memory that needs",
    ] {
        let (torch, cuda, tags) = (Torch::load(), Cuda::load(), Tags::load());
        let (graphs, sharing) = (Graphs::of(&torch, &cuda), Sharing::of(torch));
        let stream = cuda.stream();
        let source = torch.malloc(size(4 * MIB), stream);
        cuda.fill(source, 3, 4 * MIB, stream);
        for name in ["one", "two"] {
            assert_eq!(sharing.publish(&sharing.request(name, source, 4 * MIB)), Ok(1));
        }
        let number = sharing.attach("one", Some(&sharing.path())).unwrap();
        let (tagged, freed) = (tags.allocate("a", 8), tags.allocate("b", 100));
        assert!(tagged != 0 && freed != 0);
        let released = graphs.capture(1, stream, || torch.malloc(size(8 * MIB), stream));
        torch.free(released, stream);
        graphs.capture(2, stream, || {
            let captured = |outcome: Result<u64, (c_int, String)>| {
                let (code, text) = outcome.unwrap_err();
                assert_eq!(code, -1);
                assert!(text.contains("a graph is captured"), "{text}");
            };
            let tagged = |outcome: Result<(), String>| captured(outcome.map(|()| 0).map_err(|text| (-1, text)));
            let before = cuda.physicals_and_mappings();
            for _ in 0..2 {
                captured(sharing.detach(number));
            }
            assert_eq!(sharing.describe(number)["name"], "one");
            captured(sharing.publish(&sharing.request("two", source, 4 * MIB)));
            tagged(tags.sleep(r#"["a"]"#, true));
            tagged(tags.wake("null"));
            // SAFETY: the stream is alive.
            let waited = unsafe {
                let wait: unsafe extern "C" fn(c_int, Handle) -> c_int =
                    torch.function("cuvmm_synchronize");
                wait(0, stream)
            };
            captured(sharing.outcome(waited, 0));
            assert_eq!(sharing.withdraw("two"), Ok(0));
            graphs.release(1);
            // Memory that was freed under a tag waits for all work of the device.
            tags.free(freed);
            let other = elsewhere(cuda, 0, move || torch.malloc(size(200 * MIB), null_mut()));
            assert_eq!(other, 0);
            torch.reset();
            assert!(cuda.physicals_and_mappings().0 >= before.0 - 1, "memory went back");
        });
        graphs.release(2);
        // Everything that was put off is done by the next call that may wait.
        torch.reset();
        let (code, text) = sharing.detach(number).unwrap_err();
        assert!(code == -1 && text.contains("nothing is attached under the number"), "{text}");
        assert_eq!(torch.figure("published"), 4 * MIB as u64, "one version is left");
        assert_ne!(torch.malloc(size(200 * MIB), stream), 0);
    }

    the_pools_of_other_devices_break_no_capture_either ["CUVMM_TORCH_MAPPER" = "off"] says [
        "allocation of 200 MiB under a tag on device 1 failed: a capture is running",
    ] {
        let (torch, cuda, tags) = (Torch::load(), Cuda::load(), Tags::load());
        let graphs = Graphs::of(&torch, &cuda);
        let first = cuda.stream();
        assert_ne!(torch.malloc(4096, first), 0);
        cuda.enter(1);
        let stream = cuda.stream();
        graphs.begin(1, stream);
        graphs.start(stream);
        // The heap of the other device is made while the capture runs.
        elsewhere(cuda, 1, move || {
            let allocate = || {
                // SAFETY: there is no requirement for a stream under a tag.
                unsafe { (tags.malloc)(size(200 * MIB), 1, null_mut()) }.addr()
            };
            let address = allocate();
            assert_ne!(address, 0);
            tags.free(address);
            assert_eq!(allocate(), 0, "the memory waits for the device");
        });
        assert_eq!(graphs.stop(stream), 0, "the capture was broken");
        graphs.end(1);
    }

    a_capture_begins_when_no_thread_waits_for_a_device [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let (graphs, sharing) = (Graphs::of(&torch, &cuda), Sharing::of(torch));
        let (stream, busy) = (cuda.stream(), cuda.stream());
        let source = torch.malloc(size(4 * MIB), busy);
        cuda.hold(busy, true);
        cuda.fill(source, 3, 4 * MIB, busy);
        let (handle, held) = (stream.expose_provenance(), busy.expose_provenance());
        std::thread::scope(|scope| {
            let published = scope.spawn(|| {
                cuda.enter(0);
                sharing.publish(&sharing.request("model", source, 4 * MIB))
            });
            // Its memory is there: it waits for the device, or is about to.
            while torch.figure("published") == 0 {
                std::thread::yield_now();
            }
            let captured = scope.spawn(move || {
                cuda.enter(0);
                let stream = std::ptr::with_exposed_provenance_mut(handle);
                graphs.capture(1, stream, || {
                    // It began when the publication was complete.
                    assert!(published.is_finished() || published.join().unwrap() == Ok(1));
                });
            });
            for _ in 0..1000 {
                std::thread::yield_now();
            }
            cuda.hold(std::ptr::with_exposed_provenance_mut(held), false);
            captured.join().unwrap();
        });
    }

    a_pool_that_is_open_around_a_capture_stays_open [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let graphs = Graphs::of(&torch, &cuda);
        let stream = cuda.stream();
        let allocate = |stream| {
            assert_ne!(torch.malloc(4096, stream), 0);
            assert_eq!(torch.figure("live"), 0, "it is of a pool");
        };
        graphs.begin(1, stream);
        allocate(stream);
        // The stream captures for the inner pool, whose filter accepts it. What runs is asked meanwhile.
        graphs.capture(2, stream, || {
            allocate(stream);
            torch.reset();
        });
        allocate(stream);
        torch.reset();
        allocate(stream);
        graphs.end(1);
        for id in [1, 2] {
            graphs.release(id);
        }
    }

    a_pool_of_a_thread_that_has_ended_keeps_nothing_from_waiting [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let (graphs, sharing) = (Graphs::of(&torch, &cuda), Sharing::of(torch));
        let (source, handle) = (torch.malloc(size(4 * MIB), null_mut()), cuda.stream().expose_provenance());
        // Its capture failed before anything was allocated for it.
        elsewhere(cuda, 0, move || graphs.begin(1, std::ptr::with_exposed_provenance_mut(handle)));
        assert_eq!(sharing.publish(&sharing.request("model", source, 4 * MIB)), Ok(1));
    }

    the_end_of_a_failed_capture_leaves_another_one_open [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let graphs = Graphs::of(&torch, &cuda);
        let (first, second) = (cuda.stream(), cuda.stream());
        let handle = first.expose_provenance();
        elsewhere(cuda, 0, move || {
            let stream = std::ptr::with_exposed_provenance_mut(handle);
            graphs.fail(1, stream, || assert_ne!(torch.malloc(4096, stream), 0));
        });
        graphs.capture(1, second, || {
            // By a thread that has opened no pool.
            elsewhere(cuda, 0, move || graphs.end(1));
            assert_ne!(torch.malloc(4096, second), 0);
            assert_eq!(torch.figure("live"), 0, "it is of the pool");
        });
    }

    a_capture_does_not_wait_for_work_that_a_tag_sleeps_behind [] says [] {
        let (torch, cuda, tags) = (Torch::load(), Cuda::load(), Tags::load());
        let graphs = Graphs::of(&torch, &cuda);
        let (stream, busy) = (cuda.stream(), cuda.stream());
        let tagged = tags.allocate("a", 8);
        cuda.hold(busy, true);
        cuda.fill(tagged, 9, 8 * MIB, busy);
        for keep in [true, false] {
            std::thread::scope(|scope| {
                let slept = scope.spawn(|| {
                    cuda.enter(0);
                    tags.sleep(r#"["a"]"#, keep)
                });
                // The tag counts as asleep while its work is waited for.
                while tags.asleep() != r#"["a"]"# {
                    std::thread::yield_now();
                }
                graphs.capture(1, stream, || {
                    refused(slept.join().unwrap(), "captur");
                });
            });
            assert_eq!(tags.asleep(), "[]");
        }
        cuda.hold(busy, false);
        cuda.synchronize(busy);
        cuda.expect(tagged, 9, 8 * MIB);
        tags.sleep(r#"["a"]"#, true).unwrap();
    }

    // Host memory for contents goes with the last allocation of a tag, also where a garbage collector ends it.
    a_tag_that_kept_contents_ends_during_a_capture [] says [] {
        let (torch, cuda, tags) = (Torch::load(), Cuda::load(), Tags::load());
        let graphs = Graphs::of(&torch, &cuda);
        let stream = cuda.stream();
        let ended = ["a", "b"].map(|tag| tags.allocate(tag, 8));
        tags.sleep("null", true).unwrap();
        tags.wake("null").unwrap();
        graphs.capture(1, stream, || {
            tags.free(ended[0]);
            elsewhere(cuda, 0, || tags.free(ended[1]));
        });
    }

    a_capture_does_not_wait_for_memory_that_a_tag_wakes_to [] says [] {
        let (torch, cuda, tags) = (Torch::load(), Cuda::load(), Tags::load());
        let graphs = Graphs::of(&torch, &cuda);
        let stream = cuda.stream();
        let tagged = tags.allocate("a", 100);
        cuda.fill(tagged, 9, 100 * MIB, null_mut());
        tags.sleep(r#"["a"]"#, true).unwrap();
        let others = torch.malloc(size(200 * MIB), null_mut());
        assert_ne!(others, 0);
        std::thread::scope(|scope| {
            let woken = scope.spawn(|| {
                cuda.enter(0);
                tags.wake("null")
            });
            for _ in 0..100_000 {
                std::thread::yield_now();
            }
            graphs.capture(1, stream, || {
                refused(woken.join().unwrap(), "captur");
            });
        });
        torch.free(others, null_mut());
        tags.wake("null").unwrap();
        assert_eq!(tags.asleep(), "[]");
    }
}

/// A driver that is asked about a destroyed stream ends the process, as that of an H100 does. It gives each
/// capture a number of its own.
mod over_a_driver_of_its_own {
    use super::*;

    fn over_the_stand_in(case: &str) {
        let case = format!("{}::{case}_in_a_process_of_its_own", module_path!());
        let lines = crate::common::run_refusing(&case, &[]).unwrap_or_default();
        assert!(lines.is_empty(), "{lines:#?}");
    }

    fn destroy(cuda: &Cuda, stream: Handle) {
        let destroy: unsafe extern "C" fn(Handle) -> c_int = cuda.function("cuStreamDestroy_v2");
        // SAFETY: the stream is alive, and its memory is not freed.
        assert_eq!(unsafe { destroy(stream) }, 0);
    }

    #[test]
    fn a_stream_that_does_not_capture_may_be_destroyed() {
        over_the_stand_in("destroyed");
    }

    #[test]
    #[ignore = "needs the stand-in; the test above runs it in a process of its own"]
    fn destroyed_in_a_process_of_its_own() {
        crate::common::case(|| {
            let (torch, cuda) = (Torch::load(), Cuda::load());
            let graphs = Graphs::of(&torch, &cuda);
            let (stream, other) = (cuda.stream(), cuda.stream());
            graphs.begin(1, stream);
            assert_ne!(torch.malloc(4096, stream), 0);
            destroy(&cuda, stream);
            graphs.capture(2, other, || assert_ne!(torch.malloc(4096, other), 0));
            graphs.end(1);
        });
    }

    #[test]
    fn a_stream_that_has_captured_may_be_destroyed_once_it_has_ended() {
        over_the_stand_in("ended");
    }

    #[test]
    #[ignore = "needs the stand-in; the test above runs it in a process of its own"]
    fn ended_in_a_process_of_its_own() {
        crate::common::case(|| {
            let (torch, cuda) = (Torch::load(), Cuda::load());
            let graphs = Graphs::of(&torch, &cuda);
            let (stream, other, third) = (cuda.stream(), cuda.stream(), cuda.stream());
            let begin: unsafe extern "C" fn(c_int, [u64; 2], *const c_void) =
                torch.function("cuvmm_begin_allocate_to_pool");
            // SAFETY: a null function accepts all streams.
            unsafe { begin(0, [0, 1], null()) };
            // A second capture keeps the pool open.
            for captured in [stream, other] {
                graphs.start(captured);
                assert_ne!(torch.malloc(4096, captured), 0);
            }
            assert_eq!(graphs.stop(stream), 0);
            let end: unsafe extern "C" fn(Handle, c_int) -> c_int =
                torch.function("cuvmm_stream_end");
            // SAFETY: the streams are alive.
            unsafe {
                assert_eq!(end(other, 1), -1, "it captures");
                assert_eq!(end(stream, 1), 0);
            }
            destroy(&cuda, stream);
            assert_ne!(torch.malloc(4096, other), 0);
            assert_eq!(torch.figure("live"), 0, "it is of the pool");
            assert_eq!(graphs.stop(other), 0);
            graphs.capture(2, third, || assert_ne!(torch.malloc(4096, third), 0));
        });
    }

    #[test]
    fn a_later_capture_on_the_stream_is_another_one() {
        over_the_stand_in("another");
    }

    #[test]
    #[ignore = "needs the stand-in; the test above runs it in a process of its own"]
    fn another_in_a_process_of_its_own() {
        crate::common::case(|| {
            let (torch, cuda) = (Torch::load(), Cuda::load());
            let graphs = Graphs::of(&torch, &cuda);
            let stream = cuda.stream();
            graphs.fail(1, stream, || assert_ne!(torch.malloc(4096, stream), 0));
            // Of no pool: the first graph may be gone when its filter would be asked.
            graphs.start(stream);
            assert_ne!(torch.malloc(4096, stream), 0);
            assert_eq!((torch.figure("live"), graphs.filters().0), (4096, 1));
            assert_eq!(graphs.stop(stream), 0);
        });
    }
}
