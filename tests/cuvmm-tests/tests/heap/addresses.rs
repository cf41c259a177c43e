//! Heaps take addresses as they need them, use them again, and give them back.

use std::sync::Arc;

use crate::common::{self, D0, GIB, MIB, Rig, model_options, nothing_left, rig};
use cuvmm::driver::Driver;
use cuvmm::driver::model::{ModelDriver, ModelOptions, Nothing};
use cuvmm::error::BlockError;
use cuvmm::{Allocation, Device, Heap, Limit, Pool, Stream, Tenant};

/// Devices with as much memory as an H200.
fn large(devices: u16) -> ModelOptions {
    model_options().devices(devices).capacity(141 * GIB)
}

/// A heap as a pool of graphs has it.
fn for_graphs(tenant: &Tenant) -> Heap {
    Heap::builder(tenant).for_graphs(true).build().unwrap()
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn many_heaps_find_addresses() {
    let rig = rig(ModelDriver::new(large(1)));
    // Fewer than 120 heaps need if each gets as many as the pool has memory.
    let pool = Pool::builder(&rig.device).address_limit(16 << 40);
    let (pool, tenant, stream) = common::with_stream(&rig, pool.build().unwrap());
    let mut all = Vec::new();
    for turn in 0..120 {
        let heap = for_graphs(&tenant);
        let memory = heap.allocate(200 * MIB, 1, &stream);
        all.push((
            memory.unwrap_or_else(|error| panic!("{turn}: {error}")),
            heap,
        ));
    }
    let addresses = pool.stats().addresses;
    assert!(addresses < pool.stats().address_limit, "{addresses}");
    drop(all);
    pool.trim(0).unwrap();
    assert_eq!(pool.stats().addresses, 0);
}

#[test]
fn twenty_heaps_on_each_of_eight_devices_find_addresses() {
    let rig = rig(ModelDriver::new(large(8)));
    let mut all = Vec::new();
    for number in 0..8 {
        let device = Device::open(Arc::clone(&rig.faults) as Arc<dyn Driver>, number).unwrap();
        let (_pool, tenant) = common::with_tenant(Pool::builder(&device).build().unwrap());
        let stream = Stream::new(&device).unwrap();
        for turn in 0..21 {
            let heap = for_graphs(&tenant);
            let memory = heap.allocate(300 * MIB, 1, &stream);
            let memory = memory.unwrap_or_else(|error| panic!("{number}, {turn}: {error}"));
            all.push((memory, heap));
        }
    }
}

/// Makes what a capture makes of `parts`, and frees it: every other part, a temporary, the rest.
fn capture(heap: &Heap, stream: &Stream, parts: &[u64]) -> Result<(), BlockError> {
    let parts = parts.iter().map(|&size| heap.allocate(size, 1, stream));
    let mut parts = parts.collect::<Result<Vec<Allocation>, BlockError>>()?;
    let mut turn = 0;
    parts.retain(|_| {
        turn += 1;
        turn % 2 == 0
    });
    drop(heap.allocate(300 * MIB, 1, stream)?);
    Ok(())
}

/// A pool of 2 GiB with a heap for graphs.
fn of_two_gib(rig: &Rig<Nothing>) -> (Pool, Heap, Stream) {
    let pool = Pool::builder(&rig.device).limit(Limit::Bytes(2 * GIB));
    let (pool, tenant) = common::with_tenant(pool.build().unwrap());
    let heap = for_graphs(&tenant);
    (pool, heap, Stream::new(&rig.device).unwrap())
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn captures_that_come_again_use_the_same_windows() {
    for mib in [2, 8, 12, 32] {
        let rig = rig(ModelDriver::new(large(1)));
        let (pool, heap, stream) = of_two_gib(&rig);
        let parts = vec![mib * MIB; usize::try_from(288 / mib).unwrap()];
        for _ in 0..4 {
            capture(&heap, &stream, &parts).unwrap();
        }
        let (early, addresses) = (heap.stats(), pool.stats().addresses);
        for turn in 4..1000 {
            let made = capture(&heap, &stream, &parts);
            made.unwrap_or_else(|error| panic!("{mib} MiB, {turn}: {error}"));
        }
        assert_eq!((heap.stats(), pool.stats().addresses), (early, addresses));
        assert!(early.held <= 470 * MIB, "{} held", early.held);
    }
}

#[test]
fn captures_of_different_sizes_do_not_use_up_the_addresses() {
    let rig = rig(ModelDriver::new(large(1)));
    let (pool, heap, stream) = of_two_gib(&rig);
    let mut random = fastrand::Rng::with_seed(1);
    for turn in 0..1000 {
        let (mut parts, mut left) = (Vec::new(), 288);
        while left > 0 {
            let size = random.u64(1..=24).min(left);
            parts.push(size * MIB);
            left -= size;
        }
        let made = capture(&heap, &stream, &parts);
        made.unwrap_or_else(|error| panic!("{turn}: {error}"));
    }
    let (stats, addresses) = (heap.stats(), pool.stats().addresses);
    assert!(
        stats.held <= GIB && addresses <= 32 * GIB,
        "{stats:?}, {addresses}"
    );
}

#[test]
fn windows_lie_in_several_parts() {
    let rig = rig(ModelDriver::new(large(1)));
    let pool = Pool::builder(&rig.device).limit(Limit::Bytes(GIB));
    let (pool, tenant) = common::with_tenant(pool.build().unwrap());
    let heap = Heap::builder(&tenant).addresses(16 * GIB).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    let mut live: Vec<Allocation> = Vec::new();
    for _ in 0..3000 {
        let size = random.u64(1..=96) * MIB;
        while heap.stats().live + size > 900 * MIB {
            drop(live.swap_remove(random.usize(..live.len())));
        }
        // The model refuses a mapping that leaves its reservation.
        live.push(heap.allocate(size, 1, &stream).unwrap());
    }
    let parts = rig.machine.snapshot().reservations.len();
    let addresses = pool.stats().addresses;
    assert!(parts > 2 && addresses <= 16 * GIB, "{parts}, {addresses}");
    drop(live);
    heap.trim().unwrap();
    assert_eq!(pool.stats().addresses, 0, "no part is in use");
    drop(heap.allocate(MIB, 1, &stream).unwrap());
    drop((heap, stream, tenant, pool));
    nothing_left(rig);
}

#[test]
fn a_platform_with_few_addresses_grants_small_parts_and_then_none() {
    // The model's first address is 16 GiB.
    let options = model_options().capacity(32 * GIB).address_end(25 * GIB);
    let rig = rig(ModelDriver::new(options));
    let pool = Pool::builder(&rig.device).limit(Limit::Bytes(32 * GIB));
    let pool = pool.build().unwrap();
    let tenant = pool.tenant("learner").register().unwrap();
    let heap = Heap::builder(&tenant).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let (live, refused) = loop_until_refused(&heap, &stream);
    assert!(live.len() >= 8, "{} GiB", live.len());
    let BlockError::HeapOutOfAddresses { cause, .. } = &refused else {
        panic!("{}", refused);
    };
    assert!(cause.as_ref().is_some_and(|cause| cause.call().is_some()));
    let text = refused.to_string();
    assert!(
        text.contains("cuMemAddressReserve") && text.contains("learner"),
        "{text}"
    );
    assert!(refused.is_out_of_memory());
    drop(live);
    heap.trim().unwrap();
    drop(heap.allocate(GIB, 1, &stream).unwrap());
}

/// Allocates gigabytes until the heap refuses.
fn loop_until_refused(heap: &Heap, stream: &Stream) -> (Vec<Allocation>, BlockError) {
    let mut live = Vec::new();
    loop {
        match heap.allocate(GIB - 32 * MIB, 1, stream) {
            Ok(memory) => live.push(memory),
            Err(refused) => return (live, refused),
        }
    }
}

#[test]
fn a_heap_that_reaches_its_bound_says_so() {
    let rig = rig(ModelDriver::new(large(1)));
    let pool = Pool::builder(&rig.device).build().unwrap();
    let tenant = pool.tenant("learner").register().unwrap();
    let heap = Heap::builder(&tenant).addresses(4 * GIB).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let (live, refused) = loop_until_refused(&heap, &stream);
    assert!(live.len() >= 3, "{} GiB", live.len());
    let text = refused.to_string();
    let expected = "out of addresses: the heap of \"learner\" needs";
    assert!(
        text.starts_with(expected) && text.contains("at most 4 GiB"),
        "{text}"
    );
    assert!(pool.stats().addresses <= 4 * GIB);
}

#[test]
fn addresses_that_a_heap_does_not_use_are_another_tenant_s() {
    let rig = rig(ModelDriver::new(model_options().capacity(4 * GIB)));
    let pool = Pool::builder(&rig.device).limit(Limit::Bytes(GIB));
    let pool = pool.address_limit(512 * MIB).build().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let heaps = ["a", "b"].map(|name| {
        let tenant = pool.tenant(name).register().unwrap();
        let heap = Heap::builder(&tenant).addresses(400 * MIB).build();
        (tenant, heap.unwrap())
    });
    let fill = |heap: &Heap| -> Vec<Allocation> {
        let all = std::iter::from_fn(|| heap.allocate(8 * MIB, 1, &stream).ok());
        all.collect()
    };
    let [(_, first), (tenant, second)] = &heaps;
    let live = fill(first);
    assert!(live.len() > 20 && fill(second).len() < 20, "{}", live.len());
    drop(live);
    rig.machine.release_all_streams(D0);
    let live = fill(second);
    assert!(live.len() > 20, "{}", live.len());
    drop(live);
    rig.machine.release_all_streams(D0);
    drop(tenant.try_allocate(256 * MIB).unwrap());
}
