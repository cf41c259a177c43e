//! Blocks just freed, ready for the next of the same shape on the same stream: beside the pool's
//! lock, without a driver call, without a fence.
//!
//! For the pool a block on a shelf is still in use. Whoever needs the true picture, or the memory,
//! sweeps the shelves first: what lies there is freed for good then. One lock for each shelf and
//! one shelf for each stream, nearly, so that threads with streams of their own do not meet. A
//! shelf's lock is taken under the pool's, never the other way round.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::core::{Owner, Place};
use crate::own::Stream;

/// Shelves of a tenant, a power of two.
const SHELVES: usize = 32;

/// Blocks on a shelf. What comes after goes the long way.
const ROOM: usize = 128;

/// The pool's clock moves once in so many frees here: it is shared by all threads.
const FREES_A_TICK: u32 = 16;

/// A block without its handle.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) owner: Arc<Owner>,
    pub(crate) place: Place,
    /// As asked for.
    pub(crate) size: u64,
    pub(crate) tag: Option<Arc<str>>,
    pub(crate) home: Option<Stream>,
    /// The shelf of its home stream.
    pub(crate) shelf: Option<Arc<Shelf>>,
}

/// A block that was freed, and when.
pub(crate) struct Shelved {
    pub(crate) held: Held,
    pub(crate) freed: u64,
}

/// What a block is asked to be, as far as it matters here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape<'a> {
    pub(crate) size: u64,
    pub(crate) capacity: u64,
    pub(crate) tag: Option<&'a Arc<str>>,
}

/// The shelves of one tenant.
pub(crate) struct Shelves {
    /// Made with the first block.
    shelves: OnceLock<Box<[Arc<Shelf>]>>,
    /// The pool's clock.
    clock: Arc<AtomicU64>,
}

/// On cache lines of its own.
#[repr(align(128))]
pub(crate) struct Shelf {
    contents: Mutex<Contents>,
    /// Whether something lies there, for those who would not take the lock to see.
    stocked: AtomicBool,
    /// The pool's clock.
    clock: Arc<AtomicU64>,
}

#[derive(Default)]
struct Contents {
    blocks: Vec<Shelved>,
    frees: u32,
    closed: bool,
}

impl Shelf {
    fn new(clock: Arc<AtomicU64>) -> Self {
        Self {
            contents: Mutex::default(),
            stocked: AtomicBool::new(false),
            clock,
        }
    }

    /// A block of exactly this shape that was freed on `home`.
    pub(crate) fn take(&self, home: &Stream, shape: Shape<'_>) -> Option<Held> {
        let mut contents = self.lock();
        let index = contents.blocks.iter().rposition(|shelved| {
            let held = &shelved.held;
            held.size == shape.size
                && held.place.capacity == shape.capacity
                && held.home.as_ref() == Some(home)
                && held.tag.as_ref() == shape.tag
        })?;
        let shelved = contents.blocks.remove(index);
        if contents.blocks.is_empty() {
            self.stocked.store(false, Ordering::Release);
        }
        Some(shelved.held)
    }

    /// Puts a block that was used on no stream but its home stream here, or hands it back if the
    /// shelf is full or closed.
    pub(crate) fn put(&self, held: Held) -> Result<(), Held> {
        let mut contents = self.lock();
        if contents.closed || contents.blocks.len() >= ROOM {
            return Err(held);
        }
        contents.frees = contents.frees.wrapping_add(1);
        let freed = if contents.frees.is_multiple_of(FREES_A_TICK) {
            self.clock.fetch_add(1, Ordering::Relaxed)
        } else {
            self.clock.load(Ordering::Relaxed)
        };
        contents.blocks.push(Shelved { held, freed });
        self.stocked.store(true, Ordering::Release);
        Ok(())
    }

    fn clear(&self) -> Vec<Shelved> {
        let mut contents = self.lock();
        self.stocked.store(false, Ordering::Release);
        std::mem::take(&mut contents.blocks)
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Shelf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shelf")
            .field("stocked", &self.stocked)
            .finish_non_exhaustive()
    }
}

impl Shelves {
    pub(crate) fn new(clock: Arc<AtomicU64>) -> Self {
        Self {
            shelves: OnceLock::new(),
            clock,
        }
    }

    fn all(&self) -> &[Arc<Shelf>] {
        let new = || Arc::new(Shelf::new(Arc::clone(&self.clock)));
        self.shelves
            .get_or_init(|| std::iter::repeat_with(new).take(SHELVES).collect())
    }

    /// The shelf for blocks of a stream.
    pub(crate) fn of(&self, stream: &Stream) -> Option<&Arc<Shelf>> {
        // Fibonacci hashing: handles are addresses, and their low bits are alike.
        let mixed = stream.as_raw().0.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.all().get((mixed >> 59) as usize % SHELVES)
    }

    /// Takes everything off.
    pub(crate) fn clear(&self) -> Vec<Shelved> {
        let stocked = |shelf: &&Arc<Shelf>| shelf.stocked.load(Ordering::Acquire);
        let shelves = self.shelves.get().into_iter().flat_map(|all| all.iter());
        shelves
            .filter(stocked)
            .flat_map(|shelf| shelf.clear())
            .collect()
    }

    /// Takes everything off, and lets nothing on any more.
    pub(crate) fn close(&self) -> Vec<Shelved> {
        let close = |shelf: &Arc<Shelf>| {
            shelf.lock().closed = true;
            shelf.clear()
        };
        self.all().iter().flat_map(close).collect()
    }
}
