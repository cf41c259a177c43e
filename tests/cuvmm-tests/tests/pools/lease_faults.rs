//! Fails every driver call of giving up memory kept by leases of each kind once; and gives memory
//! up while another library captures.

use crate::common;
use crate::common::books::{balanced, books};
use crate::common::sweep::{sweep_partly, text};
use crate::common::world::{World, world};
use crate::common::{D0, G, Rig, pool};
use crate::on_both;
use cuvmm::driver::model::Nothing;
use cuvmm::driver::{CaptureMode, Driver};
use cuvmm::{Block, Lease, Stream};

/// The kind of lease that keeps a block's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    /// Two leases, of which one ends before the block.
    Cloned,
    /// A stream that is recorded while the lease lives.
    OnAStream,
    /// Work on streams that are not named.
    Anywhere,
    Registered,
}

const KINDS: [Kind; 5] = [
    Kind::Plain,
    Kind::Cloned,
    Kind::OnAStream,
    Kind::Anywhere,
    Kind::Registered,
];

/// Takes a lease of a kind, as the last owner of a block's memory.
fn keep(kind: Kind, block: &Block, stream: &Stream) -> Box<dyn Send> {
    let lease: Lease = block.lease();
    match kind {
        Kind::Plain => {}
        Kind::Cloned => drop(lease.clone()),
        Kind::OnAStream => lease.record_use(stream).unwrap(),
        Kind::Anywhere => lease.record_use_anywhere(),
        Kind::Registered => return Box::new(lease.register()),
    }
    Box::new(lease)
}

type Leased = (World, Option<Box<dyn Send>>);

/// Ends the lease, and allocates all remaining memory for the second tenant.
fn take_all((world, lease): &mut Leased) -> Result<(), String> {
    drop(lease.take());
    let left = 16 * G - world.pool.stats().in_use - world.pool.stats().quarantined;
    let block = text(world.tenants[1].try_allocate(left))?;
    world.blocks.push(block);
    Ok(())
}

fn of_blocks((world, _): &Leased) -> (u64, usize) {
    (books_of(world), world.blocks.len())
}

fn books_of(world: &World) -> u64 {
    common::world::books(&world.pool).in_use
}

#[test]
fn memory_that_a_lease_kept_goes_when_it_ends() {
    for kind in KINDS {
        for shrinks in [true, false] {
            let calls = sweep_partly(
                |rig: &Rig<Nothing>| {
                    let mut world = world(rig);
                    let mut block = world.tenants[0]
                        .block(7 * G)
                        .home_stream(&world.streams[0])
                        .try_allocate()
                        .unwrap();
                    let lease = keep(kind, &block, &world.streams[1]);
                    if shrinks {
                        block.shrink_to(4 * G).unwrap();
                        world.blocks.push(block);
                    } else {
                        drop(block);
                    }
                    let stats = world.pool.stats();
                    assert_eq!(stats.leased, if shrinks { 3 * G } else { 7 * G });
                    (world, Some(lease))
                },
                |_, leased| take_all(leased),
                of_blocks,
            );
            assert!(calls >= 8, "{kind:?}: {calls}");
        }
    }
}

#[test]
fn what_a_lease_keeps_is_not_taken_whatever_fails() {
    for kind in KINDS {
        let calls = sweep_partly(
            |rig: &Rig<Nothing>| {
                let world = world(rig);
                let home = &world.streams[0];
                let block = world.tenants[0].allocate_on(home, 7 * G).unwrap();
                let lease = keep(kind, &block, &world.streams[1]);
                drop(block);
                drop(world.tenants[0].try_allocate(4 * G).unwrap());
                (world, Some(lease))
            },
            |_, (world, _)| {
                assert!(world.tenants[1].try_allocate(8 * G).is_err());
                text(world.pool.trim(0))?;
                let left = 7 * G - world.pool.stats().quarantined;
                let block = text(world.tenants[1].try_allocate(left))?;
                assert_eq!(world.pool.stats().leased, 7 * G);
                world.blocks.push(block);
                Ok(())
            },
            of_blocks,
        );
        assert!(calls >= 8, "{kind:?}: {calls}");
    }
}

on_both! {
    fn what_is_given_up_under_a_foreign_capture_waits_for_its_work(rig) {
        for mode in [CaptureMode::GLOBAL, CaptureMode::THREAD_LOCAL, CaptureMode::RELAXED] {
            let pool = pool(rig, 24);
            let [tenant, other] = common::tenants(&pool);
            let [home, used, theirs] = [(); 3].map(|()| Stream::new(&rig.device).unwrap());
            let on_home = |granules| tenant.block(granules * G).largest_extent(2 * G).home_stream(&home);
            let mut shrunk = on_home(4).try_allocate().unwrap();
            let forked = on_home(4).try_allocate().unwrap();
            let fork = forked.fork(4 * G, 4 * G).unwrap();
            let blocks = [tenant.try_allocate(2 * G).unwrap(), tenant.allocate_on(&home, 2 * G).unwrap()];
            let leases = KINDS.map(|kind| {
                let block = tenant.allocate_on(&home, G).unwrap();
                (keep(kind, &block, &used), block)
            });
            // A kernel uses all of them on a stream that is recorded on all of them.
            let all = [&shrunk, &forked].into_iter().chain(&blocks);
            let all: Vec<&Block> = all.chain(leases.iter().map(|(_, block)| block)).collect();
            all.iter().for_each(|block| block.record_use(&used).unwrap());
            fork.record_use(&used).unwrap();
            let writes: Vec<_> = all.iter().map(|block| (block.address(), block.size(), 1)).collect();
            let reads = vec![(fork.address(), fork.size())];
            rig.held_kernel(&used, &reads, &[]);
            rig.machine.queue_kernel(D0, used.as_raw(), vec![], writes).unwrap_or_else(|error| panic!("{error}"));
            // SAFETY: the stream is alive.
            #[allow(unsafe_code)]
            unsafe { rig.machine.capture_begin(D0, theirs.as_raw(), mode).unwrap(); }
            shrunk.shrink_to(G).unwrap();
            drop((shrunk, forked, fork, blocks, leases));
            let _ = pool.trim(0);
            assert!(other.try_allocate(24 * G).is_err());
            let _ = pool.compact(|_| true);
            balanced(rig, &pool);
            rig.machine.release_all_streams(D0);
            // SAFETY: the capture was begun above, and the graph is destroyed at once.
            #[allow(unsafe_code)]
            unsafe {
                if let Ok(graph) = rig.machine.capture_end(D0, theirs.as_raw()) {
                    rig.machine.graph_destroy(D0, graph).unwrap();
                }
            }
            rig.device.synchronize().unwrap();
            drop(other.try_allocate(24 * G).unwrap());
            books(rig, &pool);
            drop((tenant, other));
            pool.close().unwrap();
        }
    }
}
