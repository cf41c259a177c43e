//! Synchronization with a device, and the end of its last handle.

use cuvmm_driver::Call;

use super::{Device, Shared};
use crate::deferred::{before_user_code, defer};
use crate::error::CallError;

impl Device {
    /// Waits until all work of the device's context is complete (`cuCtxSynchronize`).
    ///
    /// This is the primary context, which the driver uses for the device. Work in another context
    /// that the program created itself (`cuCtxCreate`) is not waited for.
    ///
    /// # Errors
    /// [`CallError`] when the driver reports that the context is lost, and while a stream of the
    /// context captures, in any mode and for any library. The call then breaks these captures.
    pub fn synchronize(&self) -> Result<(), CallError> {
        let begun = self.tick();
        self.call(Call::CtxSynchronize, |driver, device| {
            driver.context_synchronize(device)
        })?;
        self.shared.events.synchronised(begun);
        self.shared.events.destroy_spare(self);
        Ok(())
    }

    /// Waits until all work of the device is complete. Refused while a
    /// [capture guard](crate::pool::CaptureGuard) lives. Without a guard, a capture on the context
    /// is not known here: the driver refuses the wait, and the capture is broken. In relaxed capture
    /// mode at least captures on other contexts go on.
    pub(crate) fn settle(&self) -> Result<(), CallError> {
        // User code may take a capture guard, which waits for this.
        before_user_code(|| self.beside_captures(|| self.relaxed(|| self.synchronize())?))
    }

    /// Waits until all work of several devices is complete: the way to wait for memory that all of
    /// them have access to and that goes on to be used.
    pub(crate) fn settle_all<'a>(
        devices: impl IntoIterator<Item = &'a Self>,
    ) -> Result<(), CallError> {
        devices.into_iter().try_for_each(Self::settle)
    }

    /// Waits until no work of the device can access memory any more, so that it can be unmapped:
    /// all work is complete, or the context is lost and runs nothing.
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
