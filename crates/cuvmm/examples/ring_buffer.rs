//! A ring buffer of samples that a reader always sees as one contiguous run.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::{Device, RingBuffer, Stream};

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;
    let mut ring = RingBuffer::<u32>::new(&device, &stream, 1 << 20)?;
    println!(
        "{} samples, {} MiB held, mapped twice at adjacent addresses",
        ring.capacity(),
        ring.held() >> 20
    );

    // Read windows of 300,000 samples that advance by 200,000. One window in five crosses the end.
    let mut next = 0..u32::MAX;
    let mut window = vec![0; 300_000];
    ring.extend_from_slice(&next.by_ref().take(window.len()).collect::<Vec<_>>())?;
    for step in 0..20u32 {
        let view = ring.filled();
        assert_eq!(view.len(), window.len());
        if step == 0 {
            println!(
                "a kernel sees {} samples in one contiguous run at {}",
                view.len(),
                view.address()
            );
        }
        ring.peek(0, &mut window)?;
        let first = step * 200_000;
        assert!(window.iter().copied().eq(first..first + 300_000));
        ring.consume(200_000)?;
        ring.extend_from_slice(&next.by_ref().take(200_000).collect::<Vec<_>>())?;
    }
    let refused = ring.extend_from_slice(&vec![0; ring.capacity()]);
    println!(
        "beyond its capacity: {}",
        refused.err().ok_or("the samples were pushed")?
    );
    Ok(())
}
