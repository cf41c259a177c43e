//! A tenant's memory for candle: single tensors over a block, and many tensors packed into one
//! block. Only the tenant allocates memory here, and the only operation on a tensor is one copy
//! into it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Shape, Tensor};
use cuvmm::error::BlockError;
use cuvmm::pool::BlockBuilder;
use cuvmm::{Access, Block, CurrentTenantMemPool, Tenant};

use crate::error::TensorError;
use crate::gpu::Gpu;
use crate::loan::{Backing, Wanted};

/// The alignment of an [`Arena`]'s tensors in bytes, for kernels with wide loads.
const ALIGNMENT: u64 = 256;

/// The most bytes that are copied through candle's memory at a time.
const STAGED: usize = 64 << 20;

/// A tenant's memory, for tensors on a [`Gpu`]. Clones share it.
#[derive(Clone)]
pub struct Memory {
    gpu: Gpu,
    tenant: Tenant,
    tag: Option<Arc<str>>,
}

impl Memory {
    /// Uses the memory of a tenant whose pool is on this GPU.
    #[must_use]
    pub fn new(gpu: &Gpu, tenant: &Tenant) -> Self {
        Self {
            gpu: gpu.clone(),
            tenant: tenant.clone(),
            tag: None,
        }
    }

    /// Sets the tag of all blocks allocated through this value, in place of `kv` for caches and
    /// `weights` for weights. Blocks that sleep together share a tag.
    #[must_use]
    pub fn with_tag(mut self, tag: impl Into<Arc<str>>) -> Self {
        self.tag = Some(tag.into());
        self
    }

    /// Returns the GPU.
    #[must_use]
    pub const fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the tenant.
    #[must_use]
    pub const fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// Counts candle's own allocations, such as the tensors between the layers of a model, against
    /// the tenant's limit, up to `maximum` bytes, while the returned value lives.
    ///
    /// The tenant is charged the maximum and 32 MiB, used or not. candle returns an error for a
    /// tensor beyond that; [`TenantMemPool::reserve`](cuvmm::TenantMemPool::reserve) makes room for
    /// more. Earlier tensors do not count. All allocations by `cuMemAllocAsync` on this GPU in this
    /// process count, so one tenant at a time can have such a pool. For other settings, build a
    /// pool with [`Tenant::memory_pool`](cuvmm::Tenant::memory_pool) and make it current.
    ///
    /// # Errors
    /// [`TensorError::Block`] if the limits do not leave the memory, another memory pool than the
    /// default is current, or the driver is older than CUDA 12.2.
    pub fn intermediates(&self, maximum: u64) -> Result<CurrentTenantMemPool, TensorError> {
        let pool = self.gpu.allocate(BlockError::is_shortage, || {
            self.tenant.memory_pool(maximum).build()
        })?;
        Ok(pool.make_current()?)
    }

    /// Makes a tensor over the first bytes of a block, with their present elements. The block is
    /// freed when the last tensor over it is dropped.
    ///
    /// # Errors
    /// [`TensorError`] if the block is too small, is asleep, shares memory with forks, has a home
    /// stream other than the [`Gpu`]'s, or candle has no elements of this type on a GPU. The block
    /// is then freed.
    pub fn tensor(
        &self,
        block: Block,
        shape: impl Into<Shape>,
        dtype: DType,
    ) -> Result<Tensor, TensorError> {
        self.gpu.sweep_some();
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
        held.backing().lend(
            self.gpu.cuda(),
            Wanted {
                offset: 0,
                bytes,
                dtype,
                shape,
                access: Access::ReadWrite,
            },
        )
    }

    /// Returns a builder for a block on the GPU's stream, tagged with `kind` unless a tag was set.
    pub(crate) fn block(&self, size: u64, kind: &str) -> BlockBuilder<'_> {
        let block = self.tenant.block(size).home_stream(self.gpu.stream());
        block.tag(self.tag.clone().unwrap_or_else(|| Arc::from(kind)))
    }
}

/// Blocks that stay until their last tensor is dropped.
pub(crate) struct Held {
    gpu: Gpu,
    backing: Backing,
}

impl Held {
    pub(crate) fn new(memory: &Memory, blocks: Vec<Block>) -> Self {
        Self {
            gpu: memory.gpu.clone(),
            backing: Backing::new(blocks),
        }
    }

    pub(crate) fn backing(&mut self) -> &mut Backing {
        &mut self.backing
    }

    pub(crate) fn blocks(&self) -> &[Block] {
        self.backing.blocks()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.backing.bytes()
    }

    pub(crate) fn is_asleep(&self) -> bool {
        self.backing.is_asleep()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let nothing = Backing::new(Vec::new());
        self.gpu
            .keep_until_done(std::mem::replace(&mut self.backing, nothing));
    }
}

/// Tensors packed into one block of a tenant, one after another: for many tensors that are created
/// and dropped together, each of which would take whole granules alone.
///
/// After the arena is dropped, its tensors stay valid; the block is freed with the last of them.
pub struct Arena {
    memory: Memory,
    held: Held,
    size: u64,
    used: u64,
}

impl Arena {
    /// Allocates a block of `bytes` bytes, a size that [`Self::bytes_for`] computes. The block's
    /// tag is that of the memory, or `arena`.
    ///
    /// # Errors
    /// [`TensorError::Block`] with the figures.
    pub fn new(memory: &Memory, bytes: u64) -> Result<Self, TensorError> {
        Self::tagged(memory, bytes, "arena")
    }

    pub(crate) fn tagged(memory: &Memory, bytes: u64, kind: &str) -> Result<Self, TensorError> {
        let block = memory.gpu.allocate(BlockError::is_shortage, || {
            memory.block(bytes, kind).allocate()
        })?;
        Ok(Self {
            memory: memory.clone(),
            held: Held::new(memory, vec![block]),
            size: bytes,
            used: 0,
        })
    }

    /// Returns the bytes that tensors of these shapes and types take, one after another.
    ///
    /// # Errors
    /// [`TensorError::TooLarge`] on overflow.
    pub fn bytes_for<S: Into<Shape>>(
        tensors: impl IntoIterator<Item = (S, DType)>,
    ) -> Result<u64, TensorError> {
        let mut end = 0;
        for (shape, dtype) in tensors {
            end = place(end, &shape.into(), dtype)?.end;
        }
        Ok(end)
    }

    /// Adds a tensor with unspecified elements.
    ///
    /// # Errors
    /// [`TensorError`] if it does not fit, the arena is asleep, or candle has no elements of this
    /// type on a GPU.
    pub fn empty(&mut self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor, TensorError> {
        let shape = shape.into();
        let part = place(self.used, &shape, dtype)?;
        let (offset, bytes) = (part.start, part.end - part.start);
        if part.end > self.size {
            let has = self.size;
            return Err(TensorError::OutOfRange { offset, bytes, has });
        }
        let cuda = self.memory.gpu.cuda();
        let tensor = self.held.backing().lend(
            cuda,
            Wanted {
                offset,
                bytes,
                dtype,
                shape,
                access: Access::ReadWrite,
            },
        )?;
        self.used = part.end;
        Ok(tensor)
    }

    /// Adds a copy of a tensor on any device.
    ///
    /// # Errors
    /// [`TensorError`] in the cases of [`empty`](Self::empty), and if candle cannot copy the
    /// tensor; its space is then free again.
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

    /// Returns the bytes that tensors take, including the gaps between them.
    #[must_use]
    pub const fn used(&self) -> u64 {
        self.used
    }

    /// Returns the bytes of the block.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the memory that the arena belongs to.
    #[must_use]
    pub const fn memory(&self) -> &Memory {
        &self.memory
    }
}

/// Returns the range of the next tensor after `used` bytes.
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

/// Copies a tensor into another with as many elements, from any device, type and strides, in
/// pieces: candle's kernels count elements with 32 bits, and elements that change device or type or
/// are not contiguous go through memory of candle, one piece at a time.
fn fill(to: &Tensor, from: &Tensor) -> candle_core::Result<()> {
    let to = to.flatten_all()?;
    let near = from.device().same_device(to.device());
    let most = match near && from.dtype() == to.dtype() && from.is_contiguous() {
        true => 1 << 31,
        false => STAGED / from.dtype().size_in_bytes().max(1),
    };
    let mut done = 0;
    in_pieces(from, most, &mut |piece| {
        let near = match near {
            true => piece.clone(),
            false => alone(piece)?.to_device(to.device())?,
        };
        let piece = near.to_dtype(to.dtype())?.contiguous()?.flatten_all()?;
        to.slice_set(&piece, 0, done)?;
        done += piece.elem_count();
        Ok(())
    })
}

/// Returns a piece in a storage of its own, because candle moves a whole storage to another device.
fn alone(piece: &Tensor) -> candle_core::Result<Tensor> {
    piece.force_contiguous()
}

/// Calls `each` with parts of at most `most` elements of a tensor, in order. Copies nothing.
fn in_pieces(
    from: &Tensor,
    most: usize,
    each: &mut impl FnMut(&Tensor) -> candle_core::Result<()>,
) -> candle_core::Result<()> {
    let count = from.elem_count();
    if count == 0 {
        return Ok(());
    }
    if count <= most {
        return each(from);
    }
    // A contiguous tensor can be cut anywhere, so all parts but the last have the full size.
    let flat = match from.is_contiguous() {
        true => from.flatten_all()?,
        false => from.clone(),
    };
    let rows = flat.dim(0)?;
    let row = count / rows;
    let step = most / row;
    let mut done = 0;
    while done < rows {
        let some = step.clamp(1, rows - done);
        let part = flat.narrow(0, done, some)?;
        match step {
            0 => in_pieces(&part.squeeze(0)?, most, each)?,
            _ => each(&part)?,
        }
        done += some;
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

#[cfg(test)]
mod tests {
    use candle_core::{Device, Storage};

    use super::*;

    /// Returns the number of elements in a tensor's storage, all of which candle moves to another
    /// device.
    fn stored(tensor: &Tensor) -> usize {
        let (storage, _) = tensor.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) => storage.as_slice::<f32>().unwrap().len(),
            _ => 0,
        }
    }

    fn flat(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    fn sources() -> Vec<Tensor> {
        let numbers = Tensor::arange(0f32, 6000., &Device::Cpu).unwrap();
        let cube = numbers.reshape((10, 20, 30)).unwrap();
        let large = Tensor::arange(0f32, 60_000., &Device::Cpu).unwrap();
        let row = numbers.narrow(0, 0, 30).unwrap();
        vec![
            numbers,
            cube.clone(),
            cube.transpose(0, 2).unwrap(),
            cube.permute((1, 2, 0)).unwrap(),
            large.narrow(0, 7, 6000).unwrap(),
            row.broadcast_as((200, 30)).unwrap(),
            cube.reshape((6000, 1)).unwrap().t().unwrap(),
        ]
    }

    #[test]
    fn no_more_than_a_piece_is_moved_or_made_at_a_time() {
        for from in sources() {
            for most in [1, 7, 64, 599, 600, 5999, 6000, 1 << 31] {
                let (mut moved, mut seen) = (0, Vec::new());
                in_pieces(&from, most, &mut |piece| {
                    assert!(piece.elem_count() <= most);
                    let alone = alone(piece)?;
                    assert_eq!(stored(&alone), piece.elem_count());
                    moved += stored(&alone);
                    seen.extend(flat(&alone));
                    Ok(())
                })
                .unwrap();
                assert_eq!(moved, 6000, "by {most}: each element once");
                assert!(seen == flat(&from), "by {most}: in another order");
            }
        }
        let nothing = Tensor::zeros((0, 5), DType::F32, &Device::Cpu).unwrap();
        in_pieces(&nothing, 4, &mut |_| panic!("a piece of nothing")).unwrap();
    }

    #[test]
    fn a_tensor_is_filled_from_one_that_lies_in_any_way() {
        for from in sources() {
            for dtype in [DType::F32, DType::F64] {
                let to = Tensor::ones(from.shape(), dtype, &Device::Cpu).unwrap();
                fill(&to, &from).unwrap();
                assert!(flat(&to.to_dtype(DType::F32).unwrap()) == flat(&from));
            }
        }
    }
}
