//! Shares a context, a stream and device memory with cudarc, the CUDA crate that candle and burn
//! use.
//!
//! Requires a GPU, and prints a message if there is none.

use std::error::Error;

use cuvmm::cudarc::{Context, Leased, Slice};
use cuvmm::error::CudarcError;
use cuvmm::{DeviceVec, Pool};

/// Runs the example.
///
/// # Errors
/// Returns any error of the two libraries.
pub fn main() -> Result<(), Box<dyn Error>> {
    let context = match Context::open(0) {
        Ok(context) => context,
        Err(CudarcError::Driver(error)) if std::env::var_os("CUVMM_REQUIRE_GPU").is_none() => {
            println!("skipped, no GPU: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let device = context.device();
    let theirs = context.as_cudarc().new_stream()?;
    let ours = context.stream(&theirs)?;

    // cudarc reads and writes memory that a vector lends it.
    let mut samples = DeviceVec::<f32>::new(device, &ours, 64 << 20)?;
    samples.extend_from_slice(&[1.0, 2.0, 3.0, 4.0])?;
    let mut slice = Slice::new(samples.view_mut())?;
    theirs.memcpy_htod(&[8.0, 9.0], &mut slice)?;
    let copy = theirs.clone_dtod(&slice)?;
    drop(slice);
    let address = samples.address();
    samples.resize(16 << 20, 0.5)?;
    assert_eq!(samples.address(), address, "the vector does not move");
    println!(
        "{} elements at {address}; cudarc's copy of the first {}: {:?}",
        samples.len(),
        copy.len(),
        theirs.clone_dtoh(&copy)?,
    );
    assert_eq!(samples.get(1)?, 9.0);

    // A slice that owns its memory can be stored wherever a framework keeps slices.
    let pool = Pool::builder(device).build()?;
    let tenant = pool.tenant("model").register()?;
    let block = tenant.allocate_on(&ours, 8 << 20)?;
    let mut weights = Slice::<f32, _>::new(Leased::from(block))?;
    theirs.memset_zeros(&mut weights)?;
    drop((tenant, context));
    let first = weights.try_slice(0..3).ok_or("the slice is too short")?;
    assert_eq!(theirs.clone_dtoh(&first)?, [0.0; 3]);
    println!(
        "{} elements of the pool's memory outlive the tenant handle",
        weights.len()
    );
    drop(weights);

    // cudarc freed nothing that cuvmm owns: it would have recorded the error.
    theirs.context().check_err()?;
    Ok(())
}
