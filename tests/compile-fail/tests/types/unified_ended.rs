//! A closed unified buffer cannot be used, and its elements must be plain data.

use cuvmm::unified::{DeviceRead, HostView};
use cuvmm::{Stream, UnifiedBuffer};

fn main() {}

fn use_after_close(buffer: UnifiedBuffer<u8>) {
    drop(buffer.close());
    drop(buffer.host());
}

fn close_behind_a_device(buffer: UnifiedBuffer<u8>, stream: &Stream) {
    let access = buffer.device_read(stream);
    drop(buffer.close());
    drop(access);
}

fn a_view_outlives_the_buffer(buffer: UnifiedBuffer<u8>) -> Option<HostView<'static, u8>> {
    buffer.host().ok()
}

fn a_device_outlives_the_buffer<'a>(
    buffer: UnifiedBuffer<u8>,
    stream: &'a Stream,
) -> Option<DeviceRead<'a, u8>> {
    buffer.device_read(stream).ok()
}

fn pointers_are_behind_a_door(buffer: &mut UnifiedBuffer<u8>) -> (*const u8, *mut u8) {
    (buffer.as_ptr(), buffer.as_mut_ptr())
}

fn views_without_asking_the_device_are_too(buffer: &mut UnifiedBuffer<u8>) {
    drop(buffer.host_unchecked());
    drop(buffer.host_mut_unchecked());
}

fn not_plain(device: &cuvmm::Device, stream: &Stream) {
    drop(UnifiedBuffer::<Box<u8>>::zeroed(device, stream, 8));
}
