//! The identity of a device: place on the bus, compute capability. Device `n` is on bus `n + 1` of
//! domain 0.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};

use cuvmm_driver::{DeviceAttribute, Driver, Ordinal};
use cuvmm_sys::{CUdevice, CUresult};

use crate::edge::{Outcome, code, export_also, present, put};
use crate::settings;
use crate::state::{driver, state};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Returns the bus, the slot or the domain of a device, if the attribute is one of these.
fn place(device: Ordinal, attribute: i32) -> Option<i32> {
    match attribute {
        33 => Some(device.0 + 1),
        34 | 50 => Some(0),
        _ => None,
    }
}

/// Parses the place of a device: an optional domain, a bus, a slot, and an optional function.
fn parse(text: &str) -> Option<(i32, i32, i32)> {
    let text = text.split_once('.').map_or(text, |(before, _)| before);
    let mut numbers = Vec::new();
    for part in text.split(':') {
        numbers.push(i32::from_str_radix(part, 16).ok()?);
    }
    match numbers[..] {
        [domain, bus, slot] => Some((domain, bus, slot)),
        [bus, slot] => Some((0, bus, slot)),
        _ => None,
    }
}

/// Returns an attribute: the place on the bus, the recorded answer of the GPU in the settings, or
/// the driver's answer.
pub(crate) fn attribute(device: Ordinal, number: i32) -> Outcome<i32> {
    let driver = driver()?;
    let settings = settings::get().ok();
    let gpu = settings.and_then(|settings| settings.gpu.as_ref());
    let recorded = || gpu?.attributes.get(&number).copied();
    match place(device, number).or_else(recorded) {
        Some(value) => Ok(value),
        None => driver
            .device_attribute(device, DeviceAttribute(number))
            .map_err(code),
    }
}

export_also! {
    fn cuDeviceGetPCIBusId(text: *mut c_char, room: i32, device: CUdevice) {
        let device = state()?.device(device)?;
        present(text)?;
        let name = format!("0000:{:02X}:00.0", device.0 + 1);
        let room = usize::try_from(room).map_err(|_| INVALID)?;
        // A place that is too small gets the beginning of the name.
        let fitting = name.len().min(room.saturating_sub(1));
        for (index, byte) in name.bytes().take(fitting).chain([0]).take(room).enumerate() {
            // SAFETY: the caller passes `room` writable bytes.
            unsafe { put(text.add(index), byte as c_char) }?;
        }
        if room <= name.len() { Err(INVALID) } else { Ok(()) }
    }

    fn cuDeviceGetByPCIBusId(device: *mut CUdevice, text: *const c_char) {
        let state = state()?;
        present(device)?;
        present(text)?;
        // SAFETY: the caller passes a C string.
        let text = unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| INVALID)?;
        let (domain, bus, slot) = parse(text).ok_or(INVALID)?;
        let found = (0..state.retained.len() as i32).find(|&index| {
            domain == 0 && slot == 0 && place(Ordinal(index), 33) == Some(bus)
        });
        let found = found.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(device, found) }
    }

    fn cuDeviceComputeCapability(major: *mut i32, minor: *mut i32, device: CUdevice) {
        let device = state()?.device(device)?;
        present(major)?;
        present(minor)?;
        let (high, low) = (attribute(device, 75)?, attribute(device, 76)?);
        // SAFETY: C's promise (see `edge`).
        unsafe {
            put(major, high)?;
            put(minor, low)
        }
    }

    fn cuDeviceGetExecAffinitySupport(supported: *mut i32, _kind: u32, device: CUdevice) {
        state()?.device(device)?;
        present(supported)?;
        // Execution affinity exists under MPS only.
        // SAFETY: C's promise (see `edge`).
        unsafe { put(supported, 0) }
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn places_are_read_in_both_cases() {
        assert_eq!(parse("0000:1a:00.0"), Some((0, 26, 0)));
        assert_eq!(parse("0000:1A:00"), Some((0, 26, 0)));
        assert_eq!(parse("1A:00.0"), Some((0, 26, 0)));
        assert_eq!(parse("nonsense"), None);
        assert_eq!(parse(""), None);
    }
}
