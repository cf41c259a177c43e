//! The one host driver of the process, created by `cuInit`.
//!
//! `unsafe` is allowed here, and in every file that exports functions, to define them under their C
//! names and to read and write through the pointers that C passes (see `edge`).
#![allow(unsafe_code)]

use std::env;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;

use cuvmm_driver::host::{HostDriver, HostOptions};
use cuvmm_driver::{Driver, Ordinal};
use cuvmm_sys::CUresult;

use crate::edge::{Outcome, code, export, put};
use crate::gate;

/// The state after `cuInit`.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) driver: HostDriver,
    /// The number of references to each device's primary context.
    pub(crate) retained: Vec<AtomicU32>,
}

/// The result of the first `cuInit`; later calls return the same.
static STATE: OnceLock<Outcome<State>> = OnceLock::new();

/// Returns the state, or `NOT_INITIALIZED`. A function of the program that runs in the order of a
/// stream may not use it.
pub(crate) fn state() -> Outcome<&'static State> {
    match gate::pass(&STATE)? {
        Some(Ok(state)) => Ok(state),
        Some(Err(_)) | None => Err(CUresult::CUDA_ERROR_NOT_INITIALIZED),
    }
}

/// Returns the driver, or `NOT_INITIALIZED`.
pub(crate) fn driver() -> Outcome<&'static HostDriver> {
    Ok(&state()?.driver)
}

impl State {
    fn make() -> Outcome<Self> {
        let devices = setting("FAKECUDA_DEVICES").unwrap_or(1);
        if devices == 0 {
            return Err(CUresult::CUDA_ERROR_NO_DEVICE);
        }
        let name = env::var("FAKECUDA_NAME").unwrap_or_else(|_| "fakecuda".to_owned());
        let mut options = HostOptions::new().devices(devices).name(name);
        if let Some(bytes) = setting("FAKECUDA_CAPACITY") {
            options = options.capacity(bytes);
        }
        let driver = HostDriver::new(options);
        let retained = (0..devices).map(|_| AtomicU32::new(0)).collect();
        Ok(Self { driver, retained })
    }

    /// Returns the ordinal of a device that exists.
    pub(crate) fn device(&self, device: i32) -> Outcome<Ordinal> {
        let known = usize::try_from(device).is_ok_and(|index| index < self.retained.len());
        if known {
            Ok(Ordinal(device))
        } else {
            Err(CUresult::CUDA_ERROR_INVALID_DEVICE)
        }
    }
}

fn setting<T: FromStr>(name: &str) -> Option<T> {
    env::var(name).ok()?.parse().ok()
}

export! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        match STATE.get_or_init(State::make) {
            Ok(_) => gate::init(),
            Err(code) => Err(*code),
        }
    }

    fn cuDriverGetVersion(version: *mut i32) {
        let answered = match state() {
            Ok(state) => state.driver.version().map_err(code)?.as_raw(),
            // Before there is a driver: the version that the host driver reports by default.
            Err(_) => 13_000,
        };
        // SAFETY: the caller passes a valid pointer for the result, or null.
        unsafe { put(version, answered) }
    }
}
