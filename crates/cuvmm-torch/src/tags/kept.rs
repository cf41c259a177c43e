//! Reading the kept contents of tags that sleep.

use std::sync::PoisonError;

use cuvmm::SleepError;

use super::lock;
use super::moving::MOVING;
use crate::blocks::Blocks;
use crate::error::Error;
use crate::fork;
use crate::paged::caches;

/// The most bytes that are copied while allocations under tags wait.
const PIECE: usize = 16 << 20;

/// Copies the contents of memory under a tag that sleeps, as `cuvmm_read_kept` describes. Returns
/// `false` if the memory is awake, or under no tag. Meanwhile no tag falls asleep or wakes.
///
/// # Errors
/// The contents were discarded, the range exceeds the allocation, or the memory is a sleeping paged
/// cache's.
pub(crate) fn read(address: usize, bytes: &mut [u8]) -> Result<bool, Error> {
    fork::check()?;
    let _moving = MOVING.lock().unwrap_or_else(PoisonError::into_inner);
    let size = bytes.len() as u64;
    // Its neighbours in a block sleep under the same tag.
    let is_of_several = lock().blocks.as_ref().is_some_and(|all| {
        let holding = all.holding(address);
        let is_in = holding.is_some_and(|(block, offset, _)| size <= block.size() - offset);
        is_in && size > 0 && all.tag_of(address, size).is_none()
    });
    if is_of_several {
        return Err(Error::NotInPool);
    }
    if let Some(name) = caches::asleep_at(address as u64) {
        return Err(Error::PagedAsleep(name));
    }
    let mut at = address;
    for piece in bytes.chunks_mut(PIECE) {
        let state = lock();
        let holding = state
            .blocks
            .as_ref()
            .and_then(|all| Blocks::holding(all, at));
        let Some((block, offset, index)) = holding else {
            return Ok(false);
        };
        let tag = &state.tags[index];
        match block.read_kept(offset, piece) {
            Ok(()) => at += piece.len(),
            Err(SleepError::Awake { .. }) => return Ok(false),
            Err(cause) => {
                return Err(Error::Sleep {
                    tag: tag.name.clone(),
                    device: tag.device,
                    cause,
                });
            }
        }
    }
    Ok(true)
}
