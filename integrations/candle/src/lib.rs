#![doc = include_str!("../README.md")]
//!
//! # How memory is freed
//! A tensor over a tenant's block is an ordinary tensor: it can be cloned, narrowed, kept and
//! dropped anywhere, in any order. The block lives until the last of its tensors is dropped, also
//! long after its cache or weights.
//!
//! candle's storage holds a `CudaSlice` of cudarc, whose drop passes its address to
//! `cuMemFreeAsync`. Here the address is a mapping, which that call refuses
//! (`CUDA_ERROR_INVALID_VALUE`) and leaves unchanged. cudarc records the refusal in a context
//! object that belongs to the slice alone, so no other code of candle sees it; and the slice's own
//! stream object shows when the slice was dropped. The next operation of the [`Gpu`], or
//! [`Gpu::sweep`], then frees the block.
//!
//! # Limitations
//! - **Only part of a cache has memory.** A cache's storage spans all tokens that fit in it. The
//!   returned tensors are narrowed to the existing tokens, and every operation on them is valid,
//!   except those with which candle copies a *storage* instead of a tensor: `copy`, `to_vec1` and
//!   similar ones, and `to_device`. Apply those to the result of `force_contiguous`.
//! - **One stream.** Memory is reused after the work of the [`Gpu`]'s stream, its candle device's
//!   stream. candle does not order tensors of two devices on one GPU, its own or these: work on
//!   another stream must be complete before the last tensor is dropped.
//! - **Sleeping blocks have no memory.** While a tenant's blocks [sleep](cuvmm::sleep), their
//!   tensors have addresses only: a kernel on one loses the context. Operations of this crate
//!   return errors instead. Work that is queued while the blocks are being put to sleep is not
//!   noticed: no thread may append, insert or compute until that call returns.
//! - **Returned tensors are read-only.** candle's in-place operations, such as `slice_set`, do not
//!   know of forks: a write to a forked cache changes what the forks read; a write to a fork, whose
//!   memory is mapped read-only, loses the context.
//! - **Copies.** candle's `copy` creates its copy with the tensor's own context and stream objects.
//!   So the copy counts as a user of the memory, although it is elsewhere; and after the tensor is
//!   dropped, the first `copy`, `to_vec1` or `to_device` of the copy fails once
//!   (`CUDA_ERROR_INVALID_VALUE`), unless [`Gpu::sweep`] was called, or the cache or the weights
//!   were dropped, after the tensor: no code of this crate runs in between. `force_contiguous`
//!   makes a copy with the device's objects and has neither problem.
//! - **The last [`Gpu`].** Tensors that outlive every clone of their `Gpu` and everything made with
//!   it keep their memory until the process ends: no code is left that could detect their drop.
//! - **Captures.** The drop of such a tensor, like that of any tensor of candle, makes a call that
//!   a capture on another stream survives only if it is relaxed.

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
