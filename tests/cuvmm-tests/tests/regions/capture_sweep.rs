//! A capture begins before each driver call of an operation, and ends one or some calls later, or after
//! the operation. Whichever stream captures: no capture of a stream that has nothing to do with the
//! memory breaks, no memory is taken away under queued work, and the operation succeeds afterwards.
//!
//! `unsafe` is used to begin captures on the machine itself, as another library would.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{self, D0, G, Rig, host, model, pool};
use cuvmm::dlpack::{Consumer, Tensor};
use cuvmm::driver::model::{Backing, Machine};
use cuvmm::driver::{Call, CaptureMode, Driver};
use cuvmm::{
    Block, Contents, CowBuffer, DeviceVec, MemPool, PoolAllocation, Region, Stream, UnifiedBuffer,
};

/// The home stream of the memory, another stream that uses it, and one that does not.
type Streams = [Stream; 3];

/// How many calls after its beginning a capture ends; 0 if it ends after the operation.
const LENGTHS: [u64; 4] = [0, 1, 2, 3];

const GOING_ON: u64 = 0;
const BROKEN: u64 = 1;
const INTACT: u64 = 2;

/// Ends a capture, and returns `INTACT` or `BROKEN`.
fn end(machine: &Machine<impl Backing>, stream: &Stream) -> u64 {
    // SAFETY: the stream is alive, and the graph is not used.
    unsafe {
        let Ok(graph) = machine.capture_end(D0, stream.as_raw()) else {
            return BROKEN;
        };
        machine.graph_destroy(D0, graph).unwrap();
    }
    INTACT
}

/// Makes a stream capture from before the driver call with a number, counted from 1, for `length` calls.
/// Returns the number of calls that were made so far, and the state of the capture.
fn capture_from(
    rig: &Rig<impl Backing>,
    stream: &Stream,
    (first, length): (u64, u64),
) -> (Arc<AtomicU64>, Arc<AtomicU64>) {
    let (seen, state) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicU64::new(GOING_ON)),
    );
    let (counted, ended) = (Arc::clone(&seen), Arc::clone(&state));
    let (machine, stream) = (Arc::clone(&rig.machine), stream.clone());
    rig.faults.forget();
    rig.faults.watch(Some(Arc::new(move |_| {
        let now = counted.fetch_add(1, Ordering::SeqCst) + 1;
        if now == first {
            // SAFETY: the stream is alive.
            let begun = unsafe { machine.capture_begin(D0, stream.as_raw(), CaptureMode::GLOBAL) };
            begun.unwrap();
        }
        if length > 0 && now == first + length {
            ended.store(end(&machine, &stream), Ordering::SeqCst);
        }
    })));
    (seen, state)
}

/// Runs an operation once for each of its driver calls, each time in a new world. `operate` is called
/// again if it fails.
fn sweep<B: Backing, W>(
    make: impl Fn() -> Rig<B>,
    world: impl Fn(&Rig<B>, &Streams) -> W,
    operate: impl Fn(&mut W, &Streams) -> Result<(), String>,
) {
    for (who, length) in (0..3).flat_map(|who| LENGTHS.map(|length| (who, length))) {
        for first in 1.. {
            assert!(first < 400, "the operation never ends");
            let rig = make();
            let streams: Streams = [(); 3].map(|()| Stream::new(&rig.device).unwrap());
            let mut world = world(&rig, &streams);
            let (seen, state) = capture_from(&rig, &streams[who], (first, length));
            let outcome = operate(&mut world, &streams);
            rig.faults.watch(None);
            let calls = rig.faults.calls();
            let what =
                format!("stream {who}, call {first}, length {length}, {outcome:?}: {calls:?}");
            let of_context = [Call::CtxSynchronize, Call::CtxRecordEvent];
            assert!(
                !calls.iter().any(|call| of_context.contains(call)),
                "{what}"
            );
            let is_over = seen.load(Ordering::SeqCst) < first;
            if is_over {
                outcome.clone().unwrap();
            } else {
                if state.load(Ordering::SeqCst) == GOING_ON {
                    state.store(end(&rig.machine, &streams[who]), Ordering::SeqCst);
                }
                // A capture of a stream of the memory may begin between a question and a call.
                assert!(who < 2 || state.load(Ordering::SeqCst) == INTACT, "{what}");
            }
            if outcome.is_err() {
                let again = operate(&mut world, &streams);
                assert!(again.is_ok(), "{again:?} after {what}");
            }
            rig.machine.release_all_streams(D0);
            drop(world);
            assert_eq!(rig.device.drop_failures(), 0, "{what}");
            if is_over {
                break;
            }
        }
    }
}

/// Queues a kernel that writes to memory. It is held back, until it is waited for or for good.
fn busy(rig: &Rig<impl Backing>, stream: &Stream, (at, size): (u64, u64), awaited: bool) {
    match awaited {
        true => rig.machine.hold_until_awaited(D0, stream.as_raw()),
        false => rig.machine.hold(D0, stream.as_raw()),
    }
    rig.kernel(stream, &[], &[(cuvmm::driver::DeviceAddress(at), size, 3)]);
}

/// Queues a kernel that is complete when it is next asked about.
fn late(rig: &Rig<impl Backing>, stream: &Stream) {
    rig.kernel(stream, &[], &[]);
}

fn region(rig: &Rig<impl Backing>) -> Region {
    let builder = Region::builder(&rig.device, 2 * G).largest_extent(G);

    common::committed(builder, 2 * G)
}

fn text<T, E: std::fmt::Debug>(outcome: Result<T, E>) -> Result<T, String> {
    outcome.map_err(|error| format!("{error:?}"))
}

#[test]
fn a_region_is_purged_forked_unshared_and_copied() {
    let withdrawn = |rig: &Rig<_>, [home, ..]: &Streams| {
        let mut region = region(rig);
        busy(rig, home, (region.address().0, G), false);
        region
            .decommit_after(0..G, std::slice::from_ref(home))
            .unwrap();
        region
    };
    sweep(model, withdrawn, |region, _| text(region.purge()).map(drop));
    let filled = |rig: &Rig<_>, [home, other, _]: &Streams| {
        let region = region(rig);
        region.fill(home, 0..G, 1).unwrap();
        region.copy_within(other, 0..G, G).unwrap();
        (region, None)
    };
    sweep(model, filled, |(region, fork), [home, ..]| {
        *fork = Some(text(region.fork(std::slice::from_ref(home)))?);
        Ok(())
    });
    let read = |rig: &Rig<_>, streams: &Streams| {
        let (mut one, target) = (region(rig), region(rig));
        let fork = one.fork(&[]).unwrap();
        for stream in &streams[..2] {
            rig.machine.hold_until_awaited(D0, stream.as_raw());
            target.copy_from(stream, 0, &one, 0..G).unwrap();
        }
        (one, fork, target)
    };
    sweep(model, read, |(region, ..), [home, other, _]| {
        text(region.unshare(0..2 * G, other, std::slice::from_ref(home))).map(drop)
    });
    sweep(
        model,
        |rig, _| region(rig),
        |region, [home, ..]| {
            text(region.write(home, 0, &[1; 8]))?;
            text(region.read(home, 0, &mut [0; 8]))
        },
    );
}

#[test]
fn a_region_in_a_tenant_commits_used_memory_and_is_purged() {
    let used = |rig: &Rig<_>, [home, other, _]: &Streams| {
        let pool = pool(rig, 4);
        let [a, b] = common::tenants(&pool);
        let region = a.region(4 * G).largest_extent(G).home_stream(home);
        let region = common::committed(region, 2 * G);
        drop(b.allocate_on(home, 2 * G).unwrap());
        busy(rig, other, (region.address().0, G), false);
        (region, pool)
    };
    sweep(model, used, |(region, _), [_, other, _]| {
        text(region.commit(2 * G..4 * G))?;
        if region.is_committed(0..G) {
            text(region.decommit_after(0..2 * G, std::slice::from_ref(other)))?;
        }
        text(region.purge()).map(drop)
    });
}

#[test]
fn containers_shrink_and_share() {
    let vector = |rig: &Rig<_>, [home, other, _]: &Streams| {
        let region = Region::builder(&rig.device, 4 * G).largest_extent(G);
        let mut vec = DeviceVec::<u8>::from_region(region.reserve().unwrap(), home).unwrap();
        vec.resize(2 * G as usize, 1).unwrap();
        vec.record_use(other).unwrap();
        vec.truncate(4);
        busy(rig, other, (vec.address().0 + G, G), false);
        vec
    };
    sweep(model, vector, |vec, _| text(vec.shrink_to_fit()).map(drop));
    let cow = |rig: &Rig<_>, [home, other, _]: &Streams| {
        let cow = CowBuffer::<u8>::with_extents(&rig.device, home, G as usize, G);
        let mut cow = cow.unwrap();
        cow.record_use(other).unwrap();
        busy(rig, other, (cow.address().0, G), true);
        (cow, None)
    };
    sweep(model, cow, |(cow, snapshot), _| {
        if snapshot.is_none() {
            *snapshot = Some(text(cow.snapshot())?);
        }
        text(cow.make_mut(0..4)).map(drop)
    });
    let exported = |rig: &Rig<_>, [home, other, _]: &Streams| {
        let mut vec = DeviceVec::<u8>::new(&rig.device, home, 16).unwrap();
        vec.resize(16, 1).unwrap();
        vec.record_use(other).unwrap();
        busy(rig, other, (vec.address().0, 16), true);
        Arc::new(vec)
    };
    sweep(host, exported, |vec, [home, ..]| {
        let consumer = Consumer::Stream(home.clone());
        let tensor = Tensor::of::<u8>(&[16]).export(Arc::clone(vec), &consumer);
        text(tensor.map(drop).map_err(|refused| refused.reason))
    });
}

#[test]
fn blocks_are_allocated_grown_freed_and_put_to_sleep() {
    let freed = |rig: &Rig<_>, [home, ..]: &Streams| {
        let (pool, tenant) = common::tenancy(rig, 1);
        let block = tenant.allocate_on(home, G).unwrap();
        late(rig, home);
        drop(block);
        (pool, tenant, None::<Block>)
    };
    sweep(model, freed, |(_, tenant, block), [_, other, _]| {
        *block = Some(text(tenant.allocate_on(other, G))?);
        Ok(())
    });
    let forked = |rig: &Rig<_>, [home, other, _]: &Streams| {
        let (pool, tenant) = common::tenancy(rig, 8);
        let builder = tenant.block(2 * G).capacity(8 * G).largest_extent(2 * G);
        let root = builder.home_stream(home).allocate().unwrap();
        let mut fork = root.fork(2 * G, 4 * G).unwrap();
        fork.shrink_to(G).unwrap();
        fork.record_use(other).unwrap();
        late(rig, other);
        (fork, root, tenant, pool)
    };
    sweep(model, forked, |(fork, ..), _| text(fork.try_grow_to(2 * G)));
    let used = |rig: &Rig<_>, [home, other, _]: &Streams| {
        let (pool, tenant) = common::tenancy(rig, 8);
        let block = tenant.allocate_on(home, G).unwrap();
        block.record_use(other).unwrap();
        (pool, tenant, Some(block))
    };
    let busily = |rig: &Rig<_>, streams: &Streams| {
        let used = used(rig, streams);
        let at = used.2.as_ref().unwrap().address().0;
        busy(rig, &streams[1], (at, G), false);
        used
    };
    sweep(model, busily, |(pool, _, block), _| {
        drop(block.take());
        text(pool.trim(0)).map(drop)
    });
    let just = |rig: &Rig<_>, streams: &Streams| {
        late(rig, &streams[1]);
        used(rig, streams)
    };
    sweep(model, just, |(_, tenant, block), _| {
        if block.as_ref().is_some_and(|block| !block.is_asleep()) {
            text(tenant.blocks().sleep(Contents::Discard))?;
        }
        text(tenant.blocks().wake()).map(drop)
    });
}

#[test]
fn memory_of_a_memory_pool_and_managed_memory_are_used() {
    let allocated = |rig: &Rig<_>, [home, ..]: &Streams| {
        let memory_pool = MemPool::builder(&rig.device).create().unwrap();
        Some(memory_pool.allocate_on(home, G).unwrap())
    };
    sweep(
        model,
        allocated,
        |memory: &mut Option<PoolAllocation>, [_, other, _]| {
            let Some(open) = memory.as_ref() else {
                return Ok(());
            };
            text(open.record_use(other))?;
            let Some(open) = memory.take() else {
                return Ok(());
            };
            open.close().map_err(|refused| {
                let why = format!("{:?}", refused.reason);
                *memory = Some(refused.owner);
                why
            })
        },
    );
    let managed = |rig: &Rig<_>, [home, ..]: &Streams| {
        UnifiedBuffer::<u32>::zeroed(&rig.device, home, 4).unwrap()
    };
    sweep(model, managed, |buffer, [home, other, _]| {
        for stream in [home, other] {
            drop(text(buffer.device_read(stream))?);
        }
        for stream in [home, other] {
            drop(text(buffer.device_mut(stream))?);
        }
        drop(text(buffer.device_read(home))?);
        text(buffer.host())?;
        text(buffer.host_mut()).map(drop)
    });
}
