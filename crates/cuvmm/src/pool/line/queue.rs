//! The queue of the [futures](super::futures) that wait for memory, in the order of their arrival.
//!
//! Keeps I-154.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use cuvmm_driver::StreamHandle;

use super::Pause;
use super::clock::Clock;
use super::lacked::Lacked;
use super::queued::HolderWant;
use super::wanted::OwnedOptions;
use crate::error::BlockError;
use crate::ledger::InLine;
use crate::own::Stream;
use crate::pool::accounts::TenantId;
use crate::pool::blocks::Blocks;
use crate::pool::blocks::slots::{BlockPlace, SlotId};
use crate::size::Granularity;
use crate::wanted::Lacking;

/// How many passes begin before one gives each request its turn, whatever becomes free meanwhile. Else the
/// first requests, whose slow hooks are called again and again, could keep others from their turns.
const PASSES: usize = 8;

#[derive(Clone, Debug)]
pub(super) enum Want {
    Block(Arc<OwnedOptions>),
    /// The growth of a block to the first size in bytes, from the second.
    Growth(BlockPlace, u64, u64),
    Holder(HolderWant),
    /// A notification when memory has become free since the
    /// [count](super::Line::freed_count) had the first value and the bytes pending free the
    /// second.
    Notification(u64, u64),
}

/// The answer to a request: for a new block, its place.
pub(super) type Answer = Result<Option<BlockPlace>, BlockError>;

#[derive(Debug)]
pub(super) struct Request {
    group: Group,
    pub(super) want: Want,
    pub(super) waker: Option<Waker>,
    /// The tenants whose hooks were called in this round.
    asked: Vec<TenantId>,
    /// The end of the last round.
    called: Option<Instant>,
    /// The request's place among those of all processes, if the pool is in a ledger.
    place: Option<InLine>,
}

/// Requests that are alike: while the first is not served, none is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Group {
    tenant: TenantId,
    /// The new memory needed, in whole granules; 0 for a holder.
    bytes: u64,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Block {
        /// The home stream, whose freed memory can be reused on it before the stream's work is
        /// complete.
        home: Option<StreamHandle>,
        zeroed: bool,
        capacity: u64,
        largest: Option<u64>,
        shrinks: bool,
        exact_extents: bool,
    },
    /// The growth of a block, by its slot: the block may have memory behind its end.
    Growth(usize),
    /// A request of a holder, by its number. None is alike: what a holder has withdrawn may be enough
    /// for one and no help for another.
    Holder(u64),
    Notification,
}

impl Group {
    fn of(tenant: TenantId, number: u64, want: &Want, granule: Granularity) -> Self {
        let whole = |bytes| granule.round_up(bytes).unwrap_or(u64::MAX);
        let (bytes, kind) = match want {
            Want::Block(wish) => {
                let wanted = wish.wanted();
                let kind = Kind::Block {
                    home: wanted.home.map(Stream::as_raw),
                    zeroed: wanted.zeroed,
                    capacity: wanted.capacity,
                    largest: wanted.grain.largest,
                    shrinks: wanted.shrinks,
                    exact_extents: wanted.exact_extents,
                };
                (whole(wanted.size), kind)
            }
            Want::Growth(place, to, from) => {
                let more = whole(*to).saturating_sub(whole(*from));
                (more, Kind::Growth(place.slot.index))
            }
            Want::Holder(_) => (0, Kind::Holder(number)),
            Want::Notification(..) => (0, Kind::Notification),
        };
        Self {
            tenant,
            bytes,
            kind,
        }
    }

    pub(super) const fn tenant(&self) -> TenantId {
        self.tenant
    }

    pub(super) const fn block_bytes(&self) -> Option<u64> {
        match self.kind {
            Kind::Block { .. } => Some(self.bytes),
            Kind::Growth(_) | Kind::Holder(_) | Kind::Notification => None,
        }
    }

    /// Returns the request without the memory that its growing block has behind its end.
    pub(super) fn beyond_own(self, blocks: &Blocks) -> Self {
        let Kind::Growth(index) = self.kind else {
            return self;
        };
        let slot = SlotId {
            tenant: self.tenant,
            index,
        };
        let (used, has) = blocks.used_and_held(slot);
        let bytes = self.bytes.saturating_sub(has.saturating_sub(used));
        Self { bytes, ..self }
    }

    /// Returns `true` if this request finds too little memory whenever `other`, of the same tenant,
    /// does.
    pub(super) fn is_short_like(&self, other: &Self) -> bool {
        let as_hard = match (self.kind, other.kind) {
            (one, two) if one == two && self.bytes == other.bytes => true,
            // Which idle memory of its stream a block can use depends on its size and capacity.
            (Kind::Block { home: Some(_), .. } | Kind::Holder(_), _) | (_, Kind::Holder(_)) => {
                false
            }
            (Kind::Block { zeroed, .. }, Kind::Block { zeroed: too, .. }) => zeroed >= too,
            _ => true,
        };
        as_hard && self.tenant == other.tenant && self.bytes >= other.bytes
    }
}

#[derive(Debug)]
pub(super) struct Turn {
    pub(super) number: u64,
    pub(super) group: Group,
    pub(super) want: Want,
    /// `true` if the turn calls a pressure hook.
    pub(super) appeals: bool,
    /// How many hooks the round has called before.
    pub(super) asked: usize,
    pub(super) place: Option<InLine>,
}

/// The rest of a pass over the queue.
#[derive(Debug, Default)]
pub(super) struct Pass {
    /// The requests that are to have their turns.
    pub(super) heads: BTreeMap<u64, Group>,
    /// The groups whose requests found too little memory.
    pub(super) short: Vec<(Group, BlockError)>,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    next: u64,
    requests: BTreeMap<u64, Request>,
    groups: BTreeMap<Group, BTreeSet<u64>>,
    /// Requests that have had no turn.
    fresh: BTreeSet<u64>,
    listeners: BTreeSet<u64>,
    pub(super) answers: BTreeMap<u64, Answer>,
    /// The memory that requests have lacked of a ledger since the last service.
    lacking: Lacked,
    /// The memory that they lacked before, as other processes see it.
    shown: Lacked,
    /// `true` if other processes see memory for a request that has ended.
    shows_too_much: bool,
    /// `true` if other threads announced memory since the queue was last searched.
    pub(super) memory_freed: bool,
    /// The passes that were begun since one has ended.
    pub(super) passes: usize,
    /// The rest of a pass that a hook has interrupted.
    pub(super) rest: Option<Pass>,
    /// `true` if the stream caches were emptied since a request joined the empty queue. No block
    /// goes there while requests wait.
    pub(super) swept: bool,
    /// The pause before the queue is searched again.
    pause: Pause,
}

impl Queue {
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub(super) fn has(&self, number: u64) -> bool {
        self.requests.contains_key(&number)
    }

    /// Returns the first request of each group, and the requests that have had no turn: the first
    /// turn refuses a request that can never be served, and calls hooks.
    pub(super) fn heads(&self) -> BTreeMap<u64, Group> {
        let heads = self.groups.values().filter_map(BTreeSet::first);
        let heads = heads.chain(&self.fresh);
        let heads = heads.filter_map(|number| Some((*number, self.requests.get(number)?.group)));
        heads.collect()
    }

    /// Returns `true` if the pass starts again, since memory became free.
    pub(super) const fn starts_again(&self) -> bool {
        self.memory_freed && self.passes < PASSES
    }

    /// Notes that a pass has given each request its turn, unless it starts again.
    pub(super) const fn end_pass(&mut self) {
        if !self.starts_again() {
            self.passes = 0;
        }
    }

    pub(super) fn head_of(&self, group: Group) -> Option<u64> {
        self.groups.get(&group)?.first().copied()
    }

    /// Returns a request's turn. The first one begins a round of hooks, and so does one that makes an
    /// attempt, which is `attempts`, [after a time](Clock::is_time_again).
    pub(super) fn turn(&mut self, number: u64, attempts: bool, clock: &Clock) -> Option<Turn> {
        let request = self.requests.get(&number)?;
        let again = |called| attempts && clock.is_time_again(called);
        Some(Turn {
            number,
            group: request.group,
            want: request.want.clone(),
            appeals: self.fresh.remove(&number) || request.called.is_some_and(again),
            asked: request.asked.len(),
            place: request.place,
        })
    }

    /// Takes out the tenants whose hooks were called in a request's round, which is over unless it is
    /// [kept](Self::keep_round).
    pub(super) fn take_round(&mut self, number: u64) -> Vec<TenantId> {
        let request = self.requests.get_mut(&number);
        request.map_or_else(Vec::new, |it| std::mem::take(&mut it.asked))
    }

    /// Lets a request's round go on in its next turn.
    pub(super) fn keep_round(&mut self, number: u64, asked: Vec<TenantId>) {
        if let Some(request) = self.requests.get_mut(&number) {
            request.asked = asked;
        }
    }

    /// Notes that a turn that [appeals](Turn::appeals) has ended. Returns `true` if it called a hook:
    /// then the round goes on, behind other work of the mapper.
    pub(super) fn note_called(&mut self, turn: &Turn, clock: &Clock) -> bool {
        let Some(request) = self.requests.get_mut(&turn.number) else {
            return false;
        };
        request.called = Some(clock.now());
        let goes_on = request.asked.len() > turn.asked;
        if goes_on {
            self.fresh.insert(turn.number);
        }
        goes_on
    }

    /// Lets a request that was not attempted in its turn call hooks in the next one.
    pub(super) fn appeal_later(&mut self, number: u64) {
        if self.has(number) {
            self.fresh.insert(number);
        }
    }

    pub(super) fn listeners(&self) -> Vec<(u64, u64, u64)> {
        let known = |&number| match self.requests.get(&number)?.want {
            Want::Notification(told, pending) => Some((number, told, pending)),
            _ => None,
        };
        self.listeners.iter().filter_map(known).collect()
    }

    /// Returns the pause before the next search of the queue: shorter after a request was served.
    pub(super) fn nap(&mut self, served: bool) -> Option<Duration> {
        if served {
            self.pause = Pause::default();
        }
        let pause = self.pause.next();
        (!self.is_empty()).then_some(pause)
    }

    /// Appends a request; returns its number.
    pub(super) fn push(
        &mut self,
        tenant: TenantId,
        want: Want,
        waker: Option<Waker>,
        place: Option<InLine>,
        granule: Granularity,
    ) -> u64 {
        let number = self.next;
        let group = Group::of(tenant, number, &want, granule);
        // A pass over the empty queue may have emptied the caches while no request waited.
        self.swept &= !self.requests.is_empty();
        self.next += 1;
        self.pause = Pause::default();
        if let Want::Notification(..) = want {
            self.listeners.insert(number);
        } else {
            self.groups.entry(group).or_default().insert(number);
            self.fresh.insert(number);
        }
        let request = Request {
            group,
            want,
            waker,
            asked: Vec::new(),
            called: None,
            place,
        };
        self.requests.insert(number, request);
        number
    }

    pub(super) fn note_lacking(&mut self, number: u64, lacking: Lacking) {
        if let Some(place) = self.requests.get(&number).and_then(|it| it.place) {
            self.lacking.note(number, place, lacking);
        }
    }

    /// Ends a service. Returns what other processes are to see from now on.
    pub(super) fn show_lacking(&mut self) -> Option<(InLine, Lacking)> {
        match self.rest {
            None => self.shown = std::mem::take(&mut self.lacking),
            Some(_) => self.shown.add(&self.lacking),
        }
        self.show()
    }

    /// Returns `true` if other processes see memory for a request that has ended.
    pub(super) const fn shows_too_much(&self) -> bool {
        self.shows_too_much
    }

    /// Returns what other processes are to see from now on.
    pub(super) fn show(&mut self) -> Option<(InLine, Lacking)> {
        self.shows_too_much = false;
        self.shown.all()
    }

    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut Request> {
        self.requests.get_mut(&number)
    }

    pub(super) fn first(&self) -> Option<u64> {
        self.requests.keys().next().copied()
    }

    pub(super) fn take(&mut self, number: u64) -> Option<Request> {
        let request = self.requests.remove(&number)?;
        self.listeners.remove(&number);
        self.fresh.remove(&number);
        self.lacking.remove(number);
        self.shows_too_much |= self.shown.remove(number);
        if let Some(numbers) = self.groups.get_mut(&request.group) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.groups.remove(&request.group);
            }
        }
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_caches_are_emptied_again_for_a_request_behind_an_empty_queue() {
        let Some(granule) = Granularity::new(4096) else {
            unreachable!("a power of two");
        };
        let mut queue = Queue::default();
        let want = || Want::Notification(0, 0);
        let push = |queue: &mut Queue| queue.push(TenantId(1), want(), None, None, granule);
        let (first, second) = (push(&mut queue), push(&mut queue));
        queue.swept = true;
        assert!(queue.take(first).is_some());
        assert!(queue.swept, "a request waits");
        assert!(queue.take(first).is_none());
        assert!(queue.swept, "it was taken before");
        assert!(queue.take(second).is_some());
        queue.swept = true;
        push(&mut queue);
        assert!(
            !queue.swept,
            "no request waited when they were emptied last"
        );
    }
}
