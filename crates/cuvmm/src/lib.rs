//! Elastic GPU memory: addresses that never move, and physical memory that is mapped and unmapped
//! under them.
//!
//! CUDA's virtual memory management lets a program reserve far more address space than the GPU has
//! memory, and map physical memory into it piece by piece. This crate makes that safe to use. Several
//! models share one GPU under a hard limit, buffers grow in place, models sleep and wake at the same
//! addresses, and processes share memory without a copy.
//!
//! Memory is handed on only after the GPU work that may use it is complete. An operation that fails
//! leaves everything as it was, and its error carries the figures. Everything runs on a GPU, and
//! without one on the host driver (`driver::host`), which keeps the same rules over ordinary memory.
//!
//! ```
//! use cuvmm::driver::auto;
//! use cuvmm::{Device, Limit, Pool, Stream};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! const MIB: u64 = 1 << 20;
//! let opened = auto::open(auto::OpenOptions::new())?; // a GPU, else host memory
//! let device = Device::open(opened.driver, 0)?;
//! let pool = Pool::builder(&device).limit(Limit::Bytes(256 * MIB)).build()?;
//! let chat = pool.tenant("chat").guarantee(64 * MIB).register()?;
//!
//! let stream = Stream::new(&device)?;
//! let mut cache = chat.block(2 * MIB).capacity(192 * MIB).home_stream(&stream).allocate()?;
//! let address = cache.address();
//! cache.grow_to(160 * MIB)?; // in place
//! assert_eq!(cache.address(), address);
//! drop(cache); // no driver call; stays mapped for the next block on this stream
//! # Ok(())
//! # }
//! ```
//!
//! # Which type do I want?
//!
//! | need | type |
//! |---|---|
//! | share a GPU between models under a hard limit | [`Pool`], [`Tenant`], [`Block`] |
//! | keep memory in place while work may use it | [`Lease`], [`Registration`] |
//! | grow ahead of use, on another thread | [`Mapper`] |
//! | wait for memory without a thread | [`Tenant::allocate_async`], [`PagedKv::back_async`], [`pool::futures`] |
//! | allocations of any size in stream order, for a framework | [`Heap`], [`Allocation`] |
//! | keys and values of many sequences, each contiguous | [`KvCache`] |
//! | keys and values by block number, for kernels with block tables | [`PagedKv`] |
//! | give up an idle model's memory and bring it back at the same addresses | [`Tenant::blocks`], [`HostStore`] |
//! | a vector of one owner that grows in place | [`DeviceVec`] |
//! | an array or a grid with holes | [`SparseArray`], [`SparseGrid`] |
//! | a ring that never wraps for its reader | [`RingBuffer`] |
//! | snapshots of a buffer | [`CowBuffer`] |
//! | one address for the host and the devices | [`UnifiedBuffer`] |
//! | commit and decommit by hand; several devices or host memory in one range | [`Region`], [`Layout`] |
//! | the driver's own objects, with owners | [`Reservation`], [`Physical`], [`Mapping`] |
//! | share one GPU between processes under one limit | [`Ledger`], [`LedgerView`] |
//! | put the processes of a model to sleep together | [`Group`] |
//! | give memory to another process | [`Offer`], [`Channel`], [`Attachment`] |
//! | publish weights that many processes read | [`Publisher`], [`Subscriber`] |
//! | try operations before they are made | the model driver, or the command `cuvmm plan` |
//! | pass memory to cudarc, candle, PyTorch, JAX or CuPy | features `cudarc` and `dlpack` |
//!
//! # Guides
//!
//! - [Serve several models](guides::models)
//! - [Grow a cache](guides::growing)
//! - [Paged caches under existing kernels](guides::paged)
//! - [Handle out of memory](guides::out_of_memory)
//! - [Share one GPU between processes](guides::processes)
//! - [Share weights between processes](guides::sharing)
//! - [Put a model to sleep](guides::sleep)
//! - [Use it with candle, cudarc and DLPack](guides::interop)
//! - [Streams, leases and captures](guides::streams)
//! - [Sparse arrays and grids](guides::sparse)
//! - [Tuning](guides::tuning)
//!
//! The [glossary] has the terms, and the words that other systems use. [Coming from another
//! library](coming_from) has the calls of the driver and of other libraries beside those of this one.
//!
//! # Features
//!
//! `model` is on by default, the others are not.
//!
//! - `cudarc`: the module `cudarc`. Contexts and streams of the crate cudarc, and memory of this
//!   library as its slices.
//! - `dlpack`: the module `dlpack`. Tensors over memory of this library for PyTorch and other
//!   libraries, and tensors of theirs used here.
//! - `metrics`: the figures of ledgers as OpenMetrics text, for Prometheus.
//! - `model`: the host driver and the model of the driver, for machines without a GPU. Without it
//!   [`driver::auto::open`] opens the real driver or returns an error.
//!
//! # Platforms
//!
//! 64-bit Linux; libcuda is loaded at run time, and no CUDA toolkit is needed. Tested on x86-64 with
//! NVIDIA H200 GPUs. The minimum supported Rust version is 1.88.
//!
//! On 64-bit Windows there are no ledgers ([`Ledger`]), no groups ([`Group`]), no sharing over
//! sockets ([`share`]), no dma-bufs ([`DmaBuf`]) and no host driver. Memory is exported as Win32
//! handles. That build ran under Wine on the model, and never on a GPU.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
// What serves ledgers and sharing has no caller on other systems.
#![cfg_attr(not(target_os = "linux"), allow(dead_code))]

/// Guides: how to do common things, step by step.
///
/// They are the files of `docs/guides` in the repository. Their code is tested.
pub mod guides {
    #[doc = include_str!("../docs/guides/models.md")]
    ///
    /// # See also
    /// [`Pool`](crate::Pool), [`PoolBuilder`](crate::pool::PoolBuilder), [`Tenant`](crate::Tenant),
    /// [`Block`](crate::Block), [`PoolStats`](crate::PoolStats), and
    /// [`pool::futures`](crate::pool::futures).
    pub mod models {}

    #[doc = include_str!("../docs/guides/growing.md")]
    ///
    /// # See also
    /// [`Block::grow_to`](crate::Block::grow_to), [`Mapper`](crate::Mapper),
    /// [`Growth`](crate::Growth), [`KvCache`](crate::KvCache), and [`kv`](crate::kv).
    pub mod growing {}

    #[doc = include_str!("../docs/guides/paged.md")]
    ///
    /// # See also
    /// [`paged`](crate::paged), [`PagedKv`](crate::PagedKv), [`FreeNumbers`](crate::paged::FreeNumbers),
    /// [`KvCache`](crate::KvCache), and [`Pressure`](crate::pool::Pressure).
    pub mod paged {}

    #[doc = include_str!("../docs/guides/out-of-memory.md")]
    ///
    /// # See also
    /// [`error`](crate::error), [`Shortage`](crate::error::Shortage),
    /// [`BlockError`](crate::error::BlockError), and [`Pressure`](crate::pool::Pressure).
    pub mod out_of_memory {}

    #[doc = include_str!("../docs/guides/processes.md")]
    ///
    /// # See also
    /// [`ledger`](crate::ledger), [`Ledger`](crate::Ledger), [`LedgerView`](crate::LedgerView), and
    /// [`PoolBuilder::ledger`](crate::pool::PoolBuilder::ledger).
    pub mod processes {}

    #[doc = include_str!("../docs/guides/sharing.md")]
    ///
    /// # See also
    /// [`share`](crate::share), [`Publisher`](crate::share::Publisher),
    /// [`Subscriber`](crate::share::Subscriber), [`Offer`](crate::Offer), and
    /// [`Attachment`](crate::Attachment).
    pub mod sharing {}

    #[doc = include_str!("../docs/guides/sleep.md")]
    ///
    /// # See also
    /// [`sleep`](crate::sleep), [`Tenant::blocks`](crate::Tenant::blocks), [`Group`](crate::Group),
    /// [`HostStore`](crate::HostStore), and [`SleepError`](crate::error::SleepError).
    pub mod sleep {}

    // Its code needs both features.
    #[cfg_attr(
        all(feature = "cudarc", feature = "dlpack"),
        doc = include_str!("../docs/guides/interop.md")
    )]
    #[cfg_attr(
        not(all(feature = "cudarc", feature = "dlpack")),
        doc = "Use it with candle, cudarc and DLPack: shown with the features `cudarc` and `dlpack`."
    )]
    pub mod interop {}

    #[doc = include_str!("../docs/guides/streams.md")]
    ///
    /// # See also
    /// [`Stream`](crate::Stream), [`Lease`](crate::Lease),
    /// [`CaptureGuard`](crate::pool::CaptureGuard), and [`View`](crate::View).
    pub mod streams {}

    #[doc = include_str!("../docs/guides/sparse.md")]
    ///
    /// # See also
    /// [`sparse`](crate::sparse), [`SparseGrid`](crate::SparseGrid),
    /// [`BrickShape`](crate::sparse::BrickShape), [`BrickParams`](crate::sparse::BrickParams), and
    /// [`SparseArray`](crate::SparseArray).
    pub mod sparse {}

    #[doc = include_str!("../docs/guides/tuning.md")]
    ///
    /// # See also
    /// [`PoolBuilder`](crate::pool::PoolBuilder), [`BlockBuilder`](crate::pool::BlockBuilder),
    /// and [`KvCacheBuilder`](crate::kv::KvCacheBuilder).
    pub mod tuning {}
}

#[doc = include_str!("../docs/glossary.md")]
pub mod glossary {}

#[doc = include_str!("../docs/coming-from.md")]
#[doc(alias("baracuda", "oxicuda", "Ignis", "VMMBindings", "candle-cuda-vmm"))]
pub mod coming_from {}

// A page of the repository whose code is tested here.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

#[macro_use]
mod log;

mod calls;
pub mod cow;
#[cfg(feature = "cudarc")]
pub mod cudarc;
mod deferred;
#[cfg(target_os = "linux")]
mod descriptors;
mod device;
pub mod display;
#[cfg(feature = "dlpack")]
pub mod dlpack;
pub mod driver;
mod drops;
mod elements;
#[cfg(not(target_os = "linux"))]
mod elsewhere;
pub mod error;
mod extent_sizes;
mod extents;
#[cfg(target_os = "linux")]
mod fork;
#[cfg(target_os = "linux")]
pub mod group;
mod growth;
pub mod heap;
pub mod kv;
#[cfg(target_os = "linux")]
pub mod ledger;
pub mod mem_pool;
#[cfg(target_os = "linux")]
mod modes;
pub mod own;
pub mod paged;
#[cfg(target_os = "linux")]
mod peer;
pub mod pool;
pub mod recording;
pub mod region;
pub mod ring;
#[cfg(target_os = "linux")]
pub mod share;
mod size;
pub mod sleep;
pub mod sparse;
pub mod store;
mod sync;
pub mod unified;
mod users;
pub mod vec;
pub mod view;
mod wanted;

// Their names, for the modules above.
#[cfg(not(target_os = "linux"))]
use elsewhere::{descriptors, fork, ledger};

/// The crate bytemuck, whose derive macros make a type usable as the elements of a container.
///
/// ```
/// use cuvmm::bytemuck::{Pod, Zeroable};
///
/// #[derive(Clone, Copy, Pod, Zeroable)]
/// #[repr(C)]
/// #[bytemuck(crate = "cuvmm::bytemuck")]
/// struct Point {
///     x: f32,
///     y: f32,
/// }
/// ```
pub use bytemuck;
pub use calls::CallCounts;
pub use cow::CowBuffer;
pub use device::Device;
pub use drops::{DropFailure, DropHook};
pub use error::*;
#[cfg(target_os = "linux")]
pub use group::Group;
pub use heap::{Allocation, Heap};
pub use kv::KvCache;
#[cfg(target_os = "linux")]
pub use ledger::{Ledger, LedgerView};
pub use mem_pool::{CurrentTenantMemPool, TenantMemPool};
pub use own::{
    Access, AccessGrant, CloseError, CloseRefusal, Event, Managed, Mapping, MemPool, Physical,
    Place, PoolAllocation, Reservation, Stream,
};
pub use paged::PagedKv;
pub use pool::{
    Block, Growth, Hardened, Lease, Limit, Pool, PoolStats, Scrub, Tenant, TenantStats,
};
#[cfg(target_os = "linux")]
pub use region::DmaBuf;
pub use region::{Extent, HostExtents, Layout, Mapper, Region, Registration};
pub use ring::RingBuffer;
#[cfg(target_os = "linux")]
pub use share::{Attachment, Channel, Offer, Publisher, Subscriber};
pub use sleep::{Contents, Exchange};
pub use sparse::{SparseArray, SparseGrid};
pub use store::HostStore;
pub use unified::UnifiedBuffer;
pub use vec::DeviceVec;
pub use view::{View, ViewMut};
