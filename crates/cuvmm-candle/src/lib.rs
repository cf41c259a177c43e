#![doc = include_str!("../README.md")]
//!
//! # The rooms of this crate, from the bottom up
//! - [`error`]: what can go wrong, one enum for each operation.
//! - [`Gpu`]: candle's device and this library's, on one stream.
//! - [`Memory`]: a tenant's memory for candle on such a device; [`Arena`]: tensors packed into a block.
//! - [`KvCache`]: keys and values that grow in place.
//! - [`Weights`]: a model's weights in a tenant's block, for a `VarBuilder`.
//!
//! # Who frees what
//! A tensor over a tenant's block is a tensor like any other: it may be cloned, narrowed, kept and
//! dropped anywhere, in any order. Its block stays until the last of them has gone, however long after
//! the cache or the weights it came from.
//!
//! candle's storage ends in a `CudaSlice` of cudarc's, whose drop gives its address to
//! `cuMemFreeAsync`. Here the address is a mapping, which that call refuses
//! (`CUDA_ERROR_INVALID_VALUE`) and leaves as it is. The refusal is noted in a context object that the
//! slice has for itself, so that nothing else of candle's meets it; and the slice's own stream object
//! tells when it has gone. Then the block is freed, at the next operation of the [`Gpu`] or by
//! [`Gpu::sweep`].
//!
//! # What remains to be known
//! - **Only part of a cache is there.** A cache's storage spans all tokens there may ever be, of which a
//!   part has memory. What is handed out is narrowed to the tokens that are there, and every operation on
//!   it is good, except those with which candle copies a *storage* and not a tensor: `copy`, `to_vec1` and
//!   its like, and `to_device`. Make those of `force_contiguous`.
//! - **One stream.** Memory goes back behind the work of the [`Gpu`]'s stream, which is that of its candle
//!   device. candle orders no tensors of two devices of one GPU, its own as little as these: what is used
//!   on another stream must be over before the last tensor goes.
//! - **Asleep means gone.** While a tenant's blocks [sleep](cuvmm::sleep) their tensors have addresses and
//!   no memory: a kernel that uses one loses the context. Of this crate's own operations none does: they
//!   are errors meanwhile. Work that is queued while they are falling asleep is not seen: whoever puts
//!   them to sleep sees to it that nobody appends, inserts or computes until that is done.
//! - **What is handed out is to be read.** candle writes in place with `slice_set` and its like, and knows
//!   nothing of forks: written in a cache that was forked, the forks read it too; in a fork, whose memory is
//!   mapped to be read only, the kernel loses the context.
//! - **Copies.** candle's `copy` makes its copy with the tensor's own context and stream objects. So the
//!   copy counts as a user of the memory, though it lies elsewhere; and when the tensor has gone, the
//!   first `copy`, `to_vec1` or `to_device` of the copy is refused once (`CUDA_ERROR_INVALID_VALUE`),
//!   unless [`Gpu::sweep`] was called, or the cache or the weights were dropped, after the tensor. No
//!   code of this crate runs in between. `force_contiguous` makes a copy with the device's objects,
//!   which has neither fault: take that.
//! - **The last [`Gpu`].** Tensors that outlive every clone of their `Gpu` and all that was made with it
//!   keep their memory until the process ends: nobody is left to see them go.
//! - Dropping such a tensor under a capture is what dropping any of candle's under it is: a call that a
//!   capture on another stream does not survive unless it is relaxed.

pub mod error;
mod gpu;
mod kv;
mod loan;
mod memory;
mod waiting;
mod weights;

pub use error::shortage;
pub use gpu::Gpu;
pub use kv::{Cache, KvCache, Order};
pub use memory::{Arena, Memory};
pub use weights::Weights;
