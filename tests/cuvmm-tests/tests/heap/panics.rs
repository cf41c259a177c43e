//! A driver that panics while a heap gives memory up.

use crate::common::panics::panics_at;
use crate::common::world::books;
use crate::common::{self, G, Rig};
use cuvmm::driver::Call;
use cuvmm::driver::model::Nothing;
use cuvmm::{Allocation, Heap, Pool, Tenant};

/// The free extents of the heap, each of one granule.
const FREE: u64 = 4;

struct World {
    heap: Heap,
    other: Tenant,
    pool: Pool,
}

fn world(rig: &Rig<Nothing>) -> World {
    let (pool, [tenant, other], stream) = common::pair(rig, FREE);
    let heap = Heap::builder(&tenant).build().unwrap();
    let allocate = |_| heap.allocate(G, 1, &stream).unwrap();
    let live: Vec<Allocation> = (0..FREE).map(allocate).collect();
    drop(live);
    assert_eq!(heap.stats().extents, FREE);
    World { heap, other, pool }
}

// I-120
#[test]
fn what_a_heap_unmapped_before_a_panic_is_charged_no_more_and_the_rest_is_free() {
    let trim: fn(&World) = |world| {
        world.heap.trim().unwrap();
    };
    let reclaim: fn(&World) = |world| drop(world.other.try_allocate(FREE * G).unwrap());
    for operate in [trim, reclaim] {
        for nth in 1..=FREE {
            let rig = common::model();
            let world = world(&rig);
            let unmaps = |call| call == Call::MemUnmap;
            let (done, panicked) = panics_at(&rig, nth, unmaps, || operate(&world));
            assert!(done.is_none() && panicked, "{nth}");
            // The extent whose call panicked may be mapped still.
            let held = world.heap.stats().held;
            assert_eq!(held, (FREE + 1 - nth) * G, "{nth}");
            let tenant = world.heap.tenant();
            assert_eq!(tenant.stats().committed, held, "{nth}");
            books(&world.pool);
            assert_eq!(world.heap.trim().unwrap(), (FREE - nth) * G, "{nth}");
            assert_eq!(tenant.stats().committed, G, "{nth}");
            let rest = world.other.try_allocate((FREE - 1) * G).unwrap();
            drop((rest, world));
        }
    }
}
