//! Roll-backs of heaps and paged caches in which the driver refuses a call, or panics in one.

use std::sync::Arc;

use crate::common;
use crate::common::panics::{panics_at, woken_unless_lost};
use crate::common::world::books;
use crate::holders::{Kind, Scene};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::SleepError;
use cuvmm::paged::Layout;

const KINDS: [Kind; 4] = [
    Kind::Graphs,
    Kind::Paged(Layout::BlockMajor),
    Kind::Paged(Layout::TokenMajor),
    Kind::Paged(Layout::LayerMajor),
];

const UNKNOWN: CUresult = CUresult::CUDA_ERROR_UNKNOWN;

// I-108
#[test]
fn what_stays_mapped_is_quarantined_and_nothing_wakes_over_it() {
    for kind in KINDS {
        let rig = common::model();
        let scene = Scene::of(&rig, kind, 20, 8);
        scene.alone().sleep(scene.keep()).unwrap();
        let asleep = scene.tenant.stats().asleep;
        rig.faults.forget();
        rig.faults.arm(Fault::nth(2, UNKNOWN).of(Call::MemMap));
        rig.faults.arm(Fault::all(UNKNOWN).of(Call::MemUnmap));
        assert!(scene.alone().wake().is_err());
        rig.faults.disarm();
        assert!(books(&scene.pool).quarantined > 0);
        let stats = scene.tenant.stats();
        assert_eq!((stats.committed, stats.asleep), (0, asleep));
        let refused = scene.alone().wake().unwrap_err();
        let SleepError::Block { cause, .. } = &refused else {
            panic!("{refused}");
        };
        assert!(cause.to_string().contains("quarantined"), "{cause}");
        assert!(scene.is_asleep());
        assert_eq!(scene.store.free(), scene.store.capacity() - asleep);
        drop(scene);
        common::only_counted_left(&rig);
    }
}

/// The driver refuses the second mapping of a wake, and panics in a call of the roll-back.
// I-108, I-119
#[test]
fn a_panic_in_the_roll_back_of_a_wake_leaves_all_asleep() {
    for kind in KINDS {
        for keeps in [false, true] {
            for nth in 1.. {
                let rig = common::host();
                let scene = Scene::of(&rig, kind, 20, 8);
                scene.alone().sleep(scene.contents(keeps)).unwrap();
                let asleep = scene.tenant.stats().asleep;
                rig.faults.forget();
                rig.faults.arm(Fault::nth(2, UNKNOWN).of(Call::MemMap));
                let faults = Arc::clone(&rig.faults);
                let rolls_back = move |_| faults.injected() > 0;
                let wake = || scene.alone().wake().map(drop);
                let (outcome, panicked) = panics_at(&rig, nth, rolls_back, wake);
                rig.faults.disarm();
                assert_eq!(outcome.is_none(), panicked);
                assert!(scene.is_asleep(), "{kind:?}, {nth}");
                let stats = scene.tenant.stats();
                assert_eq!((stats.committed, stats.asleep), (0, asleep), "{nth}");
                books(&scene.pool);
                scene.soil(&rig);
                let woken = woken_unless_lost(scene.alone().wake(), panicked);
                assert!(woken.is_none_or(|woken| woken.mapped == asleep), "{nth}");
                if woken.is_some() && keeps {
                    scene.shows(&rig, 1);
                }
                drop(scene);
                if !panicked {
                    assert!(nth > 1);
                    break;
                }
            }
        }
    }
}

// I-125
#[test]
fn a_panic_in_the_roll_back_of_a_sleep_leaves_all_asleep() {
    for kind in KINDS {
        for keeps in [false, true] {
            for nth in 1.. {
                let rig = common::host();
                let scene = Scene::of(&rig, kind, 20, 8);
                let prepared = scene.alone().prepare_sleep(scene.contents(keeps));
                let prepared = prepared.unwrap();
                let maps = |call| matches!(call, Call::MemMap | Call::MemSetAccess);
                let (outcome, panicked) = panics_at(&rig, nth, maps, || prepared.cancel());
                assert_eq!(outcome.is_none(), panicked);
                assert_eq!(scene.is_asleep(), panicked, "{kind:?}, {nth}");
                assert_eq!(scene.tenant.stats().asleep > 0, panicked, "{nth}");
                assert_eq!(books(&scene.pool).quarantined > 0, panicked, "{nth}");
                scene.soil(&rig);
                let woken = woken_unless_lost(scene.alone().wake(), panicked);
                if woken.is_some() && (keeps || !panicked) {
                    scene.shows(&rig, 1);
                }
                let hazards = rig.machine.take_hazards();
                assert!(hazards.is_empty(), "{}", hazards[0]);
                drop(scene);
                if !panicked {
                    assert!(nth > 2, "two calls for each mapping");
                    break;
                }
            }
        }
    }
}
