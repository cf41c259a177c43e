//! Caches that share memory, truncated, emptied, and refused half-way: no operation on one changes
//! what the others read.

use candle_core::{DType, Tensor};
use cuvmm_candle::error::CacheError;
use cuvmm_candle::{KvCache, Memory, Order, shortage};

use super::rig::{G, Rig, bits, rig};

/// Tokens whose keys fill a shared extent and part of a granule.
const TOKENS: usize = 9000;

/// Returns keys and values of one sequence of 4 heads: 1 KiB per token, so 8192 tokens fill an
/// extent.
fn tokens(rig: &Rig, count: usize, seed: u32) -> [Tensor; 2] {
    [seed, seed + 1].map(|seed| rig.numbers(&[1, 4, count, 64], DType::F32, seed))
}

/// Returns a cache with one row for the keys and one for the values, with the tokens in it.
fn cache(rig: &Rig, [k, v]: &[Tensor; 2]) -> KvCache {
    let cache = KvCache::new(&rig.memory, 2, 60_000).with_order(Order::Tokens);
    let mut cache = cache.with_forks();
    cache.append(k, v).unwrap();
    cache
}

fn has(cache: &KvCache, [k, v]: &[Tensor; 2]) {
    for (ours, theirs) in [(cache.k(), k), (cache.v(), v)] {
        let ours = ours.unwrap().unwrap();
        assert_eq!(ours.dims(), theirs.dims());
        assert!(bits(&ours) == bits(theirs), "other tokens");
    }
}

fn first([k, v]: &[Tensor; 2], count: usize) -> [Tensor; 2] {
    [k, v].map(|all| all.narrow(2, 0, count).unwrap())
}

fn both(first: &[Tensor; 2], then: &[Tensor; 2]) -> [Tensor; 2] {
    [0, 1].map(|at| Tensor::cat(&[&first[at], &then[at]], 2).unwrap())
}

/// Waits for all work, and releases unused memory to the driver.
fn settle(rig: &Rig) {
    rig.gpu.device().synchronize().unwrap();
    rig.gpu.sweep();
    rig.pool.trim(0).unwrap();
}

/// The keys have moved to rows of their own, and there is no memory for the values.
#[test]
fn an_append_behind_a_cut_that_fails_half_way_changes_nothing() {
    let Some(rig) = rig(
        "an_append_behind_a_cut_that_fails_half_way_changes_nothing",
        40,
    ) else {
        return;
    };
    let all = tokens(&rig, TOKENS, 1);
    let mut root = cache(&rig, &all);
    let mut fork = root.fork(TOKENS).unwrap();
    fork.truncate(TOKENS - 100).unwrap();
    settle(&rig);
    // One granule is left, and each of the two rows needs one.
    let left = 40 * G - rig.stats().committed;
    let taken = rig.tenant.allocate(left - G).unwrap();
    let before = (rig.stats().committed, rig.stats().blocks, fork.allocated());
    let more = tokens(&rig, 1, 3);
    let refused = fork.append(&more[0], &more[1]).unwrap_err();
    assert!(shortage(&refused).is_some(), "{refused}");
    settle(&rig);
    let after = (rig.stats().committed, rig.stats().blocks, fork.allocated());
    assert_eq!(after, before);
    assert_eq!(fork.current_seq_len(), TOKENS - 100);
    has(&fork, &first(&all, TOKENS - 100));
    drop(taken);
    fork.append(&more[0], &more[1]).unwrap();
    has(&fork, &both(&first(&all, TOKENS - 100), &more));
    has(&root, &all);
    rig.nothing_went_wrong();
}

/// Tensors that cannot be appended, keys or values, are refused before rows are made.
#[test]
fn what_is_refused_behind_a_cut_makes_no_rows() {
    let Some(rig) = rig("what_is_refused_behind_a_cut_makes_no_rows", 60) else {
        return;
    };
    let all = tokens(&rig, TOKENS, 1);
    let mut root = cache(&rig, &all);
    let fork = root.fork(TOKENS).unwrap();
    root.truncate(5).unwrap();
    let before = rig.stats().blocks;
    let one = tokens(&rig, 1, 3);
    let [odd, other] = [
        rig.numbers(&[1, 4, 1, 32], DType::F32, 5),
        rig.numbers(&[1, 4, 1, 64], DType::BF16, 5),
    ];
    for (k, v) in [
        (&one[0], &odd),
        (&odd, &one[1]),
        (&one[0], &other),
        (&all[0], &super::rig::numbers(&[1, 4, 1, 64], 1)),
    ] {
        assert!(root.append(k, v).is_err());
        assert_eq!((root.current_seq_len(), rig.stats().blocks), (5, before));
    }
    // Appending no tokens changes nothing, and the next ones still go to rows of their own.
    let none = tokens(&rig, 1, 3).map(|one| one.narrow(2, 0, 0).unwrap());
    let (keys, _) = root.append(&none[0], &none[1]).unwrap();
    assert_eq!(keys.dims(), [1, 4, 5, 64]);
    assert_eq!(rig.stats().blocks, before);
    drop(keys);
    root.append(&one[0], &one[1]).unwrap();
    has(&root, &both(&first(&all, 5), &one));
    has(&fork, &all);
    rig.nothing_went_wrong();
}

/// A cache that is emptied by truncation or reset leaves the others their tokens, and continues in
/// other memory.
#[test]
fn a_cache_that_was_emptied_leaves_its_forks_alone() {
    let Some(rig) = rig("a_cache_that_was_emptied_leaves_its_forks_alone", 120) else {
        return;
    };
    let all = tokens(&rig, TOKENS, 1);
    let mut root = cache(&rig, &all);
    let mut fork = root.fork(TOKENS).unwrap();
    let mut late = fork.fork(TOKENS).unwrap();
    let others = tokens(&rig, TOKENS, 7);
    for emptied in [&mut root, &mut fork] {
        emptied.truncate(0).unwrap();
        emptied.append(&others[0], &others[1]).unwrap();
        has(emptied, &others);
    }
    has(&late, &all);
    // Nothing is shared any more, so tokens are written in place.
    settle(&rig);
    let committed = rig.stats().committed;
    root.truncate(0).unwrap();
    root.append(&all[0], &all[1]).unwrap();
    has(&root, &all);
    settle(&rig);
    assert_eq!(rig.stats().committed, committed);

    let half = [2, 3].map(|seed| rig.numbers(&[2, 3, 10, 32], DType::BF16, seed));
    late.reset();
    late.append(&half[0], &half[1]).unwrap();
    has(&late, &half);
    let mut again = late.fork(7).unwrap();
    again.append(&half[0], &half[1]).unwrap();
    has(&again, &both(&first(&half, 7), &half));
    has(&late, &half);
    has(&fork, &others);
    drop((root, fork, late, again));
    settle(&rig);
    assert_eq!((rig.stats().committed, rig.stats().blocks), (0, 0));
    rig.nothing_went_wrong();
}

/// Keys and values of different lengths, and settings that are changed after the first tokens.
#[test]
fn keys_and_values_may_differ_and_settings_hold_from_the_next_first_tokens() {
    let Some(rig) = rig(
        "keys_and_values_may_differ_and_settings_hold_from_the_next_first_tokens",
        60,
    ) else {
        return;
    };
    let all = tokens(&rig, 20, 1);
    let mut odd = cache(&rig, &all);
    odd.k_cache_mut().append(&all[0]).unwrap();
    assert_eq!(
        (odd.current_seq_len(), odd.v_cache().current_seq_len()),
        (40, 20)
    );
    let has_not = odd.fork(21).unwrap_err();
    assert!(
        matches!(
            has_not,
            CacheError::NotThere {
                wanted: 21,
                has: 20
            }
        ),
        "{has_not}"
    );
    assert!(odd.truncate(21).is_err());
    assert_eq!(
        (odd.current_seq_len(), odd.v_cache().current_seq_len()),
        (40, 20)
    );
    let fork = odd.fork(20).unwrap();
    has(&fork, &all);
    odd.truncate(20).unwrap();
    has(&odd, &all);

    let mut odd = odd.with_order(Order::Heads);
    odd.append(&all[0], &all[1]).unwrap();
    has(&odd, &both(&all, &all));
    assert_eq!(odd.allocated(), 2 * G, "one row each");
    odd.reset();
    odd.append(&all[0], &all[1]).unwrap();
    has(&odd, &all);
    assert_eq!(odd.allocated(), 8 * G, "a row for each head");

    let mut none = KvCache::new(&rig.memory, 2, 0).with_forks();
    let empty = [0, 1].map(|at| all[at].narrow(2, 0, 0).unwrap());
    assert_eq!(
        none.append(&empty[0], &empty[1]).unwrap().0.dim(2).unwrap(),
        0
    );
    assert!(none.append(&all[0], &all[1]).is_err());
    none.truncate(0).unwrap();
    assert_eq!(
        (none.fork(0).unwrap().current_seq_len(), none.allocated()),
        (0, 0)
    );
    rig.nothing_went_wrong();
}

/// Caches of two tenants that are grown together fail, and do not use the other tenant's memory.
#[test]
fn caches_of_two_tenants_do_not_grow_together() {
    let Some(rig) = rig("caches_of_two_tenants_do_not_grow_together", 60) else {
        return;
    };
    let other = rig.pool.tenant("other").register().unwrap();
    let other = Memory::new(&rig.gpu, &other);
    // Less than a granule, and then more.
    let all = tokens(&rig, 2000, 1);
    let [mut ours, mut theirs] = [&rig.memory, &other].map(|memory| {
        let mut cache = KvCache::new(memory, 2, 60_000).with_order(Order::Tokens);
        cache.append(&all[0], &all[1]).unwrap();
        cache
    });
    std::mem::swap(ours.v_cache_mut(), theirs.v_cache_mut());
    let before = (rig.stats().committed, other.tenant().stats().committed);
    assert!(ours.append(&all[0], &all[1]).is_err());
    let after = (rig.stats().committed, other.tenant().stats().committed);
    assert_eq!(after, before);
    has(&ours, &all);
    has(&theirs, &all);
    rig.nothing_went_wrong();
}
