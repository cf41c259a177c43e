//! Tensors over blocks, and the detection of the drop of the last one.
//!
//! The drop of a `CudaSlice` passes its address to `cuMemFreeAsync`, which refuses a mapping and
//! changes nothing; cudarc records the refusal in its context object, whose next user gets it as an
//! error. Therefore each slice gets a context object and a stream object of its own, over the
//! handles of the device: no other tensor sees the refusal, and when the loan is the only owner of
//! the stream object, the slice was dropped and its stream has waited for the uses that cudarc
//! tracked. A copy that candle makes with `Tensor::copy` shares the stream object and so the
//! refusal, which is [cleared](Backing::forget_refusals) whenever loans are checked.
//!
//! This module allocates and frees only those two objects.
//!
//! `unsafe` in this file: making a `CudaSlice` over memory that cudarc did not allocate, and a
//! second owner of a stream that stays alive.
#![allow(unsafe_code)]

use std::sync::Arc;

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::sys::cudaError_enum::CUDA_ERROR_INVALID_VALUE as REFUSED;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaStream};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Shape, Storage, Tensor};
use cuvmm::driver::CUresult;
use cuvmm::{Access, Block};

use crate::error::TensorError;
use crate::waiting::Wait;

/// Blocks, and the slices lent over them.
pub(crate) struct Backing {
    blocks: Vec<Block>,
    loans: Vec<Loan>,
}

/// The stream object of one slice. While it has another owner, the slice may exist.
struct Loan {
    own: Arc<CudaStream>,
    /// Keeps the stream alive even if a caller swaps the slice out of its storage and drops the
    /// device.
    _home: Arc<CudaStream>,
}

impl Backing {
    pub(crate) fn new(blocks: Vec<Block>) -> Self {
        Self {
            blocks,
            loans: Vec::new(),
        }
    }

    pub(crate) fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    pub(crate) fn blocks_mut(&mut self) -> &mut [Block] {
        &mut self.blocks
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.blocks.iter().map(Block::size).sum()
    }

    fn begin(&self) -> u64 {
        self.blocks.first().map_or(0, |first| first.address().0)
    }

    /// Returns the bytes from the address of the first block to the end of the last one's capacity.
    /// The blocks are in order.
    pub(crate) fn span(&self) -> u64 {
        let end = |last: &Block| last.address().0.saturating_add(last.capacity());
        self.blocks
            .last()
            .map_or(0, end)
            .saturating_sub(self.begin())
    }

    /// Returns `true` if the blocks are asleep. They share a tag, and so sleep together.
    pub(crate) fn is_asleep(&self) -> bool {
        self.blocks.first().is_some_and(Block::is_asleep)
    }

    /// Clears the refusals that dropped slices left in the loans' context objects: copies that
    /// candle made of their tensors share those objects, and would get the errors.
    pub(crate) fn forget_refusals(&self) {
        self.loans.iter().for_each(Loan::forget_refusal);
    }

    /// Returns the address of `bytes` bytes at `offset` from the first block's start, for this
    /// access.
    fn place(&self, offset: u64, bytes: u64, access: Access) -> Result<u64, TensorError> {
        let has = self.span();
        if offset.checked_add(bytes).is_none_or(|end| end > has) {
            return Err(TensorError::OutOfRange { offset, bytes, has });
        }
        let mut blocks = self.blocks.iter();
        blocks.try_for_each(|block| block.check_for(access))?;
        // The drop of an empty slice also passes its address to the driver, and other memory may
        // begin after the last block.
        let offset = if bytes == 0 { 0 } else { offset };
        Ok(self.begin() + offset)
    }

    /// Makes a tensor whose storage is a range of the blocks' addresses. Its shape has no more
    /// elements than the range, rounded up to a multiple of its last dimensions; the caller narrows
    /// the tensor to the part that has memory.
    pub(crate) fn lend(
        &mut self,
        device: &CudaDevice,
        wanted: Wanted,
    ) -> Result<Tensor, TensorError> {
        let Wanted {
            offset,
            bytes,
            dtype,
            shape,
            access,
        } = wanted;
        let address = self.place(offset, bytes, access)?;
        let element = dtype.size_in_bytes() as u64;
        let len = bytes
            .checked_div(element)
            .and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or(TensorError::UnsupportedType { dtype })?;
        let loan = Loan::new(device)?;
        let storage = CudaStorage {
            slice: loan.slice(address, len, dtype)?,
            device: device.clone(),
        };
        // Removes ended loans, such as a loan that was returned because it could not be filled.
        self.is_used();
        self.loans.push(loan);
        let storage = Storage::Cuda(storage);
        Ok(Tensor::from_storage(
            storage,
            shape,
            BackpropOp::none(),
            false,
        ))
    }
}

pub(crate) struct Wanted {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    /// The access that the blocks must permit. Forks of caches are read through tensors that write
    /// only after the shared part.
    pub(crate) access: Access,
}

impl Wait for Backing {
    /// Returns `true` if a slice over a block may exist. Ended loans are removed from the end, so
    /// each is checked once, plus one that has not ended.
    fn is_used(&mut self) -> bool {
        while self.loans.pop_if(|last| !last.is_open()).is_some() {}
        !self.loans.is_empty()
    }

    fn bytes(&self) -> u64 {
        self.bytes()
    }
}

impl Loan {
    fn new(device: &CudaDevice) -> Result<Self, TensorError> {
        let home = device.cuda_stream();
        let context = CudaContext::new(home.context().ordinal());
        let context = context.map_err(|error| TensorError::Cudarc(CUresult(error.0 as i32)))?;
        // SAFETY: the single stream of the tensors' device orders their uses, so no events are
        // needed.
        unsafe { context.disable_event_tracking() };
        // SAFETY: the stream belongs to the same primary context and stays alive while `home` is
        // kept, and both objects name the same stream, so work through one is work through the
        // other.
        let own = unsafe { context.wrap_borrowed_stream(home.cu_stream()) };
        Ok(Self { own, _home: home })
    }

    /// Makes a slice of elements at an address. The slice owns the stream object.
    fn slice(
        &self,
        address: u64,
        len: usize,
        dtype: DType,
    ) -> Result<CudaStorageSlice, TensorError> {
        macro_rules! slice {
            ($($dtype:ident),+) => {
                match dtype {
                    $(DType::$dtype => CudaStorageSlice::$dtype(
                        // SAFETY: the addresses are those of the backing's blocks, which stay until
                        // the slice was dropped, and any bits are a valid element. Its drop frees
                        // nothing: the driver refuses an address that it has not allocated.
                        unsafe { self.own.upgrade_device_ptr(address, len) },
                    ),)+
                    _ => return Err(TensorError::UnsupportedType { dtype }),
                }
            };
        }
        Ok(slice!(
            U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3, F8E8M0
        ))
    }

    /// Clears the refusal of the slice's own drop; keeps any other error.
    fn forget_refusal(&self) {
        let context = self.own.context();
        if let Err(error) = context.check_err()
            && error.0 != REFUSED
        {
            context.record_err::<()>(Err(error));
        }
    }

    fn is_open(&self) -> bool {
        let open = Arc::strong_count(&self.own) > 1;
        // The slice's actions before its drop happen before the caller's next ones.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        open
    }
}

#[cfg(test)]
mod tests {
    use cuvmm::driver::host::{HostDriver, HostOptions};
    use cuvmm::{Contents, Device, Pool};

    use super::*;

    const WRITE: Access = Access::ReadWrite;

    /// The address that a slice's drop passes to the driver must belong to the blocks: after their
    /// end, memory of cudarc or candle may begin, which would be freed.
    #[test]
    fn whatever_is_lent_lies_within_the_blocks() {
        let driver = Arc::new(HostDriver::new(HostOptions::new()));
        let device = Device::open(driver, 0).unwrap();
        let granule = device.granularity();
        let pool = Pool::builder(&device).build().unwrap();
        let tenant = pool.tenant("model").register().unwrap();
        let block = tenant.block(granule).allocate().unwrap();
        let begin = block.address().0;
        let backing = Backing::new(vec![block]);
        assert_eq!(backing.place(0, granule, WRITE).unwrap(), begin);
        assert_eq!(
            backing.place(granule - 4, 4, WRITE).unwrap(),
            begin + granule - 4
        );
        for offset in [0, 256, granule] {
            let address = backing.place(offset, 0, WRITE).unwrap();
            assert!(
                (begin..begin + granule).contains(&address),
                "nothing at {offset:#x}"
            );
        }
        for (offset, bytes) in [(granule, 1), (granule + 1, 0), (u64::MAX, 1)] {
            let refused = backing.place(offset, bytes, WRITE).unwrap_err();
            assert!(
                matches!(refused, TensorError::OutOfRange { .. }),
                "{refused}"
            );
        }
        tenant.blocks().sleep(Contents::Discard).unwrap();
        assert!(matches!(
            backing.place(0, 1, WRITE),
            Err(TensorError::Asleep)
        ));
    }
    /// A tensor's kernels may write, which would change what a fork reads, or fault in the fork.
    #[test]
    fn what_forks_share_is_lent_to_be_read_only() {
        let driver = Arc::new(HostDriver::new(HostOptions::new()));
        let device = Device::open(driver, 0).unwrap();
        let granule = device.granularity();
        let pool = Pool::builder(&device).build().unwrap();
        let tenant = pool.tenant("model").register().unwrap();
        let block = tenant.block(granule).allocate().unwrap();
        let fork = block.fork(granule, granule).unwrap();
        for backing in [Backing::new(vec![block]), Backing::new(vec![fork])] {
            backing.place(0, 4, Access::Read).unwrap();
            let refused = backing.place(0, 4, WRITE).unwrap_err();
            assert!(matches!(refused, TensorError::Refused(_)), "{refused}");
        }
    }
}
