//! Memory of a block for somebody else: handles are made of it, the other side imports them, and
//! what it has is never another block's, however long it keeps it.
//!
//! The other side is this process once more, which is as good; a descriptor goes to another one
//! through a Unix socket. Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.

mod support;

use std::error::Error;

use cuvmm::driver::HandleTypes;
use cuvmm::{Access, AccessGrant, Device, Limit, Physical, Pool, Reservation, Stream};

const MIB: u64 = 1 << 20;

/// Runs the example.
///
/// # Errors
/// Whatever the library says.
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

    // One handle for each extent. The lease that comes with them keeps the memory where it is.
    let exported = block.export(HandleTypes::POSIX_FD)?;
    let (extent, handle) = exported.handles().first().ok_or("nothing was exported")?;
    println!(
        "{} handles, {} MiB exported",
        exported.handles().len(),
        pool.stats().exported / MIB
    );

    // The other side. The size does not travel with a handle: it is sent beside it.
    let physical = Physical::import(&device, handle, extent.size)?;
    let theirs = Reservation::new(&device, extent.size)?.map(0, &physical)?;
    theirs.set_access(&[AccessGrant::device(&device, Access::ReadWrite)])?;
    let mut seen = [0; 7];
    theirs.read(0, &mut seen)?;
    assert_eq!(&seen, b"weights");
    theirs.write(0, b"changed")?;
    block.read(0, &mut seen)?;
    assert_eq!(&seen, b"changed", "it is one memory");

    // Once nobody here uses it, the pool gives it to the driver. It would not be safe with anybody
    // else: the other side writes to it still.
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
    assert_eq!(seen, [0; 7], "the next block's is other memory");
    theirs.read(0, &mut seen)?;
    println!(
        "the other side still has {:?}",
        String::from_utf8_lossy(&seen)
    );
    Ok(())
}
