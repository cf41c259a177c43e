//! The shared library, loaded as PyTorch loads it, over the stand-in for libcuda.
//!
//! `unsafe` is used to fork, to end the child, and to register a function for the exit.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, OnceLock};

use crate::common::{Cuda, MIB, Torch, default_stream, in_a_child, over_the_stand_in};

/// The size as PyTorch passes it.
fn size(bytes: usize) -> isize {
    isize::try_from(bytes).unwrap()
}

over_the_stand_in! {
    sizes [] says [
        "allocation of -1 bytes on device 0 failed: a size is not negative",
        "allocation of 4 EiB on device 0 failed: out of memory: tenant \"torch\" needs 4 EiB more, 240 MiB available (limit 240 MiB",
        "allocation of 512 MiB on device 0 failed: out of memory",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        assert_eq!(torch.json(0), "", "there is no heap yet");
        assert_eq!(torch.malloc(0, stream), 0);
        let sizes = [1, 511, 512, 513, 4097, MIB - 1, MIB + 1, 3 * MIB - 7, 21 * MIB + 13];
        let blocks: Vec<_> = sizes.iter().map(|&bytes| {
            let address = torch.malloc(size(bytes), stream);
            assert!(address != 0 && address % 512 == 0, "{bytes}: {address:#x}");
            (address, bytes)
        }).collect();
        for (&(address, bytes), byte) in blocks.iter().zip(1..) {
            cuda.fill(address, byte, bytes, stream);
        }
        cuda.synchronize(stream);
        for (&(address, bytes), byte) in blocks.iter().zip(1..) {
            cuda.expect(address, byte, bytes);
        }
        assert_eq!(torch.figure("live"), sizes.iter().sum::<usize>() as u64);
        assert_eq!(torch.figure("allocations"), sizes.len() as u64);
        for (address, _) in blocks {
            torch.free(address, stream);
        }
        assert_eq!((torch.figure("live"), torch.figure("allocations")), (0, 0));
        assert!(cuda.physicals_and_mappings().0 > 0);
        assert_eq!(torch.malloc(-1, stream), 0);
        assert_eq!(torch.malloc(1 << 62, stream), 0);
        assert_eq!(torch.malloc(size(512 * MIB), stream), 0);
        assert_eq!(torch.figure("failed"), 3);
        torch.reset();
        assert_eq!(torch.figure("held"), 0);
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
    }

    strange_addresses [] says [
        "free of 0x1234: it is not allocated here",
        ": it is not allocated here, or was freed before",
        ": it is not allocated here, or was freed before",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        torch.free(0x1234, stream);
        let address = torch.malloc(5000, stream);
        torch.free(address + 512, stream);
        assert_eq!(torch.figure("allocations"), 1);
        torch.free(address, stream);
        torch.free(address, stream);
        assert_eq!((torch.figure("live"), torch.figure("allocations")), (0, 0));
        // No message: null, and memory of another library.
        torch.free(0, stream);
        torch.record(0, stream);
        torch.record(0x1234, stream);
        let again = torch.malloc(5000, stream);
        assert_eq!(again, address);
        cuda.fill(again, 9, 5000, stream);
        cuda.synchronize(stream);
        cuda.expect(again, 9, 5000);
        torch.free(again, stream);
    }

    other_streams ["CUVMM_TORCH_LIMIT" = "64MiB", "CUVMM_TORCH_STREAM_WAITS" = "off"] says [
        "allocation of 40 MiB on device 0 failed: out of memory",
        "allocation of 40 MiB on device 0 failed: out of memory",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let (home, other) = (cuda.stream(), cuda.stream());
        let bytes = 40 * MIB;
        assert_eq!(torch.malloc(0, home), 0);
        for by_record in [false, true] {
            let address = torch.malloc(size(bytes), home);
            cuda.fill(address, 1, bytes, home);
            cuda.synchronize(home);
            cuda.hold(other, true);
            cuda.fill(address, 2, bytes, other);
            if by_record {
                torch.record(address, other);
                torch.free(address, home);
            } else {
                torch.free(address, other);
            }
            // The other stream's fill has not run.
            assert_eq!(torch.malloc(size(bytes), home), 0);
            cuda.hold(other, false);
            cuda.synchronize(other);
            let again = torch.malloc(size(bytes), home);
            assert_eq!(again, address);
            cuda.expect(again, 2, bytes);
            torch.free(again, home);
            // Freed on its home stream it is there at once.
            cuda.hold(home, true);
            let third = torch.malloc(size(bytes), home);
            cuda.fill(third, 3, bytes, home);
            torch.free(third, home);
            assert_eq!(torch.malloc(size(bytes), home), third);
            cuda.hold(home, false);
            cuda.synchronize(home);
            cuda.expect(third, 3, bytes);
            torch.free(third, home);
        }
        assert_eq!(torch.figure("failed"), 2);
        assert_eq!(torch.figure("limit"), 64 << 20);
    }

    stream_waits ["CUVMM_TORCH_LIMIT" = "64MiB", "CUVMM_TORCH_PRESET" = "fast"] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let (home, other) = (cuda.stream(), cuda.stream());
        let bytes = 40 * MIB;
        let address = torch.malloc(size(bytes), home);
        cuda.hold(home, true);
        cuda.fill(address, 1, bytes, home);
        torch.free(address, home);
        // Behind the work of the first stream, which has not run.
        let again = torch.malloc(size(bytes), other);
        assert_eq!(again, address);
        assert_eq!(torch.figure("stream_waits"), 1);
        cuda.fill(again, 2, bytes, other);
        cuda.hold(home, false);
        cuda.synchronize(other);
        cuda.expect(again, 2, bytes);
        torch.free(again, other);
    }

    default_streams [] says [
        "allocation of 1 MiB on device 0 failed: the per-thread default stream",
        "by another stream: the per-thread default stream differs between threads",
        "use the legacy default stream; the memory is not reused",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let (null, legacy, per_thread) = (default_stream(0), default_stream(1), default_stream(2));
        let bytes = 3 * MIB;
        cuda.hold(null, true);
        let address = torch.malloc(size(bytes), null);
        cuda.fill(address, 1, bytes, null);
        torch.free(address, legacy);
        // Both names are one stream: the memory is there at once, and nothing is waited for.
        assert_eq!(torch.malloc(size(bytes), legacy), address);
        torch.record(address, null);
        torch.free(address, null);
        assert_eq!(torch.malloc(size(bytes), null), address);
        cuda.hold(null, false);
        assert_eq!(torch.figure("stream_waits"), 0);
        assert_eq!(torch.malloc(size(MIB), per_thread), 0);
        // A caller that can do without the use changes nothing.
        let record: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int =
            torch.function("cuvmm_try_record_stream");
        // SAFETY: streams are named that are there.
        let record = |address, stream| unsafe { record(std::ptr::without_provenance_mut(address), stream) };
        assert_eq!(record(address, per_thread), -1);
        assert!(torch.last_error().contains("per-thread"), "{}", torch.last_error());
        assert_eq!((record(address, legacy), record(0x1234, null)), (0, -1));
        torch.free(address, null);
        assert_eq!(torch.malloc(size(bytes), null), address);
        // Work that cannot be waited for keeps the memory for good.
        torch.record(address, per_thread);
        torch.free(address, null);
        let next = torch.malloc(size(bytes), null);
        assert_ne!(next, address);
        assert_eq!(torch.figure("live"), 2 * bytes as u64);
        torch.free(next, per_thread);
        assert_ne!(torch.malloc(size(bytes), null), next);
        assert_eq!(torch.figure("live"), 3 * bytes as u64);
    }

    bad_preset ["CUVMM_TORCH_PRESET" = "quick"] says [
        "allocation of 512 B on device 0 failed: the environment variable CUVMM_TORCH_PRESET is \"quick\": it must be tight or fast",
    ] { refused(); }

    bad_aliases ["CUVMM_TORCH_ALIASES" = "yes"] says [
        "the environment variable CUVMM_TORCH_ALIASES is \"yes\": it must be on or off",
    ] { refused(); }

    bad_waits ["CUVMM_TORCH_STREAM_WAITS" = "0"] says [
        "the environment variable CUVMM_TORCH_STREAM_WAITS is \"0\": it must be on or off",
    ] { refused(); }

    bad_limit ["CUVMM_TORCH_LIMIT" = "most of it"] says [
        "the environment variable CUVMM_TORCH_LIMIT is \"most of it\": it must be a size",
    ] { refused(); }

    large_limit ["CUVMM_TORCH_LIMIT" = "1TiB"] says [
        "the environment variable CUVMM_TORCH_LIMIT is 1 TiB: the device allows 2 MiB to 256 MiB",
    ] { refused(); }

    small_limit ["CUVMM_TORCH_LIMIT" = "4096"] says [
        "the environment variable CUVMM_TORCH_LIMIT is 4 KiB: the device allows 2 MiB to 256 MiB",
    ] { refused(); }

    no_device ["FAKECUDA_DEVICES" = "0"] says ["CUDA_ERROR_NO_DEVICE"] {
        let torch = Torch::load();
        assert_eq!(torch.malloc(512, null_mut()), 0);
        assert_eq!(torch.json(0), "");
    }

    empty_variables ["CUVMM_TORCH_LIMIT" = "", "CUVMM_TORCH_PRESET" = "", "CUVMM_TORCH_ALIASES" = ""] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        assert_ne!(torch.malloc(512, cuda.stream()), 0);
        // A sixteenth of a small device stays free.
        assert_eq!(torch.figure("limit"), 240 << 20);
    }

    two_devices ["CUVMM_TORCH_LIMIT" = "64MiB"] says [
        "allocation of 48 MiB on device 1 failed: out of memory",
        "allocation of 512 B on device 2 failed: ",
        "allocation of 512 B on device 64 failed: devices are numbered from 0 to 63",
        "allocation of 512 B on device -1 failed: devices are numbered from 0 to 63",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let first = cuda.stream();
        cuda.enter(1);
        let second = cuda.stream();
        let bytes = 48 * MIB;
        // The context of the other device is current.
        let on_first = torch.malloc_on(0, size(bytes), first);
        let on_second = torch.malloc_on(1, size(bytes), second);
        assert!(on_first != 0 && on_second != 0 && on_first != on_second);
        assert_eq!(torch.malloc_on(1, size(bytes), second), 0);
        cuda.fill(on_second, 2, bytes, second);
        cuda.synchronize(second);
        cuda.expect(on_second, 2, bytes);
        cuda.enter(0);
        cuda.fill(on_first, 1, bytes, first);
        cuda.synchronize(first);
        cuda.expect(on_first, 1, bytes);
        for (device, failed) in [(0, 0), (1, 1)] {
            assert_eq!(torch.figure_of(device, "live"), bytes as u64);
            assert_eq!(torch.figure_of(device, "failed"), failed);
        }
        for device in [2, 64, -1] {
            assert_eq!(torch.malloc_on(device, 512, null_mut()), 0);
            assert_eq!(torch.json(device), "");
        }
        torch.free(on_first, first);
        torch.free(on_second, second);
        torch.reset();
        assert_eq!((torch.figure_of(0, "held"), torch.figure_of(1, "held")), (0, 0));
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
    }

    a_free_that_names_another_device_finds_the_memory [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let streams = [0, 1].map(|device| {
            cuda.enter(device);
            cuda.stream()
        });
        // Device 0 has no heap yet.
        for named in [0, 1, 2, 64, -1] {
            let address = torch.malloc_on(1, 512, streams[1]);
            torch.free_on(named, address, streams[1]);
            assert_eq!(torch.figure_of(1, "live"), 0);
        }
        let addresses = [0, 1].map(|device| torch.malloc_on(device, 512, streams[device as usize]));
        torch.record(addresses[1], streams[1]);
        for device in [0, 1] {
            assert_eq!(torch.figure_of(device, "live"), 512);
            let (other, at) = (1 - device, device as usize);
            torch.free_on(other, addresses[at], streams[at]);
            assert_eq!(torch.figure_of(device, "live"), 0);
        }
    }

    streams_of_another_device [] says [
        "allocation of 512 B on device 0 failed: the stream does not belong to the primary context of device 0",
        "by another stream: the stream does not belong to the primary context of device 0; the memory is not reused",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        cuda.enter(1);
        let elsewhere = cuda.stream();
        cuda.enter(0);
        assert_eq!(torch.malloc(512, elsewhere), 0);
        let address = torch.malloc(size(3 * MIB), stream);
        torch.record(address, elsewhere);
        torch.free(address, stream);
        // The heap could not wait for that stream's work, so the memory stays.
        assert_ne!(torch.malloc(size(3 * MIB), stream), address);
        assert_eq!(torch.figure("live"), 6 * MIB as u64);
        assert_eq!(torch.figure("allocations"), 2);
    }

    out_of_memory ["CUVMM_TORCH_LIMIT" = "100MiB"] says [
        "allocation of 20 MiB on device 0 failed: out of memory: tenant \"torch\" needs",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let blocks: Vec<_> = (0..5).map(|_| torch.malloc(size(20 * MIB), stream)).collect();
        for (&address, byte) in blocks.iter().zip(1..) {
            assert_ne!(address, 0);
            cuda.fill(address, byte, 20 * MIB, stream);
        }
        assert_eq!(torch.malloc(size(20 * MIB), stream), 0);
        torch.free(blocks[1], stream);
        torch.free(blocks[3], stream);
        // From two places, side by side at new addresses.
        let joined = torch.malloc(size(40 * MIB), stream);
        assert_ne!(joined, 0);
        cuda.fill(joined, 9, 40 * MIB, stream);
        cuda.synchronize(stream);
        cuda.expect(joined, 9, 40 * MIB);
        for at in [0, 2, 4] {
            cuda.expect(blocks[at], at as u8 + 1, 20 * MIB);
        }
        assert_eq!(torch.figure("live"), 100 << 20);
        assert!(torch.figure("mappings") > torch.figure("extents"), "{}", torch.json(0));
    }

    no_aliases ["CUVMM_TORCH_LIMIT" = "100MiB", "CUVMM_TORCH_ALIASES" = "off"] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let blocks: Vec<_> = (0..5).map(|_| torch.malloc(size(20 * MIB), stream)).collect();
        torch.free(blocks[1], stream);
        torch.free(blocks[3], stream);
        assert_ne!(torch.malloc(size(40 * MIB), stream), 0);
        assert_eq!(torch.figure("mappings"), torch.figure("extents"), "{}", torch.json(0));
    }

    threads [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let totals: u64 = std::thread::scope(|scope| {
            let run = |thread: u8| scope.spawn(move || churn(torch, cuda, thread));
            let threads: Vec<_> = (1..=8).map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(totals, 8 * 200);
        assert_eq!((torch.figure("live"), torch.figure("allocations")), (0, 0));
        assert_eq!(torch.figure("failed"), 0);
        torch.reset();
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
    }

    freed_on_another_thread [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let address = torch.malloc(size(7 * MIB), stream);
        let handle = stream.expose_provenance();
        // That thread has no current context.
        let free = move || torch.free(address, std::ptr::with_exposed_provenance_mut(handle));
        std::thread::spawn(free).join().unwrap();
        assert_eq!(torch.figure("live"), 0);
        assert_eq!(torch.malloc(size(7 * MIB), stream), address);
    }

    forked [] says [
        "allocation of 512 B on device 0 failed: this process was forked from one that uses CUDA",
        "allocation of 512 B on device 1 failed: this process was forked from one that uses CUDA",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let address = torch.malloc(size(MIB), stream);
        let code = in_a_child(|| {
            let refused = [torch.malloc(512, stream), torch.malloc_on(1, 512, null_mut())];
            torch.record(address, stream);
            torch.free(address, stream);
            torch.free(0x1234, stream);
            torch.reset();
            let synchronize: unsafe extern "C" fn(c_int, *mut c_void) -> c_int =
                torch.function("cuvmm_synchronize");
            // SAFETY: the stream is one of the device.
            let waited = unsafe { synchronize(0, stream) };
            let said = torch.last_error();
            let enter: unsafe extern "C" fn(*const c_char) -> c_int = torch.function("cuvmm_tag_enter");
            let leave: unsafe extern "C" fn() = torch.function("cuvmm_tag_leave");
            // SAFETY: the text is terminated.
            let entered = unsafe { enter(c"other".as_ptr()) };
            // A thread that the child lacks may hold the lock of tags.
            // SAFETY: it may be called at any time.
            unsafe { leave() };
            let fails = waited == -1 && entered == -1 && said.contains("was forked");
            i32::from(refused != [0, 0] || !torch.json(0).is_empty() || !fails)
        });
        assert_eq!(code, 0);
        assert_eq!(torch.figure("live"), MIB as u64);
        cuda.fill(address, 5, MIB, stream);
        cuda.synchronize(stream);
        cuda.expect(address, 5, MIB);
        torch.free(address, stream);
        assert_eq!(torch.figure("live"), 0);
    }

    forked_before_the_first_use [] says [] {
        let torch = Torch::load();
        let code = in_a_child(|| i32::from(torch.malloc(512, null_mut()) == 0));
        assert_eq!(code, 0);
        assert_ne!(torch.malloc(512, null_mut()), 0);
    }

    lost_context [] says ["allocation of 64 MiB on device 0 failed: "] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let address = torch.malloc(size(MIB), stream);
        cuda.lose();
        assert_eq!(torch.malloc(size(64 * MIB), stream), 0);
        torch.free(address, stream);
        torch.reset();
        assert_eq!(torch.figure("live"), 0);
    }

    used_while_the_process_exits [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        assert!(LIBRARY.set(torch).is_ok());
        let left = [torch.malloc(size(MIB), stream), torch.malloc(size(30 * MIB), stream)];
        assert!(left.iter().all(|&address| address != 0));
        LEFT.store(left[0], Ordering::Relaxed);
        // SAFETY: the function is part of this program.
        assert_eq!(unsafe { libc::atexit(at_exit) }, 0);
    }
}

/// The library and an address, for the function that runs at the exit.
static LIBRARY: OnceLock<Torch> = OnceLock::new();
static LEFT: AtomicUsize = AtomicUsize::new(0);

/// Frees and allocates as Python does that drops its last tensors.
extern "C" fn at_exit() {
    let torch = LIBRARY.get().unwrap();
    torch.free(LEFT.load(Ordering::Relaxed), null_mut());
    torch.reset();
    if torch.malloc(512, null_mut()) == 0 || torch.figure("live") != 30 * MIB as u64 + 512 {
        // SAFETY: it ends the process, as a failure.
        unsafe { libc::_exit(3) };
    }
}

/// Asserts that an allocation is refused, that others go on, and that there is no heap.
fn refused() {
    let (torch, cuda) = (Torch::load(), Cuda::load());
    let stream = cuda.stream();
    assert_eq!(torch.malloc(512, stream), 0);
    assert_eq!(torch.malloc(0, stream), 0);
    assert_eq!(torch.json(0), "");
    torch.reset();
}

/// Allocates and frees at random on a stream of this thread, with a byte of its own in all that is
/// live. Returns the number of allocations.
fn churn(torch: Torch, cuda: Cuda, thread: u8) -> u64 {
    cuda.enter(0);
    let stream = cuda.stream();
    let mut number = u64::from(thread);
    let mut random = || {
        number = number
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (number >> 33) as usize
    };
    let mut live: Vec<(usize, usize, u8)> = Vec::new();
    let mut made = 0;
    let check = |(address, bytes, byte): (usize, usize, u8)| {
        cuda.synchronize(stream);
        cuda.expect(address, byte, bytes);
        torch.free(address, stream);
    };
    for step in 0..200_u8 {
        let bytes = 1 + if random() % 4 == 0 {
            random() % (3 * MIB)
        } else {
            random() % 20_000
        };
        let address = torch.malloc(size(bytes), stream);
        assert_ne!(address, 0);
        made += 1;
        let byte = thread ^ step.rotate_left(3);
        cuda.fill(address, byte, bytes, stream);
        live.push((address, bytes, byte));
        if live.len() > 8 {
            let victim = random() % live.len();
            check(live.swap_remove(victim));
        }
    }
    live.into_iter().for_each(check);
    made
}

/// A collector of garbage for the cases below: it takes the lock that stands for the interpreter's, and
/// frees what is listed as garbage.
extern "C" fn collect() {
    COLLECTIONS.fetch_add(1, Ordering::SeqCst);
    if let Some(reached) = &*REACHED.lock().unwrap() {
        reached.send(()).unwrap();
    }
    let _interpreter = INTERPRETER.lock().unwrap();
    let torch = LIBRARY.get().unwrap();
    let garbage = std::mem::take(&mut *GARBAGE.lock().unwrap());
    for address in garbage {
        // A finalizer that allocates at the limit, before anything is freed.
        assert_eq!(torch.malloc(size(80 * MIB), null_mut()), 0);
        torch.free(address, null_mut());
    }
}

static COLLECTIONS: AtomicUsize = AtomicUsize::new(0);
static INTERPRETER: Mutex<()> = Mutex::new(());
static GARBAGE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// Told when a thread is within the collector.
static REACHED: Mutex<Option<Sender<()>>> = Mutex::new(None);

/// Returns the library with the collector, under a limit of 100 MiB of which 80 are allocated.
fn collected() -> (Torch, usize) {
    let (torch, cuda) = (Torch::load(), Cuda::load());
    cuda.enter(0);
    assert!(LIBRARY.set(torch).is_ok());
    set_collector(&torch, Some(collect));
    let address = torch.malloc(size(80 * MIB), null_mut());
    assert_ne!(address, 0);
    (torch, address)
}

fn set_collector(torch: &Torch, collector: Option<unsafe extern "C" fn()>) {
    let set: unsafe extern "C" fn(Option<unsafe extern "C" fn()>) =
        torch.function("cuvmm_set_collector");
    // SAFETY: the function may be called from any thread at any time.
    unsafe { set(collector) };
}

/// Allocates 80 MiB with the collector passed.
fn collecting_malloc(torch: &Torch) -> usize {
    type Passed = unsafe extern "C" fn();
    let malloc: unsafe extern "C" fn(isize, c_int, *mut c_void, Passed) -> *mut c_void =
        torch.function("cuvmm_collecting_malloc");
    // SAFETY: the stream is the default one, and the function may be called from any thread.
    unsafe { malloc(size(80 * MIB), 0, null_mut(), collect) }.addr()
}

/// Has the collector say that a thread is within it.
fn reached() -> Receiver<()> {
    let (tell, told) = channel();
    *REACHED.lock().unwrap() = Some(tell);
    told
}

over_the_stand_in! {
    garbage_is_collected_once_for_each_request_that_lacks_memory ["CUVMM_TORCH_LIMIT" = "100MiB"] says [
        "allocation of 80 MiB on device 0 failed",
        "allocation of 80 MiB on device 0 failed",
    ] {
        let (torch, address) = collected();
        GARBAGE.lock().unwrap().push(address);
        // The finalizer's own request fails, and begins no collection within this one.
        let again = torch.malloc(size(80 * MIB), null_mut());
        assert_ne!(again, 0);
        assert_eq!(COLLECTIONS.load(Ordering::SeqCst), 1);
        assert_eq!(torch.malloc(size(80 * MIB), null_mut()), 0, "there is no garbage");
        assert_eq!(COLLECTIONS.load(Ordering::SeqCst), 2);
        assert_ne!(torch.malloc(size(10 * MIB), null_mut()), 0, "memory is not short");
        assert_eq!(COLLECTIONS.load(Ordering::SeqCst), 2);
        assert_eq!(torch.figure("failed"), 2);
    }

    garbage_is_not_collected_for_others ["CUVMM_TORCH_LIMIT" = "100MiB"] says [
        "allocation of 80 MiB on device 0 failed: out of memory",
        " under a tag on device 0 failed: out of memory",
        "failed: out of memory",
        "gc.collect()",
    ] {
        let (torch, _address) = collected();
        let attempt: unsafe extern "C" fn(isize, c_int, *mut c_void) -> *mut c_void =
            torch.function("cuvmm_try_malloc");
        // SAFETY: the stream is the default one.
        unsafe { assert!(attempt(size(80 * MIB), 0, null_mut()).is_null()) };
        let enter: unsafe extern "C" fn(*const c_char) -> c_int = torch.function("cuvmm_tag_enter");
        let leave: unsafe extern "C" fn() = torch.function("cuvmm_tag_leave");
        // SAFETY: the text ends with a zero byte.
        unsafe { assert_eq!(enter(c"tag".as_ptr()), 0) };
        assert_eq!(torch.malloc(size(80 * MIB), null_mut()), 0);
        let tagged: unsafe extern "C" fn(isize, c_int, *mut c_void) -> *mut c_void =
            torch.function("cuvmm_tag_malloc");
        // SAFETY: the stream is not used.
        unsafe { assert!(tagged(size(80 * MIB), 0, null_mut()).is_null()) };
        // SAFETY: it takes no arguments.
        unsafe { leave() };
        // A capture may begin: a pool of graphs is open, and has accepted no stream yet.
        let begin: unsafe extern "C" fn(c_int, [u64; 2], *const c_void) =
            torch.function("cuvmm_begin_allocate_to_pool");
        // SAFETY: a pair of numbers is passed as an array of two, and there is no filter.
        unsafe { begin(0, [1, 2], null_mut()) };
        assert_eq!(torch.malloc_on(0, size(80 * MIB), null_mut()), 0);
        set_collector(&torch, None);
        assert_eq!(torch.malloc(size(80 * MIB), null_mut()), 0);
        assert_eq!(COLLECTIONS.load(Ordering::SeqCst), 0);
    }

    a_thread_that_has_the_interpreter_frees_at_the_limit ["CUVMM_TORCH_LIMIT" = "100MiB"] says [] {
        let (torch, address) = collected();
        let reached = reached();
        let interpreter = INTERPRETER.lock().unwrap();
        std::thread::scope(|scope| {
            let short = scope.spawn(|| torch.malloc(size(80 * MIB), null_mut()));
            // It waits for the interpreter, and holds up nothing of the library.
            reached.recv().unwrap();
            torch.free(address, null_mut());
            assert_eq!(torch.figure("allocations"), 0);
            torch.reset();
            drop(interpreter);
            assert_ne!(short.join().unwrap(), 0);
        });
    }

    no_collection_outlasts_the_interpreter ["CUVMM_TORCH_LIMIT" = "100MiB"] says [
        "failed: out of memory",
        "failed: out of memory",
    ] {
        let (torch, _address) = collected();
        let reached = reached();
        let interpreter = INTERPRETER.lock().unwrap();
        std::thread::scope(|scope| {
            let short = scope.spawn(|| torch.malloc(size(80 * MIB), null_mut()));
            reached.recv().unwrap();
            let (ended, waits) = channel();
            scope.spawn(move || {
                set_collector(&torch, None);
                ended.send(()).unwrap();
            });
            // From here on the function is gone, or about to be. The one that runs is waited for.
            assert!(waits.try_recv().is_err());
            drop(interpreter);
            waits.recv().unwrap();
            assert_eq!(short.join().unwrap(), 0);
        });
        assert_eq!(torch.malloc(size(80 * MIB), null_mut()), 0);
        // A function that is passed is of the same interpreter.
        assert_eq!(collecting_malloc(&torch), 0);
        assert_eq!(COLLECTIONS.load(Ordering::SeqCst), 1);
        *REACHED.lock().unwrap() = None;
        set_collector(&torch, Some(collect));
        assert_eq!(collecting_malloc(&torch), 0);
        assert_eq!(COLLECTIONS.load(Ordering::SeqCst), 2);
    }
}
