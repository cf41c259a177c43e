//! The real driver: `libcuda`, loaded at run time.
//!
//! Each method of [`Driver`](crate::Driver) is one call of the driver here. Nothing is checked,
//! rounded, tried again or remembered, except the context of each device: a call that needs one
//! finds it current, or pushes it, calls, and pops it again, so a thread's current context is
//! after every call what it was before. The primary context of a device is taken when the first
//! call needs it and given back when the [`CudaDriver`] is dropped.
//!
//! ```no_run
//! use cuvmm_driver::{Driver, cuda::CudaDriver};
//!
//! let driver = CudaDriver::open()?;
//! println!("CUDA {} on {} devices", driver.version()?, driver.device_count()?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod addresses;
mod answer;
mod capture;
mod context;
mod copies;
mod devices;
mod events;
mod forward;
mod managed;
mod mapping;
mod open;
mod physical;
mod plain;
mod streams;

pub use context::KeepAlive;
pub use open::{CudaDriver, OpenError};
