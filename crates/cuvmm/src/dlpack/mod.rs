//! Exchange of tensors with other libraries through DLPack, without a copy.
//!
//! [DLPack](https://dmlc.github.io/dlpack/latest/) is the format in which PyTorch, JAX, CuPy and
//! NumPy exchange tensors: a descriptor with a pointer, a shape, and a *deleter* that the consumer
//! calls after releasing its last view. [`Tensor::export`] makes a tensor over a
//! [`Block`](crate::Block), a [`Lease`](crate::Lease), a [`DeviceVec`](crate::DeviceVec) or a
//! [`Region`](crate::Region); [`Imported`] accepts one. The crate [`dlpark`] owns the descriptors,
//! and converts them to Python's capsules if built with that feature.
//!
//! # Ownership of the memory
//! The owner is moved into the tensor and dropped by its deleter, on the thread that calls the
//! deleter. Export an `Arc` of the owner if the memory is used in this program as well. While it is
//! exported the owner cannot shrink, because shrinking requires exclusive access, and a lease keeps
//! a block's memory in place. If the deleter is never called, the memory is never freed; if it is
//! called twice, it frees memory that it does not own, which DLPack forbids to consumers. In a
//! forked child a deleter frees nothing. No panic leaves a deleter.
//!
//! # Synchronization
//! - *Before the consumer's first use*, the given [`Consumer`] is ordered after the work queued on
//!   the memory's streams.
//! - *After its last use*, consumers call the deleter while work that they queued still runs, on
//!   streams that this library does not know. Therefore exported memory counts as used by all work
//!   of the device. A block, or a vector or region in a tenant, is pending free until that work is
//!   complete, and its deleter waits for nothing. In no tenant, a vector and a region release their
//!   memory to the driver, and their deleter waits for the device, as their drop does. When Python
//!   calls that deleter, it holds the interpreter lock, so a host callback that needs the lock would
//!   deadlock. Prefer to export memory of a tenant.
//! - *For a tensor of another library*, this library is the consumer: see [`Imported`].
//!
//! # The device of a tensor
//! Memory of a GPU is `kDLCUDA`, with the driver's ordinal. Memory that the host's processors reach
//! is `kDLCPU`: host memory in a region, and all memory of a driver that uses host memory. All
//! bytes of a tensor must be in one such place. Memory shared with another process is exported like
//! any other. Memory that a [`UnifiedBuffer`](crate::UnifiedBuffer) lends by borrows cannot be
//! exported.

mod consumer;
mod export;
mod import;
mod memory;
mod tensor;

pub use dlpark;

pub use consumer::Consumer;
pub use import::Imported;
pub use memory::Memory;
pub use tensor::{MOST_DIMENSIONS, Tensor};
