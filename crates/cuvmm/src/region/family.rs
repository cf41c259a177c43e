//! Regions in a tenant that are forks of one another, as one holder of the tenant's pool: memory
//! that several of them map is charged once.
//!
//! Memory is lent by the pool and goes back to it. It is charged from the call that lends it until
//! the pool has it back, and so are mappings and addresses.
//!
//! Keeps I-77.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::holder::{ANYWHERE, Shared, Use};
use crate::error::{BlockError, CallError, MemoryError};
use crate::extents::{Fence, LastWriter, Placed, Space, Unmapped};
use crate::ledger::InLine;
use crate::own::Stream;
use crate::pool::{Given, GivenUp, Holder, HolderId, Lending, Tenant, Wait};

/// The regions of a tenant that are forks of one another. They keep their tenant registered and
/// its pool alive.
pub(super) struct Family {
    pub(super) shared: Arc<Shared>,
    pub(super) tenant: Tenant,
    pub(super) holder: HolderId,
    /// The stream on which used memory is cleared: the region's home stream, or else one that is
    /// created when it is needed first.
    home: OnceLock<Stream>,
    timeout: Option<Duration>,
}

/// Where a region's memory comes from.
pub(super) enum Supply {
    Device,
    Tenant(Arc<Family>),
}

impl Supply {
    pub(super) fn of(family: Option<Arc<Family>>) -> Self {
        family.map_or(Self::Device, Self::Tenant)
    }

    /// The holder of the tenant's pool that the region belongs to, unless it is in no tenant.
    pub(super) const fn family(&self) -> Option<&Arc<Family>> {
        match self {
            Self::Device => None,
            Self::Tenant(family) => Some(family),
        }
    }

    /// Refuses an operation that is not possible in a tenant.
    pub(super) const fn check_no_tenant(&self, what: &'static str) -> Result<(), MemoryError> {
        match self {
            Self::Device => Ok(()),
            Self::Tenant(_) => Err(MemoryError::InTenant(what)),
        }
    }
}

/// The space of a region that is being dropped. The pool gets it when its last user is gone: the
/// region, or a registration of its memory.
pub(super) struct Ending {
    family: Arc<Family>,
    space: Option<Space>,
}

impl Ending {
    pub(super) fn new(family: &Arc<Family>, space: Space) -> Arc<Self> {
        Arc::new(Self {
            family: Arc::clone(family),
            space: Some(space),
        })
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(space) = self.space.take() {
            self.family.shared.end_space(space);
        }
    }
}

impl Family {
    pub(super) fn new(
        tenant: &Tenant,
        home: Option<&Stream>,
        timeout: Option<Duration>,
    ) -> Result<Arc<Self>, BlockError> {
        let shared = Arc::new(Shared::new(tenant.device().clone(), tenant.writer()));
        let holder = tenant.attach(Arc::clone(&shared) as Arc<dyn Holder>)?;
        Ok(Arc::new(Self {
            shared,
            tenant: tenant.clone(),
            holder,
            home: home.cloned().map_or_else(OnceLock::new, OnceLock::from),
            timeout,
        }))
    }

    pub(super) fn reserve(&self, size: u64) -> Result<Space, BlockError> {
        self.tenant.reserve_exactly(self.holder, size)
    }

    /// Refuses growth once the tenant is unregistered, and in a forked child.
    pub(super) fn may_grow(&self) -> Result<(), BlockError> {
        self.tenant.device().own_process()?;
        match self.shared.closed.load(Ordering::Relaxed) {
            true => self.tenant.check_usable(),
            false => Ok(()),
        }
    }

    /// Makes an attempt that needs `bytes`, and repeats it as [`Tenant::request`] does, with nothing
    /// of the region out.
    pub(super) fn request<T>(
        &self,
        bytes: u64,
        attempt: impl Fn(Option<InLine>) -> Result<T, BlockError>,
    ) -> Result<T, BlockError> {
        let wait = Wait::of(self.timeout);
        self.tenant
            .request(bytes.max(1), self.home.get(), wait, attempt)
    }

    const fn lending<'a>(&self, sizes: &'a [u64], place: Option<InLine>) -> Lending<'a> {
        Lending {
            holder: self.holder,
            sizes,
            mappings: 0,
            zeroes: true,
            whole: false,
            claims: true,
            place,
        }
    }

    /// Gets extents of these sizes, which may be more, and smaller, if nothing is reclaimed for them.
    pub(super) fn lend_spare(&self, sizes: &[u64]) -> Result<Option<Vec<Unmapped>>, BlockError> {
        let lending = Lending {
            claims: false,
            ..self.lending(sizes, None)
        };
        let lent = self.tenant.lend_spare(lending)?;
        self.shared.add(lent.as_deref().unwrap_or_default());
        Ok(lent)
    }

    /// Lets the mapper call the [worker](Shared::worker) soon, if there is one.
    pub(super) fn call_worker(&self) {
        if self.shared.worker.get().is_some() {
            self.tenant.tidy_later(self.holder);
        }
    }

    fn obtain(&self, lending: Lending<'_>) -> Result<Vec<Unmapped>, BlockError> {
        let lent = self.tenant.lend(lending)?;
        self.shared.add(&lent);
        Ok(lent)
    }

    /// Gets extents of these sizes. They may be more, and smaller.
    pub(super) fn lend(
        &self,
        sizes: &[u64],
        place: Option<InLine>,
    ) -> Result<Vec<Unmapped>, BlockError> {
        self.obtain(self.lending(sizes, place))
    }

    /// Charges for mappings of memory that is lent already.
    pub(super) fn lend_mappings(&self, mappings: u64) -> Result<(), BlockError> {
        self.request(0, |place| {
            let lending = self.lending(&[], place);
            self.obtain(Lending {
                mappings,
                ..lending
            })
            .map(drop)
        })
    }

    /// Gets extents of exactly these sizes.
    pub(super) fn lend_exactly(&self, sizes: &[u64]) -> Result<Vec<Unmapped>, BlockError> {
        self.request(sizes.iter().sum(), |place| {
            let lending = self.lending(sizes, place);
            self.obtain(Lending {
                whole: true,
                ..lending
            })
        })
    }

    /// Gives up physicals that a region has unmapped or not mapped, and the charge for mappings.
    pub(super) fn give_back(&self, unmapped: Vec<Unmapped>, mappings: u64) {
        let given = Given {
            extents: self.shared.end(unmapped),
            mappings,
            ..Given::default()
        };
        self.tenant.give_up(self.holder, given);
    }

    /// Gives up physicals that the tenant may have used. Where another tenant wrote last, its bytes
    /// may still be there too.
    pub(super) fn give_back_used(&self, mut used: Vec<Unmapped>, mappings: u64) {
        let own = self.tenant.writer();
        for unmapped in &mut used {
            let by = match unmapped.last_writer {
                Some(writer) if writer.by != own => LastWriter::SEVERAL,
                _ => own,
            };
            unmapped.last_writer = Some(LastWriter { by, blank: false });
        }
        self.give_back(used, mappings);
    }

    /// Gives up the memory of an owner that falls asleep.
    pub(super) fn give_up_asleep(&self, release: bool, take: impl FnOnce(&mut Given)) -> GivenUp {
        self.tenant.give_up_by(self.holder, release, take).0
    }

    /// Takes over extents without a committed byte, each with the fence of its work.
    pub(super) fn withdraw(&self, extents: Vec<(Placed, Fence)>, known: Use) {
        if extents.is_empty() {
            return;
        }
        self.shared.withdraw(extents.into_iter(), known);
        let reports = self.shared.reports.load(Ordering::Relaxed);
        if reports || self.tenant.is_awaited() {
            self.tenant.note_freed(reports);
        }
    }

    /// Gives the pool the withdrawn extents that overlap some ranges and whose fences are complete,
    /// and the addresses of dropped regions. Returns the bytes. Does nothing while a capture guard
    /// lives.
    pub(super) fn purge(&self, ranges: &[Range<u64>]) -> Result<u64, CallError> {
        self.tenant.device().own_process()?;
        // Not under the lock of the regions: the pool's lock is never taken under it.
        let Some(polling) = self.tenant.polling() else {
            return Ok(0);
        };
        let mut outcome = self.shared.poll().map(|()| 0);
        drop(polling);
        for range in ranges {
            let take = |given: &mut Given| self.shared.give_in(range, u64::MAX, given);
            let (given, error) = self.tenant.give_up_by(self.holder, false, take);
            outcome = error.map_or(outcome, Err).map(|all| all + given.bytes);
        }
        self.tenant.return_addresses(self.holder);
        outcome
    }

    pub(super) fn purge_all(&self) -> Result<u64, CallError> {
        self.purge(&[ANYWHERE])
    }

    /// Purges what dropped regions have left.
    pub(super) fn purge_ended(&self) -> Result<(), CallError> {
        self.tenant.device().own_process()?;
        let ended = self.shared.ended();
        match ended.is_empty() {
            true => Ok(()),
            false => self.purge(&ended).map(drop),
        }
    }

    /// Zeroes ranges of a space on the home stream (`cuMemsetD8Async`), and waits. An error comes
    /// with a fence over the work that may still run.
    pub(super) fn clear(
        &self,
        space: &Space,
        used: &[Range<u64>],
    ) -> Result<(), (BlockError, Fence)> {
        if used.is_empty() {
            return Ok(());
        }
        let refused = |error: BlockError| (error, Fence::complete());
        let home = self.home().map_err(|error| refused(error.into()))?;
        let captures = home.is_capturing();
        let captures = captures.map_err(|error| refused(error.into()))?;
        let polling = self.tenant.polling().filter(|_| !captures);
        let Some(_polling) = polling else {
            let bytes = used.iter().map(|it| it.end - it.start).sum();
            return Err(refused(self.tenant.refused(bytes, true)));
        };
        let mut queued = false;
        let mut cleared = Ok(());
        for range in used {
            cleared = space.fill(home, range.start, 0, range.end - range.start);
            if cleared.is_err() {
                break;
            }
            queued = true;
        }
        if cleared.is_ok() {
            cleared = home.settle().map_err(MemoryError::from);
        }
        cleared.map_err(|error| {
            let mut running = match queued {
                true => Fence::stream(home.clone()),
                false => Fence::complete(),
            };
            if let Err(error) = running.poll() {
                log!(debug, %error, "a fill could not be polled: it counts as running");
            }
            (error.into(), running)
        })
    }

    /// A fence over all fills with zeros.
    pub(super) fn fills(&self) -> Fence {
        let home = self.home.get().cloned();
        home.map_or_else(Fence::complete, Fence::stream)
    }

    fn home(&self) -> Result<&Stream, MemoryError> {
        if let Some(home) = self.home.get() {
            return Ok(home);
        }
        let created = Stream::new(self.tenant.device())?;
        Ok(self.home.get_or_init(|| created))
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        if !self.tenant.device().is_forked() {
            self.tenant.detach(self.holder);
        }
    }
}
