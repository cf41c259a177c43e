//! Fails every driver call of a heap's operations once. A failure changes nothing, and the
//! operation then succeeds.

use crate::common::sweep::{sweep, sweep_partly, text};
use crate::common::world::{Books, books};
use crate::common::{self, D0, G, MIB, Rig};
use cuvmm::driver::model::Nothing;
use cuvmm::{Allocation, Heap, Pool, Stream, Tenant};

struct World {
    // Fields in drop order.
    live: Vec<Allocation>,
    heap: Option<Heap>,
    other: Tenant,
    streams: Vec<Stream>,
    pool: Pool,
}

fn world(rig: &Rig<Nothing>, granules: u64) -> World {
    let pool = common::pool(rig, granules);
    let [tenant, other] = common::tenants(&pool);
    let streams = vec![
        Stream::new(&rig.device).unwrap(),
        Stream::new(&rig.device).unwrap(),
    ];
    World {
        live: vec![],
        heap: Some(Heap::builder(&tenant).build().unwrap()),
        other,
        streams,
        pool,
    }
}

impl World {
    fn heap(&self) -> &Heap {
        self.heap.as_ref().unwrap()
    }

    fn allocate(&mut self, stream: usize, size: u64) -> Result<(), String> {
        let memory = text(self.heap().allocate(size, 1, &self.streams[stream]))?;
        self.live.push(memory);
        Ok(())
    }

    /// Leaves a free end of a granule, a free extent of two, and a free start of one.
    fn in_pieces(&mut self) {
        for _ in 0..5 {
            self.allocate(0, 2 * G).unwrap();
        }
        drop(self.live.pop());
        drop(self.live.remove(0));
        for _ in 0..4 {
            self.allocate(0, G).unwrap();
        }
        // The two halves of one extent, then those of the other.
        drop(self.live.remove(5));
        drop(self.live.remove(4));
        drop(self.live.remove(1));
        assert_eq!(self.heap().stats().free, 4 * G);
        assert_eq!(self.heap().stats().largest_run, 2 * G);
    }
}

/// The figures of the pool, and of the heap.
fn picture(world: &World) -> (Books, Option<[u64; 6]>) {
    let heap = world.heap.as_ref().map(|heap| {
        let stats = heap.stats();
        [
            stats.live,
            stats.held,
            stats.free,
            stats.extents,
            stats.mappings,
            stats.allocations,
        ]
    });
    (books(&world.pool), heap)
}

#[test]
fn ending() {
    sweep_partly(
        |rig| {
            let mut world = world(rig, 16);
            world.in_pieces();
            world
        },
        |_, world| {
            world.live.clear();
            world.heap = None;
            Ok(())
        },
        |_| (),
    );
}

#[test]
fn growing() {
    for size in [100, MIB, 3 * G, 11 * G] {
        let calls = sweep(
            |rig| world(rig, 16),
            |_, world| world.allocate(0, size),
            picture,
        );
        assert!(calls >= 4, "a reservation too: {calls}");
    }
}

#[test]
fn stitching() {
    let calls = sweep(
        |rig| {
            let mut world = world(rig, 10);
            world.in_pieces();
            world
        },
        |_, world| world.allocate(0, 4 * G),
        picture,
    );
    assert!(calls >= 6, "{calls}");
}

// I-36
#[test]
fn stitching_with_new_memory() {
    let calls = sweep(
        |rig| {
            let mut world = world(rig, 16);
            world.in_pieces();
            world
        },
        |_, world| world.allocate(0, 8 * G),
        picture,
    );
    assert!(calls >= 6, "{calls}");
}

#[test]
fn memory_of_another_stream() {
    let calls = sweep_partly(
        |rig| {
            let mut world = world(rig, 4);
            world.allocate(0, 4 * G).unwrap();
            rig.machine.hold(D0, world.streams[0].as_raw());
            let address = world.live[0].address();
            let stream = world.streams[0].as_raw();
            rig.machine
                .queue_kernel(D0, stream, vec![], vec![(address, G, 1)])
                .unwrap();
            world.live.clear();
            world
        },
        |rig, world| {
            world.allocate(1, 4 * G)?;
            rig.machine.release_all_streams(D0);
            Ok(())
        },
        |world| world.pool.stats().committed,
    );
    assert!(calls >= 3, "{calls}");
}

#[test]
fn small_memory_of_another_stream() {
    let calls = sweep_partly(
        |rig| {
            let mut world = world(rig, 1);
            for _ in 0..2 {
                world.allocate(0, MIB).unwrap();
            }
            rig.machine.hold(D0, world.streams[0].as_raw());
            let address = world.live[0].address();
            let stream = world.streams[0].as_raw();
            let queued = rig
                .machine
                .queue_kernel(D0, stream, vec![], vec![(address, 8, 1)]);
            queued.unwrap();
            drop(world.live.remove(0));
            world
        },
        |rig, world| {
            let seen = world.heap().stats().free;
            world.allocate(1, MIB).inspect_err(|_| {
                assert_eq!(world.heap().stats().free, seen);
            })?;
            rig.machine.release_all_streams(D0);
            Ok(())
        },
        |world| world.pool.stats().committed,
    );
    assert!(calls >= 3, "{calls}");
}

#[test]
fn memory_that_another_tenant_wrote() {
    let calls = sweep_partly(
        |rig| {
            let world = world(rig, 4);
            let block = world.other.try_allocate(4 * G).unwrap();
            block.write(0, &[1; 16]).unwrap();
            drop(block);
            world
        },
        |_, world| world.allocate(0, 4 * G),
        |_| (),
    );
    assert!(calls >= 5, "{calls}");
}

#[test]
fn trimming_and_reclaiming() {
    let free = |rig: &Rig<Nothing>| {
        let mut world = world(rig, 10);
        world.in_pieces();
        world.allocate(0, 4 * G).unwrap();
        world.live.clear();
        rig.machine.release_all_streams(D0);
        world
    };
    let calls = sweep_partly(
        free,
        |_, world| {
            text(world.heap().trim())?;
            // A stream that could not be polled counts as pending.
            match world.heap().stats().held {
                0 => Ok(()),
                held => Err(format!("{held} bytes are pending")),
            }
        },
        |_| (),
    );
    assert!(calls >= 5, "{calls}");
    let calls = sweep_partly(
        free,
        |_, world| {
            drop(text(world.other.try_allocate(10 * G))?);
            Ok(())
        },
        |_| (),
    );
    assert!(calls >= 5, "{calls}");
}
