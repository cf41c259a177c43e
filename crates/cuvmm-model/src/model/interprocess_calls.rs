//! Opening and closing plain memory of other processes.

use super::backing::Backing;
use super::machine::Machine;
use cuvmm_driver::{CUresult, DeviceAddress, Ordinal};

impl<B: Backing> Machine<B> {
    /// Maps plain memory of another process by its legacy handle, like `cuIpcOpenMemHandle`. The
    /// device accesses it like its own memory. A handle that is already open gives the same
    /// address.
    ///
    /// # Errors
    /// Returns `INVALID_VALUE` for a handle that names no live memory, `INVALID_CONTEXT` for one of
    /// this process, and `NOT_SUPPORTED` where there is no memory behind the addresses.
    pub fn ipc_open(&self, device: Ordinal, handle: &[u8; 64]) -> Result<DeviceAddress, CUresult> {
        self.with(|state| state.ipc_open(device, handle))
    }

    /// Closes one opening of another process's memory. The last close unmaps it.
    ///
    /// # Errors
    /// Returns `INVALID_VALUE` for an address that [`ipc_open`](Self::ipc_open) did not return.
    pub fn ipc_close(&self, device: Ordinal, address: DeviceAddress) -> Result<(), CUresult> {
        self.with(|state| state.ipc_close(device, address))
    }
}
