//! Together with the crate cudarc: a device of its context, streams of its streams, and memory of
//! this library where its slices go. (With the feature `cudarc`.)
//!
//! It is the version of cudarc that candle uses. Nothing is said about how CUDA is linked or which
//! version of it is meant: whoever else uses cudarc decides, and without a toolkit it is the latest,
//! loaded at run time.
//!
//! - [`Context`] takes up a `CudaContext`: its [`device`](Context::device) makes every call in that
//!   context, and its [`stream`](Context::stream) takes up a `CudaStream`.
//! - [`Slice`] is memory as cudarc's functions want it: `memcpy_htod`, `memcpy_dtoh`, `memcpy_dtod`,
//!   `memset_zeros`, the arguments of a launch, and whatever else takes a `DevicePtr` or a
//!   `DevicePtrMut`.
//!
//! ```no_run
//! use cuvmm::DeviceVec;
//! use cuvmm::cudarc::{Context, Slice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let context = Context::open(0)?;
//! let theirs = context.as_cudarc().new_stream()?;
//! let ours = context.stream(&theirs)?;
//!
//! let mut samples = DeviceVec::<f32>::new(context.device(), &ours, 1 << 20)?;
//! samples.try_extend_from_slice(&[1.0, 2.0, 3.0])?;
//! let seen = theirs.clone_dtoh(&Slice::new(samples.view())?)?;
//! theirs.memcpy_htod(&[4.0, 5.0], &mut Slice::new(samples.view_mut())?)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Who frees what
//! cudarc frees nothing of this library's, and this library nothing of cudarc's. A [`Slice`] holds a
//! `CudaSlice` that is never dropped as one; safe code cannot move it out, and a clone of it is a copy
//! in memory that cudarc allocates. What is of cudarc's, a context or a stream, is kept alive by
//! everything that was made with it, whatever the program drops first; it goes with the last device,
//! stream, buffer or pool.
//!
//! # Which streams may use the memory
//! Memory goes back behind the work of the streams that its owner knows: its home stream, which is one
//! of cudarc's here, and those that were recorded (`record_use` of the container or the block before,
//! or [`Slice::record_use`]).
//!
//! - On those, a `Slice` is used as cudarc uses its own slices: nothing waits, and the uses of several
//!   streams are ordered by cudarc's events while it tracks them.
//! - On any other stream a use is let in behind what the home stream has queued, and waited for
//!   (`cuStreamSynchronize`) as soon as cudarc has queued it. So nothing can be used that its owner does
//!   not know of; do not do it under a capture.
//! - Two things cannot be seen. **A launch**, which is `unsafe`: launch on the home stream or on one that
//!   was recorded. **A copy between two contexts** (`memcpy_dtod` with the slice as source, on a stream of
//!   another context), of which cudarc shows the wrong stream: keep the slice until that stream has been
//!   synchronised, as for cudarc's own.
//!
//! The per-thread stream is another one on each thread, so nobody else could wait for it: it is refused
//! as a home stream. candle's `Device::new_cuda` works on it; take `Device::new_cuda_with_stream`.
//!
//! # Errors of cudarc's
//! cudarc keeps an error that it cannot return and returns it from a later call of its context
//! (`check_err`); where it is found here, it is an error here. cudarc panics where there is no libcuda;
//! [`Context::open`] is an error there.

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

/// cudarc's code as ours, which has room for codes that cudarc does not know.
fn code(error: DriverError) -> CUresult {
    CUresult(error.0 as i32)
}
