//! The choice of blocks whose eviction gives memory back.

use std::collections::BTreeSet;

use super::PagedKv;
use super::planes::Column;
use super::state::{State, Use};
use crate::error::PagedKvError;

/// Blocks to be evicted, and the memory that comes free with them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Evictions {
    /// The numbers of the blocks, those that empty the cheapest extents first.
    pub numbers: Vec<u32>,
    /// The bytes of extents that have no block in use any more once all of these are released.
    pub bytes: u64,
}

impl PagedKv {
    /// Chooses blocks among `evictable` whose release empties extents of at least `bytes` bytes, those
    /// first that take the fewest blocks for their bytes; fewer bytes if there are no more. For a
    /// [pressure hook](crate::pool::TenantBuilder::on_pressure): a server whose unused blocks are all
    /// kept for their prefixes has no extent to give. Numbers that are not in use are skipped,
    /// and all while the cache sleeps.
    ///
    /// It is for requests of others: the extents may be those that a [`back`](Self::back) of this cache
    /// needs too. For that, an engine takes over blocks that it keeps, which are backed already.
    ///
    /// While a [reserve](Self::reserve) lives, it moves to released numbers that are lower, and the
    /// extents of its highest numbers go instead.
    ///
    /// Makes no driver call, and takes time in proportion to the cache's blocks.
    ///
    /// # Errors
    /// [`PagedKvError`] in a forked child.
    pub fn emptiest(&self, bytes: u64, evictable: &[u32]) -> Result<Evictions, PagedKvError> {
        Ok(choose(&*self.lock()?, bytes, evictable))
    }
}

fn choose(state: &State, bytes: u64, evictable: &[u32]) -> Evictions {
    if !state.rest.is_awake() {
        return Evictions::default();
    }
    let mut may = vec![false; state.blocks() as usize];
    for &number in evictable {
        if state.use_of(number) == Ok(Use::Backed)
            && let Some(one) = may.get_mut(number as usize)
        {
            *one = true;
        }
    }
    let is_evictable = |&number: &u32| may.get(number as usize) == Some(&true);
    let evictable = |column: &Column| column.blocks.clone().filter(is_evictable).count() as u32;
    let columns = state.planes.columns(state.blocks());
    let mut columns: Vec<Column> = columns.filter(|it| evictable(it) == it.uses).collect();
    // Uses for each byte, without a division.
    let cost = |column: &Column, other: &Column| u128::from(column.uses) * u128::from(other.bytes);
    columns.sort_by(|one, other| {
        let order = cost(one, other).cmp(&cost(other, one));
        order.then(other.blocks.start.cmp(&one.blocks.start))
    });
    let mut chosen = Evictions::default();
    let mut known = BTreeSet::new();
    let mut columns = columns.into_iter();
    while chosen.bytes < bytes
        && let Some(column) = columns.next()
    {
        chosen.bytes += column.bytes;
        let numbers = column.blocks.filter(is_evictable);
        chosen
            .numbers
            .extend(numbers.filter(|&it| known.insert(it)));
    }
    chosen
}
