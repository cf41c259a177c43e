//! A device vector that grows in place: its address never changes.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::bytemuck::{Pod, Zeroable};
use cuvmm::{Device, DeviceVec, Stream};

/// An element. The attribute lets the derived code find bytemuck in `cuvmm`.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
#[bytemuck(crate = "cuvmm::bytemuck")]
struct Particle {
    position: [f32; 3],
    charge: i32,
}

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;

    // Reserve addresses for 256 Mi elements. No memory is committed yet.
    let mut samples = DeviceVec::<f32>::new(&device, &stream, 256 << 20)?;
    let address = samples.address();
    let before = device.calls();
    let chunk: Vec<f32> = (0..64 << 10).map(|n| n as f32).collect();
    for _ in 0..128 {
        samples.extend_from_slice(&chunk)?;
    }
    let calls = device.calls().since(&before);
    println!(
        "{} elements at {address}, {} MiB in {} extents",
        samples.len(),
        samples.held() >> 20,
        calls.count(cuvmm::driver::Call::MemCreate),
    );
    assert_eq!(samples.address(), address, "the vector does not move");
    assert_eq!(samples.get(3 * chunk.len() + 7)?, 7.0);

    // A view passes the address and the length to a kernel. It borrows the vector, which can
    // neither grow nor be dropped meanwhile.
    let view = samples.view();
    println!(
        "a kernel sees {} elements at {}",
        view.len(),
        view.address()
    );

    samples.truncate(chunk.len());
    println!("{} MiB released", samples.shrink_to_fit()? >> 20);
    let refused = samples.reserve(256 << 20);
    println!(
        "beyond its capacity: {}",
        refused.err().ok_or("the reservation succeeded")?
    );

    // A struct of your own is an element too.
    let mut particles = DeviceVec::<Particle>::new(&device, &stream, 1 << 20)?;
    let particle = Particle {
        position: [1.0, 2.0, 3.0],
        charge: -1,
    };
    particles.resize(1000, particle)?;
    assert_eq!(particles.get(999)?, particle);
    println!("{} particles, each {particle:?}", particles.len());
    Ok(())
}
