//! Paged caches under tags, which sleep and wake with the blocks of their tag.

use std::sync::Arc;

use cuvmm::Tenant;

use super::{host, lock, tag};
use crate::error::Error;
use crate::heaps::DeviceHeap;
use crate::paged::caches::{self, Cache};
use crate::shareable;

/// Returns the index and the tenant of a tag for a paged cache, made if needed.
///
/// # Errors
/// The tag sleeps or is shareable, or the name is that of the heap's tenant.
pub(crate) fn for_cache(of: &DeviceHeap, name: &str) -> Result<(usize, Tenant), Error> {
    if of.tenant().name() == name {
        return Err(Error::PagedInHeap(name.to_owned()));
    }
    shareable::refuse_paged(name)?;
    let (index, tenant, _) = tag(of.device.ordinal().0, name)?;
    Ok((index, tenant))
}

/// Adds a paged cache to a tag. Returns the cache's number.
///
/// # Errors
/// The tag sleeps.
pub(crate) fn admit(index: usize, cache: Arc<Cache>) -> Result<u64, Error> {
    let state = lock();
    let tag = &state.tags[index];
    match tag.is_asleep {
        true => Err(Error::Asleep(tag.name.clone())),
        // Under the lock: a tag that falls asleep from here on has the cache.
        false => Ok(caches::add(cache)),
    }
}

/// Gives the host memory of a tag up after the end of a paged cache, if it has no memory left.
pub(crate) fn ended_cache(of: &DeviceHeap, name: &str) {
    let state = lock();
    let is = |tag: &super::Tag| std::ptr::eq(tag.of, of) && tag.name == name;
    let index = state.tags.iter().position(is);
    drop(state);
    if let Some(index) = index {
        host::give_up(index);
    }
}
