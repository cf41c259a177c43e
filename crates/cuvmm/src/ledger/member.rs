//! The process's own slot in a ledger, and what it is charged.
//!
//! Pools are granted bytes and return them. The charge is never less than what was granted to the
//! pools, and never less than the guarantee, which is charged in advance.

mod leaving;
mod lending;
mod terms;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use self::lending::{Lent, Named, Offers};
pub(crate) use self::lending::{NamedExport, OpenOffer};
use super::charge::{self, Attempt, Count};
use super::clock;
use super::control::Served;
use super::file::{LedgerFile, Terms};
use super::foreign::Foreign;
use super::givers::{Givers, Offer};
use super::joining::{self, Wishes};
use super::layout::{SLOTS, Slot};
use super::passing::{self, Older};
use super::places::{InLine, Shown};
use super::seen::{Seen, What};
use super::stall::Stalls;
use super::stats::GivenStats;
use crate::error::{ArgumentError, CallError, LedgerError, LedgerRefusal, LedgerShortage};
use crate::fork::OpeningProcess;
use crate::size::Granularity;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard};
use crate::wanted::Purpose;

/// Checks a process's limit: at least a granule and at least the guarantee. All sizes in bytes.
pub(super) fn check_limit(limit: u64, guarantee: u64, granule: u64) -> Result<(), ArgumentError> {
    ArgumentError::at_least("bytes of a process's limit", limit, granule)?;
    let what = "bytes of a process's limit, which is at least its guarantee";
    ArgumentError::at_least(what, limit, guarantee)
}

/// How long a charge retries while other processes charge at the same time.
const LONGEST_CONTENTION: Duration = Duration::from_millis(50);

/// How long another process's tentative granules may stay unchanged before they are removed.
const TENTATIVE_AGE: Duration = Duration::from_millis(10);

/// A process's membership in a ledger. Its drop leaves the ledger.
#[derive(Debug)]
pub(crate) struct Member {
    file: Arc<LedgerFile>,
    index: usize,
    generation: u64,
    granule: Granularity,
    foreign: Foreign,
    opened_by: OpeningProcess,
    account: Mutex<Account>,
    /// Values of other processes' slots, as this process's threads last saw them.
    seen: Mutex<Seen>,
    givers: Givers,
    named: Mutex<Named>,
    /// `true` if a pool has freed memory, while another process waits for memory, since the
    /// ledger's thread last looked.
    pub(super) has_freed: AtomicBool,
    /// Held while idle memory is released for other processes.
    giving: Mutex<()>,
    /// The socket for requests of other programs, if the process allows any.
    pub(super) served: OnceLock<Served>,
    /// The ledger's thread, once it has started.
    pub(super) keeper: OnceLock<ThreadId>,
    /// Held by the ledger's thread while it has a handle.
    pub(super) passing: Arc<Mutex<()>>,
    has_left: AtomicBool,
    /// `true` if the file was not at its path when the ledger's thread last looked.
    moved: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct Account {
    used: u64,
    /// Memory that pools have released and other processes still have.
    lent: Lent,
    offers: Offers,
    /// In granules.
    pub(super) guarantee: u64,
    /// Bytes that the pools have from the driver, and lent bytes.
    obtained: u64,
    /// Counts grants, to notice that the process is idle.
    grants: u64,
    pub(super) waiting: Vec<Shown>,
    /// When the last round of the waiting requests began.
    pub(super) round_began: Option<Instant>,
    pub(super) stalls: Stalls,
    given: GivenStats,
}

impl Account {
    pub(super) fn oldest(&self) -> Option<InLine> {
        self.waiting.iter().map(|it| it.place).min()
    }

    fn note_granted(&mut self, place: InLine, granted: u64) {
        let mut waiting = self.waiting.iter_mut();
        if let Some(shown) = waiting.find(|it| it.place == place) {
            shown.lacking = shown.lacking.saturating_sub(granted);
        }
    }

    /// Returns the bytes that all waiting requests lack.
    pub(super) fn lacking(&self) -> u64 {
        let lacking = self.waiting.iter().map(|it| it.lacking);
        lacking.fold(0, u64::saturating_add)
    }

    pub(super) fn needed(&self) -> u64 {
        self.used.saturating_add(self.lent.bytes())
    }
}

impl Member {
    pub(super) fn join(path: PathBuf, terms: Terms, wishes: &Wishes) -> Result<Self, LedgerError> {
        let granule = Granularity::new(terms.granule).ok_or(ArgumentError::NotPowerOfTwo {
            what: "bytes of a granule",
            value: terms.granule,
        })?;
        let file = LedgerFile::open(path, terms)?;
        let (index, generation) = joining::take_slot(&file, granule, wishes)?;
        Ok(Self {
            file: Arc::new(file),
            index,
            generation,
            granule,
            foreign: Foreign::of(wishes.device.clone()),
            opened_by: OpeningProcess::new(),
            account: Mutex::default(),
            seen: Mutex::default(),
            givers: Givers::default(),
            named: Mutex::default(),
            has_freed: AtomicBool::new(false),
            giving: Mutex::default(),
            served: OnceLock::new(),
            keeper: OnceLock::new(),
            passing: Arc::default(),
            has_left: AtomicBool::new(false),
            moved: AtomicBool::new(false),
        })
    }

    pub(super) const fn file(&self) -> &Arc<LedgerFile> {
        &self.file
    }

    pub(super) const fn index(&self) -> usize {
        self.index
    }

    pub(super) const fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn slot(&self) -> &Slot {
        &self.file.layout().slots[self.index]
    }

    pub(crate) const fn givers(&self) -> &Givers {
        &self.givers
    }

    pub(super) const fn granule(&self) -> Granularity {
        self.granule
    }

    pub(super) fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn giving(&self) -> MutexGuard<'_, ()> {
        self.giving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn named(&self) -> MutexGuard<'_, Named> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses in a forked child, which is no member.
    pub(super) fn own_process(&self) -> Result<(), CallError> {
        match self.opened_by.is_here() {
            true => Ok(()),
            false => Err(CallError::Forked {
                opened_by: self.opened_by.id(),
            }),
        }
    }

    fn count(&self) -> Count {
        Count::of(self.file.layout().charges[self.index].load())
    }

    /// Grants a pool `bytes`, or up to `least` if that is more and as much is left, for a request
    /// at `place`, if it has one. Returns the granted bytes.
    pub(crate) fn grant(
        &self,
        bytes: u64,
        least: u64,
        purpose: Purpose,
        place: Option<InLine>,
    ) -> Result<u64, LedgerShortage> {
        if self.own_process().is_err() {
            return Err(self.shortage(self.granules(bytes), 0, LedgerRefusal::Replaced));
        }
        let mut account = self.account();
        let needed = account.needed();
        let turn = (purpose, place);
        let most = self.charge_to(needed.saturating_add(bytes), least, turn)?;
        let granted = most.saturating_sub(needed).min(bytes.max(least));
        account.used = account.used.saturating_add(granted);
        account.grants = account.grants.wrapping_add(1);
        if let Some(place) = place {
            // The request counts as waiting until its memory is mapped: other processes would call
            // their hooks for it once more.
            account.note_granted(place, granted);
            self.slot().want.publish(self.granules(account.lacking()));
        }
        Ok(granted)
    }

    pub(crate) fn give(&self, bytes: u64) {
        if self.own_process().is_err() {
            return;
        }
        let mut account = self.account();
        debug_assert!(bytes <= account.used, "more is given back than was granted");
        account.used = account.used.saturating_sub(bytes);
        self.refund(&account, 0);
    }

    pub(crate) fn note_created(&self, bytes: u64) {
        let mut account = self.account();
        account.obtained = account.obtained.saturating_add(bytes);
        self.slot().obtained.store(account.obtained);
    }

    pub(crate) fn note_released(&self, bytes: u64) {
        let mut account = self.account();
        account.obtained = account.obtained.saturating_sub(bytes);
        self.slot().obtained.store(account.obtained);
    }

    /// Replaces the bytes that a pool's memory pools of the driver held `before` by those that they
    /// hold `now`.
    pub(crate) fn note_read(&self, before: u64, now: u64) {
        if before == now {
            return;
        }
        let mut account = self.account();
        account.obtained = account.obtained.saturating_sub(before).saturating_add(now);
        self.slot().obtained.store(account.obtained);
        drop(account);
        self.foreign.expire();
    }

    /// Returns the bytes that this process's pools could be granted beyond what they need.
    pub(crate) fn left(&self) -> u64 {
        self.left_with(|_| 0)
    }

    /// Returns the bytes that this process's pools could be granted beyond what they need if other
    /// processes released what they last found idle above their guarantees, about once a second. An
    /// older request of another process has that first: while one waits, it does not count.
    pub(crate) fn left_with_idle(&self) -> u64 {
        self.left_with(|older| {
            let offers = Offer::all(self.file.layout());
            let others = offers.filter(|it| it.index != self.index && older.is_empty());
            others.map(|offer| offer.idle).sum()
        })
    }

    /// Returns what is [left](Self::left) once other processes have released granules, which `comes`
    /// counts from the older requests of other processes.
    fn left_with(&self, comes: impl FnOnce(&[Older]) -> u64) -> u64 {
        if self.own_process().is_err() {
            return 0;
        }
        let account = self.account();
        let (layout, limit) = (self.file.layout(), self.limit_now());
        let older = self.older(None);
        let left = self.uncharged_after(comes(&older));
        let left = left.saturating_sub(passing::owed_to(layout, &older, limit));
        let left = left.min(passing::left_behind(layout, &older, limit));
        let charged = self.count().charged().saturating_add(left);
        let charged = charged.saturating_mul(self.granule.bytes());
        charged.saturating_sub(account.needed())
    }

    /// Returns the granules that no process is charged, within this process's own limit.
    fn uncharged(&self) -> u64 {
        self.uncharged_after(0)
    }

    /// Returns the granules that are [uncharged](Self::uncharged) once other processes have released
    /// some.
    fn uncharged_after(&self, released: u64) -> u64 {
        let charges = self.file.layout().charges.iter();
        let charged: u64 = charges.map(|it| Count::of(it.load()).total()).sum();
        let own = self.slot().limit.load();
        let charged = charged.saturating_sub(released);
        let left = self.limit_now().saturating_sub(charged);
        left.min(own.saturating_sub(self.count().charged()))
    }

    pub(super) fn uncharged_bytes(&self) -> u64 {
        self.uncharged().saturating_mul(self.granule.bytes())
    }

    /// Returns how often waiting requests of all processes were woken: a process refunded memory.
    pub(crate) fn wake_ups(&self) -> u32 {
        self.file.layout().header.given.count()
    }

    /// Wakes the requests of all processes that [wait](super::waiting::Waiting::await_refund).
    pub(crate) fn wake_waiting(&self) {
        self.file.layout().header.given.ring();
    }

    pub(super) fn grants(&self) -> u64 {
        self.account().grants
    }

    /// Refunds all but `keep` bytes of what the pools do not need. Returns the refunded granules.
    pub(super) fn trim(&self, keep: u64) -> u64 {
        let account = self.account();
        self.refund(&account, self.granules(keep))
    }

    /// Looks whether the file is still at its path, for the charges that follow.
    pub(super) fn look_for_file(&self) {
        let moved = !self.file.is_in_place();
        self.moved.store(moved, Ordering::Relaxed);
    }

    pub(super) fn note_given(&self, granules: u64, took: Duration) {
        let given = &mut self.account().given;
        given.times += 1;
        given.bytes = given
            .bytes
            .saturating_add(granules.saturating_mul(self.granule.bytes()));
        given.took = given.took.saturating_add(took);
    }

    pub(super) fn given(&self) -> GivenStats {
        self.account().given
    }

    pub(super) fn used(&self) -> u64 {
        self.account().used
    }

    pub(super) fn unneeded(&self) -> u64 {
        self.surplus(&self.account())
    }

    pub(super) fn idle_bytes(&self) -> u64 {
        let mut idle = self.unneeded().saturating_mul(self.granule.bytes());
        self.givers
            .each(|giver| idle = idle.saturating_add(giver.idle()));
        idle
    }

    pub(super) fn granules(&self, bytes: u64) -> u64 {
        let granule = self.granule.bytes();
        bytes / granule + u64::from(!bytes.is_multiple_of(granule))
    }

    /// Returns the charged granules that no pool has and no guarantee keeps.
    fn surplus(&self, account: &Account) -> u64 {
        let needed = self.granules(account.needed()).max(account.guarantee);
        self.count().charged().saturating_sub(needed)
    }

    /// Both `keep` and the refund are in granules.
    fn refund(&self, account: &Account, keep: u64) -> u64 {
        let surplus = self.surplus(account).saturating_sub(keep);
        let layout = self.file.layout();
        let refunded = match surplus {
            0 => 0,
            surplus => charge::refund(&layout.charges[self.index], surplus),
        };
        let above = self.count().charged().saturating_sub(account.guarantee);
        passing::settle(self.slot(), above);
        if surplus > 0 {
            self.wake_waiting();
        }
        refunded
    }

    /// Charges the process until the charge covers `bytes`. Charges at least `least` bytes if that
    /// is more, they are left, and no request of another process waits for them. Returns the bytes
    /// charged in total. The caller has locked the account, so a process makes one charge at a
    /// time.
    fn charge_to(
        &self,
        bytes: u64,
        least: u64,
        (purpose, place): (Purpose, Option<InLine>),
    ) -> Result<u64, LedgerShortage> {
        let charged = || self.count().charged().saturating_mul(self.granule.bytes());
        let needed = self.granules(bytes);
        let Some(missing) = needed
            .checked_sub(self.count().charged())
            .filter(|&missing| missing > 0)
        else {
            return Ok(charged());
        };
        let refused = |reason, left: u64| self.shortage(missing, left, reason);
        if self.moved.load(Ordering::Relaxed) || !self.file.is_whole() {
            return Err(refused(LedgerRefusal::Replaced, 0));
        }
        let most = self.slot().limit.load();
        if needed > most {
            let left = most.saturating_sub(self.count().charged());
            return Err(refused(LedgerRefusal::ProcessLimit, left));
        }
        let (layout, older) = (self.file.layout(), self.older(place));
        let (passing, least) = match (older.is_empty(), purpose) {
            (true, _) => (None, least),
            (false, Purpose::Growth) => (None, 0),
            (false, Purpose::New) => {
                match passing::pass(layout, self.slot(), &older, missing, self.limit_now()) {
                    Some(passing) => (Some(passing), 0),
                    None => return Err(refused(LedgerRefusal::OlderRequest, 0)),
                }
            }
        };
        let grant = missing
            .max(self.granules(least))
            .min(most.saturating_sub(self.count().charged()));
        let owed = || match &passing {
            Some(_) => passing::owed_to(layout, &older, self.limit_now()),
            None => 0,
        };
        let outcome = match self.charge(grant, owed) {
            Err((LedgerRefusal::Full | LedgerRefusal::Foreign, left))
                if left >= missing && grant > missing =>
            {
                self.charge(missing, owed)
            }
            Err((LedgerRefusal::Full, _)) if owed() > 0 => Err((LedgerRefusal::OlderRequest, 0)),
            outcome => outcome,
        };
        if let Some(passing) = passing {
            passing.end(outcome.is_ok());
        }
        let outcome = outcome.map_err(|(reason, left)| refused(reason, left));
        outcome.map(|()| charged())
    }

    /// Charges granules while the limit leaves `owed` granules besides, and tries again while other
    /// processes charge too. Fails with the reason and the granules that are left.
    fn charge(&self, granules: u64, owed: impl Fn() -> u64) -> Result<(), (LedgerRefusal, u64)> {
        let layout = self.file.layout();
        if !self.foreign.is_measured() {
            self.foreign_is_less();
        }
        let mut until = None;
        let mut pause = Duration::from_micros(1);
        loop {
            let limit = || self.limit_now().saturating_sub(owed());
            match charge::attempt(&layout.charges, self.index, granules, limit) {
                Attempt::Charged => return Ok(()),
                // If foreign memory leaves the whole limit, less foreign memory would not help.
                Attempt::Full { .. }
                    if self.limit_now() < layout.header.limit() && self.foreign_is_less() => {}
                Attempt::Full { left } => {
                    let agreed = layout.header.limit();
                    let kept = agreed.saturating_sub(self.limit_now());
                    return Err(match left.saturating_add(kept) >= granules && kept > 0 {
                        true => (LedgerRefusal::Foreign, left),
                        false => (LedgerRefusal::Full, left),
                    });
                }
                Attempt::Contended => {
                    let now = clock::now();
                    if now > *until.get_or_insert(now + LONGEST_CONTENTION) {
                        return Err((LedgerRefusal::Contended, 0));
                    }
                    self.discard_stale();
                    // Processes that collided wait for different times.
                    clock::sleep(pause.mul_f64(1.0 + self.index as f64 / SLOTS as f64));
                    pause = (2 * pause).min(Duration::from_millis(1));
                }
            }
        }
    }

    /// Returns the most bytes that the process may be charged: its own limit, or the ledger's if that is
    /// less.
    pub(crate) fn limit(&self) -> u64 {
        let granules = self.file.layout().header.limit();
        let granules = granules.min(self.slot().limit.load());
        granules.saturating_mul(self.granule.bytes())
    }

    /// Returns the granules that all processes may be charged: the limit, or what the device leaves
    /// if that is less.
    pub(super) fn limit_now(&self) -> u64 {
        let agreed = self.file.layout().header.limit();
        agreed.min(self.foreign.last() / self.granule.bytes())
    }

    /// Measures foreign memory, unless this process has no pool: then the device may have no
    /// context, and asking would create one. Returns `true` if foreign memory has become less.
    pub(super) fn foreign_is_less(&self) -> bool {
        if self.givers.are_none() {
            return false;
        }
        let before = self.foreign.last();
        before < self.foreign.measure(self.file.layout(), self.slot())
    }

    /// Removes other processes' tentative granules that have not changed for [`TENTATIVE_AGE`].
    fn discard_stale(&self) {
        let mut seen = self.seen();
        for (index, word) in self.file.layout().charges.iter().enumerate() {
            let found = word.load();
            let count = Count::of(found);
            if index == self.index || count.tentative() == 0 {
                seen.forget(What::Charge, index);
            } else if seen.age(What::Charge, index, found) >= TENTATIVE_AGE {
                charge::discard(word, count);
            }
        }
    }

    /// Returns the waiting requests of other processes that are older than `place`, or all if there
    /// is no place; the oldest first.
    pub(super) fn older(&self, place: Option<InLine>) -> Vec<Older> {
        let own = place.map_or(u64::MAX, |it| it.ticket);
        let layout = self.file.layout();
        let is_waiting = |index| self.seen().is_waiting(layout, index);
        passing::older(layout, self.index, own, is_waiting)
    }

    pub(super) fn is_behind(&self, place: Option<InLine>) -> bool {
        !self.older(place).is_empty()
    }

    pub(super) fn shortage(
        &self,
        missing: u64,
        left: u64,
        reason: LedgerRefusal,
    ) -> LedgerShortage {
        let bytes = |granules: u64| granules.saturating_mul(self.granule.bytes());
        LedgerShortage {
            wanted: bytes(missing),
            left: bytes(left),
            limit: bytes(self.file.layout().header.limit()),
            held: bytes(self.count().charged()),
            reason,
        }
    }
}
