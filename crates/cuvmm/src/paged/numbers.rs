//! The free list of an engine: block numbers, the lowest first.

use crate::error::{ArgumentError, PagedKvError};

/// The numbers of one level that a word of the level above stands for.
const WORD: u32 = u64::BITS;

/// A free list of block numbers that gives out the lowest first, in place of an engine's queue.
///
/// It stands alone: it may be in another process than the [`PagedKv`](super::PagedKv), which only
/// learns the numbers that are to be backed and released. Low numbers lie close together, so that
/// the memory of a cache that shrinks becomes wholly free from its end.
///
/// Every operation takes at most six steps for each number.
///
/// ```
/// use cuvmm::paged::FreeNumbers;
///
/// let mut free = FreeNumbers::new(1_000)?;
/// free.remove(0)?; // the null block of an engine
/// assert_eq!(free.take_many(3), Some(vec![1, 2, 3]));
/// free.give_back_many(&[3, 2])?;
/// assert_eq!((free.take(), free.len()), (Some(2), 997));
/// # Ok::<(), cuvmm::error::PagedKvError>(())
/// ```
#[derive(Clone, Debug)]
#[doc(alias("popleft", "FreeKVCacheBlockQueue", "BlockPool"))]
pub struct FreeNumbers {
    /// From the numbers up to a single word: a bit is set if its number is free, or if its word of
    /// the level below has a bit.
    levels: Vec<Vec<u64>>,
    blocks: u32,
    free: u32,
}

impl FreeNumbers {
    /// Returns the list of all numbers below `blocks`, 1 to 2,147,483,647.
    ///
    /// # Errors
    /// [`PagedKvError::Argument`] for any other number of blocks.
    pub fn new(blocks: u32) -> Result<Self, PagedKvError> {
        check_blocks(blocks)?;
        let mut levels = Vec::new();
        let mut bits = blocks;
        loop {
            let words = bits.div_ceil(WORD);
            let mut level = vec![u64::MAX; words as usize];
            let odd = bits % WORD;
            if odd > 0
                && let Some(last) = level.last_mut()
            {
                *last = (1 << odd) - 1;
            }
            levels.push(level);
            if words == 1 {
                break;
            }
            bits = words;
        }
        Ok(Self {
            levels,
            blocks,
            free: blocks,
        })
    }

    /// Returns the number of free numbers.
    #[must_use]
    pub const fn len(&self) -> u32 {
        self.free
    }

    /// Returns `true` if no number is free.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.free == 0
    }

    /// Returns `true` if a number is free.
    #[must_use]
    pub fn contains(&self, number: u32) -> bool {
        let level = self.levels.first();
        let word = level.and_then(|level| level.get((number / WORD) as usize));
        word.is_some_and(|word| word & (1 << (number % WORD)) != 0)
    }

    /// Takes the lowest free number.
    #[doc(alias = "popleft")]
    pub fn take(&mut self) -> Option<u32> {
        let mut at = 0_u32;
        for level in self.levels.iter().rev() {
            let word = level.get(at as usize).filter(|&&word| word != 0)?;
            at = at * WORD + word.trailing_zeros();
        }
        self.clear(at);
        Some(at)
    }

    /// Takes the `count` lowest free numbers, in order; `None` if there are fewer. Then nothing has
    /// changed.
    #[doc(alias = "popleft_n")]
    pub fn take_many(&mut self, count: u32) -> Option<Vec<u32>> {
        match count <= self.free {
            true => (0..count).map(|_| self.take()).collect(),
            false => None,
        }
    }

    /// Takes a number that is to be in no free list, such as a [pinned](super::PagedKvBuilder::pinned)
    /// one.
    ///
    /// # Errors
    /// [`PagedKvError::Argument`] if it is not free.
    pub fn remove(&mut self, number: u32) -> Result<(), PagedKvError> {
        if !self.contains(number) {
            return Err(no_such("free block", number).into());
        }
        self.clear(number);
        Ok(())
    }

    /// Gives a number back.
    ///
    /// # Errors
    /// [`PagedKvError::Argument`] if there is no such number, or it is free already.
    #[doc(alias = "append")]
    pub fn give_back(&mut self, number: u32) -> Result<(), PagedKvError> {
        if number >= self.blocks || self.contains(number) {
            return Err(no_such("taken block", number).into());
        }
        let mut at = number;
        for level in &mut self.levels {
            if let Some(word) = level.get_mut((at / WORD) as usize) {
                *word |= 1 << (at % WORD);
            }
            at /= WORD;
        }
        self.free += 1;
        Ok(())
    }

    /// Gives numbers back, all or none.
    ///
    /// # Errors
    /// [`PagedKvError::Argument`] if one of them does not exist, is free already, or is named twice.
    #[doc(alias = "append_n")]
    pub fn give_back_many(&mut self, numbers: &[u32]) -> Result<(), PagedKvError> {
        for (at, &number) in numbers.iter().enumerate() {
            if let Err(refused) = self.give_back(number) {
                numbers.iter().take(at).for_each(|&given| self.clear(given));
                return Err(refused);
            }
        }
        Ok(())
    }

    /// Clears the bit of a free number, and those above it of words that are empty then.
    fn clear(&mut self, number: u32) {
        let mut at = number;
        for level in &mut self.levels {
            let Some(word) = level.get_mut((at / WORD) as usize) else {
                break;
            };
            *word &= !(1 << (at % WORD));
            if *word != 0 {
                break;
            }
            at /= WORD;
        }
        self.free -= 1;
    }
}

/// Checks a number of blocks: block tables of kernels have signed numbers of 32 bits.
pub(super) fn check_blocks(blocks: u32) -> Result<(), ArgumentError> {
    ArgumentError::not_zero("blocks", blocks.into())?;
    ArgumentError::at_most("blocks", blocks.into(), i32::MAX as u64)
}

pub(super) fn no_such(what: &'static str, number: u32) -> ArgumentError {
    let number = number.into();
    ArgumentError::NoSuch { what, number }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn numbers_are_given_back_all_or_none() {
        let mut free = FreeNumbers::new(200).unwrap();
        let taken = free.take_many(130).unwrap();
        for (refused, at) in [([0, 129, 0], 0), ([64, 63, 199], 199), ([5, 6, 200], 200)] {
            let error = free.give_back_many(&refused).unwrap_err();
            assert_eq!(error.to_string(), format!("there is no taken block {at}"));
            assert_eq!(free.len(), 70);
            assert!(taken.iter().all(|&it| !free.contains(it)));
        }
        free.give_back_many(&[129, 64, 0]).unwrap();
        assert_eq!(free.take_many(3), Some(vec![0, 64, 129]));
        assert_eq!(free.take(), Some(130));
    }

    #[test]
    fn the_lowest_number_comes_first() {
        for blocks in [1, 63, 64, 65, 4_096, 4_097, 300_000] {
            let mut free = FreeNumbers::new(blocks).unwrap();
            let mut known: BTreeSet<u32> = (0..blocks).collect();
            let mut taken = Vec::new();
            let mut random = fastrand::Rng::with_seed(blocks.into());
            for _ in 0..3_000 {
                if random.u8(0..3) > 0 {
                    let number = free.take();
                    assert_eq!(number, known.pop_first());
                    taken.extend(number);
                } else if !taken.is_empty() {
                    let number = taken.swap_remove(random.usize(0..taken.len()));
                    free.give_back(number).unwrap();
                    assert!(free.give_back(number).is_err());
                    known.insert(number);
                }
                assert_eq!(free.len() as usize, known.len());
            }
            let all = free.take_many(free.len()).unwrap();
            assert!(all.into_iter().eq(known));
            assert!(free.is_empty() && free.take().is_none());
        }
    }

    #[test]
    fn what_is_not_free_is_neither_taken_nor_given_back() {
        assert!(FreeNumbers::new(0).is_err());
        assert!(FreeNumbers::new(1 << 31).is_err());
        let mut free = FreeNumbers::new(70).unwrap();
        free.remove(69).unwrap();
        assert!(free.remove(69).is_err() && free.remove(70).is_err());
        assert!(free.give_back(70).is_err());
        assert_eq!((free.take_many(70), free.len()), (None, 69));
        assert!(free.contains(68) && !free.contains(69) && !free.contains(1_000));
    }
}
