//! Regions in a tenant: memory of others that could not be zeroed, capture guards, and what a
//! request that waits does meanwhile.

use std::slice::from_ref;
use std::time::Duration;

use crate::common::books::balanced;
use crate::common::{self, D0, G, Rig, host, limited, model};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::host::HostMemory;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::MemoryError;
use cuvmm::{Pool, Region, Stream, Tenant};

const BAD: CUresult = CUresult::CUDA_ERROR_UNKNOWN;

fn hold(rig: &Rig<impl Backing>, stream: &Stream) {
    rig.held_kernel(stream, &[], &[]);
}

struct World {
    // Fields in drop order.
    region: Region,
    home: Stream,
    other: Stream,
    a: Tenant,
    _b: Tenant,
    pool: Pool,
}

/// A region with one extent in the middle, in a pool whose other memory another tenant has
/// written to. The home stream is held.
fn world(rig: &Rig<HostMemory>) -> World {
    let pool = limited(rig, 8).largest_extent(G).build().unwrap();
    let (a, b) = (
        pool.tenant("a").register().unwrap(),
        pool.tenant("b").register().unwrap(),
    );
    let [home, other] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
    let region = a.region(8 * G).largest_extent(G).home_stream(&home);
    let mut region = region.reserve().unwrap();
    region.commit(G..2 * G).unwrap();
    let block = b.block(7 * G).home_stream(&other).allocate().unwrap();
    for at in 0..7 {
        block.write(at * G, b"secret").unwrap();
    }
    drop(block);
    other.synchronize().unwrap();
    hold(rig, &home);
    World {
        region,
        home,
        other,
        a,
        _b: b,
        pool,
    }
}

fn first_bytes(world: &World) -> [[u8; 6]; 3] {
    [0, 1, 2].map(|at| {
        let mut bytes = [0; 6];
        world.region.read(&world.other, at * G, &mut bytes).unwrap();
        bytes
    })
}

// I-77
#[test]
fn memory_whose_zeroing_was_not_awaited_is_not_committed_again() {
    let rig = host();
    let mut world = world(&rig);
    let faults = Fault::from(1, BAD).of(Call::StreamSynchronize);
    rig.faults.arm(faults);
    assert!(world.region.commit(0..3 * G).is_err());
    rig.faults.disarm();
    // The zeros are still to come, and would end on the owner's bytes.
    let again = world.region.commit(0..3 * G);
    assert!(
        matches!(again, Err(MemoryError::PendingFree { .. })),
        "{again:?}"
    );
    assert_eq!(world.region.committed(), G);
    rig.machine.release_all_streams(D0);
    world.home.synchronize().unwrap();
    world.region.commit(0..3 * G).unwrap();
    assert_eq!(first_bytes(&world), [[0; 6]; 3]);
    balanced(&rig, &world.pool);
}

// I-77
#[test]
fn memory_that_was_never_zeroed_is_shown_by_no_region_and_no_block() {
    for purges in [false, true] {
        let rig = host();
        let mut world = world(&rig);
        rig.faults.arm(Fault::nth(2, BAD).of(Call::MemsetD8Async));
        assert!(world.region.commit(0..3 * G).is_err());
        rig.faults.disarm();
        rig.machine.release_all_streams(D0);
        world.home.synchronize().unwrap();
        match purges {
            false => {
                world.region.commit(0..3 * G).unwrap();
                assert_eq!(first_bytes(&world), [[0; 6]; 3]);
            }
            true => {
                assert!(world.region.purge().unwrap().given_back > 0);
                let block = world.a.allocate(7 * G).unwrap();
                for at in 0..7 {
                    let mut bytes = [0; 6];
                    block.read(at * G, &mut bytes).unwrap();
                    assert_ne!(&bytes, b"secret");
                }
            }
        }
        balanced(&rig, &world.pool);
    }
}

// I-77
#[test]
fn memory_for_copies_that_were_not_made_is_shown_to_no_block_of_the_tenant() {
    for call in [Call::MemAddressReserve, Call::MemMap, Call::MemcpyDtoDAsync] {
        let rig = host();
        let mut world = world(&rig);
        rig.machine.release_all_streams(D0);
        let fork = world.region.fork(&[]).unwrap();
        rig.faults.arm(Fault::nth(1, BAD).of(call));
        let refused = world.region.unshare(G..2 * G, &world.home, &[]);
        assert_eq!(
            (refused.is_err(), rig.faults.injected()),
            (true, 1),
            "{call:?}"
        );
        rig.faults.disarm();
        // Memory of the tenant's own is not overwritten, so that the block may show it.
        let block = world.a.allocate(7 * G).unwrap();
        for at in 0..7 {
            let mut bytes = [0; 6];
            block.read(at * G, &mut bytes).unwrap();
            assert_ne!(&bytes, b"secret", "{call:?}");
        }
        balanced(&rig, &world.pool);
        drop(fork);
    }
}

/// Returns the number of attempts that a request made within its timeout.
fn attempts(rig: &Rig<cuvmm::driver::model::Nothing>, act: impl FnOnce()) -> usize {
    rig.faults.forget();
    act();
    let calls = rig.faults.calls();
    let asked = calls
        .iter()
        .filter(|&&call| call == Call::StreamIsCapturing);
    asked.count()
}

#[test]
fn a_request_that_waits_does_not_wake_itself() {
    let rig = model();
    let pool = limited(&rig, 8).build().unwrap();
    let (a, b) = (
        pool.tenant("a").register().unwrap(),
        pool.tenant("b").register().unwrap(),
    );
    let [home, work] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
    let short = Duration::from_millis(100);
    let region = a.region(8 * G).home_stream(&home).timeout(short);
    let mut region = common::committed(region, 2 * G);
    let block = b.allocate(6 * G).unwrap();
    // Each attempt takes two extents back, and withdraws them again.
    hold(&rig, &work);
    region.decommit_after(0..2 * G, from_ref(&work)).unwrap();
    // A pause is 1.6 ms for most of the time, and longer on a busy machine.
    let count = attempts(&rig, || assert!(region.commit(0..4 * G).is_err()));
    assert!(count < 1000, "{count}");
    rig.machine.release_all_streams(D0);
    drop((block, region));
}

#[test]
fn a_request_with_a_guard_takes_memory_that_was_never_used() {
    let rig = model();
    let (pool, a, home) = common::with_stream(&rig, limited(&rig, 8).build().unwrap());
    let region = a.region(16 * G).largest_extent(G).home_stream(&home);
    let mut region = common::committed(region.timeout(Duration::from_millis(20)), 4 * G);
    region.decommit_after(0..4 * G, &[]).unwrap();
    region.purge().unwrap();
    let guard = pool.capture_guard();
    rig.faults.forget();
    region.commit(0..4 * G).unwrap();
    // What was used is released for new memory.
    region.commit(4 * G..8 * G).unwrap();
    assert!(region.commit(8 * G..9 * G).is_err());
    let calls = rig.faults.calls();
    assert!(!calls.contains(&Call::MemUnmap), "{calls:?}");
    assert!(!calls.contains(&Call::MemsetD8Async), "{calls:?}");
    drop(guard);
    balanced(&rig, &pool);
}
