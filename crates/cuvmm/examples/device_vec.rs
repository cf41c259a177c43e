//! A vector on the device that grows a thousandfold and never moves.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.

mod support;

use std::error::Error;

use cuvmm::{Device, DeviceVec, Stream};

/// Runs the example.
///
/// # Errors
/// Whatever the library says.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;

    // Addresses for 256 Mi numbers, memory for none.
    let mut samples = DeviceVec::<f32>::new(&device, &stream, 256 << 20)?;
    let address = samples.address();
    let before = device.calls();
    let chunk: Vec<f32> = (0..64 << 10).map(|n| n as f32).collect();
    for _ in 0..128 {
        samples.try_extend_from_slice(&chunk)?;
    }
    let calls = device.calls().since(&before);
    println!(
        "{} numbers at {address}, {} MiB in {} extents",
        samples.len(),
        samples.held() >> 20,
        calls.count(cuvmm::driver::Call::MemCreate),
    );
    assert_eq!(samples.address(), address, "a vector never moves");
    assert_eq!(samples.get(3 * chunk.len() + 7)?, 7.0);

    // What a kernel is given: an address and a length that outlive neither growth nor the vector.
    let view = samples.view();
    println!("a kernel sees {} numbers at {}", view.len(), view.address());

    samples.truncate(chunk.len());
    println!("{} MiB given back", samples.shrink_to_fit()? >> 20);
    let refused = samples.try_reserve(256 << 20);
    println!("too many: {}", refused.err().ok_or("there was room")?);
    Ok(())
}
