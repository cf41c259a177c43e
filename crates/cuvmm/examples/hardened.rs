//! Catches a use after free: a program keeps the address of a dropped block. In a plain pool the
//! address shows the next block's memory. In a hardened pool nothing is mapped there, and the
//! driver reports an error.
//!
//! Runs on a GPU, or on the host driver where there is none.
//!
//! `unsafe` is used for the driver's own copy, which takes any address. The safe API has none that
//! does.
#![allow(unsafe_code)]

mod support;

use std::error::Error;

use cuvmm::driver::{DeviceAddress, DriverError, Ordinal};
use cuvmm::{Device, Hardened, Limit, Pool, Stream};

const MIB: u64 = 1 << 20;

/// Reads from a raw address that was kept, as a C program could.
fn late_read(device: &Device, at: DeviceAddress) -> Result<[u8; 4], DriverError> {
    let mut bytes = [0; 4];
    // SAFETY: a read of any address. The driver refuses the copy without harm if nothing is mapped
    // there.
    unsafe {
        device.driver().copy_to_host(Ordinal(0), &mut bytes, at)?;
    }
    Ok(bytes)
}

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
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
            println!("past the end:   {}", over.ok_or("there is no guard")?);
        }
        drop(block);

        // Completes the block's fence, fill included. The next operation unmaps the block.
        stream.synchronize()?;
        let next = tenant.allocate_on(&stream, 2 * MIB)?;
        next.write(0, b"next")?;
        match late_read(&device, kept) {
            Ok(bytes) => {
                let seen = String::from_utf8_lossy(&bytes);
                println!("plain pool:    the stale address reads {seen:?} from another block");
                assert!(
                    !hardened && kept == next.address(),
                    "a hardened pool maps nothing at the stale address"
                );
            }
            Err(refused) => {
                println!("hardened pool: the stale address is refused: {refused}");
                assert!(hardened, "a plain pool reuses the memory");
            }
        }
        let stats = pool.stats();
        println!(
            "               {} blocks rest in {} MiB of addresses",
            stats.resting_blocks,
            stats.resting_addresses / MIB,
        );
        drop((next, tenant));
        pool.close()?;
    }
    Ok(())
}
