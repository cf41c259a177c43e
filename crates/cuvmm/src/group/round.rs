//! One operation of a group in one of its ranks: entering, voting, and the decision.
//!
//! The round is one word: a number and a decision, which is open until one rank replaces it. Each
//! rank has a word of its own with the number of the last round that it entered and its step there.
//!
//! 1. A rank enters the open round, or opens the next one, and waits until all ranks have entered
//!    with the same operation. So a missing rank is found before any memory is touched.
//! 2. It prepares, and votes: [`Ready`](Step::Ready) or [`Failed`](Step::Failed).
//! 3. A rank that finds all ranks ready replaces the open round by *finish*. A rank that finds a
//!    failed or ended rank, another operation, or its time over, replaces it by *undo*, with the
//!    cause. The first one counts.
//! 4. Each rank reads the word, does what it says, and [leaves](Step::Left).
//!
//! Finish is written only after all ranks were found ready in that round, and a ready rank obeys
//! the word whatever its own clock says. A round is opened only when every running rank that
//! entered the round before has left it, so no rank misses a decision. A rank that ends after the
//! decision is waited for by none.
//!
//! Keeps I-92.

use std::fmt;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::layout::{At, Cause, Decision, Round, Slot, Step, is_taken};
use super::rank::Rank;
use super::watch::Watch;
use crate::error::{GroupError, LedgerError, Undone};
use crate::ledger::clock;
use crate::ledger::word::fence;

/// The longest pause until the other ranks' processes are looked at again.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// A rank's part of an operation that all ranks of a group have entered, made by
/// [`Group::enter`](super::Group::enter).
///
/// Ends with [`ready`](Self::ready) or [`fail`](Self::fail). Dropping it fails, as a panic does.
#[must_use = "dropping it undoes the operation in all ranks"]
pub struct Entered<'a> {
    rank: &'a Rank,
    watch: MutexGuard<'a, Watch>,
    number: u32,
    until: Instant,
    has_ended: bool,
}

/// The state of the ranks in an open round.
enum Found {
    All,
    Undo(Cause, usize),
    /// The first rank that lacks, and why.
    Lacks(Cause, usize),
}

impl<'a> Entered<'a> {
    /// Enters a round, and waits until all ranks have entered it.
    pub(super) fn begin(
        rank: &'a Rank,
        operation: &str,
        timeout: Duration,
    ) -> Result<Self, GroupError> {
        let mut entered = Self::outside(rank, timeout)?;
        let decision = match entered.enter(operation)? {
            Decision::Open => entered.decide(Step::Came)?,
            decided => decided,
        };
        match decision {
            Decision::Open => Ok(entered),
            decision => Err(entered.undone(decision)),
        }
    }

    /// Returns a part in no round yet.
    fn outside(rank: &'a Rank, timeout: Duration) -> Result<Self, GroupError> {
        let watch = rank.begin()?;
        if !rank.file.is_in_place() {
            return Err(LedgerError::Replaced(rank.path().to_owned()).into());
        }
        let now = clock::now();
        // Longer than any wait.
        let longest = Duration::from_secs(100 * 365 * 86_400);
        Ok(Self {
            rank,
            watch,
            number: 0,
            until: now.checked_add(timeout.min(longest)).unwrap_or(now),
            has_ended: true,
        })
    }

    /// Enters the open round. Returns its decision, if it was decided meanwhile.
    fn enter(&mut self, operation: &str) -> Result<Decision, GroupError> {
        loop {
            self.open(operation)?;
            if let Some(decision) = self.come(operation)? {
                return Ok(decision);
            }
        }
    }

    /// Enters the round that was found open. Returns its decision, or `None` if it was undone, and
    /// the next one opened, before this rank had entered.
    ///
    /// A decision that is found here must not be read again: the rank that opens the next round may
    /// have looked for others before this one came, and does not wait for it.
    fn come(&mut self, operation: &str) -> Result<Option<Decision>, GroupError> {
        self.rank.slot().set_operation(operation);
        self.has_ended = false;
        self.step(Step::Came);
        match self.rank.header().round() {
            Ok(round) if round.number == self.number => Ok(Some(round.decision)),
            Ok(_) => {
                self.has_ended = true;
                Ok(None)
            }
            Err(word) => Err(self.broken(word)),
        }
    }

    /// Returns `true` while the operation may still be finished: a rank that prepares something
    /// long can give up when it returns `false`. Makes no system call.
    #[must_use]
    pub fn is_open(&self) -> bool {
        let round = self.rank.header().round();
        round == Ok(self.open_round())
    }

    /// Ends this rank's time, as when its timeout is over.
    #[cfg(test)]
    pub(super) fn end_time(&mut self) {
        self.until = clock::now();
    }

    /// Votes for the operation, and waits for the decision. Call this when all that can fail is
    /// done, and after `Ok` do the rest, which cannot fail: the other ranks do so too.
    ///
    /// # Errors
    /// [`GroupError::Undone`] with the rank that is the cause, if the operation is undone in all
    /// ranks: undo this rank's part too. [`GroupError::Call`] in a forked child, which has no vote.
    pub fn ready(mut self) -> Result<(), GroupError> {
        self.rank.own_process()?;
        self.step(Step::Ready);
        match self.decide(Step::Ready)? {
            Decision::Finish => {
                self.leave();
                Ok(())
            }
            decision => Err(self.undone(decision)),
        }
    }

    /// Votes against the operation, with this rank's reason, which the other ranks' errors show, cut
    /// to 512 bytes. Returns the error with the rank that is the cause: another one if that had
    /// failed before.
    pub fn fail(mut self, reason: impl fmt::Display) -> GroupError {
        if let Err(error) = self.rank.own_process() {
            return error.into();
        }
        self.vote_against(&reason.to_string());
        match self.rank.header().round() {
            Ok(round) if round.number == self.number => self.undone(round.decision),
            Ok(_) => self.lost(),
            Err(word) => self.broken(word),
        }
    }

    fn vote_against(&self, reason: &str) {
        self.rank.slot().set_reason(reason);
        self.step(Step::Failed);
        self.replace(Decision::Undo(Cause::Failed, self.rank.index as u32));
    }

    /// Finds the open round, or opens the next one when all running ranks have left the one before.
    fn open(&mut self, operation: &str) -> Result<(), GroupError> {
        loop {
            let header = self.rank.header();
            let seen = header.bell.count();
            let round = header.round().map_err(|word| self.broken(word))?;
            self.number = round.number;
            if round.decision == Decision::Open {
                return Ok(());
            }
            // A rank that this scan does not find sees the decision when it comes, or a later round.
            fence(Ordering::SeqCst);
            match self.still_in(round.number) {
                None => {
                    let next = Round {
                        number: round.number.wrapping_add(1),
                        decision: Decision::Open,
                    };
                    header.replace_round(round, next);
                }
                Some(rank) if self.left().is_zero() => {
                    let cause = Decision::Undo(Cause::NotReady, rank as u32);
                    return Err(self.error(cause, operation.to_owned()));
                }
                Some(_) => header.bell.wait(seen, self.pause()),
            }
        }
    }

    /// Returns the first running rank that entered a decided round and has not left it.
    fn still_in(&mut self, number: u32) -> Option<usize> {
        let ended = self.ended();
        let own = self.rank.index;
        let others = self.rank.slots().zip(ended).enumerate();
        let mut others = others.filter(|&(rank, (slot, ended))| {
            let at = slot.at();
            let is_in = matches!(at.step, Step::Came | Step::Ready | Step::Failed);
            let runs = is_taken(slot.state.load()) && !ended;
            rank != own && runs && is_in && at.number == number
        });
        others.next().map(|(rank, _)| rank)
    }

    /// Waits until all ranks have come to a step, or the round is decided. Once all are ready, or
    /// one is the cause of an end, decides it.
    fn decide(&mut self, step: Step) -> Result<Decision, GroupError> {
        loop {
            let header = self.rank.header();
            let seen = header.bell.count();
            let round = match header.round() {
                Ok(round) if round.number == self.number => round,
                Ok(_) => return Err(self.lost()),
                Err(word) => return Err(self.broken(word)),
            };
            if round.decision != Decision::Open {
                return Ok(round.decision);
            }
            match self.find(step) {
                Found::All if step == Step::Came => return Ok(Decision::Open),
                Found::All => self.replace(Decision::Finish),
                Found::Undo(cause, rank) => self.replace(Decision::Undo(cause, rank as u32)),
                Found::Lacks(cause, rank) if self.left().is_zero() => {
                    self.replace(Decision::Undo(cause, rank as u32));
                }
                Found::Lacks(..) => header.bell.wait(seen, self.pause()),
            }
        }
    }

    fn find(&mut self, step: Step) -> Found {
        let ended = self.ended();
        let digest = self.rank.slot().digest.load();
        let (mut lacks, mut differs) = (None, None);
        for (rank, (slot, ended)) in self.rank.slots().zip(ended).enumerate() {
            let at = slot.at();
            if ended {
                return Found::Undo(Cause::Ended, rank);
            }
            let cause = match at.step {
                _ if !is_taken(slot.state.load()) => Cause::NotJoined,
                Step::None | Step::Left => Cause::NotCalled,
                _ if at.number != self.number => Cause::NotCalled,
                Step::Failed => return Found::Undo(Cause::Failed, rank),
                _ if slot.digest.load() != digest => {
                    differs.get_or_insert(rank);
                    continue;
                }
                found if found < step => Cause::NotReady,
                _ => continue,
            };
            lacks.get_or_insert((cause, rank));
        }
        // When all have come, so that none comes later and waits for the others.
        match (lacks, differs) {
            (Some((cause, rank)), _) => Found::Lacks(cause, rank),
            (None, Some(rank)) => Found::Undo(Cause::OtherOperation, rank),
            (None, None) => Found::All,
        }
    }

    fn ended(&mut self) -> Vec<bool> {
        let Self { rank, watch, .. } = self;
        watch.ended(&rank.file, Some(rank.index), rank.ranks)
    }

    const fn open_round(&self) -> Round {
        Round {
            number: self.number,
            decision: Decision::Open,
        }
    }

    /// Decides the round, unless it is decided.
    fn replace(&self, decision: Decision) {
        let number = self.number;
        let decided = Round { number, decision };
        self.rank.header().replace_round(self.open_round(), decided);
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(clock::now())
    }

    fn pause(&self) -> Duration {
        self.left().min(LONGEST_PAUSE)
    }

    fn step(&self, step: Step) {
        let number = self.number;
        self.rank.set_at(At { number, step });
        fence(Ordering::SeqCst);
    }

    fn leave(&mut self) {
        self.has_ended = true;
        self.step(Step::Left);
    }

    /// Returns the error of a round that is undone, and leaves it.
    fn undone(&mut self, decision: Decision) -> GroupError {
        let error = self.error(decision, self.rank.slot().operation());
        self.leave();
        error
    }

    fn error(&self, decision: Decision, operation: String) -> GroupError {
        let Decision::Undo(cause, rank) = decision else {
            return self.lost();
        };
        let mut slots = self.rank.slots();
        let Some(slot) = slots.nth(rank as usize) else {
            return self.lost();
        };
        GroupError::Undone {
            group: self.rank.name.clone(),
            operation,
            rank,
            // A rank that has left by now is named with its process too.
            pid: match cause {
                Cause::NotJoined => 0,
                _ => slot.pid(),
            },
            cause: self.cause(cause, slot),
        }
    }

    fn cause(&self, cause: Cause, slot: &Slot) -> Undone {
        match cause {
            Cause::Failed => Undone::Failed(slot.reason()),
            Cause::Ended => Undone::Ended,
            Cause::NotJoined => Undone::NotJoined,
            Cause::NotCalled => Undone::NotCalled,
            Cause::NotReady => Undone::NotReady,
            Cause::OtherOperation => {
                let digest = slot.digest.load();
                let mut others = self.rank.slots().enumerate().filter(|(_, other)| {
                    let at = other.at();
                    at.number == self.number
                        && at.step != Step::None
                        && other.digest.load() != digest
                });
                let other = others.next().map_or(0, |(rank, _)| rank as u32);
                Undone::OtherOperation {
                    operation: slot.operation(),
                    other,
                }
            }
        }
    }

    fn broken(&self, word: u64) -> GroupError {
        let reason = format!("its word of the round is {word:#x}");
        self.rank.file.is_not_one(reason).into()
    }

    /// The other ranks went on without this one, which only a program that changes the file can
    /// bring about.
    fn lost(&self) -> GroupError {
        let reason = "its round was changed while this rank was in it".to_owned();
        self.rank.file.is_not_one(reason).into()
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.has_ended || !self.rank.opened_by.is_here() {
            return;
        }
        // The program gave up, or an error of the system ended a wait.
        self.vote_against("it gave up before it was ready");
        self.leave();
    }
}

impl fmt::Debug for Entered<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entered")
            .field("group", &self.rank.name)
            .field("rank", &self.rank.index)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::Group;
    use super::*;

    /// The second rank finds the round open. Before it comes, the first one decides it, begins again
    /// and does not find the second one there.
    #[test]
    fn a_rank_that_comes_as_the_round_is_decided_has_its_decision() {
        let dir = tempfile::tempdir().unwrap();
        let groups = [0, 1].map(|rank| Group::join(dir.path(), "tp0", 2, Some(rank)).unwrap());
        let [first, second] = groups.each_ref().map(|group| &group.rank);
        let long = Duration::from_secs(600);
        let mut late = Entered::outside(second, long).unwrap();
        late.open("sleep").unwrap();
        assert!(groups[0].enter("sleep", Duration::ZERO).is_err());
        let mut again = Entered::outside(first, long).unwrap();
        assert_eq!(again.still_in(0), None);
        let decision = late.come("sleep").unwrap().unwrap();
        assert!(first.header().replace_round(
            Round {
                number: 0,
                decision
            },
            Round {
                number: 1,
                decision: Decision::Open
            }
        ));
        assert_eq!(decision, Decision::Undo(Cause::NotCalled, 1));
        let undone = late.undone(decision);
        assert!(
            matches!(undone, GroupError::Undone { rank: 1, .. }),
            "{undone}"
        );
        assert_eq!(late.enter("sleep").unwrap(), Decision::Open);
        assert_eq!(again.enter("sleep").unwrap(), Decision::Open);
        for entered in [&mut late, &mut again] {
            assert_eq!(entered.number, 1);
            assert_eq!(entered.decide(Step::Came).unwrap(), Decision::Open);
        }
    }
}
