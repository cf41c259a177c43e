//! One device's memory under a hard limit, shared by tenants.
//!
//! A [`Pool`] never holds more than its limit. [`Tenant`]s allocate [`Block`]s from it, whose
//! addresses are fixed for life and which grow and shrink in place. Freed memory stays mapped, and
//! whoever frees and allocates on one stream makes no driver call. When another tenant needs
//! memory, idle memory is taken back from whoever holds it: never below a guarantee, never before
//! the GPU work that may use it has passed, never while a [`Lease`] lives, and scrubbed on its way.
//!
//! # Limits that change
//! [`Pool::set_limit`], [`Tenant::set_limit`] and [`Tenant::set_guarantee`] change the terms while
//! the pool runs. A limit that is lowered holds at once for whatever is charged next. Idle memory
//! beyond it, above guarantees, is taken back by the call; what is in use is not touched, and is taken back as it comes
//! free. The guarantees of all tenants together are never more than the pool's limit: a limit below
//! them is refused. Memory in use beyond a lowered limit may leave a tenant less than its guarantee
//! until it has come free.
//!
//! # Hardened pools
//! A kernel that uses a block after it was dropped, or runs over its end, usually finds memory
//! there: the next block's, whose bytes it changes. In a pool that was built
//! [`hardened`](PoolBuilder::hardened) it faults instead, as far as the driver's page tables can
//! tell. A copy is refused at the call (`CUDA_ERROR_INVALID_VALUE`) and harms nothing; a kernel
//! loses the context, and so shows itself at the next synchronisation. [`Hardened`] sets how much.
//!
//! - **Guards.** Before each block's addresses and behind its capacity lie addresses where nothing
//!   is ever mapped; between its end and its capacity nothing is mapped either, since growth takes
//!   [no more than it needs](Growth::Exact).
//! - **No reuse in place.** What a block gives up, by being dropped or shrunk, is filled with a
//!   pattern behind its home stream's work, and unmapped when its fence has passed. It is asked for
//!   at that moment, then by each later operation that allocates, grows, shrinks or frees (a few
//!   blocks at a time), by the mapper's thread if there is one, and by [`Pool::trim`]. A lease and
//!   queued work put it off as ever, and until it is unmapped a late user meets the pattern.
//! - **Rest.** The addresses of a block that is gone stay reserved, with nothing behind them, until
//!   so many others are gone after it. Then the driver has them back and may give them to the next
//!   block. They count against the pool's limit of addresses and give way when it is short:
//!   [`PoolStats::resting_addresses`].
//! - **Contents.** Memory that a block gets, or grows by, reads as zero or as the pattern, and as
//!   zero if another tenant wrote to it last or zeros were asked for. Where several streams used a
//!   block, or it had no home stream, it cannot be filled as it is given up: it reads as zero
//!   later. What was [exported](Block::export) is not filled but released, what
//!   [forks](crate::KvCache::fork) share is not filled while another shows it, and a block that
//!   shrank and grows over it at once finds what was there. While a capture guard lives the tenant's own old bytes may show. With
//!   [`fill(None)`](Hardened::fill) all is as in a plain pool.
//!
//! What is not caught: whatever stays within the block's last granule (2 MiB on today's GPUs) or
//! jumps over a guard into another block; a late user between the drop and the unmapping, which
//! meets the pattern or, if it writes, nobody; one that comes after the addresses have rested; and
//! what lies behind a shrunk block's end in one extent with bytes in use
//! ([`PoolStats::stranded`]): an extent is mapped or not as a whole, and
//! [`largest_extent`](PoolBuilder::largest_extent) bounds it.
//!
//! What it costs: each allocation reserves and maps, each free fills and unmaps, about 50 us a
//! block of 2 MiB where a plain pool takes less than one (`cuvmm bench`, rows `hardened_...`).
//! Nothing is warm, so memory that was freed is not to be had again before the work that was queued
//! on it has passed, even on its own stream; and nothing idle stays with a tenant, whose guarantee
//! is kept by the budget alone.
//!
//! # Threads
//! All of it may be used by any number of threads. The pool's lock is held for less than the driver
//! takes for one mapping: while a thread maps, unmaps, creates, releases or waits for the GPU, others
//! allocate cached memory, free, and take leases. A call waits for another thread's driver calls only
//! where it needs the very block, or the memory, that the other one works on; that holds for the
//! `try_` methods too.
//!
//! # Futures
//! [`Tenant::allocate_async`] and [`Block::grow_to_async`] wait as [futures] that any executor polls,
//! and hold no thread meanwhile. The pool needs a [mapper](PoolBuilder::mapper) for them.
//!
//! # What is not here
//! No driver is named here, nothing is rounded here ([`size`](crate) does), and no thread waits but in
//! [`BlockBuilder::allocate`] and [`Block::grow_to`] with a timeout, and at the end of the pool.

mod adjacent;
mod allocate;
#[cfg(debug_assertions)]
mod audit;
mod batch;
mod block;
mod budget;
mod builder;
mod capture;
mod change;
mod commit;
mod compact;
mod core;
mod exported;
mod fills;
mod fork;
mod free_list;
mod freeing;
pub mod futures;
mod gate;
mod grow;
mod hardened;
mod headroom;
mod ids;
mod lease;
mod limits;
mod mapper_calls;
mod moving;
mod pace;
mod precommit;
mod precommit_all;
mod prefix;
mod pressure;
mod purge;
mod queue;
mod reclaim;
mod release;
mod relief;
mod requests;
mod resting;
mod rows;
mod serve;
mod share_table;
mod shared;
mod sleep;
mod sleep_state;
mod slot;
mod state;
mod stats;
mod stream_cache;
mod supply;
mod take;
mod teardown;
mod tenancy;
mod tenant;
mod unshare;
mod wait;
mod wake;
mod wanted;
mod withdraw;

use std::fmt;
use std::sync::Arc;

use cuvmm_driver::HandleTypes;

use self::budget::{Budget, Limits};
use self::core::Core;
use self::hardened::Hardening;
use self::state::{Policy, State};
use crate::calls::CallCounts;
use crate::device::Device;
use crate::error::{ArgumentError, BlockError, CallError, MemoryError, PoolError};
use crate::own::{CloseError, CloseRefusal, creatable_as, nccl_wishes};
use crate::region::{DEFAULT_LARGEST_EXTENT, Mapper};

pub use crate::growth::Growth;
pub use block::Block;
pub use builder::BlockBuilder;
pub use capture::CaptureGuard;
pub use compact::Compaction;
pub use exported::ExportedBlock;
pub(crate) use fork::Prefix;
#[cfg(any(feature = "dlpack", feature = "cudarc"))]
pub(crate) use gate::Use;
pub use hardened::Hardened;
pub use headroom::Headroom;
pub use lease::Lease;
pub use limits::{Limit, LimitChange};
pub(crate) use moving::{Choice, MovingBlock};
pub use pressure::{Pressure, PressureHook};
pub(crate) use sleep::ToSleep;
pub use state::Scrub;
pub use stats::{PoolStats, TenantStats};
pub use tenant::{Tenant, TenantBuilder};
pub(crate) use wait::after;
pub(crate) use wake::ToWake;

/// Mappings a pool may hold by default. The driver's own ceiling is about 524,000 a device.
pub const DEFAULT_MAPPING_LIMIT: u64 = 500_000;

/// Addresses a pool may reserve by default: 64 TiB. The driver has about 128 TiB in all.
pub const DEFAULT_ADDRESS_LIMIT: u64 = 1 << 46;

/// Options of a pool.
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
}

impl<'a> PoolBuilder<'a> {
    /// How much memory the pool may hold; by default it leaves 1 GiB free, or a
    /// sixteenth of a device with less than 16 GiB.
    pub const fn limit(mut self, limit: Limit) -> Self {
        self.limit = limit;
        self
    }

    /// How many extents may be mapped at once.
    pub const fn mapping_limit(mut self, mappings: u64) -> Self {
        self.mappings = mappings;
        self
    }

    /// How many bytes of addresses may be reserved at once.
    pub const fn address_limit(mut self, bytes: u64) -> Self {
        self.addresses = bytes;
        self
    }

    /// The largest extent in bytes, a power of two granules; 1 GiB by default. It is also a promise:
    /// of what a block gives up by shrinking, less than one such extent stays stranded with it. A
    /// small one costs more driver calls, about 50 us for each extent mapped.
    pub const fn largest_extent(mut self, bytes: u64) -> Self {
        self.policy.largest_extent = bytes;
        self
    }

    /// The handle types the memory may be [exported](Block::export) as; none by default, and fixed
    /// at creation. What was exported is never reused: it is released.
    pub const fn shareable(mut self, types: HandleTypes) -> Self {
        self.policy.shareable(types);
        self
    }

    /// Asks for memory that RDMA devices can reach; fixed at creation. Refused where the device says
    /// that it has none (attribute 110).
    pub const fn rdma_capable(mut self, yes: bool) -> Self {
        self.policy.props.rdma_capable = yes;
        self
    }

    /// As NCCL's own allocator (`ncclMemAlloc`) asks for memory, so that it can be registered there:
    /// to be exported as a descriptor, and across nodes and reachable for RDMA where the device can.
    /// Tries [exporting](crate::Physical::probe_export) on a granule for each.
    ///
    /// # Errors
    /// [`MemoryError`] when memory cannot even be exported as a descriptor, or the device does not
    /// answer.
    pub fn for_nccl(self) -> Result<Self, MemoryError> {
        let (types, rdma) = nccl_wishes(self.device)?;
        Ok(self.shareable(types).rdma_capable(rdma))
    }

    /// When memory is zeroed on its way between tenants.
    pub const fn scrub(mut self, scrub: Scrub) -> Self {
        self.policy.scrub = scrub;
        self
    }

    /// How much memory a block that outgrows what it has gets at once; an eighth of its size by
    /// default.
    pub const fn growth(mut self, growth: Growth) -> Self {
        self.policy.growth = growth;
        self
    }

    /// The thread that maps ahead of this pool's growing blocks and unmaps behind. It must be the
    /// same device's. The pool works without one, and goes on when the mapper ends.
    ///
    /// Driver calls made by the mapper's thread are counted apart from then on
    /// ([`Device::mapper_calls`]) for this device handle.
    pub const fn mapper(mut self, mapper: &'a Mapper) -> Self {
        self.mapper = Some(mapper);
        self
    }

    /// How many bytes of the limit the mapper keeps unmapped and ready, taking idle memory above
    /// guarantees back before anybody asks for it; 0 by default. Without a mapper nothing is kept
    /// ready.
    #[doc(alias = "ready")]
    #[doc(alias = "watermark")]
    pub const fn free_target(mut self, bytes: u64) -> Self {
        self.free_target = bytes;
        self
    }

    /// Makes users that come late or run over an end fault, [at a price](self#hardened-pools); off
    /// by default. Growth is [exact](Growth::Exact) then, whatever was said about it.
    pub const fn hardened(mut self, hardened: Hardened) -> Self {
        self.hardened = Some(hardened);
        self
    }

    /// Builds the pool. Takes no memory yet.
    ///
    /// # Errors
    /// [`PoolError`] when a limit cannot be, or no memory can be made for a handle type.
    pub fn build(self) -> Result<Pool, PoolError> {
        let Self {
            device,
            limit,
            mappings,
            addresses,
            mut policy,
            mapper,
            free_target,
            hardened,
        } = self;
        device.own_process()?;
        creatable_as(policy.props.handle_types)?;
        let granule = device.granule();
        let (bytes, leave_free) = limit.of(device)?;
        policy.leave_free = leave_free;
        ArgumentError::not_zero("mappings of a pool", mappings)?;
        ArgumentError::at_least("bytes of a pool's addresses", addresses, granule.bytes())?;
        ArgumentError::extent(policy.largest_extent, granule.bytes())?;
        ArgumentError::at_most("bytes that are kept ready", free_target, bytes)?;
        if mapper.is_some_and(|mapper| !mapper.device().is_same(device)) {
            return Err(ArgumentError::WrongDevice { what: "the mapper" }.into());
        }
        if policy.props.rdma_capable && !device.has_rdma()? {
            return Err(MemoryError::no_rdma(device.location()).into());
        }
        let hardened = hardened
            .map(|it| it.checked(granule, addresses))
            .transpose()?;
        if hardened.is_some() {
            // Precommitted memory is mapped memory behind a block's end.
            policy.growth = Growth::Exact;
        }
        let budget = Budget::new(Limits {
            bytes,
            mappings,
            addresses,
        });
        let mut state = State::new(device.clone(), policy, budget);
        state.hardening = hardened.map(|hardened| Box::new(Hardening::new(hardened)));
        let core = Arc::new(Core::new(device.clone(), state, |state| {
            state.finish_behind();
            state.keep_to_limits();
        }));
        if let Some(waker) = mapper.and_then(Mapper::waker) {
            Core::attach(&core, waker, free_target);
        }
        Ok(Pool { core })
    }
}

/// One device's physical memory under a limit. Clones are the same pool.
///
/// It ends when the last clone, tenant, block and lease have gone; that end waits for the device
/// if memory is still pending free.
#[derive(Clone)]
pub struct Pool {
    core: Arc<Core>,
}

impl Pool {
    /// Sets out to build a pool on a device.
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
        }
    }

    /// The device it lies on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// Changes how much physical memory the pool may hold.
    ///
    /// Where it holds more, idle memory above guarantees goes back to the driver, as
    /// [`trim`](Self::trim) does that.
    /// Of what is left the result says how much it is. Nothing more is charged until the pool holds
    /// less than the limit, and what blocks give up goes to the driver as its work
    /// passes: when memory is next allocated, grown or freed, and by the mapper. Until then a tenant can be
    /// refused below its guarantee.
    ///
    /// Never waits and calls no hook: to have memory come free, ask the tenants.
    ///
    /// # Errors
    /// [`PoolError`] with the figures when the limit is less than a granule, than the guarantees of
    /// the tenants, or than what the mapper keeps ready, or more than the device has: nothing has
    /// changed. Where the driver fails the new limit stands.
    #[doc(alias = "quota")]
    pub fn set_limit(&self, limit: Limit) -> Result<LimitChange, PoolError> {
        self.core.set_limit(limit)
    }

    /// The tenants that are registered, in the order in which that was done.
    #[must_use]
    pub fn tenants(&self) -> Vec<Tenant> {
        self.core.tenants()
    }

    /// The tenant that is registered under a name.
    #[must_use]
    pub fn find_tenant(&self, name: &str) -> Option<Tenant> {
        let mut tenants = self.tenants().into_iter();
        tenants.find(|tenant| tenant.name() == name)
    }

    /// Sets out to register a tenant.
    pub fn tenant(&self, name: impl Into<String>) -> TenantBuilder<'_> {
        TenantBuilder::new(&self.core, name.into())
    }

    /// The figures now. Makes no driver call. A forked child, which has no part in the pool, sees
    /// one without tenants and memory.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.core.look(State::stats)
    }

    /// Driver calls by kind, made through the device handle that the pool was built on: give the
    /// pool a handle [with its own counters](Device::with_own_counters) to count the pool alone.
    #[must_use]
    pub fn calls(&self) -> CallCounts {
        self.core.device.calls()
    }

    /// Gives idle memory back to the driver, as far as its fences have passed, until the pool
    /// holds at most `keep` bytes or nothing idle is left. What a tenant is guaranteed stays with
    /// it, in whole extents. Returns the bytes given back; never waits.
    ///
    /// # Errors
    /// [`CallError`] from the driver; what was given back until then stays given back.
    pub fn trim(&self, keep: u64) -> Result<u64, CallError> {
        self.core.device.own_process()?;
        self.core.lock().trim(keep)
    }

    /// Makes few large extents of many small ones, at the same addresses, and gives what is free in
    /// small physicals to the driver. Works in steps, each of which moves at most the largest extent
    /// and asks `go_on` then with what was done so far: false ends it.
    ///
    /// Bytes under a block are copied on the device (`cuMemcpyDtoDAsync`, waited for), and the copy
    /// takes the place of the original. It needs room within the limit for one run at a time.
    ///
    /// Blocks that have a [`Lease`], work queued on their streams, or memory that was
    /// [exported](Block::export) stay as they are. What is not
    /// queued yet when a block is looked at cannot be seen: while this runs, launch work only on
    /// blocks with a lease. Reading and writing blocks by [`Block::read`] and [`Block::write`] is
    /// safe meanwhile.
    ///
    /// # Errors
    /// [`BlockError`]; what was done until then stays.
    pub fn compact(
        &self,
        go_on: impl FnMut(&Compaction) -> bool,
    ) -> Result<Compaction, BlockError> {
        self.core.device.own_process()?;
        self.core.compact(go_on)
    }

    /// Keeps the pool from doing anything that could break a capture on its context. Waits for the
    /// driver calls that other threads are making for the pool.
    #[must_use]
    pub fn capture_guard(&self) -> CaptureGuard {
        CaptureGuard::new(Arc::clone(&self.core))
    }

    /// Ends the pool: waits for the device if memory is pending free, and gives everything back, what
    /// was quarantined included.
    ///
    /// # Errors
    /// [`CloseError`] with the pool in it while clones, tenants, blocks or leases live, or when
    /// the driver refuses.
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        // While the mapper's thread is at it, it holds the core too.
        let mapper = self.core.detach();
        if Arc::get_mut(&mut self.core).is_none() {
            if let Some(mapper) = mapper {
                Core::reattach(&self.core, mapper);
            }
            return Err(CloseError {
                owner: self,
                reason: CloseRefusal::InUse,
            });
        }
        let shut = self.core.lock().shut();
        match shut {
            Ok(()) => Ok(()),
            Err(cause) => Err(CloseError {
                owner: self,
                reason: CloseRefusal::Call(cause),
            }),
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("device", &self.core.device)
            .finish_non_exhaustive()
    }
}
