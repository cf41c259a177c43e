//! A buffer that the host and the device share without explicit copies. Borrows order their
//! accesses.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::unified::{PageLocation, Policy};
use cuvmm::{Device, Stream, UnifiedBuffer};

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;

    let mut samples = UnifiedBuffer::<f32>::zeroed(&device, &stream, 1 << 20)?;
    if !samples.is_host_accessible() {
        println!("this device does not support concurrent access by the host: only copies work");
        samples.write(0, &[1.0, 2.0])?;
        println!("the second element is {}", samples.get(1)?);
        return Ok(());
    }

    // The host writes in place.
    for (index, sample) in samples.host_mut()?.iter_mut().enumerate() {
        *sample = index as f32;
    }

    // Prefetch the pages to the device before it works on them.
    samples.set_policy(.., Policy::DeviceFirst)?;
    samples.prefetch(.., PageLocation::Device(&device), &stream)?;
    {
        let access = samples.device_mut(&stream)?;
        println!(
            "kernels write {} elements at {}",
            access.len(),
            access.address()
        );
        // Launch kernels on `access.stream()` here; nothing else can use the buffer meanwhile.
    }

    // Host and device may both read. `host` waits for the kernels that were launched above.
    let reading = samples.device_read(&stream)?;
    let view = samples.host()?;
    let sum: f64 = view
        .iter()
        .take(1000)
        .map(|&sample| f64::from(sample))
        .sum();
    println!("the first thousand elements add up to {sum}");
    assert_eq!(sum, 499_500.0);
    drop((reading, view));

    println!("preferred location: {:?}", samples.preferred_location(..)?);
    samples.close().map_err(|failed| failed.reason)?;
    Ok(())
}
