//! Requests that wait for memory of other processes, what they show in the process's slot, and
//! their waiting times.
//!
//! A request's thread may be kept for long by a pressure hook or the driver. So the ledger's thread,
//! which calls no function of the program, shows signs of life for it too, until its deadline. A
//! stopped process shows none.
//!
//! Keeps I-143.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::clock;
use super::member::{Account, Member};
use super::places::{InLine, Shown};
use crate::error::LedgerError;
use crate::sync::MutexGuard;
use crate::wanted::Lacking;

/// The time after which a request that goes on waiting begins a new round.
pub(super) const ROUND: Duration = Duration::from_millis(5);

/// Rounds of a waiting request before the first process calls its tenants' hooks.
pub(super) const FIRST_TURN: u64 = 2;

/// Rounds between one process's turn and the next.
pub(super) const TURN: u64 = 10;

/// Returns `true` if a waiting request wakes other processes at the beginning of a round: the
/// first, from which on all release, and each in which a process's [turn](super::appeal) can begin.
/// In other rounds they would repeat what they have done: memory that comes meanwhile wakes them,
/// and they [look](super::keeper) by themselves for memory whose work has ended.
pub(super) const fn wakes(round: u64) -> bool {
    round == 1 || round % TURN == FIRST_TURN
}

#[derive(Debug)]
pub(crate) struct Waiting {
    member: Arc<Member>,
    place: InLine,
    /// The bytes that the request lacks.
    lacking: u64,
}

impl Waiting {
    pub(crate) const fn place(&self) -> InLine {
        self.place
    }

    pub(crate) fn renew(&mut self, bytes: u64) {
        self.lacking = bytes;
        let member = &self.member;
        if member.own_process().is_err() {
            return;
        }
        let mut account = member.account();
        let mut waiting = account.waiting.iter_mut();
        if let Some(shown) = waiting.find(|it| it.place == self.place) {
            shown.lacking = bytes;
        }
        member.wait_on(account);
    }

    /// Waits for at most `longest` until the ledger leaves as much as the request lacks, or until a
    /// thread [wakes waiting requests](Member::wake_waiting) and `ends` returns `true`. What was
    /// refunded since the [count of wake-ups](Member::wake_ups) was `seen` ends the wait at once.
    /// Returns `false` after `longest`.
    pub(crate) fn await_refund(
        &self,
        mut seen: u32,
        longest: Duration,
        ends: impl Fn() -> bool,
    ) -> bool {
        let given = &self.member.file().layout().header.given;
        let until = clock::now() + longest;
        loop {
            let count = given.count();
            // Refunds that are not enough do not end the wait, nor does what an attempt of the
            // request itself gave back.
            if count != seen && (ends() || self.member.uncharged_bytes() >= self.lacking) {
                return true;
            }
            let left = until.saturating_duration_since(clock::now());
            if left.is_zero() {
                return false;
            }
            seen = count;
            given.wait(count, left);
        }
    }

    pub(crate) fn note(&self, pool: u64, lacking: Lacking) {
        let member = &self.member;
        if member.own_process().is_ok() {
            let mut account = member.account();
            account.stalls.note(self.place.ticket, pool, lacking);
            member.find_stall(&mut account);
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let member = &self.member;
        if member.own_process().is_err() {
            return;
        }
        let now = clock::now();
        let mut account = member.account();
        member.add_stall(&mut account, now);
        account.waiting.retain(|it| it.place != self.place);
        account.stalls.end(self.place.ticket);
        member.publish(&mut account, now);
        drop(account);
        // Requests behind this one may go on.
        member.wake_waiting();
    }
}

impl Member {
    pub(super) fn oldest_ticket(&self) -> Option<u64> {
        self.account().oldest().map(|place| place.ticket)
    }

    /// Changes the guarantee, in bytes, and waits until `until` for memory that other processes
    /// have.
    pub(super) fn await_guarantee(
        self: &Arc<Self>,
        bytes: u64,
        until: Option<Instant>,
    ) -> Result<(), LedgerError> {
        let given = &self.file().layout().header.given;
        let mut waiting: Option<Waiting> = None;
        loop {
            let rung = given.count();
            let place = waiting.as_ref().map(Waiting::place);
            let outcome = self.set_guarantee_at(bytes, place);
            let left = until.map(|until| until.saturating_duration_since(clock::now()));
            let left = left.unwrap_or(Duration::MAX);
            let Err(LedgerError::Short(short)) = outcome else {
                return outcome;
            };
            if left.is_zero() || !short.reason.is_of_others() {
                return outcome;
            }
            match &mut waiting {
                Some(waiting) => waiting.renew(short.wanted),
                none => *none = Some(self.wait(self.line_up(), short.wanted, until)),
            }
            given.wait(rung, left.min(ROUND));
        }
    }

    /// Returns a place at the end of the line of all processes' requests.
    pub(crate) fn line_up(&self) -> InLine {
        let header = &self.file().layout().header;
        InLine {
            ticket: header.last_ticket.add(1).wrapping_add(1).max(1),
            since: clock::now(),
        }
    }

    /// Begins to wait for memory at a place in the [line](Self::line_up). Later new blocks of other
    /// processes are charged beyond guarantees only if they [pass](super::passing) the request, and
    /// all processes are asked to release memory. The request counts while the value lives, at most
    /// until `until`, unless the process is stopped.
    pub(crate) fn wait(
        self: &Arc<Self>,
        place: InLine,
        bytes: u64,
        until: Option<Instant>,
    ) -> Waiting {
        let header = &self.file().layout().header;
        let now = clock::now();
        let mut account = self.account();
        self.add_stall(&mut account, now);
        account.waiting.push(Shown {
            place,
            lacking: bytes,
            until,
        });
        account.stalls.begin(place.ticket, place.since);
        self.publish(&mut account, now);
        // An older request of the process keeps its round.
        if account.waiting.len() == 1 {
            self.slot().round.store(0);
            account.round_began = Some(now);
        }
        drop(account);
        header.wanted.ring();
        Waiting {
            member: Arc::clone(self),
            place,
            lacking: bytes,
        }
    }

    /// Shows other processes that this process's requests go on waiting, also while a function of the
    /// program keeps their threads.
    pub(super) fn show_waiting(&self) {
        let account = self.account();
        if !account.waiting.is_empty() {
            self.wait_on(account);
        }
    }

    /// Renews what waiting requests show, and begins a new round if it is time. Ends the wait of
    /// requests whose time is over.
    fn wait_on(&self, mut account: MutexGuard<'_, Account>) {
        let now = clock::now();
        self.add_stall(&mut account, now);
        let waits = |it: &Shown| it.until.is_none_or(|until| now < until);
        let ended: Vec<_> = account.waiting.extract_if(.., |it| !waits(it)).collect();
        for shown in &ended {
            account.stalls.end(shown.place.ticket);
        }
        self.publish(&mut account, now);
        let began = account.round_began;
        let is_time = began.is_some_and(|began| now.saturating_duration_since(began) >= ROUND);
        let round = (is_time && !account.waiting.is_empty()).then(|| {
            account.round_began = Some(now);
            self.slot().round.add(1).wrapping_add(1)
        });
        drop(account);
        if !ended.is_empty() {
            // Requests behind these may go on.
            self.wake_waiting();
        }
        if round.is_some_and(wakes) {
            self.file().layout().header.wanted.ring();
        }
    }

    fn publish(&self, account: &mut Account, now: Instant) {
        let slot = self.slot();
        self.find_stall(account);
        slot.waited.publish(account.stalls.waited(now));
        let oldest = account.oldest();
        slot.want.publish(self.granules(account.lacking()));
        slot.renewed.add(1);
        let ticket = oldest.map_or(0, |place| place.ticket);
        self.file().layout().tickets[self.index()].publish(ticket);
    }

    /// Adds the time since the last attempt to the stall times of the process, and to those of the
    /// ledger if no older request of another process waits.
    fn add_stall(&self, account: &mut Account, now: Instant) {
        let passed = account.stalls.add(now);
        if !passed.is_zero() {
            let of_ledger = !self.is_behind(account.oldest());
            let of_ledger = of_ledger.then_some(passed);
            let (layout, mut seen) = (self.file().layout(), self.seen());
            account
                .stalls
                .show(layout, self.index(), of_ledger, &mut seen);
        }
    }

    fn find_stall(&self, account: &mut Account) {
        let state = account.stalls.find(&self.givers().ids());
        self.slot().stall.publish(state.word());
    }
}
