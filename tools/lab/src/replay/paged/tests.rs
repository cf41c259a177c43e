use std::sync::Arc;

use cuvmm::driver::fault::{Fault, FaultDriver};
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::driver::{CUresult, Call};

use super::numbers::Order;
use super::options::Caches;
use super::*;

const MIB: u64 = 1 << 20;
const LIMIT: u64 = 256 * MIB;

fn terms(caches: Caches, change: impl FnOnce(&mut Options)) -> Terms {
    let mut options = Options {
        layout: caches,
        ..Options::default()
    };
    change(&mut options);
    let terms = options.terms(131_072, 2 * MIB, (LIMIT / 2, LIMIT / 4));
    terms.unwrap().unwrap()
}

fn memory_on(device: &Device, policy: Policy, terms: &Terms) -> Paged {
    let division = Division {
        policy,
        models: 2,
        limit: LIMIT,
        guarantee: LIMIT / 4,
    };
    let models = ["a".to_owned(), "b".to_owned()];
    Paged::new(device, &models, &division, terms, true, None, None).unwrap()
}

fn memory(policy: Policy, terms: &Terms) -> Paged {
    let driver = HostDriver::new(HostOptions::new().capacity(2 * LIMIT));
    let device = Device::open(Arc::new(driver), 0).unwrap();
    memory_on(&device, policy, terms)
}

fn held(memory: &Paged, model: usize) -> u64 {
    memory.usage(model).unwrap().unwrap().held
}

#[test]
fn under_static_all_blocks_have_memory_and_a_request_changes_nothing() {
    for (caches, blocks) in [(Caches::Paged, 64), (Caches::PagedLayerMajor, 64)] {
        let mut memory = memory(Policy::Static, &terms(caches, |_| ()));
        assert_eq!((memory.granule(), memory.ceiling(0)), (2 * MIB, blocks));
        assert_eq!([held(&memory, 0), held(&memory, 1)], [LIMIT / 2; 2]);
        let calls = memory.tenants.calls();
        let mut one = memory.allocate(0, 0, blocks - 1, blocks).unwrap().unwrap();
        assert!(memory.grow(&mut one, blocks).unwrap());
        assert!(memory.allocate(0, 1, 1, 1).unwrap().is_none(), "no number");
        memory.free(one).unwrap();
        assert_eq!(memory.tenants.calls(), calls, "only stamps call the driver");
        assert_eq!(held(&memory, 0), LIMIT / 2);
        let (costs, all) = memory.finish().unwrap();
        assert_eq!((all.verified.stamps, all.verified.wrong), (2 * blocks, 0));
        assert_eq!(costs[0].verified.stamps, 2 * blocks);
    }
}

#[test]
fn under_elastic_extents_come_with_blocks_and_serve_the_other_model() {
    let mut memory = memory(Policy::Elastic, &terms(Caches::Paged, |_| ()));
    // All but the other's guarantee, in whole extents of eight blocks.
    assert_eq!(memory.ceiling(0), 96);
    let mut one = memory.allocate(0, 0, 9, 96).unwrap().unwrap();
    assert_eq!([held(&memory, 0), held(&memory, 1)], [32 * MIB, 0]);
    assert!(memory.grow(&mut one, 96).unwrap());
    assert!(!memory.grow(&mut one, 97).unwrap());
    assert!(memory.last_refusal().unwrap().contains("out of memory"));
    assert_eq!(one.numbers.len(), 96, "a refused growth changes nothing");
    let other = memory.allocate(1, 1, 32, 32).unwrap().unwrap();
    assert_eq!(held(&memory, 1), 64 * MIB);
    memory.free(one).unwrap();
    assert_eq!(held(&memory, 0), 0);
    let more = memory.allocate(1, 2, 64, 64).unwrap().unwrap();
    assert_eq!(held(&memory, 1), 192 * MIB);
    memory.free(more).unwrap();
    memory.free(other).unwrap();
    assert_eq!(memory.finish().unwrap().1.verified.wrong, 0);
}

#[test]
fn in_layer_major_layout_an_extent_of_each_tensor_comes_at_once() {
    let mut memory = memory(Policy::Elastic, &terms(Caches::PagedLayerMajor, |_| ()));
    assert_eq!(memory.ceiling(0), 64);
    let one = memory.allocate(0, 0, 1, 64).unwrap().unwrap();
    assert_eq!(held(&memory, 0), 128 * MIB);
    memory.free(one).unwrap();
    assert_eq!(held(&memory, 0), 0);
    memory.finish().unwrap();
}

#[test]
fn a_queue_of_numbers_touches_more_extents_than_the_lowest_ones() {
    let touched = [Order::Lowest, Order::Fifo].map(|order| {
        let of = terms(Caches::Paged, |it| it.numbers = Some(order));
        let mut memory = memory(Policy::Elastic, &of);
        let first = memory.allocate(0, 0, 4, 4).unwrap().unwrap();
        let second = memory.allocate(0, 1, 4, 4).unwrap().unwrap();
        memory.free(first).unwrap();
        let next = memory.allocate(0, 2, 4, 4).unwrap().unwrap();
        let touched = held(&memory, 0) / (16 * MIB);
        memory.free(second).unwrap();
        memory.free(next).unwrap();
        // The queue has all its numbers, and is in order again.
        let next = memory.allocate(0, 3, 96, 96).unwrap().unwrap();
        assert!(next.numbers.iter().copied().eq(0..96));
        memory.free(next).unwrap();
        memory.finish().unwrap();
        touched
    });
    assert_eq!(touched, [1, 2]);
}

#[test]
fn kept_blocks_are_evicted_when_memory_or_numbers_are_short() {
    let of = terms(Caches::Paged, |it| it.keep_prefixes = true);
    let mut shared = memory(Policy::Elastic, &of);
    let kept = |memory: &Paged, model| {
        let usage = memory.usage(model).unwrap().unwrap();
        (usage.kept / (2 * MIB), usage.evicted)
    };
    let one = shared.allocate(0, 0, 64, 64).unwrap().unwrap();
    shared.free(one).unwrap();
    // The last block may be partly filled.
    assert_eq!(kept(&shared, 0), (63, 0));
    assert_eq!(held(&shared, 0), LIMIT / 2);
    // The other model takes what is free, and then what is kept: two extents of eight blocks.
    let other = shared.allocate(1, 1, 80, 80).unwrap().unwrap();
    let (left, evicted) = kept(&shared, 0);
    assert_eq!((left + evicted, evicted), (63, 15));
    // And the model itself, for which its own kept blocks make room.
    let more = shared.allocate(0, 2, 40, 40).unwrap().unwrap();
    assert_eq!(kept(&shared, 0), (8, 55));
    shared.free(more).unwrap();
    shared.settle().unwrap();
    assert_eq!(kept(&shared, 0).0, 0);
    shared.free(other).unwrap();
    assert_eq!(shared.finish().unwrap().1.verified.wrong, 0);

    let mut fixed = memory(Policy::Static, &of);
    let one = fixed.allocate(0, 0, 40, 40).unwrap().unwrap();
    fixed.free(one).unwrap();
    assert_eq!(kept(&fixed, 0), (39, 0));
    let next = fixed.allocate(0, 1, 30, 30).unwrap().unwrap();
    assert_eq!(kept(&fixed, 0), (34, 5), "there were 25 free numbers");
    fixed.free(next).unwrap();
    assert_eq!(fixed.finish().unwrap().1.verified.wrong, 0);
}

#[test]
fn a_request_without_memory_takes_over_the_oldest_kept_blocks_of_its_model() {
    let of = terms(Caches::Paged, |it| it.keep_prefixes = true);
    let mut memory = memory(Policy::Elastic, &of);
    // Each of twelve extents, which are all that there is for this model, keeps seven blocks.
    let ended: Vec<Held> = (0..12)
        .map(|request| memory.allocate(0, request, 8, 8).unwrap().unwrap())
        .collect();
    for one in ended {
        memory.free(one).unwrap();
    }
    assert_eq!(held(&memory, 0), 192 * MIB);
    let before = memory.tenants.calls();
    // The last block of each extent is free, and no memory for four more.
    let one = memory.allocate(0, 12, 16, 16).unwrap().unwrap();
    assert_eq!(one.numbers[5..9], [5, 6, 8, 9]);
    assert_eq!(one.numbers.len(), 16);
    let usage = memory.usage(0).unwrap().unwrap();
    assert_eq!((usage.kept / (2 * MIB), usage.evicted), (68, 16));
    assert_eq!(usage.held, 192 * MIB);
    assert_eq!(memory.tenants.calls(), before, "the blocks were backed");
    memory.free(one).unwrap();
    assert_eq!(memory.finish().unwrap().1.verified.wrong, 0);
}

#[test]
fn a_reserve_is_held_beside_the_blocks_in_use_and_made_up_again() {
    let of = terms(Caches::Paged, |it| it.reserve = Some(32 * MIB));
    let mut memory = memory(Policy::Elastic, &of);
    assert_eq!([held(&memory, 0), held(&memory, 1)], [32 * MIB; 2]);
    let one = memory.allocate(0, 0, 8, 8).unwrap().unwrap();
    assert_eq!(held(&memory, 0), 48 * MIB, "reserved again");
    // A request that needs all of the memory has the reserve too.
    let rest = memory.allocate(0, 1, 72, 72).unwrap().unwrap();
    assert_eq!(held(&memory, 0), 192 * MIB);
    memory.free(rest).unwrap();
    memory.free(one).unwrap();
    memory.finish().unwrap();
}

#[test]
fn a_block_that_changed_is_a_wrong_stamp() {
    let mut memory = memory(Policy::Elastic, &terms(Caches::Paged, |_| ()));
    let one = memory.allocate(0, 5, 3, 3).unwrap().unwrap();
    let kv = memory.services[0].kv().unwrap();
    let part = vec![0; 32_768];
    kv.write(one.numbers[2], (0, 31, 1), &part).unwrap();
    memory.free(one).unwrap();
    let (costs, all) = memory.finish().unwrap();
    assert_eq!((all.verified.stamps, all.verified.wrong), (6, 1));
    let first = all.verified.first_wrong.unwrap();
    assert!(
        first.starts_with("a part of granule 2 of request 5 reads 00"),
        "{first}"
    );
    assert_eq!(costs[0].verified.wrong, 1);
}

#[test]
fn an_error_of_the_driver_is_no_shortage() {
    let driver = HostDriver::new(HostOptions::new().capacity(2 * LIMIT));
    let driver = Arc::new(FaultDriver::new(Arc::new(driver)));
    let device = Device::open(driver.clone(), 0).unwrap();
    let mut memory = memory_on(&device, Policy::Elastic, &terms(Caches::Paged, |_| ()));
    driver.arm(Fault::nth(1, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemMap));
    assert!(memory.allocate(0, 0, 1, 1).is_err());
    let one = memory.allocate(0, 0, 1, 1).unwrap().unwrap();
    memory.free(one).unwrap();
    memory.finish().unwrap();
}
