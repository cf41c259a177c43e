//! Publishes weights that one process loads and several processes read, as complete versions under
//! a name.
//!
//! Runs on a GPU, or on the host driver where there is none. Each reader is a process that
//! runs this program again.

#[path = "support/output.rs"]
mod output;
#[path = "support/process.rs"]
mod process;
mod support;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::time::Duration;

use cuvmm::driver::HandleTypes;
use cuvmm::share::{Manifest, Publication, Publisher, Subscriber, Tensor};
use cuvmm::{Attachment, Device, Region, Stream};

use self::output::Output;

const MIB: u64 = 1 << 20;
const READERS: usize = 3;
/// Time limit for a reader, which may have to create a context on a GPU first.
const PATIENCE: Duration = Duration::from_secs(60);
/// Name of the test that runs the example.
const TEST: &str = "several_processes_read_what_one_publishes";

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

/// Publishes two versions and starts the readers.
fn publish(device: &Device) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let publisher = Publisher::bind(folder.path().join("models"))?;
    let (manifest, memory) = weights(device, 1)?;
    publisher.publish("toy", manifest, memory)?;

    let mut readers = vec![];
    for _ in 0..READERS {
        readers.push(Output::of(process::again(TEST, publisher.path())?)?);
    }
    for reader in &mut readers {
        reader.repeat("reader")?;
    }

    // The readers keep the first version and are notified of the second, which is never visible in
    // part.
    let (manifest, memory) = weights(device, 2)?;
    let version = publisher.publish("toy", manifest, memory)?;
    println!(
        "publisher: {:?} is now at version {version}",
        publisher.list()[0].name
    );
    for reader in &mut readers {
        reader.repeat("reader")?;
        process::ended(&mut reader.process)?;
    }
    Ok(())
}

/// Creates two tensors filled with the number of a training step.
fn weights(device: &Device, step: u8) -> Result<(Manifest, Region), Box<dyn Error>> {
    let stream = Stream::new(device)?;
    let mut region = Region::builder(device, 32 * MIB)
        .shareable(HandleTypes::POSIX_FD)
        .reserve()?;
    region.commit(0..region.size())?;
    let tensor = |name: &str, offset, rows, columns| Tensor {
        name: name.to_owned(),
        dtype: "F32".to_owned(),
        shape: vec![rows, columns],
        offset,
        size: 4 * rows * columns,
    };
    let manifest = Manifest {
        tensors: vec![
            tensor("embedding", 0, 1 << 16, 64),
            tensor("head", 16 * MIB, 64, 1 << 10),
        ],
        metadata: BTreeMap::from([("step".to_owned(), step.to_string())]),
    };
    for tensor in &manifest.tensors {
        let numbers = f32::from(step)
            .to_ne_bytes()
            .repeat((tensor.size / 4) as usize);
        region.write(&stream, tensor.offset, &numbers)?;
    }
    Ok((manifest, region))
}

/// Reads the first version, waits for the second, and holds both for a while.
fn read(device: &Device, socket: &Path) -> Result<(), Box<dyn Error>> {
    let stream = Stream::new(device)?;
    let how = Attachment::builder(device);
    let mut subscriber = Subscriber::connect(socket)?;
    let first = subscriber.attach("toy", &how)?;
    tell(&first);
    let newer = subscriber.wait_for_newer(&first, PATIENCE)?;
    assert_eq!(newer, Some(2), "version 2 was announced");
    let second = subscriber.attach("toy", &how)?;
    let last = |publication: &Publication, tensor: &str| {
        let range = publication.manifest().tensor(tensor).map(Tensor::range);
        let end = range.ok_or("no such tensor")?.end;
        let mut number = [0; 4];
        publication.memory().read(&stream, end - 4, &mut number)?;
        Ok::<f32, Box<dyn Error>>(f32::from_ne_bytes(number))
    };
    for tensor in ["embedding", "head"] {
        assert_eq!(
            last(&first, tensor)?,
            1.0,
            "the first version does not change"
        );
        assert_eq!(last(&second, tensor)?, 2.0);
    }
    // A typed view passes the address and the length to a kernel.
    assert_eq!(second.view::<f32>("head")?.len(), 1 << 16);
    let refused = second.view::<f64>("head").err().ok_or("the type differs")?;
    println!("{refused}");
    tell(&second);
    Ok(())
}

fn tell(publication: &Publication) {
    println!(
        "reader {}: version {}, step {}, {} MiB at {}",
        std::process::id(),
        publication.version(),
        publication.manifest().metadata["step"],
        publication.memory().held() / MIB,
        publication.memory().address()
    );
}
