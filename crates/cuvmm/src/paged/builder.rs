//! Options of a paged cache.

use std::time::Duration;

use super::PagedKv;
use super::core::Core;
use super::numbers::check_blocks;
use super::shape::{Geometry, LayerGroup, Layout};
use super::state::{State, Use};
use crate::error::{ArgumentError, PagedKvError};
use crate::own::Stream;
use crate::pool::{Tenant, Wait};

/// The default bytes of an extent: 16 MiB. It takes a mapping for eight granules, and comes back
/// when its last block is released.
pub const DEFAULT_EXTENT: u64 = 16 << 20;

/// The largest extent.
const LARGEST_EXTENT: u64 = 32 << 20;

/// Options of a paged cache.
#[derive(Debug)]
#[must_use = "a builder does nothing until it is built"]
pub struct PagedKvBuilder<'a> {
    tenant: &'a Tenant,
    home: &'a Stream,
    blocks: u32,
    groups: Vec<LayerGroup>,
    layout: Layout,
    extent: Option<u64>,
    pinned: Vec<u32>,
    precommit: u32,
    sleeps_after_all_work: bool,
    timeout: Option<Duration>,
}

impl<'a> PagedKvBuilder<'a> {
    pub(super) const fn new(tenant: &'a Tenant, home: &'a Stream, blocks: u32) -> Self {
        Self {
            tenant,
            home,
            blocks,
            groups: Vec::new(),
            layout: Layout::BlockMajor,
            extent: None,
            pinned: Vec::new(),
            precommit: 0,
            sleeps_after_all_work: false,
            timeout: None,
        }
    }

    /// Adds a group of layers. At least one is required; further ones share its block numbers.
    pub fn group(mut self, group: LayerGroup) -> Self {
        self.groups.push(group);
        self
    }

    /// Sets the layout; block-major by default.
    pub const fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Sets the bytes of an extent: a power of two, in whole granules, up to 32 MiB, or a granule
    /// where that is larger. By default 16 MiB, and in layer-major layout a granule. Memory comes and
    /// goes by extents. Larger ones take fewer driver calls, and hold more memory beside the blocks
    /// in use.
    #[doc(alias = "page_size")]
    pub const fn extent(mut self, bytes: u64) -> Self {
        self.extent = Some(bytes);
        self
    }

    /// Names blocks that are always backed and are never released, in addition to those named
    /// before: those that an engine's kernels write for padding, such as block 0 or the last two. An
    /// engine takes them out of its [free list](super::FreeNumbers::remove).
    pub fn pinned(mut self, numbers: impl IntoIterator<Item = u32>) -> Self {
        self.pinned.extend(numbers);
        self
    }

    /// Sets for how many blocks memory is mapped ahead of use: the lowest numbers that are not in use,
    /// reserved ones among them; 0 by default. After a [`back`](PagedKv::back) that took an extent, the pool's
    /// [mapper](crate::pool::PoolBuilder::mapper) maps the extents that these blocks lack, on its
    /// thread, so that backing them makes no driver call. Without a mapper this does nothing, and
    /// while a capture guard lives it waits.
    ///
    /// Only memory for which nothing must be reclaimed is taken, and of a ledger's only what it has
    /// granted to the pool already. It is charged to the tenant and
    /// cached: the pool takes it for another request before extents that blocks have used, and it
    /// counts in [`PagedStats::precommitted`](super::PagedStats::precommitted). Memory that must stay
    /// is [reserved](PagedKv::reserve) instead.
    ///
    /// While the mapper maps an extent, other calls on the cache wait for it.
    #[doc(alias("ahead", "prealloc", "headroom", "slack"))]
    pub const fn precommit(mut self, blocks: u32) -> Self {
        self.precommit = blocks;
        self
    }

    /// Sets whether the cache falls [asleep](crate::sleep#paged-caches) only when all work of each device
    /// with access is complete, and not only that of the home stream and of
    /// [recorded](PagedKv::record_use) streams; `false` by default. It is for programs that launch
    /// graphs which read blocks on streams that no call has named.
    ///
    /// Sleep waits, within its [timeout](crate::sleep::Blocks::timeout), for the work that was queued when
    /// it began, and once its copies are done for what was queued meanwhile. Work that is queued later
    /// does not delay it, so it also ends on a device that always works.
    ///
    /// Sleep then makes the calls of [`Device::synchronize`](crate::Device::synchronize) where the
    /// driver has no event for all work (before CUDA 12.5).
    #[doc(alias("graphs", "cuCtxSynchronize"))]
    pub const fn sleep_after_all_work(mut self, yes: bool) -> Self {
        self.sleeps_after_all_work = yes;
        self
    }

    /// Sets how long [`PagedKv::back`] and [`PagedKv::reserve`] may wait for memory in use. By default
    /// they do not wait, but call pressure hooks.
    #[doc(alias("deadline", "wait"))]
    pub const fn timeout(mut self, wait: Duration) -> Self {
        self.timeout = Some(wait);
        self
    }

    /// Reserves the addresses (`cuMemAddressReserve`) and backs the pinned blocks.
    ///
    /// # Errors
    /// [`PagedKvError`] if the shape, the extent or a pinned number is invalid, the stream belongs to
    /// another device, the pool is hardened, addresses are short, or there is no memory for the
    /// pinned blocks.
    pub fn build(self) -> Result<PagedKv, PagedKvError> {
        let Self {
            tenant,
            home,
            blocks,
            groups,
            layout,
            extent,
            pinned,
            precommit,
            sleeps_after_all_work,
            timeout,
        } = self;
        check_blocks(blocks)?;
        home.check_on(tenant.device())?;
        let granule = tenant.device().granule();
        let default = match layout {
            Layout::LayerMajor => granule.bytes(),
            Layout::BlockMajor | Layout::TokenMajor => DEFAULT_EXTENT.max(granule.bytes()),
        };
        let extent = extent.unwrap_or(default);
        ArgumentError::extent(extent, granule.bytes())?;
        ArgumentError::at_least("bytes of an extent", extent, granule.bytes())?;
        let most = LARGEST_EXTENT.max(granule.bytes());
        ArgumentError::at_most("bytes of an extent", extent, most)?;
        let geometry = Geometry::new(blocks, layout, groups, granule, extent)?;
        // Without a home stream: new memory is zeroed on a stream of its own, not behind the kernels.
        let region = tenant.region(geometry.size);
        let region = region.largest_extent(extent).mapping_limit(u64::MAX);
        let region = region.reserve()?;
        let base = region.address();
        let state = State::new(region, geometry.planes(extent), blocks, precommit);
        let kv = PagedKv {
            core: Core::new(state, tenant, home, sleeps_after_all_work),
            base,
            geometry,
            extent,
            timeout,
        };
        kv.back_as(&pinned, Use::Pinned, Wait::of(timeout))?;
        Ok(kv)
    }
}
