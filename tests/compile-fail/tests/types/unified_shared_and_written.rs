//! Host and devices share a buffer by Rust's borrow rules: many readers or one writer.

use cuvmm::unified::HostView;
use cuvmm::{Stream, UnifiedBuffer};

fn main() {}

fn host_views_what_a_device_writes(buffer: &mut UnifiedBuffer<f32>, stream: &Stream) {
    let access = buffer.device_mut(stream);
    drop(buffer.host());
    drop(access);
}

fn device_writes_what_the_host_views(buffer: &mut UnifiedBuffer<f32>, stream: &Stream) {
    let view = buffer.host();
    drop(buffer.device_mut(stream));
    drop(view);
}

fn host_writes_what_a_device_reads(buffer: &mut UnifiedBuffer<f32>, stream: &Stream) {
    let access = buffer.device_read(stream);
    drop(buffer.host_mut());
    drop(access);
}

fn a_copy_writes_what_the_host_views(buffer: &mut UnifiedBuffer<f32>) {
    let view = buffer.host();
    drop(buffer.write(0, &[1.0]));
    drop(view);
}

fn two_host_writers(buffer: &mut UnifiedBuffer<f32>) {
    let first = buffer.host_mut();
    let second = buffer.host_mut();
    drop((first, second));
}

fn a_reference_outlives_its_view(buffer: &UnifiedBuffer<f32>) -> Option<&f32> {
    let view: HostView<'_, f32> = buffer.host().ok()?;
    view.first()
}
