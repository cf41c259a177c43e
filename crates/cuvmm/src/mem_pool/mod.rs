//! Memory pools of the driver within a tenant's limit.
//!
//! Other libraries (candle, cudarc, cubecl) allocate by `cuMemAllocAsync` from the device's
//! *current* memory pool, unseen by this library. A [`TenantMemPool`] bounds them: it charges its
//! tenant what its pools of the driver may hold at most, and gives them that as their maximum. So
//! their memory counts within the limits of the tenant, of its pool and of a
//! [ledger](crate::ledger), appears in their statistics and shortages, and can be reclaimed.
//!
//! # What is charged
//! - The **maximum**, whether or not memory is allocated, in whole steps of 32 MiB. The charge is
//!   made before the driver's pool can be used, and ends when it cannot hold the memory any more.
//! - **One step of 32 MiB more**, for exchanges.
//!
//! The driver cannot change a pool's maximum. So a tenant's pool that
//! [grows](TenantMemPool::reserve) or [shrinks](TenantMemPool::shrink_to) gets a new pool of the
//! driver. Allocations stay in the *older* pool, which stays charged with what it holds and ends
//! with its last allocation. What libraries free there is noticed by the next operation of the
//! tenant's pool, when memory is short, and by the [mapper](crate::Mapper) every 20 ms. Free memory
//! of the older pool goes back to the device: each exchange costs the time to obtain it again.
//!
//! # Reclaim
//! By default none of the maximum is taken while the pool lives: a library that allocates by itself
//! could not ask for it again. With a lower [`minimum`](TenantMemPoolBuilder::minimum), memory that
//! is not in use is given to other tenants that need it, before hooks are called, until only the
//! minimum is left beside what is in use. A program then calls [`reserve`](TenantMemPool::reserve)
//! before each step of its work, which costs a few queries of the driver if nothing was taken.
//!
//! # Races with other libraries
//! - An allocation of another thread in the moment of an exchange may be refused: for a few driver
//!   calls the current pool is one of a single step. It is not refused if the limits leave enough
//!   for the old and the new maximum side by side.
//! - A thread may be inside of `cuMemAllocAsync`, and the driver may have chosen the old pool
//!   already, when that is exchanged. So an exchange of the current pool gives such calls a
//!   millisecond before it reads what the old pool holds. What a call that takes longer then holds
//!   beyond the charge is charged when it is seen, at the latest when memory is short. This is the
//!   one case in which more may be held than is charged.
//! - The driver crashes if a pool is destroyed that was current while another thread is inside of
//!   `cuMemAllocAsync`, also some time later (H200, driver 580). So pools that were current are
//!   [kept](crate::Device::kept_memory_pools) and used again, and never destroyed.
//!
//! # Limits of what is bounded
//!
//! Only what is allocated from the pool is bounded: by [`allocate_on`](TenantMemPool::allocate_on),
//! and by `cuMemAllocAsync` while the pool is [current](TenantMemPool::make_current). Not bounded
//! are `cuMemAlloc`, `cuMemAllocAsync` in a stream capture, `cuMemAllocFromPoolAsync` with memory
//! pools of other libraries, contexts, modules, the workspaces of cuBLAS, other devices and other
//! processes. One tenant's pool at a time can be current on a device, in the whole process.
//!
//! A [ledger](crate::ledger) counts what the driver's pools were last seen to hold as memory of
//! this process, and the rest of what the device has in use as other programs' memory. The figures
//! are read with each operation here, before memory is reclaimed, and once a second. Until then,
//! what a library allocates counts as another program's, so a request may be refused too early;
//! what the driver's pools release by themselves counts as theirs.
//!
//! What is set for the driver's pool of an allocation is lost with the next exchange, except access
//! of other devices given by [`open_to`](TenantMemPoolBuilder::open_to). If the library's pool is
//! dropped while an allocation of another library lives, its bytes stay charged to the ledger until
//! the process ends.
//!
//! The rules of a [hardened pool](crate::pool#hardened-pools) do not apply to this memory.

mod core;
mod current;
mod generations;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use self::core::{Core, Locked};
use self::generations::{Generations, Need, step_of};
use crate::device::Device;
use crate::error::{ArgumentError, BlockError, CallError};
use crate::own::{Access, AccessGrant, PoolAllocation, Stream, check_guests};
use crate::pool::{Holder, HolderId, Tenant, Wait};

pub use current::CurrentTenantMemPool;

/// How often a growth is attempted while other threads allocate, the last time with what the newest
/// pool may hold at most.
const ATTEMPTS: usize = 4;

/// A builder of a [`TenantMemPool`], made by [`Tenant::memory_pool`].
#[derive(Clone, Debug)]
#[must_use = "nothing is built before `build`"]
pub struct TenantMemPoolBuilder<'a> {
    tenant: &'a Tenant,
    maximum: u64,
    minimum: Option<u64>,
    threshold: u64,
    timeout: Option<Duration>,
    guests: Vec<AccessGrant>,
}

impl Tenant {
    /// Returns a builder of a memory pool of the driver that may hold `maximum` bytes, which this
    /// tenant is charged for.
    #[doc(alias = "cuMemPoolCreate")]
    #[doc(alias = "cudaMallocAsync")]
    pub const fn memory_pool(&self, maximum: u64) -> TenantMemPoolBuilder<'_> {
        TenantMemPoolBuilder {
            tenant: self,
            maximum,
            minimum: None,
            threshold: u64::MAX,
            timeout: None,
            guests: Vec::new(),
        }
    }
}

impl TenantMemPoolBuilder<'_> {
    /// Sets the bytes left for further allocations when other tenants need memory: at least a step
    /// of 32 MiB, by default the maximum, so that nothing is taken.
    pub const fn minimum(mut self, bytes: u64) -> Self {
        self.minimum = Some(bytes);
        self
    }

    /// Sets the free bytes that the driver's pool keeps at a synchronization, not rounded to steps;
    /// all by default. The tenant is charged for the maximum in any case.
    pub const fn release_threshold(mut self, bytes: u64) -> Self {
        self.threshold = bytes;
        self
    }

    /// Sets how long [`build`](Self::build) and [`TenantMemPool::reserve`] wait for memory that
    /// other tenants have. By default they call pressure hooks and do not wait.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Gives another device access to all the pool's memory, in whichever pool of the driver it is
    /// (`cuMemPoolSetAccess`, once for each, before anything can be allocated from it).
    #[doc(alias = "peers")]
    #[doc(alias = "cuMemPoolSetAccess")]
    pub fn open_to(mut self, device: &Device, access: Access) -> Self {
        self.guests.push(AccessGrant::new(device, access));
        self
    }

    /// Charges the tenant, and creates the driver's pools (`cuMemPoolCreate`, twice; before it
    /// `cuDeviceGetAttribute` and `cuDriverGetVersion`; `cuMemPoolSetAttribute`; for other devices
    /// `cuDeviceCanAccessPeer` and `cuMemPoolSetAccess`). Obtains no memory yet.
    ///
    /// # Errors
    /// [`BlockError`] when the maximum is zero or less than the minimum, the device has no memory
    /// pools, the driver is older than CUDA 12.2, the limits do not leave the memory, a capture
    /// guard lives, or a device to be given access belongs to another driver, is the pool's own,
    /// was named before or cannot access the memory. Nothing has changed then, except that unused
    /// memory may have been reclaimed.
    pub fn build(self) -> Result<TenantMemPool, BlockError> {
        let Self { tenant, .. } = self;
        let device = tenant.device();
        ArgumentError::not_zero("bytes of a memory pool", self.maximum)?;
        let minimum = self.minimum.unwrap_or(self.maximum);
        ArgumentError::at_most("bytes of a memory pool's minimum", minimum, self.maximum)?;
        let step = step_of(device);
        let what = "bytes of a memory pool";
        let maximum = step.whole(what, self.maximum)?;
        let least = step.whole(what, minimum.max(1))?;
        let charge = maximum.checked_add(step.bytes());
        let value = self.maximum;
        let charge = charge.ok_or(ArgumentError::Overflow { what, value })?;
        tenant.check_usable()?;
        let leave = tenant.polling();
        if leave.is_none() {
            return Err(tenant.refused(charge, true));
        }
        check_guests(device, &[], &self.guests)?;
        let generations = Generations::new(device, self.threshold, least, self.guests);
        // Shows whether the device has such pools, before anything is reclaimed.
        let stand_in = generations.create(device, step.bytes())?;
        drop(leave);
        let core = Arc::new(Core::new(device, step, generations));
        let holder = tenant.attach(Arc::clone(&core) as Arc<dyn Holder>)?;
        // From here on dropping it gives back what was charged.
        let shared = Shared {
            tenant: tenant.clone(),
            core,
            holder,
            timeout: self.timeout,
        };
        let wait = Wait::of(self.timeout);
        tenant.charge_driver_memory(holder, charge, wait)?;
        let mut generations = shared.core.lock();
        generations.allow(charge);
        let begun = generations.create(device, maximum).and_then(|newest| {
            generations.apply_threshold(&newest)?;
            generations.begin((newest, maximum), stand_in);
            Ok(())
        });
        generations.recount();
        drop(generations);
        shared.give_up_returned();
        begun?;
        Ok(TenantMemPool {
            shared: Arc::new(shared),
        })
    }
}

/// A memory pool of the driver within a tenant's limit. Clones are the same pool.
///
/// The [module](self) describes what is charged and when.
///
/// The pool ends when the last clone and the last [`CurrentTenantMemPool`] are dropped, or its
/// tenant is unregistered: it is not current any more, and what still lives in it stays charged to
/// the tenant until it is freed.
///
/// # Examples
/// ```rust
/// use cuvmm::{Device, Limit, Pool, Stream};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// const MIB: u64 = 1 << 20;
/// let device = Device::open(opened.driver, 0)?;
/// let pool = Pool::builder(&device).limit(Limit::Bytes(512 * MIB)).build()?;
/// let tenant = pool.tenant("model").limit(320 * MIB).register()?;
///
/// let memory = tenant.memory_pool(192 * MIB).minimum(32 * MIB).build()?;
/// assert_eq!(tenant.stats().committed, 224 * MIB); // and 32 MiB for exchanges
/// let current = memory.make_current()?; // other libraries allocate from it from here on
///
/// let stream = Stream::new(&device)?;
/// let scratch = memory.allocate_on(&stream, 100 * MIB)?; // as they do
/// assert!(memory.allocate_on(&stream, 100 * MIB).is_err());
/// memory.reserve(128 * MIB)?; // the tenant is charged for more
/// drop(memory.allocate_on(&stream, 100 * MIB)?);
/// drop((scratch, current));
/// # Ok(())
/// # }
/// ```
#[doc(alias = "CUmemoryPool")]
#[doc(alias = "cudaMemPool_t")]
#[derive(Clone)]
pub struct TenantMemPool {
    shared: Arc<Shared>,
}

struct Shared {
    tenant: Tenant,
    core: Arc<Core>,
    holder: HolderId,
    timeout: Option<Duration>,
}

/// Figures of a [`TenantMemPool`], in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct TenantMemPoolStats {
    /// The bytes that can be in use at the same time at most: the maximum of the newest pool of the
    /// driver, and what older ones hold, whose free part cannot be allocated.
    pub maximum: u64,
    /// The bytes that the tenant is charged.
    pub charged: u64,
    /// The bytes in use, as they were asked for.
    pub in_use: u64,
    /// The bytes that the driver holds for it.
    pub reserved: u64,
    /// The number of older pools of the driver, in which allocations live.
    pub older_pools: u64,
    /// The bytes that they hold.
    pub older_held: u64,
    /// `true` if the pool was made the current one.
    pub is_current: bool,
}

impl Shared {
    /// Ends the charge for what is not needed any more.
    fn give_up_returned(&self) {
        self.tenant.give_up(self.holder, self.core.given(None));
        self.tenant.count_obtained(self.holder);
    }

    /// Works on the driver's pools, and settles what that changes for the tenant.
    fn work<T>(
        &self,
        wanted: u64,
        work: impl FnOnce(&mut Locked<'_>) -> Result<T, BlockError>,
    ) -> Result<T, BlockError> {
        self.tenant.check_usable()?;
        let Some(leave) = self.tenant.polling() else {
            return Err(self.tenant.refused(wanted, true));
        };
        let mut generations = self.core.lock();
        let device = &self.core.device;
        let done = device.relaxed(|| work(&mut generations));
        drop(generations);
        drop(leave);
        self.give_up_returned();
        if self.core.view().older > 0 {
            self.tenant.tidy_later(self.holder);
        }
        done?
    }

    /// Charges the tenant `wished` bytes if that needs neither hooks nor waiting, and otherwise
    /// `least`. Returns the bytes.
    fn charge(&self, least: u64, wished: u64, wait: Wait) -> Result<u64, BlockError> {
        let charge = |bytes, wait| match bytes {
            0 => Ok(0),
            _ => {
                let charged = self.tenant.charge_driver_memory(self.holder, bytes, wait);
                charged.map(|()| bytes)
            }
        };
        if wished > least
            && let Ok(bytes) = charge(wished, Wait::Never)
        {
            return Ok(bytes);
        }
        charge(least, wait)
    }

    fn reserve(&self, additional: u64, wait: Wait) -> Result<(), BlockError> {
        let what = "bytes to be reserved";
        ArgumentError::not_zero(what, additional)?;
        let bytes = self.core.step.whole(what, additional)?;
        let _growing = self.core.grow();
        for attempt in 1..=ATTEMPTS {
            let at_worst = attempt == ATTEMPTS;
            let need = self.work(bytes, |generations| {
                Ok(generations.need(additional, bytes, at_worst)?)
            })?;
            let Need::Charge {
                bytes: least,
                wished,
            } = need
            else {
                return Ok(());
            };
            let mut charged = self.charge(least, wished, wait)?;
            let device = &self.core.device;
            let grown = self.work(bytes, |generations| {
                let charged = std::mem::take(&mut charged);
                Ok(generations.grow(device, charged, bytes)?)
            });
            if !matches!(grown, Ok(true)) {
                let mut generations = self.core.lock();
                generations.allow(charged);
                generations.recount();
                drop(generations);
                self.give_up_returned();
            }
            if grown? {
                return Ok(());
            }
        }
        Err(self.tenant.refused(bytes, false))
    }
}

impl TenantMemPool {
    /// Returns the tenant.
    #[must_use]
    pub fn tenant(&self) -> &Tenant {
        &self.shared.tenant
    }

    /// Ensures that `additional` bytes can be allocated beyond what is in use now, as far as one
    /// range of free memory is as large as each allocation. Charges the tenant for what is missing,
    /// reclaims memory for that and calls hooks, and exchanges the driver's pool
    /// (`cuMemPoolGetAttribute`; for an exchange `cuMemPoolTrimTo`, `cuMemPoolCreate`,
    /// `cuMemPoolSetAttribute`, `cuDeviceGetMemPool`, `cuDeviceSetMemPool`; `cuMemPoolDestroy` if
    /// the pool was never current).
    ///
    /// After an exchange, the [minimum](TenantMemPoolBuilder::minimum) can be allocated as well if
    /// it can be charged without hooks. Otherwise less than the minimum can be allocated once the
    /// older pool frees its memory, until the next exchange. Of what several threads reserve at
    /// once, only the largest is sure.
    ///
    /// # Errors
    /// [`BlockError`] when `additional` is zero, the limits do not leave the memory, the tenant was
    /// unregistered, a capture guard lives, or the driver refuses. The pool is as before, except
    /// that unused memory may have gone back to the device, older pools may have ended, and if the
    /// driver refuses to set the pool again, libraries have a single step until the next operation.
    pub fn reserve(&self, additional: u64) -> Result<(), BlockError> {
        let wait = Wait::of(self.shared.timeout);
        self.shared.reserve(additional, wait)
    }

    /// Ensures that `additional` bytes can be allocated, if that needs neither hooks nor waiting.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn try_reserve(&self, additional: u64) -> Result<(), BlockError> {
        self.shared.reserve(additional, Wait::Never)
    }

    /// Ensures that `bytes` can be in use at the same time, as [`reserve`](Self::reserve) does for
    /// those that are not in use.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn grow_to(&self, bytes: u64) -> Result<(), BlockError> {
        ArgumentError::not_zero("bytes of a memory pool", bytes)?;
        match bytes.saturating_sub(self.stats()?.in_use) {
            0 => Ok(()),
            additional => self.reserve(additional),
        }
    }

    /// Gives up what exceeds `bytes` and is not in use, and exchanges the driver's pool for that,
    /// by the calls of [`reserve`](Self::reserve). At least a step of 32 MiB can be allocated
    /// afterwards. Returns the bytes that the tenant is charged less.
    ///
    /// # Errors
    /// [`BlockError`] when the tenant was unregistered, a capture guard lives, or the driver
    /// refuses. The pool is as before, except that unused memory may have gone back to the device.
    pub fn shrink_to(&self, bytes: u64) -> Result<u64, BlockError> {
        let device = &self.shared.core.device;
        let before = self.shared.work(0, |generations| {
            let before = generations.view().held;
            generations.shrink(device, bytes)?;
            Ok(before)
        })?;
        Ok(before.saturating_sub(self.shared.core.view().held))
    }

    /// Returns memory that is not in use to the device (`cuMemPoolTrimTo`). Returns the bytes. The
    /// tenant stays charged for the maximum.
    ///
    /// # Errors
    /// As [`shrink_to`](Self::shrink_to).
    pub fn trim(&self) -> Result<u64, BlockError> {
        self.shared.work(0, |generations| Ok(generations.trim()?))
    }

    /// Returns the current figures (`cuMemPoolGetAttribute`; `cuMemPoolTrimTo` for older pools).
    ///
    /// # Errors
    /// As [`shrink_to`](Self::shrink_to).
    pub fn stats(&self) -> Result<TenantMemPoolStats, BlockError> {
        self.shared.work(0, |generations| {
            generations.look()?;
            Ok(generations.stats())
        })
    }

    /// Allocates in the order of a stream (`cuStreamIsCapturing`, `cuMemAllocFromPoolAsync`), within
    /// the maximum.
    ///
    /// # Errors
    /// [`BlockError`] when the size is 0, the stream is another device's or captures, the tenant was
    /// unregistered, or the pool has no more memory: [`reserve`](Self::reserve) more.
    #[doc(alias = "cuMemAllocFromPoolAsync")]
    pub fn allocate_on(&self, stream: &Stream, size: u64) -> Result<PoolAllocation, BlockError> {
        self.shared.tenant.check_usable()?;
        // Under the lock, so that the pool is not exchanged meanwhile.
        let generations = self.shared.core.lock();
        match generations.newest() {
            Some(pool) => Ok(pool.allocate_within(stream, size)?),
            None => Err(CallError::InUse.into()),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.core.device.is_forked() {
            self.core.close();
            self.tenant.detach(self.holder);
        }
    }
}

impl fmt::Debug for TenantMemPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantMemPool")
            .field("tenant", &self.shared.tenant)
            .finish_non_exhaustive()
    }
}
