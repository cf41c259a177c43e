//! Host memory of the program that is registered with the driver, and copies to and from it.

use super::answer::{Answer, INVALID_VALUE, require};
use super::backing::Backing;
use super::losses::{Loss, Taken};
use super::state::State;
use cuvmm_driver::{CUresult, Call, Ordinal};

const TWICE: CUresult = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
const NEVER: CUresult = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;

/// The accepted flags: for all contexts, with a device address, and only read. The flag 4, for
/// registers of a device, is refused for ordinary memory.
const FLAGS: u32 = 1 | 2 | 8;

impl<B: Backing> State<B> {
    pub(crate) fn host_register(
        &mut self,
        device: Ordinal,
        start: u64,
        size: u64,
        flags: u32,
    ) -> Answer {
        self.context(device)?;
        require(start != 0 && size != 0, INVALID_VALUE)?;
        require(flags & !FLAGS == 0, INVALID_VALUE)?;
        let end = start.checked_add(size).ok_or(INVALID_VALUE)?;
        require(self.registrations.overlapping(start, size).is_none(), TWICE)?;
        require(!self.is_own(start) && !self.is_own(end - 1), INVALID_VALUE)?;
        self.refuse_in_capture(None)?;
        self.registrations.sizes.insert(start, size);
        Ok(())
    }

    pub(crate) fn host_unregister(&mut self, device: Ordinal, start: u64) -> Answer {
        self.context(device)?;
        require(start != 0, INVALID_VALUE)?;
        if !self.registrations.sizes.contains_key(&start) {
            let inside = self.registrations.overlapping(start, 1).is_some();
            let code = match inside || self.is_own(start) {
                true => INVALID_VALUE,
                false => NEVER,
            };
            return Err(code);
        }
        self.refuse_in_capture(None)?;
        let Some(size) = self.registrations.sizes.remove(&start) else {
            return Err(NEVER);
        };
        let loss = Loss::Registration;
        self.note_hazards(Call::MemHostUnregister, &[Taken { start, size, loss }]);
        Ok(())
    }

    /// Returns `true` if the driver mapped or allocated the memory at an address.
    fn is_own(&self, address: u64) -> bool {
        let mapped = self.mappings.containing(address).is_some();
        mapped || self.allocations.containing(address).is_some()
    }

    /// Refuses a copy of the program's memory that begins in a registration and runs past its end,
    /// as the driver does for one that spans two.
    pub(crate) fn check_registration(&self, start: u64, size: u64) -> Answer {
        let Some((first, length)) = self.registrations.overlapping(start, 1) else {
            return Ok(());
        };
        require(size <= first + length - start, INVALID_VALUE)
    }
}
