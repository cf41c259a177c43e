//! Imported memory under kernels of both sides: each sees the other's writes while the block lives,
//! and no later block sees any.

use std::time::Duration;

use crate::gpu::Stage;
use crate::on_each;
use cuvmm::driver::{Exported, HandleTypes};
use cuvmm::{
    Access, AccessGrant, Block, Extent, Hardened, Limit, Mapping, Physical, Pool, Reservation,
    Stream,
};

const FD: HandleTypes = HandleTypes::POSIX_FD;

/// Delay of kernels, so that an access that does not wait for them is too early.
const LATE: Duration = Duration::from_millis(10);

/// A peer's mappings at addresses of its own, each with the number of bytes that were the block's.
struct Imported {
    mappings: Vec<(Mapping, u64)>,
}

impl Imported {
    fn of(stage: &Stage, handles: &[(Extent, Exported)], size: u64) -> Self {
        let device = &stage.device;
        let mappings = handles.iter().map(|(extent, handle)| {
            let physical = Physical::import(device, handle, extent.size).unwrap();
            let reservation = Reservation::new(device, extent.size).unwrap();
            let mapping = reservation.map(0, &physical).unwrap();
            let access = [AccessGrant::new(device, Access::ReadWrite)];
            mapping.set_access(&access).unwrap();
            (mapping, extent.size.min(size - extent.offset))
        });
        Self {
            mappings: mappings.collect(),
        }
    }

    fn fill(&self, stage: &Stage, stream: &Stream, stamp: u32) {
        for (mapping, bytes) in &self.mappings {
            let at = mapping.address();
            stage.work().fill(stream, at, *bytes, stamp, LATE);
        }
    }

    fn check(&self, stage: &Stage, stream: &Stream, stamp: u32) {
        for (mapping, bytes) in &self.mappings {
            let at = mapping.address();
            stage.work().check(stream, at, *bytes, stamp);
        }
    }
}

fn churn(stage: &Stage, hardened: bool) {
    let g = stage.g();
    let mut builder = Pool::builder(&stage.device)
        .limit(Limit::Bytes(32 * g))
        .shareable(FD);
    if hardened {
        builder = builder.hardened(Hardened::new());
    }
    let pool = builder.build().unwrap();
    let tenants = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
    let [stream, theirs] = stage.streams();
    let mut peers: Vec<(Imported, u32)> = vec![];
    for round in 0..12u64 {
        let tenant = &tenants[(round % 3 / 2) as usize];
        let block: Block = tenant
            .block((4 + round % 5) * g)
            .home_stream(&stream)
            .timeout(Duration::from_secs(10))
            .allocate()
            .unwrap();
        let stamp = stage.stamp();
        stage.fill(&stream, &block, stamp);
        let exported = block.export(FD).unwrap();
        let peer = Imported::of(stage, exported.handles(), block.size());
        drop(exported);
        peer.check(stage, &stream, stamp);
        let answer = stage.stamp();
        peer.fill(stage, &stream, answer);
        stage.check(&stream, &block, answer);
        // The block is dropped while its last kernel waits, and the next block has its shape.
        let last = stage.stamp();
        stage.late_fill(&stream, &block, last, LATE);
        let shape = block.size();
        drop(block);
        let next = tenant
            .block(shape)
            .home_stream(&stream)
            .timeout(Duration::from_secs(10))
            .allocate()
            .unwrap();
        let own = stage.stamp();
        stage.fill(&stream, &next, own);
        stream.synchronize().unwrap();
        // Writes of the peer this late must not reach memory of the pool.
        peer.check(stage, &theirs, last);
        let late = stage.stamp();
        peer.fill(stage, &theirs, late);
        theirs.synchronize().unwrap();
        stage.check(&stream, &next, own);
        stream.synchronize().unwrap();
        drop(next);
        peers.push((peer, late));
        stage.settle();
    }
    for (peer, late) in &peers {
        peer.check(stage, &theirs, *late);
    }
    stage.settle();
    pool.trim(0).unwrap();
    let stats = pool.stats();
    assert_eq!((stats.committed, stats.exported, stats.free), (0, 0, 0));
    drop((peers, tenants));
    pool.close().unwrap();
}

on_each! {
    fn no_later_block_is_what_a_peer_writes_to(stage) {
        churn(stage, false);
    }

    fn nor_in_a_hardened_pool_which_does_not_overwrite_it(stage) {
        churn(stage, true);
    }
}
