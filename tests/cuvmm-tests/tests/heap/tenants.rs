//! Heaps of several tenants, and memory that others hold: extents are never shared between tenants,
//! carry no bytes from one to another, and never come from what was exported.

use crate::common;
use crate::common::{D0, D1, G, Rig, cases, host};
use cuvmm::driver::host::HostMemory;
use cuvmm::driver::{Driver, HandleTypes};
use cuvmm::heap::Preset;
use cuvmm::{
    Access, AccessGrant, Allocation, Heap, Physical, Pool, Reservation, Scrub, Stream, Tenant,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Returns all bytes of an allocation.
fn contents(rig: &Rig<HostMemory>, memory: &Allocation) -> Vec<u8> {
    let mut bytes = vec![0; memory.size() as usize];
    let at = memory.address();
    // SAFETY: the allocation is alive.
    #[allow(unsafe_code)]
    unsafe { rig.machine.copy_to_host(D0, &mut bytes, at) }.unwrap();
    bytes
}

/// Fills an allocation on a stream.
fn write(rig: &Rig<HostMemory>, stream: &Stream, memory: &Allocation, byte: u8) {
    rig.kernel(stream, &[], &[(memory.address(), memory.size(), byte)]);
}

fn tenants(pool: &Pool) -> [Tenant; 2] {
    ["a", "b"].map(|name| pool.tenant(name).register().unwrap())
}

#[derive(Clone, Debug)]
enum Step {
    Allocate {
        heap: usize,
        size: u64,
        stream: usize,
    },
    Free {
        heap: usize,
        index: usize,
    },
    Trim {
        heap: usize,
    },
    Hold {
        stream: usize,
    },
    Release,
}

fn step() -> impl Strategy<Value = Step> {
    let size = prop_oneof![1..G, G..6 * G];
    prop_oneof![
        8 => (0..2usize, size, 0..2usize)
            .prop_map(|(heap, size, stream)| Step::Allocate { heap, size, stream }),
        6 => (0..2usize, any::<usize>()).prop_map(|(heap, index)| Step::Free { heap, index }),
        1 => (0..2usize).prop_map(|heap| Step::Trim { heap }),
        1 => (0..2usize).prop_map(|stream| Step::Hold { stream }),
        2 => Just(Step::Release),
    ]
}

/// Runs a program of two tenants, each with a heap and a byte of its own. Returns how many
/// allocations showed a byte of the other tenant, and for how many the other heap gave up extents.
fn run(steps: &[Step], scrub: Scrub, preset: Preset) -> (u64, u64) {
    let rig = common::clean(host());
    let pool = common::limited(&rig, 12).scrub(scrub).build().unwrap();
    let tenants = tenants(&pool);
    let heaps = tenants.each_ref().map(|tenant| {
        let builder = Heap::builder(tenant).preset(preset);
        builder.build().unwrap()
    });
    let streams = [0; 2].map(|_| Stream::new(&rig.device).unwrap());
    let mut live: [Vec<Allocation>; 2] = [vec![], vec![]];
    let (mut shown, mut passed) = (0, 0);
    for step in steps {
        match *step {
            Step::Allocate { heap, size, stream } => {
                let before = heaps[1 - heap].stats().held;
                let Ok(memory) = heaps[heap].allocate(size, 1, &streams[stream]) else {
                    continue;
                };
                passed += u64::from(heaps[1 - heap].stats().held < before);
                rig.machine.release_all_streams(D0);
                let theirs = 2 - heap as u8;
                shown += u64::from(contents(&rig, &memory).contains(&theirs));
                write(&rig, &streams[stream], &memory, 1 + heap as u8);
                live[heap].push(memory);
            }
            Step::Free { heap, index } => {
                let count = live[heap].len().max(1);
                if let Some(at) = live[heap].get(index % count).map(|_| index % count) {
                    drop(live[heap].swap_remove(at));
                }
            }
            Step::Trim { heap } => drop(heaps[heap].trim().unwrap()),
            Step::Hold { stream } => rig.machine.hold(D0, streams[stream].as_raw()),
            Step::Release => rig.machine.release_all_streams(D0),
        }
    }
    rig.machine.release_all_streams(D0);
    for (heap, live) in live.iter().enumerate() {
        for memory in live {
            let own = 1 + heap as u8;
            assert!(contents(&rig, memory).iter().all(|&byte| byte == own));
        }
    }
    (shown, passed)
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn no_heap_shows_what_another_tenant_wrote() {
    let config = Config {
        cases: cases(24),
        failure_persistence: None,
        ..Config::default()
    };
    let programs = proptest::collection::vec(step(), 20..120);
    let passed = std::cell::Cell::new(0);
    let outcome = TestRunner::new(config).run(&programs, |steps| {
        for preset in [Preset::Tight, Preset::Fast] {
            let (shown, count) = run(&steps, Scrub::default(), preset);
            passed.set(passed.get() + count);
            prop_assert_eq!(shown, 0, "{:?}", preset);
        }
        Ok(())
    });
    outcome.unwrap();
    assert!(
        passed.get() > 10,
        "{} allocations took extents of the other heap",
        passed.get()
    );
}

/// Gives all of the pool's memory to the heap of one tenant, and then to that of the other.
fn pass_on(scrub: Scrub) -> Vec<u8> {
    let rig = common::clean(host());
    let pool = common::limited(&rig, 8).scrub(scrub).build().unwrap();
    let [a, b] = tenants(&pool);
    let [of_a, of_b] = [&a, &b].map(|tenant| Heap::builder(tenant).build().unwrap());
    let stream = Stream::new(&rig.device).unwrap();
    let parts = [4, 2, 2].map(|count| of_a.allocate(count * G, 1, &stream).unwrap());
    for memory in &parts {
        write(&rig, &stream, memory, 7);
    }
    assert_eq!((of_a.stats().held, of_b.stats().held), (8 * G, 0));
    drop(parts);
    let parts = [4, 2, 2].map(|count| of_b.allocate(count * G, 1, &stream).unwrap());
    assert_eq!((of_a.stats().held, of_b.stats().held), (0, 8 * G));
    stream.synchronize().unwrap();
    let seen = parts.each_ref().map(|memory| contents(&rig, memory));

    seen.concat()
}

#[test]
fn extents_are_scrubbed_on_their_way_from_one_heap_to_another() {
    assert!(pass_on(Scrub::default()).iter().all(|&byte| byte == 0));
}

#[test]
fn tenants_that_trust_each_other_see_what_was_written() {
    assert!(pass_on(Scrub::Never).iter().all(|&byte| byte == 7));
}

#[test]
fn an_extent_in_use_by_one_tenant_is_never_shown_to_another() {
    let rig = host();
    let pool = common::pool(&rig, 8);
    let [a, b] = tenants(&pool);
    let [of_a, of_b] = [&a, &b].map(|tenant| Heap::builder(tenant).build().unwrap());
    let stream = Stream::new(&rig.device).unwrap();
    let all: Vec<Allocation> = (0..4)
        .map(|_| of_a.allocate(2 * G, 1, &stream).unwrap())
        .collect();
    let mut halves: Vec<Allocation> = Vec::new();
    for memory in all {
        drop(memory);
        halves.extend([G, G].map(|size| of_a.allocate(size, 1, &stream).unwrap()));
    }
    for index in [7, 4, 3, 0] {
        drop(halves.remove(index));
    }
    for memory in &halves {
        write(&rig, &stream, memory, 7);
    }
    // Half of each extent is free, and none of it is the other tenant's.
    assert_eq!((of_a.stats().held, of_a.stats().free), (8 * G, 4 * G));
    let refused = of_b.allocate(1, 1, &stream).unwrap_err();
    assert!(refused.is_out_of_memory());
    let stitched = of_a.allocate(2 * G, 1, &stream).unwrap();
    assert_eq!(of_a.stats().stitches, 1);
    write(&rig, &stream, &stitched, 8);
    for memory in &halves {
        assert!(contents(&rig, memory).iter().all(|&byte| byte == 7));
    }
}

#[test]
fn what_a_block_exported_never_comes_to_a_heap() {
    let rig = common::clean(host());
    let (_pool, tenant) = common::with_tenant(common::shareable(&rig, 8).build().unwrap());
    let heap = Heap::builder(&tenant).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    // The heap's own extents pass through the block that is exported.
    drop(heap.allocate(8 * G, 1, &stream).unwrap());
    let block = tenant.try_allocate(4 * G).unwrap();
    assert!(heap.stats().held < 8 * G);
    let (handles, lease) = block.export(HandleTypes::POSIX_FD).unwrap().into_parts();
    let imports: Vec<_> = handles
        .iter()
        .map(|(extent, handle)| {
            let physical = Physical::import(&rig.device, handle, extent.size).unwrap();
            let reservation = Reservation::new(&rig.device, extent.size).unwrap();
            let mapping = reservation.map(0, &physical).unwrap();
            let access = [AccessGrant::new(&rig.device, Access::ReadWrite)];
            mapping.set_access(&access).unwrap();
            mapping
        })
        .collect();
    // While the block lives the heap cannot have that memory either.
    assert!(
        heap.allocate(5 * G, 1, &stream)
            .unwrap_err()
            .is_out_of_memory()
    );
    drop((block, lease, handles));
    let memory = heap.allocate(8 * G, 1, &stream).unwrap();
    assert_eq!(heap.stats().held, 8 * G);
    write(&rig, &stream, &memory, 5);
    stream.synchronize().unwrap();
    for mapping in &imports {
        let mut seen = [1; 4];
        mapping.read(0, &mut seen).unwrap();
        assert_ne!(seen, [5; 4]);
        mapping.write(0, &[9; 64]).unwrap();
    }
    assert!(contents(&rig, &memory).iter().all(|&byte| byte == 5));
}

#[test]
fn two_heaps_with_access_for_a_device_share_no_extent_with_it() {
    let rig = common::clean(host());
    let second = rig.second();
    let pool = common::pool(&rig, 4);
    let [a, b] = tenants(&pool);
    let open = Heap::builder(&a).open_to(&second, Access::ReadWrite);
    let (open, shut) = (open.build().unwrap(), Heap::builder(&b).build().unwrap());
    let stream = Stream::new(&rig.device).unwrap();
    drop(open.allocate(4 * G, 1, &stream).unwrap());
    let memory = shut.allocate(4 * G, 1, &stream).unwrap();
    assert_eq!(open.stats().held, 0);
    // SAFETY: the memory is alive, and the driver refuses the fill.
    #[allow(unsafe_code)]
    let filled = unsafe { rig.machine.fill(D1, memory.address(), 1, 64) };
    assert!(filled.is_err(), "access went with the memory");
}
