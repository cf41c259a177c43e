//! A view passed to a kernel does not outlive a change of the vector.

use cuvmm::DeviceVec;

fn main() {}

fn grow(vec: &mut DeviceVec<f32>) {
    let view = vec.view();
    drop(vec.push(1.0));
    let _ = view.len();
}

fn write_twice(vec: &mut DeviceVec<f32>) {
    let first = vec.view_mut();
    let second = vec.view_mut();
    let _ = (first.len(), second.len());
}

fn keep(vec: DeviceVec<f32>) -> usize {
    let view = vec.view();
    drop(vec);
    view.len()
}

fn not_plain(device: &cuvmm::Device, stream: &cuvmm::Stream) {
    drop(DeviceVec::<String>::new(device, stream, 8));
}
