//! candle's own tensors given to another process: `cuMemAllocAsync` from a shareable memory pool
//! that is current.
//!
//! `unsafe` is used to wrap a tensor's memory, which the tensor keeps.
#![allow(unsafe_code)]

use std::thread;
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::DevicePtr as _;
use candle_core::{DType, Storage, Tensor};
use cuvmm::driver::{DeviceAddress, HandleTypes};
use cuvmm::error::MemoryError;
use cuvmm::share::{AllocationOffer, PoolImporter};
use cuvmm::{Channel, MemPool};

use super::rig;

/// Returns the first address of a tensor's storage.
fn address(tensor: &Tensor) -> DeviceAddress {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        panic!("on a GPU")
    };
    let slice = storage.as_cuda_slice::<f32>().unwrap();
    DeviceAddress(slice.device_ptr(slice.stream()).0)
}

/// Both ends are in one process here. The test `gpu_share_pool` of cuvmm has two.
#[test]
fn a_tensor_of_a_shareable_pool_is_given() {
    let Some((_turn, gpu)) = rig::gpu("a_tensor_of_a_shareable_pool_is_given") else {
        return;
    };
    const NUMBERS: usize = 1 << 20;
    let (device, stream) = (gpu.device(), gpu.stream());
    let size = 4 * NUMBERS as u64;
    let ones = || Tensor::ones(NUMBERS, DType::F32, gpu.candle()).unwrap();
    let early = ones();
    let pool = MemPool::builder(device).shareable(HandleTypes::POSIX_FD);
    let pool = pool.create().unwrap();
    pool.set_release_threshold(u64::MAX).unwrap();
    let current = pool.make_current().unwrap();
    let tensor = ones();
    // SAFETY: the tensors live until the memory was let go.
    let borrow = |tensor: &Tensor| unsafe { pool.borrow(stream, address(tensor), size) };
    // Of the default pool, which is not shareable.
    let refused = borrow(&early).unwrap_err();
    assert!(
        matches!(refused, MemoryError::NotOfPool { .. }),
        "{refused}"
    );
    let memory = borrow(&tensor).unwrap();
    let offer = AllocationOffer::new(&memory).unwrap();
    let (mut one, mut two) = Channel::pair().unwrap();
    let importer = PoolImporter::new(device, stream).unwrap();
    let taken = thread::scope(|scope| {
        let given = scope.spawn(|| one.send_allocations(&offer));
        let taken = two.recv_allocations(&importer).unwrap().remove(0);
        given.join().unwrap().unwrap();
        taken
    });
    let mut last = [0; 4];
    taken.read(stream, size - 4, &mut last).unwrap();
    assert_eq!(f32::from_ne_bytes(last), 1.0);
    drop(taken);
    offer.wait_until_returned(Duration::from_secs(10)).unwrap();
    drop((offer, memory, tensor, early, current));
    stream.synchronize().unwrap();
    assert_eq!(pool.stats().unwrap().used, 0);
}
