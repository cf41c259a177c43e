//! Forks of blocks on the GPU: rows whose prefix a kernel is still writing, which are read through
//! the forks while both sides continue; and a fork that becomes the sole owner of its memory.

use std::time::Duration;

use crate::executor::Task;
use crate::gpu::{Stage, eventually};
use crate::on_each;
use cuvmm::driver::DeviceAddress;
use cuvmm::error::MemoryError;
use cuvmm::{Block, Limit, Mapper, Pool, Stream};

/// Delay of late work.
const LATE: Duration = Duration::from_millis(4);

fn fill(stage: &Stage, on: &Stream, block: &Block, range: std::ops::Range<u64>, stamp: u32) {
    let at = DeviceAddress(block.address().0 + range.start);
    let bytes = range.end - range.start;
    stage.work().fill(on, at, bytes, stamp, Duration::ZERO);
}

fn check(stage: &Stage, on: &Stream, block: &Block, range: std::ops::Range<u64>, stamp: u32) {
    let at = DeviceAddress(block.address().0 + range.start);
    stage.work().check(on, at, range.end - range.start, stamp);
}

fn stride(blocks: &[Block]) -> Vec<u64> {
    let pairs = blocks.windows(2);
    pairs
        .map(|two| two[1].address().0 - two[0].address().0)
        .collect()
}

on_each! {
    fn rows_are_forked_while_their_prefix_is_written(stage) {
        let g = stage.g();
        let pool = stage.pool(120);
        let tenant = pool.tenant("a").register().unwrap();
        let home = stage.stream();
        let row = tenant.block(6 * g).capacity(16 * g).largest_extent(2 * g);
        let row = row.home_stream(&home).timeout(Duration::from_secs(20));
        let mut rows = row.allocate_adjacent(4).unwrap();
        let [prefix, mine, theirs] = [stage.stamp(), stage.stamp(), stage.stamp()];
        for row in &rows {
            stage.late_fill(&home, row, prefix, LATE);
        }
        // Forked while the kernels have not begun: two extents are shared, and part of the third is
        // copied.
        let blocks: Vec<&Block> = rows.iter().collect();
        let mut forks = tenant.try_fork_all(&blocks, 5 * g, 6 * g).unwrap();
        assert_eq!(stride(&forks), stride(&rows));
        assert_eq!(tenant.stats().shared, 4 * 4 * g);
        let both = rows.iter_mut().map(|row| (row, 9 * g));
        let both = both.chain(forks.iter_mut().map(|fork| (fork, 8 * g)));
        tenant.grow_all(&mut both.collect::<Vec<_>>()).unwrap();
        for row in &rows {
            fill(stage, &home, row, 4 * g..9 * g, mine);
        }
        for fork in &forks {
            fill(stage, &home, fork, 5 * g..8 * g, theirs);
        }
        for row in &rows {
            check(stage, &home, row, 0..4 * g, prefix);
            check(stage, &home, row, 4 * g..9 * g, mine);
        }
        for fork in &forks {
            check(stage, &home, fork, 0..5 * g, prefix);
            check(stage, &home, fork, 5 * g..8 * g, theirs);
        }
        // The rows are dropped first, while work of the forks is pending.
        drop(rows);
        for fork in &forks {
            check(stage, &home, fork, 0..5 * g, prefix);
        }
        stage.settle();
    }

    fn one_that_shrinks_into_the_prefix_waits_for_its_work_and_has_its_own(stage) {
        let g = stage.g();
        let pool = stage.pool(60);
        let tenant = pool.tenant("a").register().unwrap();
        let [home, reader] = stage.streams();
        let block = tenant.block(6 * g).capacity(16 * g).largest_extent(2 * g);
        let root = block.home_stream(&home).allocate().unwrap();
        let [prefix, mine] = [stage.stamp(), stage.stamp()];
        fill(stage, &home, &root, 0..6 * g, prefix);
        let mut fork = root.fork(6 * g, 6 * g).unwrap();
        let other = root.fork(6 * g, 6 * g).unwrap();
        stage.device.synchronize().unwrap();
        let address = fork.address();
        // A reader uses the memory, so its mapping cannot be replaced yet.
        let gate = stage.work().gate(&reader);
        fork.record_use(&reader).unwrap();
        check(stage, &reader, &fork, 0..6 * g, prefix);
        fork.shrink_to(3 * g).unwrap();
        let refused = fork.try_grow_to(8 * g).unwrap_err();
        assert!(refused.is_shortage(), "{refused}");
        gate.open();
        eventually(|| fork.try_grow_to(8 * g));
        assert_eq!((fork.address(), fork.read_only()), (address, 2 * g));
        assert!(matches!(fork.write(g, &[1]), Err(MemoryError::ReadOnly { .. })));
        fill(stage, &home, &fork, 3 * g..8 * g, mine);
        check(stage, &home, &fork, 0..3 * g, prefix);
        check(stage, &home, &fork, 3 * g..8 * g, mine);
        check(stage, &home, &other, 0..6 * g, prefix);
        check(stage, &home, &root, 0..6 * g, prefix);
        stage.settle();
    }

    fn a_prefix_is_put_into_few_extents_once_its_work_has_passed(stage) {
        let g = stage.g();
        let pool = stage.pool(80);
        let tenant = pool.tenant("a").register().unwrap();
        let home = stage.stream();
        let block = tenant.block(18 * g).capacity(32 * g).largest_extent(2 * g);
        let block = block.home_stream(&home).timeout(Duration::from_secs(20));
        let root = block.allocate().unwrap();
        let [prefix, mine, theirs] = [stage.stamp(), stage.stamp(), stage.stamp()];
        let address = root.address();
        stage.late_fill(&home, &root, prefix, LATE);
        assert_eq!(root.compact_prefix(17 * g).unwrap(), 16 * g);
        let sizes = |block: &Block| block.extents().iter().map(|it| it.size / g).collect::<Vec<_>>();
        assert_eq!((root.address(), sizes(&root)), (address, vec![16, 2]));
        check(stage, &home, &root, 0..18 * g, prefix);
        // Read through the fork while the root continues behind it.
        let mut fork = root.fork(17 * g, 18 * g).unwrap();
        assert_eq!(sizes(&fork)[0], 16);
        fill(stage, &home, &root, 17 * g..18 * g, mine);
        fill(stage, &home, &fork, 17 * g..18 * g, theirs);
        check(stage, &home, &fork, 0..17 * g, prefix);
        check(stage, &home, &root, 0..17 * g, prefix);
        check(stage, &home, &root, 17 * g..18 * g, mine);
        check(stage, &home, &fork, 17 * g..18 * g, theirs);
        // A cut in the large extent: the part before it is copied.
        fork.shrink_to(9 * g).unwrap();
        fork.grow_to(10 * g).unwrap();
        assert_eq!(fork.read_only(), 0);
        fill(stage, &home, &fork, 9 * g..10 * g, theirs);
        check(stage, &home, &fork, 0..9 * g, prefix);
        check(stage, &home, &root, 0..17 * g, prefix);
        drop(root);
        check(stage, &home, &fork, 0..9 * g, prefix);
        check(stage, &home, &fork, 9 * g..10 * g, theirs);
        stage.settle();
    }

    fn each_attempt_to_grow_waits_for_work_that_was_queued_between_attempts(stage) {
        let g = stage.g();
        let mapper = Mapper::start(&stage.device).unwrap();
        let builder = Pool::builder(&stage.device).limit(Limit::Bytes(12 * g));
        let pool = builder.mapper(&mapper).build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let home = stage.stream();
        let block = tenant.block(4 * g).capacity(8 * g).largest_extent(4 * g);
        let root = block.home_stream(&home).allocate().unwrap();
        let [prefix, mine] = [stage.stamp(), stage.stamp()];
        fill(stage, &home, &root, 0..4 * g, prefix);
        let mut fork = root.fork(4 * g, 4 * g).unwrap();
        stage.device.synchronize().unwrap();
        fork.shrink_to(2 * g).unwrap();
        let other = tenant.allocate(8 * g).unwrap();
        let at = fork.address();
        let mut growth = Task::waiting(fork.grow_to_async(4 * g));
        // The first attempt found no memory. This work reads what the next one replaces.
        let gate = stage.work().gate(&home);
        stage.work().check(&home, at, 2 * g, prefix);
        drop(other);
        for _ in 0..20 {
            assert!(growth.poll().is_pending(), "granted under work");
        }
        gate.open();
        growth.finish().unwrap();
        fill(stage, &home, &fork, 2 * g..4 * g, mine);
        check(stage, &home, &fork, 0..2 * g, prefix);
        check(stage, &home, &fork, 2 * g..4 * g, mine);
        check(stage, &home, &root, 0..4 * g, prefix);
        stage.settle();
    }
}
