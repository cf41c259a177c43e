//! Putting blocks to sleep, and waking them at the same addresses.
//!
//! A model that is not asked anything keeps its addresses and gives its memory to others. When it
//! wakes, all it holds is where it was: pointers, tensors over the memory, captured graphs.
//!
//! - **What sleeps**: all blocks of a tenant, or those with one of some
//!   [tags](crate::pool::BlockBuilder::tag), chosen with [`Tenant::blocks`]. All of them, or none.
//! - **Contents** are [discarded](Contents::Discard) (a cache, weights that are loaded anew), or
//!   [kept](Contents::Keep) in a [`HostStore`], whose memory was prepared beforehand.
//! - **What it takes**: nothing is unmapped while a [`Lease`](crate::Lease) lives on a block or
//!   before the work has passed that was queued on it; [`Blocks::timeout`] says how long to wait
//!   for that. Work that is queued while the blocks are falling asleep is not seen: whoever launches
//!   it takes a lease, or sees to it that there is none.
//! - **A sleeping block** is charged to nobody, grows and shrinks not, and can be dropped. What
//!   touches it on the GPU faults. [`Block::is_asleep`](crate::Block::is_asleep) tells.
//! - **Waking** charges for the memory as allocating does: idle memory of others is taken back for
//!   it, pressure hooks are asked. If it does not fit, all sleep on and the error says what is
//!   missing. A tenant's guarantee is kept for it while it sleeps. What
//!   [forks](crate::Block::fork) share is each one's own when they wake, and takes more than it did.
//!
//! Contents are copied in parts on several streams at once, and blocks are unmapped, or extents
//! mapped, while other parts are being copied.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use cuvmm::driver::host::{HostDriver, HostOptions};
//! use cuvmm::{Contents, Device, HostStore, Pool};
//!
//! # let driver = std::sync::Arc::new(HostDriver::new(HostOptions::new()));
//! # let device = Device::open(driver, 0)?;
//! let pool = Pool::builder(&device).build()?;
//! let model = pool.tenant("model").register()?;
//! let weights = model.block(64 << 20).tag("weights").allocate()?;
//! weights.write(0, b"some weights")?;
//!
//! let store = HostStore::builder(&device).pinned(64 << 20).build()?; // once, in advance
//! model.blocks().sleep(Contents::Keep(&store))?;
//! assert!(weights.is_asleep());
//! assert_eq!(model.stats().committed, 0);
//!
//! model.blocks().wake()?;
//! let mut bytes = [0; 12];
//! weights.read(0, &mut bytes)?;
//! assert_eq!(&bytes, b"some weights");
//! # Ok(())
//! # }
//! ```
//!
//! # What is not here
//! Nobody decides here who sleeps when. Exported blocks do not sleep: others would go on using the
//! memory.

mod apart;
mod down;
mod wake;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::SleepError;
use crate::pool::{Choice, Tenant, after};
use crate::store::HostStore;
use crate::sync::atomic::{AtomicBool, Ordering};

pub use apart::SleepFuture;

/// What becomes of what sleeping blocks hold.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Contents<'a> {
    /// It is lost: what wakes reads as a newly allocated block does.
    Discard,
    /// It is copied to host memory, and back.
    Keep(&'a HostStore),
}

/// How far an operation has come, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Copied so far; unmapped or mapped, where nothing is copied.
    pub done: u64,
    /// In all.
    pub total: u64,
}

/// What was put to sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slept {
    /// How many blocks. Those that slept already do not count.
    pub blocks: u64,
    /// Bytes of memory that were given up, idle memory of the tenant included if all was to sleep.
    pub given: u64,
    /// Bytes of contents kept.
    pub kept: u64,
}

/// What was woken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Woken {
    /// How many blocks. Those that were awake do not count.
    pub blocks: u64,
    /// Bytes of memory that were mapped.
    pub mapped: u64,
    /// Bytes of contents that were brought back.
    pub restored: u64,
}

/// Blocks of a tenant, to be put to sleep or woken together.
#[derive(Clone)]
#[must_use = "nothing sleeps or wakes before `sleep` or `wake`"]
pub struct Blocks<'a> {
    tenant: &'a Tenant,
    tags: Vec<Arc<str>>,
    wait: Option<Duration>,
    release: bool,
    watch: Option<Watch<'a>>,
    /// Set when the operation is to end.
    cancelled: Option<&'a AtomicBool>,
}

/// What is told how far an operation has come, and says whether it goes on.
type Watch<'a> = &'a (dyn Fn(&Progress) -> bool + Sync);

impl Tenant {
    /// All of its blocks, to be put to [sleep](crate::sleep) or woken.
    pub const fn blocks(&self) -> Blocks<'_> {
        Blocks {
            tenant: self,
            tags: Vec::new(),
            wait: None,
            release: false,
            watch: None,
            cancelled: None,
        }
    }
}

impl<'a> Blocks<'a> {
    /// Only those with this tag, or another that was named so.
    pub fn tag(mut self, tag: impl Into<Arc<str>>) -> Self {
        self.tags.push(tag.into());
        self
    }

    /// How long to wait for leases to end and work to pass before sleeping, and for memory in use
    /// to come free before waking. By default not at all; pressure hooks are asked all the same.
    #[doc(alias = "deadline")]
    pub const fn timeout(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Gives the memory to the driver, for other processes (`cuMemRelease`). Otherwise the pool
    /// keeps it for its other tenants, which is quicker, both now and for who has it next.
    pub const fn release(mut self, yes: bool) -> Self {
        self.release = yes;
        self
    }

    /// A function that is told how far it has come, about every 16 MiB that are copied and block by
    /// block where nothing is, and says whether to go on. If not, or if it panics, everything is made
    /// as it was, as after a failure of the driver, and the operation fails with `Cancelled`.
    /// It may use the library, and the same store: a copy that it makes there goes by one stream of
    /// its own (`cuStreamCreate`).
    pub const fn watch(mut self, watch: &'a (dyn Fn(&Progress) -> bool + Sync)) -> Self {
        self.watch = Some(watch);
        self
    }

    /// Puts those of them that are awake to sleep. Where contents are kept this returns when they
    /// have been copied.
    ///
    /// Per extent `cuMemUnmap`, and `cuMemcpyDtoHAsync` for each 2 MiB of contents kept.
    ///
    /// # Errors
    /// [`SleepError`] when a block is leased, exported or still in use, the store has no room, or
    /// the driver refuses. All are as before then, unless the error says that some
    /// [stayed asleep](SleepError::Stayed).
    #[doc(alias("cuMemUnmap", "cuMemcpyDtoHAsync"))]
    pub fn sleep(&self, contents: Contents<'_>) -> Result<Slept, SleepError> {
        match contents {
            Contents::Discard => down::discard(self),
            Contents::Keep(store) => down::keep(self, store),
        }
    }

    /// Wakes those of them that sleep. What was kept is there when this returns, and is kept no
    /// more; zeros that are owed are ordered on each block's home stream.
    ///
    /// Per extent `cuMemMap` and `cuMemSetAccess`, with `cuMemCreate` where the pool's free list
    /// has nothing, and `cuMemcpyHtoDAsync` for each 2 MiB of contents.
    ///
    /// # Errors
    /// [`SleepError`] when there is not enough memory, with the figures, or the driver refuses. All
    /// sleep on then, and what was kept of them is. Where the driver, on top of that, twice refuses to
    /// unmap what had been mapped, or does not say that zeros on their way there have arrived, that
    /// memory is quarantined at the block's addresses, and the block wakes no more.
    #[doc(alias("cuMemMap", "cuMemcpyHtoDAsync"))]
    pub fn wake(&self) -> Result<Woken, SleepError> {
        wake::wake(self)
    }

    const fn choice(&self) -> Choice<'_> {
        Choice(self.tags.as_slice())
    }

    fn until(&self) -> Option<Instant> {
        self.wait.map(after)
    }

    /// Whether it is worth waiting still.
    fn is_wanted(&self) -> bool {
        self.cancelled
            .is_none_or(|cancelled| !cancelled.load(Ordering::SeqCst))
    }

    fn goes_on(&self, done: u64, total: u64) -> bool {
        self.watch
            .is_none_or(|watch| watch(&Progress { done, total }))
    }
}

impl fmt::Debug for Blocks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks")
            .field("tenant", &self.tenant)
            .field("tags", &self.tags)
            .finish_non_exhaustive()
    }
}
