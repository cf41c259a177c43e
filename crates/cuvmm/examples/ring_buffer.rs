//! A stream of samples through a ring whose reader never sees the end of the buffer.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.

mod support;

use std::error::Error;

use cuvmm::{Device, RingBuffer, Stream};

/// Runs the example.
///
/// # Errors
/// Whatever the library says.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;
    let mut ring = RingBuffer::<u32>::new(&device, &stream, 1 << 20)?;
    println!(
        "{} samples, {} MiB held, mapped twice side by side",
        ring.capacity(),
        ring.held() >> 20
    );

    // Windows of 300,000 samples, with 200,000 coming in between: one in five goes over the end.
    let mut next = 0..u32::MAX;
    let mut window = vec![0; 300_000];
    ring.try_push(&next.by_ref().take(window.len()).collect::<Vec<_>>())?;
    for step in 0..20u32 {
        let view = ring.filled();
        assert_eq!(view.len(), window.len());
        if step == 0 {
            println!(
                "a kernel sees {} samples in one run at {}",
                view.len(),
                view.address()
            );
        }
        ring.peek(0, &mut window)?;
        let first = step * 200_000;
        assert!(window.iter().copied().eq(first..first + 300_000));
        ring.consume(200_000)?;
        ring.try_push(&next.by_ref().take(200_000).collect::<Vec<_>>())?;
    }
    let refused = ring.try_push(&vec![0; ring.capacity()]);
    println!("too many: {}", refused.err().ok_or("there was room")?);
    Ok(())
}
