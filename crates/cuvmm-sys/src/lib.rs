//! The part of NVIDIA's driver library that `cuvmm` stands on, as plain data: a table of
//! symbols with the CUDA version that brought each, result codes and options as integers with
//! names, structures laid out as C lays them out, and the loading of `libcuda.so.1` at run time.
//!
//! This crate calls no driver function. It finds functions and hands them over; what they
//! mean, when they may be called and what their answers say is the business of `cuvmm-driver`.
//!
//! # What is different from other bindings
//!
//! - **No value that the driver returns is a Rust `enum`.** A driver newer than this crate may
//!   answer with a code that the crate has never heard of. [`CUresult`] and its like are integers
//!   with names for the known values, so an unknown one is merely nameless.
//! - **Nothing panics.** A missing library and a missing function are errors that say what was
//!   looked for, and which CUDA version brings it.
//! - **One build fits every driver from CUDA 10.2 on.** Functions that came later are
//!   [`Optional`]; there are no features to choose a CUDA version with.
//!
//! ```no_run
//! let api = cuvmm_sys::Api::load()?;
//! println!("{} lacks {} of the functions we know", api.library().display(), api.missing().len());
//! // SAFETY: cuInit takes no pointers and may be called at any time.
//! let answer = unsafe { (api.cuInit)(0) };
//! println!("cuInit says {answer}");
//! # Ok::<(), cuvmm_sys::LoadError>(())
//! ```
//!
//! # Platforms
//!
//! The layouts are those of 64-bit Linux. Elsewhere the crate compiles, and
//! [`Api::load`] answers [`LoadError::Unsupported`].

// The C names are the words under which everybody looks these things up.
#![allow(non_camel_case_types, non_snake_case)]

mod newtype;

pub mod abi;
mod attribute;
mod enums;
mod flags;
mod handles;
mod load;
mod result;
mod structs;
mod symbol;
mod table;
mod version;

pub use attribute::CUdevice_attribute;
pub use enums::{
    CUmem_advise, CUmem_range_attribute, CUmemAccess_flags, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationType, CUmemLocationType, CUmemPool_attribute,
    CUmemRangeHandleType, CUmemorytype, CUmulticastGranularity_flags, CUpointer_attribute,
    CUstreamCaptureMode, CUstreamCaptureStatus,
};
pub use flags::*;
pub use handles::*;
pub use load::{Attempt, LoadError};
pub use result::CUresult;
pub use structs::{
    CUipcMemHandle, CUmemAccessDesc, CUmemAllocationProp, CUmemAllocationPropFlags,
    CUmemFabricHandle, CUmemLocation, CUmemPoolProps, CUmemPoolPtrExportData,
    CUmulticastObjectProp, CUuuid,
};
pub use symbol::{MissingSymbol, Optional, Parameter, Symbol};
pub use table::{Api, SYMBOLS, functions};
pub use version::CudaVersion;
