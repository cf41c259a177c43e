//! Versions of a table that share memory. Each version is a fork of the previous one, shares the
//! unchanged pages with it, and grows at its own address.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::error::Error;

use cuvmm::error::MemoryError;
use cuvmm::{Block, Device, Limit, Pool, Stream};

const MIB: u64 = 1 << 20;

/// Size of a page of the table in bytes.
const PAGE: u64 = MIB;

/// Fills pages of a version with its letter.
fn write(version: &Block, letter: u8, pages: std::ops::Range<u64>) -> Result<(), Box<dyn Error>> {
    let page = vec![letter; PAGE as usize];
    for index in pages {
        version.write(index * PAGE, &page)?;
    }
    Ok(())
}

/// Returns one letter per page.
fn text(version: &Block) -> Result<String, Box<dyn Error>> {
    let mut letters = String::new();
    for index in 0..version.size() / PAGE {
        let mut letter = [0];
        version.read((index + 1) * PAGE - 1, &mut letter)?;
        letters.push(letter[0].into());
    }
    Ok(letters)
}

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let limit = Limit::Bytes(256 * MIB);
    let pool = Pool::builder(&device).limit(limit).build()?;
    let tenant = pool.tenant("tables").register()?;
    let stream = Stream::new(&device)?;

    // Forks share whole extents, so the extents are kept small: 4 MiB.
    let table = tenant.block(16 * MIB).capacity(64 * MIB);
    let table = table.largest_extent(4 * MIB).home_stream(&stream);
    let first = table.allocate()?;
    write(&first, b'a', 0..16)?;

    // The second version keeps the first ten pages and has memory for eight pages of its own.
    let mut second = first.fork(10 * MIB, 18 * MIB)?;
    write(&second, b'b', 10..18)?;
    // The third version differs from the second from page 6 on.
    let third = second.fork(6 * MIB, 12 * MIB)?;
    write(&third, b'c', 6..12)?;
    second.grow_to(20 * MIB)?;
    write(&second, b'b', 18..20)?;
    for (name, version) in [("first", &first), ("second", &second), ("third", &third)] {
        println!(
            "{name:>6} at {}: {:<20}  the first {} MiB are read-only",
            version.address(),
            text(version)?,
            version.read_only() / MIB,
        );
    }
    assert_eq!(text(&first)?, "aaaaaaaaaaaaaaaa");
    assert_eq!(text(&second)?, "aaaaaaaaaabbbbbbbbbb");
    assert_eq!(text(&third)?, "aaaaaacccccc");

    let stats = pool.stats();
    let apart = first.size() + second.size() + third.size();
    println!(
        "{} MiB of memory, {} MiB of it shared, back {} MiB of versions",
        stats.committed / MIB,
        stats.shared / MIB,
        apart / MIB,
    );
    assert!(stats.committed < apart);

    // No version can write to memory that it shares.
    let refused = first.write(0, b"z");
    assert!(matches!(refused, Err(MemoryError::ReadOnly { .. })));
    // A version that shrinks into shared memory and grows again gets memory of its own there.
    second.shrink_to(3 * MIB)?;
    second.grow_to(6 * MIB)?;
    write(&second, b'd', 3..6)?;
    println!("second at {}: {}", second.address(), text(&second)?);
    assert_eq!(text(&second)?, "aaaddd");
    assert_eq!(text(&first)?, "aaaaaaaaaaaaaaaa");
    assert_eq!(text(&third)?, "aaaaaacccccc");
    Ok(())
}
