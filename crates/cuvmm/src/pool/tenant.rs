//! Tenants: the named users of a pool.

use std::fmt;
use std::sync::{Arc, Weak};

use super::accounts::{LimitChange, TenantId};
#[cfg(target_os = "linux")]
use super::blocks::OfferingPool;
use super::blocks::compaction::Compaction;
use super::blocks::{Block, BlockBuilder, Owner};
use super::core::Core;
use super::line::{Pressure, PressureHook};
use super::stats::TenantStats;
use crate::device::Device;
use crate::error::{ArgumentError, BlockError, PoolError};
use crate::own::{AccessGrant, Stream};
use crate::wanted::Change;

/// A builder of a [`Tenant`], made by [`Pool::tenant`](super::Pool::tenant).
#[must_use = "nothing is registered before `register`"]
pub struct TenantBuilder<'a> {
    core: &'a Arc<Core>,
    name: String,
    guarantee: u64,
    limit: u64,
    priority: i32,
    hook: Option<PressureHook>,
    shortage_hook: Option<PressureHook>,
}

impl<'a> TenantBuilder<'a> {
    pub(super) fn new(core: &'a Arc<Core>, name: String) -> Self {
        Self {
            core,
            name,
            guarantee: 0,
            limit: u64::MAX,
            priority: 0,
            hook: None,
            shortage_hook: None,
        }
    }

    /// Sets the bytes that the tenant can always have; 0 by default. The guarantees of a pool's
    /// tenants, plus their use beyond their guarantees when a new tenant registers, are at most the
    /// pool's limit.
    pub const fn guarantee(mut self, bytes: u64) -> Self {
        self.guarantee = bytes;
        self
    }

    /// Sets the bytes that the tenant is never charged beyond; the pool's limit by default.
    pub const fn limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Sets the priority; 0 by default. Idle memory is reclaimed from tenants with lower priorities
    /// first, and their hooks are called first.
    pub const fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Installs a function that the pool calls to request memory from this tenant when another
    /// tenant would be refused. The function gives memory back by dropping or shrinking blocks.
    ///
    /// The hook is called when it can help: if this tenant holds memory above its guarantee that
    /// cannot be reclaimed without the hook; if the other tenant's own limit is not the cause; and,
    /// unless the other tenant waits, if the hooks of all tenants together could give the missing
    /// memory. [`Pressure`] has the amounts. A request that does not wait calls a hook at most once.
    /// While a request waits, its hooks are called again about once a second, each once: a tenant may
    /// have more to give by then.
    ///
    /// # What a hook may do
    /// - **It may call** every function of this library, for any pool: drop, shrink, allocate and
    ///   grow blocks, take and drop leases, read statistics, change limits, put blocks to sleep,
    ///   and unregister its own tenant. Calls that need memory neither wait nor call hooks there,
    ///   whatever their timeout: `allocate`, `grow_to`, `fork` and a future's first poll behave
    ///   like the `try_` forms; `compact_prefix`, `sleep` and `wake` fail at once if they would
    ///   have to wait. Calls that copy or synchronize ([`Block::read`], [`Block::write`], `sleep`
    ///   with contents, [`Pool::compact`](super::Pool::compact)) still wait for the GPU, and delay
    ///   the request.
    /// - **It must not wait** for the request that it serves: for a future that was polled before,
    ///   for `sleep_async` or `wake_async`, for a thread that waits for this request, or for a lock
    ///   that the requesting thread may hold while it allocates. The library cannot detect these
    ///   waits.
    /// - **It runs** on the thread that makes the request, or on the mapper's thread for a
    ///   [future](super::line::futures), with no lock of the pool held. On the mapper's thread a
    ///   slow hook delays all pools of that [mapper](crate::Mapper): until it returns no memory is
    ///   placed ahead or unmapped for them, and no future is served. A panic in the hook unwinds
    ///   through the call that made the request; on the mapper's thread it is logged, and the
    ///   mapper goes on.
    /// - **It ends** when the tenant is unregistered, and is dropped without a lock, too. It may own
    ///   blocks of the pool and other tenants. If it owns its own tenant, or a cache, heap or container
    ///   in it, the tenant is registered and the pool lives until [`unregister`](Tenant::unregister) is
    ///   called: give the hook a [`Weak`](std::sync::Weak).
    pub fn on_pressure(mut self, hook: impl Fn(&Pressure) + Send + Sync + 'static) -> Self {
        self.hook = Some(Arc::new(hook));
        self
    }

    /// Installs a function that the pool calls to request memory from this tenant when the tenant's
    /// own request would be refused, before the hooks of other tenants. An example is a prefix
    /// cache that evicts entries for its own model.
    ///
    /// The hook is called if the tenant uses memory, even when the tenant's own limit is the cause.
    /// [`on_pressure`](Self::on_pressure) says how hooks run and what a hook may call.
    #[doc(alias = "evict")]
    pub fn on_shortage(mut self, hook: impl Fn(&Pressure) + Send + Sync + 'static) -> Self {
        self.shortage_hook = Some(Arc::new(hook));
        self
    }

    /// Registers the tenant. Makes no driver call.
    ///
    /// # Errors
    /// [`PoolError`] when the name is empty or taken, when the guarantee is above the tenant's own
    /// limit, or when other guarantees and memory in use leave too little of the pool's limit.
    pub fn register(self) -> Result<Tenant, PoolError> {
        let (core, name) = (self.core, self.name);
        let (guarantee, limit) = (self.guarantee, self.limit);
        core.device.own_process()?;
        ArgumentError::not_zero("bytes of a tenant's name", name.len() as u64)?;
        let mut state = core.lock();
        state.make_guaranteeable(None, guarantee, limit)?;
        let stream_caches = state.blocks.new_stream_caches();
        let unswept = Arc::clone(&stream_caches);
        // User code: a refusal drops these clones under the lock, and the builder after it.
        let hooks = (self.hook.clone(), self.shortage_hook.clone());
        let terms = (name.clone(), self.priority, hooks);
        let id = state.register(terms, unswept, (guarantee, limit))?;
        let owner = Owner {
            core: Arc::clone(core),
            tenant: id,
            stream_caches,
        };
        let shared = Arc::new(Shared {
            owner: Arc::new(owner),
            name,
        });
        let handle: Weak<Shared> = Arc::downgrade(&shared);
        state.memory.budget.set_handle(id, handle);
        drop(state);
        Ok(Tenant { shared })
    }
}

impl fmt::Debug for TenantBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantBuilder")
            .field("name", &self.name)
            .field("guarantee", &self.guarantee)
            .field("limit", &self.limit)
            .field("priority", &self.priority)
            .finish_non_exhaustive()
    }
}

/// A named user of a pool, such as a model. Clones are handles to one tenant.
///
/// The tenant is unregistered when its last clone is dropped or by
/// [`unregister`](Self::unregister). Its blocks stay valid. Their memory stays charged to the
/// tenant, which is *draining* until its last block and lease have ended.
///
/// # Examples
/// ```rust
/// # use cuvmm::{Device, Limit, Pool};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = Device::open(opened.driver, 0)?;
/// # let pool = Pool::builder(&device).limit(Limit::Bytes(64 << 20)).build()?;
/// let model = pool
///     .tenant("model")
///     .guarantee(16 << 20) // bytes it can always have
///     .limit(32 << 20) // bytes it never has more than
///     .priority(1) // reclaimed from after tenants with priority 0
///     .register()?;
/// let block = model.allocate(24 << 20)?;
/// assert!(model.try_allocate(16 << 20).is_err()); // above the tenant's limit
/// model.set_limit(48 << 20)?;
/// let other = model.try_allocate(16 << 20)?;
/// assert_eq!(model.stats().in_use, block.size() + other.size());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Tenant {
    shared: Arc<Shared>,
}

struct Shared {
    owner: Arc<Owner>,
    name: String,
}

impl Shared {
    fn unregister(&self) {
        self.owner.core.unregister(self.owner.tenant);
    }
}

impl Tenant {
    pub(crate) fn device(&self) -> &Device {
        &self.shared.owner.core.device
    }

    /// Returns `true` if both tenants are of one pool.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        Arc::ptr_eq(self.core(), other.core())
    }

    /// Returns a number that this pool returns only once: a reading of its clock, which shows no
    /// time twice.
    pub(crate) fn number(&self) -> u64 {
        self.shared.owner.core.lock().blocks.tick()
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn offering_pool(&self) -> OfferingPool {
        OfferingPool::new(self.core())
    }

    pub(crate) fn guests(&self) -> &[AccessGrant] {
        &self.core().guests
    }

    /// Returns `true` for two handles of one tenant.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    pub(super) fn owner(&self) -> &Owner {
        &self.shared.owner
    }

    /// Returns the tenant's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns a builder of a block of `size` bytes. With a
    /// [capacity](BlockBuilder::capacity) the size may be zero: a range of addresses only.
    pub fn block(&self, size: u64) -> BlockBuilder<'_> {
        BlockBuilder::new(&self.shared.owner, size)
    }

    /// Allocates a block of `size` bytes, calling pressure hooks if memory is short.
    ///
    /// # Errors
    /// As [`BlockBuilder::allocate`].
    #[doc(alias = "allocate_for_model")]
    pub fn allocate(&self, size: u64) -> Result<Block, BlockError> {
        self.block(size).allocate()
    }

    /// Allocates a block of `size` bytes whose home stream is `stream`, calling pressure hooks if
    /// memory is short.
    ///
    /// # Errors
    /// As [`BlockBuilder::allocate`].
    pub fn allocate_on(&self, stream: &Stream, size: u64) -> Result<Block, BlockError> {
        self.block(size).home_stream(stream).allocate()
    }

    /// Allocates a block of `size` bytes if that needs no waiting.
    ///
    /// # Errors
    /// As [`BlockBuilder::try_allocate`].
    pub fn try_allocate(&self, size: u64) -> Result<Block, BlockError> {
        self.block(size).try_allocate()
    }

    /// Changes the bytes that the tenant can always have.
    ///
    /// A guarantee that is not larger than before is always accepted. A larger guarantee follows
    /// the rule of [registering](TenantBuilder::guarantee): idle memory of other tenants beyond
    /// their guarantees is reclaimed when this tenant needs it, memory in use is not.
    ///
    /// # Errors
    /// [`PoolError`], with the figures, when the guarantee is more than the tenant's own limit, or
    /// than other guarantees and memory in use leave of the pool's limit; and when the tenant has
    /// been unregistered. Nothing has changed.
    #[doc(alias = "quota")]
    pub fn set_guarantee(&self, bytes: u64) -> Result<(), PoolError> {
        self.change(Change::Guarantee(bytes)).map(drop)
    }

    /// Changes the bytes that the tenant is never charged beyond. `u64::MAX` stands for the pool's
    /// limit, even after a change.
    ///
    /// If the tenant holds more, its idle memory is reclaimed (`cuMemUnmap`) as far as its work is
    /// complete. The result says how much the tenant still holds beyond the limit. The tenant is
    /// charged nothing more until it holds less than the limit, and memory that it gives up is
    /// reclaimed once its work is complete.
    ///
    /// # Errors
    /// [`PoolError`] when the limit is less than the tenant's guarantee, or the tenant has been
    /// unregistered: nothing has changed. If a driver call fails, the new limit applies all the
    /// same.
    #[doc(alias = "quota")]
    pub fn set_limit(&self, bytes: u64) -> Result<LimitChange, PoolError> {
        self.change(Change::Limit(bytes))
    }

    /// Changes the tenant's priority; see [`TenantBuilder::priority`].
    ///
    /// # Errors
    /// [`PoolError`] when the tenant has been unregistered.
    pub fn set_priority(&self, priority: i32) -> Result<(), PoolError> {
        self.change(Change::Priority(priority)).map(drop)
    }

    fn change(&self, change: Change) -> Result<LimitChange, PoolError> {
        self.core().change_terms(self.id(), change)
    }

    /// Replaces the tenant's [`on_pressure`](TenantBuilder::on_pressure) and
    /// [`on_shortage`](TenantBuilder::on_shortage) hooks by one function for both; `None` removes them.
    /// A call of an old hook that has begun goes on. Makes no driver call.
    ///
    /// # Errors
    /// [`PoolError`] when the tenant has been unregistered.
    #[doc(alias = "evict")]
    pub fn set_hook(&self, hook: Option<PressureHook>) -> Result<(), PoolError> {
        self.core().set_hook(self.id(), hook)
    }

    /// Compacts the tenant's blocks as [`Pool::compact`](crate::Pool::compact) does all blocks of a
    /// pool. The numbers of extents are the tenant's.
    ///
    /// # Errors
    /// [`BlockError`]; steps before the failure stay done.
    pub fn compact(
        &self,
        go_on: impl FnMut(&Compaction) -> bool,
    ) -> Result<Compaction, BlockError> {
        self.core().device.own_process()?;
        self.core().compact(Some(self.id()), go_on)
    }

    /// Returns the tenant's current figures. Makes no driver call. A forked child process sees a
    /// tenant without a name and without memory.
    #[doc(alias = "get_model_stats")]
    #[must_use]
    pub fn stats(&self) -> TenantStats {
        let owner = &self.shared.owner;
        owner.core.look(|state| state.tenant_stats(owner.tenant))
    }

    /// Unregisters the tenant and all its clones: refuses all further allocation and growth, gives
    /// idle memory back to the pool once its work is complete (`cuMemUnmap`), and leaves memory in
    /// use charged until its use ends.
    #[doc(alias = "unregister_model")]
    pub fn unregister(self) {
        self.shared.unregister();
    }
}

impl Core {
    pub(super) fn tenants(&self) -> Vec<Tenant> {
        let handles: Vec<_> = self.look(|state| {
            let all = state.memory.budget.accounts();
            let registered = all.filter(|(_, account)| account.registered);
            let handles = registered.filter_map(|(_, account)| account.handle.clone());
            handles.collect()
        });
        // Without the lock, since a handle may be the last clone of its tenant.
        let alive = handles.iter().filter_map(Weak::upgrade);
        alive
            .filter_map(|handle| handle.downcast().ok())
            .map(|shared| Tenant { shared })
            .collect()
    }
}

impl Tenant {
    pub(super) fn core(&self) -> &Arc<Core> {
        &self.owner().core
    }

    pub(super) fn id(&self) -> TenantId {
        self.owner().tenant
    }

    pub(super) fn has(&self, block: &Block) -> bool {
        block.place().slot.tenant == self.id() && block.is_of(self.core())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.owner.core.device.is_forked() {
            self.unregister();
        }
    }
}

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenant")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}
