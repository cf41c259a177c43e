//! Forks of a sequence on the GPU: kernels that still write the prefix, that read shared memory
//! while the other side grows, and that use memory which was freed.

use std::time::Duration;

use crate::gpu::{Stage, eventually};
use crate::on_each;
use cuvmm::driver::DeviceAddress;
use cuvmm::error::KvCacheError;
use cuvmm::kv::{Layout, SequenceId, Shape};
use cuvmm::{KvCache, Limit, Mapper, Pool, Stream, Tenant};

/// 128 KiB per token, 16 KiB per tensor.
const SHAPE: Shape = Shape {
    layers: 4,
    kv_heads: 2,
    head_size: 2048,
    element_bytes: 4,
    max_tokens: 2048,
    max_sequences: 16,
};

const LAYOUTS: [Layout; 2] = [Layout::TokenMajor, Layout::LayerMajor];

/// Delay of late work.
const LATE: Duration = Duration::from_millis(4);

fn build(tenant: &Tenant, home: &Stream, layout: Layout) -> KvCache {
    let builder = KvCache::builder(tenant, home, SHAPE).layout(layout);
    let builder = builder.may_fork(true).timeout(Duration::from_secs(20));
    builder.build().unwrap()
}

/// Returns the addresses of a sequence's tokens: one range per tensor, or one for all.
fn ranges(
    cache: &KvCache,
    id: SequenceId,
    tokens: std::ops::Range<u64>,
) -> Vec<(DeviceAddress, u64)> {
    let view = cache.view(id).unwrap();
    let layers = match cache.layout() {
        Layout::LayerMajor => SHAPE.layers,
        _ => 1,
    };
    let tensors = (0..layers).flat_map(|layer| [view.key(layer), view.value(layer)]);
    let tensors = tensors.map(Option::unwrap);
    let range = |tensor: cuvmm::kv::KvTensor<'_>| {
        let [stride, ..] = tensor.byte_strides();
        let at = DeviceAddress(tensor.address().0 + tokens.start * stride);
        (at, (tokens.end - tokens.start) * stride)
    };
    match layers {
        // All tensors of a token follow its first layer's keys.
        1 => tensors.take(1).map(range).collect(),
        _ => tensors.map(range).collect(),
    }
}

struct Both<'a> {
    stage: &'a Stage,
    cache: KvCache,
}

impl Both<'_> {
    fn fill(
        &self,
        on: &Stream,
        id: SequenceId,
        tokens: std::ops::Range<u64>,
        stamp: u32,
        after: Duration,
    ) {
        for (at, bytes) in ranges(&self.cache, id, tokens) {
            self.stage.work().fill(on, at, bytes, stamp, after);
        }
    }

    fn check(&self, on: &Stream, id: SequenceId, tokens: std::ops::Range<u64>, stamp: u32) {
        for (at, bytes) in ranges(&self.cache, id, tokens) {
            self.stage.work().check(on, at, bytes, stamp);
        }
    }
}

fn limit(stage: &Stage) -> Limit {
    Limit::Bytes(stage.scaled(8 << 30, 240 << 20))
}

fn pool_of(stage: &Stage) -> Pool {
    let builder = Pool::builder(&stage.device);
    builder.limit(limit(stage)).build().unwrap()
}

on_each! {
    fn what_is_still_being_written_is_in_the_fork(stage) {
        for layout in LAYOUTS {
            let pool = pool_of(stage);
            let tenant = pool.tenant("a").register().unwrap();
            let home = stage.stream();
            let tokens = stage.scaled(1000, 300);
            let mut both = Both { stage, cache: build(&tenant, &home, layout) };
            let root = both.cache.create(tokens).unwrap();
            let [prefix, mine, theirs] = [stage.stamp(), stage.stamp(), stage.stamp()];
            both.fill(&home, root, 0..tokens, prefix, LATE);
            // Forked while the kernel has not begun.
            let fork = both.cache.try_fork(root, tokens).unwrap();
            let early = both.cache.try_fork(root, tokens - 33).unwrap();
            both.cache.append(&[(root, 40), (fork, 50), (early, 60)]).unwrap();
            both.fill(&home, root, tokens..tokens + 40, mine, LATE);
            both.fill(&home, fork, tokens..tokens + 50, theirs, Duration::ZERO);
            both.fill(&home, early, tokens - 33..tokens + 27, mine, Duration::ZERO);
            both.check(&home, root, 0..tokens, prefix);
            both.check(&home, root, tokens..tokens + 40, mine);
            both.check(&home, fork, 0..tokens, prefix);
            both.check(&home, fork, tokens..tokens + 50, theirs);
            both.check(&home, early, 0..tokens - 33, prefix);
            both.check(&home, early, tokens - 33..tokens + 27, mine);
            stage.settle();
            assert!(both.cache.stats().shared > 0);
        }
    }

    fn a_fork_reads_while_the_other_grows_and_ends(stage) {
        let mapper = Mapper::start(&stage.device).unwrap();
        let builder = Pool::builder(&stage.device).limit(limit(stage));
        let pool = builder.mapper(&mapper).build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let [home, reader] = stage.streams();
        let tokens = stage.scaled(800, 200);
        let mut both = Both { stage, cache: build(&tenant, &home, Layout::TokenMajor) };
        let root = both.cache.create(tokens).unwrap();
        let [prefix, more] = [stage.stamp(), stage.stamp()];
        both.fill(&home, root, 0..tokens, prefix, Duration::ZERO);
        let forks: Vec<_> = (0..6).map(|_| both.cache.fork(root, tokens).unwrap()).collect();
        stage.device.synchronize().unwrap();
        // The reader's work waits at the gate while memory is mapped and unmapped around it.
        let gate = stage.work().gate(&reader);
        for &fork in &forks {
            both.cache.record_use(fork, &reader).unwrap();
            both.check(&reader, fork, 0..tokens, prefix);
        }
        for step in 0..stage.scaled(200, 60) {
            both.cache.append(&[(root, 1)]).unwrap();
            both.fill(&home, root, tokens + step..tokens + step + 1, more, Duration::ZERO);
        }
        for &fork in &forks[1..] {
            both.cache.free(fork).unwrap();
        }
        let held = both.cache.stats().shared;
        both.cache.free(root).unwrap();
        // Freed memory is reused as soon as possible.
        let next = both.cache.create(tokens).unwrap();
        let other = stage.stamp();
        both.fill(&home, next, 0..tokens, other, Duration::ZERO);
        gate.open();
        both.check(&reader, forks[0], 0..tokens, prefix);
        both.check(&home, next, 0..tokens, other);
        stage.settle();
        assert!(held > 0);
        eventually(|| match both.cache.stats().shared {
            0 => Ok(()),
            shared => Err(format!("{shared} bytes are still shared")),
        });
        both.check(&home, forks[0], 0..tokens, prefix);
        stage.settle();
        drop(both);
        drop(tenant);
        pool.close().unwrap();
    }

    fn who_is_cut_in_the_prefix_waits_for_its_own_work_alone(stage) {
        for layout in LAYOUTS {
            let pool = pool_of(stage);
            let tenant = pool.tenant("a").register().unwrap();
            let [home, reader] = stage.streams();
            let tokens = stage.scaled(1200, 280);
            let mut both = Both { stage, cache: build(&tenant, &home, layout) };
            let root = both.cache.create(tokens).unwrap();
            let [prefix, mine, theirs] = [stage.stamp(), stage.stamp(), stage.stamp()];
            both.fill(&home, root, 0..tokens, prefix, Duration::ZERO);
            let fork = both.cache.fork(root, tokens).unwrap();
            let whole = both.cache.fork(root, tokens).unwrap();
            both.cache.record_use(root, &reader).unwrap();
            stage.device.synchronize().unwrap();
            let gate = stage.work().gate(&reader);
            both.check(&reader, root, 0..tokens, prefix);
            // Readers of the other sequence do not block this one.
            let cut = 100;
            both.cache.truncate(fork, cut).unwrap();
            eventually(|| both.cache.try_append(&[(fork, 3)]));
            both.fill(&home, fork, cut..cut + 3, mine, Duration::ZERO);
            both.cache.truncate(root, cut).unwrap();
            let refused = both.cache.try_append(&[(root, 5)]);
            let alone = refused.is_ok();
            gate.open();
            if let Err(error) = refused {
                assert!(matches!(error, KvCacheError::Block { .. }) && error.is_shortage(), "{error}");
                both.cache.append(&[(root, 5)]).unwrap();
            }
            assert!(!alone, "memory was unmapped under a reader");
            both.fill(&home, root, cut..cut + 5, theirs, Duration::ZERO);
            both.check(&home, fork, 0..cut, prefix);
            both.check(&home, fork, cut..cut + 3, mine);
            both.check(&home, root, 0..cut, prefix);
            both.check(&home, root, cut..cut + 5, theirs);
            both.check(&home, whole, 0..tokens, prefix);
            stage.settle();
        }
    }
}
