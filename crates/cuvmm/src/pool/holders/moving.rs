//! Holders that sleep whole: their memory is taken out and given up, and comes back at the same
//! addresses.
//!
//! Either move has two steps, of which the second cannot fail. A value of a move that is dropped
//! before its second step leaves the holder as it was.
//!
//! Keeps I-126.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Instant;

use super::held::HolderId;
use super::lend::Lending;
use crate::device::Device;
use crate::error::{BlockError, SleepError};
use crate::extents::{Fence, Poll, Unmapped};
use crate::own::{Span, Stream};
use crate::pool::blocks::sleep::GivenUp;
use crate::pool::tenant::Tenant;
use crate::store::{HostStore, Saved};

/// The owner of a holder that can sleep: a heap or a paged cache.
pub(crate) trait CanSleep: Send + Sync {
    fn tenant(&self) -> &Tenant;

    fn is_heap(&self) -> bool;

    /// Marks the holder as moving, if it is awake and all work that may use its memory is complete.
    fn mark(self: Arc<Self>, attempts: &Attempts) -> Result<Marked, SleepError>;

    /// Marks the holder as moving, if it sleeps.
    fn begin_wake(self: Arc<Self>) -> Result<Option<HolderToWake>, SleepError>;
}

impl dyn CanSleep {
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        std::ptr::addr_eq(self, other)
    }

    /// Marks the holder as moving, once all work that may use its memory is complete. Waits for that
    /// until `until`, and while `wanted` returns `true`. Returns `None` if it sleeps.
    pub(crate) fn begin_sleep(
        self: &Arc<Self>,
        until: Option<Instant>,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Option<HolderToSleep>, SleepError> {
        self.tenant().device().own_process()?;
        let attempts = Attempts::new(until);
        let mark = || Arc::clone(self).mark(&attempts);
        let attempt = || {
            let mut marked = mark()?;
            if let Marked::Waits(work, _) = &mut marked
                && until.is_some()
            {
                work.wait()?;
                marked = mark()?;
            }
            match marked {
                Marked::Asleep => Ok(None),
                Marked::Moving(holder) => Ok(Some(holder)),
                Marked::Waits(_, busy) => Err(busy),
            }
        };
        attempts.repeat(self.tenant(), wanted, attempt)
    }
}

/// State that all attempts of one move share.
pub(crate) struct Attempts {
    /// The time until which attempts are made.
    pub(crate) until: Option<Instant>,
    /// Work that an attempt found incomplete, and the number of the holder's uses by then.
    awaited: RefCell<Option<(u64, Fence)>>,
    /// `true` if another attempt would fail as well.
    ended: Cell<bool>,
}

impl Attempts {
    const fn new(until: Option<Instant>) -> Self {
        Self {
            until,
            awaited: RefCell::new(None),
            ended: Cell::new(false),
        }
    }

    /// Makes attempts until one succeeds or fails for another reason than work, until the time is up,
    /// and while `wanted` returns `true`.
    fn repeat<T>(
        &self,
        tenant: &Tenant,
        wanted: &dyn Fn() -> bool,
        attempt: impl Fn() -> Result<T, SleepError>,
    ) -> Result<T, SleepError> {
        let again = |error: &SleepError| {
            let is_busy = matches!(
                error,
                SleepError::HeapBusy { .. } | SleepError::CacheBusy { .. }
            );
            is_busy && !self.ended.get() && wanted()
        };
        tenant.repeat(self.until, attempt, again)
    }

    /// Polls the work that must be complete before a holder sleeps: that on its `own` streams, whenever
    /// it was queued, and of a holder that sleeps after all work that of all its `users`. Of the latter,
    /// what an earlier attempt found incomplete, unless the holder was used since: on a device that always
    /// works, work that is queued later is never complete. So an attempt after a wait for that work finds
    /// it complete, also where only a wait tells.
    pub(crate) fn poll(
        &self,
        uses: u64,
        own: Fence,
        users: Option<Vec<Device>>,
    ) -> Result<(Poll, Fence), SleepError> {
        let mut work = own;
        if let Some(users) = users {
            let found = self.awaited.take();
            let found = found.filter(|&(before, _)| before == uses);
            work.merge(found.map_or_else(|| Fence::devices(users), |(_, found)| found));
        }
        let polled = work.poll()?;
        if !matches!(polled, Poll::Complete) {
            *self.awaited.borrow_mut() = Some((uses, work.clone()));
        }
        Ok((polled, work))
    }

    /// Makes no further attempt.
    pub(crate) fn end(&self) {
        self.ended.set(true);
    }
}

/// The outcome of an attempt to mark a holder as moving.
pub(crate) enum Marked {
    Asleep,
    Moving(HolderToSleep),
    /// Work is not complete. Only a wait for it tells when it is. The error is that of a holder in use.
    Waits(Fence, SleepError),
}

/// A holder that falls asleep, which is marked as moving and kept alive.
pub(crate) trait MovingHolder: Send + Sync {
    fn tenant(&self) -> &Tenant;

    /// Returns `true` if the holder sleeps only after all work of each device with access. Copies of
    /// other memory are such work.
    fn withdraws_last(&self) -> bool;

    /// Returns the time until which attempts to mark the holder were made.
    fn until(&self) -> Option<Instant>;

    /// Makes one attempt to unmap all memory, which fails if work was queued since the holder was marked
    /// that is not complete.
    fn try_withdraw(&self, attempts: &Attempts) -> Result<(), SleepError>;

    /// Returns the ranges with contents.
    fn spans(&self) -> Vec<Span<'_>>;

    /// Gives all memory up, which is unmapped. The holder sleeps with the contents of its ranges, or
    /// without.
    fn fall_asleep(self: Box<Self>, saved: Vec<Saved>, release: bool) -> GivenUp;

    /// Maps memory that is missing again. Copies on some streams may still use it. Returns `false` if
    /// that failed: the holder then sleeps with the contents of its ranges, or without.
    fn put_back(self: Box<Self>, saved: Vec<Saved>, copying: Vec<Stream>) -> bool;
}

impl dyn MovingHolder + '_ {
    /// Unmaps all memory. A holder that sleeps after all work waits for what other users of the device
    /// have queued since it was marked, as long as it waited before, while `wanted` returns `true`.
    pub(crate) fn withdraw(&self, wanted: &dyn Fn() -> bool) -> Result<(), SleepError> {
        let attempts = Attempts::new(self.until().filter(|_| self.withdraws_last()));
        attempts.repeat(self.tenant(), wanted, || self.try_withdraw(&attempts))
    }
}

/// The ranges of a holder with contents, each with the memory that they are saved in.
type Parts<'a> = Vec<(Span<'a>, &'a mut Saved)>;

/// A holder that falls asleep. Dropping the value before that leaves the holder as it was.
pub(crate) struct HolderToSleep {
    /// `None` once the move has ended.
    moving: Option<Box<dyn MovingHolder>>,
    /// The memory that the contents of the ranges are saved in, if they are kept.
    saved: Vec<Saved>,
}

impl HolderToSleep {
    pub(crate) fn new(moving: impl MovingHolder + 'static) -> Self {
        let moving: Option<Box<dyn MovingHolder>> = Some(Box::new(moving));
        let saved = Vec::new();
        Self { moving, saved }
    }

    /// Returns the holder, without its contents.
    pub(crate) fn moving(&self) -> Option<&dyn MovingHolder> {
        self.moving.as_deref()
    }

    /// Returns the sizes of the ranges with contents, in bytes.
    pub(crate) fn sizes(&self) -> Vec<u64> {
        let spans = self.moving().map(|moving| moving.spans());
        spans.iter().flatten().map(Span::size).collect()
    }

    /// Takes the memory that the contents are to be saved in, one item for each range.
    pub(crate) fn keep_in(&mut self, saved: &mut dyn Iterator<Item = Saved>) {
        let ranges = self.moving().map_or(0, |moving| moving.spans().len());
        self.saved = saved.take(ranges).collect();
    }

    pub(crate) fn contents(&mut self) -> Option<(&dyn MovingHolder, Parts<'_>)> {
        let moving = self.moving.as_deref()?;
        let parts = moving.spans().into_iter().zip(&mut self.saved);
        Some((moving, parts.collect()))
    }

    pub(crate) fn sleep(mut self, release: bool) -> GivenUp {
        let saved = std::mem::take(&mut self.saved);
        let asleep = self.moving.take().map(|it| it.fall_asleep(saved, release));
        asleep.unwrap_or_default()
    }

    /// Puts the memory back in its place. Returns `false` if that failed: the holder then sleeps.
    pub(crate) fn stay(mut self) -> bool {
        self.put_back()
    }

    fn put_back(&mut self) -> bool {
        let (mut saved, moving) = (std::mem::take(&mut self.saved), self.moving.take());
        let copying = unfinished(saved.iter_mut());
        moving.is_none_or(|moving| moving.put_back(saved, copying))
    }
}

impl Drop for HolderToSleep {
    fn drop(&mut self) {
        self.put_back();
    }
}

/// Returns the streams of copies that may still run.
fn unfinished<'a>(saved: impl Iterator<Item = &'a mut Saved>) -> Vec<Stream> {
    saved.flat_map(|it| it.unfinished().to_vec()).collect()
}

/// A holder that wakes, which is marked as moving and kept alive.
pub(crate) trait WakingHolder: Send + Sync {
    /// Returns the name of the holder, and the number of its mappings beside one for each extent.
    fn holder(&self) -> (HolderId, u64);

    /// Returns the ranges of all extents.
    fn spans(&self) -> Vec<Span<'_>>;

    /// Takes the memory that was lent, in the order of the extents.
    fn take(&mut self, lent: Vec<Unmapped>);

    /// Maps the memory of the extent at an index.
    fn place(&self, index: usize) -> Result<(), BlockError>;

    /// Maps the memory of the extents at some indices, and zeroes what another tenant wrote.
    fn place_blank(&mut self, indices: &[usize]) -> Result<(), BlockError>;

    /// Ends the move: the holder has its memory and contents again.
    fn wake(self: Box<Self>);

    /// Gives memory back that was lent. Copies on some streams may still use it. The holder sleeps on
    /// with the contents of its extents that were kept.
    fn sleep_on(self: Box<Self>, saved: Vec<Option<Saved>>, copying: Vec<Stream>);
}

/// The ranges of a waking holder with contents, each with its index and the memory that they are
/// saved in.
type WakingParts<'a> = Vec<(usize, Span<'a>, &'a mut Saved)>;

/// A holder that wakes. If this value is dropped before that, it sleeps on, with the contents that were
/// kept.
pub(crate) struct HolderToWake {
    /// `None` once the move has ended.
    waking: Option<Box<dyn WakingHolder>>,
    sizes: Vec<u64>,
    /// The contents of the extents, in their order.
    saved: Vec<Option<Saved>>,
}

impl HolderToWake {
    pub(crate) fn new(waking: impl WakingHolder + 'static, saved: Vec<Option<Saved>>) -> Self {
        let sizes = waking.spans().iter().map(Span::size).collect();
        let waking: Option<Box<dyn WakingHolder>> = Some(Box::new(waking));
        Self {
            waking,
            sizes,
            saved,
        }
    }

    /// Describes the memory that the holder needs.
    pub(crate) fn lending(&self) -> Option<Lending<'_>> {
        let (holder, mappings) = self.waking.as_ref()?.holder();
        Some(Lending {
            holder,
            sizes: &self.sizes,
            mappings,
            zeroes: false,
            whole: true,
            claims: true,
            place: None,
        })
    }

    /// Takes the memory that was lent.
    pub(crate) fn take(&mut self, lent: Vec<Unmapped>) {
        if let Some(waking) = &mut self.waking {
            waking.take(lent);
        }
    }

    /// Returns the bytes of all memory.
    pub(crate) fn used(&self) -> u64 {
        self.sizes.iter().sum()
    }

    /// Returns the bytes of contents.
    pub(crate) fn kept(&self) -> u64 {
        self.saved.iter().flatten().map(Saved::bytes).sum()
    }

    pub(crate) fn kept_in(&self) -> Option<HostStore> {
        self.saved.iter().flatten().next().map(Saved::store)
    }

    pub(crate) fn contents(&mut self) -> Option<(&dyn WakingHolder, WakingParts<'_>)> {
        let waking = self.waking.as_deref()?;
        let ranges = waking.spans().into_iter().zip(&mut self.saved).enumerate();
        let parts =
            ranges.filter_map(|(index, (span, saved))| Some((index, span, saved.as_mut()?)));
        Some((waking, parts.collect()))
    }

    /// Maps all memory without contents, and zeroes what another tenant wrote.
    pub(crate) fn place_memory(&mut self) -> Result<(), BlockError> {
        let saved = self.saved.iter().enumerate();
        let blank = saved.filter_map(|(index, saved)| saved.is_none().then_some(index));
        let blank: Vec<usize> = blank.collect();
        let waking = self.waking.as_mut();
        waking.map_or(Ok(()), |waking| waking.place_blank(&blank))
    }

    /// Ends the move: the holder has its memory and contents again.
    pub(crate) fn wake(mut self) {
        if let Some(waking) = self.waking.take() {
            waking.wake();
        }
    }
}

impl Drop for HolderToWake {
    fn drop(&mut self) {
        if let Some(waking) = self.waking.take() {
            let mut saved = std::mem::take(&mut self.saved);
            let copying = unfinished(saved.iter_mut().flatten());
            waking.sleep_on(saved, copying);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::extents::rig::{G, rig};
    use crate::heap::Heap;
    use crate::paged::{LayerGroup, PagedKv};
    use crate::pool::{Limit, Pool};
    use crate::sync::atomic::{AtomicBool, Ordering};

    // I-111, I-126
    #[test]
    fn work_that_is_queued_after_the_copies_is_waited_for_until_the_sleep_is_cancelled() {
        let rig = rig();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(8 * G));
        let pool = pool.build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let home = Stream::new(&rig.device).unwrap();
        let heap = Heap::builder(&tenant).for_graphs(true).build().unwrap();
        let _live = heap.allocate(G, 1, &home).unwrap();
        let group = LayerGroup::new(1, 1).part(1, G as u32, 1);
        let kv = PagedKv::builder(&tenant, &home, 2).group(group);
        let kv = kv.sleep_after_all_work(true).build().unwrap();
        kv.back(&[0, 1]).unwrap();
        let until = Instant::now().checked_add(Duration::from_secs(600));
        let begin = |owner: &Arc<dyn CanSleep>| {
            let begun = owner.begin_sleep(until, &|| true);
            begun.unwrap().unwrap()
        };
        let withdraw = |holder: &HolderToSleep, wanted: &dyn Fn() -> bool| {
            let moving = holder.moving().unwrap();
            moving.withdraw(wanted)
        };

        // A step that has ended: waiting does not help.
        let holder = begin(&kv.sleeper());
        drop(kv.step());
        let refused = withdraw(&holder, &|| true);
        assert!(matches!(refused, Err(SleepError::CacheBusy { .. })));
        assert!(holder.stay());

        for owner in [heap.sleeper(), kv.sleeper()] {
            let (holder, foreign) = (begin(&owner), rig.busy_stream());
            assert!(withdraw(&holder, &|| false).is_err());
            assert!(holder.stay());
            rig.finish(&foreign);

            let (holder, foreign) = (begin(&owner), rig.busy_stream());
            let asked = AtomicBool::new(false);
            thread::scope(|scope| {
                let wanted = || {
                    asked.store(true, Ordering::SeqCst);
                    true
                };
                let waiting = scope.spawn(move || (withdraw(&holder, &wanted), holder));
                while !asked.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
                rig.finish(&foreign);
                let (withdrawn, holder) = waiting.join().unwrap();
                withdrawn.unwrap();
                holder.sleep(false);
            });
        }
        assert!(heap.is_asleep() && kv.is_asleep());
    }
}
