//! Tests of reclaim.

use cuvmm_driver::{Call, HandleTypes};

use super::*;
use crate::error::Shortage;
use crate::extents::rig::{G, Rig, rig};
use crate::own::Stream;
use crate::pool::{Block, Growth, Hardened, Limit, Pool, PoolBuilder, Tenant};

fn limited(rig: &Rig, granules: u64) -> PoolBuilder<'_> {
    Pool::builder(&rig.device).limit(Limit::Bytes(granules * G))
}

fn pool(rig: &Rig, granules: u64) -> Pool {
    limited(rig, granules).largest_extent(G).build().unwrap()
}

fn tenant(pool: &Pool, name: &str, guarantee: u64, priority: i32) -> Tenant {
    let tenant = pool.tenant(name).guarantee(guarantee * G);
    tenant.priority(priority).register().unwrap()
}

fn block(tenant: &Tenant, granules: u64) -> Block {
    tenant.try_allocate(granules * G).unwrap()
}

fn leave_idle(tenant: &Tenant, sizes: &[u64]) {
    let blocks: Vec<Block> = sizes.iter().map(|&size| block(tenant, size)).collect();
    blocks.into_iter().for_each(drop);
}

/// Returns a block of nine granules with six granules of precommitted memory behind it: extents
/// of four granules, of which three are stranded, of two and of one.
fn ahead(tenant: &Tenant) -> Block {
    let block = tenant.block(8 * G).capacity(15 * G);
    let mut block = block.growth(Growth::Part(1)).try_allocate().unwrap();
    block.try_grow_to(9 * G).unwrap();
    block
}

fn slot_of(block: &Block) -> SlotId {
    block.place().slot
}

fn takes(plan: &Plan) -> Vec<(TenantId, usize, u64)> {
    let of = |take: &Take| (take.slot.tenant, take.slot.index, take.offset / G);
    plan.takes.iter().map(of).collect()
}

fn held(state: &State, tenant: &Tenant) -> u64 {
    state.memory.budget.account(tenant.id()).held / G
}

fn shortage(outcome: Result<(), BlockError>) -> Box<Shortage> {
    match outcome {
        Err(BlockError::OutOfMemory(shortage)) => shortage,
        other => panic!("{other:?}"),
    }
}

#[test]
fn draining_tenants_give_first_then_lower_priorities_then_what_was_used_least_recently() {
    let rig = rig();
    let pool = pool(&rig, 16);
    let me = tenant(&pool, "me", 0, -1);
    let (high, low) = (tenant(&pool, "high", 0, 1), tenant(&pool, "low", 0, 0));
    let (equal, gone) = (tenant(&pool, "equal", 0, 0), tenant(&pool, "gone", 0, 2));
    let stream = rig.busy_stream();
    let last = gone.allocate_on(&stream, G).unwrap();
    let owners = [&high, &equal, &low, &equal];
    let blocks = owners.map(|owner| block(owner, 1));
    blocks.into_iter().for_each(drop);
    leave_idle(&me, &[1]);
    drop(last);
    let drains = gone.id();
    gone.unregister();
    rig.finish(&stream);
    let mut state = pool.core.lock();
    let mut plan = Plan::begin(&state.memory.device);
    state.plan_others(me.id(), Give::Cached, u64::MAX, &mut plan);
    let (equal, low, high) = (equal.id(), low.id(), high.id());
    let all = [
        (drains, 0, 0),
        (equal, 0, 0),
        (low, 0, 0),
        (equal, 1, 0),
        (high, 0, 0),
    ];
    assert_eq!(takes(&plan), all);
    assert_eq!(plan.gained(), 5 * G);
    let mut plan = Plan::begin(&state.memory.device);
    state.plan_others(me.id(), Give::Cached, 2 * G, &mut plan);
    assert_eq!(takes(&plan), all[..2], "no more than is wanted");
    state.plan_others(me.id(), Give::Cached, 2 * G, &mut plan);
    assert_eq!(takes(&plan), all[..2], "it suffices already");
}

#[test]
fn own_idle_memory_is_taken_before_that_of_others_and_precommitted_memory_last() {
    let rig = rig();
    let pool = limited(&rig, 64).largest_extent(8 * G).build().unwrap();
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
    let (mine, theirs) = (block(&me, 1), block(&other, 2));
    let _ahead = (ahead(&me), ahead(&other));
    drop((theirs, mine));
    let mut state = pool.core.lock();
    let (a, b) = (me.id(), other.id());
    let mut planned = |own, total| {
        let plan = state.plan(a, own * G, total * G);
        (takes(&plan), plan.gained() / G)
    };
    let own_first = [
        (a, 0, 0),
        (b, 0, 0),
        (a, 1, 14),
        (a, 1, 12),
        (b, 1, 14),
        (b, 1, 12),
    ];
    assert_eq!(planned(0, 1), (own_first[..1].to_vec(), 1));
    assert_eq!(
        planned(0, 2),
        (own_first[..2].to_vec(), 3),
        "extents move whole"
    );
    assert_eq!(planned(0, 4), (own_first[..3].to_vec(), 4));
    assert_eq!(planned(0, 7), (own_first[..5].to_vec(), 7));
    assert_eq!(planned(0, 99), (own_first.to_vec(), 9));
    // As far as its own limit requires it, a tenant gives its precommitted memory before other
    // tenants give.
    let limited = [
        (a, 0, 0),
        (a, 1, 14),
        (b, 0, 0),
        (a, 1, 12),
        (b, 1, 14),
        (b, 1, 12),
    ];
    assert_eq!(planned(2, 99), (limited.to_vec(), 9));
    assert_eq!(planned(2, 4), (limited[..3].to_vec(), 4));
    assert_eq!(
        planned(1, 3),
        (own_first[..2].to_vec(), 3),
        "its idle memory suffices"
    );
    let all_own = vec![(a, 0, 0), (a, 1, 14), (a, 1, 12)];
    assert_eq!(planned(4, 4), (all_own.clone(), 4));
    assert_eq!(planned(5, 9), (all_own, 4), "others cannot help");
}

#[test]
fn nothing_of_others_counts_below_their_guarantees() {
    let rig = rig();
    let pool = pool(&rig, 16);
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 3, 0));
    leave_idle(&other, &[3, 4, 1]);
    let (me, other) = (me.id(), other.id());
    let mut state = pool.core.lock();
    let mut plan = state.plan(me, 0, 16 * G);
    let all = [
        (other, 0, 2),
        (other, 0, 1),
        (other, 0, 0),
        (other, 1, 3),
        (other, 1, 2),
    ];
    assert_eq!((takes(&plan), plan.gained()), (all.to_vec(), 5 * G));
    assert_eq!(plan.spare_of(&state.memory.budget, other), 0);
    let nothing = Plan::begin(&state.memory.device);
    assert_eq!(nothing.spare_of(&state.memory.budget, other), 5 * G);
    // What is above the guarantee is not counted again.
    state.plan_others(me, Give::Cached, u64::MAX, &mut plan);
    assert_eq!(takes(&plan), all);
    // Its owner may have all of it.
    assert_eq!(state.plan(other, 0, 16 * G).gained(), 8 * G);
}

#[test]
fn an_extent_that_reaches_below_a_guarantee_is_taken_whole_and_counts_as_far_as_it_lies_above() {
    let rig = rig();
    let pool = limited(&rig, 16).largest_extent(4 * G).build().unwrap();
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 5, 0));
    leave_idle(&other, &[2, 4]);
    let (me, other) = (me.id(), other.id());
    let mut state = pool.core.lock();
    let plan = state.plan(me, 0, 16 * G);
    assert_eq!((takes(&plan), plan.gained()), (vec![(other, 0, 0)], G));
    assert_eq!(
        plan.spare_of(&state.memory.budget, other),
        0,
        "four are left of five"
    );
    let slot = |index| SlotId {
        tenant: other,
        index,
    };
    let from = |slots: &[SlotId]| plan.takes_from(&slots.iter().copied().collect());
    assert_eq!(
        (from(&[slot(0), slot(1)]), from(&[slot(0)])),
        (2 * G, 2 * G)
    );
    assert_eq!((from(&[slot(1)]), from(&[])), (0, 0));
}

#[test]
fn what_work_may_still_use_is_not_planned() {
    let rig = rig();
    let pool = pool(&rig, 16);
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
    let stream = rig.busy_stream();
    drop(other.allocate_on(&stream, 2 * G).unwrap());
    let mut state = pool.core.lock();
    assert_eq!(state.take_back_any(me.id(), 2 * G).unwrap(), 0);
    assert!(state.plan(me.id(), 0, 2 * G).takes.is_empty());
    rig.finish(&stream);
    assert_eq!(state.plan(me.id(), 0, 2 * G).takes.len(), 2);
    assert_eq!(held(&state, &other), 2);
}

#[test]
fn what_stream_caches_hold_is_taken_back_too() {
    let rig = rig();
    let pool = pool(&rig, 4);
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
    let stream = Stream::new(&rig.device).unwrap();
    drop(other.allocate_on(&stream, 4 * G).unwrap());
    let mut state = pool.core.lock();
    assert!(state.plan(me.id(), 0, G).takes.is_empty());
    let (own, others) = state.reach(me.id());
    assert_eq!((own.gained(), others.gained()), (0, 4 * G));
    let (own, others) = state.reach(other.id());
    assert_eq!((own.gained(), others.gained()), (4 * G, 0));
    drop(state);
    drop(other.allocate_on(&stream, 4 * G).unwrap());
    let mut state = pool.core.lock();
    state.reclaim_for(me.id(), 3 * G, Purpose::New).unwrap();
    assert_eq!(
        (held(&state, &other), state.memory.supply.free()),
        (1, 3 * G)
    );
}

#[test]
fn where_nothing_is_missing_stream_caches_keep_what_they_have() {
    let rig = rig();
    let pool = pool(&rig, 8);
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
    let idle = block(&me, 2);
    let id = slot_of(&idle);
    drop(idle);
    let stream = Stream::new(&rig.device).unwrap();
    let cached = other.allocate_on(&stream, 4 * G).unwrap();
    let in_cache = slot_of(&cached);
    drop(cached);
    let mut state = pool.core.lock();
    let keeps = |state: &State| state.blocks.used_and_held(in_cache).0 > 0;
    state.reclaim_for(me.id(), 2 * G, Purpose::New).unwrap();
    state.permit_reuse(id, 2 * G, Purpose::New).unwrap();
    state.make_address_room(G).unwrap();
    assert!(!state.memory.budget.totals().overdrawn && keeps(&state));
    drop(state);
    let cached = other.allocate_on(&stream, 4 * G).unwrap();
    assert_eq!(slot_of(&cached), in_cache);
    let _late = tenant(&pool, "late", 4, 0);
    drop(cached);
    let mut state = pool.core.lock();
    assert!(state.memory.budget.totals().overdrawn && keeps(&state));
    state.permit_reuse(id, 0, Purpose::New).unwrap();
    assert!(keeps(&state), "nothing is to be used again");
}

// I-31
#[test]
fn a_plan_that_does_not_suffice_takes_nothing() {
    let rig = rig();
    let pool = pool(&rig, 8);
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 1, 0));
    leave_idle(&other, &[3, 2]);
    let mut state = pool.core.lock();
    let refused = shortage(state.reclaim_for(me.id(), 8 * G, Purpose::New));
    assert_eq!((refused.wanted, refused.available), (8 * G, 7 * G));
    assert_eq!((held(&state, &other), state.memory.supply.free()), (5, 0));
    state.reclaim_for(me.id(), 5 * G, Purpose::New).unwrap();
    assert_eq!(
        (held(&state, &other), state.memory.supply.free()),
        (3, 2 * G)
    );
    assert_eq!(state.memory.budget.available_to(me.id()), 5 * G);
    state.reclaim_for(me.id(), 7 * G, Purpose::New).unwrap();
    assert_eq!(
        (held(&state, &other), state.memory.supply.free()),
        (1, 4 * G)
    );
}

#[test]
fn a_tenants_own_limit_asks_for_its_own_memory() {
    let rig = rig();
    let pool = pool(&rig, 16);
    let me = pool.tenant("me").limit(3 * G).register().unwrap();
    let other = tenant(&pool, "other", 0, 0);
    leave_idle(&other, &[8]);
    let _in_use = block(&me, 1);
    leave_idle(&me, &[2]);
    let mut state = pool.core.lock();
    let refused = shortage(state.reclaim_for(me.id(), 3 * G, Purpose::New));
    assert_eq!((refused.tenant_limit, refused.tenant_held), (3 * G, 3 * G));
    assert_eq!((held(&state, &me), held(&state, &other)), (3, 8));
    state.reclaim_for(me.id(), G, Purpose::New).unwrap();
    assert_eq!((held(&state, &me), held(&state, &other)), (2, 8));
    state.reclaim_for(me.id(), 2 * G, Purpose::New).unwrap();
    assert_eq!((held(&state, &me), held(&state, &other)), (1, 8));
}

#[test]
fn a_shortage_during_a_capture_is_the_captures_only_if_memory_waits_for_its_fence() {
    let rig = rig();
    let pool = pool(&rig, 4);
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
    let in_use = block(&other, 2);
    let guard = pool.capture_guard();
    shortage(pool.core.lock().reclaim_for(me.id(), 3 * G, Purpose::New));
    drop(guard);
    let stream = rig.busy_stream();
    drop(other.allocate_on(&stream, 2 * G).unwrap());
    let refused = shortage(pool.core.lock().reclaim_for(me.id(), G, Purpose::New));
    assert_eq!(refused.pending_free, 2 * G);
    let guard = pool.capture_guard();
    let captured = pool.core.lock().reclaim_for(me.id(), G, Purpose::New);
    assert!(matches!(captured, Err(BlockError::Capturing(_))));
    rig.finish(&stream);
    let captured = pool.core.lock().reclaim_for(me.id(), G, Purpose::New);
    assert!(
        matches!(captured, Err(BlockError::Capturing(_))),
        "no fence is polled"
    );
    drop(guard);
    pool.core
        .lock()
        .reclaim_for(me.id(), 2 * G, Purpose::New)
        .unwrap();
    drop(in_use);
}

#[test]
fn what_is_lost_on_its_way_to_the_driver_makes_no_room() {
    let rig = rig();
    let builder = limited(&rig, 8).largest_extent(G);
    let pool = builder.shareable(HandleTypes::POSIX_FD).build().unwrap();
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
    let stream = rig.busy_stream();
    let exported = other.allocate_on(&stream, 2 * G).unwrap();
    drop(exported.export(HandleTypes::POSIX_FD).unwrap());
    drop(exported);
    leave_idle(&other, &[3]);
    rig.finish(&stream);
    rig.fail(Call::MemRelease, 1);
    let mut state = pool.core.lock();
    // The exported memory is the oldest. The driver refuses to release one of its two extents.
    let refused = shortage(state.reclaim_for(me.id(), 5 * G, Purpose::New));
    assert_eq!((refused.quarantined, refused.available), (G, 4 * G));
    assert_eq!(
        (held(&state, &other), state.memory.budget.totals().obtained),
        (3, 4 * G)
    );
    // The driver is asked again when memory is short, and room is made once it has taken the
    // memory.
    state.reclaim_for(me.id(), 6 * G, Purpose::New).unwrap();
    assert_eq!(
        (
            held(&state, &other),
            state.memory.budget.totals().quarantined
        ),
        (2, 0)
    );
}

#[test]
fn idle_memory_that_was_promised_to_another_is_used_again_once_others_have_given_as_much() {
    let rig = rig();
    let pool = pool(&rig, 8);
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
    leave_idle(&me, &[5]);
    leave_idle(&other, &[1]);
    // They hold six of eight granules, and four are promised.
    let late = tenant(&pool, "late", 4, 0);
    assert!(pool.core.lock().memory.budget.totals().overdrawn);
    let five = me.try_allocate(5 * G);
    assert!(matches!(five, Err(BlockError::OutOfMemory(_))));
    assert_eq!(
        held(&pool.core.lock(), &other),
        1,
        "a refusal takes nothing"
    );
    let three = me.block(3 * G).capacity(5 * G).try_allocate().unwrap();
    assert_eq!(
        held(&pool.core.lock(), &other),
        1,
        "these were not promised"
    );
    drop(three);
    let four = me.block(4 * G).capacity(5 * G).try_allocate().unwrap();
    assert_eq!(held(&pool.core.lock(), &other), 0);
    assert_eq!(block(&late, 4).size(), 4 * G);
    assert_eq!(held(&pool.core.lock(), &me), 4);
    drop(four);
}

#[test]
fn what_stream_caches_hold_is_given_for_idle_memory_that_was_promised_to_another() {
    let rig = rig();
    let pool = pool(&rig, 8);
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
    leave_idle(&me, &[5]);
    let stream = Stream::new(&rig.device).unwrap();
    let cached = other.allocate_on(&stream, G).unwrap();
    let late = tenant(&pool, "late", 3, 0);
    drop(cached);
    let five = block(&me, 5);
    assert_eq!(held(&pool.core.lock(), &other), 0);
    assert_eq!(block(&late, 3).size() + five.size(), 8 * G);
}

#[test]
fn memory_that_is_to_be_used_again_counts_as_kept_meanwhile() {
    let rig = rig();
    let pool = pool(&rig, 8);
    let me = tenant(&pool, "me", 0, 0);
    let idle = block(&me, 5);
    let id = slot_of(&idle);
    drop(idle);
    let mut state = pool.core.lock();
    let slot = state.take_out(id).unwrap();
    assert_eq!(state.kept_by(me.id()), 0);
    state.permit_reuse(id, 3 * G, Purpose::New).unwrap();
    assert_eq!(state.kept_by(me.id()), 3 * G);
    state.blocks.put_slot(slot);
    assert_eq!(state.kept_by(me.id()), 0);
}

#[test]
fn taking_back_for_anybody_takes_at_most_about_what_is_asked_for_and_says_how_much() {
    let rig = rig();
    let pool = pool(&rig, 8);
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 1, 0));
    leave_idle(&other, &[1, 3, 1]);
    let mut state = pool.core.lock();
    assert_eq!(state.take_back_any(me.id(), 3 * G - 1).unwrap(), 3 * G);
    assert_eq!(
        (held(&state, &other), state.memory.supply.free()),
        (2, 3 * G)
    );
    assert_eq!(state.take_back_any(me.id(), u64::MAX).unwrap(), G);
    assert_eq!(state.take_back_any(me.id(), u64::MAX).unwrap(), 0);
}

#[test]
fn as_many_mappings_are_taken_back_as_are_asked_for() {
    let rig = rig();
    let pool = pool(&rig, 8);
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
    let stream = Stream::new(&rig.device).unwrap();
    let cached = other.allocate_on(&stream, G).unwrap();
    leave_idle(&other, &[4]);
    drop(cached);
    let mut state = pool.core.lock();
    state.take_back_mappings(me.id(), 3).unwrap();
    assert_eq!(
        (held(&state, &other), state.memory.budget.totals().mappings),
        (2, 2)
    );
    state.take_back_mappings(me.id(), 9).unwrap();
    assert_eq!(
        (held(&state, &other), state.memory.budget.totals().mappings),
        (0, 0)
    );
}

#[test]
fn all_that_a_tenant_has_idle_is_taken_back_below_its_guarantee_too() {
    let rig = rig();
    let pool = limited(&rig, 64).largest_extent(8 * G).build().unwrap();
    let (me, other) = (tenant(&pool, "me", 30, 0), tenant(&pool, "other", 0, 0));
    leave_idle(&other, &[2]);
    let idle = block(&me, 3);
    let _ahead = ahead(&me);
    drop(idle);
    let mut state = pool.core.lock();
    assert_eq!(state.take_back_own(me.id(), u64::MAX), (6 * G, Ok(())));
    assert_eq!((held(&state, &me), held(&state, &other)), (12, 2));
    assert_eq!(state.take_back_own(me.id(), u64::MAX), (0, Ok(())));
}

#[test]
fn a_refusal_of_the_driver_ends_a_taking_back_and_what_was_taken_is_kept() {
    let rig = rig();
    let pool = pool(&rig, 8);
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
    leave_idle(&other, &[1, 2, 1]);
    rig.fail(Call::MemUnmap, 3);
    let mut state = pool.core.lock();
    assert!(state.take_back_any(me.id(), 4 * G).is_err());
    assert_eq!(
        (held(&state, &other), state.memory.supply.free()),
        (2, 2 * G)
    );
    assert_eq!(state.take_back_any(me.id(), 4 * G).unwrap(), 2 * G);
}

#[test]
fn extents_are_taken_last_first_without_a_hole() {
    let rig = rig();
    let pool = pool(&rig, 8);
    let me = tenant(&pool, "me", 0, 0);
    let idle = block(&me, 5);
    let id = slot_of(&idle);
    drop(idle);
    let mut state = pool.core.lock();
    // This polls the fences.
    assert_eq!(state.plan(me.id(), 0, G).gained(), G);
    let mut take = |at: &[u64]| {
        let at: Vec<u64> = at.iter().map(|at| at * G).collect();
        let taken = state.reclaim_extents(id, &at).0;
        assert_eq!(held(&state, &me), state.blocks.used_and_held(id).1 / G);
        taken / G
    };
    assert_eq!(take(&[3, 2]), 0, "something was placed behind it");
    assert_eq!(
        take(&[4, 2, 1]),
        1,
        "what is missing in between stays, and what lies before it"
    );
    assert_eq!(take(&[]), 0);
    assert_eq!(take(&[3, 2]), 2);
    assert_eq!(take(&[1, 0]), 2);
    assert_eq!(take(&[0]), 0, "nothing is left");
}

#[test]
fn what_is_in_use_again_or_leased_is_left_where_it_is() {
    let rig = rig();
    let pool = pool(&rig, 8);
    let me = tenant(&pool, "me", 0, 0);
    let mut used = block(&me, 4);
    let id = slot_of(&used);
    used.shrink_to(G).unwrap();
    let mut state = pool.core.lock();
    let plan = state.plan(me.id(), 0, 4 * G);
    assert_eq!(
        takes(&plan),
        [(me.id(), 0, 3), (me.id(), 0, 2), (me.id(), 0, 1)]
    );
    drop(state);
    used.try_grow_to(3 * G).unwrap();
    let mut state = pool.core.lock();
    assert_eq!(
        state.carry_out(&plan).unwrap(),
        G,
        "the others are in use again"
    );
    drop(state);
    used.shrink_to(G).unwrap();
    let lease = used.lease();
    let mut state = pool.core.lock();
    let at = [2 * G, G];
    assert_eq!(state.reclaim_extents(id, &at), (0, Ok(())));
    drop(state);
    drop(lease);
    // Memory that the block gives up now waits for a stream.
    let stream = rig.busy_stream();
    used.record_use(&stream).unwrap();
    used.try_grow_to(3 * G).unwrap();
    used.shrink_to(G).unwrap();
    let mut state = pool.core.lock();
    assert_eq!(
        state.reclaim_extents(id, &at),
        (0, Ok(())),
        "work may use it"
    );
    rig.finish(&stream);
    assert_eq!(state.take_back_any(me.id(), 4 * G).unwrap(), 2 * G);
    let gone = SlotId { index: 9, ..id };
    assert_eq!(state.reclaim_extents(gone, &at), (0, Ok(())));
}

#[test]
fn addresses_of_empty_slots_are_given_up_until_there_is_room_and_no_further() {
    let rig = rig();
    let builder = limited(&rig, 16).address_limit(10 * G);
    let pool = builder.build().unwrap();
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
    let in_use = block(&me, 2);
    leave_idle(&me, &[2, 2]);
    leave_idle(&other, &[2]);
    let full = block(&other, 1);
    drop(full);
    let mut state = pool.core.lock();
    state.take_back_own(me.id(), u64::MAX).1.unwrap();
    state.take_back_any(me.id(), 2 * G).unwrap();
    assert_eq!((held(&state, &me), held(&state, &other)), (2, 1));
    let reserved = |state: &State| state.memory.budget.totals().addresses / G;
    assert_eq!(reserved(&state), 9);
    state.make_address_room(G).unwrap();
    assert_eq!(reserved(&state), 9, "there is room");
    state.make_address_room(2 * G).unwrap();
    assert_eq!(reserved(&state), 7, "one is enough");
    state.make_address_room(5 * G).unwrap();
    assert_eq!(reserved(&state), 5);
    let refused = state.make_address_room(10 * G).unwrap_err();
    assert!(matches!(refused, BlockError::OutOfAddresses { held, .. } if held == 3 * G));
    assert_eq!(reserved(&state), 3, "the others have memory");
    assert_eq!(held(&state, &other), 1);
    drop(state);
    drop(in_use);
}

#[test]
fn what_forks_have_given_up_is_taken_back_once_that_has_passed() {
    let rig = rig();
    let pool = pool(&rig, 4);
    let (me, other) = (tenant(&pool, "me", 0, 0), tenant(&pool, "other", 0, 0));
    let stream = Stream::new(&rig.device).unwrap();
    let block = other.allocate_on(&stream, 2 * G).unwrap();
    let fork = block.try_fork(2 * G, 2 * G).unwrap();
    rig.queue(&stream);
    drop((block, fork));
    let mut state = pool.core.lock();
    assert!(state.reclaim_for(me.id(), 3 * G, Purpose::New).is_err());
    assert_eq!(held(&state, &other), 2);
    rig.finish(&stream);
    state.reclaim_for(me.id(), 4 * G, Purpose::New).unwrap();
    assert_eq!(
        (held(&state, &other), state.memory.supply.free()),
        (0, 2 * G)
    );
}

#[test]
fn addresses_of_what_draining_tenants_left_are_given_up_once_that_has_passed() {
    let rig = rig();
    let pool = limited(&rig, 4).address_limit(4 * G).build().unwrap();
    let gone = tenant(&pool, "gone", 0, 0);
    let stream = rig.busy_stream();
    drop(gone.allocate_on(&stream, 2 * G).unwrap());
    drop(gone);
    let mut state = pool.core.lock();
    let made = |state: &mut Locked<'_>| {
        let made = state.make_address_room(4 * G).is_ok();
        made && state.memory.budget.totals().addresses == 0
    };
    assert!(!made(&mut state), "work may use it");
    rig.finish(&stream);
    assert!(made(&mut state));
    assert_eq!(state.memory.supply.free(), 2 * G);
}

#[test]
fn resting_addresses_are_given_up_until_there_is_room() {
    let rig = rig();
    let builder = limited(&rig, 8).address_limit(8 * G);
    let pool = builder.hardened(Hardened::new().guard(0)).build().unwrap();
    let me = tenant(&pool, "me", 0, 0);
    leave_idle(&me, &[2, 2, 1]);
    let mut state = pool.core.lock();
    state.purge_all();
    assert_eq!((held(&state, &me), state.blocks.resting()), (0, (3, 5 * G)));
    state.make_address_room(3 * G).unwrap();
    assert_eq!(state.blocks.resting(), (3, 5 * G), "there is room");
    state.make_address_room(6 * G).unwrap();
    assert_eq!(state.blocks.resting(), (1, G));
}
