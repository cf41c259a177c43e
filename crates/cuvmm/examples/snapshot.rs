//! Takes a checkpoint of a buffer without a copy, while work on the buffer continues.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::{CowBuffer, Device, Stream};

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;
    let mut state = CowBuffer::<f32>::zeroed(&device, &stream, 16 << 20)?;
    state.write(0, &[1.0; 1000])?;

    let checkpoint = state.snapshot()?;
    println!(
        "buffer {} MiB, checkpoint {} MiB, {} MiB shared",
        state.held() >> 20,
        checkpoint.held() >> 20,
        state.shared() >> 20
    );

    // A kernel that wrote to a shared extent would fault. `make_mut` copies the extents that the
    // range touches, and only these.
    let range = 500..2_000;
    let view = state.make_mut(range.clone())?;
    println!(
        "a kernel may write {} elements at {}",
        view.len(),
        view.address()
    );
    state.write(500, &[2.0; 500])?;
    println!("{} MiB remain shared", state.shared() >> 20);

    assert_eq!((state.get(499)?, state.get(500)?), (1.0, 2.0));
    assert_eq!(checkpoint.get(500)?, 1.0);

    // With no other owner left, nothing has to be copied.
    drop(checkpoint);
    let before = device.calls();
    state.make_mut(0..16 << 20)?;
    let copies = device.calls().since(&before);
    assert_eq!(copies.count(cuvmm::driver::Call::MemCreate), 0);
    assert_eq!(state.shared(), 0);
    Ok(())
}
