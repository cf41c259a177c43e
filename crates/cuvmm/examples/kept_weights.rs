//! Keeps weights while the server that loaded them is killed and started again: the second server
//! attaches them and loads nothing.
//!
//! Runs on a GPU, or on the host driver where there is none. The servers are processes that run
//! this program again. The first process is the keeper; `cuvmm share keep` is one too.

#[path = "support/output.rs"]
mod output;
#[path = "support/process.rs"]
mod process;
mod support;

use std::error::Error;
use std::io;
use std::path::Path;
use std::time::Instant;

use cuvmm::driver::HandleTypes;
use cuvmm::error::ShareError;
use cuvmm::share::{Keeper, Manifest, Publication, Publisher, Subscriber};
use cuvmm::{Attachment, Device, Region, Stream};

use self::output::Output;

const MIB: u64 = 1 << 20;
/// The size of the weights.
const WEIGHTS: u64 = 64 * MIB;
/// Name of the test that runs the example.
const TEST: &str = "a_restarted_server_has_its_weights";

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    match process::socket() {
        None => keep(),
        Some(keeper) => serve(&keeper),
    }
}

/// Keeps what servers give, and kills the first server. Opens no device.
fn keep() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let keeper = Keeper::bind(folder.path().join("keeper"), None)?;
    let mut first = Output::of(process::again(TEST, keeper.path())?)?;
    first.repeat("server")?;
    first.process.kill()?;
    println!(
        "keeper: server {}: {}",
        first.process.id(),
        first.process.wait()?
    );
    println!(
        "keeper: has version {} of {:?}",
        keeper.list()[0].version,
        keeper.list()[0].name
    );

    let mut second = Output::of(process::again(TEST, keeper.path())?)?;
    second.repeat("server")?;
    drop(second.process.stdin.take());
    process::ended(&mut second.process)?;
    assert!(
        keeper.release("model"),
        "the memory goes back to the driver"
    );
    Ok(())
}

/// Serves until the keeper closes the standard input.
fn serve(keeper: &Path) -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let begun = Instant::now();
    let mut publisher = None;
    let model = match attach(&device, keeper) {
        Err(ShareError::NotFound(_)) => {
            let loaded = load(&device)?;
            let socket = keeper.with_extension(std::process::id().to_string());
            let publisher = publisher.insert(Publisher::bind(socket)?);
            publisher.publish("model", Manifest::default(), loaded)?;
            publisher.keep("model", keeper)?;
            attach(&device, keeper)?
        }
        attached => attached?,
    };
    let how = if publisher.is_some() {
        "loaded"
    } else {
        "attached"
    };
    let stream = Stream::new(&device)?;
    let mut last = [0];
    model.memory().read(&stream, WEIGHTS - 1, &mut last)?;
    assert_eq!(last, [7]);
    let took = begun.elapsed().as_micros();
    println!(
        "server {}: {how} {} MiB in {took} us",
        std::process::id(),
        WEIGHTS / MIB
    );
    io::copy(&mut io::stdin(), &mut io::sink())?;
    Ok(())
}

fn attach(device: &Device, keeper: &Path) -> Result<Publication, ShareError> {
    Subscriber::connect(keeper)?.attach("model", &Attachment::builder(device))
}

/// Stands for reading a checkpoint.
fn load(device: &Device) -> Result<Region, Box<dyn Error>> {
    let mut region = Region::builder(device, WEIGHTS)
        .shareable(HandleTypes::POSIX_FD)
        .reserve()?;
    region.commit(0..WEIGHTS)?;
    let bytes = vec![7; usize::try_from(WEIGHTS)?];
    region.write(&Stream::new(device)?, 0, &bytes)?;
    Ok(region)
}
