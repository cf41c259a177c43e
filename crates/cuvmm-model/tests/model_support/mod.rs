//! Helpers that the tests of model and host share.
#![allow(
    dead_code,
    unreachable_pub,
    unsafe_code,
    clippy::undocumented_unsafe_blocks
)]

use cuvmm_driver::{
    AccessDesc, AccessFlags, CUresult, DeviceAddress, Driver, Exported, ImportSource, Location,
    Ordinal, PhysicalHandle, PhysicalProps, RawOsHandle, Result,
};
#[cfg(target_os = "linux")]
pub use cuvmm_model::host::{HostDriver, HostOptions};
// The host driver is for Linux. Elsewhere a second model takes the place of the other machine.
use cuvmm_model::model::{Backing, Machine, ModelDriver, ModelOptions};
#[cfg(not(target_os = "linux"))]
pub use cuvmm_model::model::{ModelDriver as HostDriver, ModelOptions as HostOptions};

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;
pub const PAGE: u64 = 2 * MIB;
pub const D0: Ordinal = Ordinal(0);
pub const D1: Ordinal = Ordinal(1);
pub const ANYWHERE: DeviceAddress = DeviceAddress::NULL;

pub const SUCCESS: CUresult = CUresult::CUDA_SUCCESS;
pub const INVALID_VALUE: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
pub const OUT_OF_MEMORY: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
pub const INVALID_DEVICE: CUresult = CUresult::CUDA_ERROR_INVALID_DEVICE;
pub const NOT_SUPPORTED: CUresult = CUresult::CUDA_ERROR_NOT_SUPPORTED;
pub const NOT_PERMITTED: CUresult = CUresult::CUDA_ERROR_NOT_PERMITTED;
pub const UNKNOWN: CUresult = CUresult::CUDA_ERROR_UNKNOWN;
pub const ILLEGAL_ADDRESS: CUresult = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
pub const CAPTURE_UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
pub const CAPTURE_INVALIDATED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;

/// Returns the code of a result.
pub fn code<T>(answer: Result<T>) -> CUresult {
    match answer {
        Ok(_) => SUCCESS,
        Err(error) => error.code().expect("no symbol is missing"),
    }
}

pub fn at(address: DeviceAddress, bytes: u64) -> DeviceAddress {
    address.checked_add(bytes).expect("an address of 64 bits")
}

pub fn grant(device: Ordinal, flags: AccessFlags) -> AccessDesc {
    AccessDesc {
        location: Location::device(device),
        flags,
    }
}

pub fn rw(device: Ordinal) -> AccessDesc {
    grant(device, AccessFlags::READ_WRITE)
}

pub fn ro(device: Ordinal) -> AccessDesc {
    grant(device, AccessFlags::READ)
}

pub fn none(device: Ordinal) -> AccessDesc {
    grant(device, AccessFlags::NONE)
}

pub fn model(options: ModelOptions) -> ModelDriver {
    ModelDriver::new(options.capacity(4 * GIB).devices(2))
}

pub fn host(options: HostOptions) -> HostDriver {
    HostDriver::new(options.capacity(4 * GIB).devices(2))
}

/// A handle of the operating system to import, by value.
#[cfg(unix)]
pub fn source_of(handle: RawOsHandle) -> ImportSource {
    ImportSource::Fd(handle)
}

/// A handle of the operating system to import, by value.
#[cfg(windows)]
pub fn source_of(handle: RawOsHandle) -> ImportSource {
    ImportSource::Win32(handle)
}

/// Duplicates an exported handle of the operating system.
pub fn copy_of(exported: &Exported) -> Exported {
    match exported {
        #[cfg(unix)]
        Exported::Fd(handle) => handle.try_clone().unwrap().into(),
        #[cfg(windows)]
        Exported::Win32(handle) => handle.try_clone().unwrap().into(),
        other => panic!("{other:?}"),
    }
}

/// Values that are no handles of the operating system.
#[cfg(unix)]
pub const NO_HANDLES: [RawOsHandle; 2] = [-1, 9999];

/// Values that are no handles of the operating system. -1 is the calling process.
#[cfg(windows)]
pub const NO_HANDLES: [RawOsHandle; 3] = [
    std::ptr::null_mut(),
    std::ptr::without_provenance_mut(usize::MAX),
    std::ptr::without_provenance_mut(0x7fff_fffc),
];

/// A reservation with physicals of one page each, mapped side by side at its start, which the first
/// device can access.
pub struct Range {
    pub at: DeviceAddress,
    pub size: u64,
    pub handles: Vec<PhysicalHandle>,
}

pub fn range<B: Backing>(driver: &Machine<B>, pages: u64, mapped: u64) -> Range {
    let size = pages * PAGE;
    let start = driver.reserve(size, 0, ANYWHERE, 0).unwrap();
    let handles: Vec<_> = (0..mapped).map(|_| page(driver)).collect();
    for (&handle, index) in handles.iter().zip(0..) {
        unsafe { driver.map(at(start, index * PAGE), PAGE, 0, handle, 0) }.unwrap();
    }
    if mapped != 0 {
        unsafe { driver.set_access(start, mapped * PAGE, &[rw(D0)]) }.unwrap();
    }
    Range {
        at: start,
        size,
        handles,
    }
}

pub fn page<B: Backing>(driver: &Machine<B>) -> PhysicalHandle {
    driver.create(PAGE, &PhysicalProps::device(D0), 0).unwrap()
}

impl Range {
    pub fn page(&self, index: u64) -> DeviceAddress {
        at(self.at, index * PAGE)
    }

    /// Unmaps and frees everything.
    pub fn end<B: Backing>(self, driver: &Machine<B>) {
        unsafe {
            driver.unmap(self.at, self.size).unwrap();
            for handle in self.handles {
                driver.release(handle).unwrap();
            }
            driver.free_reservation(self.at, self.size).unwrap();
        }
    }
}

/// Returns the first byte at an address, regardless of queued work.
pub fn first_byte<B: Backing>(driver: &Machine<B>, address: DeviceAddress) -> u8 {
    let mut byte = [0];
    driver.peek(D0, address, &mut byte).unwrap();
    byte[0]
}

/// Runs one function on a model and on a host, as two tests.
#[macro_export]
macro_rules! on_both {
    ($($name:ident),+ $(,)?) => {
        mod on_model {
            $(
                #[test]
                fn $name() {
                    super::$name($crate::model_support::model(Default::default()));
                }
            )+
        }
        #[cfg(target_os = "linux")]
        mod on_host {
            $(
                #[test]
                fn $name() {
                    super::$name($crate::model_support::host(Default::default()));
                }
            )+
        }
    };
}
