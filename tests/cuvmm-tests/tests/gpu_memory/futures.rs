//! Futures that wait for memory to which kernels still write: they are granted in order when the
//! kernels have ended, and the new owner sees no late write. Sleeping and waking as futures keep
//! every word.

use std::task::Poll;
use std::time::{Duration, Instant};

use crate::executor::{Task, block_on};
use crate::on_each;
use cuvmm::pool::futures::AllocateFuture;
use cuvmm::{Block, Contents, HostStore, Limit, Mapper, Pool};

/// Returns the block of the future that is granted first.
fn first(waiting: &mut Vec<Task<AllocateFuture>>) -> Block {
    let begun = Instant::now();
    loop {
        for index in 0..waiting.len() {
            if let Poll::Ready(block) = waiting[index].poll() {
                drop(waiting.remove(index));
                return block.unwrap();
            }
        }
        assert!(begun.elapsed().as_secs() < 120, "never granted");
        std::thread::sleep(Duration::from_micros(50));
    }
}

on_each! {
    fn what_a_late_kernel_writes_is_granted_when_it_has_ended(stage) {
        let mapper = Mapper::start(&stage.device).unwrap();
        let size = 16 * stage.g();
        let builder = Pool::builder(&stage.device).limit(Limit::Bytes(size));
        let pool = builder.mapper(&mapper).build().unwrap();
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let [one, two] = stage.streams();
        for round in 0..stage.scaled(30, 10) {
            let block = block_on(a.block(size).home_stream(&one).allocate_async()).unwrap();
            stage.late_fill(&one, &block, stage.stamp(), Duration::from_millis(10));
            let futures = [a.allocate_async(size), b.block(size).home_stream(&two).allocate_async()];
            let mut waiting: Vec<_> = futures.into_iter().map(Task::waiting).collect();
            if round % 2 == 1 {
                waiting.reverse();
            }
            drop(block);
            // The kernel may end between their turns, so either can be first.
            while !waiting.is_empty() {
                let block = first(&mut waiting);
                let stamp = stage.stamp();
                stage.fill(&two, &block, stamp);
                stage.check(&two, &block, stamp);
                one.synchronize().unwrap();
                stage.check(&two, &block, stamp);
                block.record_use(&two).unwrap();
                drop(block);
            }
        }
        stage.settle();
        drop((a, b));
        pool.close().unwrap();
        drop(mapper);
    }

    fn blocks_grow_as_futures_and_keep_their_words(stage) {
        let mapper = Mapper::start(&stage.device).unwrap();
        let (g, stream) = (stage.g(), stage.stream());
        let builder = Pool::builder(&stage.device).limit(Limit::Bytes(48 * g));
        let pool = builder.mapper(&mapper).build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let mut block = tenant.block(4 * g).capacity(40 * g).home_stream(&stream).allocate().unwrap();
        let stamp = stage.stamp();
        stage.fill(&stream, &block, stamp);
        let other = tenant.allocate(40 * g).unwrap();
        let growth = Task::waiting(block.grow_to_async(32 * g));
        drop(other);
        growth.finish().unwrap();
        let begun = tenant.block(4 * g).home_stream(&stream).allocate().unwrap();
        block.shrink_to(4 * g).unwrap();
        stage.check(&stream, &block, stamp);
        // Given up, but still read by the kernel.
        block_on(block.grow_to_async(40 * g)).unwrap();
        let stamp = stage.stamp();
        stage.fill(&stream, &block, stamp);
        stage.check(&stream, &block, stamp);
        stage.settle();
        drop((begun, block, tenant));
        pool.close().unwrap();
        drop(mapper);
    }

    fn what_sleeps_as_a_future_wakes_with_every_word(stage) {
        let (g, stream) = (stage.g(), stage.stream());
        let pool = stage.pool(64);
        let tenant = pool.tenant("a").register().unwrap();
        let blocks = [16, 1, 7].map(|granules| tenant.allocate_on(&stream, granules * g).unwrap());
        let stamps = [(); 3].map(|()| stage.stamp());
        let store = HostStore::builder(&stage.device).pinned(24 * g + (6 << 20)).build().unwrap();
        for (block, stamp) in blocks.iter().zip(stamps) {
            stage.fill(&stream, block, stamp);
        }
        for _ in 0..stage.scaled(5, 2) {
            let blocks_of = || tenant.blocks().timeout(Duration::from_secs(30));
            let slept = block_on(blocks_of().sleep_async(Contents::Keep(&store))).unwrap();
            assert_eq!((slept.blocks, slept.kept), (3, 24 * g));
            // Canceled while it copies: everything is unchanged, whenever that was.
            drop(Task::waiting(blocks_of().wake_async()));
            let woken = loop {
                let woken = block_on(blocks_of().wake_async());
                match woken {
                    Err(cuvmm::error::SleepError::Busy { .. }) => {}
                    woken => break woken.unwrap(),
                }
            };
            assert!(woken.blocks == 3 || woken.blocks == 0);
            for (block, stamp) in blocks.iter().zip(stamps) {
                stage.check(&stream, block, stamp);
            }
        }
        stage.settle();
        drop((blocks, tenant));
        pool.close().unwrap();
    }
}
