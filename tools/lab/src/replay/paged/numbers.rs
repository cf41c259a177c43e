//! The free lists of block numbers that a replay can have.

use std::collections::VecDeque;

use anyhow::Context as _;
use clap::ValueEnum;
use cuvmm::paged::FreeNumbers;
use serde::{Deserialize, Serialize};

/// The order in which free block numbers are given out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Order {
    /// The lowest number first
    #[default]
    Lowest,
    /// The number that was given back longest ago first, as in a queue
    Fifo,
}

/// A free list of block numbers.
#[derive(Debug)]
pub(super) enum Numbers {
    Lowest(FreeNumbers),
    Fifo { queue: VecDeque<u32>, blocks: u32 },
}

impl Numbers {
    pub(super) fn new(order: Order, blocks: u32) -> anyhow::Result<Self> {
        Ok(match order {
            Order::Lowest => Self::Lowest(FreeNumbers::new(blocks)?),
            Order::Fifo => Self::Fifo {
                queue: (0..blocks).collect(),
                blocks,
            },
        })
    }

    pub(super) fn len(&self) -> u32 {
        match self {
            Self::Lowest(free) => free.len(),
            Self::Fifo { queue, .. } => queue.len() as u32,
        }
    }

    /// Takes the next `count` numbers. The caller has checked that these are free.
    pub(super) fn take(&mut self, count: u32) -> anyhow::Result<Vec<u32>> {
        let taken = match self {
            Self::Lowest(free) => free.take_many(count),
            Self::Fifo { queue, .. } => {
                (queue.len() >= count as usize).then(|| queue.drain(..count as usize).collect())
            }
        };
        taken.with_context(|| format!("{count} block numbers are not free"))
    }

    /// Gives back numbers that were just taken: they are the next again.
    pub(super) fn untake(&mut self, numbers: &[u32]) -> anyhow::Result<()> {
        match self {
            Self::Fifo { queue, .. } => {
                numbers
                    .iter()
                    .rev()
                    .for_each(|&number| queue.push_front(number));
                Ok(())
            }
            Self::Lowest(_) => self.give_back(numbers),
        }
    }

    /// Gives numbers back. A queue that has all numbers then is in order again: else a long request
    /// might find no memory in an empty cache, because its blocks lie too far apart.
    pub(super) fn give_back(&mut self, numbers: &[u32]) -> anyhow::Result<()> {
        match self {
            Self::Lowest(free) => Ok(free.give_back_many(numbers)?),
            Self::Fifo { queue, blocks } => {
                queue.extend(numbers);
                if queue.len() == *blocks as usize {
                    queue.make_contiguous().sort_unstable();
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_gives_out_what_was_freed_longest_ago_and_begins_anew_when_all_is_free() {
        let mut lowest = Numbers::new(Order::Lowest, 6).unwrap();
        let mut queue = Numbers::new(Order::Fifo, 6).unwrap();
        for numbers in [&mut lowest, &mut queue] {
            assert_eq!(numbers.take(4).unwrap(), [0, 1, 2, 3]);
            assert!(numbers.take(3).is_err());
            assert_eq!(numbers.len(), 2);
            numbers.give_back(&[2, 0]).unwrap();
        }
        assert_eq!(lowest.take(3).unwrap(), [0, 2, 4]);
        assert_eq!(queue.take(3).unwrap(), [4, 5, 2]);
        for numbers in [&mut lowest, &mut queue] {
            let taken = numbers.take(1).unwrap();
            numbers.untake(&taken).unwrap();
            assert_eq!(numbers.take(1).unwrap(), taken);
        }
        queue.give_back(&[5, 2, 0, 4, 1, 3]).unwrap();
        assert_eq!(queue.take(6).unwrap(), [0, 1, 2, 3, 4, 5]);
    }
}
