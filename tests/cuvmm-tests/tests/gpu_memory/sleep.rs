//! Sleep and wake under real work: kernels, copies and captured graphs find everything at the same
//! addresses.
//!
//! `unsafe` is used to capture and launch graphs. Streams and graphs belong to the tests, and
//! memory that a graph uses is mapped whenever it is launched.
#![allow(unsafe_code)]

use std::time::Duration;

use crate::gpu::D0;
use crate::on_each;
use cuvmm::driver::CaptureMode;
use cuvmm::error::SleepError;
use cuvmm::{Contents, HostStore};

const LONG: Duration = Duration::from_secs(60);

on_each! {
    fn contents_come_back_word_for_word(stage) {
        let g = stage.g();
        let pool = stage.pool(48);
        let [model, other] = ["model", "other"].map(|name| pool.tenant(name).register().unwrap());
        let [stream, side] = stage.streams();
        let block = |tag: &'static str, granules: u64| {
            model.block(granules * g).tag(tag).home_stream(&stream).allocate().unwrap()
        };
        let (weights, cache) = (block("weights", 11), block("cache", 5));
        let addresses = [weights.address(), cache.address()];
        let store = HostStore::builder(pool.device()).pinned(6 * g).ordinary(5 * g).staging(2 * g);
        let store = store.build().unwrap();
        for _ in 0..4 {
            let (kept, lost) = (stage.stamp(), stage.stamp());
            let refused = loop {
                // Kernels are writing to both when the sleep begins.
                stage.late_fill(&stream, &weights, kept, Duration::from_millis(3));
                stage.late_fill(&stream, &cache, lost, Duration::from_millis(1));
                let refused = model.blocks().sleep(Contents::Discard);
                if refused.is_err() {
                    break refused;
                }
                // They were done before: this thread came late.
                model.blocks().timeout(LONG).wake().unwrap();
            };
            assert!(matches!(refused, Err(SleepError::Busy { .. })), "{refused:?}");
            let asleep = model.blocks().timeout(LONG);
            asleep.clone().tag("weights").sleep(Contents::Keep(&store)).unwrap();
            asleep.clone().tag("cache").sleep(Contents::Discard).unwrap();
            assert_eq!(model.stats().committed, 0);
            // Another tenant takes all of the memory and overwrites it.
            let all = other.block(48 * g).home_stream(&side).timeout(LONG).allocate().unwrap();
            stage.late_fill(&side, &all, stage.stamp(), Duration::from_millis(2));
            drop(all);
            model.blocks().timeout(LONG).wake().unwrap();
            assert_eq!([weights.address(), cache.address()], addresses);
            stage.check(&stream, &weights, kept);
            stage.check(&stream, &cache, 0);
            stage.settle();
        }
        drop((weights, cache, model, other));
        pool.close().unwrap();
    }

    fn a_graph_from_before_the_sleep_is_right_after_it(stage) {
        let g = stage.g();
        let pool = stage.pool(32);
        let [model, other] = ["model", "other"].map(|name| pool.tenant(name).register().unwrap());
        let [stream, side] = stage.streams();
        let block = model.allocate_on(&stream, 9 * g).unwrap();
        let store = HostStore::builder(pool.device()).pinned(9 * g).build().unwrap();
        let driver = stage.driver();
        let guard = pool.capture_guard();
        // SAFETY: the stream is alive.
        unsafe { driver.capture_begin(D0, stream.as_raw(), CaptureMode::GLOBAL) }.unwrap();
        let stamp = stage.stamp();
        stage.fill(&stream, &block, stamp);
        // SAFETY: the stream is alive, and the graph is destroyed once.
        let graph = unsafe {
            let graph = driver.capture_end(D0, stream.as_raw()).unwrap();
            let ready = driver.graph_instantiate(D0, graph).unwrap();
            driver.graph_destroy(D0, graph).unwrap();
            ready
        };
        drop(guard);
        for contents in [Contents::Discard, Contents::Keep(&store)] {
            let before = stage.stamp();
            stage.fill(&stream, &block, before);
            model.blocks().timeout(LONG).sleep(contents).unwrap();
            let theirs = other.block(32 * g).home_stream(&side).timeout(LONG).allocate().unwrap();
            stage.fill(&side, &theirs, stage.stamp());
            drop(theirs);
            model.blocks().timeout(LONG).wake().unwrap();
            let kept = if let Contents::Keep(_) = contents { before } else { 0 };
            stage.check(&stream, &block, kept);
            // SAFETY: the block is awake, so it is mapped where the graph writes.
            unsafe { driver.graph_launch(D0, graph, stream.as_raw()) }.unwrap();
            stage.check(&stream, &block, stamp);
            stage.settle();
        }
        // SAFETY: the launches are complete, and the graph is destroyed once.
        unsafe { driver.graph_exec_destroy(D0, graph) }.unwrap();
        drop((block, model, other));
        pool.close().unwrap();
    }

    fn what_was_released_is_the_devices_again(stage) {
        let g = stage.g();
        let pool = stage.pool(32);
        let model = pool.tenant("model").register().unwrap();
        let [stream, _] = stage.streams();
        let block = model.allocate_on(&stream, 32 * g).unwrap();
        let stamp = stage.stamp();
        stage.fill(&stream, &block, stamp);
        stream.synchronize().unwrap();
        let before = pool.device().memory_info().unwrap().free;
        let store = HostStore::builder(pool.device()).pinned(32 * g).build().unwrap();
        model.blocks().release(true).timeout(LONG).sleep(Contents::Keep(&store)).unwrap();
        let after = pool.device().memory_info().unwrap().free;
        assert!(after >= before + 31 * g, "{before} free, and asleep {after}");
        model.blocks().wake().unwrap();
        stage.check(&stream, &block, stamp);
        stage.settle();
        drop((block, model));
        pool.close().unwrap();
    }
}
