//! Places for streams in a fixed table, found without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Stream;

/// Gives each of the first [`PLACES`](Self::PLACES) streams a place of its own. Later streams share
/// them.
///
/// A place belongs to a stream's handle. A destroyed stream keeps its place for the next stream with
/// its handle.
#[derive(Debug)]
pub(crate) struct StreamKeys {
    /// The handles plus one; zero for none.
    keys: [AtomicU64; StreamKeys::PLACES],
}

impl StreamKeys {
    /// A power of two.
    pub(crate) const PLACES: usize = 64;

    pub(crate) fn new() -> Self {
        Self {
            keys: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    #[inline]
    pub(crate) fn place_of(&self, stream: &Stream) -> usize {
        // No stream has the handle that would make this zero.
        let key = stream.as_raw().0.wrapping_add(1);
        // Fibonacci hashing: handles are addresses, and their low bits are alike.
        let first = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize;
        (0..Self::PLACES)
            .map(|step| first.wrapping_add(step) % Self::PLACES)
            .find(|&place| self.is_of(place, key))
            .unwrap_or(first % Self::PLACES)
    }

    #[inline]
    pub(crate) fn at<T>(values: &[T; Self::PLACES], place: usize) -> &T {
        let [first, ..] = values;
        values.get(place).unwrap_or(first)
    }

    /// Returns `true` if a place is the stream's, or has just become so.
    fn is_of(&self, place: usize, key: u64) -> bool {
        let Some(owner) = self.keys.get(place) else {
            return false;
        };
        let known = match owner.load(Ordering::Relaxed) {
            0 => owner
                .compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed)
                .map_or_else(|other| other, |_| key),
            known => known,
        };
        known == key
    }
}
