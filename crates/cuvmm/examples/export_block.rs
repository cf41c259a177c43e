//! Exports a block's memory as handles for another process. The pool never reuses exported memory,
//! however long the importer keeps it.
//!
//! This process imports the handles itself, which works the same way. To reach another process, a
//! file descriptor is sent through a Unix socket.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::driver::HandleTypes;
use cuvmm::{Access, AccessGrant, Device, Limit, Physical, Pool, Reservation, Stream};

const MIB: u64 = 1 << 20;

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;
    let pool = Pool::builder(&device)
        .limit(Limit::Bytes(64 * MIB))
        .shareable(HandleTypes::POSIX_FD)
        .build()?;
    let tenant = pool.tenant("model").register()?;
    let block = tenant.allocate_on(&stream, 8 * MIB)?;
    block.write(0, b"weights")?;

    // One handle per extent. The export holds a lease that keeps the memory mapped.
    let exported = block.export(HandleTypes::POSIX_FD)?;
    let (extent, handle) = exported.handles().first().ok_or("nothing was exported")?;
    println!(
        "{} handles, {} MiB exported",
        exported.handles().len(),
        pool.stats().exported / MIB
    );

    // Import the first handle. A handle does not carry its size, which is sent separately.
    let physical = Physical::import(&device, handle, extent.size)?;
    let theirs = Reservation::new(&device, extent.size)?.map(0, &physical)?;
    theirs.set_access(&[AccessGrant::new(&device, Access::ReadWrite)])?;
    let mut seen = [0; 7];
    theirs.read(0, &mut seen)?;
    assert_eq!(&seen, b"weights");
    theirs.write(0, b"changed")?;
    block.read(0, &mut seen)?;
    assert_eq!(&seen, b"changed", "both mappings show the same memory");

    // When this process no longer uses exported memory, the pool releases it to the driver. It
    // cannot be reused, because the importer can still write to it.
    drop((exported, block));
    pool.trim(64 * MIB)?;
    println!(
        "{} MiB exported, {} MiB kept",
        pool.stats().exported / MIB,
        pool.stats().free / MIB
    );
    let next = tenant.allocate_on(&stream, 8 * MIB)?;
    theirs.write(0, b"written")?;
    next.read(0, &mut seen)?;
    assert_eq!(seen, [0; 7], "the next block has other memory");
    theirs.read(0, &mut seen)?;
    println!(
        "the importer still reads {:?}",
        String::from_utf8_lossy(&seen)
    );
    Ok(())
}
