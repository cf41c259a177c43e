//! Tests of the ledger between processes of this program: a test that needs other processes runs
//! this test program again, with a part in its environment.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use super::charge::Count;
use super::control::{self, socket_path};
use super::file::{LedgerFile, Terms};
use super::joining::Wishes;
use super::layout::{SLOTS, Slot, State};
use super::member::Member;
use super::probe::{self, Probe};
use super::proc::Life;
use super::seen::Seen;
use super::turns::Unmet;
use super::waiting::Waiting;
use super::{clock, crash, dead};
use crate::device::WeakDevice;
use crate::error::{LedgerError, LedgerRefusal, LedgerShortage};
use crate::wanted::Purpose;

pub(super) const G: u64 = 2 << 20;

/// The environment variable with the part of a child process, the number of writes after which it
/// ends or stops itself, which of the two, and the ledger's path.
const PART: &str = "CUVMM_LEDGER_TEST_PART";

/// The common limit of a child process and its parent, in granules.
pub(super) const LIMIT: u64 = 300;

pub(super) const TERMS: Terms = Terms {
    granule: G,
    device: [7; 16],
    group: false,
};

pub(super) fn wishes(limit: u64) -> Wishes {
    Wishes {
        limit: Some(limit),
        default_limit: 1024 * G,
        process_limit: 1024 * G,
        priority: 0,
        name: "test".to_owned(),
        device: WeakDevice::default(),
        lingers: Duration::ZERO,
    }
}

pub(super) fn join(path: &Path, limit: u64) -> Arc<Member> {
    Arc::new(Member::join(path.to_owned(), TERMS, &wishes(limit)).unwrap())
}

pub(super) fn directory() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory).unwrap(),
        false => tempfile::tempdir().unwrap(),
    }
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let dir = directory();
    let path = dir.path().join("ledger");
    (dir, path)
}

pub(super) fn members<const N: usize>(limit: u64) -> (tempfile::TempDir, [Arc<Member>; N]) {
    let (dir, path) = place();
    (dir, std::array::from_fn(|_| join(&path, limit)))
}

/// Says what the machine does not permit, where test output is not captured.
pub(super) fn not_tried(what: &str) {
    drop(writeln!(std::io::stderr(), "*** NOT TRIED: {what}"));
}

pub(super) fn charged(member: &Member) -> u64 {
    let charges = member.file().layout().charges.iter();
    charges.map(|it| Count::of(it.load()).charged()).sum()
}

pub(super) fn refusal(outcome: Result<u64, LedgerShortage>) -> (LedgerRefusal, u64) {
    let refused = outcome.unwrap_err();
    (refused.reason, refused.left / G)
}

/// The refusal of memory that an older request has first.
const OLDER: (LedgerRefusal, u64) = (LedgerRefusal::OlderRequest, 0);

/// Grants granules for a new block without a place in the line.
fn new(member: &Member, granules: u64) -> Result<u64, LedgerShortage> {
    member.grant(granules * G, 0, Purpose::New, None)
}

fn wait(member: &Arc<Member>, bytes: u64) -> Waiting {
    member.wait(member.line_up(), bytes, None)
}

#[test]
fn two_members_have_one_budget() {
    let (_dir, path) = place();
    let (one, other) = (join(&path, 100 * G), join(&path, 100 * G));
    assert_eq!(one.grant(3 * G, 32 * G, Purpose::New, None), Ok(32 * G));
    assert_eq!(other.grant(60 * G, 32 * G, Purpose::New, None), Ok(60 * G));
    assert_eq!(
        one.grant(5 * G, 32 * G, Purpose::New, None),
        Ok(5 * G),
        "what is asked for, of what is left"
    );
    assert_eq!(refusal(new(&other, 4)), (LedgerRefusal::Full, 3));
    assert_eq!((one.left(), other.left()), (3 * G, 3 * G));
    assert_eq!(new(&other, 3), Ok(3 * G));
    assert_eq!(charged(&one), 100);
    one.give(37 * G);
    assert_eq!((charged(&one), other.left()), (63, 37 * G));
    other.give(63 * G);
    drop((one, other));
    let third = join(&path, 7 * G);
    assert_eq!(charged(&third), 0, "and the first process sets the limit");
    assert_eq!(third.left(), 7 * G);
}

#[test]
fn a_guarantee_is_charged_in_advance_and_kept() {
    let (_dir, [one, other]) = members(100 * G);
    one.set_guarantee(60 * G).unwrap();
    assert_eq!(refusal(new(&other, 41)), (LedgerRefusal::Full, 40));
    new(&other, 40).unwrap();
    new(&one, 60).unwrap();
    one.give(60 * G);
    assert_eq!((one.trim(0), charged(&one)), (0, 100));
    assert!(matches!(
        one.set_guarantee(61 * G),
        Err(LedgerError::Short(refused)) if refused.left == 0
    ));
    assert_eq!(one.slot().guarantee.load(), 60);
    one.set_guarantee(10 * G).unwrap();
    assert_eq!((one.left(), other.left()), (60 * G, 50 * G));
    new(&other, 50).unwrap();
    other.give(90 * G);
}

#[test]
fn a_process_has_a_limit_of_its_own() {
    let (_dir, path) = place();
    let own = Wishes {
        process_limit: 10 * G,
        ..wishes(100 * G)
    };
    let member = Arc::new(Member::join(path, TERMS, &own).unwrap());
    new(&member, 8).unwrap();
    assert_eq!(
        refusal(new(&member, 3)),
        (LedgerRefusal::ProcessLimit, 2),
        "it has 8"
    );
    member.give(8 * G);
}

#[test]
fn requests_that_came_later_wait_for_an_older_one_until_that_shows_no_sign_of_life() {
    let (_dir, [one, other]) = members(100 * G);
    let mut waiting = wait(&one, 200 * G);
    assert_eq!(one.slot().want.load(), 200);
    assert_eq!(refusal(new(&other, 1)), (LedgerRefusal::OlderRequest, 0));
    let behind = wait(&other, 100 * G);
    assert_eq!(refusal(new(&other, 1)), (LedgerRefusal::OlderRequest, 0));
    one.grant(G, 0, Purpose::New, Some(waiting.place()))
        .unwrap();
    // A later request of the same process has no part in the place of the first.
    assert_eq!(refusal(new(&one, 1)), (LedgerRefusal::OlderRequest, 0));
    // Existing blocks grow, by no more than they need.
    assert_eq!(other.grant(2 * G, 32 * G, Purpose::Growth, None), Ok(2 * G));
    assert_eq!(
        refusal(other.grant(98 * G, 0, Purpose::Growth, None)),
        (LedgerRefusal::Full, 97)
    );
    other.give(2 * G);
    waiting.renew(150 * G);
    assert_eq!(one.slot().want.load(), 150);
    assert_eq!(refusal(new(&other, 1)), (LedgerRefusal::OlderRequest, 0));
    // A stopped process does not renew.
    std::thread::sleep(Duration::from_millis(120));
    new(&other, 1).unwrap();
    drop(behind);
    drop(waiting);
    let layout = one.file().layout();
    let ticket = &layout.tickets[one.index()];
    assert_eq!((ticket.load(), one.slot().want.load()), (0, 0));
    one.give(G);
    other.give(G);
}

/// The example of a large request that waits: others get what it leaves of the limit.
#[test]
fn a_later_request_passes_if_the_older_one_waits_for_no_memory_of_its() {
    let (_dir, members) = members(1024 * G);
    let [a, b, c, d] = &members;
    new(a, 600).unwrap();
    let waiting = wait(b, 900 * G);
    assert_eq!(c.left(), 124 * G);
    new(c, 10).unwrap();
    assert_eq!(c.left(), 114 * G);
    assert_eq!(refusal(new(c, 120)), OLDER);
    assert_eq!(refusal(new(d, 115)), OLDER, "what others had counts");
    // Refused granules do not count, and released ones no longer do.
    new(d, 114).unwrap();
    assert_eq!(refusal(new(c, 1)), OLDER);
    d.give(100 * G);
    new(c, 100).unwrap();
    // Growth is excepted, and earlier memory does not count.
    a.grant(20 * G, 0, Purpose::Growth, None).unwrap();
    a.give(20 * G);
    assert_eq!(refusal(new(a, 1)), OLDER);
    a.give(500 * G);
    assert_eq!(refusal(new(a, 1)), OLDER);
    a.give(100 * G);
    let place = Some(waiting.place());
    b.grant(900 * G, 0, Purpose::New, place).unwrap();
    drop(waiting);
    assert_eq!(refusal(new(c, 1)).0, LedgerRefusal::Full);
    for (member, granules) in [(b, 900), (c, 110), (d, 14)] {
        member.give(granules * G);
    }
}

/// Each older request counts, with what its own process and the guarantees of others keep.
#[test]
fn a_later_request_passes_all_older_ones_or_none() {
    let (_dir, members) = members(100 * G);
    let [a, b, c, d] = &members;
    a.set_guarantee(10 * G).unwrap();
    new(a, 60).unwrap();
    new(b, 5).unwrap();
    let first = wait(b, 50 * G);
    new(d, 5).unwrap();
    let second = wait(c, 80 * G);
    // The first request leaves 35, of which 5 are taken. The second leaves 10.
    assert_eq!(d.left(), 10 * G);
    assert_eq!(refusal(new(d, 11)), OLDER);
    let mut third = wait(d, 12 * G);
    let place = Some(third.place());
    assert_eq!(refusal(d.grant(12 * G, 0, Purpose::New, place)), OLDER);
    drop(second);
    // Memory that passed while only the first request waited counts for it alone.
    d.grant(12 * G, 0, Purpose::New, place).unwrap();
    third.renew(0);
    drop(third);
    assert_eq!(d.left(), 18 * G);
    drop(first);
    new(d, 1).unwrap();
    // Earlier memory does not count for a request.
    let again = wait(b, 40 * G);
    assert_eq!(d.left(), 17 * G, "of 45, there are no more");
    new(d, 17).unwrap();
    d.give(35 * G);
    new(d, 30).unwrap();
    // A guarantee never waits, and takes what passed.
    d.set_guarantee(20 * G).unwrap();
    assert_eq!(d.left(), 5 * G);
    drop(again);
    a.set_guarantee(0).unwrap();
    d.set_guarantee(0).unwrap();
    for (member, granules) in [(a, 60), (b, 5), (d, 30)] {
        member.give(granules * G);
    }
}

/// Memory that is enough for an older request belongs to it, whatever the bound leaves.
#[test]
fn a_later_request_takes_nothing_that_serves_an_older_one() {
    let (_dir, members) = members(100 * G);
    let [a, b, c, d] = &members;
    new(a, 60).unwrap();
    new(c, 20).unwrap();
    let waiting = wait(b, 30 * G);
    assert_eq!(c.left(), 20 * G, "too little for the older one");
    let asked = c.grant(5 * G, 10 * G, Purpose::New, None);
    assert_eq!(asked, Ok(5 * G), "no more than what is asked for");
    a.give(15 * G);
    assert_eq!(c.left(), 0);
    assert_eq!(refusal(new(c, 1)), OLDER);
    a.give(5 * G);
    assert_eq!(c.left(), 5 * G);
    assert_eq!(refusal(new(d, 6)), OLDER);
    new(d, 5).unwrap();
    b.grant(30 * G, 0, Purpose::New, Some(waiting.place()))
        .unwrap();
    drop(waiting);
    for (member, granules) in [(a, 40), (b, 30), (c, 25), (d, 5)] {
        member.give(granules * G);
    }
    // The first request leaves less than the second.
    new(d, 50).unwrap();
    let waiting = [wait(a, 90 * G), wait(b, 10 * G)];
    assert_eq!(c.left(), 10 * G);
    assert_eq!(refusal(new(c, 11)), OLDER);
    new(c, 10).unwrap();
    drop(waiting);
    c.give(10 * G);
    d.give(50 * G);
    // Memory of others cannot serve a request if its own process has too much.
    new(b, 80).unwrap();
    let waiting = wait(b, 30 * G);
    assert_eq!(c.left(), 20 * G);
    new(c, 20).unwrap();
    drop(waiting);
    b.give(80 * G);
    c.give(20 * G);
}

/// The memory left beside a request depends only on what its own process has and on what came after
/// it.
#[test]
fn a_later_request_passes_one_by_what_came_after_it() {
    let (_dir, members) = members(100 * G);
    let [a, b, c] = &members;
    new(a, 40).unwrap();
    let waiting = wait(b, 90 * G);
    new(c, 10).unwrap();
    assert_eq!(c.left(), 0);
    drop(waiting);
    let waiting = wait(b, 70 * G);
    assert_eq!(
        c.left(),
        30 * G,
        "what c had before counts for the first alone"
    );
    new(c, 10).unwrap();
    assert_eq!(c.left(), 20 * G);
    drop(waiting);
    c.give(20 * G);
    new(b, 10).unwrap();
    let waiting = wait(b, 60 * G);
    assert_eq!(c.left(), 30 * G, "b keeps 10");
    new(c, 30).unwrap();
    drop(waiting);
    for (member, granules) in [(a, 40), (b, 10), (c, 30)] {
        member.give(granules * G);
    }
}

#[test]
fn opening_checks_the_file() {
    let (dir, path) = place();
    let member = join(&path, 100 * G);
    let open = |terms: Terms, limit: u64| {
        Member::join(path.clone(), terms, &wishes(limit))
            .map(drop)
            .unwrap_err()
    };
    assert!(matches!(
        open(TERMS, 99 * G),
        LedgerError::OtherLimit { limit, required, .. } if (limit, required) == (100 * G, 99 * G)
    ));
    let granule = Terms {
        granule: 4 * G,
        ..TERMS
    };
    assert!(matches!(
        open(granule, 100 * G),
        LedgerError::NotALedger { .. }
    ));
    let device = Terms {
        device: [8; 16],
        ..TERMS
    };
    assert!(matches!(
        open(device, 100 * G),
        LedgerError::NotALedger { .. }
    ));
    let group = Terms {
        group: true,
        ..TERMS
    };
    assert!(matches!(
        open(group, 100 * G),
        LedgerError::Access { mode: 0o600, .. }
    ));
    let own = rustix::process::geteuid().as_raw();
    match std::os::unix::fs::chown(&path, Some(4321), None) {
        Ok(()) => assert!(matches!(
            open(TERMS, 100 * G),
            LedgerError::Access { uid: 4321, .. }
        )),
        Err(error) => not_tried(&format!("a ledger of another user: {error}")),
    }
    std::os::unix::fs::chown(&path, Some(own), None).unwrap();
    member.file().layout().header.version.store(9);
    assert!(matches!(
        open(TERMS, 100 * G),
        LedgerError::Version { found: 9, .. }
    ));
    member.file().layout().header.magic.store(1);
    assert!(matches!(
        open(TERMS, 100 * G),
        LedgerError::NotALedger { .. }
    ));
    drop(member);
    let other = dir.path().join("other");
    for contents in [&b"too short"[..], &[1; 66 << 10]] {
        std::fs::write(&other, contents).unwrap();
        std::fs::set_permissions(&other, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        let refused = Member::join(other.clone(), TERMS, &wishes(100 * G)).unwrap_err();
        assert!(
            matches!(refused, LedgerError::NotALedger { .. }),
            "{refused}"
        );
    }
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&other, &link).unwrap();
    let refused = Member::join(link, TERMS, &wishes(100 * G)).unwrap_err();
    assert!(
        matches!(refused, LedgerError::NotALedger { .. }),
        "{refused}"
    );
}

/// Files that a failed machine has left without contents.
#[test]
fn a_file_that_lost_its_contents_is_made_anew() {
    let (_dir, path) = place();
    drop(join(&path, 100 * G));
    let zeros = vec![0; usize::try_from(super::layout::SIZE).unwrap()];
    for contents in [&zeros[..], &[]] {
        std::fs::write(&path, contents).unwrap();
        let member = join(&path, 50 * G);
        new(&member, 50).unwrap();
        member.give(50 * G);
    }
}

#[test]
fn a_new_file_has_its_mode_and_no_other_file_is_left() {
    use std::os::unix::fs::PermissionsExt as _;
    let (dir, path) = place();
    let group = Terms {
        group: true,
        ..TERMS
    };
    let member = Member::join(path.clone(), group, &wishes(100 * G)).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o660);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    drop(member);
}

#[test]
fn the_limit_of_a_process_is_shown_as_it_holds() {
    let (_dir, path) = place();
    let member = join(&path, 100 * G);
    let shown = || crate::LedgerView::open(&path).unwrap().stats().processes[0].limit;
    assert_eq!(shown(), 100 * G, "the ledger's");
    member.set_limit(40 * G).unwrap();
    assert_eq!(shown(), 40 * G);
}

#[test]
fn no_more_is_charged_once_the_file_is_gone() {
    let (_dir, path) = place();
    let member = join(&path, 100 * G);
    member.grant(G, 32 * G, Purpose::New, None).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(refusal(new(&member, 1)), (LedgerRefusal::Replaced, 0));
    let other = join(&path, 100 * G);
    assert_eq!(refusal(new(&member, 1)), (LedgerRefusal::Replaced, 0));
    drop(other);
    member.give(32 * G);
}

#[test]
fn no_more_is_charged_to_a_file_that_was_shortened() {
    let (_dir, path) = place();
    let member = join(&path, 100 * G);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(super::layout::SIZE - 1).unwrap();
    assert_eq!(refusal(new(&member, 1)), (LedgerRefusal::Replaced, 0));
    file.set_len(super::layout::SIZE).unwrap();
    new(&member, 1).unwrap();
    member.give(G);
}

/// The ledger's thread looks at the path. Each charge looks at the open file alone.
#[test]
fn no_more_is_charged_once_the_thread_has_seen_that_the_file_was_moved() {
    let (dir, path) = place();
    let member = join(&path, 100 * G);
    let moved = dir.path().join("moved");
    std::fs::rename(&path, &moved).unwrap();
    member.look_for_file();
    assert_eq!(refusal(new(&member, 1)), (LedgerRefusal::Replaced, 0));
    std::fs::rename(&moved, &path).unwrap();
    member.look_for_file();
    new(&member, 1).unwrap();
    member.give(G);
}

#[test]
fn all_slots_can_be_taken_and_no_more() {
    let (_dir, path) = place();
    let members: Vec<_> = (0..SLOTS).map(|_| join(&path, 1000 * G)).collect();
    let refused = Member::join(path.clone(), TERMS, &wishes(1000 * G)).unwrap_err();
    assert!(matches!(refused, LedgerError::Full { slots: SLOTS, .. }));
    drop(members);
    join(&path, 1000 * G);
}

/// Values that no owner would write cause no panic.
#[test]
fn any_contents_are_survived() {
    let (_dir, [one, other]) = members(100 * G);
    let mut random = fastrand::Rng::with_seed(16);
    for _ in 0..2_000 {
        let layout = one.file().layout();
        let value = match random.u8(..4) {
            0 => u64::MAX,
            1 => random.u64(..200),
            2 => 1 << random.u32(..64),
            _ => random.u64(..),
        };
        let slot = &layout.slots[random.usize(..4)];
        match random.u8(..12) {
            0 => layout.header.agreed.store(value),
            1 => layout.header.last_ticket.store(value),
            2 => layout.charges[random.usize(..4)].store(value),
            3 => slot.state.store(value),
            4 => slot.limit.store(value),
            5 => slot.guarantee.store(value),
            6 => slot.pid.store(value),
            7 => layout.tickets[random.usize(..4)].store(value),
            8 => slot.want.store(value),
            9 => slot.pid_namespace.store(value),
            10 => slot.priority.store(value),
            _ => slot.name[random.usize(..8)].store(value),
        }
        let granted = one.grant(random.u64(..50) * G, 0, Purpose::New, None);
        let _ = granted.map(|bytes| one.give(bytes));
        let _ = other.set_guarantee(random.u64(..10) * G);
        let _ = one.trim(0);
        let stats = super::stats::stats(one.file(), Some(one.index()), &mut Seen::default());
        assert!(!stats.to_string().contains('\0'));
    }
    // The charge of a process may be wrong now; no memory is.
    one.give(one.used());
}

/// The parts of processes that die at one of their writes.
const PARTS: &[&str] = &[
    "join",
    "take",
    "give",
    "guarantee",
    "wait",
    "collect",
    "leave",
    "race",
];

/// A clock that stands still until a test sets it.
pub(super) struct Clock(std::cell::Cell<Instant>);

impl Probe for Clock {
    fn reached(&self, _: usize, _: bool) -> bool {
        true
    }

    fn locks(&self) -> bool {
        true
    }

    fn found(&self, _: u64) {}

    fn wrote(&self, _: usize, _: u64) {}

    fn mapped(&self, _: usize) {}

    fn now(&self) -> Instant {
        self.0.get()
    }

    fn sleep(&self, duration: Duration) {
        self.0.set(self.0.get() + duration);
    }

    fn wait(&self, _: usize, _: u32, _: Duration) {}

    fn pid(&self) -> u32 {
        std::process::id()
    }
}

/// Stops the time of this thread.
pub(super) fn stop_time() -> Rc<Clock> {
    let clock = Rc::new(Clock(std::cell::Cell::new(Instant::now())));
    probe::set(Some(clock.clone()));
    clock
}

fn serve(member: &Arc<Member>) {
    let served = control::start(member, Arc::default()).unwrap();
    member.served.get_or_init(|| served);
}

/// Returns `true` if this kernel, or the process of a slot, gives a pidfd.
fn meets(own: &Member, other: usize, generation: u64, seen: &mut Seen) -> bool {
    let until = Instant::now() + Duration::from_secs(20);
    let is_held = |seen: &Seen| seen.pidfds.known(other, generation) == Some(Life::Runs);
    while !is_held(seen) && Instant::now() < until {
        clock::sleep(Duration::from_secs(2));
        assert!(!dead::collect(own.file(), Some(own.index()), seen));
        std::thread::sleep(Duration::from_millis(1));
    }
    is_held(seen)
}

/// A living process of another namespace that has lost its lock is never taken for ended.
#[test]
fn a_process_of_another_namespace_that_was_met_keeps_its_charge_while_it_lives() {
    let (_dir, [one, other]) = members(100 * G);
    new(&one, 50).unwrap();
    one.slot().pid_namespace.store(1);
    serve(&one);
    let time = stop_time();
    let mut seen = Seen::default();
    assert!(meets(&other, one.index(), one.generation(), &mut seen));
    super::lock::Lock::Owner(one.index())
        .release(one.file().file())
        .unwrap();
    for _ in 0..5 {
        assert!(!dead::collect(other.file(), Some(other.index()), &mut seen));
        time.sleep(Duration::from_secs(60));
    }
    assert_eq!((one.slot().state().0, charged(&other)), (State::Live, 50));
    // A member that cannot meet the process cannot tell.
    one.served.get().unwrap().close();
    let mut unmet = Seen::default();
    let mut collect = || dead::collect(other.file(), Some(other.index()), &mut unmet);
    assert!(collect());
    time.sleep(Duration::from_secs(2));
    assert!(!collect());
    assert_eq!(charged(&other), 0);
    probe::set(None);
    one.give(50 * G);
}

/// Starts a process that plays a part in a PID namespace of its own; `None` if that is not
/// permitted.
fn play_apart(part: &str, path: &Path) -> Option<Child> {
    let own = ["--pid", "--fork", "--kill-child"];
    let mapped = ["--user", "--map-current-user"];
    [&[&mapped[..], &own].concat(), &own[..]]
        .into_iter()
        .find_map(|arguments| {
            let mut unshare = Command::new("unshare");
            unshare.args(arguments).stderr(Stdio::null());
            let is_permitted = unshare.arg("true").status().is_ok_and(|it| it.success());
            is_permitted.then(|| {
                let child = Command::new("unshare")
                    .args(arguments)
                    .arg(std::env::current_exe().unwrap())
                    .args(["--exact", "ledger::tests::child", "--nocapture"])
                    .env(PART, format!("{part}:0::{}", path.display()))
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .spawn();
                child.unwrap()
            })
        })
}

/// The collecting process's clock stands still: no slot becomes free because time has passed.
#[test]
fn a_killed_process_of_another_pid_namespace_is_known_to_have_ended() {
    let (_dir, path) = place();
    let own = join(&path, LIMIT * G);
    let Some(mut child) = play_apart("serve", &path) else {
        not_tried("a ledger in another PID namespace, which this process may not make");
        return;
    };
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("serves")));
    let slots = || own.file().layout().slots.iter().enumerate();
    let other = slots().find(|&(index, it)| index != own.index() && it.state().0 == State::Live);
    let (index, slot) = other.unwrap();
    assert_ne!(slot.pid_namespace.load(), own.slot().pid_namespace.load());
    let generation = slot.state().1;
    let mut seen = Seen::default();
    stop_time();
    assert!(meets(&own, index, generation, &mut seen));
    stop_time();
    assert!(!dead::collect(own.file(), Some(own.index()), &mut seen));
    assert_eq!(
        (slot.state(), charged(&own)),
        ((State::Live, generation), 40)
    );
    child.kill().unwrap();
    child.wait().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while slot.state().0 != State::Free && Instant::now() < until {
        dead::collect(own.file(), Some(own.index()), &mut seen);
        std::thread::sleep(Duration::from_millis(1));
    }
    probe::set(None);
    assert_eq!(slot.state(), (State::Free, generation + 1));
    assert_eq!(charged(&own), 0);
    assert!(!socket_path(own.file(), index, generation).exists());
}

/// Plays the part of a child process. Does nothing when it runs as a test.
#[test]
fn child() {
    let Ok(part) = std::env::var(PART) else {
        return;
    };
    let mut words = part.splitn(4, ':');
    let mut word = || words.next().unwrap();
    let (part, writes, how, path) = (word(), word().parse().unwrap(), word(), word());
    let path = Path::new(path);
    // A process that joins collects what dead processes left.
    let joins = ["join", "collect"].contains(&part);
    match how {
        "stop" => crash::stop_after(writes),
        _ if joins => crash::after(writes),
        _ => {}
    }
    let joined = Member::join(path.to_owned(), TERMS, &wishes(LIMIT * G));
    if let Err(LedgerError::OtherLimit { limit, .. }) = joined {
        println!("left, for the limit is {limit}");
        std::process::exit(0);
    }
    let member = Arc::new(joined.unwrap());
    if how == "stop" {
        crash::after(-1);
    }
    new(&member, 40).unwrap();
    if !joins && part != "serve" {
        crash::after(writes);
    }
    match part {
        "join" | "collect" | "leave" => member.give(40 * G),
        "take" => drop(new(&member, 100).unwrap()),
        // Until it is killed.
        "serve" => {
            serve(&member);
            println!("serves");
            loop {
                std::thread::park();
            }
        }
        "give" => {
            member.give(40 * G);
            member.trim(0);
        }
        "guarantee" => {
            member.set_guarantee(90 * G).unwrap();
            member.set_guarantee(10 * G).unwrap();
        }
        "wait" => {
            let mut waiting = wait(&member, 9 * G);
            waiting.renew(8 * G);
            new(&member, 9).unwrap();
        }
        // Another process charges at the same time.
        "race" => {
            let charges = &member.file().layout().charges;
            let other = charges
                .iter()
                .position(|it| Count::of(it.load()).total() == 0);
            charges[other.unwrap()].store(299 << 24);
            crash::after(writes);
            // The process takes the other for stopped after a while.
            new(&member, 30).unwrap();
        }
        _ => unreachable!(),
    }
    if part == "leave" {
        drop(member);
    }
    // A process that was to die at a later write is done.
    println!("left {}", crash::left());
    crash::after(-1);
    std::process::exit(0);
}

fn play(part: &str, writes: u32, how: &str, path: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ledger::tests::child", "--nocapture"])
        .env(PART, format!("{part}:{writes}:{how}:{}", path.display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap()
}

/// Runs a child process. Returns `false` if it made all of its writes.
fn dies(part: &str, writes: u32, path: &Path) -> bool {
    let child = play(part, writes, "end", path);
    let child = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&child.stdout).contains("left");
    let killed = child.status.signal() == Some(9);
    assert!(
        said != killed && (killed || child.status.success()),
        "{part}, {writes}: {child:?}"
    );
    !said
}

/// Waits until no slot but `own` is taken.
pub(super) fn collected(own: &Member, seen: &mut Seen) -> bool {
    let until = Instant::now() + Duration::from_secs(20);
    let slots = || own.file().layout().slots.iter().enumerate();
    let others = || slots().filter(|&(index, _)| index != own.index());
    let is_left = || others().any(|(_, slot)| slot.state().0 != State::Free);
    while dead::collect(own.file(), Some(own.index()), seen) || is_left() {
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Makes the sockets that dead processes would have left. Returns their paths.
fn leave_sockets(path: &Path) -> Vec<PathBuf> {
    let file = LedgerFile::look(path.to_owned()).unwrap();
    let slots = file.layout().slots.iter().enumerate();
    let taken = slots.filter(|(_, slot)| slot.state().0 != State::Free);
    let socket = |(index, slot): (_, &Slot)| socket_path(&file, index, slot.state().1);
    let sockets: Vec<PathBuf> = taken.map(socket).collect();
    for socket in &sockets {
        std::fs::write(socket, []).unwrap();
    }
    sockets
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_process_that_dies_at_any_write_leaves_its_memory_to_others() {
    for part in PARTS {
        let dir = directory();
        let path = dir.path().join("ledger");
        let (mut writes, mut sockets) = (0, Vec::new());
        loop {
            if *part == "collect" {
                assert!(dies("take", 1, &path));
                sockets = leave_sockets(&path);
                assert_eq!(sockets.len(), 1);
            }
            let died = dies(part, writes, &path);
            let member = join(&path, LIMIT * G);
            // The other process of the race was none.
            for (index, charge) in member.file().layout().charges.iter().enumerate() {
                if index != member.index() && *part == "race" {
                    super::charge::discard(charge, Count::of(charge.load()));
                }
            }
            assert!(collected(&member, &mut Seen::default()), "{part}, {writes}");
            assert!(!sockets.iter().any(|it| it.exists()), "{part}, {writes}");
            assert_eq!(charged(&member), 0, "{part}, {writes}");
            member.grant(LIMIT * G, 0, Purpose::New, None).unwrap();
            assert_eq!(charged(&member), LIMIT);
            member.give(LIMIT * G);
            drop(member);
            if !died {
                break;
            }
            writes += 1;
        }
        assert!(writes >= 2, "{part} did {writes} writes");
    }
}

/// Waits until a child process has stopped itself. Returns `false` if it ended.
fn stops(child: &Child) -> bool {
    let which = WaitId::Pid(Pid::from_child(child));
    let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    waitid(which, options).unwrap().unwrap().stopped()
}

/// Resumes a child process that has stopped itself. Returns its output.
fn resume(mut child: Child) -> String {
    child.stdin.take().unwrap().write_all(&[1]).unwrap();
    kill_process(Pid::from_child(&child), Signal::CONT).unwrap();
    let child = child.wait_with_output().unwrap();
    assert!(child.status.success(), "{child:?}");
    String::from_utf8(child.stdout).unwrap()
}

/// Stops a process at each step of joining, and runs `during` meanwhile. Returns the number of
/// stops.
fn at_each_step(prepare: impl Fn(&Path), during: impl Fn(&Path, Child)) -> u32 {
    let mut step = 0;
    loop {
        let dir = directory();
        let path = dir.path().join("ledger");
        prepare(&path);
        let child = play("join", step, "stop", &path);
        if !stops(&child) {
            let ended = child.wait_with_output().unwrap();
            assert!(ended.status.success(), "{ended:?}");
            return step;
        }
        during(&path, child);
        let last = join(&path, LIMIT * G);
        assert!(collected(&last, &mut Seen::default()), "{step}");
        assert_eq!(charged(&last), 0, "{step}");
        step += 1;
    }
}

// I-72
#[test]
fn a_process_that_stops_while_it_joins_delays_no_other() {
    let during = |path: &Path, child| {
        let member = join(path, LIMIT * G);
        let mut seen = Seen::default();
        while dead::collect(member.file(), Some(member.index()), &mut seen) {
            std::thread::sleep(Duration::from_millis(1));
        }
        member.grant(LIMIT * G, 0, Purpose::New, None).unwrap();
        assert_eq!(charged(&member), LIMIT);
        member.give(LIMIT * G);
        member.trim(0);
        assert!(resume(child).contains("left"));
    };
    let first = at_each_step(|_| {}, during);
    // Both collect what a dead process left.
    let later = at_each_step(|path| assert!(dies("take", 1, path)), during);
    assert!(first > 40 && later > first - 6, "{first}, {later}");
}

/// While no process has joined, the limit is that of the first process that does.
#[test]
fn a_process_that_stops_while_it_joins_has_the_limit_of_the_others_or_they_have_its_own() {
    let other = LIMIT * G / 2;
    let outcomes = std::cell::Cell::new((0, 0));
    let steps = at_each_step(
        |_| {},
        |path, child| {
            let joined = Member::join(path.to_owned(), TERMS, &wishes(other));
            let (first, later) = outcomes.get();
            match joined {
                Ok(member) => {
                    assert_eq!(member.file().layout().header.limit(), other / G);
                    let said = resume(child);
                    assert!(said.contains(&format!("the limit is {other}")), "{said}");
                    drop(member);
                    outcomes.set((first + 1, later));
                }
                Err(LedgerError::OtherLimit { limit, .. }) => {
                    assert_eq!(limit, LIMIT * G);
                    let said = resume(child);
                    assert!(!said.contains("the limit is"), "{said}");
                    outcomes.set((first, later + 1));
                }
                Err(error) => panic!("{error}"),
            }
        },
    );
    let (first, later) = outcomes.get();
    assert!(
        first > 40 && later > 0 && first + later == steps,
        "{first}, {later}"
    );
}

/// A killed process's memory counts until the process has ended, although its lock is free.
#[test]
fn a_process_that_lost_its_lock_and_lives_keeps_its_charge() {
    let (_dir, [one, other]) = members(100 * G);
    new(&one, 50).unwrap();
    super::lock::Lock::Owner(one.index())
        .release(one.file().file())
        .unwrap();
    let mut seen = Seen::default();
    for _ in 0..3 {
        assert!(!dead::collect(other.file(), Some(other.index()), &mut seen));
        assert_eq!(one.slot().state().0, State::Live);
        assert_eq!(refusal(new(&other, 51)), (LedgerRefusal::Full, 50));
    }
    // A process of that number would have another start time.
    one.slot().started.store(1);
    let mut seen = Seen::default();
    assert!(!dead::collect(other.file(), Some(other.index()), &mut seen));
    new(&other, 100).unwrap();
    other.give(100 * G);
    one.give(50 * G);
}

/// A request that goes on waiting costs other processes little, and a new request is served at
/// once.
#[test]
fn a_request_that_goes_on_waiting_is_no_reason_to_hurry() {
    let (_dir, [one, other]) = members(100 * G);
    new(&one, 100).unwrap();
    let mut keeper = super::keeper::Keeper::quiet(&one);
    let (first, longest) = (Duration::from_micros(100), Duration::from_millis(20));
    let time = stop_time();
    let mut waiting = wait(&other, G);
    assert_eq!(keeper.pass(&one), first);
    let mut renewed = || {
        time.sleep(longest);
        waiting.renew(G);
        keeper.pass(&one)
    };
    let naps: Vec<_> = (0..10).map(|_| renewed()).collect();
    assert!(naps.is_sorted(), "{naps:?}");
    assert_eq!(naps.last(), Some(&longest));
    one.wake_keeper();
    assert_eq!((renewed(), renewed()), (first, 2 * first));
    drop(waiting);
    let _another = wait(&other, G);
    assert_eq!(keeper.pass(&one), first);
    probe::set(None);
    one.give(100 * G);
}

/// A request waits until its memory is mapped. Meanwhile hooks of other processes would be called for
/// memory that it has.
#[test]
fn a_request_that_was_granted_its_memory_lacks_it_no_more() {
    let (_dir, [one, other]) = members(100 * G);
    new(&one, 100).unwrap();
    let mut first = wait(&other, 20 * G);
    let _second = wait(&other, 5 * G);
    let need = || Unmet::of(&one).need;
    assert_eq!(need(), 25);
    one.give(30 * G);
    assert_eq!(need(), 0);
    let place = Some(first.place());
    other.grant(20 * G, 0, Purpose::New, place).unwrap();
    assert_eq!((need(), other.slot().want.load()), (0, 5));
    // The attempt fails later and gives it back.
    other.give(20 * G);
    first.renew(40 * G);
    assert_eq!((need(), other.slot().want.load()), (15, 45));
    one.give(70 * G);
}

/// Processes are woken in the rounds in which they have something new to do, and the waiting
/// process looks for dead ones meanwhile.
#[test]
fn a_request_that_waits_wakes_others_when_they_have_something_to_do() {
    let (_dir, [one, other]) = members(100 * G);
    new(&one, 100).unwrap();
    let mut keeper = super::keeper::Keeper::quiet(&other);
    assert_eq!(keeper.pass(&other), Duration::from_secs(1));
    let bell = &other.file().layout().header.wanted;
    let time = stop_time();
    let before = bell.count();
    let mut waiting = wait(&other, G);
    assert_eq!(bell.count() - before, 1, "at once");
    assert_eq!(keeper.pass(&other), Duration::from_millis(5));
    let rings = (1..=24).map(|_| {
        time.sleep(Duration::from_millis(5));
        let before = bell.count();
        waiting.renew(G);
        waiting.renew(G);
        bell.count() - before
    });
    let rings: Vec<u32> = rings.collect();
    let rung = (1..=24).zip(&rings).filter(|&(_, &rings)| rings == 1);
    let rounds: Vec<u32> = rung.map(|(round, _)| round).collect();
    assert_eq!(rounds, [1, 2, 12, 22]);
    assert_eq!(
        (rings.iter().sum::<u32>(), other.slot().round.load()),
        (4, 24)
    );
    drop(waiting);
    assert_eq!(keeper.pass(&other), Duration::from_secs(1));
    probe::set(None);
    one.give(100 * G);
}

// I-71
/// A process that was stopped while it collected a slot goes on when the slot has a new owner.
#[test]
fn a_late_collector_takes_nothing_from_a_new_owner() {
    let (_dir, path) = place();
    let (one, other) = (join(&path, 100 * G), join(&path, 100 * G));
    let (index, found) = (other.index(), other.slot().state());
    drop(other);
    let other = join(&path, 100 * G);
    assert_eq!(other.index(), index);
    other.set_guarantee(40 * G).unwrap();
    let waiting = wait(&other, G);
    let dying = (State::Dying, found.1);
    assert!(!other.slot().replace_state(found, dying));
    dead::free(one.file(), index, other.slot(), dying);
    assert_eq!(other.slot().state(), (State::Live, found.1 + 1));
    assert_eq!((charged(&one), other.slot().guarantee.load()), (40, 40));
    assert!(Seen::default().is_waiting(one.file().layout(), index));
    drop(waiting);
}

/// A process that could not read when it started is not taken for another of its number.
#[test]
fn a_process_whose_start_is_unknown_is_not_collected_while_it_lives() {
    let (_dir, [one, other]) = members(100 * G);
    new(&one, 50).unwrap();
    one.slot().started.store(0);
    let mut seen = Seen::default();
    assert!(!dead::collect(other.file(), Some(other.index()), &mut seen));
    assert_eq!((one.slot().state().0, charged(&other)), (State::Live, 50));
    one.give(50 * G);
}

/// A process in another PID namespace cannot be looked up.
#[test]
fn a_slot_of_another_namespace_is_free_two_seconds_after_its_lock() {
    let (_dir, [one, other]) = members(100 * G);
    new(&one, 50).unwrap();
    one.slot().pid_namespace.store(1);
    let mut seen = Seen::default();
    assert!(
        !dead::collect(other.file(), Some(other.index()), &mut seen),
        "it is locked"
    );
    super::lock::Lock::Owner(one.index())
        .release(one.file().file())
        .unwrap();
    let begun = Instant::now();
    while dead::collect(other.file(), Some(other.index()), &mut seen) {
        assert!(begun.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(begun.elapsed() >= Duration::from_secs(2));
    assert_eq!(charged(&other), 0);
    one.give(50 * G);
}

#[test]
fn memory_of_an_ended_process_counts_while_the_driver_may_have_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger");
    let one = join(&path, 100 * G);
    let mut child = Command::new("true").spawn().unwrap();
    let layout = one.file().layout();
    let (slot, pid) = (&layout.slots[5], u64::from(child.id()));
    child.wait().unwrap();
    for (charged, lingers) in [(0, 60_000), (1, 0), (1, 150)] {
        slot.pid.store(pid);
        slot.pid_namespace.store(super::proc::own_namespace());
        layout.charges[5].store(charged);
        slot.lingers.store(lingers);
        let generation = slot.state().1;
        slot.set_state(State::Live, generation);
        let begun = Instant::now();
        let mut seen = Seen::default();
        let mut passes = 0;
        while dead::collect(one.file(), Some(one.index()), &mut seen) {
            assert_eq!(slot.state(), (State::Dying, generation));
            assert!(begun.elapsed() < Duration::from_secs(20));
            passes += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(slot.state(), (State::Free, generation + 1));
        assert_eq!(Count::of(layout.charges[5].load()).charged(), 0);
        match charged.min(lingers) {
            0 => assert_eq!(passes, 0),
            _ => assert!(begun.elapsed() >= Duration::from_millis(lingers)),
        }
    }
}
