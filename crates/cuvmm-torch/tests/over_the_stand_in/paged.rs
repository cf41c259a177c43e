//! Paged caches over the stand-in for libcuda: their memory under one limit with the heap, steps,
//! functions under pressure, and what is refused.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{CString, c_char, c_int};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::graphs::Graphs;
use crate::common::paged::Paged;
use crate::common::tags::Tags;
use crate::common::{Cuda, MIB, default_stream, in_a_child, over_the_stand_in};
use cuvmm::LedgerView;
use cuvmm::ledger::{Control, GroupRequest};

const BLOCK: usize = MIB;

fn mib(count: usize) -> isize {
    isize::try_from(count * MIB).unwrap()
}

/// The bytes that the last call of [`gives_up`] was asked for.
static ASKED: AtomicU64 = AtomicU64::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Gives up blocks 0 to 3 of the cache.
unsafe extern "C" fn gives_up(token: u64, bytes: u64) {
    CALLS.fetch_add(1, Ordering::SeqCst);
    ASKED.store(bytes, Ordering::SeqCst);
    let paged = Paged::load();
    paged.release(token, &[0, 1, 2, 3]).unwrap();
}

/// A request, and what a wait for it within [`waits`] returned.
static WAITS_FOR: AtomicU64 = AtomicU64::new(0);
static WAITED: AtomicI32 = AtomicI32::new(0);

/// Waits for a request.
unsafe extern "C" fn waits(_: u64, _: u64) {
    let waited = Paged::load().wait(WAITS_FOR.load(Ordering::SeqCst), 600.0);
    WAITED.store(waited, Ordering::SeqCst);
}

/// Notes the call only.
unsafe extern "C" fn notes(_: u64, _: u64) {
    CALLS.fetch_add(1, Ordering::SeqCst);
}

static COLLECTIONS: AtomicU64 = AtomicU64::new(0);

/// Collects no garbage.
unsafe extern "C" fn collects_nothing() {
    COLLECTIONS.fetch_add(1, Ordering::SeqCst);
}

/// The cache whose blocks are garbage.
static GARBAGE: AtomicU64 = AtomicU64::new(0);

/// Collects garbage: blocks 0 to 3 of the cache.
unsafe extern "C" fn collects_blocks() {
    COLLECTIONS.fetch_add(1, Ordering::SeqCst);
    let paged = Paged::load();
    paged
        .release(GARBAGE.load(Ordering::SeqCst), &[0, 1, 2, 3])
        .unwrap();
}

fn calls() -> u64 {
    CALLS.swap(0, Ordering::SeqCst)
}

/// Keeps I-103.
fn functions_are_called_on_threads_without_locks_only() {
    let (paged, cuda, tags) = (Paged::load(), Cuda::load(), Tags::load());
    let slept = tags.allocate("slept", 2);
    tags.sleep("null", false).unwrap();
    let chat = paged.cache("chat", 64, "").unwrap();
    paged.back(chat, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
    paged.on_pressure(chat, Some(notes));
    // For a pool of PyTorch, which has a lock then.
    assert_eq!(tags.allocate("tag", 2), 0);
    assert_eq!(calls(), 0);
    let wake: unsafe extern "C" fn(*const c_char, f64) -> c_int =
        paged.torch.function("cuvmm_wake_within");
    // SAFETY: the text is terminated.
    assert_eq!(unsafe { wake(c"null".as_ptr(), 0.0) }, -3);
    assert_eq!(calls(), 0);
    // While a graph may be captured.
    let graphs = Graphs::of(&paged.torch, &cuda);
    let stream = cuda.stream();
    graphs.begin(1, stream);
    assert!(paged.back(chat, &[8]).is_err());
    assert_eq!(calls(), 0);
    graphs.end(1);
    graphs.release(1);
    assert!(paged.back(chat, &[8]).is_err());
    assert!(calls() > 0);
    paged.end(chat);
    tags.wake("null").unwrap();
    tags.free(slept);
}

over_the_stand_in! {
    blocks_have_memory_while_they_are_in_use [] says [] {
        let (paged, cuda) = (Paged::load(), Cuda::load());
        for layout in ["block-major", "token-major", "layer-major"] {
            let more = format!(r#", "layout": "{layout}", "pinned": [63]"#);
            let cache = paged.cache("chat", 64, &more).unwrap();
            assert_eq!(paged.figure(cache, "pinned"), 1);
            paged.back(cache, &[5, 3]).unwrap();
            paged.back(cache, &[3]).unwrap();
            assert_eq!(paged.figure(cache, "in_use"), 2);
            for layer in 0..2 {
                for part in 0..2 {
                    let (address, [block, token, head, element]) = paged.view(cache, layer, part);
                    assert_eq!((head, element), (1024, 1));
                    for (number, at) in [(3, 0), (5, 15), (63, 7)] {
                        let offset = 2 * usize::try_from(number * block + at * token).unwrap();
                        let byte = u8::try_from(64 * part + 32 * layer).unwrap() + 1;
                        cuda.fill(address + offset, byte, 8 * 1024 * 2, null_mut());
                        cuda.synchronize(null_mut());
                        cuda.expect(address + offset, byte, 8 * 1024 * 2);
                    }
                }
            }
            paged.release(cache, &[3, 5]).unwrap();
            assert_eq!(paged.figure(cache, "in_use"), 0);
            paged.end(cache);
            paged.end(cache);
        }
        cuda.synchronize(null_mut());
        paged.torch.reset();
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
    }

    one_limit_counts_caches_and_the_heap ["CUVMM_TORCH_LIMIT" = "64MiB"] says [] {
        let (paged, cuda) = (Paged::load(), Cuda::load());
        let cache = paged.cache("chat", 1000, "").unwrap();
        let stream = cuda.stream();
        let address = paged.torch.malloc(mib(40), stream);
        assert_ne!(address, 0);
        let first: Vec<i32> = (0..24).collect();
        paged.back(cache, &first).unwrap();
        assert_eq!(paged.torch.number("cuvmm_stats", "total.held"), 64 * MIB as u64);
        let figures: serde_json::Value = serde_json::from_str(&paged.torch.json(0)).unwrap();
        let [of_cache] = figures["paged"].as_array().unwrap().as_slice() else { panic!("{figures}") };
        assert_eq!((&of_cache["name"], &of_cache["in_use"]), (&"chat".into(), &24.into()));
        assert_eq!(of_cache["committed"], 24 * BLOCK);
        let refused = paged.back(cache, &[24]).unwrap_err();
        assert!(refused.starts_with("out of memory: cannot back 1 block"), "{refused}");
        assert_eq!((paged.can_allocate(cache, 1), paged.figure(cache, "in_use")), (0, 24));
        // What the heap has free is the cache's, and what the cache has free the heap's.
        paged.torch.free(address, stream);
        assert_eq!(paged.can_allocate(cache, 40), 1);
        let further: Vec<i32> = (24..64).collect();
        paged.back(cache, &further).unwrap();
        let all: Vec<i64> = (0..64).collect();
        paged.release(cache, &all).unwrap();
        let address = paged.torch.malloc(mib(62), stream);
        assert_ne!(address, 0);
        paged.back(cache, &[999]).unwrap();
        assert!(paged.reserve(cache, 3).unwrap_err().starts_with("out of memory"));
        assert_eq!(paged.figure(cache, "reserved"), 0);
        paged.torch.free(address, stream);
        paged.reserve(cache, 3).unwrap();
        assert_eq!(paged.figure(cache, "reserved"), 3);
        paged.reserve(cache, 0).unwrap();
        paged.release(cache, &[999]).unwrap();
        assert!(paged.purge(cache) > 0);
        paged.torch.reset();
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
        paged.end(cache);
    }

    memory_is_not_handed_on_before_the_work_on_it_is_complete ["CUVMM_TORCH_LIMIT" = "32MiB"] says [] {
        let (paged, cuda) = (Paged::load(), Cuda::load());
        let (home, other) = (cuda.stream(), cuda.stream());
        let more = format!(r#", "stream": {}"#, home.addr());
        let twice = paged.cache("chat", 16, &more).unwrap_err();
        assert!(twice.contains("duplicate field `stream`"), "{twice}");
        let group = r#"{"layers": 1, "tokens": 16, "parts": [[8, 4096, 2]]}"#;
        let cache = paged.made(&format!(
            r#"{{"device": 0, "stream": {}, "name": "chat", "blocks": 64, "groups": [{group}]}}"#,
            home.addr()
        )).unwrap();
        assert_eq!(paged.figure(cache, "block_bytes"), MIB as u64);
        paged.record(cache, other).unwrap();
        let (address, _) = paged.view(cache, 0, 0);
        for stream in [home, other] {
            let all: Vec<i32> = (0..32).collect();
            paged.back(cache, &all).unwrap();
            cuda.hold(stream, true);
            cuda.fill(address, 7, 32 * MIB, stream);
            let step = paged.begin_step(cache).unwrap();
            let all: Vec<i64> = (0..32).collect();
            paged.release(cache, &all).unwrap();
            assert_eq!(paged.figure(cache, "leaving"), 32);
            assert_eq!(paged.figure(cache, "committed"), 32 * MIB as u64);
            paged.end_step(cache, step);
            paged.end_step(cache, step);
            assert_eq!((paged.figure(cache, "leaving"), paged.figure(cache, "committed")), (0, 0));
            assert_eq!(paged.purge(cache), 0);
            assert_eq!(cuda.physicals_and_mappings(), (2, 2));
            cuda.hold(stream, false);
            cuda.synchronize(stream);
            assert_eq!(paged.purge(cache), 32 * MIB as u64);
        }
        // A cache that ends with a step, and with work in progress.
        paged.back(cache, &[0]).unwrap();
        paged.begin_step(cache).unwrap();
        paged.begin_step(cache).unwrap();
        cuda.hold(other, true);
        cuda.fill(address, 7, MIB, other);
        paged.end(cache);
        assert!(paged.begin_step(cache).is_err());
        paged.torch.reset();
        assert_eq!(cuda.physicals_and_mappings(), (1, 1));
        cuda.hold(other, false);
        cuda.synchronize(other);
        paged.torch.reset();
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
    }

    what_cannot_be_is_refused [] says [] {
        let (paged, cuda) = (Paged::load(), Cuda::load());
        let cache = paged.cache("chat", 10, r#", "pinned": [9]"#).unwrap();
        let refused = |outcome: Result<(), String>, text: &str| {
            let error = outcome.unwrap_err();
            assert!(error.contains(text), "{error}\nlacks: {text}");
        };
        let made = |name: &str, blocks, more: &str| paged.cache(name, blocks, more).map(drop);
        for (more, text) in [
            (r#", "layout": "rows""#, "unknown variant `rows`"),
            (r#", "other": 1"#, "unknown field `other`"),
            (r#", "timeout": -1"#, "must not be negative"),
            (r#", "pinned": [10]"#, "there is no block 10"),
            (r#", "pinned": [-1]"#, "JSON"),
        ] {
            refused(made("a", 10, more), text);
        }
        refused(made("", 10, ""), "name");
        refused(made("a", 0, ""), "blocks");
        refused(made("torch", 10, ""), "torch");
        refused(paged.made("{}").map(drop), "missing field");
        let group = r#"{"layers": 1, "tokens": 1, "parts": [[1, 3, 1], [1, 1, 4]]}"#;
        for (device, stream, groups) in [(0, 0, group), (0, 0, ""), (64, 0, ""), (-1, 0, ""), (0, 2, "")] {
            let json = format!(
                r#"{{"device": {device}, "stream": {stream}, "name": "a", "blocks": 1, "groups": [{groups}]}}"#
            );
            assert!(paged.made(&json).is_err(), "{json}");
        }
        let tags = Tags::load();
        refused(paged.back(cache, &[1, 10]), "there is no block 10");
        refused(paged.back(cache, &[1, -1]), "not -1");
        refused(paged.release(cache, &[1]), "block 1 is not in use");
        refused(paged.release(cache, &[9]), "pinned");
        refused(paged.release(cache, &[1 << 40]), "not 1099511627776");
        paged.back(cache, &[1]).unwrap();
        refused(paged.release(cache, &[1, 2]), "block 2 is not in use");
        assert_eq!(paged.figure(cache, "in_use"), 1);
        refused(paged.reserve(cache, 9), "blocks to be reserved");
        paged.refuses_null(cache);
        for (group, layer, part) in [(1, 0, 0), (0, 2, 0), (0, 0, 2), (u32::MAX, u32::MAX, u32::MAX)] {
            assert_eq!(paged.view_length(cache, group, layer, part), 0);
            assert!(paged.torch.last_error().contains("no part"));
        }
        refused(paged.record(cache, default_stream(2)), "stream");
        let mut found = [7, 7];
        // SAFETY: null is allowed, and the slices have these numbers.
        unsafe {
            assert_eq!((paged.back)(cache, [1_i16].as_ptr().cast(), 1, 2, None), -1);
            let numbers = [1_i32];
            let ask = |chosen, found| {
                (paged.emptiest)(cache, 1, numbers.as_ptr().cast(), 1, 4, chosen, found)
            };
            assert_eq!(ask(null_mut(), &raw mut found), -1);
            let mut chosen = [9];
            assert_eq!(ask(chosen.as_mut_ptr(), null_mut()), -1);
            assert_eq!((chosen, found), ([9], [7, 7]));
            assert_eq!(ask(chosen.as_mut_ptr(), &raw mut found), 0);
            assert_eq!((chosen, found), ([1], [1, 2 * MIB as u64]));
        }
        for token in [0, cache + 100, u64::MAX] {
            refused(paged.back(token, &[1]), "there is no paged cache");
            refused(paged.release(token, &[1]), "there is no paged cache");
            refused(paged.record(token, null_mut()), "there is no paged cache");
            assert_eq!((paged.can_allocate(token, 1), paged.try_back(token, &[1])), (-1, -1));
            paged.end_step(token, 1);
            paged.end(token);
        }
        paged.end(cache);
        refused(paged.back(cache, &[1]), "it was closed");
        // The name is free for a tag.
        let address = tags.allocate("chat", 2);
        assert_ne!(address, 0);
        tags.free(address);
        cuda.synchronize(null_mut());
    }

    blocks_are_given_up_under_pressure ["CUVMM_TORCH_LIMIT" = "8MiB"] says [] {
        let (paged, cuda) = (Paged::load(), Cuda::load());
        let chat = paged.cache("chat", 64, "").unwrap();
        let code = paged.cache("code", 64, "").unwrap();
        paged.back(chat, &[0, 1, 2, 3]).unwrap();
        paged.back(code, &[0, 1, 2, 3]).unwrap();
        paged.on_pressure(chat, Some(gives_up));
        // Another cache's request, the cache's own, and an allocation.
        paged.back(code, &[4, 5]).unwrap();
        assert_eq!((calls(), ASKED.load(Ordering::SeqCst)), (1, 2 * MIB as u64));
        paged.release(code, &[4, 5]).unwrap();
        paged.back(chat, &[0, 1, 2, 3]).unwrap();
        paged.back(chat, &[8, 9]).unwrap();
        assert_eq!((calls(), paged.figure(chat, "in_use")), (1, 2));
        paged.release(chat, &[8, 9]).unwrap();
        paged.back(chat, &[0, 1, 2, 3]).unwrap();
        let address = paged.torch.malloc(mib(2), null_mut());
        assert_ne!(address, 0);
        assert_eq!(calls(), 1);
        paged.torch.free(address, null_mut());
        // Removed, or after the end of all functions.
        paged.back(chat, &[0, 1, 2, 3]).unwrap();
        paged.on_pressure(chat, None);
        assert!(paged.back(code, &[4]).is_err());
        paged.on_pressure(chat, Some(gives_up));
        let set: unsafe extern "C" fn(Option<unsafe extern "C" fn()>) =
            paged.torch.function("cuvmm_set_collector");
        // SAFETY: it may be called at any time.
        unsafe { set(None) };
        assert!(paged.back(code, &[4]).is_err());
        assert_eq!(calls(), 0);
        paged.end(chat);
        paged.back(code, &[4]).unwrap();
        paged.end(code);
        cuda.synchronize(null_mut());
        paged.torch.reset();
        assert_eq!(cuda.physicals_and_mappings(), (0, 0));
    }

    an_attempt_without_waiting_calls_nothing_and_a_request_waits_once ["CUVMM_TORCH_LIMIT" = "8MiB"] says [] {
        let (paged, tags) = (Paged::load(), Tags::load());
        let chat = paged.cache("chat", 64, "").unwrap();
        paged.back(chat, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        paged.on_pressure(chat, Some(notes));
        for timeout in ["", r#", "timeout": 0"#] {
            let code = paged.cache("code", 64, timeout).unwrap();
            assert_eq!(paged.try_back(code, &[0]), 0);
            assert_eq!((calls(), paged.figure(code, "in_use")), (0, 0));
            assert!(paged.back(code, &[0]).is_err());
            let in_one_turn = calls();
            assert!(in_one_turn > 0);
            // The turn after a collection of garbage waits for nothing, and calls no function.
            let numbers = [0_i32];
            let back = |collector| {
                // SAFETY: the slice has this number, and the collectors may be called at any time.
                unsafe { (paged.back)(code, numbers.as_ptr().cast(), 1, 4, Some(collector)) }
            };
            assert_eq!(back(collects_nothing), -3);
            assert_eq!((calls(), COLLECTIONS.swap(0, Ordering::SeqCst)), (in_one_turn, 1));
            // SAFETY: it may be called at any time.
            assert_eq!(unsafe { (paged.reserve)(code, 1, Some(collects_nothing)) }, -3);
            assert_eq!((calls(), COLLECTIONS.swap(0, Ordering::SeqCst)), (in_one_turn, 1));
            // It gets what was collected.
            GARBAGE.store(chat, Ordering::SeqCst);
            assert_eq!(back(collects_blocks), 0);
            assert_eq!((calls(), COLLECTIONS.swap(0, Ordering::SeqCst)), (in_one_turn, 1));
            assert_eq!(paged.try_back(code, &[0, 1]), 1);
            assert_eq!(paged.figure(code, "in_use"), 2);
            assert_eq!(paged.try_back(code, &[64]), -1);
            tags.sleep("[\"code\"]", false).unwrap();
            assert_eq!(paged.try_back(code, &[2]), -1);
            assert!(paged.torch.last_error().contains("code"), "{}", paged.torch.last_error());
            tags.wake("[\"code\"]").unwrap();
            paged.end(code);
            paged.back(chat, &[0, 1, 2, 3]).unwrap();
            calls();
        }
        paged.end(chat);
    }

    a_request_stays_in_line_while_its_caller_goes_on ["CUVMM_TORCH_LIMIT" = "8MiB"] says [] {
        let (paged, tags) = (Paged::load(), Tags::load());
        let chat = paged.cache("chat", 64, "").unwrap();
        let code = paged.cache("code", 64, "").unwrap();
        // Answered by the first attempt: the memory is the request's until it is taken.
        let request = paged.request(code, &[0, 0]).unwrap();
        let figures = || (paged.figure(code, "in_use"), paged.figure(code, "committed"));
        assert_eq!((paged.is_done(request), figures()), (1, (0, 2 * MIB as u64)));
        assert_eq!((paged.wait(request, 0.0), paged.withdraw(request), figures()), (1, 0, (0, 0)));
        let request = paged.request(code, &[0, 0]).unwrap();
        assert_eq!([paged.wait(request, 0.0), paged.take(request), paged.take(request)], [1; 3]);
        assert_eq!((figures(), paged.withdraw(request), paged.withdraw(request)), ((1, 2 * MIB as u64), 1, 0));
        assert_eq!((paged.is_done(request), paged.wait(request, 0.0), paged.take(request)), (-1, -1, -1));
        assert!(paged.torch.last_error().contains("there is no request"));
        assert_eq!(figures().0, 1);
        paged.release(code, &[0]).unwrap();

        paged.back(chat, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        let request = paged.request(code, &[0, 1]).unwrap();
        assert_eq!((paged.is_done(request), paged.wait(request, 0.0), paged.take(request)), (0, 0, 0));
        // It does not fit into what comes free for the other: requests that fit overtake each other if
        // memory comes free between their attempts.
        let first = paged.request(code, &[2, 3, 4, 5]).unwrap();
        paged.release(chat, &[0, 1]).unwrap();
        assert_eq!(paged.taken(request), 1);
        assert_eq!((paged.figure(code, "in_use"), paged.take(first)), (2, 0));
        // Granted and not taken: the memory is the request's until it ends.
        paged.release(chat, &[2, 3, 4, 5]).unwrap();
        while paged.is_done(first) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(figures(), (2, 6 * MIB as u64));
        assert_eq!(paged.try_back(chat, &[0]), 0);
        assert_eq!((paged.withdraw(first), paged.withdraw(first)), (0, 0));
        assert_eq!((paged.wait(first, 0.0), paged.try_back(chat, &[0, 1])), (-1, 1));

        // A function of the program gives blocks up, on a thread of the library.
        paged.release(code, &[0, 1]).unwrap();
        paged.back(chat, &[2, 3, 4, 5]).unwrap();
        let waiting = [12, 14].map(|it| {
            let request = paged.request(code, &[it]).unwrap();
            WAITS_FOR.store(request, Ordering::SeqCst);
            paged.on_pressure(chat, Some(waits));
            request
        });
        while WAITED.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(WAITED.load(Ordering::SeqCst), -1);
        assert_eq!(waiting.map(|it| paged.withdraw(it)), [0, 0]);
        paged.on_pressure(chat, Some(gives_up));
        let request = paged.request(code, &[8, 9, 10, 11]).unwrap();
        assert_eq!((paged.wait(request, f64::INFINITY), paged.take(request), calls()), (1, 1, 1));
        paged.on_pressure(chat, None);

        // Ended from another thread, by the sleep of the cache and by its end.
        let request = paged.request(code, &[12, 13]).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| (paged.wait(request, 600.0), paged.take(request)));
            paged.withdraw(request);
            assert_eq!(waiting.join().unwrap().1, -1);
        });
        let asleep = paged.request(code, &[12, 13]).unwrap();
        tags.sleep("[\"code\"]", false).unwrap();
        assert_eq!((paged.taken(asleep), paged.take(asleep)), (-1, -1));
        assert!(paged.torch.last_error().contains("sleeps with the pool \"code\""), "{}", paged.torch.last_error());
        let refused = paged.request(code, &[12]).unwrap();
        assert_eq!((paged.is_done(refused), paged.take(refused)), (1, -1));
        tags.wake("[\"code\"]").unwrap();
        let refused = paged.request(code, &[64]).unwrap();
        assert_eq!((paged.is_done(refused), paged.take(refused)), (1, -1));
        assert!(paged.torch.last_error().contains("there is no block 64"));
        let ends = paged.request(code, &[12, 13, 14, 15]).unwrap();
        paged.end(code);
        assert_eq!(paged.taken(ends), -1);
        assert!(paged.torch.last_error().contains("was dropped"), "{}", paged.torch.last_error());
        let large: Vec<i32> = (0..20).collect();
        let refused = paged.request(chat, &large).unwrap();
        assert_eq!(paged.taken(refused), -3);
        for seconds in [-1.0, f64::NAN] {
            let request = paged.request(chat, &[4]).unwrap();
            assert_eq!(paged.wait(request, seconds), -1);
            paged.withdraw(request);
        }
        assert!(paged.request(code, &[0]).unwrap_err().contains("it was closed"));
        paged.end(chat);
        paged.torch.reset();
        assert_eq!(Cuda::load().physicals_and_mappings(), (0, 0));
    }

    no_function_is_called_where_locks_may_be_held ["CUVMM_TORCH_LIMIT" = "8MiB"] says ["under a tag"] {
        functions_are_called_on_threads_without_locks_only();
    }

    no_function_is_called_for_a_wake_that_another_program_asks_for [] says [] {
        let directory = tempfile::tempdir().unwrap();
        let (paged, tags) = (Paged::load(), Tags::load());
        let configure: unsafe extern "C" fn(*const c_char) -> c_int =
            paged.torch.function("cuvmm_configure");
        let join: unsafe extern "C" fn(*const c_char, *mut u64) -> c_int =
            paged.torch.function("cuvmm_group_join");
        let json = serde_json::json!({ "ledger": directory.path() });
        let json = CString::new(json.to_string()).unwrap();
        // SAFETY: the text is terminated.
        assert_eq!(unsafe { configure(json.as_ptr()) }, 0);
        tags.allocate("weights", 20);
        let mut group = 0;
        // SAFETY: the text is terminated, and the number can be written.
        assert_eq!(unsafe { join(c"{\"name\": \"tp0\", \"ranks\": 1}".as_ptr(), &raw mut group) }, 0);
        tags.sleep("null", false).unwrap();
        let cache = paged.cache("chat", 256, r#", "timeout": 0"#).unwrap();
        assert!((0..128).any(|at| paged.back(cache, &[2 * at, 2 * at + 1]).is_err()));
        paged.on_pressure(cache, Some(notes));
        let mut files = std::fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().path());
        let ledger = files.find(|path| path.extension() == Some("cuvmm-ledger".as_ref()));
        let view = LedgerView::open(ledger.unwrap()).unwrap();
        let ranks = [view.control(view.stats().processes[0].slot)];
        let request = GroupRequest::new("tp0", true).timeout(Duration::ZERO);
        let refused = Control::group(&ranks, &request).pop().unwrap().unwrap_err().to_string();
        assert!(refused.contains("cannot wake 20 MiB"), "{refused}");
        assert_eq!(calls(), 0);
        assert!(paged.back(cache, &[255]).is_err());
        assert_ne!(calls(), 0);
        paged.end(cache);
        tags.wake("null").unwrap();
    }

    a_forked_child_changes_nothing [] says [] {
        let (paged, cuda) = (Paged::load(), Cuda::load());
        let cache = paged.cache("chat", 10, "").unwrap();
        paged.back(cache, &[1]).unwrap();
        let step = paged.begin_step(cache).unwrap();
        let request = paged.request(cache, &[3]).unwrap();
        let code = in_a_child(|| {
            let refused = [
                paged.back(cache, &[2]),
                paged.release(cache, &[1]),
                paged.reserve(cache, 1),
                paged.begin_step(cache).map(drop),
                paged.request(cache, &[4]).map(drop),
                paged.cache("other", 1, "").map(drop),
            ];
            let forked = |it: &Result<(), String>| it.as_ref().is_err_and(|it| it.contains("forked"));
            paged.end_step(cache, step);
            paged.end(cache);
            paged.withdraw(request);
            let asked = [
                paged.can_allocate(cache, 1),
                paged.try_back(cache, &[2]),
                paged.is_done(request),
                paged.wait(request, 600.0),
                paged.take(request),
            ];
            i32::from(!refused.iter().all(forked) || asked != [-1; 5])
        });
        assert_eq!(code, 0);
        paged.end_step(cache, step);
        assert_eq!(paged.figure(cache, "in_use"), 1);
        assert_eq!((paged.take(request), paged.figure(cache, "in_use")), (1, 2));
        paged.end(cache);
        cuda.synchronize(null_mut());
    }
}
