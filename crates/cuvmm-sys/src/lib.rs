//! The part of NVIDIA's driver library that `cuvmm` uses, as plain data: a table of symbols with
//! the CUDA version that introduced each, result codes and options as integers with names,
//! structures laid out as in C, and loading `libcuda.so.1` or `nvcuda.dll` at run time.
//!
//! This crate calls no driver function. It looks functions up and returns them. What they mean,
//! when they may be called and what they return is documented by NVIDIA, and `cuvmm-driver` wraps
//! them.
//!
//! # Differences from other bindings
//!
//! - **No value that the driver returns is a Rust `enum`.** A driver newer than this crate may
//!   return a code that the crate does not know. [`CUresult`] and similar types are integers with
//!   names for the known values, so an unknown value merely has no name.
//! - **Nothing panics.** A missing library and a missing function are errors that say what was
//!   looked for, and which CUDA version introduced it.
//! - **One build works with every driver since CUDA 10.2.** Functions introduced later are
//!   [`Optional`]; there are no features to choose a CUDA version with.
//!
//! ```no_run
//! let api = cuvmm_sys::Api::load()?;
//! println!("{} lacks {} known functions", api.library().display(), api.missing().len());
//! // SAFETY: cuInit takes no pointers and may be called at any time.
//! let code = unsafe { (api.cuInit)(0) };
//! println!("cuInit returned {code}");
//! # Ok::<(), cuvmm_sys::LoadError>(())
//! ```
//!
//! # Platforms
//!
//! The layouts are those of 64-bit Linux, which are those of 64-bit Windows too: no structure contains a
//! `long`, and both have one calling convention. On other platforms the crate compiles, and
//! [`Api::load`] returns [`LoadError::Unsupported`].

// The C names are kept, so that they can be found in NVIDIA's documentation.
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
    CUlaunchAttributeID, CUmem_advise, CUmem_range_attribute, CUmemAccess_flags,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationType,
    CUmemLocationType, CUmemPool_attribute, CUmemRangeHandleType, CUmemorytype,
    CUmulticastGranularity_flags, CUpointer_attribute, CUstreamCaptureMode, CUstreamCaptureStatus,
};
pub use flags::*;
pub use handles::*;
pub use load::{Attempt, LoadError};
pub use result::CUresult;
pub use structs::{
    CUipcMemHandle, CUlaunchAttribute, CUlaunchAttributeValue, CUlaunchConfig, CUmemAccessDesc,
    CUmemAllocationProp, CUmemAllocationPropFlags, CUmemFabricHandle, CUmemLocation,
    CUmemPoolProps, CUmemPoolPtrExportData, CUmulticastObjectProp, CUuuid,
};
pub use symbol::{MissingSymbol, Optional, Parameter, Symbol};
pub use table::{Api, SYMBOLS, functions};
pub use version::CudaVersion;
