//! Memory lent to cudarc cannot change meanwhile, and memory lent for reading is not written.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cuvmm::DeviceVec;
use cuvmm::cudarc::{Memory, Slice};

fn main() {}

fn grown(vec: &mut DeviceVec<f32>) {
    let slice = Slice::new(vec.view());
    drop(vec.push(1.0));
    drop(slice);
}

fn freed(vec: DeviceVec<f32>) -> usize {
    let slice = Slice::new(vec.view());
    drop(vec);
    slice.map_or(0, |slice| slice.len())
}

fn written(stream: &Arc<CudaStream>, vec: &DeviceVec<f32>) {
    if let Ok(mut slice) = Slice::new(vec.view()) {
        drop(stream.memset_zeros(&mut slice));
    }
}

fn recorded(stream: &cuvmm::Stream, vec: &mut DeviceVec<f32>) {
    if let Ok(mut slice) = Slice::new(vec.view_mut()) {
        drop(slice.record_use(stream));
    }
}

fn kept(mut slice: Slice<f32, DeviceVec<f32>>) -> usize {
    let part = slice.try_slice_mut(0..1);
    drop(slice);
    part.map_or(0, |part| cudarc::driver::DeviceSlice::len(&part))
}

struct Mine;

impl Memory<f32> for Mine {
    type Refused = std::fmt::Error;

    fn refuse(self, _: cuvmm::error::CudarcError) -> std::fmt::Error {
        std::fmt::Error
    }
}
