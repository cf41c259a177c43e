//! Tensors over memory of this library, and how it is known that the last of them has gone.
//!
//! A storage of candle's ends in a `CudaSlice` of cudarc's. Its drop hands the address to
//! `cuMemFreeAsync`, which refuses a mapping and changes nothing, and lays the refusal down in its
//! context object, whose next user is told. So each slice gets a context object and a stream object for
//! itself, over the handles of the device: no other tensor is ever told, and once only the loan has the
//! stream object, the slice is gone and its stream has waited for what cudarc knew of. What candle makes
//! with `Tensor::copy` has the stream object too, and so the refusal, which is
//! [forgotten](Backing::forget_refusals) whenever loans are looked through.
//!
//! Nothing is allocated or freed here but those two objects.
//!
//! `unsafe` here: making a `CudaSlice` over memory that cudarc did not allocate, and a second owner of a
//! stream that stays alive.
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

/// Blocks, and what was lent of them.
pub(crate) struct Backing {
    blocks: Vec<Block>,
    loans: Vec<Loan>,
}

/// One slice's own stream object. While somebody else has it too the slice may be there.
struct Loan {
    own: Arc<CudaStream>,
    /// Whoever swaps a slice out of its storage drops the device that kept the stream.
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

    /// Bytes of the blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.blocks.iter().map(Block::size).sum()
    }

    fn begin(&self) -> u64 {
        self.blocks.first().map_or(0, |first| first.address().0)
    }

    /// Bytes from the first address of the blocks, which lie in order, to the last they may have.
    pub(crate) fn span(&self) -> u64 {
        let end = |last: &Block| last.address().0.saturating_add(last.capacity());
        self.blocks
            .last()
            .map_or(0, end)
            .saturating_sub(self.begin())
    }

    /// Whether the blocks sleep. They bear one tag, and do it together.
    pub(crate) fn is_asleep(&self) -> bool {
        self.blocks.first().is_some_and(Block::is_asleep)
    }

    /// Forgets what was noted in the loans' context objects as slices went: copies that candle made
    /// of their tensors have those objects too, and would be told.
    pub(crate) fn forget_refusals(&self) {
        self.loans.iter().for_each(Loan::forget_refusal);
    }

    /// Returns the address of `bytes` bytes that begin `offset` bytes behind the first block's
    /// beginning, to be used with this access.
    fn place(&self, offset: u64, bytes: u64, access: Access) -> Result<u64, TensorError> {
        let has = self.span();
        if offset.checked_add(bytes).is_none_or(|end| end > has) {
            return Err(TensorError::OutOfRange { offset, bytes, has });
        }
        let mut blocks = self.blocks.iter();
        blocks.try_for_each(|block| block.check_for(access))?;
        // A slice of nothing is freed like any other, and behind the last block the memory of somebody
        // else may begin.
        let offset = if bytes == 0 { 0 } else { offset };
        Ok(self.begin() + offset)
    }

    /// A tensor whose storage begins so many bytes behind the first block and spans so many bytes, all
    /// of them addresses of the blocks. Its shape is of no more elements than would fill the span up to
    /// a multiple of its last dimensions; whoever hands it out narrows it to what is there.
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
        // What was lent and came back at once, since it could not be filled.
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

/// What a tensor is to be made of.
pub(crate) struct Wanted {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    /// What the blocks must allow: forks of caches are read through tensors that write behind what is
    /// shared.
    pub(crate) access: Access,
}

impl Wait for Backing {
    /// Whether a slice over one of the blocks may still be there. Loans that have ended are forgotten
    /// from the end, so that each is looked at once, and one that has not.
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
        // SAFETY: the uses of a tensor are ordered by the one stream that its device works on.
        unsafe { context.disable_event_tracking() };
        // SAFETY: the stream is of the same primary context, stays alive while `home` is kept, and work
        // through the one object is work through the other.
        let own = unsafe { context.wrap_borrowed_stream(home.cu_stream()) };
        Ok(Self { own, _home: home })
    }

    /// Elements at an address, in a slice that has the stream object.
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
                        // SAFETY: the addresses are those of the backing's blocks, which stay until the
                        // slice has gone, and any bits are an element. Its drop frees nothing: the driver
                        // refuses what it has not allocated.
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

    /// The slice's own refusal is of no use to a copy that has its context object; anything else is.
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
        // What the slice did before it let go is done before what is done now that it has.
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

    /// What a slice's drop gives to the driver has to be an address of the blocks: at their end memory may
    /// begin that somebody else has allocated, and that would be freed.
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
    /// A tensor's kernels may write, and would change what a fork shows, or fault in it.
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
