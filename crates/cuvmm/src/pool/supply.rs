//! Where memory comes from: the free list, else the driver; and where it goes back to.

use std::sync::PoisonError;

use super::budget::TenantId;
use super::core::{Core, Locked};
use super::state::{Policy, Scrub};
use crate::error::{BlockError, MemoryError};
use crate::own::Physical;
use crate::region::Unmapped;

/// How many small physicals are mapped sooner than released and created anew as one: each costs the
/// driver about 25 us to open and 11 us to release, and a creation at least 20 us
/// (`docs/measurements.md`).
const WORTH_MAPPING: u64 = 4;

impl Locked<'_> {
    /// Unmapped physicals of at most `largest` that make up `bytes` (whole granules), which the tenant has been charged; taken from
    /// others if it `claims` them and the driver has no more. On failure nothing has changed,
    /// except that the driver may have got memory of the free list back.
    pub(crate) fn gather(
        &mut self,
        id: TenantId,
        bytes: u64,
        largest: u64,
        claims: bool,
    ) -> Result<Vec<Unmapped>, BlockError> {
        let mut physicals = vec![];
        let mut left = bytes;
        while left > 0 {
            match self.one_unmapped(id, left, largest, claims) {
                Ok(unmapped) => {
                    left -= unmapped.size();
                    physicals.push(unmapped);
                }
                Err(error) => {
                    self.put_back(physicals);
                    return Err(error);
                }
            }
        }
        Ok(physicals)
    }

    /// One physical of at most `left` bytes, as large as can be.
    fn one_unmapped(
        &mut self,
        id: TenantId,
        left: u64,
        largest: u64,
        claims: bool,
    ) -> Result<Unmapped, BlockError> {
        let want = self.device.granule().extent_within(left, largest);
        // During a capture nothing can be scrubbed: then only what may be had as it is.
        let foreign = self.capturing == 0 || self.policy.scrub == Scrub::Never;
        loop {
            if let Some(unmapped) = self.free_list.take(want, Some(id.0), foreign) {
                return Ok(unmapped);
            }
            let mut refused = None;
            if self.budget.creatable() < want {
                self.merge_free(want);
            }
            if self.budget.creatable() >= want {
                match self.create(want) {
                    Ok(unmapped) => return Ok(unmapped),
                    Err(MemoryError::Create { cause, .. }) if cause.is_out_of_memory() => {
                        refused = Some(cause);
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            if let Some(unmapped) = self.free_list.take_within(want, Some(id.0), foreign) {
                return Ok(unmapped);
            }
            // What is left in the free list is too large, or may not be had: the driver gets it back.
            if let Some(unmapped) = self.free_list.take_largest() {
                self.release(unmapped);
                continue;
            }
            let Some(cause) = refused else {
                return Err(BlockError::OutOfMemory(self.shortage(id, left, 0)));
            };
            // Below our own limit, and yet the driver has no more: others have it. What lies
            // idle with us is worth more in use.
            if !claims || self.take_back_any(id, want)? == 0 {
                let shortage = self.shortage(id, left, 0);
                return Err(BlockError::DriverOutOfMemory { cause, shortage });
            }
        }
    }

    /// Releases many small physicals of the free list, so that one of `want` bytes can be created instead,
    /// where that costs less than mapping them all; or one that is larger.
    fn merge_free(&mut self, want: u64) {
        let missing = want - self.budget.creatable();
        if self.free_list.unmapped_for(want) <= WORTH_MAPPING {
            return;
        }
        if let Some(unmapped) = self.free_list.take_smallest_above(want) {
            self.release(unmapped);
            return;
        }
        if self.free_list.bytes() < missing {
            return;
        }
        while self.budget.creatable() < want {
            let Some(unmapped) = self.free_list.take_smallest() else {
                return;
            };
            self.release(unmapped);
        }
    }

    fn create(&mut self, size: u64) -> Result<Unmapped, MemoryError> {
        // Nobody else creates what this is about to.
        self.budget.created(size);
        let core = self.core();
        let policy = self.policy;
        let created = self.unlocked(|| core.create(&policy, size));
        if created.is_err() {
            self.budget.not_created(size);
        }
        created.map(Unmapped::fresh)
    }
}

impl Core {
    /// Creates memory of the pool's kind, unless that would leave less free than it promised.
    pub(super) fn create(&self, policy: &Policy, size: u64) -> Result<Physical, MemoryError> {
        let refuse = |cause| MemoryError::Create {
            size,
            location: policy.props.location,
            cause,
        };
        let mut _one_by_one = None;
        if policy.leave_free > 0 {
            // Two that ask at once would both find room for one.
            let creating = self.creating.lock();
            _one_by_one = Some(creating.unwrap_or_else(PoisonError::into_inner));
            let info = self.device.memory_info().map_err(refuse)?;
            if info.free < size.saturating_add(policy.leave_free) {
                return Err(refuse(out_of_memory()));
            }
        }
        Physical::builder(&self.device, size)
            .with_props(policy.props)
            .create()
    }
}

/// The answer for a creation that would leave less free than the pool promised to leave.
fn out_of_memory() -> crate::error::CallError {
    use cuvmm_driver::{CUresult, Call, DriverError};
    DriverError::new(Call::MemGetInfo, CUresult::CUDA_ERROR_OUT_OF_MEMORY).into()
}
