//! Settings, figures, limits, and pools of graphs, over the stand-in for libcuda.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{CStr, CString, c_char, c_double, c_int, c_void};
use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{Cuda, MIB, Torch, over_the_stand_in};

/// The variable with the settings of another process that uses the ledger, and what it prints.
const NEIGHBOUR: &str = "CUVMM_TESTS_NEIGHBOUR";
const READY: &str = "the memory is free";

/// Configures the library with a JSON text.
fn configure(torch: &Torch, json: &str) -> c_int {
    let configure: unsafe extern "C" fn(*const c_char) -> c_int = torch.function("cuvmm_configure");
    let json = CString::new(json).unwrap();
    // SAFETY: the text is terminated.
    unsafe { configure(json.as_ptr()) }
}

/// Returns what can still be allocated on device 0, and the limit.
fn mem_get_info(torch: &Torch) -> (u64, u64) {
    let ask: unsafe extern "C" fn(c_int, *mut u64, *mut u64) -> c_int =
        torch.function("cuvmm_mem_get_info");
    let (mut free, mut total) = (0, 0);
    // SAFETY: the results are written to locals.
    assert_eq!(unsafe { ask(0, &mut free, &mut total) }, 0);
    (free, total)
}

fn size(bytes: usize) -> isize {
    isize::try_from(bytes).unwrap()
}

/// Returns the access that a device has at an address.
fn access(torch: &Torch, address: usize, device: c_int) -> c_int {
    let ask: unsafe extern "C" fn(*const c_void, c_int) -> c_int = torch.function("cuvmm_access");
    // SAFETY: the address is not used.
    unsafe { ask(std::ptr::without_provenance(address), device) }
}

/// The functions for pools of graphs.
struct Pools {
    begin: unsafe extern "C" fn(c_int, [u64; 2], *const c_void),
    end: unsafe extern "C" fn(c_int, [u64; 2]),
    release: unsafe extern "C" fn(c_int, [u64; 2]),
}

impl Pools {
    fn of(torch: &Torch) -> Self {
        Self {
            begin: torch.function("cuvmm_begin_allocate_to_pool"),
            end: torch.function("cuvmm_end_allocate_to_pool"),
            release: torch.function("cuvmm_release_pool"),
        }
    }

    /// Calls `body` while a pool is open for all streams.
    fn open(&self, device: c_int, id: [u64; 2], body: impl FnOnce()) {
        // SAFETY: a null function accepts all streams.
        unsafe { (self.begin)(device, id, null()) };
        body();
        // SAFETY: it may be called at any time.
        unsafe { (self.end)(device, id) };
    }

    fn release(&self, device: c_int, id: [u64; 2]) {
        // SAFETY: it may be called at any time.
        unsafe { (self.release)(device, id) };
    }
}

over_the_stand_in! {
    peers [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        assert_eq!(configure(&torch, r#"{"peers": [0, 1]}"#), 0);
        let stream = cuda.stream();
        cuda.enter(1);
        let elsewhere = cuda.stream();
        cuda.enter(0);
        let address = torch.malloc(size(3 * MIB), stream);
        cuda.synchronize(stream);
        cuda.enter(1);
        cuda.fill(address, 7, 3 * MIB, elsewhere);
        cuda.synchronize(elsewhere);
        cuda.expect(address, 7, 3 * MIB);
        cuda.enter(0);
        torch.record(address, elsewhere);
        torch.free(address, stream);
        // The heap can ask that stream for its work, so the memory is used again.
        assert_eq!(torch.malloc(size(3 * MIB), stream), address);
        let there = torch.malloc_on(1, size(MIB), elsewhere);
        cuda.fill(there, 8, MIB, stream);
        cuda.synchronize(stream);
        cuda.expect(there, 8, MIB);
        assert_eq!((access(&torch, there, 0), access(&torch, there, 1)), (3, 3));
    }

    access_of_other_devices [] says [] {
        let torch = Torch::load();
        assert_eq!(access(&torch, 0x1000, 0), -1);
        assert!(torch.last_error().contains("not allocated here"), "{}", torch.last_error());
        let cuda = Cuda::load();
        let address = torch.malloc(size(3 * MIB), cuda.stream());
        assert_eq!((access(&torch, address, 0), access(&torch, address, 1)), (3, 0));
        assert_eq!(access(&torch, 0x1000, 0), -1);
        assert!(torch.last_error().contains("cuMemGetAccess"), "{}", torch.last_error());
    }

    a_peer_that_is_not_there [] says ["allocation of 512 B on device 0 failed: "] {
        let torch = Torch::load();
        assert_eq!(configure(&torch, r#"{"peers": [1, 7]}"#), 0);
        assert_eq!(torch.malloc(512, null_mut()), 0);
        assert!(torch.last_error().contains('7'), "{}", torch.last_error());
    }

    settings ["CUVMM_TORCH_LIMIT" = "64MiB"] says [] {
        let torch = Torch::load();
        let version: unsafe extern "C" fn() -> *const c_char = torch.function("cuvmm_version");
        // SAFETY: the text is terminated, and lives for ever.
        let version = unsafe { CStr::from_ptr(version()) };
        assert_eq!(version.to_str().unwrap(), env!("CARGO_PKG_VERSION"));
        assert_eq!(torch.last_error(), "");
        assert_eq!(configure(&torch, r#"{"limits": 1}"#), -1);
        assert!(torch.last_error().contains("unknown field `limits`"), "{}", torch.last_error());
        let configure_null: unsafe extern "C" fn(*const c_char) -> c_int =
            torch.function("cuvmm_configure");
        // SAFETY: null is allowed.
        assert_eq!(unsafe { configure_null(null()) }, -1);
        assert_eq!(configure(&torch, r#"{"limit": 33554432, "tenant": "learner"}"#), 0);
        let cuda = Cuda::load();
        assert_ne!(torch.malloc(512, cuda.stream()), 0);
        assert_eq!(torch.figure("limit"), 32 << 20);
        assert!(torch.text("cuvmm_table").contains("learner"), "{}", torch.text("cuvmm_table"));
        assert_eq!(configure(&torch, "{}"), 0, "nothing is named");
        assert_eq!(configure(&torch, r#"{"tenant": "other"}"#), -1);
        assert!(torch.last_error().contains("settings come first"), "{}", torch.last_error());
    }

    a_wrong_limit [] says [
        "allocation of 512 B on device 0 failed: the setting limit is 1 TiB: the device allows 2 MiB to 256 MiB",
    ] {
        let torch = Torch::load();
        assert_eq!(configure(&torch, r#"{"limit": 1099511627776}"#), 0);
        assert_eq!(torch.malloc(512, Cuda::load().stream()), 0);
        // A heap was not made: the settings can be changed.
        assert_eq!(configure(&torch, r#"{"limit": 33554432}"#), 0);
        assert_ne!(torch.malloc(512, Cuda::load().stream()), 0);
    }

    a_ledger [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        let json = serde_json::json!({ "ledger": path, "limit": 100 << 20 }).to_string();
        assert_eq!(configure(&torch, &json), 0);
        let stream = cuda.stream();
        assert_ne!(torch.malloc(size(60 * MIB), stream), 0);
        let mut files = std::fs::read_dir(&path).unwrap();
        let is_ledger = |name: &std::path::Path| name.extension() == Some("cuvmm-ledger".as_ref());
        assert!(files.any(|file| is_ledger(&file.unwrap().path())));
    }

    a_neighbour_gives_back_what_it_has_free [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let folder = tempfile::tempdir().unwrap();
        let json = serde_json::json!({ "ledger": folder.path().join("ledger") }).to_string();
        let mut neighbour = crate::common::own_process::only("interface::neighbour::in_a_process_of_its_own")
            .env(NEIGHBOUR, &json)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(neighbour.stdout.take().unwrap()).lines();
        assert!(said.any(|line| line.unwrap().contains(READY)), "the neighbour has ended");
        assert_eq!(configure(&torch, &json), 0);
        // Of 256 MiB, 200 are free in the neighbour's heap.
        let address = torch.malloc(size(180 * MIB), cuda.stream());
        assert_ne!(address, 0);
        drop(neighbour.stdin.take());
        assert!(neighbour.wait().unwrap().success());
    }

    neighbour [] says [] {
        let Ok(json) = std::env::var(NEIGHBOUR) else {
            return;
        };
        let (torch, cuda) = (Torch::load(), Cuda::load());
        assert_eq!(configure(&torch, &json), 0);
        let stream = cuda.stream();
        let address = torch.malloc(size(200 * MIB), stream);
        assert_ne!(address, 0);
        torch.free(address, stream);
        println!("{READY}");
        // Until the other process has ended this.
        let _ = std::io::stdin().read_line(&mut String::new());
    }

    figures_under_pytorchs_names ["CUVMM_TORCH_LIMIT" = "100MiB"] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        assert_eq!(torch.text("cuvmm_memory_stats"), "");
        let (small, large) = (torch.malloc(1000, stream), torch.malloc(size(3 * MIB), stream));
        let number = |path| torch.number("cuvmm_memory_stats", path);
        assert_eq!(number("allocation.all.current"), 2);
        assert_eq!(number("allocation.small_pool.current"), 1);
        assert_eq!(number("allocated_bytes.small_pool.current"), 1024);
        assert_eq!(number("requested_bytes.small_pool.current"), 1000);
        assert_eq!(number("allocated_bytes.large_pool.current"), 3 << 20);
        torch.free(large, stream);
        assert_eq!(number("allocated_bytes.all.current"), 1024);
        assert_eq!(number("allocated_bytes.all.peak"), 1024 + (3 << 20));
        assert_eq!(number("allocated_bytes.all.freed"), 3 << 20);
        assert_eq!(number("active_bytes.all.current"), 1024);
        let reserved = number("reserved_bytes.all.current");
        assert!(reserved >= 4 << 20, "{reserved}");
        assert_eq!(number("reserved_bytes.all.peak"), reserved);
        assert!(number("num_device_alloc") > 0);
        torch.reset();
        let after = number("reserved_bytes.all.current");
        assert!(after < reserved);
        assert_eq!(number("reserved_bytes.all.peak"), reserved);
        let reset: unsafe extern "C" fn(c_int) = torch.function("cuvmm_reset_peak_stats");
        // SAFETY: it may be called at any time.
        unsafe { reset(0) };
        assert_eq!(number("reserved_bytes.all.peak"), after);
        assert_eq!(number("allocated_bytes.all.peak"), 1024);
        let reset: unsafe extern "C" fn(c_int) = torch.function("cuvmm_reset_accumulated_stats");
        // SAFETY: it may be called at any time.
        unsafe { reset(0) };
        assert_eq!(number("allocated_bytes.all.freed"), 0);
        assert_eq!(number("allocated_bytes.all.current"), 1024);
        let snapshot: serde_json::Value =
            serde_json::from_str(&torch.text("cuvmm_snapshot")).unwrap();
        let expected = serde_json::json!([{
            "address": small, "size": 1024, "requested": 1000,
            "stream": stream.addr(), "pool": null,
        }]);
        assert_eq!(snapshot["allocations"], expected);
        assert_eq!(snapshot["held"], after);
        let table = torch.text("cuvmm_table");
        assert!(table.contains("allocated  1 KiB in 1 allocation"), "{table}");
    }

    limits_and_addresses [] says [
        "limit of device 0: a fraction of a device's memory lies between 0 and 1, and 1.5 does not",
        "allocation of 128 MiB on device 0 failed: out of memory",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let set: unsafe extern "C" fn(c_double, c_int) = torch.function("cuvmm_memory_fraction");
        let get: unsafe extern "C" fn(c_int) -> c_double =
            torch.function("cuvmm_get_memory_fraction");
        // SAFETY: they may be called at any time.
        unsafe {
            set(1.5, 0);
            // The pool may hold a granule then.
            set(0.0, 0);
            assert_eq!(get(0).to_bits(), 0.0_f64.to_bits());
            set(0.25, 0);
            assert_eq!(get(0).to_bits(), 0.25_f64.to_bits());
            assert!(get(77) < 0.0);
        }
        assert_eq!(mem_get_info(&torch), (64 << 20, 64 << 20));
        assert_eq!(torch.malloc(size(128 * MIB), stream), 0);
        let address = torch.malloc(size(40 * MIB), stream);
        assert_eq!(mem_get_info(&torch), (24 << 20, 64 << 20));
        let base: unsafe extern "C" fn(*mut c_void, *mut usize) -> *mut c_void =
            torch.function("cuvmm_base_alloc");
        let base = |address| {
            let mut size = 1;
            // SAFETY: the size is written to a local.
            let first = unsafe { base(std::ptr::without_provenance_mut(address), &mut size) };
            (first.addr(), size)
        };
        assert_eq!(base(address), (address, 40 * MIB));
        assert_eq!(base(address + 7 * MIB + 1), (address, 40 * MIB));
        assert_eq!(base(0x1234), (0x1234, 0));
        torch.free(address, stream);
        // SAFETY: it may be called at any time.
        unsafe { set(1.0, 0) };
        assert_ne!(torch.malloc(size(128 * MIB), stream), 0);
    }

    a_pool_keeps_its_memory_until_its_last_user [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let begin: unsafe extern "C" fn(c_int, [u64; 2], *const c_void) =
            torch.function("cuvmm_begin_allocate_to_pool");
        let end: unsafe extern "C" fn(c_int, [u64; 2]) = torch.function("cuvmm_end_allocate_to_pool");
        let release: unsafe extern "C" fn(c_int, [u64; 2]) = torch.function("cuvmm_release_pool");
        let id = [0, 9];
        // SAFETY: a null function accepts all streams.
        unsafe {
            begin(0, id, null());
            let graphs = torch.malloc(size(10 * MIB), stream);
            torch.free(graphs, stream);
            end(0, id);
            // Memory that a graph uses is not handed on outside of it.
            let outside = torch.malloc(size(10 * MIB), stream);
            assert_ne!(outside, graphs);
            torch.free(outside, stream);
            torch.reset();
            assert!(cuda.physicals_and_mappings().0 > 0);
            begin(0, id, null());
            assert_eq!(torch.malloc(size(10 * MIB), stream), graphs);
            torch.free(graphs, stream);
            end(0, id);
            release(0, id);
            torch.reset();
            assert!(cuda.physicals_and_mappings().0 > 0, "one user is left");
            // While another pool is open, a capture may be running, and nothing is waited for.
            begin(0, [1, 0], null());
            release(0, id);
            torch.reset();
            assert!(cuda.physicals_and_mappings().0 > 0, "a pool is open");
            end(0, [1, 0]);
            release(0, [1, 0]);
            torch.reset();
            assert_eq!(cuda.physicals_and_mappings(), (0, 0));
        }
    }

    a_tensor_that_outlives_its_pool_keeps_its_extent_only [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let pools = Pools::of(&torch);
        let ask: unsafe extern "C" fn(*mut usize, *mut usize) -> c_int =
            cuda.function("cuMemGetInfo_v2");
        let used = || {
            let (mut free, mut total) = (0, 0);
            // SAFETY: the results are written to locals.
            assert_eq!(unsafe { ask(&mut free, &mut total) }, 0);
            total - free
        };
        let mut kept = 0;
        let graph = cuda.capture(stream, || {
            pools.open(0, [0, 3], || {
                let parts = [(); 5].map(|()| torch.malloc(size(10 * MIB), stream));
                parts.iter().for_each(|&part| torch.free(part, stream));
                kept = torch.malloc(512, stream);
                cuda.fill(kept, 7, 512, stream);
            });
        });
        cuda.launch(graph, stream);
        cuda.synchronize(stream);
        torch.reset();
        assert!(used() >= 50 * MIB, "the graph may be launched again: {}", used());
        pools.release(0, [0, 3]);
        torch.reset();
        assert!(used() <= 16 * MIB, "{} are held", used());
        assert_eq!(cuda.physicals_and_mappings(), (1, 1));
        cuda.expect(kept, 7, 512);
        torch.free(kept, stream);
        cuda.synchronize(stream);
        torch.reset();
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
    }

    a_hundred_and_twenty_pools ["FAKECUDA_CAPACITY" = "151397597184"] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let (stream, pools) = (cuda.stream(), Pools::of(&torch));
        for pool in 0..120 {
            pools.open(0, [0, 1 + pool], || {
                assert_ne!(torch.malloc(size(3 * MIB), stream), 0, "{pool}: {}", torch.last_error());
            });
        }
    }

    twenty_pools_on_each_of_eight_devices [
        "FAKECUDA_CAPACITY" = "151397597184", "FAKECUDA_DEVICES" = "8"
    ] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let pools = Pools::of(&torch);
        for device in 0..8 {
            cuda.enter(device);
            let stream = cuda.stream();
            for pool in 0..20 {
                pools.open(device, [0, 1 + pool], || {
                    let address = torch.malloc_on(device, size(3 * MIB), stream);
                    assert_ne!(address, 0, "{device}, {pool}: {}", torch.last_error());
                });
            }
        }
    }

    a_graph_replays_in_its_own_memory [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let begin: unsafe extern "C" fn(c_int, [u64; 2], *const c_void) =
            torch.function("cuvmm_begin_allocate_to_pool");
        let end: unsafe extern "C" fn(c_int, [u64; 2]) = torch.function("cuvmm_end_allocate_to_pool");
        // Memory that the stream has freed already is not for the graph.
        let before = torch.malloc(size(6 * MIB), stream);
        torch.free(before, stream);
        let (mut first, mut second) = (0, 0);
        // SAFETY: a null function accepts all streams.
        unsafe { begin(0, [0, 1], null()) };
        let graph = cuda.capture(stream, || {
            first = torch.malloc(size(6 * MIB), stream);
            cuda.fill(first, 1, 6 * MIB, stream);
            torch.free(first, stream);
            // In a capture too, what the stream has freed is there at once.
            second = torch.malloc(size(6 * MIB), stream);
            cuda.fill(second, 2, 3 * MIB, stream);
            torch.free(second, stream);
        });
        // SAFETY: it may be called at any time.
        unsafe { end(0, [0, 1]) };
        assert_eq!(first, second);
        assert_ne!(first, before);
        for byte in 10..13 {
            let outside = torch.malloc(size(6 * MIB), stream);
            cuda.fill(outside, byte, 6 * MIB, stream);
            cuda.launch(graph, stream);
            cuda.synchronize(stream);
            cuda.expect(outside, byte, 6 * MIB);
            cuda.expect(first, 2, 3 * MIB);
            cuda.expect(first + 3 * MIB, 1, 3 * MIB);
            torch.free(outside, stream);
            torch.reset();
        }
    }

    the_exit_stops_the_mapper_in_the_middle_of_work [] says [] {
        // Registered before the library's function, so that it is called after it.
        // SAFETY: the function is part of this program.
        assert_eq!(unsafe { libc::atexit(without_mapper) }, 0);
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        assert_ne!(torch.malloc(512, stream), 0);
        await_mapper();
        assert!(AT_WORK.set(torch).is_ok());
        for _ in 0..3 {
            std::thread::spawn(|| {
                let (torch, cuda) = (AT_WORK.get().unwrap(), Cuda::load());
                let stream = cuda.stream();
                for round in 0_usize.. {
                    let address = torch.malloc(size((1 + round % 7) * MIB), stream);
                    torch.free(address, stream);
                    if round % 16 == 0 {
                        torch.reset();
                    }
                    STARTED.store(round > 100, Ordering::Relaxed);
                }
            });
        }
        while !STARTED.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        println!("{}", crate::common::ENDED);
        std::process::exit(0);
    }

    a_forked_child_exits_without_the_mapper [] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        assert_ne!(torch.malloc(512, cuda.stream()), 0);
        // SAFETY: the child only exits, with all that is registered for the exit.
        match unsafe { libc::fork() } {
            // SAFETY: it ends the child.
            0 => unsafe { libc::exit(0) },
            child => {
                let mut status = 0;
                // SAFETY: the status is written to a local.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert_eq!(status, 0);
            }
        }
        await_mapper();
    }

    without_a_mapper ["CUVMM_TORCH_MAPPER" = "off"] says [] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        assert_ne!(torch.malloc(512, cuda.stream()), 0);
        assert_eq!(threads_named("cuvmm-mapper"), 0);
    }
}

/// The library, for threads that work while the process exits.
static AT_WORK: OnceLock<Torch> = OnceLock::new();
static STARTED: AtomicBool = AtomicBool::new(false);

/// Ends the process with a failure if the mapper's thread is still there.
extern "C" fn without_mapper() {
    if threads_named("cuvmm-mapper") != 0 {
        // SAFETY: it ends the process.
        unsafe { libc::_exit(3) };
    }
}

/// Waits until the mapper's thread has given itself its name.
fn await_mapper() {
    while threads_named("cuvmm-mapper") != 1 {
        std::thread::yield_now();
    }
}

/// Returns the number of this process's threads with a name.
fn threads_named(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|found| found.trim() == name).count()
}
