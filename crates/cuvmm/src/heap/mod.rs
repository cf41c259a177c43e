//! Memory of any size in stream order, over a tenant.
//!
//! A [`Heap`] serves allocations of any size from extents that its tenant is charged for. An
//! allocation belongs to a stream. Memory of a dropped allocation is free for the next allocation
//! on that stream at once, and for other streams when the work is complete.
//!
//! # Aliases
//! Free memory that lies in several places is joined by mapping it once more: a request that no
//! free run fits gets new addresses at which a free end of one extent, free extents and a free
//! start of another are side by side. The old mappings stay, so nothing is unmapped on the way, and
//! one physical may be mapped at several addresses. Live allocations never overlap.
//!
//! So bytes may be written through one address and read through another, by different allocations,
//! in turn in stream order. On one H200 such reads were coherent in everything tried: plain stream
//! order, programmatic dependent launch with early reads, events, and programmatic edges of graphs.
//! CUDA promises less: a grid that is present when another grid writes need not see the write
//! through another address. A program whose kernels start before the work that they depend on has
//! ended (programmatic dependent launch), and that frees and allocates between them, can turn
//! aliases off ([`HeapBuilder::aliases`]).
//!
//! # Streams
//! - Memory is free **in the order of its stream** from the drop of the allocation on. Work that
//!   was queued on the stream before the drop is complete before work that is queued after the next
//!   allocation.
//! - [`Allocation::record_use`] names another stream whose work uses the memory. The memory is then
//!   reused only when the work of both streams is complete, or behind that work.
//! - A request on another stream gets memory whose work is **complete**; else new memory, as long
//!   as the heap holds little more than its peak; else memory of other streams, **behind their
//!   work**: the stream waits for an event (`cuStreamWaitEvent`). Kernels of two streams that wait
//!   for each other by spinning can then deadlock; [`HeapBuilder::stream_waits`] turns such waits
//!   off.
//!
//! # Graph captures
//! A request on a stream that captures, or while a [capture guard](crate::pool::CaptureGuard)
//! lives, is served from free memory that its stream can use at once, or from new memory. The
//! request is refused ([`BlockError::Capturing`]) if it would have to wait for another stream's
//! work, or to zero memory that another tenant wrote to.
//!
//! A graph needs its memory at each launch. A heap [for graphs](HeapBuilder::for_graphs) keeps all its memory until it is dropped, with its last
//! allocation, or until [its graphs end](Heap::end_graphs): allocations that are made and dropped
//! within the capture serve the graph until then. Allocate from such a heap only in captures. Two
//! graphs whose captures shared a heap may use the same memory: launch in turn. In another heap,
//! memory that is dropped while a stream captures is reused by work outside of the graph, and
//! memory that is allocated may still be used by earlier work of the stream: keep the allocations
//! of a graph alive, and launch it on the stream that was captured, or behind its work.
//!
//! ```rust
//! # use cuvmm::{Device, Heap, Limit, Pool, Stream};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
//! # let device = Device::open(opened.driver, 0)?;
//! # let pool = Pool::builder(&device).limit(Limit::Bytes(64 << 20)).build()?;
//! # let tenant = pool.tenant("decoder").register()?;
//! # let stream = Stream::new(&device)?;
//! let graphs = Heap::builder(&tenant).for_graphs(true).build()?;
//! // ... begin to capture `stream` ...
//! let activations = graphs.allocate(20 << 20, 512, &stream)?;
//! // ... kernels that use them ...
//! drop(activations); // for later kernels of the capture
//! // ... end the capture; launch its graph any number of times ...
//! drop(graphs); // after the last launch has ended
//! # Ok(())
//! # }
//! ```
//!
//! The memory of a graph can [sleep](crate::sleep#heaps) between launches.
//!
//! # Other devices
//! [`HeapBuilder::open_to`] gives other devices access to all the heap's memory, beside those that
//! [the pool is open to](crate::pool::PoolBuilder::open_to). Each mapping grants them access when
//! it is made, in the same call (`cuMemSetAccess`). On an H200 that call takes about twenty times
//! as long with a second device, so give access only to devices that need it. Requests that map
//! nothing cost no more. An allocation still belongs to a stream of the heap's own device: use by
//! another device's stream is [recorded](Allocation::record_use), or waited for before the
//! allocation is dropped.
//!
//! # The pool
//! The pool reclaims extents that are wholly free and whose work is complete, as it reclaims cached
//! blocks, when another request needs memory; [`Heap::trim`] gives them up at once. The rest of the
//! heap's memory stays with the tenant. Free memory of a heap counts as [`cached`] or
//! [`pending_free`] in the tenant's statistics; a guarantee for another tenant can only be given
//! over the memory once it was given up. Memory that the heap holds when it ends goes to the pool
//! as its work completes.
//!
//! An allocation cannot be exported, and no [registration](crate::Registration) names it: its bytes
//! share extents with other allocations, and free bytes beside them are mapped elsewhere and used
//! again. Memory for another process or for a network adapter belongs in a
//! [block](crate::Block::export). A library that registers memory by its address registers whole extents with all allocations in them, and
//! has to end the registration before the allocation is dropped.
//!
//! Contents of new allocations are undefined, but never another tenant's, unless the pool's tenants
//! [trust each other](crate::Scrub::Never).
//!
//! [`cached`]: crate::TenantStats::cached
//! [`pending_free`]: crate::TenantStats::pending_free

mod allocate;
mod allocation;
mod build;
mod cache;
mod chunks;
mod core;
mod counts;
mod extents;
mod gaps;
mod holder;
mod lengths;
mod merge;
#[cfg(target_os = "linux")]
mod offered;
mod ranges;
mod request;
mod rest;
mod sleep;
mod sorted;
mod spaces;
mod stats;
mod stitch;
mod streams;
mod tag;
mod tidy;
mod wake;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use self::allocation::{Lanes, Shared};
use self::cache::Place;
use self::core::{Core, Options};
use self::request::{Request, is_small};
use self::stitch::Policy;
use self::tag::StreamId;
use crate::device::Device;
use crate::error::{ArgumentError, BlockError, CallError, MemoryError};
use crate::own::{Access, AccessGrant, Stream, check_guests};
use crate::pool::{CanSleep, Holder, HolderId, Tenant, Wait};
use crate::size::aligned;

pub use allocation::Allocation;
#[cfg(target_os = "linux")]
pub(crate) use offered::AllocationParts;
pub use stats::HeapStats;

/// The least alignment of an allocation in bytes. Sizes are rounded up to a multiple of it.
pub const ALIGNMENT: u64 = 512;

/// The addresses that a heap reserves for each byte that its tenant may hold.
const ADDRESSES: u64 = 32;

/// How a heap weighs memory against time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Preset {
    /// Holds little more than the live bytes: extents of at most 256 MiB (128 MiB if the tenant may
    /// hold less than 64 GiB), as large as most allocations (8 to 16 MiB in most cases once the heap
    /// holds 7/16 of the bytes that the tenant may hold), and memory is stitched as soon as the heap
    /// holds 1 % more than the peak of live bytes. If a request would be stitched from many much
    /// smaller extents whose work is complete, these are released and fewer are created
    /// (`cuMemUnmap`, `cuMemRelease`, `cuMemCreate`), where the tenant could get that memory anyway.
    /// The default.
    #[default]
    Tight,
    /// Maps seldom, and takes little of the processor's time: extents of up to 1 GiB, 15 % more
    /// than the peak, and freed allocations are kept for requests of the same size.
    Fast,
}

impl Preset {
    const fn policy(self) -> Policy {
        const MIB: u64 = 1 << 20;
        match self {
            Self::Tight => Policy {
                largest: (128 * MIB, 256 * MIB),
                slack: 10,
                parts: 4,
                least: (8 * MIB, 32 * MIB),
                near: 8 * MIB,
                extra: 0,
                aliases: true,
                merges: true,
                drains: true,
            },
            Self::Fast => Policy {
                largest: (1024 * MIB, 1024 * MIB),
                slack: 154,
                parts: 1,
                least: (1024 * MIB, 1024 * MIB),
                near: 1024 * MIB,
                extra: u64::MAX,
                aliases: true,
                merges: false,
                drains: false,
            },
        }
    }
}

/// A builder of a [`Heap`], made by [`Heap::builder`].
#[derive(Clone, Debug)]
#[must_use = "nothing is built before `build`"]
pub struct HeapBuilder<'a> {
    tenant: &'a Tenant,
    preset: Preset,
    aliases: bool,
    waits: bool,
    for_graphs: bool,
    addresses: Option<u64>,
    guests: Vec<AccessGrant>,
}

impl HeapBuilder<'_> {
    /// Sets how memory is weighed against time; [`Preset::Tight`] by default.
    pub const fn preset(mut self, preset: Preset) -> Self {
        self.preset = preset;
        self
    }

    /// Sets whether a physical may be mapped at several addresses at once; `true` by default. With
    /// `false`, free memory that is not in one run cannot be joined, and the heap holds more.
    pub const fn aliases(mut self, yes: bool) -> Self {
        self.aliases = yes;
        self
    }

    /// Sets whether a stream may be made to wait for another stream's work to use its memory
    /// (`cuStreamWaitEvent`); `true` by default.
    pub const fn stream_waits(mut self, yes: bool) -> Self {
        self.waits = yes;
        self
    }

    /// Sets whether the heap is for allocations in graph captures; `false` by default. Such a heap
    /// keeps all memory that it ever had until it ends, or until [its graphs
    /// end](Heap::end_graphs): until then the graphs can be launched, even after the allocations of
    /// the capture are dropped. All of its memory counts as in use, and nothing is unmapped before,
    /// unless the heap is put to [sleep](crate::sleep#heaps).
    /// Captures with the same requests get the same addresses. Where other heaps would map memory
    /// once more very often, this heap takes new memory instead. See [Graph
    /// captures](self#graph-captures).
    pub const fn for_graphs(mut self, yes: bool) -> Self {
        self.for_graphs = yes;
        self
    }

    /// Sets how many bytes of addresses the heap reserves at most. By default 32 times the bytes
    /// that the tenant may hold, at least 1 GiB, at most a quarter of the pool's address limit.
    /// Addresses are reserved in parts as they are needed (`cuMemAddressReserve`): the first part
    /// has a 32nd of them, if that is at least 1 GiB, and each further part as many as all before
    /// it. Parts are smaller if the pool or the platform has few addresses left.
    pub const fn addresses(mut self, bytes: u64) -> Self {
        self.addresses = Some(bytes);
        self
    }

    /// Gives another device access to all the heap's memory, whenever it is mapped, in the call
    /// that gives the heap's own device access (`cuMemSetAccess`), beside the devices that [the
    /// pool is open to](crate::pool::PoolBuilder::open_to). The call then takes many times as long:
    /// see [Other devices](self#other-devices).
    #[doc(alias = "peers")]
    #[doc(alias = "cuCtxEnablePeerAccess")]
    pub fn open_to(mut self, device: &Device, access: Access) -> Self {
        self.guests.push(AccessGrant::new(device, access));
        self
    }

    /// Builds the heap. Takes neither memory nor addresses yet.
    ///
    /// # Errors
    /// [`BlockError`] when the tenant is unregistered; when a device that is to
    /// be given access belongs to another driver, is the heap's own, was named before or cannot access
    /// the memory; and over a [hardened pool](crate::pool#hardened-pools), which serves blocks only.
    pub fn build(self) -> Result<Heap, BlockError> {
        let terms = self.tenant.lending_terms();
        if terms.hardened {
            return Err(ArgumentError::HardenedPool.into());
        }
        check_guests(self.tenant.device(), self.tenant.guests(), &self.guests)?;
        let Self {
            tenant,
            preset,
            aliases,
            waits,
            for_graphs,
            addresses,
            guests,
        } = self;
        let device = tenant.device();
        let granule = device.granule();
        let usual = terms.most.saturating_mul(ADDRESSES).max(1 << 30);
        let usual = usual.min(terms.most_addresses / 4);
        let addresses = granule.round_down(addresses.unwrap_or(usual));
        ArgumentError::at_least(
            "bytes of a heap's addresses",
            addresses,
            4 * granule.bytes(),
        )?;
        let mut policy = Policy {
            aliases,
            ..preset.policy()
        };
        let whole = |(low, high): (u64, u64)| (low.max(granule.bytes()), high.max(granule.bytes()));
        (policy.largest, policy.least) = (whole(policy.largest), whole(policy.least));
        let options = Options {
            policy,
            waits,
            for_graphs,
        };
        let writer = tenant.writer();
        let core = Core::new(device.clone(), options, writer, (addresses, guests));
        let core = Arc::new(core);
        let holder = tenant.attach(Arc::clone(&core) as Arc<dyn Holder>)?;
        Ok(Heap::new(core, tenant, holder))
    }
}

/// An allocator of any size in stream order, over the memory of one tenant. Clones are handles to
/// one heap.
///
/// The heap ends when the last handle and the last allocation are dropped.
///
/// # Examples
/// ```rust
/// use cuvmm::{Device, Heap, Limit, Pool, Stream};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// let device = Device::open(opened.driver, 0)?;
/// let pool = Pool::builder(&device).limit(Limit::Bytes(64 << 20)).build()?;
/// let tenant = pool.tenant("training").register()?;
/// let heap = Heap::builder(&tenant).build()?;
///
/// let stream = Stream::new(&device)?;
/// let weights = heap.allocate(20_000_000, 512, &stream)?;
/// let gradients = heap.allocate(20_000_000, 512, &stream)?;
/// let address = gradients.address();
/// drop(gradients); // free in the order of `stream`
/// let next = heap.allocate(20_000_000, 512, &stream)?;
/// assert_eq!(next.address(), address); // no driver call
/// assert_eq!(heap.stats().live, weights.size() + next.size());
/// # Ok(())
/// # }
/// ```
///
/// Two streams:
/// ```rust
/// # use cuvmm::{Device, Heap, Limit, Pool, Stream};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = Device::open(opened.driver, 0)?;
/// # let pool = Pool::builder(&device).limit(Limit::Bytes(64 << 20)).build()?;
/// # let tenant = pool.tenant("training").register()?;
/// let heap = Heap::builder(&tenant).build()?;
/// let (compute, copies) = (Stream::new(&device)?, Stream::new(&device)?);
/// let batch = heap.allocate(1 << 20, 512, &copies)?;
/// // ... a copy on `copies`, an event, kernels on `compute` ...
/// batch.record_use(&compute)?;
/// drop(batch); // reused when the work of both streams is complete, or behind it
/// # Ok(())
/// # }
/// ```
#[doc(alias = "CUDAPluggableAllocator")]
#[doc(alias = "cudaMallocAsync")]
#[derive(Clone)]
pub struct Heap {
    lanes: Arc<Lanes>,
}

/// An allocation being made. A drop, even after a pressure hook's panic, counts it as not made.
struct Making<'a> {
    core: &'a Core,
    id: StreamId,
    size: u64,
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        let mut state = self.core.lock();
        state.streams.count(self.id, false);
        state.counts.not_made(self.size);
    }
}

impl Heap {
    /// Returns a builder of a heap over a tenant's memory.
    pub const fn builder(tenant: &Tenant) -> HeapBuilder<'_> {
        HeapBuilder {
            tenant,
            preset: Preset::Tight,
            aliases: true,
            waits: true,
            for_graphs: false,
            addresses: None,
            guests: Vec::new(),
        }
    }

    fn new(core: Arc<Core>, tenant: &Tenant, holder: HolderId) -> Self {
        let shared = Shared {
            core,
            tenant: tenant.clone(),
            holder,
        };
        Self {
            lanes: Arc::new(Lanes::new(shared)),
        }
    }

    /// Returns the device of the memory.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.lanes.shared.core.device
    }

    /// Returns the tenant that is charged.
    #[must_use]
    pub fn tenant(&self) -> &Tenant {
        &self.lanes.shared.tenant
    }

    /// Allocates `size` bytes for work on `stream`, at an address that is a multiple of `alignment`
    /// (a power of two, at most the granularity) and of [`ALIGNMENT`]. Calls pressure hooks if
    /// memory is short.
    ///
    /// If an allocation of the same size was freed on the stream a short time ago, its memory is
    /// taken, without a driver call and without a lock that other streams take: with
    /// [`Preset::Tight`] since the last request that needed other memory, with [`Preset::Fast`]
    /// since the last such request of more than 1 MiB. Another request that a free run fits makes
    /// no driver call either, unless the run's work is polled or waited for (`cuEventRecord`,
    /// `cuEventQuery`, `cuStreamQuery`, `cuStreamWaitEvent`). Other requests map (`cuMemMap`,
    /// `cuMemSetAccess`), and may create memory (`cuMemCreate`) and reserve addresses
    /// (`cuMemAddressReserve`).
    ///
    /// # Errors
    /// [`BlockError`]. Live allocations and charges are as before. Memory that nothing used may
    /// have been reclaimed.
    #[inline]
    pub fn allocate(
        &self,
        size: u64,
        alignment: u64,
        stream: &Stream,
    ) -> Result<Allocation, BlockError> {
        self.allocate_in(size, alignment, stream, || Wait::Hooks)
    }

    /// Allocates as [`allocate`](Self::allocate) does, and if memory is short waits until `timeout`
    /// for memory: of this heap, of the pool, or of another process that shares its
    /// [ledger](crate::ledger). Waits only if it could be enough, and not in a pressure hook or
    /// while the stream captures.
    ///
    /// # Errors
    /// Those of [`allocate`](Self::allocate), once the timeout has passed or no waiting can help.
    pub fn allocate_timeout(
        &self,
        size: u64,
        alignment: u64,
        stream: &Stream,
        timeout: Duration,
    ) -> Result<Allocation, BlockError> {
        self.allocate_in(size, alignment, stream, || Wait::of(Some(timeout)))
    }

    #[inline]
    fn allocate_in(
        &self,
        size: u64,
        alignment: u64,
        stream: &Stream,
        wait: impl FnOnce() -> Wait,
    ) -> Result<Allocation, BlockError> {
        let shared = &self.lanes.shared;
        let core = &shared.core;
        let (rounded, alignment) = self.rounded(size, alignment, stream)?;
        let (lane, cache) = self.lanes.of(stream);
        let small = is_small(rounded, alignment);
        if let Some(place) = cache.take(stream, size, alignment, small) {
            return Ok(Allocation::new(lane, place));
        }
        let place = |at, home, small| Place {
            at,
            size,
            rounded,
            home,
            stream: stream.key(),
            small,
        };
        let mut state = core.lock();
        if !state.rest.is_awake() {
            return Err(MemoryError::HeapAsleep(state.large.held()).into());
        }
        if core.policy.drains {
            state.drain_both(cache);
        }
        let id = state.streams.id(stream);
        state.streams.count(id, true);
        if state.has_recorded(id, rounded) && !stream.is_capturing().unwrap_or(true) {
            drop(state);
            // The pool's lock is never taken under the heap's.
            let polling = shared.tenant.polling();
            if polling.is_some() {
                core.lock().refresh_recorded(id, rounded);
            }
            drop(polling);
            state = core.lock();
        }
        let request = Request {
            size: rounded,
            alignment,
            stream,
            id,
            captures: false,
            place: None,
        };
        state.counts.begin(size);
        let found = state.fit_any(request, cache);
        if found.is_some() {
            state.counts.made(size, || core.caches.bytes());
        }
        drop(state);
        let at = match found {
            Some(at) => at,
            None => {
                let making = Making { core, id, size };
                let owner = (&shared.tenant, shared.holder);
                let at = core.serve(owner, request, size, wait())?;
                std::mem::forget(making);
                at
            }
        };
        Ok(Allocation::new(lane, place(at, id, small)))
    }

    /// Checks the arguments of an allocation. Returns its size and alignment rounded up.
    #[inline]
    fn rounded(
        &self,
        size: u64,
        alignment: u64,
        stream: &Stream,
    ) -> Result<(u64, u64), BlockError> {
        let shared = &self.lanes.shared;
        let core = &shared.core;
        core.device.own_process()?;
        core.device.usable()?;
        ArgumentError::not_zero("bytes of an allocation", size)?;
        let what = "an alignment in bytes";
        if !alignment.is_power_of_two() {
            let value = alignment;
            return Err(ArgumentError::NotPowerOfTwo { what, value }.into());
        }
        ArgumentError::at_most(what, alignment, core.device.granularity())?;
        let what = "bytes of an allocation";
        let overflow = ArgumentError::Overflow { what, value: size };
        let rounded = aligned(size, ALIGNMENT).ok_or(overflow)?;
        stream.check_on(&core.device)?;
        if core.closed.load(Ordering::Relaxed) {
            shared.tenant.check_usable()?;
        }
        // No larger request can be served, and its plan would have no bound.
        if rounded > core.addresses {
            return Err(shared.tenant.refused(rounded, false));
        }
        Ok((rounded, alignment.max(ALIGNMENT)))
    }

    /// Gives all wholly free extents whose work is complete to the pool (`cuMemUnmap`), unmaps
    /// unused mappings, and frees the parts of the addresses in which nothing is mapped
    /// (`cuMemAddressFree`). Returns the bytes of memory given. Never waits for the GPU; waits for
    /// the [mapper](crate::Mapper) while it unmaps addresses of this heap.
    ///
    /// # Errors
    /// [`CallError`] from the driver; memory given before stays given.
    pub fn trim(&self) -> Result<u64, CallError> {
        let Shared {
            core,
            tenant,
            holder,
            ..
        } = &*self.lanes.shared;
        core.device.own_process()?;
        // The pool's lock is never taken under the heap's.
        let polling = tenant.polling();
        core.lock_drained().refresh(polling.is_some());
        drop(polling);
        core.release_mappings((tenant, *holder), usize::MAX);
        tenant.take_from(*holder, u64::MAX)
    }

    /// Polls the work that free memory waits for (`cuEventQuery`), unless a [capture
    /// guard](crate::pool::CaptureGuard) lives, and drops the streams whose work is complete and
    /// which no allocation uses. Does nothing in a forked child.
    pub fn refresh(&self) {
        let Shared { core, tenant, .. } = &*self.lanes.shared;
        if core.device.is_forked() {
            return;
        }
        // The pool's lock is never taken under the heap's.
        let polling = tenant.polling();
        core.lock_drained().refresh(polling.is_some());
    }

    /// Ends the use of the heap's memory by graphs: a heap [for graphs](HeapBuilder::for_graphs) is
    /// then an ordinary heap, even for live allocations. Its free memory can be reclaimed and
    /// [trimmed](Self::trim). Call this when no graph that uses the memory will be launched any
    /// more, and the work of all launched graphs is complete.
    pub fn end_graphs(&self) {
        self.lanes.shared.end_graphs();
    }

    /// Returns `true` if the heap is asleep, falling asleep or waking: see
    /// [`Blocks::heap`](crate::sleep::Blocks::heap). Makes no driver call; `false` in a forked child.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        let core = &self.lanes.shared.core;
        !core.device.is_forked() && !core.lock().rest.is_awake()
    }

    /// Returns the heap as an owner that can sleep.
    pub(crate) fn sleeper(&self) -> Arc<dyn CanSleep> {
        Arc::clone(&self.lanes.shared) as Arc<dyn CanSleep>
    }

    /// Returns the current figures. Makes no driver call. In a forked child they are zero.
    #[must_use]
    pub fn stats(&self) -> HeapStats {
        let core = &self.lanes.shared.core;
        match core.device.is_forked() {
            true => HeapStats::default(),
            false => HeapStats::of(&core.lock_drained()),
        }
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap")
            .field("tenant", &self.lanes.shared.tenant)
            .finish_non_exhaustive()
    }
}
