//! Figures beside sleep, pools, graphs and other programs, over the stand-in for libcuda.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{c_int, c_void};
use std::ptr::null;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::tags::Tags;
use crate::common::{Cuda, MIB, Text, Torch, over_a_driver_that_refuses, over_the_stand_in};
use serde_json::Value;

/// Returns the JSON that a function writes about device 0, which other threads may change meanwhile.
fn json(torch: &Torch, name: &str) -> Value {
    let write: Text = torch.function(name);
    let mut buffer = vec![0_u8; 1 << 16];
    // SAFETY: the buffer has the length that is passed.
    let length = unsafe { write(0, buffer.as_mut_ptr().cast(), buffer.len()) };
    assert!((1..=buffer.len()).contains(&length), "{length}");
    serde_json::from_slice(&buffer[..length - 1]).unwrap()
}

/// Returns the bytes that are allocated and reserved, under PyTorch's names.
fn allocated_and_reserved(torch: &Torch, which: &str) -> (u64, u64) {
    let stats = json(torch, "cuvmm_memory_stats");
    let of = |name: &str| stats[name]["all"][which].as_u64().unwrap();
    (of("allocated_bytes"), of("reserved_bytes"))
}

/// Returns the sum of the allocations in a snapshot, and what is held.
fn snapshot(torch: &Torch) -> (u64, u64) {
    let snapshot = json(torch, "cuvmm_snapshot");
    let all = snapshot["allocations"].as_array().unwrap();
    let sizes = all.iter().map(|it| it["size"].as_u64().unwrap());
    (sizes.sum(), snapshot["held"].as_u64().unwrap())
}

fn size(bytes: usize) -> isize {
    isize::try_from(bytes).unwrap()
}

over_the_stand_in! {
    what_sleeps_is_a_figure_of_its_own [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let torch = tags.torch;
        let weights = tags.allocate("weights", 40);
        let other = torch.malloc(size(4 * MIB), cuda.stream());
        assert_eq!(allocated_and_reserved(&torch, "current").0, 44 << 20);
        tags.sleep(r#"["weights"]"#, true).unwrap();
        let (allocated, reserved) = allocated_and_reserved(&torch, "current");
        assert_eq!(allocated, 4 << 20);
        assert!(allocated <= reserved, "{allocated} of {reserved}");
        let (sum, held) = snapshot(&torch);
        assert!((4 << 20..=held).contains(&sum), "{sum} of {held}");
        let found = json(&torch, "cuvmm_snapshot");
        assert_eq!(found["sleeping"][0]["address"], weights);
        let stats = json(&torch, "cuvmm_stats");
        assert_eq!(stats["sleeping"], 40 << 20);
        assert!(stats["host"].as_u64().unwrap() >= 40 << 20, "{stats}");
        assert_eq!(stats["total"]["live"], 4 << 20);
        assert_eq!(stats["pools"][0]["asleep"], true);
        let table = torch.text("cuvmm_table");
        assert!(table.contains("asleep     40 MiB, and 4"), "{table}");
        // More than what was held before, beside what sleeps.
        let more = torch.malloc(size(80 * MIB), cuda.stream());
        torch.free(more, cuda.stream());
        torch.reset();
        tags.wake("null").unwrap();
        let (allocated, reserved) = allocated_and_reserved(&torch, "peak");
        assert_eq!(allocated, 84 << 20);
        assert!(allocated <= reserved, "{allocated} of {reserved}");
        let stats = json(&torch, "cuvmm_stats");
        assert_eq!((&stats["sleeping"], &stats["total"]["live"]), (&0.into(), &(44 << 20).into()));
        // Freed asleep.
        tags.sleep("null", false).unwrap();
        tags.free(weights);
        tags.wake("null").unwrap();
        torch.free(other, cuda.stream());
        let stats = json(&torch, "cuvmm_stats");
        assert_eq!((&stats["sleeping"], &stats["host"]), (&0.into(), &0.into()));
        let all = &json(&torch, "cuvmm_memory_stats")["allocated_bytes"]["all"];
        assert_eq!((&all["current"], &all["freed"]), (&0.into(), &all["allocated"]));
    }

    pools_and_graphs_count [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let torch = tags.torch;
        let stream = cuda.stream();
        let begin: unsafe extern "C" fn(c_int, [u64; 2], *const c_void) =
            torch.function("cuvmm_begin_allocate_to_pool");
        let end: unsafe extern "C" fn(c_int, [u64; 2]) = torch.function("cuvmm_end_allocate_to_pool");
        let made = [torch.malloc(size(4 * MIB), stream), tags.allocate("a", 6)];
        // SAFETY: a null function accepts all streams.
        unsafe { begin(0, [0, 9], null()) };
        let graphs = torch.malloc(size(8 * MIB), stream);
        // SAFETY: it may be called at any time.
        unsafe { end(0, [0, 9]) };
        let stats = json(&torch, "cuvmm_stats");
        let total = |name: &str| stats["total"][name].as_u64().unwrap();
        assert_eq!((total("allocations"), total("live")), (3, 18 << 20));
        assert!(total("held") >= 18 << 20 && total("free") <= total("held") - total("live"));
        assert_eq!(total("held"), allocated_and_reserved(&torch, "current").1);
        assert_eq!(stats["heap"]["live"], 4 << 20);
        let pools = serde_json::json!([{
            "name": "a", "bytes": 6 << 20, "paged": 0, "asleep": false, "host": 0, "kept": 0,
        }]);
        assert_eq!(stats["pools"], pools);
        assert_eq!((&stats["graphs"]["pools"], &stats["graphs"]["live"]), (&1.into(), &(8 << 20).into()));
        torch.free(graphs, stream);
        torch.free(made[0], stream);
        tags.free(made[1]);
    }

    never_more_is_allocated_than_held_beside_other_threads [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let torch = tags.torch;
        let ended = AtomicBool::new(false);
        // Nothing is written before the first allocation.
        tags.free(tags.allocate("a", 2));
        let handle = cuda.stream().expose_provenance();
        std::thread::scope(|scope| {
            let work = scope.spawn(|| {
                cuda.enter(0);
                let stream = std::ptr::with_exposed_provenance_mut(handle);
                for step in 0..200 {
                    let one = torch.malloc(size(8 * MIB), stream);
                    let other = tags.allocate("a", 6);
                    torch.free(one, stream);
                    if step % 3 == 0 {
                        tags.sleep("null", false).unwrap();
                        tags.wake("null").unwrap();
                    }
                    tags.free(other);
                    torch.reset();
                }
                ended.store(true, Ordering::SeqCst);
            });
            while !ended.load(Ordering::SeqCst) && !work.is_finished() {
                for which in ["current", "peak"] {
                    let (allocated, reserved) = allocated_and_reserved(&torch, which);
                    assert!(allocated <= reserved, "{which}: {allocated} of {reserved}");
                }
                let (sum, held) = snapshot(&torch);
                assert!(sum <= held, "{sum} of {held}");
            }
        });
    }

    what_is_said_to_be_free_can_be_had [] says [
        "allocation of 120 MiB on device 0 failed: the device is out of memory below the pool's limit: of the",
    ] {
        let (torch, cuda) = (Torch::load(), Cuda::load());
        let stream = cuda.stream();
        let other: unsafe extern "C" fn(*mut u64, usize) -> c_int = cuda.function("cuMemAlloc_v2");
        let info: unsafe extern "C" fn(c_int, *mut u64, *mut u64) -> c_int =
            torch.function("cuvmm_mem_get_info");
        let first = torch.malloc(512, stream);
        let (mut address, mut free, mut total) = (0, 0, 0);
        // SAFETY: the results are written to locals.
        unsafe {
            // What another program has.
            assert_eq!(other(&mut address, 128 * MIB), 0);
            assert_eq!(info(0, &mut free, &mut total), 0);
        }
        assert!(free < 120 << 20 && total < 256 << 20, "{free} of {total}");
        assert_eq!(torch.malloc(size(120 * MIB), stream), 0);
        let error = torch.last_error();
        assert!(error.contains("that the driver has free"), "{error}");
        assert!(!error.contains("cuMemGetInfo"), "{error}");
        assert!(error.contains("tenant holds 2 MiB of"), "{error}");
        // All but what memory in whole granules may cost.
        let had = torch.malloc(isize::try_from(free - (2 << 20)).unwrap(), stream);
        assert_ne!(had, 0, "{free}: {}", torch.last_error());
        torch.free(had, stream);
        torch.free(first, stream);
    }
}

over_a_driver_that_refuses! {
    /// A block that comes to a tag which has fallen asleep meanwhile sleeps with it.
    what_comes_late_sleeps_too {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let [hold, held, go] = ["refuse_hold", "refuse_await", "refuse_go"].map(|name| {
            let function: unsafe extern "C" fn() = cuda.function(name);
            // SAFETY: they take no arguments.
            move || unsafe { function() }
        });
        let first = tags.allocate("a", 2);
        hold();
        let late = std::thread::scope(|scope| {
            let allocated = scope.spawn(|| tags.allocate("a", 6));
            held();
            let slept = scope.spawn(|| {
                cuda.enter(0);
                tags.sleep("null", false)
            });
            while tags.asleep() != r#"["a"]"# {
                std::thread::yield_now();
            }
            go();
            slept.join().unwrap().unwrap();
            allocated.join().unwrap()
        });
        let figures = || {
            let sleeping = json(&tags.torch, "cuvmm_stats")["sleeping"].clone();
            let allocated = allocated_and_reserved(&tags.torch, "current").0;
            (allocated >> 20, sleeping.as_u64().unwrap() >> 20)
        };
        assert_eq!(figures(), (0, 8));
        tags.wake("null").unwrap();
        assert_eq!(figures(), (8, 0));
        [first, late]
            .into_iter()
            .for_each(|address| tags.free(address));
        assert_eq!(figures(), (0, 0));
    }
}
