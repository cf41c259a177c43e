//! Runs one case in a separate process, for the tests of this workspace:
//! `conformance-one model|host|cuda:PATH CASE`.
//!
//! `unsafe` is allowed here to load the library that a test names.
#![allow(unsafe_code)]

use std::process::ExitCode;
use std::sync::Arc;

use conformance::{KernelToucher, MachineToucher, run_in_own_process};
use cuvmm_driver::Driver;
use cuvmm_driver::cuda::CudaDriver;
use cuvmm_model::host::{HostDriver, HostOptions};
use cuvmm_model::model::{Backing, Machine, ModelDriver, ModelOptions};

/// A driver, and its kernels if it has any.
type Opened = (Arc<dyn Driver>, Option<Arc<dyn KernelToucher>>);

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (Some(backend), Some(case)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: conformance-one model|host|cuda:PATH CASE");
        return ExitCode::from(2);
    };
    match open(&backend) {
        Ok((driver, kernels)) => run_in_own_process(driver, kernels, &case),
        Err(reason) => {
            eprintln!("{backend}: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn open(backend: &str) -> Result<Opened, String> {
    Ok(match backend {
        "model" => stand_in(ModelDriver::new(ModelOptions::new())),
        "host" => stand_in(HostDriver::new(HostOptions::new())),
        other => {
            let path = other.strip_prefix("cuda:").ok_or("no such backend")?;
            // SAFETY: the tests name the stand-in library that they have built.
            let opened = unsafe { CudaDriver::open_library(path) };
            (Arc::new(opened.map_err(|error| error.to_string())?), None)
        }
    })
}

fn stand_in<B: Backing>(machine: Machine<B>) -> Opened {
    let driver = Arc::new(machine);
    let kernels = MachineToucher::new(Arc::clone(&driver));
    (driver, Some(Arc::new(kernels)))
}
