//! The CUDA driver's memory calls behind one trait, and who answers them.
//!
//! - [`cuda`]: the real driver.
//! - [`model`]: the driver's rules and costs without memory, on a virtual clock.
//! - [`host`]: the same rules over real host memory: what runs where there is no GPU.
//! - [`fault`]: a wrapper that fails, delays or records the nth call of any driver.
//! - [`auto`]: a GPU when there is one, else the host, and says which and why.
//!
//! Nothing here rounds a size, retries a call or keeps policy: that is the library's, `cuvmm`.
//! The contract is in [`driver`].

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
