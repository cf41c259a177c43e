//! Options of a cache.

use std::sync::Arc;
use std::time::Duration;

use super::KvCache;
use super::sequences::Sequences;
use super::shape::{Geometry, Layout, Shape};
use crate::error::{ArgumentError, KvCacheError};
use crate::own::Stream;
use crate::pool::{Growth, Tenant};

/// A cache grows by so small a part of a sequence: the memory that lies ahead of use is bound to
/// the sequence's end, and there are many ends.
const PART: u64 = 64;

/// The largest extent of a sequence. A driver maps and unmaps extents whole: one that reaches over
/// a sequence's end is of no use to anybody. One that reaches over the end of a common prefix cannot
/// be shared.
const LARGEST_EXTENT: u64 = 8 << 20;

/// How a cache's blocks are to be.
#[derive(Clone, Debug)]
pub(super) struct Options {
    pub(super) growth: Growth,
    pub(super) largest_extent: u64,
    pub(super) tag: Option<Arc<str>>,
    pub(super) zeroed: bool,
    pub(super) may_fork: bool,
    pub(super) wait: Option<Duration>,
}

/// Options of a cache.
#[derive(Clone, Debug)]
#[must_use = "nothing is built before `build`"]
pub struct KvCacheBuilder<'a> {
    tenant: &'a Tenant,
    home: &'a Stream,
    shape: Shape,
    layout: Layout,
    options: Options,
}

impl<'a> KvCacheBuilder<'a> {
    pub(super) const fn new(tenant: &'a Tenant, home: &'a Stream, shape: Shape) -> Self {
        Self {
            tenant,
            home,
            shape,
            layout: Layout::TokenMajor,
            options: Options {
                growth: Growth::Part(PART),
                largest_extent: LARGEST_EXTENT,
                tag: None,
                zeroed: false,
                may_fork: false,
                wait: None,
            },
        }
    }

    /// How a sequence lies in memory; [token-major](Layout::TokenMajor) by default.
    pub const fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// How much memory a sequence that outgrows what it has gets at once: by default up to a
    /// sixty-fourth of what it has, where a plain block gets an eighth. With a mapper up to twice
    /// that lies ahead, and a granule at least. Without a mapper a layer-major sequence gets what its
    /// ranges grow by for one range after the other, over the tokens of its last quarter granule;
    /// with [`Growth::Exact`] it gets it when it needs it.
    pub const fn growth(mut self, growth: Growth) -> Self {
        self.options.growth = growth;
        self
    }

    /// The largest extent of a sequence in bytes, a power of two granules; 8 MiB by default. Small
    /// ones let a sequence take over what any other left; they cost more driver calls where memory is
    /// cold, about 50 us each.
    pub const fn largest_extent(mut self, bytes: u64) -> Self {
        self.options.largest_extent = bytes;
        self
    }

    /// A word that the tenant's statistics show beside the sequences' memory.
    pub fn tag(mut self, tag: impl Into<Arc<str>>) -> Self {
        self.options.tag = Some(tag.into());
        self
    }

    /// Whether a token that is new, or comes again after a truncation, reads as zero until it is
    /// written; off by default. For kernels that read beyond a sequence's end and multiply what they
    /// find by zero, which makes nothing of a number and something of a NaN. Without it a sequence
    /// may show what another one of the same tenant wrote before, never another tenant's.
    ///
    /// The pool is then told of every token, about 0.1 us for each sequence of a batch, and a freed
    /// sequence's memory is filled on the home stream before the next has it.
    pub const fn zeroed(mut self, yes: bool) -> Self {
        self.options.zeroed = yes;
        self
    }

    /// Whether sequences may be [forked](KvCache::fork); off by default. Their extents are of at most
    /// 8 MiB then, whatever else was said, since only whole ones can be shared.
    pub const fn may_fork(mut self, yes: bool) -> Self {
        self.options.may_fork = yes;
        self
    }

    /// How long [`KvCache::create`], [`KvCache::fork`] and [`KvCache::append`] may wait for memory in use to come
    /// free. By default they do not wait, but still ask pressure hooks.
    #[doc(alias = "deadline")]
    pub const fn timeout(mut self, wait: Duration) -> Self {
        self.options.wait = Some(wait);
        self
    }

    /// Builds the cache. Takes no memory and no addresses yet.
    ///
    /// # Errors
    /// [`KvCacheError`] when the shape cannot be, or the stream is another device's.
    pub fn build(self) -> Result<KvCache, KvCacheError> {
        let Self {
            tenant,
            home,
            shape,
            layout,
            mut options,
        } = self;
        if !home.device().is_same(tenant.device()) {
            return Err(ArgumentError::STREAM.into());
        }
        let granule = tenant.device().granule();
        if options.may_fork {
            options.largest_extent = options.largest_extent.min(LARGEST_EXTENT);
        }
        let geometry = Geometry::new(shape, layout, granule, options.zeroed)?;
        Ok(KvCache {
            tenant: tenant.clone(),
            home: home.clone(),
            geometry,
            options,
            sequences: Sequences::default(),
        })
    }
}
