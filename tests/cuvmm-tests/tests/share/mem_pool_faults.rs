//! Fails every driver call of giving and taking allocations once, on either side. A failure changes
//! nothing, the peer is notified, and a second attempt succeeds.

use std::thread;

use crate::common;
use crate::common::sweep::{sweep, sweep_partly, text};
use crate::common::{MIB, Rig};
use crate::share_support::{alone, leaves_nothing_open};
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{CUresult, Call, HandleTypes, fault::Fault};
use cuvmm::error::{MemoryError, ShareError};
use cuvmm::own::ImportedAllocation;
use cuvmm::share::{AllocationOffer, AllocationParcel, PoolImporter};
use cuvmm::{Channel, MemPool, PoolAllocation, Stream};

type Model = Rig<Nothing>;

/// Allocations of everything that is sent.
const MANY: u64 = 3;

/// A process that gives.
struct Giver {
    pool: MemPool,
    memory: Vec<PoolAllocation>,
    _stream: Stream,
}

fn giver(rig: &Model) -> Giver {
    let shareable = MemPool::builder(&rig.device).shareable(HandleTypes::POSIX_FD);
    let (pool, stream) = (
        shareable.create().unwrap(),
        Stream::new(&rig.device).unwrap(),
    );
    let memory = (0..MANY).map(|_| pool.allocate_on(&stream, MIB).unwrap());
    Giver {
        memory: memory.collect(),
        pool,
        _stream: stream,
    }
}

impl Giver {
    fn offer(&self) -> AllocationOffer {
        let (first, rest) = self.memory.split_first().unwrap();
        let offer = AllocationOffer::new(first);
        rest.iter()
            .fold(offer, |offer, memory| offer?.and(memory))
            .unwrap()
    }

    fn is_held(&self) -> bool {
        self.memory.iter().any(PoolAllocation::is_held)
    }
}

fn importer(rig: &Model) -> PoolImporter {
    PoolImporter::new(&rig.device, &Stream::new(&rig.device).unwrap()).unwrap()
}

type Taken = Result<Vec<ImportedAllocation>, ShareError>;

/// Sends on one thread and receives on another.
fn give(giver: &Giver, importer: &PoolImporter) -> (Result<(), ShareError>, Taken) {
    let (mut one, mut other) = Channel::pair().unwrap();
    let offer = giver.offer();
    thread::scope(|scope| {
        let given = scope.spawn(|| one.send_allocations(&offer));
        let taken = other.recv_allocations(importer);
        (given.join().unwrap(), taken)
    })
}

#[test]
fn giving() {
    leaves_nothing_open(|| {
        let world = |rig: &Model| {
            let taker = common::model();
            (giver(rig), importer(&taker), taker)
        };
        type World = (Giver, PoolImporter, Model);
        let send = |_: &Model, (giver, importer, taker): &mut World| {
            let (given, taken) = give(giver, importer);
            match (&given, &taken) {
                (Ok(()), Ok(_)) => {}
                (Err(why @ ShareError::Memory(_)), Err(ShareError::Refused(reason))) => {
                    assert_eq!(*reason, why.to_string());
                    let live = taker.machine.live();
                    assert_eq!((live.mem_pools, live.allocations), (0, 0));
                    assert!(!giver.is_held());
                }
                other => panic!("{other:?}"),
            }
            drop(taken);
            assert!(!giver.is_held());
            text(given)
        };
        let figures = |world: &World| world.0.pool.stats().unwrap().used;
        let calls = sweep(world, send, figures);
        // Of each allocation: whether its stream captures, the wait, which changes the capture
        // mode twice, and its data. The second change is tried again.
        assert!(calls > 4 * MANY, "{calls}");
    });
}

#[test]
fn taking() {
    leaves_nothing_open(|| {
        let world = |rig: &Model| {
            let other = common::model();
            (Vec::new(), importer(rig), giver(&other), other)
        };
        type World = (Vec<ImportedAllocation>, PoolImporter, Giver, Model);
        let take =
            |_: &Model, (imported, importer, giver, _): &mut World| match give(giver, importer) {
                (Ok(()), Ok(taken)) => {
                    imported.extend(taken);
                    Ok(())
                }
                (Err(ShareError::Refused(reason)), Err(why @ ShareError::Memory(_))) => {
                    assert_eq!(reason, why.to_string());
                    assert_eq!(giver.is_held(), !imported.is_empty());
                    Err(reason)
                }
                other => panic!("{other:?}"),
            };
        let had = |world: &World| world.0.len();
        let calls = sweep_partly(world, take, had);
        assert_eq!(calls, 1 + 5 * MANY, "the pool; each allocation");
        // Once more: what is imported already is only checked.
        let known = |rig: &Model| {
            let mut world = world(rig);
            take(rig, &mut world).unwrap();
            world
        };
        let calls = sweep_partly(known, take, |world| world.2.is_held());
        assert_eq!(calls, 4 * MANY);
    });
}

#[test]
fn by_hand() {
    leaves_nothing_open(|| {
        let world = |rig: &Model| (Vec::new(), giver(rig));
        type World = (Vec<AllocationParcel>, Giver);
        let pack = |_: &Model, (parcels, giver): &mut World| {
            parcels.push(text(giver.offer().parcel())?);
            Ok(())
        };
        let calls = sweep(world, pack, |world| world.0.len());
        assert!(calls > 4 * MANY, "{calls}");
        let world = |rig: &Model| {
            let other = common::model();
            (Vec::new(), importer(rig), giver(&other), other)
        };
        type There = (Vec<ImportedAllocation>, PoolImporter, Giver, Model);
        let open = |_: &Model, (imported, importer, giver, _): &mut There| {
            let parcel = giver.offer().parcel().unwrap();
            imported.extend(text(importer.open(parcel))?);
            Ok(())
        };
        let calls = sweep_partly(world, open, |world| world.0.len());
        assert_eq!(calls, 1 + 5 * MANY);
    });
}

#[test]
fn letting_go() {
    leaves_nothing_open(|| {
        let world = |rig: &Model| {
            let other = common::model();
            let (giver, importer) = (giver(&other), importer(rig));
            let mut taken = give(&giver, &importer).1.unwrap();
            let user = Stream::new(&rig.device).unwrap();
            taken[0].record_use(&user).unwrap();
            taken.truncate(1);
            (taken, giver, other)
        };
        type World = (Vec<ImportedAllocation>, Giver, Model);
        let close = |_: &Model, (taken, giver, _): &mut World| {
            let closed = taken.pop().unwrap().close();
            if let Err(refused) = closed {
                assert!(giver.is_held());
                let reason = refused.reason.to_string();
                taken.push(refused.owner);
                return Err(reason);
            }
            assert!(!giver.is_held());
            Ok(())
        };
        let calls = sweep_partly(world, close, |world| world.0.len());
        assert!(calls >= 8, "{calls}");
    });
}

/// A pool that was imported before refuses, whatever the code: the pool is imported from the handle
/// that came with the allocations.
#[test]
fn a_pool_that_refuses_is_imported_again() {
    leaves_nothing_open(|| {
        let (rig, other) = (
            common::clean(common::model()),
            common::clean(common::model()),
        );
        let (mut giver, importer) = (giver(&other), importer(&rig));
        let first = give(&giver, &importer).1.unwrap();
        let given = std::mem::take(&mut giver.memory);
        for (refusals, imports, outcome) in [(0, 0, true), (1, 1, true), (2, 1, false)] {
            let code = CUresult::CUDA_ERROR_NOT_INITIALIZED;
            // What is imported already would not be imported again.
            giver.memory = vec![giver.pool.allocate_on(given[0].stream(), MIB).unwrap()];
            rig.faults.forget();
            for n in 1..=refusals {
                rig.faults
                    .arm(Fault::nth(n, code).of(Call::MemPoolImportPointer));
            }
            let again = give(&giver, &importer).1;
            rig.faults.disarm();
            assert_eq!(
                rig.faults.count(Call::MemPoolImportFromShareableHandle),
                imports
            );
            assert_eq!(again.is_ok(), outcome);
        }
        drop(first);
        assert!(!given.iter().any(PoolAllocation::is_held));
    });
}

/// A drop whose free fails: the giver keeps the memory, because this process may use it.
#[test]
fn a_drop_that_fails_lets_nothing_go() {
    let _alone = alone();
    for call in [Call::MemFreeAsync, Call::StreamSynchronize] {
        let (rig, other) = (common::model(), common::model());
        let (giver, importer) = (giver(&other), importer(&rig));
        let taken = give(&giver, &importer).1.unwrap();
        let all = Fault::all(CUresult::CUDA_ERROR_UNKNOWN);
        rig.faults.arm(all.of(call));
        drop(taken);
        rig.faults.disarm();
        assert_eq!(rig.device.drop_failures(), MANY);
        let leaked = if call == Call::MemFreeAsync {
            MANY * MIB
        } else {
            0
        };
        assert_eq!(rig.device.leaked(), leaked);
        assert!(giver.is_held());
    }
}

/// A taker whose context is lost lets the memory go: nothing runs there any more.
#[test]
fn a_lost_context_lets_go() {
    leaves_nothing_open(|| {
        let (rig, other) = (common::model(), common::clean(common::model()));
        let (giver, importer) = (giver(&other), importer(&rig));
        let taken = give(&giver, &importer).1.unwrap();
        let code = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
        rig.machine.lose_context(common::D0, code);
        let stream = taken[0].stream().clone();
        assert!(stream.synchronize().is_err());
        let error = taken[0].read(&stream, 0, &mut [0]).unwrap_err();
        assert!(!matches!(error, MemoryError::GiverGone), "{error}");
        drop(taken);
        assert_eq!((rig.device.drop_failures(), rig.device.leaked()), (0, 0));
        assert!(!giver.is_held());
    });
}
