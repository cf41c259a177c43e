//! A table that several versions have in common: each version is a fork of the one before, shares what
//! did not change, and grows at its own address.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`.

mod support;

use std::error::Error;

use cuvmm::error::MemoryError;
use cuvmm::{Block, Device, Limit, Pool, Stream};

const MIB: u64 = 1 << 20;

/// Rows of the table are pages of so many bytes.
const PAGE: u64 = MIB;

/// Writes pages of a version, each full of the version's letter.
fn write(version: &Block, letter: u8, pages: std::ops::Range<u64>) -> Result<(), Box<dyn Error>> {
    let page = vec![letter; PAGE as usize];
    for index in pages {
        version.write(index * PAGE, &page)?;
    }
    Ok(())
}

/// A letter for each page.
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
/// Whatever the library says.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let limit = Limit::Bytes(256 * MIB);
    let pool = Pool::builder(&device).limit(limit).build()?;
    let tenant = pool.tenant("tables").register()?;
    let stream = Stream::new(&device)?;

    // Forks share whole extents, so these are small: 4 MiB.
    let table = tenant.block(16 * MIB).capacity(64 * MIB);
    let table = table.largest_extent(4 * MIB).home_stream(&stream);
    let first = table.allocate()?;
    write(&first, b'a', 0..16)?;

    // The second version keeps the first ten pages, and has memory for two more than the first.
    let mut second = first.fork(10 * MIB, 18 * MIB)?;
    write(&second, b'b', 10..18)?;
    // The third one differs from its sixth page on.
    let third = second.fork(6 * MIB, 12 * MIB)?;
    write(&third, b'c', 6..12)?;
    second.grow_to(20 * MIB)?;
    write(&second, b'b', 18..20)?;
    for (name, version) in [("first", &first), ("second", &second), ("third", &third)] {
        println!(
            "{name:>6} at {}: {:<20}  the first {} MiB are read only",
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
        "{} MiB of memory, {} of them shared, for versions of {} MiB in all",
        stats.committed / MIB,
        stats.shared / MIB,
        apart / MIB,
    );
    assert!(stats.committed < apart);

    // What several show is written by none of them.
    let refused = first.write(0, b"z");
    assert!(matches!(refused, Err(MemoryError::ReadOnly { .. })));
    // A version that shrinks into it and grows again has its own from there on.
    second.shrink_to(3 * MIB)?;
    second.grow_to(6 * MIB)?;
    write(&second, b'd', 3..6)?;
    println!("second at {}: {}", second.address(), text(&second)?);
    assert_eq!(text(&second)?, "aaaddd");
    assert_eq!(text(&first)?, "aaaaaaaaaaaaaaaa");
    assert_eq!(text(&third)?, "aaaaaacccccc");
    Ok(())
}
