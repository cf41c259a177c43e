//! A tenant's memory for candle: single tensors over a block, and many packed into one.
//!
//! Nothing is allocated here but by the tenant, and nothing is done to a tensor but one copy into it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Shape, Tensor};
use cuvmm::pool::BlockBuilder;
use cuvmm::{Block, Tenant};

use crate::error::TensorError;
use crate::gpu::Gpu;
use crate::loan::{Ground, Wanted};

/// Where tensors of an [`Arena`] begin, in bytes: what kernels that load widely want.
const ALIGNMENT: u64 = 256;

/// What goes through memory of candle's at a time, in bytes.
const STAGED: usize = 64 << 20;

/// A tenant's memory, for tensors on a [`Gpu`]. Clones are the same.
#[derive(Clone)]
pub struct Memory {
    gpu: Gpu,
    tenant: Tenant,
    tag: Option<Arc<str>>,
}

impl Memory {
    /// A tenant of a pool on this GPU.
    #[must_use]
    pub fn new(gpu: &Gpu, tenant: &Tenant) -> Self {
        Self {
            gpu: gpu.clone(),
            tenant: tenant.clone(),
            tag: None,
        }
    }

    /// The tag of the blocks that are allocated through this, instead of `kv` for caches and `weights`
    /// for weights: what is put to sleep together bears one.
    #[must_use]
    pub fn with_tag(mut self, tag: impl Into<Arc<str>>) -> Self {
        self.tag = Some(tag.into());
        self
    }

    /// The GPU.
    #[must_use]
    pub const fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The tenant.
    #[must_use]
    pub const fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// A tensor over a block: over its first bytes, as many as the shape takes, which it shows as they
    /// are. The block is freed when the last tensor over it has gone.
    ///
    /// # Errors
    /// [`TensorError`] when the block is smaller, asleep, its home stream is not the [`Gpu`]'s, or candle has
    /// no elements of this type on a GPU. The block is freed then.
    pub fn tensor(
        &self,
        block: Block,
        shape: impl Into<Shape>,
        dtype: DType,
    ) -> Result<Tensor, TensorError> {
        self.gpu.sweep();
        if block.home_stream() != Some(self.gpu.stream()) {
            return Err(TensorError::WrongStream);
        }
        let shape = shape.into();
        let bytes = bytes(&shape, dtype)?;
        let has = block.size();
        if bytes > has {
            return Err(TensorError::OutOfRange {
                offset: 0,
                bytes,
                has,
            });
        }
        let mut held = Held::new(self, vec![block]);
        held.ground().lend(
            self.gpu.cuda(),
            Wanted {
                offset: 0,
                bytes,
                dtype,
                shape,
            },
        )
    }

    /// A block on the GPU's stream, with a tag of its kind unless all have one.
    pub(crate) fn block(&self, size: u64, kind: &str) -> BlockBuilder<'_> {
        self.gpu.sweep();
        let block = self.tenant.block(size).home_stream(self.gpu.stream());
        block.tag(self.tag.clone().unwrap_or_else(|| Arc::from(kind)))
    }
}

/// Blocks that stay until their last tensor has gone, whoever has it.
pub(crate) struct Held {
    gpu: Gpu,
    ground: Ground,
}

impl Held {
    pub(crate) fn new(memory: &Memory, blocks: Vec<Block>) -> Self {
        Self {
            gpu: memory.gpu.clone(),
            ground: Ground::new(blocks),
        }
    }

    pub(crate) fn ground(&mut self) -> &mut Ground {
        &mut self.ground
    }

    pub(crate) fn blocks(&self) -> &[Block] {
        self.ground.blocks()
    }

    /// Bytes of the blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.ground.bytes()
    }

    /// Whether the blocks sleep.
    pub(crate) fn is_asleep(&self) -> bool {
        self.ground.is_asleep()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let nothing = Ground::new(Vec::new());
        self.gpu.bury(std::mem::replace(&mut self.ground, nothing));
    }
}

/// Tensors packed into one block of a tenant, one behind the other: for many that come and go together,
/// each of which would take whole granules alone.
///
/// When it is dropped the tensors live on, and the block goes with the last of them.
pub struct Arena {
    memory: Memory,
    held: Held,
    size: u64,
    used: u64,
}

impl Arena {
    /// Allocates a block of so many bytes. [`Self::bytes_for`] says what tensors take. It bears the
    /// memory's tag, or `arena`.
    ///
    /// # Errors
    /// [`TensorError::Allocate`] with the figures.
    pub fn new(memory: &Memory, bytes: u64) -> Result<Self, TensorError> {
        Self::tagged(memory, bytes, "arena")
    }

    pub(crate) fn tagged(memory: &Memory, bytes: u64, kind: &str) -> Result<Self, TensorError> {
        let block = memory.block(bytes, kind).allocate()?;
        Ok(Self {
            memory: memory.clone(),
            held: Held::new(memory, vec![block]),
            size: bytes,
            used: 0,
        })
    }

    /// Bytes that tensors of these shapes and types take, one behind the other.
    ///
    /// # Errors
    /// [`TensorError::TooLarge`] when they cannot be counted.
    pub fn bytes_for<S: Into<Shape>>(
        tensors: impl IntoIterator<Item = (S, DType)>,
    ) -> Result<u64, TensorError> {
        let mut end = 0;
        for (shape, dtype) in tensors {
            end = place(end, &shape.into(), dtype)?.end;
        }
        Ok(end)
    }

    /// The next tensor, whose elements are whatever lies there.
    ///
    /// # Errors
    /// [`TensorError`] when there is no room, the arena sleeps, or candle has no elements of this type on a
    /// GPU.
    pub fn empty(&mut self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor, TensorError> {
        let shape = shape.into();
        let part = place(self.used, &shape, dtype)?;
        let (offset, bytes) = (part.start, part.end - part.start);
        if part.end > self.size {
            let has = self.size;
            return Err(TensorError::OutOfRange { offset, bytes, has });
        }
        let cuda = self.memory.gpu.cuda();
        let tensor = self.held.ground().lend(
            cuda,
            Wanted {
                offset,
                bytes,
                dtype,
                shape,
            },
        )?;
        self.used = part.end;
        Ok(tensor)
    }

    /// The next tensor, a copy of one that lies anywhere.
    ///
    /// # Errors
    /// As [`Self::empty`], and when candle cannot copy it; the room is there for the next then.
    pub fn copy(&mut self, tensor: &Tensor) -> Result<Tensor, TensorError> {
        let used = self.used;
        let copy = self.empty(tensor.shape(), tensor.dtype())?;
        let copied = fill(&copy, tensor);
        if copied.is_err() {
            self.used = used;
        }
        copied?;
        Ok(copy)
    }

    /// Bytes that tensors take, the gaps between them included.
    #[must_use]
    pub const fn used(&self) -> u64 {
        self.used
    }

    /// Bytes of the block.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// The memory that it is of.
    #[must_use]
    pub const fn memory(&self) -> &Memory {
        &self.memory
    }
}

/// Where the next tensor lies behind `used` bytes.
fn place(used: u64, shape: &Shape, dtype: DType) -> Result<Range<u64>, TensorError> {
    let start = used.checked_next_multiple_of(ALIGNMENT);
    let bytes = bytes(shape, dtype)?;
    let end = start.and_then(|start| Some(start..start.checked_add(bytes)?));
    end.ok_or_else(|| TensorError::TooLarge {
        shape: shape.clone(),
    })
}

fn bytes(shape: &Shape, dtype: DType) -> Result<u64, TensorError> {
    let element = dtype.size_in_bytes();
    let count = |bytes: usize, &dim: &usize| bytes.checked_mul(dim);
    let bytes = shape.dims().iter().try_fold(element, count);
    let bytes = bytes.and_then(|bytes| u64::try_from(bytes).ok());
    bytes.ok_or_else(|| TensorError::TooLarge {
        shape: shape.clone(),
    })
}

/// Copies a tensor into one of as many elements, whatever device and type it has, in pieces: candle's
/// kernels count with 32 bits, and what comes from the host or changes its type goes through memory of
/// candle's.
fn fill(to: &Tensor, from: &Tensor) -> candle_core::Result<()> {
    let (to, from) = (to.flatten_all()?, from.flatten_all()?);
    let direct = from.device().same_device(to.device()) && from.dtype() == to.dtype();
    let most = if direct {
        1 << 31
    } else {
        STAGED / from.dtype().size_in_bytes().max(1)
    };
    let count = to.elem_count();
    let mut done = 0;
    while done < count {
        let piece = most.min(count - done);
        let part = from.narrow(0, done, piece)?.to_device(to.device())?;
        to.slice_set(&part.to_dtype(to.dtype())?.contiguous()?, 0, done)?;
        done += piece;
    }
    Ok(())
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("gpu", &self.gpu)
            .field("tenant", &self.tenant)
            .finish()
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("memory", &self.memory)
            .field("size", &self.size)
            .field("used", &self.used)
            .finish_non_exhaustive()
    }
}
