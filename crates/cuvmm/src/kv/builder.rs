//! The builder of a cache.

use std::sync::Arc;
use std::time::Duration;

use super::KvCache;
use super::sequences::Sequences;
use super::shape::{Geometry, Layout, Shape};
use crate::error::KvCacheError;
use crate::own::Stream;
use crate::pool::{Growth, Tenant};
use crate::size::Granularity;

/// Precommitted memory is a sixty-fourth of a sequence: it serves only its own sequence, and there
/// are many.
const PART: u64 = 64;

/// The default largest extent of a sequence. The driver maps and unmaps whole extents: the part
/// behind a sequence's end serves no other sequence, and an extent that reaches past a common
/// prefix cannot be shared.
const LARGEST_EXTENT: u64 = 8 << 20;

/// The part of a new sequence that an extent has at most if sequences may be forked, where that is
/// more than [`LARGEST_EXTENT`]. A fork copies less than an extent of what it shares, and each
/// extent costs it a mapping.
const FORKED_PART: u64 = 8;

/// The properties of a cache's blocks.
#[derive(Clone, Debug)]
pub(super) struct Options {
    pub(super) growth: Growth,
    /// `None` for the default.
    pub(super) largest_extent: Option<u64>,
    pub(super) tag: Option<Arc<str>>,
    pub(super) zeroed: bool,
    pub(super) may_fork: bool,
    pub(super) wait: Option<Duration>,
}

impl Options {
    /// Returns the largest extent of a new sequence, of which each range has `size` bytes.
    pub(super) fn extents_of(&self, size: u64, granule: Granularity) -> u64 {
        if !self.may_fork {
            return self.largest_extent.unwrap_or(LARGEST_EXTENT);
        }
        let part = LARGEST_EXTENT.max(size / FORKED_PART);
        let most = granule.extent_within(part, u64::MAX);
        self.largest_extent.map_or(most, |bytes| bytes.min(most))
    }
}

/// A builder for a [`KvCache`].
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
                largest_extent: None,
                tag: None,
                zeroed: false,
                may_fork: false,
                wait: None,
            },
        }
    }

    /// Sets the layout of a sequence in memory. The default is [token-major](Layout::TokenMajor).
    pub const fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Sets how much memory is committed when a sequence outgrows what it has. The default is up to
    /// a sixty-fourth of its size (a plain block gets an eighth). With a mapper, up to twice that
    /// is precommitted, and at least a granule. Without a mapper, the ranges of a layer-major
    /// sequence get theirs in turn, over the tokens of its last quarter granule; with
    /// [`Growth::Exact`], each range gets memory when it is needed.
    pub const fn growth(mut self, growth: Growth) -> Self {
        self.options.growth = growth;
        self
    }

    /// Sets the largest extent of a sequence in bytes, a power of two granules; 8 MiB by default.
    /// Small extents let a sequence reuse the memory of any other, but cost more driver calls where
    /// memory is not cached, about 50 us each.
    pub const fn largest_extent(mut self, bytes: u64) -> Self {
        self.options.largest_extent = Some(bytes);
        self
    }

    /// Sets a tag, by which the tenant's statistics list the sequences' memory.
    pub fn tag(mut self, tag: impl Into<Arc<str>>) -> Self {
        self.options.tag = Some(tag.into());
        self
    }

    /// Sets whether a token that is new, or comes again after a truncation, reads as zero until it
    /// is written. Off by default. For kernels that read past a sequence's end and multiply the
    /// result by zero, which removes a number but not a NaN. Without it a sequence may show old
    /// bytes of another sequence of its tenant, never of another tenant.
    ///
    /// The pool is then called for every token, about 0.1 us for each sequence of a batch, and the
    /// home stream fills a freed sequence's memory before its reuse.
    pub const fn zeroed(mut self, yes: bool) -> Self {
        self.options.zeroed = yes;
        self
    }

    /// Sets whether sequences may be [forked](KvCache::fork). Off by default. Extents are then at
    /// most 8 MiB, or an eighth of the range of a sequence when it is created, if that is more.
    /// [`largest_extent`](Self::largest_extent) can make them smaller only: only whole extents can
    /// be shared.
    pub const fn may_fork(mut self, yes: bool) -> Self {
        self.options.may_fork = yes;
        self
    }

    /// Sets how long [`KvCache::create`], [`KvCache::fork`] and [`KvCache::append`] may wait for
    /// memory in use. By default they do not wait, but call pressure hooks.
    #[doc(alias = "deadline")]
    pub const fn timeout(mut self, wait: Duration) -> Self {
        self.options.wait = Some(wait);
        self
    }

    /// Builds the cache. This takes no memory and no addresses yet.
    ///
    /// # Errors
    /// [`KvCacheError`] if the shape is invalid, or the stream belongs to another device.
    pub fn build(self) -> Result<KvCache, KvCacheError> {
        let Self {
            tenant,
            home,
            shape,
            layout,
            options,
        } = self;
        home.check_on(tenant.device())?;
        let granule = tenant.device().granule();
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
