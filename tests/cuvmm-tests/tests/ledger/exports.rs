//! Memory that a process of a ledger shares with others: charged once, until no process has it. The
//! processes are members of one ledger in one process here, each with a slot of its own.
//! `ledger_processes.rs` kills real ones.
//!
//! Tests I-113.

use crate::common;
use crate::common::{G, wait_until};
use cuvmm::driver::HandleTypes;
use cuvmm::error::{BlockError, ShareError};
use cuvmm::ledger::{ExportStats, ProcessState};
use cuvmm::share::{Offered, Parcel};
use cuvmm::{Attachment, Block, Device, Ledger, LedgerView, Limit, Offer, Pool, Stream, Tenant};

/// Granules of the ledger.
const LIMIT: u64 = 64;

struct Member {
    tenant: Tenant,
    pool: Pool,
    ledger: Ledger,
    stream: Stream,
}

struct Place {
    device: Device,
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let device = common::host().device.clone();
        let memory = std::path::Path::new("/dev/shm");
        let dir = match memory.is_dir() {
            true => tempfile::tempdir_in(memory).unwrap(),
            false => tempfile::tempdir().unwrap(),
        };
        Self { device, dir }
    }

    fn join(&self, name: &str) -> Member {
        let ledger = Ledger::builder(&self.device, self.dir.path());
        let ledger = ledger.limit(LIMIT * G).name(name).open().unwrap();
        let pool = Pool::builder(&self.device).limit(Limit::Bytes(LIMIT * G));
        let pool = pool.shareable(HandleTypes::POSIX_FD).ledger(&ledger);
        let pool = pool.build().unwrap();
        Member {
            tenant: pool.tenant(name).register().unwrap(),
            pool,
            ledger,
            stream: Stream::new(&self.device).unwrap(),
        }
    }

    fn attach(&self, member: &Member, parcel: &Parcel) -> Result<Attachment, ShareError> {
        let how = Attachment::builder(&self.device).home_stream(&member.stream);
        how.ledger(&member.ledger).open(parcel)
    }

    fn view(&self, member: &Member) -> LedgerView {
        LedgerView::open(member.ledger.path()).unwrap()
    }
}

impl Member {
    fn block(&self, granules: u64) -> Result<Block, BlockError> {
        self.tenant.try_allocate(granules * G)
    }

    /// Returns the granules that are charged to this member's slot.
    fn charged(&self, view: &LedgerView) -> u64 {
        slot_of(view, self.ledger.slot()).unwrap().1
    }
}

/// Returns the state of a slot and the granules that it is charged.
fn slot_of(view: &LedgerView, slot: usize) -> Option<(ProcessState, u64)> {
    let stats = view.stats();
    let mut processes = stats.processes.into_iter();
    let found = processes.find(|it| it.slot == slot)?;
    Some((found.state, found.charged / G))
}

fn exports(view: &LedgerView) -> Vec<(usize, u64, bool, Vec<usize>)> {
    let shown = |it: ExportStats| (it.owner, it.bytes / G, it.given_back, it.holders);
    view.stats().exports.into_iter().map(shown).collect()
}

#[test]
fn memory_that_its_owner_freed_counts_until_no_process_has_it() {
    let place = Place::new();
    let (owner, user) = (place.join("owner"), place.join("user"));
    let view = place.view(&owner);
    let (giver, taker) = (owner.ledger.slot(), user.ledger.slot());
    let block = owner.block(40).unwrap();
    let offer = Offer::block(&block).unwrap();
    let again = Offer::block(&block).unwrap();
    assert_eq!(exports(&view), [(giver, 40, false, vec![])]);
    let first = place.attach(&user, &offer.parcel().unwrap()).unwrap();
    let second = place.attach(&user, &again.parcel().unwrap()).unwrap();
    assert_eq!(exports(&view), [(giver, 40, false, vec![taker])]);
    assert_eq!(user.charged(&view), 0, "it counts once");

    drop((offer, again, block));
    owner.pool.trim(0).unwrap();
    wait_until("the owner gives the memory back", || exports(&view)[0].2);
    assert_eq!(owner.pool.stats().committed, 0);
    assert_eq!(owner.charged(&view), 40);
    assert!(user.block(LIMIT - 39).is_err(), "the memory still exists");
    assert!(owner.block(LIMIT - 39).is_err());
    drop(user.block(LIMIT - 40).unwrap());

    drop(first);
    assert_eq!(exports(&view), [(giver, 40, true, vec![taker])]);
    drop(second);
    wait_until("the owner is refunded", || exports(&view).is_empty());
    drop(user.block(LIMIT).unwrap());
    assert_eq!(view.stats().processes[0].obtained, 0);
}

#[test]
fn memory_counts_when_its_owner_has_left() {
    let place = Place::new();
    let (owner, user) = (place.join("owner"), place.join("user"));
    let view = place.view(&user);
    let block = owner.block(40).unwrap();
    let parcel = Offer::block(&block).unwrap().parcel().unwrap();
    let attached = place.attach(&user, &parcel).unwrap();
    drop(parcel);
    let slot = owner.ledger.slot();
    drop(block);
    drop(owner);
    wait_until("the owner leaves", || {
        slot_of(&view, slot) == Some((ProcessState::Lending, 40))
    });
    assert!(user.block(LIMIT - 39).is_err());
    assert_eq!(view.stats().processes.len(), 2);
    let third = place.join("third");
    assert_ne!(third.ledger.slot(), slot, "the slot is not free");
    assert!(third.block(LIMIT - 39).is_err());
    drop(third);

    drop(attached);
    wait_until("the slot is free", || slot_of(&view, slot).is_none());
    drop(user.block(LIMIT).unwrap());
    assert!(view.stats().exports.is_empty());
}

#[test]
fn memory_that_was_given_back_is_not_imported() {
    let place = Place::new();
    let (owner, user) = (place.join("owner"), place.join("user"));
    let view = place.view(&owner);
    let block = owner.block(8).unwrap();
    let parcel = Offer::block(&block).unwrap().parcel().unwrap();
    drop(block);
    owner.pool.trim(0).unwrap();
    wait_until("the entry is free", || exports(&view).is_empty());
    let refused = place.attach(&user, &parcel).unwrap_err();
    assert!(matches!(refused, ShareError::GivenBack), "{refused}");
    // Another block has the entry now, and the parcel still names the first one.
    let other = owner.block(4).unwrap();
    let offer = Offer::block(&other).unwrap();
    let refused = place.attach(&user, &parcel).unwrap_err();
    assert!(matches!(refused, ShareError::GivenBack), "{refused}");
    assert_eq!(exports(&view), [(owner.ledger.slot(), 4, false, vec![])]);
    drop(offer);
}

#[test]
fn an_importer_outside_the_ledger_changes_nothing() {
    let place = Place::new();
    let owner = place.join("owner");
    let view = place.view(&owner);
    let block = owner.block(8).unwrap();
    let parcel = Offer::block(&block).unwrap().parcel().unwrap();
    let elsewhere = Place::new();
    let user = elsewhere.join("user");
    let how = Attachment::builder(&place.device);
    let outside = how.ledger(&user.ledger).open(&parcel).unwrap();
    let unnamed = Attachment::builder(&place.device).open(&parcel).unwrap();
    assert_eq!(exports(&view), [(owner.ledger.slot(), 8, false, vec![])]);
    drop(block);
    owner.pool.trim(0).unwrap();
    wait_until("the entry is free", || exports(&view).is_empty());
    drop((outside, unnamed));
}

#[test]
fn an_owner_that_attaches_its_own_memory_keeps_it_charged() {
    let place = Place::new();
    let owner = place.join("owner");
    let view = place.view(&owner);
    let block = owner.block(8).unwrap();
    let parcel = Offer::block(&block).unwrap().parcel().unwrap();
    let attached = place.attach(&owner, &parcel).unwrap();
    drop(block);
    owner.pool.trim(0).unwrap();
    wait_until("the memory is given back", || exports(&view)[0].2);
    assert!(owner.block(LIMIT - 7).is_err());
    drop(attached);
    wait_until("the memory is refunded", || exports(&view).is_empty());
    drop(owner.block(LIMIT).unwrap());
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_block_that_grew_is_counted_whole() {
    let place = Place::new();
    let (owner, user) = (place.join("owner"), place.join("user"));
    let view = place.view(&owner);
    let mut block = owner
        .tenant
        .block(4 * G)
        .capacity(12 * G)
        .try_allocate()
        .unwrap();
    let small = Offer::block(&block).unwrap();
    block.grow_to(12 * G).unwrap();
    let large = Offer::block(&block).unwrap();
    assert_eq!(exports(&view), [(owner.ledger.slot(), 12, false, vec![])]);
    let attached = place.attach(&user, &large.parcel().unwrap()).unwrap();
    drop((small, large, block));
    owner.pool.trim(0).unwrap();
    wait_until("the memory is given back", || owner.charged(&view) == 12);
    assert!(user.block(LIMIT - 11).is_err());
    drop(attached);
    wait_until("the memory is refunded", || exports(&view).is_empty());
}

#[test]
fn offers_of_several_blocks_count_their_memory_until_no_process_has_it() {
    let place = Place::new();
    let (owner, user) = (place.join("owner"), place.join("user"));
    let late = place.join("late");
    let view = place.view(&owner);
    let slot = owner.ledger.slot();
    let [a, b, c] = [4, 8, 16].map(|granules| owner.block(granules).unwrap());
    let first = Offer::several(&[Offered::Block(&a), Offered::Block(&b)]).unwrap();
    assert_eq!(exports(&view), [(slot, 12, false, vec![])]);
    let parcel = first.parcel().unwrap();
    let reads = place.attach(&user, &parcel).unwrap();
    let second = Offer::several(&[Offered::Block(&b), Offered::Block(&c)]).unwrap();
    drop(first);
    // Its entry lives while a reader has the memory, so another one can name it.
    drop(place.attach(&late, &parcel).unwrap());

    // A block of the first offer is given back. The second offer has one of them too, and goes on.
    drop(a);
    owner.pool.trim(0).unwrap();
    wait_until("the block is given back", || {
        owner.pool.stats().committed == 24 * G
    });
    let newer = place.attach(&late, &second.parcel().unwrap()).unwrap();
    assert!(user.block(LIMIT - 27).is_err(), "the memory still exists");
    wait_until("the rest is free", || user.block(LIMIT - 28).is_ok());

    // The newest offer has ended, and a reader of the first one still has its blocks.
    drop((newer, second, b, c));
    owner.pool.trim(0).unwrap();
    wait_until("what no process has is free", || {
        user.block(LIMIT - 12).is_ok()
    });
    assert!(user.block(LIMIT - 11).is_err(), "the memory still exists");
    drop(reads);
    wait_until("all entries are free", || exports(&view).is_empty());
    let refused = place.attach(&late, &parcel);
    assert!(matches!(refused, Err(ShareError::GivenBack)), "{refused:?}");
    drop(parcel);
    wait_until("all memory is free", || user.block(LIMIT).is_ok());
}

#[test]
fn memory_that_is_offered_again_and_again_needs_one_entry_at_a_time() {
    let place = Place::new();
    let (owner, user) = (place.join("owner"), place.join("user"));
    let view = place.view(&owner);
    let block = owner.block(4).unwrap();
    let mut offer = Offer::several(&[Offered::Block(&block)]).unwrap();
    let reads = place.attach(&user, &offer.parcel().unwrap()).unwrap();
    for _ in 0..300 {
        offer = Offer::several(&[Offered::Block(&block)]).unwrap();
    }
    assert_eq!(exports(&view).len(), 1, "it is the same memory");
    drop(offer);
    let mut offer = Offer::several(&[Offered::Block(&block)]).unwrap();
    for _ in 0..300 {
        drop(offer);
        offer = Offer::several(&[Offered::Block(&block)]).unwrap();
    }
    assert_eq!(
        exports(&view).len(),
        2,
        "the one that is read, and the newest"
    );
    drop(reads);
    wait_until("the first entry is free", || exports(&view).len() == 1);
    drop((offer, block));
    owner.pool.trim(0).unwrap();
    wait_until("all entries are free", || exports(&view).is_empty());
    wait_until("all memory is free", || user.block(LIMIT).is_ok());
}

#[test]
fn memory_that_was_offered_several_times_counts_once_when_its_owner_has_left() {
    let place = Place::new();
    let (owner, user) = (place.join("owner"), place.join("user"));
    let view = place.view(&user);
    let slot = owner.ledger.slot();
    let [a, b] = [8, 4].map(|granules| owner.block(granules).unwrap());
    let both = [Offered::Block(&a), Offered::Block(&b)];
    let offers = [0, 1].map(|_| Offer::several(&both).unwrap());
    let less = Offer::several(&both[1..]).unwrap();
    let shown = [(slot, 12, false, vec![]), (slot, 4, false, vec![])];
    assert_eq!(exports(&view), shown);
    let [first, second] = offers;
    let early = place.attach(&user, &first.parcel().unwrap()).unwrap();
    drop((first, less));
    assert_eq!(exports(&view).len(), 1);
    // The entry lives until the last of its offers ends.
    let late = place.attach(&user, &second.parcel().unwrap()).unwrap();
    assert_eq!(
        exports(&view),
        [(slot, 12, false, vec![user.ledger.slot()])]
    );
    drop((second, a, b, owner));
    wait_until("the owner leaves", || {
        slot_of(&view, slot) == Some((ProcessState::Lending, 12))
    });
    drop(early);
    assert_eq!(slot_of(&view, slot), Some((ProcessState::Lending, 12)));
    drop(late);
    wait_until("the slot is free", || slot_of(&view, slot).is_none());
}

#[test]
fn a_block_that_gave_memory_back_counts_by_all_its_names() {
    let place = Place::new();
    let (owner, user) = (place.join("owner"), place.join("user"));
    let view = place.view(&owner);
    let (giver, taker) = (owner.ledger.slot(), user.ledger.slot());
    let block = owner.tenant.block(4 * G).capacity(12 * G);
    let mut block = block.try_allocate().unwrap();
    block.grow_to(12 * G).unwrap();
    let offer = Offer::block(&block).unwrap();
    let reads = place.attach(&user, &offer.parcel().unwrap()).unwrap();
    drop(offer);
    block.shrink_to(4 * G).unwrap();
    owner.pool.trim(0).unwrap();
    wait_until("a part is given back", || exports(&view)[0].2);
    // The closed entry counts no further memory.
    let again = Offer::block(&block).unwrap();
    let shown = [(giver, 12, true, vec![taker]), (giver, 4, false, vec![])];
    assert_eq!(exports(&view), shown);
    drop((again, block));
    owner.pool.trim(0).unwrap();
    wait_until("all is given back", || exports(&view).len() == 1);
    assert_eq!(owner.pool.stats().committed, 0);
    let obtained = view.stats().processes[0].obtained;
    assert_eq!(obtained, 12 * G, "the reader has all of it");
    drop(reads);
    wait_until("the memory is refunded", || exports(&view).is_empty());
    wait_until("all memory is free", || user.block(LIMIT).is_ok());
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn many_blocks_are_exported_and_freed() {
    let place = Place::new();
    let (owner, user) = (place.join("owner"), place.join("user"));
    let view = place.view(&owner);
    let attached: Vec<(Attachment, Block)> = (0..40)
        .map(|_| {
            let block = owner.block(1).unwrap();
            let parcel = Offer::block(&block).unwrap().parcel().unwrap();
            (place.attach(&user, &parcel).unwrap(), block)
        })
        .collect();
    assert_eq!(exports(&view).len(), 40);
    drop(attached);
    owner.pool.trim(0).unwrap();
    wait_until("all entries are free", || exports(&view).is_empty());
    // The owner's pool keeps a grant for a second.
    wait_until("all memory is free", || user.block(LIMIT).is_ok());
}
