//! Hardened pools on the real driver: what a guard and an unmapped block do to a copy, and to a
//! kernel, which loses the context and therefore has a process of its own.
//!
//! `unsafe` is used for the driver's own copies, which take any address.
#![allow(unsafe_code)]

use std::time::Duration;

use crate::gpu;
use crate::gpu::{D0, Stage};
use crate::on_each;
use cuvmm::driver::DeviceAddress;
use cuvmm::driver::sys::CUresult;
use cuvmm::{Block, Hardened, Limit, Pool, Stream, Tenant};

const FILL: u8 = 0xDF;

/// Long enough for any work here.
const PATIENCE: Duration = Duration::from_secs(10);

fn pool(stage: &Stage, granules: u64) -> Pool {
    let builder = Pool::builder(&stage.device).limit(Limit::Bytes(granules * stage.g()));
    builder.hardened(Hardened::new()).build().unwrap()
}

fn block(tenant: &Tenant, stream: &Stream, size: u64) -> Block {
    let builder = tenant.block(size).home_stream(stream);
    builder.timeout(PATIENCE).allocate().unwrap()
}

/// Returns the driver's results for copies through an address that was kept.
fn late_copies(stage: &Stage, at: DeviceAddress) -> [Result<(), CUresult>; 2] {
    let driver = stage.driver();
    let mut bytes = [0; 4];
    // SAFETY: if nothing is mapped there, the driver refuses both copies. Otherwise the test has
    // failed.
    let answers = unsafe {
        [
            driver.copy_to_host(D0, &mut bytes, at),
            driver.copy_to_device(D0, at, &bytes),
        ]
    };
    answers.map(|answer| answer.map_err(|error| error.code().unwrap()))
}

/// Checks that both copies are refused by the call itself. A stand-in may choose the code.
fn refused(stage: &Stage, at: u64) {
    let exact = stage.scaled(true, false);
    for answer in late_copies(stage, DeviceAddress(at)) {
        let as_the_gpu = answer == Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        assert!(
            as_the_gpu || (!exact && answer.is_err()),
            "{at:#x}: {answer:?}"
        );
    }
}

on_each! {
    fn copies_over_an_end_and_to_a_block_that_is_gone_are_refused(stage) {
        let g = stage.g();
        let pool = pool(stage, 32);
        let tenant = pool.tenant("a").register().unwrap();
        let stream = stage.stream();
        let blocks = [1, 2, 3].map(|granules| block(&tenant, &stream, granules * g));
        let stamps = [0; 3].map(|_| stage.stamp());
        for (block, stamp) in blocks.iter().zip(stamps) {
            stage.fill(&stream, block, stamp);
        }
        for block in &blocks {
            let (first, end) = (block.address().0, block.address().0 + block.size());
            for at in [first - 4, first - g, end, end + g - 4, end - 2] {
                refused(stage, at);
            }
        }
        for (block, stamp) in blocks.iter().zip(stamps) {
            stage.check(&stream, block, stamp);
        }
        stage.settle();
        let kept = blocks.each_ref().map(|block| block.address().0);
        drop(blocks);
        stream.synchronize().unwrap();
        pool.trim(u64::MAX).unwrap();
        assert_eq!((pool.stats().committed, pool.stats().resting_blocks), (0, 3));
        // The memory belongs to another block now, and the old addresses do not lead to it.
        let next = block(&tenant, &stream, 6 * g);
        let stamp = stage.stamp();
        stage.fill(&stream, &next, stamp);
        for at in kept {
            refused(stage, at);
        }
        stage.check(&stream, &next, stamp);
        stage.settle();
        drop((next, tenant));
        pool.close().unwrap();
    }

    fn freed_memory_is_filled_behind_the_work_and_stays_until_it_has_passed(stage) {
        let g = stage.g();
        let pool = pool(stage, 8);
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let [stream, other] = stage.streams();
        let stamp = stage.stamp();
        for step in 0..4 {
            let to_scrub = block(&a, &stream, 8 * g);
            let gate = stage.work().gate(&stream);
            stage.fill(&stream, &to_scrub, stamp);
            let at = to_scrub.address();
            drop(to_scrub);
            pool.trim(u64::MAX).unwrap();
            assert_eq!(pool.stats().pending_free, 8 * g, "unmapped under a kernel");
            // A legitimate late access on the home stream: it finds the fill pattern.
            let looked = stage.pinned(4 * g);
            if step == 0 {
                looked.copy_from(&stream, at);
            }
            gate.open();
            stream.synchronize().unwrap();
            if step == 0 {
                looked.expect([FILL; 4]);
            }
            match step {
                0 | 1 => {
                    let next = block(&a, &stream, 8 * g);
                    let mut seen = [0; 64];
                    for granule in 0..8 {
                        next.read(granule * g + g - 64, &mut seen).unwrap();
                        assert_eq!(seen, [FILL; 64]);
                    }
                }
                2 => stage.check(&other, &block(&b, &other, 8 * g), 0),
                _ => {
                    let zeroed = a.block(8 * g).home_stream(&other).zeroed(true);
                    stage.check(&other, &zeroed.timeout(PATIENCE).allocate().unwrap(), 0);
                }
            }
            stage.settle();
        }
        drop((a, b));
        pool.close().unwrap();
    }

    fn many_blocks_come_and_go_and_nobody_finds_anothers_bytes(stage) {
        let g = stage.g();
        let pool = pool(stage, 64);
        let tenant = pool.tenant("a").register().unwrap();
        let streams: [Stream; 3] = stage.streams();
        let mut live: Vec<(Block, usize, u32)> = vec![];
        for round in 0..stage.scaled(600, 200) {
            let on = round % 3;
            let size = (1 + round as u64 % 5) * g;
            let block = block(&tenant, &streams[on], size);
            let stamp = stage.stamp();
            stage.fill(&streams[on], &block, stamp);
            live.push((block, on, stamp));
            if live.len() > 6 {
                let (block, on, stamp) = live.remove(round % live.len());
                stage.check(&streams[on], &block, stamp);
            }
        }
        for (block, on, stamp) in live {
            stage.check(&streams[on], &block, stamp);
        }
        stage.settle();
        drop(tenant);
        pool.close().unwrap();
    }
}

fn write_behind_the_end(stage: Stage) {
    let g = stage.g();
    let pool = pool(&stage, 16);
    let tenant = pool.tenant("a").register().unwrap();
    let [stream, other] = stage.streams();
    let [before, block, behind] = [0; 3].map(|_| block(&tenant, &other, 2 * g));
    other.synchronize().unwrap();
    let end = DeviceAddress(block.address().0 + 2 * g);
    stage
        .work()
        .fill(&stream, end, g, stage.stamp(), Duration::ZERO);
    stream.synchronize().unwrap_err();
    assert!(stage.device.lost().is_some());
    drop((before, block, behind, tenant, stream, other));
    pool.close().unwrap();
    assert_eq!(stage.device.drop_failures(), 0);
}

#[test]
fn a_kernel_behind_the_end_faults_on_host() {
    write_behind_the_end(Stage::on_host());
}

#[test]
fn a_kernel_behind_the_end_faults_on_gpu() {
    if let Some(stage) = Stage::on_gpu("a_kernel_behind_the_end_faults_on_gpu") {
        stage.leave_to_a_process_of_its_own("hardened::in_a_process_of_its_own");
    }
}

#[test]
#[ignore = "loses the context of its process; the test on the GPU runs it in a process of its own"]
fn in_a_process_of_its_own() {
    if let Some(stage) = Stage::on_gpu("in_a_process_of_its_own") {
        write_behind_the_end(stage);
        gpu::say_ended();
    }
}
