//! The queue of those [futures](super::futures) that wait for memory, in the order in which they came.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use cuvmm_driver::StreamHandle;

use super::budget::TenantId;
use super::ids::{BlockPlace, SlotId};
use super::wanted::Wish;
use crate::error::BlockError;
use crate::own::Stream;
use crate::size::Granularity;

/// How soon the mapper looks again whether a fence has passed that requests wait for. The pause
/// doubles each time that it has not, up to the second figure.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_micros(100), Duration::from_micros(1600));

/// What a request asks for.
#[derive(Clone, Debug)]
pub(super) enum Want {
    /// A new block.
    Block(Arc<Wish>),
    /// That a block grows to the first number of bytes, from the second.
    Growth(BlockPlace, u64, u64),
    /// To hear that memory came free since the count of such [news](super::state::State::news) was the
    /// first number, and the second was the bytes pending free.
    News(u64, u64),
}

/// What a request is answered with: where a new block lies.
pub(super) type Answer = Result<Option<BlockPlace>, BlockError>;

/// One that waits.
#[derive(Debug)]
pub(super) struct Request {
    group: Group,
    pub(super) want: Want,
    pub(super) waker: Option<Waker>,
    /// Whether it was attempted.
    pub(super) begun: bool,
    /// Whether the block that was to grow has gone, and its future was not dropped.
    abandoned: bool,
}

/// Requests that are alike: while the first of them is not served, none is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Group {
    tenant: TenantId,
    /// New memory that is asked for, in whole granules.
    bytes: u64,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Block {
        /// The home stream, on which what was freed there serves before that work has passed.
        home: Option<StreamHandle>,
        zeroed: bool,
        capacity: u64,
        largest: Option<u64>,
        snug: bool,
    },
    /// A block that grows, by its slot: it may have memory behind its end.
    Growth(usize),
    News,
}

impl Group {
    fn of(tenant: TenantId, want: &Want, granule: Granularity) -> Self {
        let whole = |bytes| granule.round_up(bytes).unwrap_or(u64::MAX);
        let (bytes, kind) = match want {
            Want::Block(wish) => {
                let wanted = wish.wanted();
                let kind = Kind::Block {
                    home: wanted.home.map(Stream::as_raw),
                    zeroed: wanted.zeroed,
                    capacity: wanted.capacity,
                    largest: wanted.grain.largest,
                    snug: wanted.snug,
                };
                (whole(wanted.size), kind)
            }
            Want::Growth(place, to, from) => {
                let more = whole(*to).saturating_sub(whole(*from));
                (more, Kind::Growth(place.slot.index))
            }
            Want::News(..) => (0, Kind::News),
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

    /// Whether it finds too little memory if another one, of the same tenant, did.
    pub(super) fn is_short_like(&self, other: &Self) -> bool {
        let as_hard = match (self.kind, other.kind) {
            (
                Kind::Block {
                    home: Some(home),
                    zeroed,
                    ..
                },
                Kind::Block {
                    home: theirs,
                    zeroed: too,
                    ..
                },
            ) => theirs == Some(home) && zeroed >= too,
            (Kind::Block { home: Some(_), .. }, _) => false,
            (Kind::Block { zeroed, .. }, Kind::Block { zeroed: too, .. }) => zeroed >= too,
            _ => true,
        };
        as_hard && self.tenant == other.tenant && self.bytes >= other.bytes
    }
}

/// What the queue knows of a request whose turn it is.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) number: u64,
    pub(super) group: Group,
    pub(super) want: Want,
    /// Whether it is the first, in which pressure hooks are called.
    pub(super) appeals: bool,
    /// Whether it was attempted before.
    pub(super) begun: bool,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    next: u64,
    requests: BTreeMap<u64, Request>,
    groups: BTreeMap<Group, BTreeSet<u64>>,
    /// Those that have had no turn yet.
    fresh: BTreeSet<u64>,
    /// Blocks that are to grow.
    growing: BTreeMap<SlotId, u64>,
    /// Those who wait for news.
    listeners: BTreeSet<u64>,
    /// Answers that no future has looked for yet.
    pub(super) answers: BTreeMap<u64, Answer>,
    /// Whether other threads announced that memory came free since the queue was last looked through.
    pub(super) stirred: bool,
    /// How soon to look again.
    nap: Duration,
}

impl Queue {
    /// Whether no request waits.
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Whether a request still waits, for a block that is there.
    pub(super) fn has(&self, number: u64) -> bool {
        let request = self.requests.get(&number);
        request.is_some_and(|request| !request.abandoned)
    }

    /// A block has gone that may have been to grow: its slot is another's next.
    #[inline]
    pub(super) fn abandon_growth(&mut self, slot: SlotId) {
        if !self.growing.is_empty()
            && let Some(number) = self.growing.remove(&slot)
            && let Some(request) = self.requests.get_mut(&number)
        {
            request.abandoned = true;
        }
    }

    /// The first request of each group, and those that have had no turn yet: it tells whether they can
    /// be served at all, and calls hooks for them.
    pub(super) fn heads(&self) -> BTreeMap<u64, Group> {
        let heads = self.groups.values().filter_map(BTreeSet::first);
        let heads = heads.chain(&self.fresh);
        let heads = heads.filter_map(|number| Some((*number, self.requests.get(number)?.group)));
        heads.collect()
    }

    /// The first request of a group.
    pub(super) fn head_of(&self, group: Group) -> Option<u64> {
        self.groups.get(&group)?.first().copied()
    }

    /// A request that has its turn from here on.
    pub(super) fn turn(&mut self, number: u64) -> Option<Turn> {
        let request = self.requests.get(&number)?;
        Some(Turn {
            number,
            group: request.group,
            want: request.want.clone(),
            appeals: self.fresh.remove(&number),
            begun: request.begun,
        })
    }

    /// Those who wait for news, with what they know.
    pub(super) fn listeners(&self) -> Vec<(u64, u64, u64)> {
        let known = |&number| match self.requests.get(&number)?.want {
            Want::News(told, pending) => Some((number, told, pending)),
            _ => None,
        };
        self.listeners.iter().filter_map(known).collect()
    }

    /// How soon to look at the queue again, if nothing happens; sooner if something just has.
    pub(super) fn nap(&mut self, served: bool) -> Option<Duration> {
        let longer = (2 * self.nap).clamp(LOOK_AGAIN.0, LOOK_AGAIN.1);
        self.nap = if served { LOOK_AGAIN.0 } else { longer };
        (!self.is_empty()).then_some(self.nap)
    }

    /// Puts a request at the end; returns its number.
    pub(super) fn push(
        &mut self,
        tenant: TenantId,
        want: Want,
        waker: Option<Waker>,
        granule: Granularity,
    ) -> u64 {
        let (number, group) = (self.next, Group::of(tenant, &want, granule));
        self.next += 1;
        self.nap = Duration::ZERO;
        if let Want::News(..) = want {
            self.listeners.insert(number);
        } else {
            self.groups.entry(group).or_default().insert(number);
            self.fresh.insert(number);
        }
        if let Want::Growth(place, ..) = want {
            self.growing.insert(place.slot, number);
        }
        let request = Request {
            group,
            want,
            waker,
            begun: false,
            abandoned: false,
        };
        self.requests.insert(number, request);
        number
    }

    /// A request that waits.
    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut Request> {
        self.requests.get_mut(&number)
    }

    /// The request that waits longest.
    pub(super) fn first(&self) -> Option<u64> {
        self.requests.keys().next().copied()
    }

    /// Takes a request out.
    pub(super) fn take(&mut self, number: u64) -> Option<Request> {
        let request = self.requests.remove(&number)?;
        if let Want::Growth(place, ..) = request.want
            && self.growing.get(&place.slot) == Some(&number)
        {
            self.growing.remove(&place.slot);
        }
        self.listeners.remove(&number);
        self.fresh.remove(&number);
        if let Some(numbers) = self.groups.get_mut(&request.group) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.groups.remove(&request.group);
            }
        }
        Some(request)
    }
}
