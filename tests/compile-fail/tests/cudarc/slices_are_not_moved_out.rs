//! No safe function returns cudarc's own slice of memory that cuvmm owns.

use cudarc::driver::CudaSlice;
use cuvmm::DeviceVec;
use cuvmm::cudarc::Slice;

fn main() {}

fn copied(slice: &Slice<f32, DeviceVec<f32>>) -> Slice<f32, DeviceVec<f32>> {
    slice.clone()
}

fn taken(slice: Slice<f32, DeviceVec<f32>>) -> CudaSlice<f32> {
    slice.into()
}

fn lent(slice: &mut Slice<f32, DeviceVec<f32>>) -> &mut CudaSlice<f32> {
    &mut *slice
}

fn doors(mut slice: Slice<f32, DeviceVec<f32>>) {
    let _ = slice.as_cuda_slice().len();
    let _ = slice.as_cuda_slice_mut().len();
    let _ = slice.into_parts();
}
