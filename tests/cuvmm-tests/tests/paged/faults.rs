//! Fails every driver call of a paged cache once.
#![allow(missing_docs, clippy::unwrap_used, clippy::unit_arg)]

use crate::common::sweep::{sweep, text};
use crate::common::world::{Books, books};
use crate::common::{G, Rig, limited};
use crate::scene::{LAYOUTS, builder};
use cuvmm::driver::model::Nothing;
use cuvmm::paged::{Layout, PagedStats};
use cuvmm::{PagedKv, Pool, Stream, Tenant};

struct World {
    // Fields in drop order.
    kv: Option<PagedKv>,
    home: Stream,
    a: Tenant,
    b: Tenant,
    pool: Pool,
}

/// A cache with two blocks in use, beside a tenant that has used memory.
fn world(rig: &Rig<Nothing>, layout: Layout) -> World {
    let pool = limited(rig, 24).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
    let home = Stream::new(&rig.device).unwrap();
    let kv = builder(&a, &home, 12, layout).build().unwrap();
    kv.back(&[0, 1]).unwrap();
    drop(b.allocate(3 * G).unwrap());
    World {
        kv: Some(kv),
        home,
        a,
        b,
        pool,
    }
}

fn told(world: &World) -> (Books, Option<PagedStats>) {
    let stats = world.kv.as_ref().map(|kv| kv.stats().unwrap());
    (books(&world.pool), stats)
}

type Operation = fn(&PagedKv) -> Result<(), String>;

#[test]
fn backing_and_reserving() {
    let operations: [Operation; 2] = [|kv| text(kv.back(&[2, 11])), |kv| text(kv.reserve(10))];
    for layout in LAYOUTS {
        for operation in operations {
            let calls = sweep(
                |rig| world(rig, layout),
                |_, world| operation(world.kv.as_ref().unwrap()),
                told,
                true,
            );
            assert!(calls >= 3, "{layout:?}: {calls}");
        }
    }
}

#[test]
fn backing_again_what_was_released_and_partly_taken() {
    for layout in LAYOUTS {
        let released = |rig: &Rig<Nothing>| {
            let world = world(rig, layout);
            let kv = world.kv.as_ref().unwrap();
            kv.back(&[6, 11]).unwrap();
            kv.release(&[0, 1, 6]).unwrap();
            world
        };
        let back =
            |_: &Rig<Nothing>, world: &mut World| text(world.kv.as_ref().unwrap().back(&[0, 6, 8]));
        sweep(released, back, told, true);
    }
}

#[test]
fn backing_with_memory_of_another_tenant() {
    for layout in LAYOUTS {
        let full = |rig: &Rig<Nothing>| {
            let world = world(rig, layout);
            let held = world.a.stats().committed;
            drop(world.b.allocate(24 * G - held).unwrap());
            world
        };
        let back =
            |_: &Rig<Nothing>, world: &mut World| text(world.kv.as_ref().unwrap().back(&[2, 11]));
        let calls = sweep(full, back, |_| (), false);
        assert!(calls >= 3, "{calls}");
    }
}

#[test]
fn building_with_pinned_blocks() {
    for layout in LAYOUTS {
        let none = |rig: &Rig<Nothing>| {
            let mut world = world(rig, layout);
            world.kv = None;
            world.pool.trim(0).unwrap();
            world
        };
        let build = |_: &Rig<Nothing>, world: &mut World| {
            let kv = builder(&world.a, &world.home, 12, layout).pinned([0, 11]);
            Ok(world.kv = Some(text(kv.build())?))
        };
        // The memory of a failed build stays in the pool, and its addresses go.
        let addresses = |world: &World| books(&world.pool).tenants;
        assert!(sweep(none, build, addresses, false) >= 4);
    }
}

#[test]
fn releasing_and_purging_and_dropping() {
    for layout in LAYOUTS {
        let purge = |_: &Rig<Nothing>, world: &mut World| {
            let kv = world.kv.as_ref().unwrap();
            if kv.stats().unwrap().in_use > 0 {
                kv.release(&[0, 1]).unwrap();
            }
            text(kv.purge())?;
            match kv.stats().unwrap().held {
                0 => Ok(()),
                held => Err(format!("{held} held")),
            }
        };
        assert!(sweep(|rig| world(rig, layout), purge, |_| (), false) >= 2);
        let drops = |_: &Rig<Nothing>, world: &mut World| Ok(world.kv = None);
        sweep(|rig| world(rig, layout), drops, |_| (), false);
    }
}
