//! Another library holds our memory by DLPack: a block of a pool and a vector, which live until the
//! last tensor over them has gone.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.
//!
//! `unsafe` here: whoever takes a tensor says that its memory is what it says.
#![allow(unsafe_code)]

mod support;

use std::error::Error;
use std::sync::Arc;

use cuvmm::dlpack::dlpark::versioned::Dlpack;
use cuvmm::dlpack::{Consumer, Imported, Tensor};
use cuvmm::{Device, DeviceVec, Limit, Pool, Stream};

const MIB: u64 = 1 << 20;

/// Runs the example.
///
/// # Errors
/// Whatever the library says.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let pool = Pool::builder(&device)
        .limit(Limit::Bytes(64 * MIB))
        .build()?;
    let model = pool.tenant("model").register()?;
    let stream = Stream::new(&device)?;
    let theirs = Stream::new(&device)?;

    // Two tensors over one block: a row of weights, and the same turned by its strides.
    let weights = Arc::new(model.allocate_on(&stream, 16 * MIB)?);
    let numbers: Vec<u8> = (0..6u32).flat_map(|n| (n as f32).to_le_bytes()).collect();
    weights.write(0, &numbers)?;
    let consumer = Consumer::Stream(theirs.clone());
    let row = Tensor::of::<f32>(&[2, 3]).export(Arc::clone(&weights), &consumer)?;
    let turned = Tensor::of::<f32>(&[3, 2]).strides(&[1, 3]).read_only();
    let turned = turned.export(weights, &consumer)?;
    show("a row", &row)?;
    show("turned", &turned)?;

    // Nobody here has the block any more, and it is in use.
    println!("{} MiB in use", pool.stats().in_use / MIB);
    drop(row);
    assert_eq!(pool.stats().in_use, 16 * MIB, "a tensor is left");

    // The other library, played by us: it takes the tensor and reads the numbers.
    // SAFETY: what was exported above is what it says, and nobody writes to it.
    let taken = unsafe { Imported::new(&theirs, turned) }?;
    println!("taken: {taken:?}, read-only: {}", taken.is_read_only());
    drop(taken);
    println!(
        "{} MiB in use after the last tensor",
        pool.stats().in_use / MIB
    );
    assert_eq!(pool.stats().in_use, 0);

    // A vector gives its memory back to the driver itself when the tensor goes.
    let mut samples = DeviceVec::<u16>::new(&device, &stream, 1 << 20)?;
    samples.try_resize(1 << 20, 7)?;
    let before = device.memory_info()?.free;
    let tensor = Tensor::of::<u16>(&[1024, 1024]).export(samples, &Consumer::Anybody)?;
    // SAFETY: as above.
    let taken = unsafe { Imported::new(&stream, tensor) }?;
    let mut last = [0; 2];
    taken.read(taken.size() - 2, &mut last)?;
    assert_eq!(u16::from_le_bytes(last), 7);
    drop(taken);
    let back = device.memory_info()?.free.saturating_sub(before);
    println!("{} MiB back at the driver", back / MIB);

    // What cannot be is refused with the figures, and the owner comes back.
    let small = model.allocate_on(&stream, 100)?;
    let refused = Tensor::of::<f64>(&[13]).export(small, &Consumer::Anybody);
    let refused = refused.err().ok_or("13 numbers are 104 bytes")?;
    println!("refused: {refused}");
    drop((refused, model, stream, theirs));
    pool.close()?;
    Ok(())
}

fn show(what: &str, tensor: &Dlpack) -> Result<(), Box<dyn Error>> {
    let seen = tensor.validate()?;
    println!(
        "{what}: shape {:?}, strides {:?}, at {:p}, {:?}",
        seen.shape(),
        seen.strides().unwrap_or_default(),
        seen.data_ptr(),
        seen.device(),
    );
    Ok(())
}
