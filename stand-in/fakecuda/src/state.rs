//! The process's one host driver, created by `cuInit`.
//!
//! `unsafe` is allowed here, and in every file that exports functions, to define them under their C
//! names and to read and write through the pointers that C passes (see `edge`).
#![allow(unsafe_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cuvmm_driver::{Driver, Ordinal};
use cuvmm_model::host::{HostDriver, HostOptions};
use cuvmm_sys::CUresult;

use crate::calls;
use crate::edge::{Outcome, code, export, put};
use crate::gate;
use crate::loaded;
use crate::settings::{self, Settings, Work};
use crate::status;
use crate::watched::Watched;

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) driver: Watched,
    pub(crate) retained: Vec<AtomicU32>,
}

/// The result of the first `cuInit`, which later calls return too.
static STATE: OnceLock<Outcome<State>> = OnceLock::new();

/// Returns the state, or `NOT_INITIALIZED`. Refused to a function of the program that runs in the
/// order of a stream.
pub(crate) fn state() -> Outcome<&'static State> {
    match gate::pass(&STATE)? {
        Some(Ok(state)) => Ok(state),
        Some(Err(_)) | None => Err(CUresult::CUDA_ERROR_NOT_INITIALIZED),
    }
}

/// Returns the driver, or `NOT_INITIALIZED`.
pub(crate) fn driver() -> Outcome<&'static Watched> {
    Ok(&state()?.driver)
}

/// Returns the CUDA version of the driver; before `cuInit`, the version that it will report.
pub(crate) fn version() -> Outcome<i32> {
    match state() {
        Ok(state) => Ok(state.driver.version().map_err(code)?.as_raw()),
        Err(_) => Ok(settings::get().map_or_else(
            |_| Settings::default().version.as_raw(),
            |settings| settings.version.as_raw(),
        )),
    }
}

fn clock() -> Duration {
    driver().map_or(Duration::ZERO, |driver| driver.clock())
}

impl State {
    fn make() -> Outcome<Self> {
        // The report is made when the process ends, not when the program closes the library. And
        // ending threads that have called the library run its destructors.
        loaded::stay();
        let settings = settings::get().map_err(|_| CUresult::CUDA_ERROR_SYSTEM_NOT_READY)?;
        if settings.devices == 0 {
            return Err(CUresult::CUDA_ERROR_NO_DEVICE);
        }
        if settings.latency.is_some() {
            calls::take_time(clock);
        }
        let watched = settings.report.is_some() || settings.exit_code.is_some();
        if watched {
            status::watch();
        }
        let driver = Watched::new(HostDriver::new(options(settings)), watched);
        let retained = (0..settings.devices).map(|_| AtomicU32::new(0)).collect();
        Ok(Self { driver, retained })
    }

    pub(crate) fn device(&self, device: i32) -> Outcome<Ordinal> {
        let known = usize::try_from(device).is_ok_and(|index| index < self.retained.len());
        if known {
            Ok(Ordinal(device))
        } else {
            Err(CUresult::CUDA_ERROR_INVALID_DEVICE)
        }
    }

    pub(crate) fn references(&self) -> Vec<u32> {
        let counts = self.retained.iter();
        counts.map(|count| count.load(Ordering::Acquire)).collect()
    }
}

fn options(settings: &Settings) -> HostOptions {
    let mut options = HostOptions::new()
        .devices(settings.devices)
        .name(settings.name.clone())
        .version(settings.version)
        .manner(settings.manner)
        .seed(settings.seed)
        .late(settings.work == Work::Late)
        .record_unwritten(settings.unwritten);
    if let Some(bytes) = settings.capacity {
        options = options.capacity(bytes);
    }
    if let Some(costs) = &settings.latency {
        options = options.costs(costs.clone());
    }
    options
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
        // SAFETY: C's promise (see `edge`).
        unsafe { put(version, self::version()?) }
    }
}
