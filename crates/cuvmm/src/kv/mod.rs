//! A cache of attention keys and values, for many sequences that grow token by token.
//!
//! A sequence occupies contiguous addresses that are fixed for its life: ordinary attention kernels
//! read it through a pointer and strides, without a block table, and it grows without a copy. Its
//! memory is committed and released in granules as its tokens come and go, charged to a [`Tenant`].
//!
//! - **[Layouts](Layout).** Token-major or layer-major; [`KvCache::tokens_per_granule`] and
//!   [`KvCache::least_memory`] show the cost of each for a given model. With 32 layers, 8 heads of
//!   128 elements of 2 bytes and granules of 2 MiB, a token takes 128 KiB: a token-major sequence
//!   grows by 16 tokens at a time; a layer-major one grows by 1,024 and takes at least 128 MiB.
//! - **A decode step** is one call, [`append`](KvCache::append) with a batch: all or nothing. If
//!   all sequences have enough memory it makes no driver call, and a [mapper](crate::Mapper) of the
//!   pool precommits what they need next. Without a mapper, a layer-major sequence gets the next
//!   granules of its ranges one after another over the last quarter of its current granules, so
//!   that no single step pays for all of them.
//! - **A freed sequence** leaves its memory cached. The next sequence reuses it without a driver
//!   call, ordered by the home stream; the pool can reclaim it for other tenants.
//! - **A [fork](KvCache::fork)** starts with the tokens of another sequence and shares its memory.
//! - **[Admission](KvCache::admission)** reports before a sequence is created how many tokens fit,
//!   now and in the worst case.
//! - **Sleep.** A sleeping cache keeps only its addresses: the blocks of its sequences have the
//!   cache's [tag](KvCacheBuilder::tag), by which [`Tenant::blocks`] puts them to sleep and wakes
//!   them. Forks that have slept no longer share memory.
//!
//! Blocks are allocated in whole granules, so that most appended tokens do not involve the pool.
//! The pool's statistics count those granules as in use; [`KvCache::stats`] counts tokens.
//!
//! # Not provided
//! Kernels, a scheduler, and a table of prefixes. The cache does not interpret the rows.

mod builder;
mod copies;
mod figures;
mod fork;
mod precommit;
mod sequences;
mod shape;
mod spread;
mod unshare;
mod view;

use std::fmt;

use self::builder::Options;
use self::sequences::Sequences;
use self::shape::Geometry;
use self::unshare::Unshare;
use crate::error::{ArgumentError, BlockError, KvCacheError};
use crate::own::Stream;
use crate::pool::{Block, BlockBuilder, Tenant};

/// The name of a sequence's length in errors.
const TOKENS: &str = "tokens of a sequence";

pub use builder::KvCacheBuilder;
pub use figures::{Admission, Fits, KvCacheStats};
pub use sequences::SequenceId;
pub use shape::{Layout, Part, Shape};
pub use view::{KvTensor, SequenceView};

/// A method of the tenant that grows several blocks together.
type Grow = fn(&Tenant, &mut [(&mut Block, u64)]) -> Result<(), BlockError>;

/// The consequences of a batch of appended tokens.
#[derive(Clone, Copy, Debug, Default)]
struct Added {
    /// The number of sequences that lack memory. A sequence that is named twice counts twice.
    lacking: usize,
    /// A sequence will soon lack memory, and the mapper has not been notified of it.
    due: bool,
    /// A sequence will soon lack memory, and not all of its ranges have precommitted memory.
    near: bool,
}

/// A cache of keys and values in a tenant's memory.
///
/// All kernels that read or write the cache run on its home stream; other streams are named with
/// [`record_use`](Self::record_use). Dropping the cache frees all sequences.
///
/// # Examples
/// ```
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = cuvmm::Device::open(opened.driver, 0)?;
/// # let pool = cuvmm::Pool::builder(&device).limit(cuvmm::Limit::Bytes(64 << 20)).build()?;
/// # let tenant = pool.tenant("model").register()?;
/// # let stream = cuvmm::Stream::new(&device)?;
/// use cuvmm::KvCache;
/// use cuvmm::kv::Shape;
///
/// let shape = Shape {
///     layers: 8,
///     kv_heads: 8,
///     head_size: 128,
///     element_bytes: 2,
///     max_tokens: 4096,
///     max_sequences: 64,
/// };
/// let mut cache = KvCache::builder(&tenant, &stream, shape).build()?;
/// let sequence = cache.create(700)?; // a prompt, whose rows a kernel now writes
/// let address = cache.view(sequence)?.key(3).ok_or("no such layer")?.address();
///
/// cache.append(&[(sequence, 1)])?; // a decode step
/// let keys = cache.view(sequence)?.key(3).ok_or("no such layer")?;
/// assert_eq!(keys.shape(), [701, 8, 128]);
/// assert_eq!(keys.address(), address); // a sequence never moves
/// cache.free(sequence)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct KvCache {
    /// Dropped before the tenant: with each free, a draining tenant gives up the memory that became
    /// cached.
    sequences: Sequences,
    tenant: Tenant,
    home: Stream,
    geometry: Geometry,
    options: Options,
}

impl KvCache {
    /// Returns a builder for a cache in a tenant's memory, used on the stream `home`.
    pub const fn builder<'a>(
        tenant: &'a Tenant,
        home: &'a Stream,
        shape: Shape,
    ) -> KvCacheBuilder<'a> {
        KvCacheBuilder::new(tenant, home, shape)
    }

    /// Creates a sequence of `tokens` tokens, at least one, whose rows are to be written next.
    /// Calls pressure hooks, and waits up to the builder's [timeout](KvCacheBuilder::timeout).
    ///
    /// Makes no driver call if a freed sequence left enough memory.
    ///
    /// # Errors
    /// [`KvCacheError`] if there are too many tokens or sequences, or memory is short, with the
    /// figures. Nothing has changed then.
    pub fn create(&mut self, tokens: u64) -> Result<SequenceId, KvCacheError> {
        self.create_by(tokens, |block, count| block.allocate_many(count))
    }

    /// Creates a sequence like [`create`](Self::create), without waiting or calling hooks.
    ///
    /// # Errors
    /// [`KvCacheError`] in the cases of [`create`](Self::create), and if waiting or hooks would be
    /// needed.
    pub fn try_create(&mut self, tokens: u64) -> Result<SequenceId, KvCacheError> {
        self.create_by(tokens, |block, count| block.try_allocate_many(count))
    }

    fn create_by(
        &mut self,
        tokens: u64,
        make: impl FnOnce(BlockBuilder<'_>, usize) -> Result<Vec<Block>, BlockError>,
    ) -> Result<SequenceId, KvCacheError> {
        let shape = &self.geometry.shape;
        ArgumentError::not_zero(TOKENS, tokens)?;
        self.room_for_one()?;
        ArgumentError::at_most(TOKENS, tokens, shape.max_tokens)?;
        let size_for = |value| {
            let overflow = ArgumentError::Overflow {
                what: TOKENS,
                value,
            };
            self.geometry.size_for(value).ok_or(overflow)
        };
        let (size, capacity) = (size_for(tokens)?, size_for(shape.max_tokens)?);
        let builder = self.block(size, capacity);
        let blocks = make(builder, self.geometry.ranges)
            .map_err(|cause| KvCacheError::Create { tokens, cause })?;
        let room = self.geometry.tokens_in(size);
        let number = self.tenant.number();
        let id = self.sequences.insert(number, tokens, room, blocks)?;
        self.notify_growth(|sequence| sequence.id == id);
        Ok(id)
    }

    /// Checks that one more sequence is permitted.
    fn room_for_one(&self) -> Result<(), KvCacheError> {
        let (held, limit) = (self.sequences.count(), self.geometry.shape.max_sequences);
        Ok(ArgumentError::at_most(
            "sequences",
            held as u64 + 1,
            limit.into(),
        )?)
    }

    fn block(&self, size: u64, capacity: u64) -> BlockBuilder<'_> {
        let Options {
            growth,
            ref tag,
            zeroed,
            wait,
            ..
        } = self.options;
        let block = self.tenant.block(size).capacity(capacity);
        let granule = self.tenant.device().granule();
        let block = block.largest_extent(self.options.extents_of(size, granule));
        let mut block = block.home_stream(&self.home).growth(growth).zeroed(zeroed);
        if let Some(tag) = tag {
            block = block.tag(tag.clone());
        }
        match wait {
            Some(wait) => block.timeout(wait),
            None => block,
        }
    }

    /// Appends tokens to sequences, whose rows are to be written next: a whole decode step, all or
    /// nothing. A sequence named twice gets both amounts. Calls pressure hooks, and waits up to the
    /// builder's [timeout](KvCacheBuilder::timeout).
    ///
    /// A sequence that was truncated within tokens that another one [shares](Self::fork) now gets
    /// memory of its own behind its last token, at the same addresses. Its streams must be idle at
    /// that moment; the call waits for that as for memory. If they never are, the timeout ends as
    /// [`SharedInUse`](crate::error::BlockError::SharedInUse). A fork at that token needs no such
    /// wait, because it has other addresses.
    ///
    /// # Errors
    /// [`KvCacheError`] names the sequence that does not exist, would be too long, or found no
    /// memory, with the figures. Every sequence is as before, except that unshared memory stays so.
    pub fn append(&mut self, step: &[(SequenceId, u64)]) -> Result<(), KvCacheError> {
        self.append_by(step, Tenant::grow_all, Tenant::unshare)
    }

    /// Appends tokens like [`append`](Self::append), without waiting or calling hooks.
    ///
    /// # Errors
    /// [`KvCacheError`] in the cases of [`append`](Self::append), and if waiting or hooks would be
    /// needed.
    pub fn try_append(&mut self, step: &[(SequenceId, u64)]) -> Result<(), KvCacheError> {
        self.append_by(step, Tenant::try_grow_all, Tenant::try_unshare)
    }

    fn append_by(
        &mut self,
        step: &[(SequenceId, u64)],
        grow: Grow,
        unshare: Unshare,
    ) -> Result<(), KvCacheError> {
        self.check_awake(step)?;
        let mut added = 0;
        let outcome = self
            .add(step, &mut added)
            .and_then(|added| match added.lacking {
                0 => Ok(added),
                lacking => {
                    self.unshare(unshare)?;
                    self.grow(grow, lacking).map(|()| added)
                }
            });
        match outcome {
            Ok(added) => {
                if added.due {
                    self.notify_growth(|_| true);
                }
                if added.near {
                    self.precommit();
                }
                Ok(())
            }
            Err(error) => {
                for &(id, more) in step.iter().take(added) {
                    if let Ok(sequence) = self.sequences.get_mut(id) {
                        sequence.tokens -= more;
                    }
                }
                Err(error)
            }
        }
    }

    /// Checks that none of these sequences is asleep, and so without memory for the rows.
    fn check_awake(&self, step: &[(SequenceId, u64)]) -> Result<(), KvCacheError> {
        if !self.tenant.has_sleepers() {
            return Ok(());
        }
        let named = step.iter().map(|&(id, _)| self.sequences.get(id));
        let named = named.collect::<Result<Vec<_>, _>>()?;
        let blocks = named.iter().map(|sequence| sequence.blocks.as_slice());
        match self
            .tenant
            .first_asleep(blocks)
            .and_then(|at| named.get(at))
        {
            Some(asleep) => Err(KvCacheError::Asleep(asleep.id.number())),
            None => Ok(()),
        }
    }

    /// Adds the tokens of a batch to the sequences. On failure, `added` entries were counted.
    fn add(
        &mut self,
        step: &[(SequenceId, u64)],
        added: &mut usize,
    ) -> Result<Added, KvCacheError> {
        let limit = self.geometry.shape.max_tokens;
        let lead = self.geometry.lead();
        let spreads = self.spreads();
        let mut outcome = Added::default();
        for &(id, more) in step {
            let sequence = self.sequences.get_mut(id)?;
            let tokens = sequence.tokens.saturating_add(more);
            if tokens > limit {
                let (sequence, most) = (id.number(), limit);
                return Err(KvCacheError::Tokens {
                    sequence,
                    tokens,
                    most,
                });
            }
            sequence.tokens = tokens;
            *added += 1;
            outcome.lacking += usize::from(sequence.needs_growth());
            outcome.due |= sequence.is_due(lead);
            outcome.near |= spreads && sequence.is_near(lead, limit);
        }
        Ok(outcome)
    }

    /// Grows the ranges of all sequences that have more tokens than memory, at most `lacking`.
    fn grow(&mut self, grow: Grow, lacking: usize) -> Result<(), KvCacheError> {
        let geometry = &self.geometry;
        let mut blocks = Vec::with_capacity(lacking * geometry.ranges);
        for sequence in self.sequences.iter_mut().filter(|it| it.needs_growth()) {
            let Some(size) = geometry.size_for(sequence.tokens) else {
                continue;
            };
            blocks.extend(sequence.blocks.iter_mut().map(|block| (block, size)));
        }
        grow(&self.tenant, &mut blocks).map_err(|refused| {
            let lacking = self.sequences.iter().filter(|it| it.needs_growth());
            let owners = lacking.flat_map(|it| std::iter::repeat_n(it.id, it.blocks.len()));
            KvCacheError::append(&owners.collect::<Vec<_>>(), refused)
        })?;
        for sequence in self.sequences.iter_mut().filter(|it| it.needs_growth()) {
            let size = sequence.blocks.first().map_or(0, Block::size);
            sequence.room = self.geometry.tokens_in(size);
            sequence.growth_notified = true;
            sequence.spread_anew();
        }
        Ok(())
    }

    /// Shortens a sequence to its first `tokens` tokens, at least one. Makes no driver call, unless
    /// the sequence shares memory after them ([`fork`](Self::fork)).
    ///
    /// # Errors
    /// [`KvCacheError`] if the sequence does not exist or has fewer tokens, `tokens` is zero, or
    /// one of its ranges is asleep. The sequence is then as before.
    pub fn truncate(&mut self, id: SequenceId, tokens: u64) -> Result<(), KvCacheError> {
        let sequence = self.sequences.get_mut(id)?;
        sequence.check_tokens(tokens)?;
        if let Some(size) = self.geometry.size_for(tokens) {
            let larger = sequence.blocks.iter_mut().filter(|it| it.size() > size);
            let mut larger: Vec<_> = larger.map(|block| (block, size)).collect();
            let shrunk = self.tenant.shrink_all(&mut larger);
            shrunk.map_err(|cause| id.failed(cause))?;
            sequence.cut |= tokens < sequence.fixed;
            sequence.room = match sequence.cut {
                true => tokens,
                false => self.geometry.tokens_in(size),
            };
            sequence.fixed = sequence.fixed.min(tokens);
            sequence.growth_notified = false;
            sequence.spread_anew();
        }
        sequence.tokens = tokens;
        Ok(())
    }

    /// Ends a sequence. Makes no driver call and never waits: its memory stays cached, and the next
    /// sequence on the home stream can use it at once. Memory that it shares ([`fork`](Self::fork))
    /// is unmapped.
    ///
    /// # Errors
    /// [`KvCacheError`] if the sequence does not exist, or the home stream is capturing while a
    /// [capture guard](crate::pool::CaptureGuard) lives; the sequence then stays.
    pub fn free(&mut self, id: SequenceId) -> Result<(), KvCacheError> {
        // All its blocks have the same home stream.
        if let Some(block) = self.sequences.get(id)?.blocks.first() {
            block.may_be_freed()?;
        }
        drop(self.sequences.remove(id)?);
        Ok(())
    }

    /// Records that another stream uses a sequence too: its memory is reused only after that
    /// stream's work.
    ///
    /// # Errors
    /// [`KvCacheError`] if the sequence does not exist or the stream belongs to another driver.
    pub fn record_use(&self, id: SequenceId, stream: &Stream) -> Result<(), KvCacheError> {
        for block in &self.sequences.get(id)?.blocks {
            block.record_use(stream)?;
        }
        Ok(())
    }

    /// Returns a view of a sequence: its length, and the places of its keys and values.
    ///
    /// # Errors
    /// [`KvCacheError`] if the sequence does not exist.
    pub fn view(&self, id: SequenceId) -> Result<SequenceView<'_>, KvCacheError> {
        let sequence = self.sequences.get(id)?;
        Ok(SequenceView::new(&self.geometry, sequence))
    }

    /// Returns views of all sequences.
    pub fn views(&self) -> impl Iterator<Item = SequenceView<'_>> {
        let sequences = self.sequences.iter();
        sequences.map(|sequence| SequenceView::new(&self.geometry, sequence))
    }

    /// Returns the number of sequences.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.sequences.count()
    }

    /// Returns `true` if there are no sequences.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of tokens of all sequences.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.sequences.iter().map(|sequence| sequence.tokens).sum()
    }

    /// Returns the shape that it was built with.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.geometry.shape
    }

    /// Returns the layout of sequences in memory.
    #[must_use]
    pub const fn layout(&self) -> Layout {
        self.geometry.layout
    }

    /// Returns the home stream.
    #[must_use]
    pub const fn home_stream(&self) -> &Stream {
        &self.home
    }

    /// Returns the tenant whose memory it uses.
    #[must_use]
    pub const fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// Returns the bytes of a token's keys and values in all layers.
    #[must_use]
    pub const fn bytes_per_token(&self) -> u64 {
        self.geometry.token
    }

    /// Returns the number of tokens by which a sequence grows at least: those in one granule of
    /// each of its ranges, rounded down. Zero if one token takes more.
    #[must_use]
    pub const fn tokens_per_granule(&self) -> u64 {
        self.geometry.grain().0
    }

    /// Returns the bytes by which a sequence grows at least, and that it takes at least: one
    /// granule for each of its ranges.
    #[must_use]
    pub const fn least_memory(&self) -> u64 {
        self.geometry.grain().1
    }

    /// Returns the bytes that a sequence of `tokens` tokens takes: whole granules of each of its
    /// ranges, without precommitted memory.
    #[must_use]
    pub fn memory_of(&self, tokens: u64) -> u64 {
        self.geometry.memory_of(tokens)
    }
}

impl fmt::Debug for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCache")
            .field("shape", &self.geometry.shape)
            .field("layout", &self.geometry.layout)
            .field("sequences", &self.len())
            .finish_non_exhaustive()
    }
}
