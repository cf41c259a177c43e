//! Every way to share the memory of a block or region makes the same checks: what is refused, that
//! a refusal changes nothing, and that exported memory counts as such everywhere.

use crate::common;
use crate::common::books::books;
use crate::common::{G, Rig, shareable, shareable_region};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::model::Manner;
use cuvmm::driver::{CUresult, Call, HandleTypes};
use cuvmm::error::{MemoryError, ShareError, SleepError};
use cuvmm::share::{Manifest, Offer, Publishable, Publisher};
use cuvmm::{Access, Block, Contents, DeviceVec, Region, Registration, Stream};

/// Writes to all registered memory as a kernel does. The write loses the context without access.
fn written(rig: &Rig<impl Backing>, stream: &Stream, registration: &Registration) -> bool {
    let extents = registration.extents().iter();
    let writes = extents.map(|extent| (extent.address, extent.size, 7));
    rig.kernel(stream, &[], &writes.collect::<Vec<_>>());
    rig.device.synchronize().is_ok()
}

fn publisher() -> (tempfile::TempDir, Publisher) {
    let folder = tempfile::tempdir().unwrap();
    let publisher = Publisher::bind(folder.path().join("socket")).unwrap();
    (folder, publisher)
}

/// Publishes memory that is lent, which must be refused. Returns the error and the memory.
fn refused<M: Publishable + std::fmt::Debug>(publisher: &Publisher, memory: M) -> (ShareError, M) {
    let refused = publisher
        .publish("model", Manifest::default(), memory)
        .unwrap_err();
    assert!(publisher.list().is_empty());
    (refused.reason, refused.owner)
}

on_both! {
    // I-45
    fn a_block_that_sleeps_goes_no_way(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 16).build().unwrap());
        let block = tenant.block(3 * G).home_stream(&stream).allocate().unwrap();
        let lease = block.lease();
        drop(block.lease_for(Access::ReadWrite).unwrap());
        drop(lease);
        tenant.blocks().sleep(Contents::Discard).unwrap();
        let asleep = MemoryError::Asleep(3 * G);
        let lease = block.lease();
        for access in [Access::None, Access::Read, Access::ReadWrite] {
            assert_eq!(block.lease_for(access).unwrap_err(), asleep);
        }
        assert_eq!(block.register().unwrap_err(), asleep);
        assert_eq!(lease.clone().register().unwrap_err(), asleep);
        let exported = block.export(HandleTypes::POSIX_FD);
        assert!(matches!(exported, Err(refused) if refused == asleep));
        let offered = Offer::block(&block);
        assert!(matches!(offered, Err(ShareError::Memory(refused)) if refused == asleep));
        assert_eq!(pool.stats().leased, 0);

        // None of the refusals left a lease or a mark.
        tenant.blocks().wake().unwrap();
        drop(lease);
        tenant.blocks().sleep(Contents::Discard).unwrap();
        // A block that was freed while asleep has nothing to register.
        let lease = block.lease();
        drop(block);
        let gone = MemoryError::NotCommitted(0..3 * G);
        assert_eq!(lease.register().unwrap_err(), gone);
        books(rig, &pool);
    }

    fn what_forks_share_is_lent_to_be_read(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 16).build().unwrap());
        let root = tenant.block(4 * G).largest_extent(G).home_stream(&stream).allocate().unwrap();
        let before = root.lease();
        let fork = root.fork(2 * G, 4 * G).unwrap();
        let shared = MemoryError::ReadOnly(0..2 * G);
        for block in [&root, &fork] {
            assert_eq!(block.lease_for(Access::ReadWrite).unwrap_err(), shared);
            drop(block.lease_for(Access::Read).unwrap());
            drop(block.register().unwrap());
        }
        drop((before, fork));
        pool.trim(0).unwrap();
        drop(root.lease_for(Access::ReadWrite).unwrap());
    }

    fn a_dma_buf_is_an_export_of_its_block(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 16).build().unwrap());
        let block = tenant.block(4 * G).largest_extent(G).home_stream(&stream).allocate().unwrap();
        let dma_buf = block.register().unwrap().dma_buf(0..4 * G).unwrap();
        let (descriptor, registration) = dma_buf.into_parts();
        drop(registration);
        // The owner of a descriptor can write at any time: no fork shares the memory, and it cannot
        // sleep.
        let fork = block.fork(2 * G, 2 * G).unwrap();
        assert_eq!((fork.read_only(), books(rig, &pool).shared), (0, 0));
        let asleep = tenant.blocks().sleep(Contents::Discard);
        assert!(matches!(asleep, Err(SleepError::Exported { blocks: 1, .. })), "{asleep:?}");
        let moved = pool.compact(|_| true).unwrap();
        assert_eq!(moved.copied, 0, "{moved:?}");
        assert_eq!(pool.stats().exported, 4 * G);
        // The memory is not reused, neither in its slot nor elsewhere.
        let old: Vec<_> = rig.machine.snapshot().mappings.iter().map(|it| it.handle).collect();
        drop((block, fork));
        let next = tenant.block(4 * G).largest_extent(G).home_stream(&stream).allocate().unwrap();
        assert_eq!(pool.stats().exported, 0);
        let here = rig.machine.snapshot().mappings;
        let kept = here.iter().filter(|mapping| old[..4].contains(&mapping.handle));
        // A hostile driver reuses released handles at once.
        if common::manner() != Manner::Hostile {
            assert_eq!(kept.count(), 0);
        }
        drop((next, descriptor));
    }

    fn a_refused_export_leaves_no_mark(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, shareable(rig, 16).build().unwrap());
        let block = tenant.block(4 * G).largest_extent(G).home_stream(&stream).allocate().unwrap();
        let registration = block.register().unwrap();
        let calls = [Call::MemGetHandleForAddressRange, Call::MemExportToShareableHandle];
        rig.faults.arm(Fault::all(CUresult::CUDA_ERROR_NOT_SUPPORTED).only(&calls));
        assert!(matches!(registration.dma_buf(0..G), Err(MemoryError::Range { offset: 0, size: G, .. })));
        let exported = block.export(HandleTypes::POSIX_FD);
        assert!(matches!(exported, Err(MemoryError::Export { .. })));
        rig.faults.disarm();
        drop(registration);
        // As before the registration, the block sleeps, wakes, and shares its memory with forks.
        tenant.blocks().sleep(Contents::Discard).unwrap();
        tenant.blocks().wake().unwrap();
        assert_eq!(block.fork(2 * G, 2 * G).unwrap().read_only(), 2 * G);
        assert_eq!(books(rig, &pool).exported, 0);
    }

    fn no_dma_buf_is_had_of_what_a_fork_shares(rig) {
        let (_pool, tenant, stream) = common::with_stream(rig, shareable(rig, 16).build().unwrap());
        let root = tenant.block(4 * G).largest_extent(G).home_stream(&stream).allocate().unwrap();
        let before = root.register().unwrap();
        let fork = root.fork(2 * G, 4 * G).unwrap();
        for registration in [before, fork.register().unwrap()] {
            let refused = registration.dma_buf(G..3 * G).unwrap_err();
            let shared = MemoryError::ReadOnly(0..2 * G);
            assert_eq!(refused, shared);
            assert!(!registration.is_exported());
            // The memory behind the shared prefix is the block's own.
            drop(registration.dma_buf(2 * G..4 * G).unwrap());
        }
        drop((root, fork));

        let mut region = common::committed(Region::builder(&rig.device, 4 * G).largest_extent(G), 4 * G);
        let fork = region.fork(&[]).unwrap();
        for side in [&region, &fork] {
            let registration = side.register(0..2 * G).unwrap();
            let refused = registration.dma_buf(0..G).unwrap_err();
            let read_only = refused == MemoryError::ReadOnly(0..G);
            assert!(read_only, "{refused}");
        }
        drop(fork);
        region.unshare(0..2 * G, &stream, &[]).unwrap();
        drop(region.register(0..2 * G).unwrap().dma_buf(0..2 * G).unwrap());
    }

    fn what_is_lent_is_not_published(rig) {
        let (_folder, publisher) = publisher();
        let stream = Stream::new(&rig.device).unwrap();

        let (pool, tenant) = common::with_tenant(shareable(rig, 16).build().unwrap());
        let block: Block = tenant.block(2 * G).home_stream(&stream).allocate().unwrap();
        let lease = block.lease();
        let registration = block.register().unwrap();
        let (error, block) = refused(&publisher, block);
        assert!(matches!(error, ShareError::Memory(MemoryError::Leased(2))), "{error}");
        assert!(written(rig, &stream, &registration), "under a registration");
        assert_eq!(pool.stats().exported, 0, "nothing was offered");
        drop(registration);
        let (error, block) = refused(&publisher, block);
        assert!(matches!(error, ShareError::Memory(MemoryError::Leased(1))), "{error}");
        drop(lease);
        let published = publisher.publish("block", Manifest::default(), block);
        assert_eq!(published.unwrap(), 1);
        publisher.withdraw("block");

        let region = shareable_region(rig, 4);
        let registration = region.register(0..G).unwrap();
        let (error, region) = refused(&publisher, region);
        assert!(matches!(error, ShareError::Memory(MemoryError::Registered { .. })), "{error}");
        assert!(written(rig, &stream, &registration), "under a registration");
        assert_eq!(region.exported(), 0, "nothing was offered");
        drop(registration);
        publisher.publish("region", Manifest::default(), region).unwrap();
        publisher.withdraw("region");

        let region = Region::builder(&rig.device, 4 * G).shareable(HandleTypes::POSIX_FD);
        let region = region.reserve().unwrap();
        let mut vec = DeviceVec::<u32>::from_region(region, &stream).unwrap();
        vec.extend_from_slice(&[5; 10]).unwrap();
        let registration = vec.register().unwrap();
        let (error, vec) = refused(&publisher, vec);
        assert!(matches!(error, ShareError::Memory(MemoryError::Registered { .. })), "{error}");
        assert!(written(rig, &stream, &registration), "under a registration");
        drop(registration);
        publisher.publish("vec", Manifest::default(), vec).unwrap();
    }
}
