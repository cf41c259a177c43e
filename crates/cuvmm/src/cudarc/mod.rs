//! Interoperation with the crate cudarc: devices over its contexts, streams over its streams, and
//! memory of this library as arguments of its functions. (With the feature `cudarc`.)
//!
//! The version of cudarc is the one that candle uses. This crate selects neither how CUDA is linked
//! nor its version: other crates that use cudarc decide, and without a toolkit it is the latest
//! version, loaded at run time.
//!
//! - [`Context`] wraps a `CudaContext`: its [`device`](Context::device) makes every call in that
//!   context, and its [`stream`](Context::stream) wraps a `CudaStream`.
//! - [`Slice`] presents memory to cudarc's functions: `memcpy_htod`, `memcpy_dtoh`, `memcpy_dtod`,
//!   `memset_zeros`, the arguments of a launch, and everything else that takes a `DevicePtr` or a
//!   `DevicePtrMut`.
//!
//! ```no_run
//! use cuvmm::DeviceVec;
//! use cuvmm::cudarc::{Context, Slice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let context = Context::open(0)?;
//! let stream = context.as_cudarc().new_stream()?; // cudarc's object
//! let home = context.stream(&stream)?; // the same stream, for this library
//!
//! let mut samples = DeviceVec::<f32>::new(context.device(), &home, 1 << 20)?;
//! samples.extend_from_slice(&[1.0, 2.0, 3.0])?;
//! let seen = stream.clone_dtoh(&Slice::new(samples.view())?)?;
//! stream.memcpy_htod(&[4.0, 5.0], &mut Slice::new(samples.view_mut())?)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Ownership
//! cudarc frees no memory of this library, and this library frees none of cudarc's. A [`Slice`]
//! holds a `CudaSlice` that is never dropped as such; safe code cannot move it out, and cloning it
//! copies the elements to memory that cudarc allocates. A context or stream of cudarc is kept alive
//! by everything made with it.
//!
//! # Streams that may use the memory
//! Memory is reused only after the work of the streams that its owner knows: its home stream, here
//! one of cudarc's, and the streams that were recorded (by `record_use` of the container or the
//! block beforehand, or by [`Slice::record_use`]).
//!
//! - On those streams a `Slice` is used like one of cudarc's own: nothing waits, and uses on
//!   several streams are ordered by cudarc's events while it tracks them.
//! - On any other stream a use is ordered after the work queued on the home stream, and waited for
//!   (`cuStreamSynchronize`) as soon as cudarc has queued it. So no use is unknown to the owner. Do
//!   not do this during a capture.
//! - Two kinds of use cannot be observed. **A launch**, which is `unsafe`: launch on the home
//!   stream or on a recorded one. **A copy between two contexts** (`memcpy_dtod` with the slice as
//!   source, on a stream of another context), for which cudarc reports the wrong stream: keep the
//!   slice until that stream has been synchronized, as for cudarc's own slices.
//!
//! The per-thread stream differs on each thread, so no other thread could wait for it; it is
//! refused as a home stream. candle's `Device::new_cuda` works on it; use
//! `Device::new_cuda_with_stream`.
//!
//! # Errors of cudarc
//! cudarc stores an error that it cannot return, and returns it from a later call on its context
//! (`check_err`). An error that is found stored there is returned as an error of this crate's call.
//! cudarc panics if there is no libcuda; [`Context::open`] returns an error then.

mod context;
mod known;
mod memory;
mod part;
mod slice;

pub use context::Context;
pub use memory::{Committed, Leased, Memory, MemoryMut, Owner};
pub use part::{Part, PartMut};
pub use slice::Slice;

use ::cudarc::driver::DriverError;
use cuvmm_driver::CUresult;

/// Converts cudarc's result code to this crate's type, which also represents codes that cudarc does
/// not know.
fn code(error: DriverError) -> CUresult {
    CUresult(error.0 as i32)
}
