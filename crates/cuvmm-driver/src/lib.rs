//! The CUDA driver's memory calls behind one trait, with several implementations of it.
//!
//! - [`driver`]: the trait [`Driver`] and its contract.
//! - [`cuda`]: the real driver, `libcuda`.
//! - [`model`]: the driver's rules and costs without memory, on a virtual clock.
//! - [`host`]: the driver's rules over real host memory, for machines without a GPU.
//! - [`fault`]: a wrapper around any driver that fails, delays and records calls.
//! - [`auto`]: opens the real driver where there is a GPU and the host driver elsewhere, and
//!   reports the reason for the choice.
//!
//! This crate rounds no sizes, retries no calls and has no policy. All of that is in the crate
//! `cuvmm`.

pub mod auto;
mod call;
pub mod cuda;
pub mod driver;
mod error;
pub mod fault;
pub mod host;
pub mod model;
mod types;

pub use call::Call;
pub use cuvmm_sys as sys;
pub use cuvmm_sys::{CUresult, CudaVersion};
pub use driver::{DeviceMemory, Driver, DriverKind};
pub use error::{DriverError, Result};
pub use types::*;
