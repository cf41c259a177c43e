//! One buffer for the host and the device: no copies in the program, and nobody reads too early.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.

mod support;

use std::error::Error;

use cuvmm::unified::{PageLocation, Policy};
use cuvmm::{Device, Stream, UnifiedBuffer};

/// Runs the example.
///
/// # Errors
/// Whatever the library says.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;

    let mut samples = UnifiedBuffer::<f32>::zeroed(&device, &stream, 1 << 20)?;
    if !samples.is_host_accessible() {
        println!("this device works alone: only copies go in and out");
        samples.write(0, &[1.0, 2.0])?;
        println!("the second of them is {}", samples.get(1)?);
        return Ok(());
    }

    // The host writes in place.
    for (index, sample) in samples.host_mut()?.iter_mut().enumerate() {
        *sample = index as f32;
    }

    // The device is about to work on them: its pages, ahead of use.
    samples.set_policy(.., Policy::DeviceFirst)?;
    samples.prefetch(.., PageLocation::Device(&device), &stream)?;
    {
        let access = samples.device_mut(&stream)?;
        println!(
            "kernels get {} numbers at {}",
            access.len(),
            access.address()
        );
        // Kernels would be launched on `access.stream()` here; nobody else uses the numbers.
    }

    // Both may read. Making the view waits for the kernels that were launched above.
    let reading = samples.device_read(&stream)?;
    let view = samples.host()?;
    let sum: f64 = view
        .iter()
        .take(1000)
        .map(|&sample| f64::from(sample))
        .sum();
    println!("the first thousand add up to {sum}");
    assert_eq!(sum, 499_500.0);
    drop((reading, view));

    println!("pages prefer {:?}", samples.preferred_location(..)?);
    samples.close().map_err(|failed| failed.reason)?;
    Ok(())
}
