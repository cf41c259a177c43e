//! Pools whose memory other devices have access to.

use std::time::Duration;

use crate::common;
use crate::common::sweep::{sweep, text};
use crate::common::{D1, G, Rig, limited};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{Backing, ModelDriver, Nothing};
use cuvmm::driver::{AccessFlags, CUresult, Call, DeviceAddress, Driver, Location};
use cuvmm::error::{ArgumentError, BlockError, MemoryError, PoolError, SleepError};
use cuvmm::pool::Hardened;
use cuvmm::{Access, Block, Contents, Device, Growth, Heap, HostStore, Pool, Stream, Tenant};

/// Creates a pool of some granules that is open to device 1 for writing.
fn open_pool(rig: &Rig<impl Backing>, granules: u64) -> Pool {
    let builder = limited(rig, granules).growth(Growth::Exact);
    let builder = builder.open_to(&rig.second(), Access::ReadWrite);
    builder.largest_extent(8 * G).build().unwrap()
}

/// Returns the access of device 1 to each granule from an address.
fn access(rig: &Rig<impl Backing>, first: DeviceAddress, size: u64) -> Vec<AccessFlags> {
    let one = Location::device(D1);
    let offsets = (0..size).step_by(G as usize);
    offsets
        .map(|offset| rig.machine.get_access(DeviceAddress(first.0 + offset), one))
        .map(Result::unwrap)
        .collect()
}

/// Checks that device 1 may write to all of a block.
fn is_open(rig: &Rig<impl Backing>, block: &Block) {
    let found = access(rig, block.address(), block.size());
    let expected = vec![AccessFlags::READ_WRITE; (block.size() / G) as usize];
    assert_eq!(found, expected);
}

/// Holds a stream of device 1, and queues a kernel on it that writes to all of a block.
fn write_from_peer(rig: &Rig<impl Backing>, by: &Stream, block: &Block) {
    rig.machine.hold(D1, by.as_raw());
    let writes = vec![(block.address(), block.size(), 7)];
    let queued = rig.machine.queue_kernel(D1, by.as_raw(), vec![], writes);
    queued.unwrap();
}

fn asleep(tenant: &Tenant, contents: Contents<'_>) -> Result<(), SleepError> {
    let blocks = tenant.blocks().release(true).timeout(Duration::ZERO);
    blocks.sleep(contents).map(drop)
}

on_both! {
    fn blocks_are_open_however_their_memory_comes(rig) {
        let pool = open_pool(rig, 64);
        let tenant = pool.tenant("a").register().unwrap();
        let mut block = tenant.block(G).capacity(16 * G).allocate().unwrap();
        for granules in 2..=8 {
            block.grow_to(granules * G).unwrap();
        }
        is_open(rig, &block);
        let rows = tenant.block(2 * G).allocate_adjacent(3).unwrap();
        rows.iter().for_each(|row| is_open(rig, row));
        let calls = rig.device.calls();
        assert_eq!(calls.count(Call::MemSetAccess), calls.count(Call::MemMap));
        let mut fork = block.fork(4 * G, 6 * G).unwrap();
        let shared = access(rig, fork.address(), 4 * G);
        assert_eq!(shared, [AccessFlags::READ; 4]);
        fork.shrink_to(2 * G).unwrap();
        drop((fork, rows));
        let done = pool.compact(|_| true).unwrap();
        assert!(done.extents_after < done.extents_before, "{done:?}");
        is_open(rig, &block);
    }

    fn blocks_stay_open_across_sleep(rig) {
        let pool = open_pool(rig, 32);
        let tenant = pool.tenant("a").register().unwrap();
        let block = tenant.allocate(6 * G).unwrap();
        let store = HostStore::builder(&rig.device).pinned(8 * G).build().unwrap();
        for contents in [Contents::Keep(&store), Contents::Discard] {
            asleep(&tenant, contents).unwrap();
            assert!(block.is_asleep());
            tenant.blocks().wake().unwrap();
            is_open(rig, &block);
        }
    }

    fn a_block_without_a_home_waits_for_the_other_device(rig) {
        let pool = open_pool(rig, 4);
        let tenant = pool.tenant("a").register().unwrap();
        let peer = Stream::new(&rig.second()).unwrap();
        let block = tenant.allocate(4 * G).unwrap();
        write_from_peer(rig, &peer, &block);
        let refused = asleep(&tenant, Contents::Discard).unwrap_err();
        assert!(matches!(refused, SleepError::Busy { .. }), "{refused}");
        drop(block);
        assert!(tenant.try_allocate(4 * G).unwrap_err().is_out_of_memory());
        assert_eq!((pool.trim(0).unwrap(), tenant.stats().pending_free), (0, 4 * G));
        rig.machine.release_stream(D1, peer.as_raw());
        drop(tenant.try_allocate(4 * G).unwrap());
    }

    // I-24
    fn use_on_unknown_streams_is_that_of_all_devices(rig) {
        let pool = open_pool(rig, 4);
        let tenant = pool.tenant("a").register().unwrap();
        let (home, peer) = (Stream::new(&rig.device).unwrap(), Stream::new(&rig.second()).unwrap());
        for leased in [false, true] {
            let block = tenant.allocate_on(&home, 4 * G).unwrap();
            let lease = leased.then(|| block.lease());
            block.record_use_anywhere();
            write_from_peer(rig, &peer, &block);
            drop((block, lease));
            assert!(tenant.try_allocate(4 * G).unwrap_err().is_out_of_memory());
            rig.machine.release_stream(D1, peer.as_raw());
            drop(tenant.try_allocate(4 * G).unwrap());
        }
        // Without a home stream a lease keeps the memory for all of them too.
        let block = tenant.allocate(4 * G).unwrap();
        let lease = block.lease();
        drop(block);
        rig.machine.hold(D1, peer.as_raw());
        let first = lease.address();
        rig.machine.queue_kernel(D1, peer.as_raw(), vec![], vec![(first, G, 7)]).unwrap();
        drop(lease);
        assert!(tenant.try_allocate(4 * G).unwrap_err().is_out_of_memory());
        rig.machine.release_stream(D1, peer.as_raw());
        drop(tenant.try_allocate(4 * G).unwrap());
    }

    fn without_context_events_all_devices_are_synchronised(rig) {
        let pool = open_pool(rig, 4);
        let tenant = pool.tenant("a").register().unwrap();
        let peer = Stream::new(&rig.second()).unwrap();
        let lacking = Fault::all(CUresult::CUDA_ERROR_NOT_SUPPORTED).of(Call::CtxRecordEvent);
        rig.faults.arm(lacking);
        let block = tenant.allocate(4 * G).unwrap();
        write_from_peer(rig, &peer, &block);
        drop(block);
        rig.machine.release_stream(D1, peer.as_raw());
        let next = tenant.block(4 * G).timeout(Duration::from_secs(60));
        drop(next.allocate().unwrap());
        rig.faults.disarm();
    }

    fn heaps_are_open_too(rig) {
        let (pool, second) = (open_pool(rig, 16), rig.second());
        let tenant = pool.tenant("a").register().unwrap();
        let named = Heap::builder(&tenant).open_to(&second, Access::ReadWrite);
        let error = named.build().unwrap_err().to_string();
        assert!(error.contains("has access already"), "{error}");
        let heap = Heap::builder(&tenant).build().unwrap();
        let (home, peer) = (Stream::new(&rig.device).unwrap(), Stream::new(&second).unwrap());
        let memory = heap.allocate(2 * G, G, &home).unwrap();
        assert_eq!(access(rig, memory.address(), 2 * G), [AccessFlags::READ_WRITE; 2]);
        memory.record_use(&peer).unwrap();
    }

    fn hardened_pools_are_open_too(rig) {
        let second = rig.second();
        let builder = limited(rig, 16).hardened(Hardened::new());
        let (_pool, tenant) = common::with_tenant(builder.open_to(&second, Access::ReadWrite).build().unwrap());
        is_open(rig, &tenant.allocate(2 * G).unwrap());
    }

    fn devices_that_cannot_be_named_change_nothing(rig) {
        let (second, stranger) = (rig.second(), common::model());
        let before = rig.machine.snapshot();
        let refused = |devices: &[&Device], access| {
            let builder = limited(rig, 4);
            let builder = devices.iter().fold(builder, |it, device| it.open_to(device, access));
            match builder.build().unwrap_err() {
                PoolError::Memory(MemoryError::Argument(error)) | PoolError::Argument(error) => error,
                other => panic!("{other}"),
            }
        };
        let has = |device: &Device| ArgumentError::HasAccess(device.location());
        assert_eq!(refused(&[&rig.device], Access::ReadWrite), has(&rig.device));
        assert_eq!(refused(&[&second, &second.clone()], Access::Read), has(&second));
        assert_eq!(
            refused(&[&second, &stranger.device], Access::ReadWrite),
            ArgumentError::WrongDriver("the device")
        );
        assert!(matches!(refused(&[&second], Access::None), ArgumentError::Zero { .. }));
        assert_eq!(rig.machine.snapshot(), before);
    }
}

#[test]
fn a_device_that_cannot_reach_the_memory_is_refused() {
    let rig = common::rig(ModelDriver::new(common::model_options().unreachable(1, 0)));
    let second = rig.second();
    let refused = limited(&rig, 4).open_to(&second, Access::ReadWrite).build();
    let refused = refused.unwrap_err();
    let expected = MemoryError::Unreachable {
        device: second.location(),
        place: rig.device.location(),
    };
    assert!(
        matches!(&refused, PoolError::Memory(error) if *error == expected),
        "{refused}"
    );
}

#[test]
fn failed_calls_change_nothing() {
    struct World {
        block: Option<Block>,
        tenant: Tenant,
        pool: Pool,
    }
    let world = |rig: &Rig<Nothing>| {
        let pool = open_pool(rig, 16);
        let tenant = pool.tenant("a").register().unwrap();
        World {
            block: None,
            tenant,
            pool,
        }
    };
    let picture = |world: &World| (world.block.is_some(), world.pool.stats().committed);
    let allocate = |_: &Rig<Nothing>, world: &mut World| {
        let allocated: Result<Block, BlockError> = world.tenant.allocate(3 * G);
        world.block = Some(text(allocated)?);
        Ok(())
    };
    let calls = sweep(world, allocate, picture);
    assert!(calls >= 7, "{calls}");
    let sleeping = |rig: &Rig<Nothing>| {
        let mut world = world(rig);
        allocate(rig, &mut world).unwrap();
        asleep(&world.tenant, Contents::Discard).unwrap();
        world
    };
    let wake = |_: &Rig<Nothing>, world: &mut World| text(world.tenant.blocks().wake()).map(drop);
    let calls = sweep(sleeping, wake, picture);
    assert!(calls >= 4, "{calls}");
}
