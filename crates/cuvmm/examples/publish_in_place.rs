//! Publishes blocks of a pool where they lie: nothing is copied, and their owner updates them while
//! another process has them attached.
//!
//! Runs on a GPU, or on the host driver where there is none. The reader is a second process that
//! runs this program again.

#[path = "support/output.rs"]
mod output;
#[path = "support/process.rs"]
mod process;
mod support;

use std::error::Error;
use std::io::{self, Write as _};
use std::path::Path;

use cuvmm::driver::HandleTypes;
use cuvmm::share::{Manifest, Offered, Publisher, Subscriber, Tensor};
use cuvmm::{Attachment, Block, Device, Offer, Pool, Stream};

use self::output::Output;

const MIB: u64 = 1 << 20;
/// Name of the test that runs the example.
const TEST: &str = "a_reader_sees_what_is_written_in_place";
/// The tensors, with their sizes in bytes.
const TENSORS: [(&str, u64); 2] = [("weights", 8 * MIB), ("scales", 2 * MIB)];

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    match process::socket() {
        None => publish(&device),
        Some(socket) => read(&device, &socket),
    }
}

/// Publishes two blocks, and writes to them again when the reader has seen them.
fn publish(device: &Device) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let pool = Pool::builder(device)
        .shareable(HandleTypes::POSIX_FD)
        .build()?;
    let tenant = pool.tenant("model").register()?;
    let blocks = TENSORS.map(|(_, size)| tenant.allocate(size));
    let [weights, scales] = blocks;
    let blocks = [weights?, scales?];
    step(&blocks, 1)?;

    let held = tenant.stats().committed;
    let offer = Offer::several(&blocks.each_ref().map(Offered::Block))?;
    let place = |(&(name, size), block): (&(&str, u64), &Block)| {
        Some(Tensor {
            name: name.to_owned(),
            dtype: "U8".to_owned(),
            shape: vec![size],
            offset: offer.offset_of(block.address(), size)?,
            size,
        })
    };
    let tensors: Option<Vec<Tensor>> = TENSORS.iter().zip(&blocks).map(place).collect();
    let manifest = Manifest {
        tensors: tensors.ok_or("a block is not in the offer")?,
        ..Manifest::default()
    };
    let publisher = Publisher::bind(folder.path().join("models"))?;
    publisher.publish_in_place("model", &manifest, offer)?;
    assert_eq!(tenant.stats().committed, held, "nothing more is held");

    let mut reader = Output::of(process::again(TEST, publisher.path())?)?;
    reader.repeat("reader")?;
    // The reader waits, so no kernel of it reads a mixture.
    step(&blocks, 2)?;
    let input = reader.process.stdin.take();
    input
        .ok_or("the standard input is not piped")?
        .write_all(b"\n")?;
    reader.repeat("reader")?;
    process::ended(&mut reader.process)?;

    drop(blocks);
    assert_eq!(
        tenant.stats().committed,
        held,
        "the publication keeps the memory"
    );
    assert!(publisher.withdraw("model"));
    Ok(())
}

/// Fills both blocks with the number of a step. A write is complete when it returns.
fn step(blocks: &[Block], number: u8) -> Result<(), Box<dyn Error>> {
    for block in blocks {
        block.write(0, &vec![number; usize::try_from(block.size())?])?;
    }
    println!("publisher: step {number}");
    Ok(())
}

/// Attaches once, and reads before and after the owner's second step.
fn read(device: &Device, socket: &Path) -> Result<(), Box<dyn Error>> {
    let stream = Stream::new(device)?;
    let mut subscriber = Subscriber::connect(socket)?;
    let model = subscriber.attach("model", &Attachment::builder(device))?;
    for expected in [1, 2] {
        for (name, size) in TENSORS {
            let tensor = model.manifest().tensor(name).ok_or("no such tensor")?;
            let mut last = [0];
            model
                .memory()
                .read(&stream, tensor.offset + size - 1, &mut last)?;
            assert_eq!(last, [expected], "{name}");
        }
        println!("reader {}: step {expected}", std::process::id());
        if expected == 1 {
            io::stdin().read_line(&mut String::new())?;
        }
    }
    Ok(())
}
