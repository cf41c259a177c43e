//! Exports a block and a vector through DLPack. Their memory lives until the last tensor over it is
//! dropped.
//!
//! Runs on a GPU, or on the host driver where there is none.
//!
//! `unsafe` is used to import tensors: the importer vouches that their memory is what they
//! describe.
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
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let pool = Pool::builder(&device)
        .limit(Limit::Bytes(64 * MIB))
        .build()?;
    let model = pool.tenant("model").register()?;
    let stream = Stream::new(&device)?;
    let theirs = Stream::new(&device)?;

    // Two tensors over one block: a matrix of weights, and its transpose by strides.
    let weights = Arc::new(model.allocate_on(&stream, 16 * MIB)?);
    let numbers: Vec<u8> = (0..6u32).flat_map(|n| (n as f32).to_le_bytes()).collect();
    weights.write(0, &numbers)?;
    let consumer = Consumer::Stream(theirs.clone());
    let row = Tensor::of::<f32>(&[2, 3]).export(Arc::clone(&weights), &consumer)?;
    let turned = Tensor::of::<f32>(&[3, 2]).strides(&[1, 3]).read_only();
    let turned = turned.export(weights, &consumer)?;
    show("matrix", &row)?;
    show("transposed", &turned)?;

    // Only the tensors hold the block now, so it stays in use.
    println!("{} MiB in use", pool.stats().in_use / MIB);
    drop(row);
    assert_eq!(
        pool.stats().in_use,
        16 * MIB,
        "one tensor still holds the block"
    );

    // Play the other library: import the tensor and read the elements.
    // SAFETY: the tensor was exported above, so it describes its memory truthfully, and nothing
    // writes to that memory.
    let taken = unsafe { Imported::new(&theirs, turned) }?;
    println!("imported: {taken:?}, read-only: {}", taken.is_read_only());
    drop(taken);
    println!(
        "{} MiB in use after the last tensor",
        pool.stats().in_use / MIB
    );
    assert_eq!(pool.stats().in_use, 0);

    // The memory of an exported vector returns to the driver when the tensor is dropped.
    let mut samples = DeviceVec::<u16>::new(&device, &stream, 1 << 20)?;
    samples.resize(1 << 20, 7)?;
    let before = device.memory_info()?.free;
    let tensor = Tensor::of::<u16>(&[1024, 1024]).export(samples, &Consumer::Synchronized)?;
    // SAFETY: the tensor was exported above, and nothing writes to its memory.
    let taken = unsafe { Imported::new(&stream, tensor) }?;
    let mut last = [0; 2];
    taken.read(taken.size() - 2, &mut last)?;
    assert_eq!(u16::from_le_bytes(last), 7);
    drop(taken);
    let back = device.memory_info()?.free.saturating_sub(before);
    println!("{} MiB returned to the driver", back / MIB);

    // A refusal carries the figures and returns the owner.
    let small = model.allocate_on(&stream, 100)?;
    let refused = Tensor::of::<f64>(&[13]).export(small, &Consumer::Synchronized);
    let refused = refused
        .err()
        .ok_or("13 elements of 8 bytes fit in 100 bytes")?;
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
