//! A block that grows in place: it keeps its address and its contents, and only the new part is
//! mapped.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::{Device, Limit, Pool, Stream};

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
    let tenant = pool.tenant("cache").register()?;
    let stream = Stream::new(&device)?;

    // Reserve 48 MiB of addresses and back 2 MiB of them with memory.
    let mut block = tenant
        .block(2 * MIB)
        .capacity(48 * MIB)
        .home_stream(&stream)
        .allocate()?;
    let address = block.address();
    block.write(0, b"still here")?;

    for size in [4, 8, 16, 32, 48].map(|size| size * MIB) {
        block.grow_to(size)?;
        assert_eq!(block.address(), address, "the block does not move");
        println!(
            "{:2} MiB at {address}, in {} extents",
            block.size() / MIB,
            block.extents().len(),
        );
    }
    let mut seen = [0; 10];
    block.read(0, &mut seen)?;
    println!("its first bytes: {:?}", std::str::from_utf8(&seen)?);

    // Memory that a shrink gives up stays mapped until another allocation needs it, so growing
    // again makes no driver call.
    block.shrink_to(4 * MIB)?;
    let before = pool.calls().total();
    block.grow_to(48 * MIB)?;
    println!(
        "shrunk and grown again with {} driver calls",
        pool.calls().total() - before
    );

    let refused = block.grow_to(49 * MIB);
    println!(
        "beyond its capacity: {}",
        refused.err().ok_or("the block grew")?
    );
    drop((block, tenant));
    pool.close()?;
    Ok(())
}
