//! A member that follows a script, as a process with one pool would.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::ghost::{Export, LINGERS};
use super::world::{Handle, Inner};
use crate::device::WeakDevice;
use crate::error::{LedgerError, LedgerShortage};
use crate::ledger::charge::Count;
use crate::ledger::control::PoolReport;
use crate::ledger::file::Terms;
use crate::ledger::givers::Giver;
use crate::ledger::joining::Wishes;
use crate::ledger::keeper::Keeper;
use crate::ledger::member::{Member, NamedExport};
use crate::ledger::waiting::Waiting;
use crate::ledger::{Hook, clock};
use crate::wanted::{Change, Purpose};

/// In bytes.
pub(super) const G: u64 = 2 << 20;

const POLL: Duration = Duration::from_millis(15);

const LONG: Duration = Duration::from_secs(2);

/// A step of a script. Sizes in granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Join,
    /// Opens the ledger with a limit, which may be refused.
    JoinUnder(u64),
    Take(u64),
    /// Allocates; must succeed.
    MustTake(u64),
    /// Charges without the protocol.
    TakeUnchecked(u64),
    Give(u64),
    /// Frees memory, which stays cached until another process needs it.
    Cache(u64),
    /// Allocates, and waits at most these milliseconds.
    Await(u64, u64),
    /// Allocates, and waits for memory that must come.
    MustAwait(u64),
    /// Waits until a request of another process waits, allocates past it, and keeps the memory
    /// until none waits.
    TakeBehind(u64),
    Guarantee(u64),
    Export(u64),
    /// Frees the oldest export.
    Lend,
    /// Imports the oldest export of another process.
    Import,
    Release,
    /// Makes one pass of the ledger's thread.
    Pass,
    Leave,
    Die,
}

pub(super) fn wishes(limit: u64) -> Wishes {
    Wishes {
        limit: Some(limit * G),
        default_limit: limit * G,
        process_limit: limit * G,
        priority: 0,
        name: "m".to_owned(),
        device: WeakDevice::default(),
        lingers: LINGERS,
    }
}

pub(super) const TERMS: Terms = Terms {
    granule: G,
    device: [7; 16],
    group: false,
};

struct Cache {
    member: Weak<Member>,
    granules: Mutex<u64>,
    others_lack: AtomicBool,
    thread: usize,
    world: Arc<super::world::World>,
}

impl Cache {
    fn take(&self, most: u64) -> u64 {
        let mut granules = self.granules.lock().unwrap();
        let taken = most.min(*granules);
        *granules -= taken;
        taken
    }
}

impl Giver for Cache {
    fn idle(&self) -> u64 {
        *self.granules.lock().unwrap() * G
    }

    fn give_back(&self, bytes: u64) {
        let granules = self.take(bytes.div_ceil(G));
        if let Some(member) = self.member.upgrade().filter(|_| granules > 0) {
            self.world.lock().memory(self.thread).members[self.thread].has -= granules;
            member.note_released(granules * G);
            member.give(granules * G);
        }
    }

    fn read_driver_memory(&self) {}

    fn give_unneeded(&self) {}

    fn leave_idle_to_others(&self, yes: bool) {
        self.others_lack.store(yes, Ordering::SeqCst);
    }

    fn next_hook(&self, _: u64, _: &str, _: &[u64]) -> Option<(u64, Hook)> {
        None
    }

    fn report(&self) -> PoolReport {
        PoolReport::default()
    }

    fn change(&self, _: &str, _: Change) -> Option<Result<u64, String>> {
        None
    }
}

struct Joined {
    named: Vec<(u64, NamedExport)>,
    waiting: Option<Waiting>,
    keeper: Keeper,
    giver: (u64, Arc<Cache>),
    member: Arc<Member>,
}

pub(super) struct Actor {
    handle: std::rc::Rc<Handle>,
    path: PathBuf,
    limit: u64,
    joined: Option<Joined>,
}

impl Actor {
    pub(super) fn new(handle: &std::rc::Rc<Handle>, path: PathBuf, limit: u64) -> Self {
        Self {
            handle: std::rc::Rc::clone(handle),
            path,
            limit,
            joined: None,
        }
    }

    fn world(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.handle.world.lock()
    }

    fn ghost<R>(&self, change: impl FnOnce(&mut super::ghost::Member) -> R) -> R {
        change(&mut self.world().memory(self.handle.me).members[self.handle.me])
    }

    fn fail(&self, text: String) {
        let me = self.handle.me;
        self.world().fail(format!("{me}: {text}"));
    }

    fn joined(&mut self) -> &mut Joined {
        self.joined.as_mut().expect("it has joined")
    }

    fn member(&self) -> &Arc<Member> {
        &self.joined.as_ref().expect("it has joined").member
    }

    pub(super) fn act(&mut self, op: Op) {
        let me = self.handle.me;
        self.world().note(format!("{me}: {op:?}"));
        if !matches!(op, Op::Join | Op::JoinUnder(_)) && self.joined.is_none() {
            return;
        }
        match op {
            Op::Join => self.join(self.limit),
            Op::JoinUnder(limit) => self.join(limit),
            Op::Take(granules) => drop(self.take(granules)),
            Op::MustTake(granules) => {
                if let Err(refused) = self.take(granules) {
                    self.fail(format!("{granules} granules are refused: {refused:?}"));
                }
            }
            Op::TakeUnchecked(granules) => self.take_unchecked(granules),
            Op::Give(granules) => self.give(granules),
            Op::Cache(granules) => {
                let cached = granules.min(self.free());
                *self.joined().giver.1.granules.lock().unwrap() += cached;
            }
            Op::Await(granules, most) => {
                self.wait(granules, Duration::from_millis(most));
            }
            Op::MustAwait(granules) => {
                if !self.wait(granules, LONG) {
                    self.fail(format!("{granules} granules never come"));
                }
            }
            Op::TakeBehind(granules) => self.take_behind(granules),
            Op::Guarantee(granules) => self.guarantee(granules),
            Op::Export(granules) => self.export(granules),
            Op::Lend => self.lend(),
            Op::Import => self.import(),
            Op::Release => self.release(),
            Op::Pass => self.pass(),
            Op::Leave => self.leave(),
            Op::Die => self.handle.be_killed(),
        }
    }

    fn join(&mut self, limit: u64) {
        if self.joined.is_some() {
            return;
        }
        let member = match Member::join(self.path.clone(), TERMS, &wishes(limit)) {
            Ok(member) => Arc::new(member),
            Err(LedgerError::OtherLimit { limit: found, .. })
                if limit != self.limit && found != limit * G =>
            {
                return;
            }
            Err(error) => return self.fail(format!("it cannot join: {error}")),
        };
        self.ghost(|it| (it.slot, it.limit) = (Some(member.index()), Some(limit)));
        let cache = Arc::new(Cache {
            member: Arc::downgrade(&member),
            granules: Mutex::new(0),
            others_lack: AtomicBool::new(false),
            thread: self.handle.me,
            world: Arc::clone(&self.handle.world),
        });
        let weak = Arc::downgrade(&cache);
        self.joined = Some(Joined {
            named: Vec::new(),
            waiting: None,
            keeper: Keeper::quiet(&member),
            giver: (member.givers().attach(weak), cache),
            member,
        });
    }

    /// Returns the granules that are neither exported nor cached.
    fn free(&self) -> u64 {
        let cached = self.joined.as_ref().map_or(0, |it| it.giver.1.idle() / G);
        self.ghost(|it| it.has) - cached
    }

    fn take(&mut self, granules: u64) -> Result<(), LedgerShortage> {
        let place = self.joined().waiting.as_ref().map(Waiting::place);
        if self.joined().giver.1.others_lack.load(Ordering::SeqCst) {
            let (has, free) = (self.ghost(|it| it.has), self.free());
            let owed = self
                .member()
                .owes(granules * G, has * G, place, || free * G);
            owed.map_or(Ok(()), Err)?;
        }
        // Cached memory is used first.
        let cached = self.joined().giver.1.take(granules);
        let rest = granules - cached;
        if rest == 0 {
            return Ok(());
        }
        match self.member().grant(rest * G, 0, Purpose::New, place) {
            Ok(granted) => {
                if granted != rest * G {
                    self.fail(format!("{granted} bytes are granted for {rest} granules"));
                }
                self.member().note_created(rest * G);
                self.ghost(|it| it.has += rest);
                Ok(())
            }
            Err(refused) => {
                *self.joined().giver.1.granules.lock().unwrap() += cached;
                Err(refused)
            }
        }
    }

    fn take_unchecked(&self, granules: u64) {
        let layout = self.member().file().layout();
        let counts = layout.charges.iter().map(|it| Count::of(it.load()));
        if counts.map(Count::charged).sum::<u64>() + granules <= layout.header.limit() {
            let own = &layout.charges[self.member().index()];
            let after = Count::of(own.load()).next(granules, 0);
            own.store(after.unwrap_or_default());
        }
    }

    fn give(&mut self, granules: u64) {
        let given = granules.min(self.free());
        if given > 0 {
            self.ghost(|it| it.has -= given);
            self.member().note_released(given * G);
            self.member().give(given * G);
        }
    }

    /// Returns `true` if the memory came or the request was canceled.
    fn wait(&mut self, granules: u64, most: Duration) -> bool {
        let me = self.handle.me;
        let begun = clock::now();
        self.world().awaits(me, true);
        let outcome = loop {
            match self.take(granules) {
                Ok(()) => break true,
                Err(refused) if !refused.reason.is_of_others() => break false,
                Err(_) => {}
            }
            if self.world().is_cancelled(me) {
                break true;
            }
            if clock::since(begun) > most {
                break false;
            }
            let joined = self.joined();
            match &mut joined.waiting {
                Some(waiting) => waiting.renew(granules * G),
                none => {
                    *none = Some(
                        joined
                            .member
                            .wait(joined.member.line_up(), granules * G, None),
                    )
                }
            }
            self.pass();
            clock::sleep(POLL);
        };
        self.joined().waiting = None;
        self.world().awaits(me, false);
        outcome
    }

    fn take_behind(&mut self, granules: u64) {
        let is_behind = |it: &Self| !it.member().older(None).is_empty();
        let begun = clock::now();
        while !is_behind(self) && clock::since(begun) < LONG {
            clock::sleep(POLL);
        }
        let _ = self.take(granules);
        while is_behind(self) {
            self.pass();
            clock::sleep(POLL);
        }
    }

    fn guarantee(&mut self, granules: u64) {
        let before = self.ghost(|it| it.guarantee);
        self.ghost(|it| it.guarantee = before.min(granules));
        let set = self.member().set_guarantee(granules * G);
        self.ghost(|it| it.guarantee = if set.is_ok() { granules } else { before });
    }

    fn export(&mut self, granules: u64) {
        let granules = granules.min(self.free());
        if granules == 0 {
            return;
        }
        let me = self.handle.me;
        match self.member().export(None, granules * G) {
            Some(id) => {
                let slot = self.member().index();
                let mut world = self.world();
                world.ghost.members[me].has -= granules;
                world.ghost.exports.push(Export {
                    owner: me,
                    slot,
                    granules,
                    id,
                    is_owned: true,
                    is_free: false,
                    holders: Vec::new(),
                });
            }
            None => self.fail("no entry is free".into()),
        }
    }

    fn find(&self, which: impl Fn(&Export) -> bool) -> Option<(u64, u64)> {
        let world = self.world();
        let mut exports = world.ghost.exports.iter();
        let found = exports.find(|it| which(it));
        found.map(|it| (it.id, it.granules))
    }

    fn change(&self, id: u64, change: impl FnOnce(&mut Export)) {
        let mut world = self.world();
        let mut exports = world.memory(self.handle.me).exports.iter_mut();
        change(exports.find(|it| it.id == id).expect("it is an export"));
    }

    fn lend(&mut self) {
        let me = self.handle.me;
        let Some((id, granules)) = self.find(|it| it.owner == me && it.is_owned) else {
            return;
        };
        self.change(id, |it| it.is_owned = false);
        if !self.member().lend(&[id], granules * G) {
            self.change(id, |it| it.is_free = true);
            self.member().note_released(granules * G);
            self.member().give(granules * G);
        }
    }

    fn import(&mut self) {
        let me = self.handle.me;
        let is_new = |it: &Export| it.owner != me && !it.holders.contains(&me);
        let Some((id, _)) = self.find(is_new) else {
            return;
        };
        match self.member().name(id) {
            Some(named) => {
                self.change(id, |it| it.holders.push(me));
                self.joined().named.push((id, named));
            }
            None => {
                let mut world = self.world();
                let mut exports = world.ghost.exports.iter();
                let is_there =
                    exports.any(|it| it.id == id && it.is_owned && world.is_here(it.owner));
                if is_there {
                    world.fail(format!("{me}: a block is refused that its owner has"));
                }
            }
        }
    }

    fn release(&mut self) {
        let me = self.handle.me;
        if let Some((id, named)) = self.joined().named.pop() {
            self.change(id, |it| it.holders.retain(|&it| it != me));
            drop(named);
        }
    }

    fn pass(&mut self) {
        let joined = self.joined();
        joined.keeper.pass(&joined.member);
    }

    pub(super) fn leave(&mut self) {
        while self.joined.as_ref().is_some_and(|it| !it.named.is_empty()) {
            self.release();
        }
        let me = self.handle.me;
        while self.joined.is_some() && self.find(|it| it.owner == me && it.is_owned).is_some() {
            self.lend();
        }
        if self.joined.is_some() {
            let joined = self.joined();
            joined.waiting = None;
            joined.giver.1.take(u64::MAX);
            self.give(u64::MAX);
            self.ghost(|it| (it.slot, it.limit, it.guarantee) = (None, None, 0));
            self.joined = None;
        }
    }

    /// Drops what a killed process had, without a write.
    pub(super) fn vanish(mut self) {
        if let Some(joined) = self.joined.take() {
            let member = Arc::clone(&joined.member);
            if self.world().end_of(self.handle.me) == Some(super::schedule::End::Forked) {
                let file = member.file().file().try_clone().unwrap();
                self.world().kept.push(file);
            }
            drop(joined);
            // Otherwise the file would stay open, as in a living process.
            member.give(member.used());
        }
    }
}
