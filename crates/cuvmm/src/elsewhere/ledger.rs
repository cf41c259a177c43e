//! A ledger's types without values, with the operations that a pool calls.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::error::LedgerShortage;
use crate::wanted::{Lacking, Purpose};

/// A ledger, of which there is none.
#[derive(Clone, Debug)]
pub(crate) enum Ledger {}

impl Ledger {
    pub(crate) const fn member(&self) -> &Arc<Member> {
        match *self {}
    }

    pub(crate) const fn device(&self) -> [u8; 16] {
        match *self {}
    }
}

/// The pools that a ledger calls.
pub(crate) enum Givers {}

impl Givers {
    pub(crate) fn attach<T>(&self, _: Weak<T>) -> u64 {
        match *self {}
    }

    pub(crate) const fn detach(&self, _: u64) {
        match *self {}
    }
}

/// The place of a request among those of all processes, which only a [`Member`] makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct InLine(());

/// A request that waits for memory of other processes, which only a [`Member`] makes.
#[derive(Debug)]
pub(crate) struct Waiting(InLine);

impl Waiting {
    pub(crate) const fn place(&self) -> InLine {
        self.0
    }

    pub(crate) const fn renew(&mut self, _: u64) {}

    pub(crate) fn note(&self, _: u64, _: Lacking) {}

    pub(crate) fn await_refund(&self, _: u32, _: Duration, _: impl Fn() -> bool) -> bool {
        false
    }
}

/// A process's membership in a ledger.
#[derive(Debug)]
pub(crate) enum Member {}

impl Member {
    pub(crate) const fn givers(&self) -> &Givers {
        match *self {}
    }

    pub(crate) const fn limit(&self) -> u64 {
        match *self {}
    }

    pub(crate) const fn line_up(&self) -> InLine {
        match *self {}
    }

    pub(crate) fn wait(self: &Arc<Self>, _: InLine, _: u64, _: Option<Instant>) -> Waiting {
        match **self {}
    }

    pub(crate) fn owes(
        &self,
        _: u64,
        _: u64,
        _: Option<InLine>,
        _: impl FnOnce() -> u64,
    ) -> Option<LedgerShortage> {
        match *self {}
    }

    pub(crate) const fn grant(
        &self,
        _: u64,
        _: u64,
        _: Purpose,
        _: Option<InLine>,
    ) -> Result<u64, LedgerShortage> {
        match *self {}
    }

    pub(crate) const fn give(&self, _: u64) {
        match *self {}
    }

    pub(crate) const fn note_created(&self, _: u64) {
        match *self {}
    }

    pub(crate) const fn note_released(&self, _: u64) {
        match *self {}
    }

    pub(crate) const fn note_read(&self, _: u64, _: u64) {
        match *self {}
    }

    pub(crate) const fn left(&self) -> u64 {
        match *self {}
    }

    pub(crate) const fn left_with_idle(&self) -> u64 {
        match *self {}
    }

    pub(crate) const fn export(&self, _: Option<u64>, _: u64) -> Option<u64> {
        match *self {}
    }

    pub(crate) const fn is_open(&self, _: u64) -> bool {
        match *self {}
    }

    pub(crate) const fn has_entry(&self, _: u64) -> bool {
        match *self {}
    }

    pub(crate) const fn lend(&self, _: &[u64], _: u64) -> bool {
        match *self {}
    }

    pub(crate) const fn ledger_number(&self) -> u64 {
        match *self {}
    }

    pub(crate) const fn wake_keeper(&self) {
        match *self {}
    }

    pub(crate) const fn wake_ups(&self) -> u32 {
        match *self {}
    }

    pub(crate) const fn wake_waiting(&self) {
        match *self {}
    }

    pub(crate) fn leave_if_last(member: &Arc<Self>) {
        match **member {}
    }
}
