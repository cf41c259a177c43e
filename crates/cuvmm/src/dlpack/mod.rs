//! Tensors over our memory for other libraries, and theirs for us, without a copy.
//!
//! [DLPack](https://dmlc.github.io/dlpack/latest/) is how PyTorch, JAX, CuPy and NumPy hand tensors
//! to one another: a descriptor with a pointer, a shape, and a *deleter* that the consumer calls when
//! it has let go of the last view. [`Tensor::export`] makes one over a [`Block`](crate::Block), a
//! [`Lease`](crate::Lease), a [`DeviceVec`](crate::DeviceVec) or a [`Region`](crate::Region), and
//! [`Imported`] takes one. The crate [`dlpark`] owns the descriptors, and turns them into Python's
//! capsules if it is built to.
//!
//! # Who keeps the memory
//! The owner is moved into the tensor and dropped by its deleter, on whatever thread that is: an
//! `Arc` of it, where it is used here as well. While it is lent it cannot shrink, since that wants it
//! alone, and a lease keeps a block's memory where it is. A deleter that is never called keeps the
//! memory for good; one that is called twice frees what is no longer its own, which DLPack forbids its
//! consumers. In a forked child a deleter gives nothing back. No panic leaves it.
//!
//! # Who waits for whom
//! - *Before the consumer's first look*: the [`Consumer`] that was named is ordered behind what the
//!   memory's streams have queued.
//! - *After its last*: consumers call the deleter while work that they queued is still running, on
//!   streams that nobody told us. So memory that was exported counts as used by all work of the
//!   device. A block is pending free until that has passed, and its deleter waits for nothing. A vector and a
//!   region give their memory back to the driver, and their deleter waits for the device as their
//!   drop does: where Python calls it, its lock is held meanwhile, and a host callback that wants
//!   that lock would never return. Rather export blocks.
//! - *For a tensor of another library*, we are the consumer: see [`Imported`].
//!
//! # Which device a tensor names
//! Memory of a GPU is `kDLCUDA`, with the driver's ordinal. What the host's processors reach is
//! `kDLCPU`: host memory under a region, and all memory of a driver that is made of the host's. A
//! tensor lies at one such place, or is refused. Memory shared with another process is exported as
//! any other. What a [`UnifiedBuffer`](crate::UnifiedBuffer) lends by borrows is not exported.

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
