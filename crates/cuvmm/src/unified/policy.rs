//! The usual advice in one word, and what has been told the driver so far.
//!
//! The driver tells of a range only what holds for all of it, so what was told is kept here, page by
//! page: a policy undoes exactly what stands, and what a failure leaves half done is put back.

use std::collections::BTreeSet;
use std::ops::{Range, RangeBounds};
use std::sync::PoisonError;

use bytemuck::Pod;
use cuvmm_driver::{Advice, Location};
use rangemap::RangeMap;

use super::{UnifiedBuffer, bytes_at, failed};
use crate::error::{CallError, ContainerError};
use crate::own::Managed;
use crate::size::Granularity;
use crate::sync::MutexGuard;

/// How a range is used, in one word. Setting one undoes whatever advice was given before by this
/// buffer, a policy's or other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Policy {
    /// No advice: pages move to whoever touches them. What a new buffer has.
    #[default]
    OnDemand,
    /// Pages belong on the device: preferred location the buffer's device, accessed by the host. A
    /// host that can reach the device's memory touches them there; another one moves them.
    DeviceFirst,
    /// Pages belong on the host: preferred location the host, accessed by the buffer's device, which
    /// reads and writes them there, over the bus and without moving them.
    HostFirst,
    /// Mostly read, and no more: everybody who reads gets copies.
    ReadMostly,
}

/// Advice that stands for a page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Given {
    pub(super) read_mostly: bool,
    pub(super) preferred: Option<Location>,
    pub(super) accessed_by: BTreeSet<Location>,
}

/// One piece of advice, there or not.
#[derive(Clone, Copy, Debug)]
enum Item {
    ReadMostly(bool),
    Preferred(Option<Location>),
    AccessedBy(Location, bool),
}

impl Item {
    /// The call for it. A place that does not matter is the host.
    const fn call(self) -> (Advice, Location) {
        match self {
            Self::ReadMostly(true) => (Advice::SET_READ_MOSTLY, Location::HOST),
            Self::ReadMostly(false) => (Advice::UNSET_READ_MOSTLY, Location::HOST),
            Self::Preferred(Some(place)) => (Advice::SET_PREFERRED_LOCATION, place),
            Self::Preferred(None) => (Advice::UNSET_PREFERRED_LOCATION, Location::HOST),
            Self::AccessedBy(user, true) => (Advice::SET_ACCESSED_BY, user),
            Self::AccessedBy(user, false) => (Advice::UNSET_ACCESSED_BY, user),
        }
    }

    fn put(self, given: &mut Given) {
        match self {
            Self::ReadMostly(yes) => given.read_mostly = yes,
            Self::Preferred(place) => given.preferred = place,
            Self::AccessedBy(user, true) => drop(given.accessed_by.insert(user)),
            Self::AccessedBy(user, false) => drop(given.accessed_by.remove(&user)),
        }
    }
}

impl Given {
    /// What leads from here to there, the undoing first.
    fn to(&self, there: &Self) -> Vec<Item> {
        let mut items = vec![];
        if self.read_mostly && !there.read_mostly {
            items.push(Item::ReadMostly(false));
        }
        for &user in self.accessed_by.difference(&there.accessed_by) {
            items.push(Item::AccessedBy(user, false));
        }
        if self.preferred != there.preferred {
            items.push(Item::Preferred(there.preferred));
        }
        for &user in there.accessed_by.difference(&self.accessed_by) {
            items.push(Item::AccessedBy(user, true));
        }
        if there.read_mostly && !self.read_mostly {
            items.push(Item::ReadMostly(true));
        }
        items
    }
}

/// What the driver took, for every page.
pub(super) struct Told {
    pages: RangeMap<u64, Given>,
    /// A page of the host, in bytes.
    page: Option<Granularity>,
}

impl Told {
    /// Of so many bytes, nothing.
    pub(super) fn nothing(bytes: u64) -> Self {
        let mut told = Self {
            pages: RangeMap::new(),
            page: Granularity::new(rustix::param::page_size() as u64),
        };
        let all = told.pages_of(&(0..bytes));
        if !all.is_empty() {
            told.pages.insert(all, Given::default());
        }
        told
    }

    /// The pages that the driver means by a range.
    fn pages_of(&self, bytes: &Range<u64>) -> Range<u64> {
        match self.page {
            Some(page) => {
                page.round_down(bytes.start)..page.round_up(bytes.end).unwrap_or(bytes.end)
            }
            None => bytes.clone(),
        }
    }

    /// The runs of pages in a range for which the same was told.
    fn pieces(&self, bytes: &Range<u64>) -> Vec<(Range<u64>, Given)> {
        let all = self.pages_of(bytes);
        let cut = |run: &Range<u64>| run.start.max(all.start)..run.end.min(all.end);
        self.pages
            .overlapping(&all)
            .map(|(run, given)| (cut(run), given.clone()))
            .collect()
    }

    /// Takes note of what the driver took for a range.
    pub(super) fn note(&mut self, bytes: &Range<u64>, change: impl Fn(&mut Given)) {
        for (run, mut given) in self.pieces(bytes) {
            change(&mut given);
            self.pages.insert(run, given);
        }
    }

    /// Tells the driver one thing, and takes note of it.
    fn tell(&mut self, memory: &Managed, run: &Range<u64>, item: Item) -> Result<(), CallError> {
        let (advice, location) = item.call();
        // The last page may reach beyond the memory.
        let inside = run.start..run.end.min(memory.size());
        memory.advise(&inside, advice, location)?;
        self.note(run, |given| item.put(given));
        Ok(())
    }

    /// Leads a range from what stands there to what shall.
    fn lead(&mut self, memory: &Managed, bytes: &Range<u64>, to: &Given) -> Result<(), CallError> {
        for (run, given) in self.pieces(bytes) {
            for item in given.to(to) {
                self.tell(memory, &run, item)?;
            }
        }
        Ok(())
    }

    /// Leads back to what stood before, as far as the driver lets; the first failure is told.
    fn put_back(
        &mut self,
        memory: &Managed,
        before: &[(Range<u64>, Given)],
    ) -> Result<(), CallError> {
        let mut outcome = Ok(());
        for (run, given) in before {
            outcome = outcome.and(self.lead(memory, run, given));
        }
        outcome
    }
}

impl<T: Pod> UnifiedBuffer<T> {
    /// Sets how a range is used, in place of all advice that this buffer gave for it before
    /// (`cuMemAdvise` for each thing that changes). What is in force already is not told again.
    ///
    /// # Errors
    /// As [`Self::advise`]; what stood before stands then. If that cannot be put back either,
    /// [`ContainerError::HalfWay`].
    pub fn set_policy(
        &self,
        range: impl RangeBounds<usize>,
        policy: Policy,
    ) -> Result<(), ContainerError> {
        let range = self.elements(range)?;
        let wanted = self.wanted(policy)?;
        let Some(memory) = self.memory_of(&range) else {
            return Ok(());
        };
        let bytes = bytes_at::<T>(&range);
        let mut told = self.told();
        let before = told.pieces(&bytes);
        let Err(cause) = told.lead(memory, &bytes, &wanted) else {
            return Ok(());
        };
        let Err(undoing) = told.put_back(memory, &before) else {
            return Err(failed::<T>(&range, cause).into());
        };
        Err(ContainerError::HalfWay {
            range,
            cause,
            undoing,
        })
    }

    /// What a policy stands for.
    fn wanted(&self, policy: Policy) -> Result<Given, ContainerError> {
        let device = self.device().location();
        let mut wanted = Given::default();
        match policy {
            Policy::OnDemand => {}
            Policy::ReadMostly => wanted.read_mostly = true,
            Policy::DeviceFirst => {
                self.moves_on(self.device())?;
                wanted.preferred = Some(device);
                wanted.accessed_by.insert(Location::HOST);
            }
            Policy::HostFirst => {
                self.moves_on(self.device())?;
                wanted.preferred = Some(Location::HOST);
                wanted.accessed_by.insert(device);
            }
        }
        Ok(wanted)
    }

    /// What has been told so far. Held while the driver is told more, so that two threads do not mix
    /// what they say.
    pub(super) fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
