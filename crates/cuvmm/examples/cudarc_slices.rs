//! One context, one stream and one memory for this library and cudarc, the crate under candle and burn.
//!
//! Needs a GPU, and says so where there is none.

use std::error::Error;

use cuvmm::cudarc::{Context, Leased, Slice};
use cuvmm::error::CudarcError;
use cuvmm::{DeviceVec, Pool};

/// Runs the example.
///
/// # Errors
/// Whatever the two libraries say.
pub fn main() -> Result<(), Box<dyn Error>> {
    let context = match Context::open(0) {
        Ok(context) => context,
        Err(CudarcError::Driver(error)) if std::env::var_os("CUVMM_REQUIRE_GPU").is_none() => {
            println!("nothing to show without a GPU: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let device = context.device();
    let theirs = context.as_cudarc().new_stream()?;
    let ours = context.stream(&theirs)?;

    // cudarc reads and writes what a vector lends it.
    let mut samples = DeviceVec::<f32>::new(device, &ours, 64 << 20)?;
    samples.try_extend_from_slice(&[1.0, 2.0, 3.0, 4.0])?;
    let mut slice = Slice::new(samples.view_mut())?;
    theirs.memcpy_htod(&[8.0, 9.0], &mut slice)?;
    let copy = theirs.clone_dtod(&slice)?;
    drop(slice);
    let address = samples.address();
    samples.try_resize(16 << 20, 0.5)?;
    assert_eq!(samples.address(), address, "a vector never moves");
    println!(
        "{} numbers at {address}, a copy of the first {} by cudarc: {:?}",
        samples.len(),
        copy.len(),
        theirs.clone_dtoh(&copy)?,
    );
    assert_eq!(samples.get(1)?, 9.0);

    // A slice that owns its memory goes wherever a framework keeps it.
    let pool = Pool::builder(device).build()?;
    let tenant = pool.tenant("model").register()?;
    let block = tenant.allocate_on(&ours, 8 << 20)?;
    let mut weights = Slice::<f32, _>::new(Leased::from(block))?;
    theirs.memset_zeros(&mut weights)?;
    drop((tenant, context));
    let first = weights.try_slice(0..3).ok_or("it has more")?;
    assert_eq!(theirs.clone_dtoh(&first)?, [0.0; 3]);
    println!("{} numbers of the pool's, still there", weights.len());
    drop(weights);

    // Nothing of ours was freed by cudarc: it would have kept the error.
    theirs.context().check_err()?;
    Ok(())
}
