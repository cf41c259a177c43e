//! Keys and values of attention, for many sequences that grow token by token.
//!
//! A sequence lies at addresses that are contiguous and fixed for its life: ordinary attention
//! kernels read it by a pointer and strides, without a block table, and it grows without a copy.
//! Its memory comes and goes in granules with its tokens, from a [`Tenant`]'s budget.
//!
//! - **[Layouts](Layout).** Token-major or layer-major; [`KvCache::tokens_per_granule`] and
//!   [`KvCache::least_memory`] say what each costs a given model. With 32 layers, 8 heads of 128
//!   elements of 2 bytes and granules of 2 MiB a token takes 128 KiB: token-major a sequence grows
//!   by 16 tokens, layer-major by 1,024, and has 128 MiB at least.
//! - **A decode step** is one call, [`append`](KvCache::append) with a batch: all or nothing. Where
//!   all sequences have the memory it makes no driver call, and a [mapper](crate::Mapper) of the
//!   pool places ahead what they are about to need. Without one, a layer-major sequence gets the
//!   next granules of its ranges in turn, over the last quarter of the granules that it has, so that
//!   no step pays for all of them.
//! - **A sequence that is freed** leaves its memory mapped. The next one takes it over without a
//!   driver call, in the order of the home stream; other tenants may take it back.
//! - **A [fork](KvCache::fork)** begins with the tokens of another sequence, whose memory both show.
//! - **[Admission](KvCache::admission)** says before a sequence is begun how much fits, now and at
//!   worst.
//!
//! - **Asleep** a cache keeps its addresses and nothing else: sequences' blocks bear the cache's
//!   [tag](KvCacheBuilder::tag), by which [`Tenant::blocks`] puts them to sleep and wakes them.
//!   Forks that have slept share no memory any more.
//!
//! Blocks are asked for in whole granules, so that most tokens concern the cache alone; the pool's
//! figures count those granules as in use. [`KvCache::stats`] counts tokens.
//!
//! # What is not here
//! No kernel, no scheduler, no table of prefixes. What the rows hold is the caller's.

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

/// What errors call the length of a sequence.
const TOKENS: &str = "tokens of a sequence";

pub use builder::KvCacheBuilder;
pub use figures::{Admission, Fits, KvCacheStats};
pub use sequences::SequenceId;
pub use shape::{Layout, Part, Shape};
pub use view::{KvTensor, SequenceView};

/// Grows blocks together.
type Grow = fn(&Tenant, &mut [(&mut Block, u64)]) -> Result<(), BlockError>;

/// What a batch asks of the pool.
#[derive(Clone, Copy, Debug, Default)]
struct Added {
    /// So many lack room for it. One that is named again counts again.
    lacking: usize,
    /// Some will soon, and the mapper does not know of it.
    due: bool,
    /// Some will soon, and have not been given memory ahead for all of their ranges.
    near: bool,
}

/// A cache of keys and values over a tenant's memory.
///
/// Its home stream is the one that all kernels run on which read or write it; others are named with
/// [`record_use`](Self::record_use). Dropping the cache frees all sequences.
pub struct KvCache {
    /// Freed before the tenant goes: a tenant that drains takes back what is idle with each free.
    sequences: Sequences,
    tenant: Tenant,
    home: Stream,
    geometry: Geometry,
    options: Options,
}

impl KvCache {
    /// Sets out to build a cache of a tenant's memory, used on `home`.
    pub const fn builder<'a>(
        tenant: &'a Tenant,
        home: &'a Stream,
        shape: Shape,
    ) -> KvCacheBuilder<'a> {
        KvCacheBuilder::new(tenant, home, shape)
    }

    /// Begins a sequence of so many tokens, at least one, whose rows are to be written now. Asks
    /// pressure hooks, and waits as its builder said.
    ///
    /// Where a sequence that was freed left enough memory this makes no driver call.
    ///
    /// # Errors
    /// [`KvCacheError`] when there are too many tokens or sequences, or memory is short, with the
    /// figures. Nothing has changed then.
    pub fn create(&mut self, tokens: u64) -> Result<SequenceId, KvCacheError> {
        self.create_by(tokens, |block, count| block.allocate_many(count))
    }

    /// The same if that needs no waiting.
    ///
    /// # Errors
    /// As [`Self::create`].
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
        let too_long = ArgumentError::TooLarge {
            what: TOKENS,
            value: tokens,
            most: shape.max_tokens,
        };
        let sizes = (
            self.geometry.size_for(tokens),
            self.geometry.size_for(shape.max_tokens),
        );
        let (Some(size), Some(capacity)) = sizes else {
            return Err(too_long.into());
        };
        if tokens > shape.max_tokens {
            return Err(too_long.into());
        }
        let builder = self.block(size, capacity);
        let blocks = make(builder, self.geometry.ranges)
            .map_err(|cause| KvCacheError::Create { tokens, cause })?;
        let room = self.geometry.tokens_in(size);
        let number = self.tenant.number();
        let id = self.sequences.insert(number, tokens, room, blocks)?;
        self.foresee(|sequence| sequence.id == id);
        Ok(id)
    }

    /// Whether there may be one sequence more.
    fn room_for_one(&self) -> Result<(), KvCacheError> {
        let (held, limit) = (self.sequences.count(), self.geometry.shape.max_sequences);
        Ok(ArgumentError::at_most(
            "sequences",
            held as u64 + 1,
            limit.into(),
        )?)
    }

    /// A range of a sequence.
    fn block(&self, size: u64, capacity: u64) -> BlockBuilder<'_> {
        let Options {
            growth,
            largest_extent,
            ref tag,
            zeroed,
            wait,
            ..
        } = self.options;
        let block = self.tenant.block(size).capacity(capacity);
        let block = block.largest_extent(largest_extent);
        let mut block = block.home_stream(&self.home).growth(growth).zeroed(zeroed);
        if let Some(tag) = tag {
            block = block.tag(tag.clone());
        }
        match wait {
            Some(wait) => block.timeout(wait),
            None => block,
        }
    }

    /// Appends tokens to sequences, whose rows are to be written now: a whole decode step in one
    /// call, all or nothing. One that is named twice gets both. Asks pressure hooks, and waits as
    /// the builder said.
    ///
    /// A sequence that was truncated into tokens which another one [shares](Self::fork) gets memory
    /// of its own behind its last token now, at the same addresses: for that the work that is
    /// queued on its streams has to have passed, which is waited for as for memory. Forking at that
    /// token instead needs no waiting, since the fork has other addresses.
    ///
    /// # Errors
    /// [`KvCacheError`] says which sequence is gone, would be too long, or found no memory, with the
    /// figures. Every sequence is as before then; memory that one got for its own stays with it.
    pub fn append(&mut self, step: &[(SequenceId, u64)]) -> Result<(), KvCacheError> {
        self.append_by(step, Tenant::grow_all, Tenant::unshare)
    }

    /// The same if that needs no waiting.
    ///
    /// # Errors
    /// As [`Self::append`].
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
                    self.foresee(|_| true);
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

    /// Whether none of these sequences sleeps, whose memory would not be there for the rows.
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
            Some(asleep) => Err(KvCacheError::Asleep {
                sequence: asleep.id.number(),
            }),
            None => Ok(()),
        }
    }

    /// Counts what is to be appended, of the first `added` of a batch if it cannot be.
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
            outcome.lacking += usize::from(sequence.lacks_room());
            outcome.due |= sequence.is_due(lead);
            outcome.near |= spreads && sequence.is_near(lead, limit);
        }
        Ok(outcome)
    }

    /// Gets memory for all that have more tokens than room, `lacking` at most.
    fn grow(&mut self, grow: Grow, lacking: usize) -> Result<(), KvCacheError> {
        let geometry = &self.geometry;
        let mut blocks = Vec::with_capacity(lacking * geometry.ranges);
        for sequence in self.sequences.iter_mut().filter(|it| it.lacks_room()) {
            let Some(size) = geometry.size_for(sequence.tokens) else {
                continue;
            };
            blocks.extend(sequence.blocks.iter_mut().map(|block| (block, size)));
        }
        grow(&self.tenant, &mut blocks).map_err(|refused| {
            let lacking = self.sequences.iter().filter(|it| it.lacks_room());
            let owners = lacking.flat_map(|it| std::iter::repeat_n(it.id, it.blocks.len()));
            KvCacheError::append(&owners.collect::<Vec<_>>(), refused)
        })?;
        for sequence in self.sequences.iter_mut().filter(|it| it.lacks_room()) {
            let size = sequence.blocks.first().map_or(0, Block::size);
            sequence.room = self.geometry.tokens_in(size);
            sequence.foreseen = true;
            sequence.spread_anew();
        }
        Ok(())
    }

    /// Gives up the tokens of a sequence behind the first `tokens`, at least one. Makes no driver
    /// call, unless the sequence shares memory behind them ([`fork`](Self::fork)).
    ///
    /// # Errors
    /// [`KvCacheError`] when the sequence is gone or has fewer tokens, none were to be left, or one
    /// of its ranges sleeps. The sequence is as before then.
    pub fn truncate(&mut self, id: SequenceId, tokens: u64) -> Result<(), KvCacheError> {
        let sequence = self.sequences.get_mut(id)?;
        ArgumentError::not_zero(TOKENS, tokens)?;
        if tokens > sequence.tokens {
            let (sequence, most) = (id.number(), sequence.tokens);
            return Err(KvCacheError::Tokens {
                sequence,
                tokens,
                most,
            });
        }
        if let Some(size) = self.geometry.size_for(tokens) {
            let larger = sequence.blocks.iter_mut().filter(|it| it.size() > size);
            let mut larger: Vec<_> = larger.map(|block| (block, size)).collect();
            let shrunk = self.tenant.shrink_all(&mut larger);
            shrunk.map_err(|cause| KvCacheError::Block {
                sequence: id.number(),
                cause,
            })?;
            sequence.cut |= tokens < sequence.fixed;
            sequence.room = match sequence.cut {
                true => tokens,
                false => self.geometry.tokens_in(size),
            };
            sequence.fixed = sequence.fixed.min(tokens);
            sequence.foreseen = false;
            sequence.spread_anew();
        }
        sequence.tokens = tokens;
        Ok(())
    }

    /// Ends a sequence. Makes no driver call and never waits: its memory stays mapped, and the next
    /// sequence on the home stream has it at once. One that shares memory ([`fork`](Self::fork)) is
    /// unmapped.
    ///
    /// # Errors
    /// [`KvCacheError`] when the sequence is gone, or the home stream is capturing while a
    /// [capture guard](crate::pool::CaptureGuard) lives; it lives on then.
    pub fn free(&mut self, id: SequenceId) -> Result<(), KvCacheError> {
        // All its blocks have one home.
        if let Some(block) = self.sequences.get(id)?.blocks.first() {
            block.may_be_freed()?;
        }
        drop(self.sequences.remove(id)?);
        Ok(())
    }

    /// Notes that another stream uses a sequence too: its memory is handed on only after that
    /// stream's work as well.
    ///
    /// # Errors
    /// [`KvCacheError`] when the sequence is gone or the stream is another driver's.
    pub fn record_use(&self, id: SequenceId, stream: &Stream) -> Result<(), KvCacheError> {
        for block in &self.sequences.get(id)?.blocks {
            block.record_use(stream)?;
        }
        Ok(())
    }

    /// A sequence as it is now: its length, and where its keys and values are.
    ///
    /// # Errors
    /// [`KvCacheError`] when the sequence is gone.
    pub fn view(&self, id: SequenceId) -> Result<SequenceView<'_>, KvCacheError> {
        let sequence = self.sequences.get(id)?;
        Ok(SequenceView::new(&self.geometry, sequence))
    }

    /// All sequences as they are now.
    pub fn views(&self) -> impl Iterator<Item = SequenceView<'_>> {
        let sequences = self.sequences.iter();
        sequences.map(|sequence| SequenceView::new(&self.geometry, sequence))
    }

    /// How many sequences live.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.sequences.count()
    }

    /// Whether none does.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tokens of all sequences.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.sequences.iter().map(|sequence| sequence.tokens).sum()
    }

    /// What it was built to hold.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.geometry.shape
    }

    /// How a sequence lies in memory.
    #[must_use]
    pub const fn layout(&self) -> Layout {
        self.geometry.layout
    }

    /// The stream it is used on.
    #[must_use]
    pub const fn home_stream(&self) -> &Stream {
        &self.home
    }

    /// Whose memory it is.
    #[must_use]
    pub const fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// What a token's keys and values take in all layers, in bytes.
    #[must_use]
    pub const fn bytes_per_token(&self) -> u64 {
        self.geometry.token
    }

    /// By how many tokens a sequence grows at least: as many as a granule of each of its ranges
    /// holds, rounded down; zero if one token takes more than that.
    #[must_use]
    pub const fn tokens_per_granule(&self) -> u64 {
        self.geometry.grain().0
    }

    /// Memory that a sequence grows by at least, in bytes: a granule of each of its ranges. It has
    /// that much at least.
    #[must_use]
    pub const fn least_memory(&self) -> u64 {
        self.geometry.grain().1
    }

    /// Memory that a sequence of so many tokens takes, in bytes: whole granules of each of its
    /// ranges, no precommitted memory.
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
