//! Several processes with one ledger, and one device that counts what they have: killed, stopped and
//! forked at random, and one by one.

mod common;
mod ledger_support;

use std::io::Write as _;

use common::G;
use cuvmm::ledger::ProcessState;
use ledger_support::process::{Place, until};
use ledger_support::storm;
use rustix::process::Signal;

/// Granules of the ledger.
const LIMIT: u64 = 100;

/// Granules of the device beyond the ledger's limit, so that processes could exceed it.
const BEYOND: u64 = 400;

/// Plays a process. Does nothing when it runs as a test.
#[test]
fn process() {
    ledger_support::member::play();
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_storm_of_killed_and_stopped_processes() {
    storm::run(&Place::new(LIMIT, LIMIT + BEYOND), None, storm::kills(60));
}

#[test]
fn a_waiting_request_gets_the_memory_of_a_killed_process() {
    let place = Place::new(LIMIT, LIMIT + BEYOND);
    let (mut one, mut other) = (place.join("one"), place.join("other"));
    let view = place.view();
    assert_eq!(one.ask("allocate 80 0"), "ok");
    assert_eq!(other.ask("allocate 60 0"), "Full");
    other.tell("allocate 60 60000");
    until("the request waits", || {
        view.stats()
            .processes
            .iter()
            .any(|it| it.waits_for.is_some())
    });
    one.kill();
    assert_eq!(other.answer(), "ok");
    until("the slot of the killed process is free", || {
        let stats = view.stats();
        stats.processes.len() == 1 && stats.processes[0].waits_for.is_none()
    });
    other.end();
    place.within_limit();
}

/// The memory that a killed process had exported stays with the device while another has it.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn what_a_killed_process_had_exported_counts_until_its_importer_releases_it() {
    let place = Place::new(LIMIT, LIMIT + BEYOND);
    let (mut one, mut other) = (place.join("one"), place.join("other"));
    let view = place.view();
    assert_eq!(one.ask("allocate 20 0"), "ok");
    assert_eq!(one.ask("allocate 40 0"), "ok");
    one.tell("offer block");
    assert_eq!(other.ask("attach block"), "ok");
    assert_eq!(one.answer(), "ok");
    let charged = |name: &str| {
        let stats = view.stats();
        let found = stats.processes.into_iter().find(|it| it.name == name);
        found.map(|it| (it.state, it.charged / G))
    };
    one.kill();
    until("the slot is lending", || {
        charged("one") == Some((ProcessState::Lending, 40))
    });
    assert_eq!(other.ask("allocate 61 100"), "Full");
    let mut third = place.join("third");
    assert_eq!(third.ask("allocate 61 100"), "Full");
    assert_eq!(third.ask("allocate 60 60000"), "ok");
    assert_eq!(charged("one"), Some((ProcessState::Lending, 40)));
    assert_eq!(other.ask("release"), "ok");
    until("the slot is free", || charged("one").is_none());
    assert_eq!(other.ask("allocate 40 60000"), "ok");
    assert!(view.stats().exports.is_empty());
    third.end();
    other.end();
    place.within_limit();
    assert_eq!(view.stats().charged, 0);
}

/// On a real GPU the locks of a killed process are free 30 ms before its memory is.
#[test]
fn memory_of_a_process_without_locks_counts_until_it_has_ended() {
    let place = Place::new(LIMIT, LIMIT + BEYOND);
    let (mut one, mut other) = (place.join("one"), place.join("other"));
    let view = place.view();
    assert_eq!(one.ask("allocate 80 0"), "ok");
    one.stop();
    if !one.lose_locks() {
        let said = "*** NOT TRIED: taking a child's descriptors, which this process may not";
        drop(writeln!(std::io::stderr(), "{said}"));
        return;
    }
    until("the slot is dying", || {
        let stats = view.stats();
        stats
            .processes
            .iter()
            .any(|it| it.state == ProcessState::Dying && it.charged >= 80 * G)
    });
    assert_eq!(other.ask("allocate 60 100"), "Full");
    let third = place.join("third");
    assert_eq!(view.stats().processes.len(), 3, "the slot is not free");
    other.tell("allocate 60 60000");
    one.kill();
    assert_eq!(other.answer(), "ok");
    place.within_limit();
    third.end();
    other.end();
    assert_eq!(view.stats().charged, 0);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_stopped_process_delays_others_for_a_bounded_time_and_is_shown() {
    let place = Place::new(LIMIT, LIMIT + BEYOND);
    let (mut one, mut other) = (place.join("one"), place.join("other"));
    let view = place.view();
    assert_eq!(other.ask("allocate 60 0"), "ok");
    one.tell("allocate 50 600000");
    until("the request waits", || {
        view.stats()
            .processes
            .iter()
            .any(|it| it.waits_for.is_some())
    });
    // The older request of the stopped process is not in the way of a later one for long.
    one.stop();
    assert_eq!(other.ask("allocate 10 60000"), "ok");
    until("it is shown as not answering, and the other is not", || {
        let stats = view.stats();
        assert_eq!(stats.processes.len(), 2, "{stats}");
        stats
            .processes
            .iter()
            .all(|process| match process.name.as_str() {
                "one" => process.state == ProcessState::NotAnswering,
                _ => process.state == ProcessState::Running,
            })
    });
    assert_eq!(other.ask("drop"), "ok");
    assert_eq!(
        other.ask("allocate 100 60000"),
        "ok",
        "the stopped process has nothing"
    );
    assert_eq!(other.ask("drop"), "ok");
    one.signal(Signal::CONT);
    assert_eq!(one.answer(), "ok");
    until("it answers", || {
        view.stats()
            .processes
            .iter()
            .all(|it| it.state == ProcessState::Running)
    });
    one.end();
    other.end();
    place.within_limit();
}

/// Cached memory of a stopped process is there for others when it goes on.
#[test]
fn a_stopped_process_gives_when_it_goes_on() {
    let place = Place::new(LIMIT, LIMIT + BEYOND);
    let (mut one, mut other) = (place.join("one"), place.join("other"));
    assert_eq!(one.ask("allocate 80 0"), "ok");
    assert_eq!(one.ask("drop"), "ok");
    one.stop();
    assert_eq!(other.ask("allocate 60 200"), "Full");
    other.tell("allocate 60 60000");
    one.signal(Signal::CONT);
    assert_eq!(other.answer(), "ok");
    one.end();
    other.end();
    place.within_limit();
}

#[test]
fn a_forked_child_that_outlives_its_parent_keeps_no_charge() {
    let place = Place::new(LIMIT, LIMIT + BEYOND);
    let (mut one, mut other) = (place.join("one"), place.join("other"));
    let view = place.view();
    assert_eq!(one.ask("allocate 80 0"), "ok");
    let child = one.ask("fork");
    let lives = || {
        let stat = std::fs::read_to_string(format!("/proc/{child}/stat"));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    };
    // It lives as long as the other end of its standard input is open.
    let input = one.keep_input();
    one.kill();
    assert_eq!(other.ask("allocate 100 60000"), "ok");
    until("the slot of the killed process is free", || {
        view.stats().processes.len() == 1
    });
    assert!(lives());
    // Its lock on the slot is in no other process's way.
    place.join("third").end();
    other.end();
    assert!(lives());
    assert_eq!((view.stats().charged, view.stats().processes.len()), (0, 0));
    drop(input);
    until("the child has ended", || !lives());
    place.within_limit();
}

#[test]
fn the_calls_of_a_forked_child_are_errors() {
    let place = Place::new(LIMIT, LIMIT + BEYOND);
    let mut one = place.join("one");
    assert_eq!(one.ask("allocate 80 0"), "ok");
    assert_eq!(one.ask("forked"), "Some(0)");
    assert_eq!(one.ask("allocate 20 0"), "ok");
    assert_eq!(place.view().stats().charged, LIMIT * G);
    one.end();
    place.within_limit();
}

/// Another program uses memory that the ledger has given out.
#[test]
fn what_the_driver_refuses_is_not_charged() {
    let place = Place::new(LIMIT, LIMIT / 2);
    let (mut one, mut other) = (place.join("one"), place.join("other"));
    assert_eq!(one.ask("allocate 60 0"), "driver");
    assert_eq!(one.ask("allocate 30 0"), "ok");
    assert_eq!(other.ask("allocate 30 0"), "driver");
    assert_eq!(other.ask("allocate 20 0"), "ok");
    assert!(place.device.counts().refused >= 2);
    let stats = place.view().stats();
    let obtained = stats.processes.iter().map(|it| it.obtained);
    assert_eq!(obtained.sum::<u64>(), 50 * G);
    one.end();
    other.end();
    assert_eq!(place.view().stats().charged, 0);
}

#[test]
fn a_dead_process_is_shown_though_no_other_is_there_to_collect_it() {
    let place = Place::new(LIMIT, LIMIT);
    let mut one = place.join("one");
    assert_eq!(one.ask("allocate 8 0"), "ok");
    let view = place.view();
    let state = || view.stats().processes[0].state;
    assert_eq!(state(), ProcessState::Running);
    one.kill();
    until("the process is shown as dead", || {
        state() == ProcessState::Dying
    });
    assert_eq!(place.files().len(), 2, "its socket is still there");
    place.join("other").end();
    assert_eq!(view.stats().processes, []);
    assert_eq!(place.files().len(), 1);
}
