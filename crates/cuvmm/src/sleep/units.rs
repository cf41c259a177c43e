//! Blocks and holders, which are heaps and paged caches, as units that sleep and wake whole. A holder
//! has several ranges with contents.

use std::iter::Chain;
use std::sync::Arc;
use std::{option, vec};

use cuvmm_driver::DeviceAddress;

use crate::error::{BlockError, SleepError};
use crate::own::Span;
use crate::pool::{
    CanSleep, GivenUp, HolderToSleep, HolderToWake, MovingHolder, Room, ToSleep, ToWake,
    TransitioningBlock, WakingHolder,
};
use crate::store::{HostStore, Ranges, Saved};

/// A unit that falls asleep. Dropping the value before that leaves it as it was.
pub(super) enum Sleeper {
    Block(ToSleep),
    Holder(Arc<dyn CanSleep>, HolderToSleep),
}

/// One item of a block, or all those of a holder. A block costs no allocation.
type OneOrMany<T> = Chain<option::IntoIter<T>, vec::IntoIter<T>>;

/// The ranges of a unit with contents, and where they are saved.
pub(super) type Parts<'a> = OneOrMany<(Span<'a>, &'a mut Saved)>;

/// The ranges of a waking unit with contents, in the order in which they get memory.
pub(super) type Places<'a> = OneOrMany<(Place<'a>, Span<'a>, &'a mut Saved)>;

fn one<T>(item: Option<T>) -> OneOrMany<T> {
    item.into_iter().chain(Vec::new())
}

fn many<T>(items: Vec<T>) -> OneOrMany<T> {
    None.into_iter().chain(items)
}

/// A unit whose contents are being copied.
#[derive(Clone, Copy)]
pub(super) enum Moving<'a> {
    Block(&'a TransitioningBlock),
    Holder(&'a dyn MovingHolder),
}

impl Moving<'_> {
    /// Returns `true` if the memory can be taken out only when nothing is copied any more.
    pub(super) fn withdraws_last(self) -> bool {
        match self {
            Self::Block(_) => false,
            Self::Holder(holder) => holder.withdraws_last(),
        }
    }

    /// Takes the memory out, of which a copy was made.
    pub(super) fn withdraw_copied(self, wanted: &dyn Fn() -> bool) -> Result<(), SleepError> {
        match self {
            Self::Block(block) => block.withdraw_copied(),
            Self::Holder(holder) => holder.withdraw(wanted),
        }
    }
}

impl Sleeper {
    /// Returns the owner of a holder.
    pub(super) fn owner(&self) -> Option<&Arc<dyn CanSleep>> {
        match self {
            Self::Block(_) => None,
            Self::Holder(owner, _) => Some(owner),
        }
    }

    /// Returns the address of a block.
    pub(super) fn address(&self) -> Option<DeviceAddress> {
        match self {
            Self::Block(block) => block.address(),
            Self::Holder(..) => None,
        }
    }

    /// The bytes of contents.
    pub(super) fn bytes(&self) -> u64 {
        self.sizes().sum()
    }

    /// The bytes that are marked to be kept.
    pub(super) fn marked(&self) -> u64 {
        match self {
            Self::Block(block) => block.marked().bytes(),
            Self::Holder(..) => 0,
        }
    }

    /// Returns the ranges to be kept in each part with contents: everything, or what is marked in a
    /// block.
    pub(super) fn kept(&self, all: bool) -> Vec<Ranges> {
        match self {
            Self::Block(block) if !all => vec![block.marked()],
            Self::Holder(..) if !all => Vec::new(),
            _ => self.sizes().map(Ranges::all).collect(),
        }
    }

    /// The sizes of the ranges with contents.
    fn sizes(&self) -> impl Iterator<Item = u64> {
        match self {
            Self::Block(block) => one(Some(block.bytes())),
            Self::Holder(_, holder) => many(holder.sizes()),
        }
    }

    /// Takes the memory that the contents are to be saved in.
    pub(super) fn keep_in(&mut self, rooms: &mut impl Iterator<Item = Saved>, all: bool) {
        match self {
            Self::Block(block) => rooms.by_ref().take(1).for_each(|room| block.keep_in(room)),
            Self::Holder(_, holder) if all => holder.keep_in(rooms),
            Self::Holder(..) => {}
        }
    }

    /// Returns the unit, the bytes to be copied, and their parts.
    pub(super) fn contents(&mut self) -> Option<(Moving<'_>, u64, Parts<'_>)> {
        match self {
            Self::Block(block) => {
                let (moving, saved) = block.contents()?;
                let bytes = saved.bytes();
                let part = (moving.span(), saved);
                Some((Moving::Block(moving), bytes, one(Some(part))))
            }
            Self::Holder(_, holder) => {
                let (moving, parts) = holder.contents()?;
                let bytes = parts.iter().map(|(_, saved)| saved.bytes()).sum();
                Some((Moving::Holder(moving), bytes, many(parts)))
            }
        }
    }

    /// Takes the memory out. Its contents are lost if the unit sleeps.
    pub(super) fn withdraw(&self, wanted: &dyn Fn() -> bool) -> Result<(), SleepError> {
        match self {
            Self::Block(block) => block.withdraw(),
            Self::Holder(_, holder) => {
                let moving = holder.moving();
                moving.map_or(Ok(()), |moving| moving.withdraw(wanted))
            }
        }
    }

    pub(super) fn sleep(self, release: bool) -> GivenUp {
        match self {
            Self::Block(block) => block.sleep(release),
            Self::Holder(_, holder) => holder.sleep(release),
        }
    }

    /// Puts the memory back in its place. Returns `false` if that failed: the unit then sleeps.
    pub(super) fn stay(self) -> bool {
        match self {
            Self::Block(block) => block.stay(),
            Self::Holder(_, holder) => holder.stay(),
        }
    }
}

/// A unit that wakes. If this value is dropped before that, it sleeps on, with the contents that
/// were kept.
pub(super) enum Waker {
    Block(ToWake),
    Holder(Arc<dyn CanSleep>, HolderToWake),
}

/// A range with contents in a unit that wakes.
#[derive(Clone, Copy)]
pub(super) enum Place<'a> {
    /// A block, and `true` if it is zeroed first.
    Block(&'a TransitioningBlock, bool),
    /// An extent of a holder, by its index and its size in bytes.
    Holder(&'a dyn WakingHolder, usize, u64),
}

impl Place<'_> {
    /// The bytes of memory of the range.
    pub(super) const fn used(self) -> u64 {
        match self {
            Self::Block(block, _) => block.used(),
            Self::Holder(.., bytes) => bytes,
        }
    }

    /// Places the next extent, to be copied to at once; returns the offset up to which there is
    /// memory.
    pub(super) fn furnish_next(self) -> Result<u64, BlockError> {
        match self {
            Self::Block(block, zeroed) => block.furnish_next(zeroed),
            Self::Holder(holder, index, bytes) => holder.place(index).map(|()| bytes),
        }
    }
}

impl Waker {
    /// Returns the owner of a holder.
    pub(super) fn owner(&self) -> Option<&Arc<dyn CanSleep>> {
        match self {
            Self::Block(_) => None,
            Self::Holder(owner, _) => Some(owner),
        }
    }

    /// The bytes of contents and of memory without contents.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Block(block) => block.bytes(),
            Self::Holder(_, holder) => holder.used(),
        }
    }

    /// The bytes of memory.
    pub(super) fn used(&self) -> u64 {
        match self {
            Self::Block(block) => block.used(),
            Self::Holder(_, holder) => holder.used(),
        }
    }

    /// The bytes that may have to be created when the memory is placed.
    pub(super) fn to_create(&self) -> u64 {
        match self {
            Self::Block(block) => block.used(),
            // A holder is lent its memory before.
            Self::Holder(..) => 0,
        }
    }

    pub(super) fn kept_in(&self) -> Option<HostStore> {
        match self {
            Self::Block(block) => block.kept_in(),
            Self::Holder(_, holder) => holder.kept_in(),
        }
    }

    pub(super) fn kept(&self) -> u64 {
        match self {
            Self::Block(block) => block.kept(),
            Self::Holder(_, holder) => holder.kept(),
        }
    }

    pub(super) fn contents(&mut self) -> Places<'_> {
        match self {
            Self::Block(block) => {
                let contents = block.contents();
                one(contents.map(|(moving, saved, zeroed)| {
                    (Place::Block(moving, zeroed), moving.span(), saved)
                }))
            }
            Self::Holder(_, holder) => {
                let contents = holder.contents().into_iter();
                let parts = contents.flat_map(|(waking, parts)| {
                    parts.into_iter().map(move |(index, span, saved)| {
                        (Place::Holder(waking, index, saved.bytes()), span, saved)
                    })
                });
                many(parts.collect())
            }
        }
    }

    /// Places all memory that the unit lacks, where there are no contents.
    pub(super) fn place_memory(&mut self, room: &mut Room<'_>) -> Result<(), BlockError> {
        match self {
            Self::Block(block) => block.place_memory(room),
            Self::Holder(_, holder) => holder.place_memory(),
        }
    }

    pub(super) fn wake(self) {
        match self {
            Self::Block(block) => block.wake(),
            Self::Holder(_, holder) => holder.wake(),
        }
    }
}
