//! Tests of groups: ranks in threads, and ranks in processes that end at each of their writes.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::time::Duration;

use super::layout::MAGIC;
use super::membership::Membership;
use super::watch::Watch;
use super::{Group, ranks};
use crate::error::{ArgumentError, GroupError, LedgerError, Undone};
use crate::ledger::lock::Lock;
use crate::ledger::{crash, proc};

/// Longer than any test runs.
const LONG: Duration = Duration::from_secs(600);

/// The environment variable with a part, its number, and the directory.
const PART: &str = "CUVMM_GROUP_PART";

fn join(directory: &Path, ranks: u32) -> Group {
    Group::join(directory, "tp0", ranks, None).unwrap()
}

/// Joins as all ranks of a group.
fn all(directory: &Path, ranks: u32) -> Vec<Group> {
    (0..ranks).map(|_| join(directory, ranks)).collect()
}

/// Runs an operation in all ranks at once.
fn together<T: Send>(
    groups: &[Group],
    act: impl Fn(&Group) -> Result<T, GroupError> + Sync,
) -> Vec<Result<T, GroupError>> {
    std::thread::scope(|scope| {
        let threads = groups.iter().map(|group| scope.spawn(|| act(group)));
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|it| it.join().unwrap()).collect()
    })
}

fn agree(group: &Group) -> Result<(), GroupError> {
    group.enter("sleep", LONG)?.ready()
}

fn undone<T>(outcome: Result<T, GroupError>) -> (u32, u32, Undone) {
    match outcome {
        Err(GroupError::Undone {
            rank, pid, cause, ..
        }) => (rank, pid, cause),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("the operation is not undone"),
    }
}

#[test]
fn all_ranks_finish_or_none() {
    let dir = tempfile::tempdir().unwrap();
    let groups = all(dir.path(), 4);
    let own = std::process::id();
    for round in 0..60 {
        let fails = round % 5;
        let outcomes = together(&groups, |group| {
            let entered = group.enter("sleep weights", LONG)?;
            match group.rank() == fails {
                true => Err(entered.fail(format_args!("no memory in round {round}"))),
                false => entered.ready(),
            }
        });
        for outcome in outcomes {
            match fails {
                4 => outcome.unwrap(),
                _ => {
                    let reason = format!("no memory in round {round}");
                    assert_eq!(undone(outcome), (fails, own, Undone::Failed(reason)));
                }
            }
        }
    }
}

#[test]
fn the_error_names_the_rank_its_process_and_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let groups = all(dir.path(), 2);
    let outcomes = together(&groups, |group| {
        let entered = group.enter("sleep weights", LONG)?;
        match group.rank() {
            1 => Err(entered.fail("line\nbreak")),
            _ => entered.ready(),
        }
    });
    let own = std::process::id();
    for outcome in outcomes {
        let text = format!(
            "group \"tp0\" has undone \"sleep weights\": rank 1 (process {own}) failed: linebreak"
        );
        assert_eq!(outcome.unwrap_err().to_string(), text);
    }
}

#[test]
fn a_rank_that_has_failed_and_left_is_named_with_its_process() {
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = <[_; 2]>::try_from(all(dir.path(), 2)).unwrap();
    let came = Barrier::new(2);
    std::thread::scope(|scope| {
        let came = &came;
        let fails = scope.spawn(move || {
            let entered = second.enter("sleep", LONG).unwrap();
            came.wait();
            drop(entered.fail("no memory"));
        });
        let entered = first.enter("sleep", LONG).unwrap();
        came.wait();
        fails.join().unwrap();
        assert_eq!(ranks(dir.path(), "tp0").unwrap()[1].pid, None);
        let expected = (1, std::process::id(), Undone::Failed("no memory".into()));
        assert_eq!(undone(entered.ready()), expected);
    });
}

/// Otherwise the process that joins could find the slot free and still locked, and be refused.
#[test]
fn a_rank_leaves_while_no_process_joins() {
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = <[_; 2]>::try_from(all(dir.path(), 2)).unwrap();
    // I-104
    let joining = Membership::lock(&first.rank.file).unwrap();
    std::thread::scope(|scope| {
        let leaves = scope.spawn(move || drop(second));
        for _ in 0..1000 {
            std::thread::yield_now();
            assert!(ranks(dir.path(), "tp0").unwrap()[1].pid.is_some());
        }
        drop(joining);
        leaves.join().unwrap();
    });
    assert_eq!(join(dir.path(), 2).rank(), 1);
}

#[test]
fn a_rank_that_gives_up_or_panics_undoes_all() {
    let dir = tempfile::tempdir().unwrap();
    let groups = all(dir.path(), 3);
    let outcomes = together(&groups, |group| {
        let entered = group.enter("sleep", LONG)?;
        if group.rank() == 2 {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let _entered = entered;
                std::panic::resume_unwind(Box::new(()));
            }));
            assert!(caught.is_err());
            return Ok(());
        }
        entered.ready()
    });
    let [first, second, third] = <[_; 3]>::try_from(outcomes).unwrap();
    assert!(third.is_ok());
    for outcome in [first, second] {
        let (rank, _, cause) = undone(outcome);
        assert!(rank == 2 && matches!(cause, Undone::Failed(_)), "{cause:?}");
    }
    assert!(together(&groups, agree).into_iter().all(|it| it.is_ok()));
}

#[test]
fn ranks_with_other_operations_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let groups = all(dir.path(), 3);
    let outcomes = together(&groups, |group| {
        let operation = if group.rank() == 1 { "wake" } else { "sleep" };
        group.enter(operation, LONG).map(drop)
    });
    let named = outcomes.into_iter().map(|outcome| match undone(outcome) {
        (rank, _, Undone::OtherOperation { operation, other }) => (rank, operation, other),
        other => panic!("{other:?}"),
    });
    let named: Vec<_> = named.collect();
    assert!(named.iter().all(|it| *it == named[0]), "{named:?}");
    let (rank, operation, other) = &named[0];
    let of = |rank: u32| if rank == 1 { "wake" } else { "sleep" };
    assert_eq!(operation, of(*rank));
    assert_ne!(of(*rank), of(*other));
    assert!(together(&groups, agree).into_iter().all(|it| it.is_ok()));
}

#[test]
fn a_late_rank_is_named_and_the_next_operation_is_for_all() {
    let dir = tempfile::tempdir().unwrap();
    let first = join(dir.path(), 3);
    let begin = |group: &Group| undone(group.enter("sleep", Duration::ZERO));
    assert_eq!(begin(&first), (1, 0, Undone::NotJoined));
    let second = join(dir.path(), 3);
    let own = std::process::id();
    assert_eq!(begin(&first), (1, own, Undone::NotCalled));
    assert_eq!(begin(&second), (0, own, Undone::NotCalled));
    let groups = [first, second, join(dir.path(), 3)];
    assert!(together(&groups, agree).into_iter().all(|it| it.is_ok()));
}

#[test]
fn a_rank_that_is_not_ready_in_time_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let groups = all(dir.path(), 2);
    let (came, over) = (Barrier::new(2), Barrier::new(2));
    let outcomes = together(&groups, |group| {
        let slow = group.rank() == 1;
        let mut entered = group.enter("sleep", LONG)?;
        came.wait();
        if slow {
            over.wait();
            assert!(!entered.is_open());
            return entered.ready();
        }
        assert!(entered.is_open());
        entered.end_time();
        let outcome = entered.ready();
        over.wait();
        outcome
    });
    let own = std::process::id();
    for outcome in outcomes {
        assert_eq!(undone(outcome), (1, own, Undone::NotReady));
    }
    assert!(together(&groups, agree).into_iter().all(|it| it.is_ok()));
}

#[test]
fn one_thread_at_a_time_is_in_an_operation_of_a_rank() {
    let dir = tempfile::tempdir().unwrap();
    let group = join(dir.path(), 1);
    let entered = group.enter("sleep", LONG).unwrap();
    assert!(matches!(
        group.enter("sleep", LONG),
        Err(GroupError::Busy { .. })
    ));
    entered.ready().unwrap();
    agree(&group).unwrap();
}

#[test]
fn joining_checks_the_name_the_number_and_the_rank() {
    let dir = tempfile::tempdir().unwrap();
    let join = |name: &str, ranks, rank| Group::join(dir.path(), name, ranks, rank);
    for name in ["", ".a", "a/b", "a b", "ä", &"a".repeat(65)] {
        assert!(
            matches!(join(name, 1, None), Err(GroupError::Name { .. })),
            "{name}"
        );
    }
    for (ranks, rank) in [(0, None), (129, None), (2, Some(2))] {
        let joined = join("a", ranks, rank);
        assert!(matches!(
            joined,
            Err(GroupError::Argument(
                ArgumentError::TooSmall { .. }
                    | ArgumentError::TooLarge { .. }
                    | ArgumentError::Zero(_)
            ))
        ));
    }
    let one = join("a", 2, Some(1)).unwrap();
    assert_eq!((one.rank(), one.ranks(), one.name()), (1, 2, "a"));
    assert!(matches!(
        join("a", 3, None),
        Err(GroupError::OtherRanks {
            ranks: 2,
            given: 3,
            ..
        })
    ));
    let own = std::process::id();
    let taken = join("a", 2, Some(1)).unwrap_err();
    let text = format!("rank 1 of group \"a\" is taken, by process {own}");
    assert_eq!(taken.to_string(), text);
    let other = join("a", 2, None).unwrap();
    assert_eq!(other.rank(), 0);
    let full = join("a", 2, None).unwrap_err();
    let text = format!("all 2 ranks of group \"a\" are taken, the last by process {own}");
    assert_eq!(full.to_string(), text);
    let _alone = join("b", 1, None).unwrap();
    let full = join("b", 1, None).unwrap_err();
    let text = format!("the only rank of group \"b\" is taken, by process {own}");
    assert_eq!(full.to_string(), text);
    // When all have gone, the file serves another group of this name.
    drop((one, other));
    let three = join("a", 3, None).unwrap();
    assert_eq!((three.rank(), three.ranks()), (0, 3));
}

#[test]
fn a_group_is_seen_from_outside() {
    let dir = tempfile::tempdir().unwrap();
    let none = ranks(dir.path(), "tp0").unwrap_err();
    assert!(matches!(
        none,
        GroupError::File(LedgerError::System { call: "open", .. })
    ));
    let group = Group::join(dir.path(), "tp0", 2, Some(1)).unwrap();
    let seen = ranks(dir.path(), "tp0").unwrap();
    let pids: Vec<_> = seen.iter().map(|it| (it.rank, it.pid)).collect();
    assert_eq!(pids, [(0, None), (1, Some(std::process::id()))]);
    assert!(!seen[1].has_ended);
    drop(group);
    assert_eq!(ranks(dir.path(), "tp0").unwrap()[1].pid, None);
}

/// Values that no rank writes, at each word of the header and of the slots in use.
#[test]
fn any_contents_of_the_file_are_an_error_or_a_decision() {
    let dir = tempfile::tempdir().unwrap();
    let groups = all(dir.path(), 2);
    let path = groups[0].path().to_owned();
    let file = fs::File::options().write(true).open(&path).unwrap();
    let words = (0..8).chain(64..64 + 40).chain(64 + 128..64 + 128 + 40);
    for word in words {
        for value in [u64::MAX, 1 << 63, 0xff_ffff, 3] {
            file.write_all_at(&u64::to_ne_bytes(value), word * 8)
                .unwrap();
            // Whichever it is, each call ends.
            together(&groups, |group| {
                let outcome = group.enter("sleep", Duration::ZERO);
                outcome.and_then(|entered| entered.ready())
            });
            let _ = ranks(dir.path(), "tp0");
            let _ = Group::join(dir.path(), "tp0", 2, None);
        }
    }
    drop(groups);
    for contents in [vec![], vec![7; 100], vec![7; size()], vec![0; size()]] {
        fs::write(&path, &contents).unwrap();
        let joined = Group::join(dir.path(), "tp0", 2, None);
        match contents.first() {
            // The contents that a machine's failure leaves.
            None | Some(0) => drop(joined.unwrap()),
            Some(_) => assert!(matches!(joined, Err(GroupError::NotAGroup { .. }))),
        }
    }
    let mut other = vec![0; size()];
    other[..8].copy_from_slice(&MAGIC.to_ne_bytes());
    other[8] = 77;
    fs::write(&path, &other).unwrap();
    let joined = Group::join(dir.path(), "tp0", 2, None);
    assert!(matches!(
        joined,
        Err(GroupError::File(LedgerError::Version { found: 77, .. }))
    ));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    let joined = Group::join(dir.path(), "tp0", 2, None);
    assert!(matches!(
        joined,
        Err(GroupError::File(LedgerError::Access { .. }))
    ));
}

const fn size() -> usize {
    size_of::<super::layout::Layout>()
}

#[test]
fn a_removed_or_truncated_file_is_found_before_an_operation_begins() {
    let dir = tempfile::tempdir().unwrap();
    let group = join(dir.path(), 1);
    fs::remove_file(group.path()).unwrap();
    let replaced = |outcome| matches!(outcome, Err(GroupError::File(LedgerError::Replaced(_))));
    assert!(replaced(agree(&group)));
    let next = join(dir.path(), 1);
    agree(&next).unwrap();
    assert!(replaced(agree(&group)), "the old file is another one");
    fs::File::options()
        .write(true)
        .open(next.path())
        .unwrap()
        .set_len(8)
        .unwrap();
    assert!(replaced(agree(&next)));
    // The slot's page is gone: leaving would end this process.
    std::mem::forget(next);
}

fn play(part: &str, number: i64, directory: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "group::tests::part", "--nocapture"])
        .env(PART, format!("{part}:{number}:{}", directory.display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until a process has printed a line.
fn said(child: &mut Child, line: &str) {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|it| it.unwrap().contains(line)), "{line}");
    // Its output goes on.
    std::mem::forget(lines);
}

/// Plays the part of a process. Does nothing when it runs as a test.
#[test]
fn part() {
    let Ok(part) = std::env::var(PART) else {
        return;
    };
    let (part, rest) = part.split_once(':').unwrap();
    let (number, directory) = rest.split_once(':').unwrap();
    let (writes, directory) = (number.parse().unwrap(), Path::new(directory));
    if part == "joins" {
        crash::after(writes);
        drop(join(directory, 3));
        crash::after(-1);
        println!("survived");
        return;
    }
    let group = Group::join(directory, "tp0", 3, Some(1)).unwrap();
    println!("joined");
    match part {
        "operates" => {
            crash::after(writes);
            let outcome = agree(&group);
            crash::after(-1);
            outcome.unwrap();
            println!("survived");
        }
        "enters" => {
            let entered = group.enter("sleep", LONG).unwrap();
            println!("entered");
            let _ = std::io::stdin().read(&mut [0]);
            drop(entered);
        }
        _ => unreachable!(),
    }
}

fn killed(child: &mut Child) {
    use std::os::unix::process::ExitStatusExt as _;
    assert_eq!(child.wait().unwrap().signal(), Some(9));
}

/// The others undo, and name the killed rank, or finish; a process takes its place.
#[test]
fn a_rank_killed_at_any_write_leaves_the_others_together() {
    let dir = tempfile::tempdir().unwrap();
    let groups = [0, 2].map(|rank| Group::join(dir.path(), "tp0", 3, Some(rank)).unwrap());
    // I-92
    let (mut undid, mut finished) = (0, 0);
    for writes in 0.. {
        assert!(writes < 400, "the operation never ends");
        let mut child = play("operates", writes, dir.path());
        let pid = child.id();
        said(&mut child, "joined");
        let outcomes = together(&groups, agree);
        let survived = child.wait().unwrap().success();
        let finish = outcomes[0].is_ok();
        for outcome in outcomes {
            match finish {
                true => outcome.unwrap(),
                false => assert_eq!(undone(outcome), (1, pid, Undone::Ended)),
            }
        }
        match finish {
            true => finished += 1,
            false => undid += 1,
        }
        if survived {
            assert!(finish);
            break;
        }
    }
    assert!(
        undid > 30,
        "{undid}: each word of the operation's text, and the steps"
    );
    assert!(finished > 0);
}

/// Until another process joins, each operation names the rank that was killed.
#[test]
fn a_killed_rank_is_named_until_its_place_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let groups = [0, 2].map(|rank| Group::join(dir.path(), "tp0", 3, Some(rank)).unwrap());
    let mut child = play("enters", 0, dir.path());
    let pid = child.id();
    said(&mut child, "joined");
    let prepared = Barrier::new(3);
    let outcomes = std::thread::scope(|scope| {
        let ranks = groups.each_ref().map(|group| {
            scope.spawn(|| {
                let entered = group.enter("sleep", LONG)?;
                prepared.wait();
                entered.ready()
            })
        });
        // The killed rank has entered too, or the others would not be here.
        prepared.wait();
        child.kill().unwrap();
        ranks.map(|it| it.join().unwrap())
    });
    killed(&mut child);
    for outcome in outcomes {
        assert_eq!(undone(outcome), (1, pid, Undone::Ended));
    }
    assert!(ranks(dir.path(), "tp0").unwrap()[1].has_ended);
    for outcome in together(&groups, agree) {
        assert_eq!(undone(outcome), (1, pid, Undone::Ended));
    }
    let [first, third] = groups;
    let groups = [first, join(dir.path(), 3), third];
    assert_eq!(groups[1].rank(), 1);
    assert!(together(&groups, agree).into_iter().all(|it| it.is_ok()));
}

/// Processes of other PID namespaces, as in containers, are known by their locks alone.
#[test]
fn a_rank_of_another_namespace_has_ended_when_its_lock_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let groups = all(dir.path(), 2);
    let second = &groups[1].rank;
    second.slot().namespace.store(proc::own_namespace() ^ 1);
    let ended = || Watch::default().ended(&groups[0].rank.file, Some(0), 2);
    assert_eq!(ended(), [false, false]);
    assert!(together(&groups, agree).into_iter().all(|it| it.is_ok()));
    Lock::Owner(1).release(second.file.file()).unwrap();
    assert_eq!(ended(), [false, true]);
    let (rank, _, cause) = undone(agree(&groups[0]));
    assert_eq!((rank, cause), (1, Undone::Ended));
}

#[test]
fn a_process_killed_while_it_joins_is_in_no_later_ones_way() {
    let dir = tempfile::tempdir().unwrap();
    for writes in 0.. {
        assert!(writes < 100, "joining never ends");
        let mut child = play("joins", writes, dir.path());
        let survived = child.wait().unwrap().success();
        // All have gone, so another number of ranks is right.
        let groups = all(dir.path(), 2);
        assert!(together(&groups, agree).into_iter().all(|it| it.is_ok()));
        if survived {
            assert!(writes > 5);
            return;
        }
    }
}

/// A run of which all ranks were killed in an operation.
#[test]
fn a_later_run_of_the_same_name_begins_anew() {
    let dir = tempfile::tempdir().unwrap();
    let groups = [0, 2].map(|rank| Group::join(dir.path(), "tp0", 3, Some(rank)).unwrap());
    let mut child = play("enters", 0, dir.path());
    said(&mut child, "joined");
    let entered = together(&groups, |group| {
        // As when the process is killed: the round stays open.
        std::mem::forget(group.enter("sleep", LONG)?);
        Ok(())
    });
    assert!(entered.into_iter().all(|it| it.is_ok()));
    child.kill().unwrap();
    killed(&mut child);
    drop(groups);
    let groups = all(dir.path(), 2);
    assert!(together(&groups, agree).into_iter().all(|it| it.is_ok()));
}
