//! The real driver: `libcuda.so.1`, or `nvcuda.dll` on Windows, loaded at run time.
//!
//! Each method of [`Driver`](crate::Driver) is one driver call here. Nothing is checked, rounded,
//! retried or remembered, except the context of each device: a call that needs a context uses it if
//! it is current; otherwise it pushes the context, makes the call and pops the context again. So
//! every call leaves the thread's current context as it was. The primary context of a device is
//! retained when the first call needs it and released when the [`CudaDriver`] is dropped.
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
mod pools;
mod streams;
#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

pub use context::KeepAlive;
pub use open::{CudaDriver, OpenError};
#[cfg(unix)]
use unix as os;
#[cfg(windows)]
use windows as os;
