//! Exported memory of blocks and regions: it stays with its importers and its owner, is never
//! reused, and returns to the driver when its owner is done with it.

use std::time::Duration;

use crate::common;
use crate::common::books::books_beside as books;
use crate::common::{D0, G, Rig, busy, nth_of, shareable, until};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::host::HostMemory;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call, Exported, HandleTypes};
use cuvmm::error::{ArgumentError, BlockError, MemoryError, PoolError};
use cuvmm::{
    Access, AccessGrant, Block, Extent, Hardened, Mapper, Mapping, Offer, Physical, Place, Pool,
    Region, Reservation, Stream,
};

const FD: HandleTypes = HandleTypes::POSIX_FD;

/// Returns `true` if nothing is committed and the exported memory was released: the free list holds
/// less than `exported` bytes, and the driver has no other memory of the pool.
fn is_released(rig: &Rig<impl Backing>, pool: &Pool, exported: u64) -> bool {
    let stats = pool.stats();
    let arrived = stats.free == rig.machine.live().physical_bytes;
    stats.committed == 0 && stats.free < exported && arrived
}

/// A peer with a driver of its own, as in another process.
struct Peer {
    rig: Rig<HostMemory>,
}

impl Peer {
    fn new() -> Self {
        let rig = common::host();
        Self { rig }
    }

    fn import(&self, handles: &[(Extent, Exported)]) -> Showing {
        let device = &self.rig.device;
        let extents = handles.iter().map(|(extent, handle)| {
            let physical = Physical::import(device, handle, extent.size).unwrap();
            let reservation = Reservation::new(device, extent.size).unwrap();
            let mapping = reservation.map(0, &physical).unwrap();
            let access = [AccessGrant::new(device, Access::ReadWrite)];
            mapping.set_access(&access).unwrap();
            (extent.offset, mapping)
        });
        Showing {
            extents: extents.collect(),
        }
    }

    fn nothing_left(self) {
        common::nothing_left(self.rig);
    }
}

/// A peer's imports, by offset in the block or region.
struct Showing {
    extents: Vec<(u64, Mapping)>,
}

impl Showing {
    fn at(&self, offset: u64) -> (&Mapping, u64) {
        let holds =
            |(start, mapping): &&(u64, Mapping)| (*start..start + mapping.size()).contains(&offset);
        let (start, mapping) = self.extents.iter().find(holds).unwrap();
        (mapping, offset - start)
    }

    fn write(&self, offset: u64, byte: u8) {
        let (mapping, offset) = self.at(offset);
        mapping.write(offset, &[byte; 8]).unwrap();
    }

    fn read(&self, offset: u64) -> [u8; 8] {
        let (mapping, offset) = self.at(offset);
        let mut bytes = [0xAA; 8];
        mapping.read(offset, &mut bytes).unwrap();
        bytes
    }

    fn bytes(&self) -> u64 {
        self.extents.iter().map(|(_, mapping)| mapping.size()).sum()
    }
}

fn read(block: &Block, offset: u64) -> [u8; 8] {
    let mut bytes = [0xAA; 8];
    block.read(offset, &mut bytes).unwrap();
    bytes
}

on_both! {
    // I-60
    fn a_peer_sees_a_block_and_outlives_it(rig) {
        let peer = Peer::new();
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 16).build().unwrap());
        let block = tenant.allocate_on(&stream, 3 * G).unwrap();
        let other = tenant.allocate_on(&stream, G).unwrap();
        block.write(2 * G, b"from its").unwrap();
        let exported = block.export(FD).unwrap();
        let extents: Vec<Extent> = exported.handles().iter().map(|(extent, _)| *extent).collect();
        assert_eq!(extents, block.extents());
        assert_eq!(books(rig, &pool, 0).exported, 3 * G);
        assert_eq!(pool.stats().tenants[0].leases, 1);
        let showing = peer.import(exported.handles());
        drop(exported);
        assert_eq!(pool.stats().tenants[0].leases, 0);
        showing.write(G, 7);
        if rig.keeps_bytes() {
            assert_eq!(&showing.read(2 * G), b"from its");
            assert_eq!(read(&block, G), [7; 8], "both mappings show the same memory");
        }
        // The drop itself releases the memory, because no work uses it. Other memory stays.
        drop(block);
        let stats = books(rig, &pool, 3 * G);
        assert_eq!((stats.committed, stats.exported, stats.free), (G, 0, 0));
        assert_eq!((rig.machine.live().mappings, rig.machine.live().exported_only), (1, 2));
        // The next block of this shape on this stream gets other memory, whatever the peer writes.
        let next = tenant.allocate_on(&stream, 3 * G).unwrap();
        for granule in 0..3 {
            showing.write(granule * G, 0xEE);
        }
        if rig.keeps_bytes() {
            for granule in 0..3 {
                assert_eq!(read(&next, granule * G), [0; 8]);
                assert_eq!(showing.read(granule * G), [0xEE; 8]);
            }
        }
        books(rig, &pool, 3 * G);
        assert_eq!(pool.stats().exported, 0);
        drop((other, next, showing));
        books(rig, &pool, 0);
        peer.nothing_left();
    }

    fn what_work_may_use_is_neither_released_nor_handed_on(rig) {
        let pool = shareable(rig, 8).build().unwrap();
        let [a, b] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let block = a.allocate_on(&stream, 4 * G).unwrap();
        drop(block.export(FD).unwrap());
        busy(rig, &stream, &block, 9);
        drop(block);
        let stats = books(rig, &pool, 0);
        assert_eq!((stats.pending_free, stats.exported), (4 * G, 4 * G));
        // An allocation of this shape on this stream would reuse the block at once if it had not
        // been exported.
        let next = a.allocate_on(&stream, 4 * G).unwrap();
        assert_eq!(books(rig, &pool, 0).committed, 8 * G);
        let refused = b.try_allocate(G).unwrap_err();
        assert!(matches!(refused, BlockError::OutOfMemory(short) if short.pending_free == 4 * G));
        assert_eq!(pool.trim(0).unwrap(), 0);
        rig.machine.release_all_streams(D0);
        // The next operation on the pool releases it.
        drop(b.try_allocate(4 * G).unwrap());
        assert_eq!((books(rig, &pool, 0).exported, rig.machine.live().exported_only), (0, 0));
        assert!(rig.device.lost().is_none());
        drop(next);
    }

    fn one_who_waits_for_it_gets_its_room(rig) {
        let pool = shareable(rig, 4).build().unwrap();
        let [a, b] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let block = a.allocate_on(&stream, 4 * G).unwrap();
        drop(block.export(FD).unwrap());
        busy(rig, &stream, &block, 9);
        drop(block);
        std::thread::scope(|scope| {
            let wanted = || b.block(4 * G).timeout(Duration::from_secs(20)).allocate().unwrap();
            let waiter = scope.spawn(wanted);
            std::thread::sleep(Duration::from_millis(5));
            assert!(!waiter.is_finished());
            rig.machine.release_all_streams(D0);
            let got = waiter.join().unwrap();
            let seen = read(&got, G);
            assert!(seen == [0; 8] || !rig.keeps_bytes(), "{seen:?}");
        });
        books(rig, &pool, 0);
    }

    fn a_lease_keeps_it_under_its_addresses(rig) {
        let peer = Peer::new();
        let pool = shareable(rig, 8).build().unwrap();
        let [a, b] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let block = a.allocate_on(&stream, 4 * G).unwrap();
        let (handles, lease) = block.export(FD).unwrap().into_parts();
        let showing = peer.import(&handles);
        drop((block, handles));
        let stats = books(rig, &pool, 0);
        assert_eq!((stats.leased, stats.exported), (4 * G, 4 * G));
        drop(b.try_allocate(4 * G).unwrap());
        assert!(b.try_allocate(5 * G).is_err());
        let again = lease.clone();
        drop(lease);
        assert_eq!(pool.trim(0).unwrap(), 4 * G, "the memory that b left");
        // The block's fence waits for a recorded stream too.
        let other = Stream::new(&rig.device).unwrap();
        rig.held_kernel(&other, &[], &[(again.address(), G, 1)]);
        again.record_use(&other).unwrap();
        drop(again);
        assert_eq!(books(rig, &pool, 0).pending_free, 4 * G);
        rig.machine.release_all_streams(D0);
        assert_eq!(pool.trim(u64::MAX).unwrap(), 4 * G, "none of the memory is kept");
        assert_eq!(books(rig, &pool, 4 * G).exported, 0);
        if rig.keeps_bytes() {
            assert_eq!(showing.read(0), [1; 8], "the late kernel wrote to the shared memory");
        }
        drop(showing);
        peer.nothing_left();
    }

    fn a_block_without_a_stream_is_waited_for_too(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 8).build().unwrap());
        let block = tenant.try_allocate(4 * G).unwrap();
        drop(block.export(FD).unwrap());
        busy(rig, &stream, &block, 9);
        drop(block);
        assert_eq!(books(rig, &pool, 0).exported, 4 * G);
        rig.machine.release_all_streams(D0);
        assert_eq!(pool.trim(u64::MAX).unwrap(), 4 * G);
    }

    fn a_block_shrinks_and_grows_over_what_is_its_own(rig) {
        let peer = Peer::new();
        for zeroed in [false, true] {
            let pool = shareable(rig, 8).largest_extent(G).build().unwrap();
            let [a, b] = common::tenants(&pool);
            let stream = Stream::new(&rig.device).unwrap();
            let block = a.block(4 * G).home_stream(&stream).zeroed(zeroed);
            let mut block = block.try_allocate().unwrap();
            let exported = block.export(FD).unwrap();
            let showing = peer.import(exported.handles());
            drop(exported);
            block.shrink_to(G + 16).unwrap();
            assert_eq!((books(rig, &pool, 0).exported, pool.stats().pending_free), (4 * G, 2 * G));
            for offset in [G, G + 512, 2 * G] {
                showing.write(offset, 5);
            }
            let before = rig.machine.live().physicals;
            block.try_grow_to(3 * G).unwrap();
            assert_eq!(rig.machine.live().physicals, before, "it has memory of its own again");
            if rig.keeps_bytes() {
                assert_eq!(read(&block, G), [5; 8], "the memory that stayed in use");
                let expected = if zeroed { [0; 8] } else { [5; 8] };
                assert_eq!(read(&block, G + 512), expected);
                assert_eq!(read(&block, 2 * G), expected);
            }
            // The other tenant gets memory in its place, never the exported memory itself.
            block.shrink_to(G).unwrap();
            let theirs = b.try_allocate(7 * G).unwrap();
            let stats = books(rig, &pool, 3 * G);
            assert_eq!((stats.exported, stats.free, stats.committed), (G, 0, 8 * G));
            for granule in 0..4 {
                showing.write(granule * G, 6);
            }
            if rig.keeps_bytes() {
                for granule in 0..7 {
                    assert_eq!(read(&theirs, granule * G), [0; 8]);
                }
                assert_eq!(read(&block, 0), [6; 8]);
            }
            drop(theirs);
            pool.trim(G).unwrap();
            block.try_grow_to(2 * G).unwrap();
            if rig.keeps_bytes() {
                assert_eq!(read(&block, G), [0; 8], "replaced by other memory");
            }
            drop((block, showing));
        }
        peer.nothing_left();
    }

    fn what_a_peer_wrote_ahead_of_a_block_is_no_zeros(rig) {
        let peer = Peer::new();
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 64).build().unwrap());
        let block = tenant.block(32 * G).capacity(64 * G).home_stream(&stream).zeroed(true);
        let mut block = block.try_allocate().unwrap();
        block.try_grow_to(33 * G - 100).unwrap();
        assert_eq!(tenant.stats().precommitted, 3 * G, "in the same extent as the end");
        let exported = block.export(FD).unwrap();
        let showing = peer.import(exported.handles());
        assert_eq!((showing.bytes(), tenant.stats().exported), (36 * G, 36 * G));
        showing.write(33 * G - 8, 3);
        showing.write(34 * G, 3);
        block.try_grow_to(33 * G).unwrap();
        block.try_grow_to(35 * G).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(read(&block, 33 * G - 8), [0; 8]);
            assert_eq!(read(&block, 34 * G), [0; 8]);
        }
        drop((exported, block, showing));
        books(rig, &pool, 0);
        peer.nothing_left();
    }

    fn what_it_grew_by_is_kept_for_others(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 16).largest_extent(2 * G).build().unwrap());
        let block = tenant.block(2 * G).capacity(6 * G).home_stream(&stream);
        let mut block = block.try_allocate().unwrap();
        drop(block.export(FD).unwrap());
        block.try_grow_to(6 * G).unwrap();
        assert_eq!(books(rig, &pool, 0).exported, 2 * G);
        drop(block);
        let stats = books(rig, &pool, 0);
        assert_eq!((stats.exported, stats.committed, stats.free), (0, 0, 4 * G));
        let block = tenant.block(2 * G).capacity(6 * G).home_stream(&stream);
        let mut block = block.try_allocate().unwrap();
        drop(block.export(FD).unwrap());
        block.try_grow_to(4 * G).unwrap();
        assert_eq!(block.export(FD).unwrap().handles().len(), 2);
        assert_eq!(books(rig, &pool, 0).exported, 4 * G, "exported twice, counted once");
        drop(block);
        assert_eq!((books(rig, &pool, 0).free, pool.stats().committed), (0, 0));
    }

    fn a_compaction_leaves_it_where_the_peer_has_it(rig) {
        let peer = Peer::new();
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 64).largest_extent(8 * G).build().unwrap());
        let pieces = || {
            let block = tenant.block(G).capacity(8 * G).home_stream(&stream);
            let mut block = block.try_allocate().unwrap();
            (2..=8).for_each(|granules| block.try_grow_to(granules * G).unwrap());
            block
        };
        let (shared, own) = (pieces(), pieces());
        let exported = shared.export(FD).unwrap();
        let showing = peer.import(exported.handles());
        assert_eq!(pool.compact(|_| true).unwrap().in_use, 1, "a lease is alive");
        drop(exported);
        let done = pool.compact(|_| true).unwrap();
        assert!(done.exported > 0);
        assert_eq!((done.copied, done.in_use), (0, 0), "the other block was compacted before");
        assert_eq!((shared.extents().len(), own.extents().len()), (8, 1));
        showing.write(3 * G, 4);
        if rig.keeps_bytes() {
            assert_eq!(read(&shared, 3 * G), [4; 8]);
        }
        drop((shared, own, showing));
        books(rig, &pool, 0);
        peer.nothing_left();
    }

    fn no_pattern_of_a_hardened_pool_is_seen_by_the_peer(rig) {
        let peer = Peer::new();
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 8).hardened(Hardened::new()).build().unwrap());
        let block = tenant.block(4 * G).home_stream(&stream);
        let mut block = block.try_allocate().unwrap();
        let exported = block.export(FD).unwrap();
        let showing = peer.import(exported.handles());
        drop(exported);
        (0..4).for_each(|granule| showing.write(granule * G, 8));
        block.shrink_to(3 * G).unwrap();
        drop(block);
        stream.synchronize().unwrap();
        let next = tenant.allocate_on(&stream, 8 * G).unwrap();
        assert_eq!(books(rig, &pool, 4 * G).exported, 0);
        if rig.keeps_bytes() {
            for granule in 0..4 {
                assert_eq!(showing.read(granule * G), [8; 8]);
            }
            for granule in 0..8 {
                let seen = read(&next, granule * G);
                assert!(seen == [0; 8] || seen == [0xDF; 8], "{seen:?}");
            }
        }
        drop((next, showing));
        peer.nothing_left();
    }

    fn the_mapper_releases_what_nobody_comes_back_for(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 16).mapper(&mapper).build().unwrap());
        let block = tenant.block(4 * G).capacity(8 * G).home_stream(&stream);
        let mut block = block.try_allocate().unwrap();
        block.try_grow_to(5 * G).unwrap();
        drop(block.export(FD).unwrap());
        busy(rig, &stream, &block, 1);
        drop(block);
        // The mapper may just be placing more memory behind the block.
        until(&pool, "settled", || rig.machine.live().physical_bytes == pool.stats().committed);
        assert!(pool.stats().exported >= 5 * G);
        rig.machine.release_all_streams(D0);
        until(&pool, "released", || is_released(rig, &pool, 5 * G));
        assert_eq!(books(rig, &pool, 0).exported, 0);
        drop(tenant);
        pool.close().unwrap();
    }

    fn a_block_that_goes_while_the_mapper_is_at_it_leaves_nothing(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 128).mapper(&mapper).build().unwrap());
        let block = tenant.block(32 * G).capacity(64 * G).home_stream(&stream);
        let mut block = block.try_allocate().unwrap();
        let slow = Fault::delay_all(Duration::from_millis(100)).of(Call::MemMap);
        rig.faults.arm(slow);
        block.try_grow_to(40 * G).unwrap();
        until(&pool, "charged", || pool.stats().committed > 40 * G);
        drop(block.export(FD).unwrap());
        drop(block);
        // All of the memory stays until the mapper is done, which may be the case already.
        let exported = pool.stats().exported;
        assert!([0, 40 * G].contains(&exported), "{exported}");
        until(&pool, "released", || is_released(rig, &pool, 40 * G));
        rig.faults.disarm();
        assert_eq!(books(rig, &pool, 0).exported, 0);
        drop(tenant);
        pool.close().unwrap();
    }

    fn a_capture_is_not_asked_about_it(rig) {
        let (pool, tenant) = common::with_tenant(shareable(rig, 8).build().unwrap());
        let block = tenant.try_allocate(4 * G).unwrap();
        let guard = pool.capture_guard();
        drop(block.export(FD).unwrap());
        rig.faults.forget();
        drop(block);
        assert_eq!(rig.faults.total(), 0);
        drop(guard);
        assert_eq!(pool.trim(u64::MAX).unwrap(), 4 * G);
    }

    fn a_tenant_that_goes_leaves_nothing_of_it(rig) {
        let pool = shareable(rig, 8).build().unwrap();
        let tenant = pool.tenant("a").guarantee(8 * G).register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let block = tenant.allocate_on(&stream, 4 * G).unwrap();
        let lease = block.export(FD).unwrap().into_parts().1;
        tenant.unregister();
        drop(block);
        assert_eq!(books(rig, &pool, 0).exported, 4 * G);
        drop(lease);
        let stats = books(rig, &pool, 0);
        assert_eq!((stats.committed, stats.free, stats.tenants.len()), (0, 0, 0));
    }

    fn a_refused_export_changes_nothing(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 8).largest_extent(G).build().unwrap());
        let block = tenant.allocate_on(&stream, 3 * G).unwrap();
        let address = block.address();
        for k in 1..=3 {
            let refused = CUresult::CUDA_ERROR_OPERATING_SYSTEM;
            rig.faults.arm(nth_of(k, refused, &[Call::MemExportToShareableHandle]));
            assert!(matches!(
                block.export(FD),
                Err(MemoryError::Export { .. })
            ));
            rig.faults.disarm();
            let stats = books(rig, &pool, 0);
            assert_eq!((stats.exported, stats.tenants[0].leases), (0, 0), "call {k}");
        }
        // The block is still cached.
        drop(block);
        rig.faults.forget();
        let again = tenant.allocate_on(&stream, 3 * G).unwrap();
        assert_eq!((again.address(), rig.faults.total()), (address, 0));
        // A failed export ends its own lease, also beside another one.
        let lease = again.lease();
        rig.faults.arm(nth_of(2, CUresult::CUDA_ERROR_UNKNOWN, &[Call::MemExportToShareableHandle]));
        again.export(FD).unwrap_err();
        rig.faults.disarm();
        drop((again, lease));
        assert_eq!(tenant.allocate_on(&stream, 3 * G).unwrap().address(), address);
    }

    fn what_the_driver_will_not_take_back_is_nobodys_room(rig) {
        let pool = shareable(rig, 4).largest_extent(2 * G).build().unwrap();
        let [a, b] = common::tenants(&pool);
        let stream = Stream::new(&rig.device).unwrap();
        let mut block = a.allocate_on(&stream, 4 * G).unwrap();
        drop(block.export(FD).unwrap());
        block.shrink_to(2 * G).unwrap();
        let refused = Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemRelease);
        rig.faults.arm(refused);
        // It was planned to yield 2 granules, and yielded none.
        let shortage = match b.try_allocate(G).unwrap_err() {
            BlockError::OutOfMemory(shortage) => shortage,
            other => panic!("{other}"),
        };
        assert_eq!((shortage.quarantined, shortage.available), (2 * G, 0));
        let stats = books(rig, &pool, 0);
        assert_eq!((stats.quarantined, stats.exported, stats.committed), (2 * G, 2 * G, 2 * G));
        drop(block);
        assert_eq!((books(rig, &pool, 0).quarantined, pool.stats().exported), (4 * G, 0));
        rig.faults.disarm();
        drop((a, b));
        pool.close().unwrap();
        assert_eq!(rig.machine.live().physicals, 0);
    }

    fn only_what_was_made_for_it_is_exported(rig) {
        let (plain, tenant) = common::tenancy(rig, 4);
        let block = tenant.try_allocate(G).unwrap();
        rig.faults.forget();
        let refused = block.export(FD).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the memory cannot be exported as POSIX_FD: created shareable as none"
        );
        for types in [HandleTypes::empty(), FD | HandleTypes::FABRIC, HandleTypes::WIN32] {
            assert!(matches!(
                block.export(types),
                Err(MemoryError::Argument(ArgumentError::HandleType { .. }))
            ));
        }
        for types in [HandleTypes::WIN32 | FD, HandleTypes::WIN32_KMT] {
            let refused = Pool::builder(&rig.device).shareable(types).build();
            assert!(matches!(
                refused,
                Err(PoolError::Argument(ArgumentError::HandleType(bits))) if bits & !1 != 0
            ));
        }
        let unknown = HandleTypes::from_bits_retain(0x40);
        assert!(matches!(
            Pool::builder(&rig.device).shareable(unknown).build(),
            Err(PoolError::Argument(ArgumentError::HandleType(0x40)))
        ));
        assert_eq!(rig.faults.total(), 0, "no driver call");
        assert_eq!(plain.stats().exported, 0);
        drop(block);
    }

    fn a_range_of_a_region_is_seen_by_a_peer_and_stays_where_it_is(rig) {
        let peer = Peer::new();
        let stream = Stream::new(&rig.device).unwrap();
        let region = Region::builder(&rig.device, 16 * G).shareable(FD).largest_extent(2 * G);
        let mut region = common::committed(region, 6 * G);
        let refused = region.export(G..4 * G, FD).unwrap_err();
        assert!(matches!(refused, MemoryError::CutsExtent(ref extent) if *extent == (0..2 * G)));
        assert!(matches!(
            region.export(4 * G..8 * G, FD),
            Err(MemoryError::NotCommitted { .. })
        ));
        assert!(matches!(region.export(3 * G..3 * G, FD), Err(MemoryError::Argument(ArgumentError::Empty { .. }))));
        assert!(matches!(
            region.export(0..2 * G, HandleTypes::FABRIC),
            Err(MemoryError::NotShareable { shareable: FD, .. })
        ));
        let handles = region.export(2 * G..6 * G, FD).unwrap();
        assert_eq!(handles.len(), 2);
        assert_eq!(region.exported(), 4 * G);
        let showing = peer.import(&handles);
        drop(handles);
        showing.write(3 * G, 7);
        let mut seen = [0; 8];
        region.read(&stream, 3 * G, &mut seen).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(seen, [7; 8]);
        }
        // Exported memory can neither be moved nor forked; the rest can.
        let before = rig.machine.snapshot();
        let host = Place::HostNuma(0);
        assert!(matches!(
            region.relocate(0..6 * G, &host, &stream),
            Err(MemoryError::Exported(extent)) if extent == (2 * G..4 * G)
        ));
        assert!(matches!(
            region.fork(&[]),
            Err(MemoryError::Exported(extent)) if extent == (2 * G..4 * G)
        ));
        assert_eq!(rig.machine.snapshot(), before);
        assert_eq!(region.relocate(0..2 * G, &host, &stream).unwrap(), 2 * G);
        let here = Place::from(&rig.device);
        assert_eq!(
            region.relocate(2 * G..6 * G, &here, &stream).unwrap(), 0,
            "the memory is on the device"
        );
        // Memory committed again out of a pending free is the same memory.
        region.decommit_after(2 * G..6 * G, std::slice::from_ref(&stream)).unwrap();
        assert_eq!((region.exported(), region.pending_free()), (4 * G, 4 * G));
        showing.write(4 * G, 9);
        region.commit(4 * G..6 * G).unwrap();
        region.read(&stream, 4 * G, &mut seen).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(seen, [9; 8]);
        }
        // Once it is purged, a commit gets other memory.
        region.decommit_after(4 * G..6 * G, &[]).unwrap();
        assert_eq!(region.purge().unwrap().given_back, 4 * G);
        assert_eq!((region.exported(), rig.machine.live().exported_only), (0, 2));
        region.commit(2 * G..6 * G).unwrap();
        region.read(&stream, 4 * G, &mut seen).unwrap();
        if rig.keeps_bytes() {
            assert_eq!((seen, showing.read(4 * G)), ([0; 8], [9; 8]));
        }
        region.fork(&[]).unwrap().close().unwrap();
        drop(showing);
        region.close().unwrap();
        peer.nothing_left();
    }

    fn what_a_region_in_a_tenant_exports_is_counted_until_the_pool_releases_it(rig) {
        let (pool, tenant) = common::with_tenant(shareable(rig, 8).build().unwrap());
        let mut region = common::committed(tenant.region(6 * G).largest_extent(2 * G), 6 * G);
        assert_eq!(tenant.stats().exported, 0);
        let handles = region.export(2 * G..6 * G, FD).unwrap();
        drop(region.export(4 * G..6 * G, FD).unwrap());
        assert_eq!(books(rig, &pool, 0).exported, 4 * G, "exported twice, counted once");
        region.decommit_after(2 * G..6 * G, &[]).unwrap();
        assert_eq!((tenant.stats().in_use, tenant.stats().exported), (2 * G, 4 * G));
        assert_eq!(region.purge().unwrap().given_back, 4 * G);
        assert_eq!(books(rig, &pool, 4 * G).exported, 0);
        drop(handles);
        // Through a registration, or to be offered.
        let registration = region.register(0..2 * G).unwrap();
        let buffer = registration.dma_buf(0..G).unwrap();
        assert_eq!((tenant.stats().exported, region.exported()), (2 * G, 2 * G));
        region.commit(2 * G..4 * G).unwrap();
        drop(Offer::region(&region, 2 * G..4 * G).unwrap());
        assert_eq!(tenant.stats().exported, 4 * G);
        drop((buffer, registration, region));
        let stats = books(rig, &pool, 0);
        assert_eq!((stats.exported, stats.committed, stats.free), (0, 0, 0));
    }

    fn what_a_fork_shows_is_not_exported(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let region = Region::builder(&rig.device, 4 * G).shareable(FD);
        let mut region = common::committed(region, 4 * G);
        let fork = region.fork(&[]).unwrap();
        for side in [&region, &fork] {
            assert!(matches!(
                side.export(0..4 * G, FD),
                Err(MemoryError::ReadOnly(bytes)) if bytes == (0..4 * G)
            ));
        }
        region.unshare(0..4 * G, &stream, &[]).unwrap();
        drop(region.export(0..4 * G, FD).unwrap());
        assert_eq!((region.exported(), fork.exported()), (4 * G, 0));
        drop(fork);
        // Memory that is mapped twice is exported once.
        let twice = Region::builder(&rig.device, 4 * G).shareable(FD);
        let mut twice = common::committed(twice, 2 * G);
        twice.alias(0..2 * G, 2 * G).unwrap();
        drop(twice.export(2 * G..4 * G, FD).unwrap());
        assert_eq!(twice.exported(), 2 * G);
    }

    fn a_refused_export_of_a_region_changes_nothing(rig) {
        let region = Region::builder(&rig.device, 4 * G).shareable(FD).largest_extent(G);
        let mut region = common::committed(region, 4 * G);
        for k in 1..=4 {
            let refused = CUresult::CUDA_ERROR_OPERATING_SYSTEM;
            rig.faults.arm(nth_of(k, refused, &[Call::MemExportToShareableHandle]));
            assert!(matches!(region.export(0..4 * G, FD), Err(MemoryError::Export { .. })));
            rig.faults.disarm();
            assert_eq!(region.exported(), 0);
        }
        region.fork(&[]).unwrap().close().unwrap();
    }
}
