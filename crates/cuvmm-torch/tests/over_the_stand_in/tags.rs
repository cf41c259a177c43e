//! Memory under tags, which sleeps and wakes, over the stand-in for libcuda.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;

use crate::common::tags::Tags;
use crate::common::{
    Cuda, Handle, MIB, Torch, over_a_driver_that_refuses, over_the_stand_in, refused,
};

over_the_stand_in! {
    contents_are_kept_or_lost_at_the_same_addresses [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let stream = cuda.stream();
        let (weights, cache) = (tags.allocate("weights", 20), tags.allocate("cache", 30));
        cuda.fill_all(&[(weights, 20 * MIB), (cache, 30 * MIB)]);
        let before = cuda.physicals_and_mappings();
        for _ in 0..2 {
            tags.sleep(r#"["weights"]"#, true).unwrap();
            tags.sleep("null", false).unwrap();
            assert_eq!(cuda.physicals_and_mappings(), (0, 0));
            // The memory is there for others.
            let other = tags.torch.mib(230, stream);
            tags.torch.free(other, stream);
            tags.torch.reset();
            tags.wake("null").unwrap();
            assert_eq!(cuda.physicals_and_mappings(), before);
            cuda.expect(weights, 1, 20 * MIB);
            cuda.fill(cache, 3, 30 * MIB, stream);
            cuda.synchronize(stream);
            cuda.expect(cache, 3, 30 * MIB);
        }
        tags.free(weights);
        tags.free(cache);
        tags.torch.reset();
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
    }

    tags_change_places [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let stream = cuda.stream();
        // Together they are more than the limit.
        let chat = tags.allocate("chat", 160);
        cuda.fill(chat, 1, 160 * MIB, stream);
        cuda.synchronize(stream);
        tags.sleep(r#"["chat"]"#, true).unwrap();
        let code = tags.allocate("code", 160);
        cuda.fill(code, 2, 160 * MIB, stream);
        cuda.synchronize(stream);
        let before = cuda.physicals_and_mappings();
        for _ in 0..2 {
            tags.exchange(r#"["code"]"#, r#"["chat"]"#, 1).unwrap();
            assert_eq!(tags.asleep(), r#"["code"]"#);
            assert_eq!(cuda.physicals_and_mappings(), before);
            cuda.expect(chat, 1, 160 * MIB);
            tags.exchange("null", "null", 2).unwrap();
            assert_eq!(tags.asleep(), r#"["chat"]"#);
            cuda.expect(code, 2, 160 * MIB);
        }
        refused(tags.exchange(r#"["chat"]"#, r#"["chat"]"#, 1), "the tag \"chat\" is asleep");
        refused(tags.exchange(r#"["code"]"#, r#"["code"]"#, 1), "the tag \"code\" is awake");
        refused(tags.exchange(r#"["code"]"#, r#"["none"]"#, 1), "\"none\"");
        refused(tags.exchange(r#"["code"]"#, r#"["chat"]"#, 0), "0");
        assert_eq!(tags.asleep(), r#"["chat"]"#);
        cuda.expect(code, 2, 160 * MIB);
        // Both awake are more than the limit, so only one can go on.
        tags.free(code);
        tags.exchange("[]", r#"["chat"]"#, 1).unwrap();
        cuda.expect(chat, 1, 160 * MIB);
        tags.free(chat);
        tags.torch.reset();
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
    }

    wrong_orders_are_errors_and_change_nothing [] says [
        " under a tag on device 0 failed: the tag \"a\" is asleep",
        "free of 0x1234: it is not allocated here",
    ] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        tags.sleep("null", true).unwrap();
        tags.wake("null").unwrap();
        let (first, second) = (tags.allocate("a", 4), tags.allocate("b", 4));
        refused(tags.sleep(r#"["c"]"#, true), "under the tag \"c\": there are \"a\", \"b\"");
        refused(tags.sleep(r#"["a", "c"]"#, true), "\"c\"");
        refused(tags.sleep("a", true), "the JSON is not understood");
        refused(tags.wake(r#"["a"]"#), "the tag \"a\" is awake");
        assert_eq!(tags.asleep(), "[]");
        tags.sleep(r#"["a", "a"]"#, false).unwrap();
        assert_eq!(tags.asleep(), r#"["a"]"#);
        refused(tags.sleep(r#"["b", "a"]"#, false), "the tag \"a\" is asleep");
        refused(tags.wake(r#"["a", "b"]"#), "the tag \"b\" is awake");
        assert_eq!(tags.allocate("a", 4), 0);
        // Freed asleep, and nothing wakes.
        tags.free(first);
        tags.wake(r#"["a"]"#).unwrap();
        assert_ne!(tags.allocate("a", 4), 0);
        tags.free(second);
        tags.free(0x1234);
        assert_eq!(cuda.physicals_and_mappings().1, 2);
    }

    work_is_waited_for [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let (stream, other) = (cuda.stream(), cuda.stream());
        let address = tags.allocate("a", 8);
        cuda.hold(other, true);
        // A stream that the library does not know.
        cuda.fill(address, 5, 8 * MIB, other);
        let handle = other.expose_provenance();
        std::thread::scope(|scope| {
            let asleep = scope.spawn(|| {
                cuda.enter(0);
                tags.sleep(r#"["a"]"#, true)
            });
            for _ in 0..100 {
                std::thread::yield_now();
                assert!(cuda.physicals_and_mappings().1 > 0, "unmapped under a kernel");
            }
            cuda.hold(std::ptr::with_exposed_provenance_mut(handle), false);
            asleep.join().unwrap().unwrap();
        });
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
        tags.wake("null").unwrap();
        cuda.synchronize(stream);
        cuda.expect(address, 5, 8 * MIB);
    }

    too_little_memory_to_wake ["CUVMM_TORCH_LIMIT" = "64MiB"] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let stream = cuda.stream();
        let address = tags.allocate("a", 40);
        cuda.fill(address, 9, 40 * MIB, stream);
        tags.sleep("null", true).unwrap();
        let other = tags.torch.mib(40, stream);
        let handle = stream.expose_provenance();
        let (waking, torch) = (&tags, tags.torch);
        std::thread::scope(|scope| {
            let woken = scope.spawn(move || waking.wake(r#"["a"]"#));
            // It waits until the memory is free.
            let stream = std::ptr::with_exposed_provenance_mut(handle);
            torch.free(other, stream);
            woken.join().unwrap().unwrap();
        });
        cuda.expect(address, 9, 40 * MIB);
    }

    the_allocator_s_functions_use_the_tag_of_the_thread [] says ["1 EiB"] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let try_malloc: unsafe extern "C" fn(isize, c_int, Handle) -> *mut c_void =
            tags.torch.function("cuvmm_try_malloc");
        let stream = cuda.stream();
        let outside = tags.torch.malloc(4 << 20, stream);
        let name = CString::new("weights").unwrap();
        // SAFETY: the text is terminated.
        assert_eq!(unsafe { (tags.enter)(name.as_ptr()) }, 0);
        let inside = tags.torch.malloc(4 << 20, stream);
        assert_eq!(tags.torch.malloc(1 << 60, stream), 0);
        // SAFETY: the tests pass live streams.
        let heap = unsafe { try_malloc(4 << 20, 0, stream) }.addr();
        // SAFETY: it takes no arguments.
        unsafe { (tags.leave)() };
        for (address, byte) in [(outside, 1), (inside, 2), (heap, 3)] {
            cuda.fill(address, byte, 4 * MIB, stream);
        }
        cuda.synchronize(stream);
        let live = |torch: &Torch| torch.figure("allocations");
        assert_eq!(live(&tags.torch), 2, "a block of a tag is not of the heap");
        tags.sleep("[\"weights\"]", true).unwrap();
        tags.wake("[\"weights\"]").unwrap();
        for (address, byte) in [(outside, 1), (inside, 2), (heap, 3)] {
            cuda.expect(address, byte, 4 * MIB);
            tags.torch.free(address, stream);
        }
        assert_eq!(live(&tags.torch), 0);
        // SAFETY: the tests pass live streams.
        assert!(unsafe { try_malloc(1 << 50, 0, stream) }.is_null());
        refused(tags.outcome(-1), "out of");
    }

    memory_that_was_freed_under_a_tag_is_waited_for [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let (stream, other) = (cuda.stream(), cuda.stream());
        let address = tags.allocate("a", 200);
        cuda.hold(other, true);
        cuda.fill(address, 5, 200 * MIB, other);
        tags.free(address);
        std::thread::scope(|scope| {
            cuda.let_go(other, scope);
            let made = tags.torch.mib(200, stream);
            cuda.fill(made, 6, 200 * MIB, stream);
            cuda.synchronize(stream);
            cuda.expect(made, 6, 200 * MIB);
        });
    }

    a_tag_waits_for_memory_that_was_freed_under_it ["CUVMM_TORCH_LIMIT" = "64MiB"] says [
        "allocation of 64.00 MiB under a tag on device 0 failed: out of memory",
    ] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let other = cuda.stream();
        let address = tags.allocate("a", 40);
        cuda.hold(other, true);
        cuda.fill(address, 5, 40 * MIB, other);
        tags.free(address);
        std::thread::scope(|scope| {
            cuda.let_go(other, scope);
            let made = tags.allocate("b", 64);
            assert_ne!(made, 0);
            cuda.fill(made, 6, 64 * MIB, other);
            cuda.synchronize(other);
            cuda.expect(made, 6, 64 * MIB);
            tags.free(made);
        });
        // SAFETY: it may be called at any time.
        assert!(unsafe { (tags.malloc)((64 << 20) + 1, 0, null_mut()) }.is_null());
        let status: unsafe extern "C" fn() -> c_int = tags.torch.function("cuvmm_last_status");
        // SAFETY: it takes no arguments.
        assert_eq!(unsafe { status() }, -3);
        assert_eq!(tags.torch.number("cuvmm_memory_stats", "num_ooms"), 1);
    }

    memory_for_one_tag_wakes_none_of_two [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let fraction: unsafe extern "C" fn(f64, c_int) =
            tags.torch.function("cuvmm_memory_fraction");
        let stream = cuda.stream();
        let (small, large) = (tags.allocate("a", 8), tags.allocate("b", 40));
        cuda.fill(small, 1, 8 * MIB, stream);
        cuda.fill(large, 2, 40 * MIB, stream);
        tags.sleep(r#"["a", "b"]"#, true).unwrap();
        // SAFETY: it may be called at any time.
        unsafe { fraction(0.125, 0) };
        let error = tags.wake(r#"["a", "b"]"#).unwrap_err();
        assert!(error.contains("the tag \"b\"") && error.contains("32 MiB"), "{error}");
        assert_eq!(tags.asleep(), r#"["a","b"]"#);
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
        // SAFETY: it may be called at any time.
        unsafe { fraction(0.5, 0) };
        tags.wake("null").unwrap();
        cuda.expect(small, 1, 8 * MIB);
        cuda.expect(large, 2, 40 * MIB);
    }

    small_allocations_share_blocks [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let stream = cuda.stream();
        let small = |bytes: isize| {
            let name = CString::new("a").unwrap();
            // SAFETY: the text is terminated.
            unsafe { (tags.enter)(name.as_ptr()) };
            let address = tags.torch.malloc(bytes, stream);
            // SAFETY: it takes no arguments.
            unsafe { (tags.leave)() };
            assert_eq!(address % 512, 0);
            address
        };
        // The first ones fill a block: 3 * 512, 1 MiB and 1 MiB - 3 * 512.
        let sizes = [1, 513, 1 << 20, (1 << 20) - 3 * 512];
        let mut parts: Vec<usize> = sizes.iter().map(|&size| small(size)).collect();
        assert_eq!(cuda.physicals_and_mappings().1, 1);
        let offsets: Vec<usize> = parts.iter().map(|part| part - parts[0]).collect();
        assert_eq!(offsets, [0, 512, 1536, 1536 + MIB]);
        parts.push(small(512));
        assert_eq!(cuda.physicals_and_mappings().1, 2);
        // A larger one has a block of its own.
        let large = small((1 << 20) + 1);
        assert_eq!(cuda.physicals_and_mappings().1, 3);
        for (byte, (&part, size)) in (1..).zip(parts.iter().zip([1, 513, MIB, MIB - 1536, 512])) {
            cuda.fill(part, byte, size, stream);
        }
        cuda.synchronize(stream);
        let snapshot = tags.torch.text("cuvmm_snapshot");
        let snapshot: serde_json::Value = serde_json::from_str(&snapshot).unwrap();
        let live = snapshot["allocations"].as_array().unwrap();
        let requested: Vec<u64> = live.iter().map(|it| it["requested"].as_u64().unwrap()).collect();
        let mut sorted = requested.clone();
        sorted.sort_unstable();
        let mut expected = vec![1, 513, 1 << 20, (1 << 20) - 1536, 512, (1 << 20) + 1];
        expected.sort_unstable();
        assert_eq!(sorted, expected);
        tags.sleep(r#"["a"]"#, true).unwrap();
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
        tags.torch.free(parts[1], stream);
        tags.wake(r#"["a"]"#).unwrap();
        cuda.expect(parts[2], 3, MIB);
        cuda.expect(parts[4], 5, 512);
        // A place that was freed is not used again while its block has others.
        let next = small(512);
        assert_eq!(next, parts[4] + 512);
        for address in [parts[0], parts[2], parts[4], next, large] {
            tags.torch.free(address, stream);
        }
        tags.torch.reset();
        assert_eq!(cuda.physicals_and_mappings().1, 1, "of the block with a part that lives");
        cuda.expect(parts[3], 4, MIB - 1536);
        tags.torch.free(parts[3], stream);
        tags.torch.reset();
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
        assert_eq!(tags.torch.number("cuvmm_memory_stats", "requested_bytes.all.current"), 0);
    }

    host_memory_is_taken_once_and_given_back [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let stream = cuda.stream();
        let (first, second) = (tags.allocate("a", 10), tags.allocate("b", 4));
        let fill = |address, byte, mib: usize| {
            cuda.fill(address, byte, mib * MIB, stream);
            cuda.synchronize(stream);
        };
        fill(first, 1, 10);
        fill(second, 2, 4);
        assert_eq!(tags.host(), 0);
        tags.prepare(r#"["a"]"#).unwrap();
        assert_eq!(tags.host(), 10);
        tags.sleep("null", true).unwrap();
        assert_eq!((tags.host(), tags.release_host("null")), (14, Ok(0)), "all of it has contents");
        tags.wake("null").unwrap();
        assert_eq!(tags.host(), 14, "kept for the next time");
        assert_eq!(tags.release_host(r#"["b"]"#), Ok(4));
        assert_eq!((tags.host(), tags.release_host("null")), (10, Ok(10)));

        // The store grows with the tag.
        tags.sleep(r#"["a"]"#, true).unwrap();
        tags.wake("null").unwrap();
        let third = tags.allocate("a", 30);
        fill(third, 3, 30);
        tags.sleep(r#"["a"]"#, true).unwrap();
        assert_eq!(tags.host(), 40);
        // It goes on its own thread, at the latest before the next one of the tag's memory.
        tags.wake("null").unwrap();
        tags.sleep_as(r#"["a"]"#, 2).unwrap();
        tags.wake("null").unwrap();
        while tags.host() > 0 {
            std::thread::yield_now();
        }
        for (address, byte, mib) in [(first, 1, 10), (second, 2, 4), (third, 3, 30)] {
            cuda.expect(address, byte, mib * MIB);
            tags.free(address);
        }
        refused(tags.release_host(r#"["c"]"#), "under the tag \"c\": there are \"a\", \"b\"");
        refused(tags.sleep_as("null", 3), "keep is 3: it must be 0, 1 or 2");
    }

    host_memory_of_all_tags_has_a_limit [] says [] {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let stream = cuda.stream();
        let (first, second) = (tags.allocate("a", 70), tags.allocate("b", 40));
        for (address, byte, mib) in [(first, 1, 70), (second, 2, 40)] {
            cuda.fill(address, byte, mib * MIB, stream);
        }
        cuda.synchronize(stream);
        tags.limit_host(80);
        // Both do not fit, and nothing sleeps.
        refused(tags.sleep(r#"["a", "b"]"#, true), "cannot keep 40 MiB");
        assert_eq!(tags.asleep(), "[]");
        for _ in 0..2 {
            // Memory that one tag keeps while it is awake is given back for the other.
            for (tag, mib) in [(r#"["a"]"#, 70), (r#"["b"]"#, 40)] {
                tags.sleep(tag, true).unwrap();
                assert!((mib..=80).contains(&tags.host()), "{}", tags.host());
                tags.wake("null").unwrap();
            }
        }
        tags.limit_host(30);
        // What the tag has already is not asked for.
        tags.sleep(r#"["b"]"#, true).unwrap();
        tags.wake("null").unwrap();
        tags.release_host("null").unwrap();
        refused(tags.sleep(r#"["b"]"#, true), "cannot keep 40 MiB: 30 MiB of");
        refused(tags.prepare(r#"["b"]"#), "cannot keep 40 MiB");
        tags.limit_host(1 << 30);
        tags.prepare("null").unwrap();
        assert_eq!(tags.host(), 110);
        cuda.expect(first, 1, 70 * MIB);
        cuda.expect(second, 2, 40 * MIB);
    }

    without_a_tag [] says [] {
        let (tags, _cuda) = (Tags::load(), Cuda::load());
        // SAFETY: it has no requirements; null is allowed to be freed.
        unsafe {
            (tags.leave)();
            assert!((tags.malloc)(0, 0, null_mut()).is_null());
            assert!(!(tags.malloc)(2 << 20, 0, null_mut()).is_null());
            (tags.free)(null_mut(), 0, 0, null_mut());
        }
        tags.sleep(r#"["default"]"#, false).unwrap();
        assert!(tags.torch.text("cuvmm_table").contains("default"));
    }
}

/// A thread allocates under a tag while another one moves it: no block is awake when the tag is asleep.
mod nothing_comes_to_a_tag_that_moves {
    use super::*;

    #[test]
    fn over_the_stand_in() {
        let case = concat!(module_path!(), "::in_a_process_of_its_own");
        for line in crate::common::run(case, &[]) {
            assert!(line.ends_with("the tag \"a\" is asleep"), "{line}");
        }
    }

    #[test]
    #[ignore = "needs the stand-in; `over_the_stand_in` runs it in a process of its own"]
    fn in_a_process_of_its_own() {
        crate::common::case(|| {
            let (tags, cuda) = (Tags::load(), Cuda::load());
            let first = tags.allocate("a", 2);
            std::thread::scope(|scope| {
                let more = scope.spawn(|| {
                    let mut made = vec![];
                    while made.len() < 60 {
                        match tags.allocate("a", 2) {
                            0 => std::thread::yield_now(),
                            address => made.push(address),
                        }
                    }
                    made
                });
                while !more.is_finished() {
                    tags.sleep(r#"["a"]"#, false).unwrap();
                    assert_eq!(cuda.physicals_and_mappings(), (0, 0), "a block is awake");
                    tags.wake(r#"["a"]"#).unwrap();
                    std::thread::yield_now();
                }
                let made = more.join().unwrap();
                made.into_iter().for_each(|address| tags.free(address));
            });
            tags.free(first);
            tags.torch.reset();
            assert_eq!(cuda.physicals_and_mappings(), (0, 0));
        });
    }
}

over_a_driver_that_refuses! {
    /// The driver refuses a call of each kind once, at every place where it is made. All tags are then as
    /// before, with their contents.
    a_refusal_moves_no_tag {
        let (tags, cuda) = (Tags::load(), Cuda::load());
        let refuse: unsafe extern "C" fn(i64, i64) = cuda.function("refuse_after");
        let stream = cuda.stream();
        let blocks: Vec<(usize, u8, usize)> = ["a", "b", "c"]
            .iter()
            .zip(1..)
            .flat_map(|(tag, byte)| [(tag, byte, 6), (tag, byte + 10, 4)])
            .map(|(tag, byte, mib)| (tags.allocate(tag, mib), byte, mib))
            .collect();
        let fill = || {
            for &(address, byte, mib) in &blocks {
                cuda.fill(address, byte, mib * MIB, stream);
            }
            cuda.synchronize(stream);
        };
        let expect = || {
            for &(address, byte, mib) in &blocks {
                cuda.expect(address, byte, mib * MIB);
            }
        };
        let all = r#"["a", "b", "c"]"#;
        // SAFETY: it may be called at any time.
        let refuse = |unmap, map| unsafe { refuse(unmap, map) };
        fill();
        let before = cuda.physicals_and_mappings();
        for keep in [false, true] {
            let mut refused = 0;
            loop {
                refuse(refused, -1);
                let outcome = tags.sleep(all, keep);
                refuse(-1, -1);
                let Err(error) = outcome else { break };
                assert!(error.contains("CUDA_ERROR_UNKNOWN"), "{error}");
                assert_eq!(tags.asleep(), "[]");
                assert_eq!(cuda.physicals_and_mappings(), before);
                expect();
                refused += 1;
            }
            assert!(refused >= 6, "{refused}: an unmapping for each block");
            assert_eq!(tags.asleep(), r#"["a","b","c"]"#);
            let mut refused = 0;
            loop {
                refuse(-1, refused);
                let outcome = tags.wake(all);
                refuse(-1, -1);
                let Err(error) = outcome else { break };
                assert!(error.contains("CUDA_ERROR_UNKNOWN"), "{error}");
                assert_eq!(tags.asleep(), r#"["a","b","c"]"#);
                assert_eq!(cuda.physicals_and_mappings().1, 0);
                refused += 1;
            }
            assert!(refused >= 6, "{refused}: a mapping for each block");
            assert_eq!(tags.asleep(), "[]");
            if keep {
                expect();
            }
            fill();
        }
    }
}
