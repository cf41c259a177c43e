//! Waiting for a device, and what goes with its last handle.

use cuvmm_driver::Call;

use super::{Device, Shared};
use crate::deferred::defer;
use crate::error::CallError;

impl Device {
    /// Waits until all work of the device's context is done (`cuCtxSynchronize`).
    ///
    /// That is the primary context, which the driver uses for the device. Work in another context
    /// that the program made itself (`cuCtxCreate`) is not waited for.
    ///
    /// # Errors
    /// [`CallError`] when the driver says that the context is lost, and while a stream of the
    /// context captures, in whatever mode and for whichever library.
    pub fn synchronize(&self) -> Result<(), CallError> {
        let begun = self.tick();
        self.call(Call::CtxSynchronize, |driver, device| {
            driver.context_synchronize(device)
        })?;
        self.shared.events.synchronised(begun);
        self.shared.events.destroy_spare(self);
        Ok(())
    }

    /// Waits until all work of the device is done, in relaxed capture mode: a capture that another
    /// library is making goes on, and the wait is refused.
    pub(crate) fn settle(&self) -> Result<(), CallError> {
        self.relaxed(|| self.synchronize())?
    }

    /// Waits until no work of the device can touch memory any more, to unmap for good: all of it
    /// is done, or the context is lost and nothing runs on it.
    pub(crate) fn drain(&self) -> Result<(), CallError> {
        if self.lost().is_some() {
            return Ok(());
        }
        self.settle().or_else(|error| {
            if self.lost().is_some() {
                Ok(())
            } else {
                Err(error)
            }
        })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The last owner may be a stream in a fence of another handle's pool, which is locked.
        if let Some(hook) = self.drops.take_hook() {
            defer(move || drop(hook));
        }
        if self.birthplace.is_here() {
            self.events.destroy_by(&*self.driver, self.ordinal);
        }
    }
}
