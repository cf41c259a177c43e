//! The CUDA driver's memory calls behind one trait, and the real driver behind it.
//!
//! - [`driver`]: the trait [`Driver`] and its contract.
//! - [`cuda`]: the real driver, `libcuda`.
//! - [`fault`]: a wrapper around any driver that fails, delays and records calls.
//!
//! The crate `cuvmm-model` has two more drivers, for machines without a GPU. `cuvmm::driver::auto`
//! chooses between the drivers.
//!
//! This crate rounds no sizes, retries no calls and has no policy. All of that is in the crate
//! `cuvmm`.

mod call;
pub mod cuda;
pub mod driver;
mod error;
pub mod fault;
mod shareable;
mod types;

pub use call::Call;
pub use cuvmm_sys as sys;
pub use cuvmm_sys::{CUresult, CudaVersion};
pub use driver::{DeviceMemory, Driver, DriverKind};
pub use error::{DriverError, Result};
pub use shareable::{Exported, ImportSource, OsHandle, RawOsHandle};
pub use types::*;
