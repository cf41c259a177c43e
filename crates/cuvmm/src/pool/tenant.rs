//! A named user of a pool.

use std::fmt;
use std::sync::{Arc, Weak};

use super::block::Block;
use super::budget::TenantId;
use super::builder::BlockBuilder;
use super::core::Core;
use super::limits::LimitChange;
use super::pressure::{Pressure, PressureHook};
use super::stats::TenantStats;
use super::stream_cache::{Owner, StreamCaches};
use super::tenancy::Tenancy;
use crate::device::Device;
use crate::error::{ArgumentError, BlockError, PoolError};
use crate::own::Stream;

/// Slots that are looked at before the lock is let go of.
const SLOTS_AT_ONCE: usize = 256;

/// Options of a tenant.
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

    /// Bytes the tenant can always have; 0 by default. The guarantees of a pool, and what its
    /// tenants use beyond theirs when a new one registers, add up to at most its limit.
    pub const fn guarantee(mut self, bytes: u64) -> Self {
        self.guarantee = bytes;
        self
    }

    /// Bytes the tenant is never charged beyond; the pool's limit by default.
    pub const fn limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Who gives first: idle memory is taken back from lower priorities first. 0 by default.
    pub const fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// A function that is asked to give memory back, by dropping or shrinking blocks, when another
    /// tenant would be refused. It is called on the thread that allocates, with no lock held, and it
    /// may own blocks and tenants of the pool: it is dropped without a lock, too.
    ///
    /// It is called where that can help: if this tenant holds memory above its guarantee that
    /// cannot be taken back without it; if the other tenant's own limit is not what is short; and,
    /// where the other tenant does not wait, if the hooks of all tenants together could give what
    /// is missing. [`Pressure`] says how much that is. Each request calls a hook once at most.
    ///
    /// In a hook everything may be called that may be called elsewhere. What would wait, or call
    /// hooks, does neither on the hook's thread: `allocate`, `grow_to`, `sleep` and `wake` are as their
    /// `try_` forms, for any pool, since a hook that waits for memory might wait for itself.
    pub fn on_pressure(mut self, hook: impl Fn(&Pressure) + Send + Sync + 'static) -> Self {
        self.hook = Some(Arc::new(hook));
        self
    }

    /// A function that is asked to give memory back when this tenant itself would be refused, before
    /// the hooks of others are: a cache of prefixes that evicts for its own model, say. It is called
    /// as the [other hook](Self::on_pressure) is, also where this tenant's own limit is what is
    /// short, if the tenant uses memory.
    #[doc(alias = "evict")]
    pub fn on_shortage(mut self, hook: impl Fn(&Pressure) + Send + Sync + 'static) -> Self {
        self.shortage_hook = Some(Arc::new(hook));
        self
    }

    /// Registers the tenant. Makes no driver call.
    ///
    /// # Errors
    /// [`PoolError`] when the name is empty or taken, or the guarantee does not fit.
    pub fn register(self) -> Result<Tenant, PoolError> {
        let Self {
            core,
            name,
            guarantee,
            limit,
            priority,
            hook,
            shortage_hook,
        } = self;
        core.device.own_process()?;
        if name.is_empty() {
            let what = "bytes of a tenant's name";
            return Err(ArgumentError::Zero { what }.into());
        }
        let mut state = core.lock();
        state.check_guarantee(None, guarantee, limit)?;
        if state
            .tenants
            .values()
            .any(|tenancy| tenancy.registered && tenancy.name == name)
        {
            return Err(PoolError::NameTaken { name });
        }
        let stream_caches = Arc::new(StreamCaches::new(Arc::clone(&state.clock)));
        let unswept = Arc::clone(&stream_caches);
        let mut tenancy = Tenancy::new(name.clone(), priority, hook, unswept);
        tenancy.shortage_hook = shortage_hook;
        if state.hardening.is_some() {
            // Nothing that was freed is handed on as it is: all of it goes the long way.
            drop(tenancy.unswept.close());
        }
        let id = state.register(tenancy, guarantee, limit);
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
        if let Some(tenancy) = state.tenants.get_mut(&id) {
            tenancy.handle = Some(handle);
        }
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

/// A named user of a pool: a model, say. Clones are the same tenant.
///
/// It is unregistered when the last clone is dropped, or by hand. Its blocks live on; what they
/// hold stays charged to it, as a draining tenant, until the last block and lease have ended.
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

    /// A number that nobody else is given by this pool: its clock never shows a time twice.
    pub(crate) fn number(&self) -> u64 {
        self.shared.owner.core.lock().tick()
    }

    pub(super) fn owner(&self) -> &Owner {
        &self.shared.owner
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Sets out to allocate a block of `size` bytes.
    pub fn block(&self, size: u64) -> BlockBuilder<'_> {
        BlockBuilder::new(&self.shared.owner, size)
    }

    /// Allocates a block, asking pressure hooks if memory is short.
    ///
    /// # Errors
    /// As [`BlockBuilder::allocate`].
    pub fn allocate(&self, size: u64) -> Result<Block, BlockError> {
        self.block(size).allocate()
    }

    /// Allocates a block whose home stream is `stream`.
    ///
    /// # Errors
    /// As [`BlockBuilder::allocate`].
    pub fn allocate_on(&self, stream: &Stream, size: u64) -> Result<Block, BlockError> {
        self.block(size).home_stream(stream).allocate()
    }

    /// Allocates a block if that needs no waiting.
    ///
    /// # Errors
    /// As [`BlockBuilder::try_allocate`].
    pub fn try_allocate(&self, size: u64) -> Result<Block, BlockError> {
        self.block(size).try_allocate()
    }

    /// Changes what it can always have.
    ///
    /// A smaller guarantee, or the same, is always given. For a larger one the rule of
    /// [registering](TenantBuilder::guarantee) holds: what others hold idle beyond theirs is taken
    /// back when this tenant wants it, and what they use is not.
    ///
    /// # Errors
    /// [`PoolError`] with the figures when it is more than the tenant's own limit, or than what
    /// other guarantees and memory in use leave of the pool's; and when the tenant has been
    /// unregistered. Nothing has changed.
    #[doc(alias = "quota")]
    pub fn set_guarantee(&self, bytes: u64) -> Result<(), PoolError> {
        self.core().set_guarantee(self.id(), bytes)
    }

    /// Changes what it is never charged beyond; `u64::MAX` for the pool's limit, whatever that is.
    ///
    /// Where the tenant holds more, its idle memory is taken back, as far as its work has passed.
    /// Of what is left the result says how much it is: the tenant is charged nothing more until it
    /// holds less than the limit, and what it gives up is taken back as its work passes.
    ///
    /// # Errors
    /// [`PoolError`] when it is less than the tenant's guarantee, or the tenant has been
    /// unregistered: nothing has changed. Where the driver fails the new limit stands.
    #[doc(alias = "quota")]
    pub fn set_limit(&self, bytes: u64) -> Result<LimitChange, PoolError> {
        self.core().set_tenant_limit(self.id(), bytes)
    }

    /// Changes who gives first; see [`TenantBuilder::priority`].
    ///
    /// # Errors
    /// [`PoolError`] when the tenant has been unregistered.
    pub fn set_priority(&self, priority: i32) -> Result<(), PoolError> {
        self.core().set_priority(self.id(), priority)
    }

    /// Its figures now; in a forked child those of a tenant without a name and memory.
    #[must_use]
    pub fn stats(&self) -> TenantStats {
        let owner = &self.shared.owner;
        owner.core.look(|state| state.tenant_stats(owner.tenant))
    }

    /// Stops all further allocation and growth, gives what is idle back to the pool, and leaves
    /// what is in use charged until it ends. Other clones find themselves unregistered.
    pub fn unregister(self) {
        self.shared.unregister();
    }
}

impl Core {
    /// The tenants that are registered, in the order in which that was done.
    pub(super) fn tenants(&self) -> Vec<Tenant> {
        let state = self.lock();
        let registered = state.tenants.values().filter(|tenancy| tenancy.registered);
        let handles: Vec<Weak<_>> = registered.filter_map(|it| it.handle.clone()).collect();
        drop(state);
        // Without the lock: this may be the last clone of a tenant by now.
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

    /// Whether a block is this tenant's.
    pub(super) fn has(&self, block: &Block) -> bool {
        block.place().slot.tenant == self.id() && block.is_of(self.core())
    }

    /// Bytes of its memory that no block uses or has ahead of its growth: what
    /// [`stats`](Self::stats) show as cached, pending free and leased. The lock is let go of between parts.
    pub(crate) fn idle(&self) -> u64 {
        let (core, id) = (self.core(), self.id());
        let mut state = core.lock();
        state.sweep(id);
        let tenancy = state.tenants.get(&id);
        let mut idle = tenancy.map_or(0, Tenancy::shared_pending_free);
        for first in (0..).step_by(SLOTS_AT_ONCE) {
            let tenancy = state.tenants.get(&id);
            let Some(part) = tenancy.and_then(|it| it.idle_in(first, SLOTS_AT_ONCE)) else {
                break;
            };
            idle += part;
            drop(state);
            state = core.lock();
        }
        idle
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
