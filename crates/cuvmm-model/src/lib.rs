//! Two drivers for machines without a GPU, which keep the rules of the real one.
//!
//! - [`model`]: the driver's rules and costs without memory, on a virtual clock.
//! - `host`: the driver's rules over real host memory, on Linux only.
//!
//! Both are one machine, whose answers are those that real GPUs gave. Streams can be held back, calls
//! can be made to fail, and work may run late.
//!
//! # Examples
//! Maps one granule of memory, writes to it and reads it back:
//!
//! ```
//! use cuvmm_driver::{
//!     AccessDesc, AccessFlags, DeviceAddress, Driver, GranularityKind, Location, Ordinal,
//!     PhysicalProps,
//! };
//! use cuvmm_model::host::HostDriver;
//!
//! let driver = HostDriver::default();
//! let device = Ordinal(0);
//! let props = PhysicalProps::device(device);
//! let size = driver.allocation_granularity(&props, GranularityKind::MINIMUM)?;
//!
//! let address = driver.reserve(size, 0, DeviceAddress::NULL, 0)?;
//! let physical = driver.create(size, &props, 0)?;
//! let access = AccessDesc {
//!     location: Location::device(device),
//!     flags: AccessFlags::READ_WRITE,
//! };
//! // SAFETY: the handle and the range come from this driver, and no queued work uses them.
//! unsafe {
//!     driver.map(address, size, 0, physical, 0)?;
//!     driver.set_access(address, size, &[access])?;
//!     driver.copy_to_device(device, address, b"hello")?;
//!     let mut read = [0u8; 5];
//!     driver.copy_to_host(device, &mut read, address)?;
//!     assert_eq!(&read, b"hello");
//!     driver.unmap(address, size)?;
//!     driver.release(physical)?;
//!     driver.free_reservation(address, size)?;
//! }
//! # Ok::<(), cuvmm_driver::DriverError>(())
//! ```

#[cfg(target_os = "linux")]
pub mod host;
pub mod model;
