//! One device's memory under a hard limit, shared by tenants.
//!
//! A [`Pool`] never holds more than its limit. [`Tenant`]s allocate [`Block`]s from it. A block's
//! address is fixed for life, and the block grows and shrinks in place. Freed memory stays mapped,
//! so freeing and allocating on one stream makes no driver call. When another tenant needs memory,
//! the pool reclaims idle memory. It never takes a tenant below its guarantee, never takes memory
//! before the GPU work that may use it is complete, nor under a live [`Lease`], and scrubs memory
//! that changes tenants.
//!
//! # Limits that change
//! [`Pool::set_limit`], [`Tenant::set_limit`] and [`Tenant::set_guarantee`] change the terms while
//! the pool runs. A lowered limit applies at once to every new charge. The call reclaims idle
//! memory beyond the limit and above guarantees; memory in use is reclaimed when it becomes free.
//! The guarantees of all tenants together never exceed the pool's limit: a limit below them is
//! refused. While memory in use exceeds a lowered limit, a tenant may have less than its guarantee.
//!
//! # Hardened pools
//! A kernel that uses a dropped block, or runs past a block's end, usually finds mapped memory
//! there, such as the next block, and changes its bytes. In a pool that was built
//! [`hardened`](PoolBuilder::hardened) the kernel faults instead, as far as the driver's page
//! tables allow. A copy is refused at the call (`CUDA_ERROR_INVALID_VALUE`) and does no harm; a
//! kernel loses the context, which the next synchronization reports. [`Hardened`] sets the
//! parameters.
//!
//! - **Guards.** Before each block's addresses and behind its capacity are addresses where nothing
//!   is ever mapped. Between the block's end and its capacity nothing is mapped either, since
//!   growth takes [no more than it needs](Growth::Exact).
//! - **No reuse in place.** Memory that a block gives up, by being dropped or shrunk, is filled
//!   with a pattern behind its home stream's work, and unmapped when its fence is complete. The
//!   fence is polled at that moment, then by each later operation that allocates, grows, shrinks or
//!   frees (a few blocks at a time), by the mapper's thread if there is one, and by [`Pool::trim`].
//!   Leases and queued work delay the unmapping as usual; until then a late access finds the
//!   pattern.
//! - **Rest.** The addresses of a freed block stay reserved with nothing mapped until a [set
//!   number](Hardened::rest_blocks) of other blocks have been freed after it. Then the driver gets
//!   them back and may reuse them for the next block. Resting addresses count against the pool's
//!   address limit, and are released early when that limit is short:
//!   [`PoolStats::resting_addresses`].
//! - **Contents.** Memory that a block gets, or grows by, reads as zero or as the pattern: as zero
//!   if another tenant wrote to it last or if zeros were requested. Memory of a block that several
//!   streams used, or that had no home stream, cannot be filled when it is given up, and reads as
//!   zero later. [Exported](Block::export) memory is released instead of filled. Memory that
//!   [forks](crate::KvCache::fork) share is not filled while another block maps it. A block that
//!   shrinks and at once grows again finds its old bytes. While a capture guard lives, the tenant's
//!   own old bytes may show. With [`fill(None)`](Hardened::fill) contents are as in a plain pool.
//!
//! These are not caught: an access that stays within the block's last granule (2 MiB on today's
//! GPUs) or that jumps over a guard into another block; a late access between the drop and the
//! unmapping, which reads the pattern, or writes to memory that no block uses; an access after the
//! addresses have rested; and an access behind a shrunk block's end within an extent that still
//! holds bytes in use ([`PoolStats::stranded`]). An extent is mapped or unmapped as a whole;
//! [`largest_extent`](PoolBuilder::largest_extent) bounds its size.
//!
//! The cost: each allocation reserves and maps, and each free fills and unmaps, about 50 us for a
//! block of 2 MiB, which takes less than 1 us in a plain pool. No freed memory is kept cached, so
//! it cannot be reused before the work queued on it is complete, even on its own stream. No idle
//! memory stays with a tenant, whose guarantee is kept by the budget alone. A hardened pool serves
//! blocks: a [heap](crate::Heap) over it is refused.
//!
//! # Threads
//! All types may be used by any number of threads. The pool's lock is held for less time than one
//! mapping takes in the driver: while a thread maps, unmaps, creates, releases or waits for the
//! GPU, other threads can allocate cached memory, free blocks and take leases. A call, even of a
//! `try_` method, waits for another thread's driver calls only if it needs the block or the memory
//! that the other thread works on.
//!
//! # Hooks
//! [`TenantBuilder::on_pressure`] and [`TenantBuilder::on_shortage`] install functions that the
//! pool calls when memory is short. See [`on_pressure`](TenantBuilder::on_pressure) for what a hook
//! may call.
//!
//! # Futures
//! [`Tenant::allocate_async`], [`Block::grow_to_async`] and
//! [`PagedKv::back_async`](crate::PagedKv::back_async) return [futures] that any executor can poll; no
//! thread waits for them. They need a [mapper](PoolBuilder::mapper).
//!
//! # Scope
//! A thread waits for memory only in calls with a timeout, such as [`BlockBuilder::allocate`] and
//! [`Block::grow_to`], and at the end of the pool.

mod accounts;
#[cfg(debug_assertions)]
mod audit;
mod blocks;
mod core;
mod gate;
mod holders;
mod line;
mod memory;
mod reclaim;
mod state;
mod stats;
mod supply;
mod teardown;
mod tenant;

use std::fmt;
use std::sync::Arc;

use cuvmm_driver::HandleTypes;

use self::accounts::{Amount, Budget};
use self::blocks::Blocks;
use self::core::Core;
use self::memory::{Memory, Policy};
use self::state::State;
use crate::calls::CallCounts;
use crate::device::Device;
use crate::error::{ArgumentError, BlockError, CallError, MemoryError, PoolError};
use crate::extents::{DEFAULT_LARGEST_EXTENT, Mapper};
use crate::ledger::Ledger;
use crate::own::{
    Access, AccessGrant, CloseError, CloseRefusal, Physical, check_guests, creatable_as, has_rdma,
    nccl_wishes,
};

pub use self::accounts::{Limit, LimitChange};
#[cfg(any(feature = "dlpack", feature = "cudarc"))]
pub(crate) use self::blocks::Use;
pub use self::blocks::compaction::Compaction;
pub(crate) use self::blocks::sharing::Prefix;
pub(crate) use self::blocks::sleep::{
    Choice, GivenUp, Offers, ToSleep, ToWake, TransitioningBlock, settle_exchange,
};
pub use self::blocks::slots::Hardened;
pub use self::blocks::{Block, BlockBuilder, ExportedBlock, Headroom, Lease};
#[cfg(target_os = "linux")]
pub(crate) use self::blocks::{BlockParts, OfferingPool, Promised};
pub use self::gate::CaptureGuard;
pub(crate) use self::gate::Polling;
pub(crate) use self::holders::{
    Attempts, CanSleep, Given, Holder, HolderFigures, HolderId, HolderToSleep, HolderToWake,
    Lending, Marked, MovingHolder, Rest, WakingHolder,
};
pub(crate) use self::line::{HolderRequest, HolderWant, Needs, QueuedAttempt, Wait, after};
pub use self::line::{Pressure, PressureHook, futures};
pub use self::memory::Scrub;
pub use self::stats::{PoolStats, TenantStats};
pub(crate) use self::supply::Room;
pub use self::tenant::{Tenant, TenantBuilder};
pub use crate::growth::Growth;

/// The default limit of mappings in a pool. The driver's own limit is about 524,000 for each
/// device.
pub const DEFAULT_MAPPING_LIMIT: u64 = 500_000;

/// The default limit of reserved addresses in a pool, in bytes: 64 TiB. The driver has about 128
/// TiB in all.
pub const DEFAULT_ADDRESS_LIMIT: u64 = 1 << 46;

/// A builder of a [`Pool`], made by [`Pool::builder`].
#[derive(Clone, Debug)]
#[must_use = "nothing is built before `build`"]
pub struct PoolBuilder<'a> {
    device: &'a Device,
    limit: Limit,
    mappings: u64,
    addresses: u64,
    policy: Policy,
    mapper: Option<&'a Mapper>,
    free_target: u64,
    hardened: Option<Hardened>,
    ledger: Option<&'a Ledger>,
    guests: Vec<AccessGrant>,
}

impl<'a> PoolBuilder<'a> {
    /// Sets how much memory the pool may hold. By default the pool leaves 1 GiB of the device free,
    /// or a sixteenth of a device with less than 16 GiB.
    pub const fn limit(mut self, limit: Limit) -> Self {
        self.limit = limit;
        self
    }

    /// Sets how many extents the pool may have mapped at once: at least 1, by default
    /// [`DEFAULT_MAPPING_LIMIT`].
    pub const fn mapping_limit(mut self, mappings: u64) -> Self {
        self.mappings = mappings;
        self
    }

    /// Sets how many bytes of addresses the pool may reserve at once: at least a granule, by
    /// default [`DEFAULT_ADDRESS_LIMIT`].
    pub const fn address_limit(mut self, bytes: u64) -> Self {
        self.addresses = bytes;
        self
    }

    /// Sets the largest extent in bytes, a granule times a power of two; 1 GiB by default. It also
    /// bounds stranding: less than one such extent of the memory that a block gives up by shrinking
    /// stays with the block. Small extents cost more driver calls, about 50 us for each extent
    /// mapped.
    pub const fn largest_extent(mut self, bytes: u64) -> Self {
        self.policy.largest_extent = bytes;
        self
    }

    /// Sets the handle types that the memory may be [exported](Block::export) as; none by default.
    /// They are fixed when memory is created. Exported memory is never reused: it is released.
    pub const fn shareable(mut self, types: HandleTypes) -> Self {
        self.policy.shareable(types);
        self
    }

    /// Requests memory that RDMA devices can reach (`gpuDirectRDMACapable`), fixed when memory is
    /// created. [`build`](Self::build) [tries](Physical::probe_rdma) it with one granule, once for a
    /// device, and fails if the device does not support it (device attribute 110) or the driver
    /// refuses it.
    pub const fn rdma_capable(mut self, yes: bool) -> Self {
        self.policy.props.rdma_capable = yes;
        self
    }

    /// Requests memory that RDMA devices can reach if the device has such memory, and ordinary
    /// memory if it has none, or if there is too little memory to [try](Physical::probe_rdma) it.
    /// The driver tells which it is: `CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE`.
    ///
    /// # Errors
    /// [`MemoryError`] if the device's context is lost, or the process was forked.
    pub fn rdma_if_supported(self) -> Result<Self, MemoryError> {
        let yes = has_rdma(self.device)?;
        Ok(self.rdma_capable(yes))
    }

    /// Requests memory with the properties that NCCL's own allocator (`ncclMemAlloc`) uses, so that
    /// it can be registered with NCCL: exportable as a file descriptor and, where the device
    /// supports them, as a fabric handle for other nodes and reachable by RDMA devices. Tests each
    /// by [exporting](Physical::probe_export) one granule, or [mapping](Physical::probe_rdma) it.
    ///
    /// # Errors
    /// [`MemoryError`] when memory cannot be exported as a file descriptor, or the device does not
    /// answer.
    pub fn for_nccl(self) -> Result<Self, MemoryError> {
        let (types, rdma) = nccl_wishes(self.device)?;
        Ok(self.shareable(types).rdma_capable(rdma))
    }

    /// Sets when memory is zeroed on its way from one tenant to another.
    pub const fn scrub(mut self, scrub: Scrub) -> Self {
        self.policy.scrub = scrub;
        self
    }

    /// Sets how much memory a block gets at once when it outgrows its memory; an eighth of its size
    /// by default.
    pub const fn growth(mut self, growth: Growth) -> Self {
        self.policy.growth = growth;
        self
    }

    /// Sets the thread that maps memory ahead of growing blocks and unmaps memory behind them: a
    /// mapper of the same device. The pool works without a mapper, and goes on working when the
    /// mapper ends.
    ///
    /// From then on, driver calls made by the mapper's thread for this device handle are counted
    /// separately ([`Device::mapper_calls`]).
    pub const fn mapper(mut self, mapper: &'a Mapper) -> Self {
        self.mapper = Some(mapper);
        self
    }

    /// Sets how many bytes of the limit the mapper keeps unmapped and ready, reclaiming idle memory
    /// above guarantees ahead of requests; 0 by default, at most the pool's limit. Without a mapper
    /// no memory is kept ready.
    #[doc(alias = "ready")]
    #[doc(alias = "watermark")]
    pub const fn free_target(mut self, bytes: u64) -> Self {
        self.free_target = bytes;
        self
    }

    /// Makes late accesses and accesses past a block's end fault, [at a cost](self#hardened-pools);
    /// off by default. Growth is then [exact](Growth::Exact), whatever [`growth`](Self::growth)
    /// sets.
    pub const fn hardened(mut self, hardened: Hardened) -> Self {
        self.hardened = Some(hardened);
        self
    }

    /// Makes the pool take its memory out of a [ledger](crate::ledger), the budget shared by all
    /// processes that open it. The pool keeps its own limit too. The ledger guarantees the
    /// guarantees of its tenants: registering a tenant charges them.
    ///
    /// A request that the ledger refuses fails with [`BlockError::OutOfMemory`], and
    /// [`Shortage::ledger`](crate::error::Shortage::ledger) says why; with a timeout it waits for
    /// other processes.
    #[cfg(target_os = "linux")]
    pub const fn ledger(mut self, ledger: &'a Ledger) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// Gives another device access to the memory of all blocks and heaps of the pool, whenever it
    /// is mapped, in the call that gives the pool's own device access (`cuMemSetAccess`). So a
    /// block keeps the access when it grows, wakes or is compacted. On an H200 that call takes
    /// about twenty times as long with a second device.
    ///
    /// A block without a home stream waits for all work of these devices too before its memory is
    /// reused or unmapped. Use of another block by their streams is [recorded](Block::record_use),
    /// or waited for before the block is dropped.
    #[doc(alias = "peers")]
    #[doc(alias = "cuCtxEnablePeerAccess")]
    pub fn open_to(mut self, device: &Device, access: Access) -> Self {
        self.guests.push(AccessGrant::new(device, access));
        self
    }

    /// Builds the pool. Takes no memory yet.
    ///
    /// # Errors
    /// [`PoolError`] when a limit is out of its range, the mapper or the ledger is another device's, the device
    /// does not support RDMA though it was requested, or memory cannot be created for a handle
    /// type; and when a device that is to be given access belongs to another driver, is the pool's own,
    /// was named before or cannot access the memory.
    pub fn build(self) -> Result<Pool, PoolError> {
        let (device, mapper, ledger) = (self.device, self.mapper, self.ledger);
        let (mappings, addresses) = (self.mappings, self.addresses);
        let mut policy = self.policy;
        device.own_process()?;
        creatable_as(policy.props.handle_types)?;
        check_guests(device, &[], &self.guests)?;
        let granule = device.granule();
        let (bytes, leave_free) = self.limit.of(device)?;
        policy.leave_free = leave_free;
        ArgumentError::not_zero("mappings of a pool", mappings)?;
        ArgumentError::at_least("bytes of a pool's addresses", addresses, granule.bytes())?;
        ArgumentError::extent(policy.largest_extent, granule.bytes())?;
        ArgumentError::at_most("bytes that are kept ready", self.free_target, bytes)?;
        if mapper.is_some_and(|mapper| !mapper.device().is_same(device)) {
            return Err(ArgumentError::WrongDevice("the mapper").into());
        }
        if ledger.is_some_and(|ledger| ledger.device() != device.uuid()) {
            return Err(ArgumentError::WrongDevice("the ledger").into());
        }
        if policy.props.rdma_capable {
            Physical::probe_rdma(device)?;
        }
        let hardened = self.hardened.map(|it| it.checked(granule, addresses));
        let hardened = hardened.transpose()?;
        if hardened.is_some() {
            // Precommitted memory would be mapped behind a block's end, where accesses have to
            // fault.
            policy.growth = Growth::Exact;
        }
        let budget = Budget::new(Amount {
            bytes,
            mappings,
            addresses,
        });
        let memory = Memory::new(device.clone(), policy, budget);
        let state = State::new(memory, Blocks::new(granule, hardened));
        let core = Arc::new(Core::new(device.clone(), self.guests, state, |state| {
            state.finish_deferred();
            state.keep_to_limits();
        }));
        if let Some(waker) = mapper.and_then(Mapper::waker) {
            Core::attach(&core, waker, self.free_target);
        }
        if let Some(ledger) = ledger {
            Core::join(&core, ledger.member());
        }
        Ok(Pool { core })
    }
}

/// One device's physical memory under a hard limit, shared by tenants. Clones are handles to one
/// pool.
///
/// The pool ends when the last clone, tenant, block and lease are dropped. That drop waits for the
/// device if memory is still pending free. If the thread of a mapper or a ledger is working for the
/// pool just then, the pool ends on that thread, a moment after the drop has returned.
/// [`close`](Self::close) returns when the pool has ended.
///
/// # Examples
/// ```rust
/// use cuvmm::{Device, Limit, Pool};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// let device = Device::open(opened.driver, 0)?;
/// let pool = Pool::builder(&device).limit(Limit::Bytes(64 << 20)).build()?;
/// let chat = pool.tenant("chat").guarantee(16 << 20).register()?;
/// let code = pool.tenant("code").register()?;
///
/// let block = chat.allocate(40 << 20)?;
/// let refused = code.allocate(40 << 20).unwrap_err();
/// assert!(refused.is_out_of_memory()); // 24 MiB are left of the limit
/// assert_eq!(pool.stats().in_use, 40 << 20);
/// # drop(block);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "SharedMemoryPool")]
#[derive(Clone)]
pub struct Pool {
    core: Arc<Core>,
}

impl Pool {
    /// Returns a builder of a pool on `device`.
    pub fn builder(device: &Device) -> PoolBuilder<'_> {
        PoolBuilder {
            device,
            limit: Limit::LeaveFree((device.total_memory() / 16).min(1 << 30)),
            mappings: DEFAULT_MAPPING_LIMIT,
            addresses: DEFAULT_ADDRESS_LIMIT,
            policy: Policy::new(device, DEFAULT_LARGEST_EXTENT),
            mapper: None,
            free_target: 0,
            hardened: None,
            ledger: None,
            guests: Vec::new(),
        }
    }

    /// Returns the device of the pool's memory.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// Changes how much physical memory the pool may hold.
    ///
    /// If the pool holds more, releases idle memory above guarantees, as [`trim`](Self::trim) does.
    /// The result says how much the pool still holds beyond the limit. Nothing more is charged
    /// until the pool holds less than the limit. Memory that blocks give up is released once its
    /// work is complete: by later calls that allocate, grow or free, and by the mapper. Until then
    /// a tenant can be refused memory below its guarantee.
    ///
    /// Never waits for the GPU or for memory, and calls no hook; the program has to notify tenants
    /// that are to free memory.
    ///
    /// # Errors
    /// [`PoolError`], with the figures, when the limit is less than a granule, than the guarantees
    /// of the tenants, or than the [free target](PoolBuilder::free_target), or more than the
    /// device's memory: nothing has changed. If a driver call fails, the new limit applies all the
    /// same.
    #[doc(alias = "quota")]
    pub fn set_limit(&self, limit: Limit) -> Result<LimitChange, PoolError> {
        self.core.set_limit(limit)
    }

    /// Returns the registered tenants, in the order of their registration.
    #[must_use]
    pub fn tenants(&self) -> Vec<Tenant> {
        self.core.tenants()
    }

    /// Returns the tenant registered under `name`, if any.
    #[must_use]
    pub fn find_tenant(&self, name: &str) -> Option<Tenant> {
        let mut tenants = self.tenants().into_iter();
        tenants.find(|tenant| tenant.name() == name)
    }

    /// Returns a builder of a tenant. The name must be unique among the registered tenants.
    #[doc(alias = "register_model")]
    pub fn tenant(&self, name: impl Into<String>) -> TenantBuilder<'_> {
        TenantBuilder::new(&self.core, name.into())
    }

    /// Returns the current figures. Makes no driver call. A forked child process sees a pool
    /// without tenants and memory.
    #[doc(alias = "global_stats")]
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.core.look(State::stats)
    }

    /// Returns the driver calls by kind made through the device handle that the pool was built on.
    /// To count the calls of the pool alone, build it on a handle [with its own
    /// counters](Device::with_own_counters).
    #[must_use]
    pub fn calls(&self) -> CallCounts {
        self.core.device.calls()
    }

    /// Releases idle memory whose fences are complete to the driver (`cuMemUnmap`, `cuMemRelease`)
    /// until the pool holds at most `keep` bytes or no idle memory is left. Memory up to a tenant's
    /// guarantee stays with the tenant, in whole extents. Returns the bytes released, plus those by
    /// which maxima of [`TenantMemPool`](crate::TenantMemPool)s fell, whether or not the driver had
    /// given them out. Never waits for the GPU.
    ///
    /// # Errors
    /// [`CallError`] from the driver; memory released before the failure stays released.
    pub fn trim(&self, keep: u64) -> Result<u64, CallError> {
        self.core.device.own_process()?;
        self.core.lock().trim(keep)
    }

    /// Gives the pool the memory that blocks have given up, replaces many small extents by few
    /// large extents at the same addresses, and releases free memory in small physicals to the
    /// driver. Each step moves at most one largest extent, and then calls `go_on` with the progress
    /// so far; the compaction ends when `go_on` returns `false`.
    ///
    /// A block that has [shrunk](Block::shrink_to) keeps the whole extent in which it ends
    /// ([`stranded`](PoolStats::stranded)). That extent is replaced by smaller extents with the
    /// block's bytes; all else goes back to the pool. Afterwards such a block holds its size in
    /// whole granules, and other tenants can have the rest.
    ///
    /// Bytes under a block are copied on the device (`cuMemcpyDtoDAsync`, waited for), and the copy
    /// replaces the original. The limit must have space for the copy of one run at a time; of
    /// blocks that have shrunk those come first of which the least is copied.
    ///
    /// Blocks that have a [`Lease`], work queued on their streams, or [exported](Block::export)
    /// memory are left as they are. Work that is queued after a block was checked cannot be seen:
    /// during a compaction, launch work only on blocks with a lease. [`Block::read`] and
    /// [`Block::write`] are safe meanwhile.
    ///
    /// # Errors
    /// [`BlockError`]; steps before the failure stay done.
    pub fn compact(
        &self,
        go_on: impl FnMut(&Compaction) -> bool,
    ) -> Result<Compaction, BlockError> {
        self.core.device.own_process()?;
        self.core.compact(None, go_on)
    }

    /// Returns a guard. While it lives, the pool makes no driver call that could break a graph
    /// capture on its context. Waits for the driver calls that other threads are making for the
    /// pool.
    #[must_use]
    pub fn capture_guard(&self) -> CaptureGuard {
        CaptureGuard::new(Arc::clone(&self.core))
    }

    /// Ends the pool: waits for the device if memory is pending free, and gives all memory and
    /// addresses back to the driver, including quarantined memory (`cuMemUnmap`, `cuMemRelease`,
    /// `cuMemAddressFree`).
    ///
    /// # Errors
    /// [`CloseError`], which contains the pool, while clones, tenants, blocks or leases live, those
    /// that [hooks](crate::pool::TenantBuilder::on_pressure) own too, or when the driver refuses.
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        // While the mapper's thread works for the pool, the thread holds the core too.
        let mapper = self.core.detach();
        self.core.detach_from_ledger();
        if Arc::get_mut(&mut self.core).is_none() {
            Core::attach_to_ledger(&self.core);
            if let Some(mapper) = mapper {
                Core::reattach(&self.core, mapper);
            }
            return CloseError::of(self, Err(CloseRefusal::InUse));
        }
        let shut = self.core.lock().shut();
        if shut.is_err() {
            Core::attach_to_ledger(&self.core);
        }
        CloseError::of(self, shut)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("device", &self.core.device)
            .finish_non_exhaustive()
    }
}
