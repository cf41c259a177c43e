//! Fails every driver call of the operations on a tenant's memory pool once. A failure changes
//! nothing that is charged or held, and the operation then succeeds.
//!
//! `unsafe` is used for what another library would allocate.
#![allow(unsafe_code, clippy::unit_arg)]

use crate::common;
use crate::common::sweep::{sweep, sweep_partly, text};
use crate::common::{D0, Rig};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{CUresult, Call, DeviceAddress, Driver};
use cuvmm::{
    Access, Block, CurrentTenantMemPool, Device, Limit, MemPool, Pool, PoolAllocation, Stream,
    Tenant, TenantMemPool,
};

const STEP: u64 = 32 << 20;

struct World {
    // Fields in drop order.
    blocks: Vec<Block>,
    held: Vec<PoolAllocation>,
    guards: Vec<CurrentTenantMemPool>,
    memory: Option<TenantMemPool>,
    tenant: Tenant,
    other: Tenant,
    stream: Stream,
    peer: Device,
    pool: Pool,
}

/// A tenant with a memory pool of six steps, of which two are in use, and another tenant.
fn world(rig: &Rig<Nothing>, limit: u64) -> World {
    let pool = Pool::builder(&rig.device).limit(Limit::Bytes(limit * STEP));
    let pool = pool.build().unwrap();
    let [tenant, other] = common::tenants(&pool);
    let peer = rig.second();
    let memory = tenant.memory_pool(6 * STEP).minimum(STEP);
    let memory = memory.open_to(&peer, Access::ReadWrite).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let held = vec![memory.allocate_on(&stream, 2 * STEP).unwrap()];
    World {
        blocks: Vec::new(),
        held,
        guards: vec![memory.make_current().unwrap()],
        memory: Some(memory),
        tenant,
        other,
        stream,
        peer,
        pool,
    }
}

impl World {
    /// Returns the access of the other device to the current pool.
    fn access(&self) -> Access {
        let device = self.stream.device();
        let current = MemPool::current_of(device).unwrap();
        // SAFETY: the tenant's pool is current, and lives as long as its owner.
        let pool = unsafe { MemPool::from_raw(device, current) };
        pool.access_of(&self.peer).unwrap()
    }

    fn memory(&self) -> &TenantMemPool {
        self.memory.as_ref().unwrap()
    }
}

/// Returns what the tenants are charged in steps, and the maximum of the memory pool.
fn picture(world: &World) -> (u64, u64, u64, u64) {
    let charged = |tenant: &Tenant| tenant.stats().committed / STEP;
    // The figures of this moment are not asked for: that may give something back.
    let stats = world.pool.stats();
    let (mine, theirs) = (charged(&world.tenant), charged(&world.other));
    (mine, theirs, stats.committed / STEP, stats.quarantined)
}

#[test]
fn building() {
    let calls = sweep(
        |rig| {
            let mut world = world(rig, 16);
            world.guards.clear();
            world.held.clear();
            world.stream.synchronize().unwrap();
            world.memory = None;
            world
        },
        |_, world| {
            let built = world.tenant.memory_pool(3 * STEP);
            let built = built.open_to(&world.peer, Access::Read).build();
            Ok(world.memory = Some(text(built)?))
        },
        picture,
    );
    assert_eq!(
        calls, 10,
        "four for each pool, one for the device, and the threshold"
    );
}

#[test]
fn growing() {
    // With room for both pools, and without, by what is missing alone.
    for (limit, steps) in [(32, 6), (9, 6)] {
        let calls = sweep(
            |rig| world(rig, limit),
            |_, world| text(world.memory().reserve(steps * STEP)),
            |world| {
                assert_eq!(world.access(), Access::ReadWrite);
                (picture(world), world.memory().is_current().unwrap())
            },
        );
        assert!(calls >= 20, "{calls}");
    }
}

#[test]
fn shrinking_trimming_and_reading() {
    let calls = sweep(
        |rig| world(rig, 16),
        |_, world| {
            let less = text(world.memory().shrink_to(3 * STEP))?;
            match less == 3 * STEP || world.tenant.stats().committed == 4 * STEP {
                true => Ok(()),
                false => Err(format!("{less} less")),
            }
        },
        |world| (picture(world), world.memory().is_current().unwrap()),
    );
    assert!(calls >= 20, "{calls}");
    sweep(
        |rig| world(rig, 16),
        |_, world| text(world.memory().trim()).map(drop),
        picture,
    );
    sweep(
        |rig| world(rig, 16),
        |_, world| text(world.memory().stats()).map(drop),
        picture,
    );
}

#[test]
fn becoming_current_and_no_more() {
    let calls = sweep(
        |rig| {
            let mut world = world(rig, 16);
            world.guards.clear();
            world
        },
        |_, world| {
            let made = text(world.memory().make_current())?;
            Ok(world.guards.push(made))
        },
        |world| (picture(world), world.memory().is_current().unwrap()),
    );
    assert_eq!(calls, 3);
    let calls = sweep(
        |rig| world(rig, 16),
        |_, world| {
            let Some(guard) = world.guards.pop() else {
                return Ok(());
            };
            guard.close().map_err(|refused| {
                let reason = refused.reason.to_string();
                world.guards.push(refused.owner);
                reason
            })
        },
        |world| (picture(world), world.memory().is_current().unwrap()),
    );
    assert_eq!(calls, 2);
}

#[test]
fn allocating() {
    let calls = sweep(
        |rig| world(rig, 16),
        |_, world| {
            let made = text(world.memory().allocate_on(&world.stream, STEP))?;
            Ok(world.held.push(made))
        },
        picture,
    );
    assert_eq!(calls, 2);
}

#[test]
fn reclaiming_for_another_tenant() {
    let calls = sweep_partly(
        |rig| world(rig, 8),
        |_, world| {
            let made = text(world.other.allocate(3 * STEP))?;
            Ok(world.blocks.push(made))
        },
        |_| (),
    );
    assert!(calls >= 20, "{calls}");
}

#[test]
fn ending() {
    // Whatever fails, nothing is charged when all has ended, and the default pool is current.
    for unregisters in [false, true] {
        for k in 1..60 {
            let rig = common::model();
            let mut world = world(&rig, 16);
            let stream = world.stream.as_raw();
            // SAFETY: the stream is alive.
            let library = unsafe { rig.machine.alloc_async(D0, STEP, stream).unwrap() };
            let code = CUresult::CUDA_ERROR_UNKNOWN;
            rig.faults.arm(Fault::nth(k, code));
            if unregisters {
                world.tenant.clone().unregister();
            }
            world.guards.clear();
            world.memory = None;
            rig.faults.disarm();
            let held = world.pool.stats().committed;
            assert!(held >= 3 * STEP, "call {k}: {held}");
            end(world, &rig, library);
        }
    }
}

fn end(mut world: World, rig: &Rig<Nothing>, library: DeviceAddress) {
    // SAFETY: nothing uses the memory.
    unsafe {
        rig.machine
            .free_async(D0, library, world.stream.as_raw())
            .unwrap()
    };
    world.held.clear();
    world.stream.synchronize().unwrap();
    let _all = world.other.allocate(16 * STEP).unwrap();
    assert_eq!(world.tenant.stats().committed, 0);
    let default = MemPool::default_of(&rig.device).unwrap();
    assert!(default.is_current().unwrap());
    assert_eq!(rig.machine.live().mem_pools, rig.device.kept_memory_pools());
}

/// While the driver refuses, exchanges keep the newest pool the current one: an old one must not be
/// allocated from.
#[test]
fn a_pool_that_could_not_be_left_at_a_drop_is_left_by_the_next_operation() {
    let rig = common::model();
    let mut world = world(&rig, 16);
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    rig.faults
        .arm(Fault::nth(1, code).of(Call::DeviceSetMemPool));
    world.guards.clear();
    rig.faults.disarm();
    assert!(world.memory().is_current().unwrap());
    world.memory().reserve(7 * STEP).unwrap();
    let default = MemPool::default_of(&rig.device).unwrap();
    assert!(default.is_current().unwrap());
    assert_eq!(rig.device.drop_failures(), 0);
    // Through the end of the pool too.
    world.guards.push(world.memory().make_current().unwrap());
    rig.faults
        .arm(Fault::nth(1, code).of(Call::DeviceSetMemPool));
    world.guards.clear();
    world.memory = None;
    rig.faults.disarm();
    assert!(default.is_current().unwrap());
}

#[test]
fn a_stand_in_that_could_not_be_left_is_left_by_the_next_operation() {
    let rig = common::model();
    let world = world(&rig, 9);
    let code = CUresult::CUDA_ERROR_UNKNOWN;
    // The switch to the new pool fails, and both attempts to go back.
    for nth in [2, 3, 4] {
        rig.faults
            .arm(Fault::nth(nth, code).of(Call::DeviceSetMemPool));
    }
    assert!(world.memory().reserve(6 * STEP).is_err());
    rig.faults.disarm();
    assert!(!world.memory().is_current().unwrap());
    assert_eq!(picture(&world).0, 7);
    world.memory().stats().unwrap();
    assert!(world.memory().is_current().unwrap());
    world.memory().reserve(6 * STEP).unwrap();
}
