//! Tests of [`exports`](super::exports).

use std::cell::Cell;

use super::exports::{all, close, grow, lent, name, named, remove_name, remove_names, take};
use super::file::{LedgerFile, Terms};
use super::layout::EXPORTS;

const OWNER: usize = 7;
const USER: usize = 127;

fn file() -> LedgerFile {
    let directory = tempfile::tempdir().unwrap();
    let terms = Terms {
        granule: 2 << 20,
        device: [7; 16],
        group: false,
    };
    LedgerFile::open(directory.path().join("ledger"), terms).unwrap()
}

#[test]
fn an_entry_is_freed_when_it_is_closed_and_nothing_names_it() {
    let file = file();
    let layout = file.layout();
    let id = take(layout, OWNER, 5).unwrap();
    assert!(grow(layout, id, 3));
    assert!(name(layout, id, USER) && name(layout, id, OWNER));
    let shown = all(layout).next().unwrap();
    assert_eq!((shown.owner, shown.granules), (OWNER, 8));
    assert_eq!(shown.holders, [OWNER, USER]);
    assert!(close(layout, id), "two have it");
    assert!(!grow(layout, id, 1));
    remove_name(layout, id, OWNER);
    assert!(close(layout, id), "one has it");
    assert!(all(layout).next().unwrap().is_given_back);
    remove_name(layout, id, USER);
    assert!(!close(layout, id), "none has it");
    assert_eq!(all(layout).count(), 0);
    assert!(!close(layout, id), "again");
    assert!(!name(layout, id, 3), "it is free");
    assert_eq!(named(layout), 0);
}

#[test]
fn a_process_that_has_the_memory_of_an_ended_owner_passes_it_on() {
    let file = file();
    let layout = file.layout();
    let id = take(layout, OWNER, 5).unwrap();
    assert!(name(layout, id, USER));
    assert_eq!(lent(layout, OWNER, || true), 5);
    assert!(name(layout, id, 3));
    remove_name(layout, id, USER);
    assert_eq!(lent(layout, OWNER, || true), 5, "slot 3 has it");
    assert_eq!(all(layout).next().unwrap().holders, [3]);
    remove_name(layout, id, 3);
    assert_eq!(lent(layout, OWNER, || true), 0);
    assert!(!name(layout, id, USER), "none has it");
}

#[test]
fn a_name_that_comes_while_a_closed_entry_is_being_freed_keeps_it() {
    let file = file();
    let layout = file.layout();
    let id = take(layout, OWNER, 5).unwrap();
    assert!(name(layout, id, USER) && close(layout, id));
    // The collector has looked at the bits when it asks, and found none.
    remove_name(layout, id, USER);
    let asked = Cell::new(false);
    let before = lent(layout, OWNER, || {
        if !asked.replace(true) {
            assert!(name(layout, id, 3));
        }
        true
    });
    assert_eq!((before, asked.get()), (5, true));
    assert_eq!(all(layout).next().unwrap().holders, [3]);
    remove_name(layout, id, 3);
    assert_eq!(lent(layout, OWNER, || true), 0);
}

#[test]
fn a_closed_entry_is_named_a_bounded_number_of_times() {
    let file = file();
    let layout = file.layout();
    let id = take(layout, OWNER, 5).unwrap();
    assert!(name(layout, id, USER) && close(layout, id));
    for _ in 0..0xffff {
        assert!(name(layout, id, 3));
        remove_name(layout, id, 3);
    }
    assert!(!name(layout, id, 3), "the count is full");
    assert_eq!(all(layout).next().unwrap().holders, [USER]);
    remove_name(layout, id, USER);
    assert!(!close(layout, id));
    let next = take(layout, OWNER, 5).unwrap();
    assert!(name(layout, next, USER), "the next entry counts anew");
}

#[test]
fn a_name_of_an_entry_that_was_taken_again_names_nothing() {
    let file = file();
    let layout = file.layout();
    let old = take(layout, OWNER, 5).unwrap();
    assert!(!close(layout, old));
    let new = take(layout, USER, 6).unwrap();
    assert_ne!(old, new);
    assert!(!name(layout, old, 3) && !close(layout, old) && !grow(layout, old, 1));
    assert!(name(layout, new, 3));
    remove_name(layout, old, 3);
    assert!(close(layout, new), "slot 3 still has it");
}

#[test]
fn all_entries_can_be_taken_and_no_more() {
    let file = file();
    let layout = file.layout();
    for _ in 0..EXPORTS {
        assert!(take(layout, OWNER, 1).is_some());
    }
    assert!(take(layout, OWNER, 1).is_none());
    assert_eq!(lent(layout, OWNER, || true), 0);
    assert!(take(layout, OWNER, 1).is_some());
}

#[test]
fn an_owner_that_ends_lends_what_others_have() {
    let file = file();
    let layout = file.layout();
    let [one, two, other] = [(OWNER, 2), (OWNER, 3), (USER, 4)]
        .map(|(owner, granules)| take(layout, owner, granules).unwrap());
    assert!(name(layout, one, USER) && name(layout, two, OWNER) && name(layout, other, OWNER));
    assert_eq!(lent(layout, OWNER, || false), 5, "nothing is changed");
    assert!(grow(layout, one, 1));
    remove_names(layout, OWNER, || true);
    assert_eq!(lent(layout, OWNER, || true), 3);
    assert!(!name(layout, two, 9) && name(layout, one, 9));
    remove_name(layout, one, 9);
    assert!(name(layout, other, 9), "it is another owner's");
    remove_names(layout, USER, || true);
    assert_eq!(lent(layout, OWNER, || true), 0);
}

#[test]
fn a_stopped_collector_changes_nothing_for_the_next_owner_of_the_slot() {
    let file = file();
    let layout = file.layout();
    let id = take(layout, OWNER, 2).unwrap();
    assert!(name(layout, id, USER));
    // The process looks at the word, is stopped, and goes on when the slot has a new owner.
    let asked = Cell::new(false);
    remove_names(layout, USER, || {
        if !asked.replace(true) {
            remove_names(layout, USER, || true);
            assert!(name(layout, id, USER), "the new owner of the slot");
            return true;
        }
        false
    });
    assert_eq!(all(layout).next().unwrap().holders, [USER]);

    remove_names(layout, USER, || true);
    let asked = Cell::new(false);
    let new = Cell::new(None);
    lent(layout, OWNER, || {
        if !asked.replace(true) {
            assert_eq!(lent(layout, OWNER, || true), 0);
            new.set(take(layout, OWNER, 9));
            return true;
        }
        false
    });
    assert!(name(layout, new.get().unwrap(), 1), "its entry is open");
}

#[test]
fn any_contents_can_be_read() {
    let file = file();
    let layout = file.layout();
    let random = |seed: u64| fastrand::Rng::with_seed(seed);
    for seed in 0..200 {
        let mut random = random(seed);
        for export in &layout.exports {
            export.fill(|| random.u64(..));
        }
        for shown in all(layout) {
            assert!(shown.holders.iter().all(|&slot| slot < 128));
        }
        lent(layout, OWNER, || true);
        remove_names(layout, OWNER, || true);
        take(layout, OWNER, 1);
        let id = super::exports::ExportId::of(random.u64(..));
        name(layout, id, USER);
        close(layout, id);
        remove_name(layout, id, USER);
    }
}
