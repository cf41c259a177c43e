//! Copies whose direction follows from the addresses: `cuMemcpy` and `cuMemcpyAsync`.
//!
//! `unsafe` exports functions (see `state`), and copies host memory.
#![allow(unsafe_code)]

use cuvmm_driver::{CaptureStatus, DeviceAddress, Ordinal, StreamHandle};
use cuvmm_sys::{CUdeviceptr, CUresult, CUstream};

use crate::attributes::{self, Kind};
use crate::contexts::current;
use crate::edge::{Outcome, code, export_also};
use crate::state::driver;
use crate::streams::{stream_handle, target};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

pub(crate) fn is_pinned(device: Ordinal, address: u64) -> bool {
    let found = attributes::find(device, address);
    found.is_ok_and(|found| matches!(found.kind, Kind::Pinned | Kind::Registered))
}

/// Returns `true` if the host driver copies the memory at an address.
///
/// Pool memory on the host is copied like memory of the program: a device without access can copy
/// it. A hostile driver refuses questions about unknown addresses with any code, so each refusal
/// means memory of the program.
fn is_device(device: Ordinal, address: u64) -> bool {
    let found = attributes::find(device, address);
    found.is_ok_and(|found| match found.kind {
        Kind::Registered => false,
        Kind::Pool => !found.on_host,
        _ => true,
    })
}

/// Returns `true` if the process can read the first and the last byte of a range.
pub(crate) fn is_readable(address: u64, bytes: usize) -> bool {
    let last = address.saturating_add(bytes as u64 - 1);
    [address, last].iter().all(|&at| {
        let mut byte = 0u8;
        let local = libc::iovec {
            iov_base: std::ptr::from_mut(&mut byte).cast(),
            iov_len: 1,
        };
        let remote = libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(at as usize),
            iov_len: 1,
        };
        let process = std::process::id().cast_signed();
        // SAFETY: the system checks the remote address; the local one is that of `byte`.
        unsafe { libc::process_vm_readv(process, &local, 1, &remote, 1, 0) == 1 }
    })
}

/// The time at which an asynchronous copy is done with host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostOrder {
    /// When the stream has done the copy: the memory is pinned, or the copy is captured.
    Queued,
    /// At the call, which reads pageable memory before it returns.
    Now,
    /// When the call returns, which waits: to pageable memory, or from host to host.
    Done,
}

impl HostOrder {
    /// Returns the order of a copy on a stream between these addresses, as recorded.
    pub(crate) fn of(device: Ordinal, stream: StreamHandle, to: u64, from: u64) -> Outcome<Self> {
        // SAFETY: the host driver refuses wrong handles.
        let status = unsafe { driver()?.capture_status(device, stream) }.map_err(code)?;
        if status != CaptureStatus::NONE {
            return Ok(Self::Queued);
        }
        let side = |address| match attributes::find(device, address) {
            Ok(found) if found.on_host => Side::Pinned,
            Ok(_) => Side::Device,
            Err(_) => Side::Pageable,
        };
        Ok(match (side(to), side(from)) {
            (Side::Device, Side::Pageable) => Self::Now,
            (Side::Device, _) | (Side::Pinned, Side::Device) => Self::Queued,
            _ => Self::Done,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Device,
    Pinned,
    Pageable,
}

/// Makes a call that copies. As recorded, the current context's device needs access to memory of
/// pools, also if a stream of another device copies.
pub(crate) fn by_current<T>(call: impl FnOnce() -> T) -> Outcome<T> {
    let current = current()?;
    Ok(driver()?.copying(current, current, call))
}

pub(crate) fn copy(to: u64, from: u64, bytes: usize, stream: Option<StreamHandle>) -> Outcome {
    current()?;
    if bytes == 0 {
        return Ok(());
    }
    let driver = driver()?;
    let (device, order) = target(stream)?;
    let (to_device, from_device) = (is_device(device, to), is_device(device, from));
    let order_of_host = HostOrder::of(device, order, to, from)?;
    let host = |at_device: bool, address| at_device || is_readable(address, bytes);
    if !host(to_device, to) || !host(from_device, from) {
        return Err(INVALID);
    }
    let (target, source) = (DeviceAddress(to), DeviceAddress(from));
    let (to_host, from_host) = (
        std::ptr::with_exposed_provenance_mut::<u8>(to as usize),
        std::ptr::with_exposed_provenance::<u8>(from as usize),
    );
    let size = bytes as u64;
    // SAFETY: the caller of the exported function keeps both ranges until the copy is done, and
    // lets nothing else write the source or use the destination meanwhile.
    unsafe {
        match (to_device, from_device) {
            (true, true) => driver.copy_on_device_async(device, target, source, size, order),
            (true, false) if order_of_host == HostOrder::Now => {
                let bytes = std::slice::from_raw_parts(from_host, bytes);
                driver.copy_now_to_device(device, target, bytes, order)
            }
            (true, false) => driver.copy_to_device_async(device, target, from_host, size, order),
            (false, true) => driver.copy_to_host_async(device, to_host, source, size, order),
            (false, false) => {
                driver.stream_synchronize(device, order).map_err(code)?;
                std::ptr::copy(from_host, to_host, bytes);
                return Ok(());
            }
        }
        .map_err(code)?;
        if stream.is_none() || order_of_host == HostOrder::Done {
            driver.stream_synchronize(device, order).map_err(code)?;
        }
        Ok(())
    }
}

export_also! {
    fn cuMemcpy + ptds(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) {
        by_current(|| copy(to, from, bytes, None))?
    }

    fn cuMemcpyAsync + ptsz(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        by_current(|| copy(to, from, bytes, Some(stream_handle(stream))))?
    }
}
