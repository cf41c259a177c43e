//! A late user: somebody kept the address of a block that was dropped. In a plain pool it finds
//! the next block's memory there; in a hardened pool nothing is there, and the driver says so.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.
//!
//! `unsafe` here: the driver's own copy, which takes any address. The library has none that does.
#![allow(unsafe_code)]

mod support;

use std::error::Error;

use cuvmm::driver::{DeviceAddress, DriverError, Ordinal};
use cuvmm::{Device, Hardened, Limit, Pool, Stream};

const MIB: u64 = 1 << 20;

/// What a C program does with an address that it noted down.
fn late_read(device: &Device, at: DeviceAddress) -> Result<[u8; 4], DriverError> {
    let mut bytes = [0; 4];
    // SAFETY: a read of whatever is there. Where nothing is mapped the driver refuses the copy,
    // which harms nothing.
    unsafe {
        device.driver().copy_to_host(Ordinal(0), &mut bytes, at)?;
    }
    Ok(bytes)
}

/// Runs the example.
///
/// # Errors
/// Whatever the library says.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let stream = Stream::new(&device)?;

    for hardened in [false, true] {
        let mut builder = Pool::builder(&device).limit(Limit::Bytes(64 * MIB));
        if hardened {
            builder = builder.hardened(Hardened::new());
        }
        let pool = builder.build()?;
        let tenant = pool.tenant("model").register()?;

        let block = tenant.allocate_on(&stream, 2 * MIB)?;
        block.write(0, b"mine")?;
        let kept = block.address();
        let end = DeviceAddress(kept.0 + block.size());
        if hardened {
            let over = late_read(&device, end).err();
            println!("over the end:  {}", over.ok_or("there is no guard")?);
        }
        drop(block);

        // Behind the fill, so that what was freed has passed; the next operation unmaps it.
        stream.synchronize()?;
        let next = tenant.allocate_on(&stream, 2 * MIB)?;
        next.write(0, b"next")?;
        match late_read(&device, kept) {
            Ok(bytes) => {
                let seen = String::from_utf8_lossy(&bytes);
                println!("plain pool:    a late user reads {seen:?} of another block");
                assert!(
                    !hardened && kept == next.address(),
                    "nothing is mapped there"
                );
            }
            Err(refused) => {
                println!("hardened pool: a late user is told: {refused}");
                assert!(hardened, "the memory is in use again");
            }
        }
        let stats = pool.stats();
        println!(
            "               {} blocks rest on {} MiB of addresses",
            stats.resting_blocks,
            stats.resting_addresses / MIB,
        );
        drop((next, tenant));
        pool.close()?;
    }
    Ok(())
}
