//! Shares memory between two processes without a copy: a vector for reading and a region for
//! writing. The memory outlives the process that created it.
//!
//! Runs on a GPU, or on the host driver where there is none. The giver is a second process
//! that runs this program again.

#[path = "support/process.rs"]
mod process;
mod support;

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use cuvmm::driver::HandleTypes;
use cuvmm::share::Listener;
use cuvmm::{Access, Attachment, Channel, Device, DeviceVec, Offer, Region, Stream};

const MIB: u64 = 1 << 20;
const NUMBERS: u64 = 64 * MIB / 4;
const REPLY: &[u8] = b"the sum is known";
/// Time limit for the other process, which may have to create a context on a GPU first.
const PATIENCE: Duration = Duration::from_secs(60);
/// Name of the test that runs the example.
const TEST: &str = "what_one_process_gives_another_keeps";

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    match process::socket() {
        None => take(&device),
        Some(socket) => give(&device, &socket),
    }
}

/// Creates memory in the second process, sends it, and returns once the answer appears in it.
fn give(device: &Device, socket: &Path) -> Result<(), Box<dyn Error>> {
    let stream = Stream::new(device)?;
    // Memory can be exported only if it was created as shareable.
    let region = |size| {
        Region::builder(device, size)
            .shareable(HandleTypes::POSIX_FD)
            .reserve()
    };
    let before = device.memory_info()?.free;
    let mut numbers = DeviceVec::<f32>::from_region(region(4 * NUMBERS)?, &stream)?;
    numbers.extend_from_slice(&vec![0.5; usize::try_from(NUMBERS)?])?;
    let mut board = region(2 * MIB)?;
    board.commit(0..board.size())?;
    let taken = before - device.memory_info()?.free;
    println!("giver: uses {} MiB of device memory", taken / MIB);

    let mut channel = Channel::connect(socket)?;
    channel.set_timeout(PATIENCE);
    channel.send(&Offer::vec(&numbers)?)?;
    channel.send(&Offer::region(&board, 0..board.size())?.read_write())?;

    let begun = Instant::now();
    let mut seen = [0; REPLY.len()];
    while seen != *REPLY {
        if begun.elapsed() > PATIENCE {
            return Err("timed out: no answer was written".into());
        }
        std::thread::sleep(Duration::from_millis(1));
        board.read(&stream, 0, &mut seen)?;
    }
    println!("giver: received {:?}", String::from_utf8_lossy(&seen));
    Ok(())
}

/// Receives the memory in the first process, reads it, answers, and reads on after the giver has
/// ended.
fn take(device: &Device) -> Result<(), Box<dyn Error>> {
    let stream = Stream::new(device)?;
    let folder = tempfile::tempdir()?;
    let listener = Listener::bind(folder.path().join("socket"))?;
    let mut giver = process::again(TEST, listener.path())?.spawn()?;
    let mut channel = listener.accept(PATIENCE)?;
    channel.set_timeout(PATIENCE);

    // On a GPU this figure covers the whole device, on the host driver only this process.
    let before = device.memory_info()?.free;
    let numbers = channel.recv(&Attachment::builder(device))?;
    let board = channel.recv(&Attachment::builder(device).read_write())?;
    let after = device.memory_info()?.free;
    println!(
        "taker: attached {} MiB of process {}, using {} MiB more of device memory",
        (numbers.held() + board.held()) / MIB,
        channel.peer().pid,
        before.saturating_sub(after) / MIB
    );
    assert_eq!(
        (numbers.access(), board.access()),
        (Access::Read, Access::ReadWrite)
    );
    let view = numbers.view::<f32>()?;
    println!(
        "taker: a kernel sees {} elements at {}",
        view.len(),
        view.address()
    );
    let refused = numbers.write(&stream, 0, &[0; 4]);
    println!(
        "taker: refused: {}",
        refused.err().ok_or("a read-only attachment was written")?
    );

    let sum = sum(&numbers, &stream)?;
    board.write(&stream, 0, REPLY)?;
    process::ended(&mut giver)?;
    assert_eq!(
        self::sum(&numbers, &stream)?,
        sum,
        "the memory outlives the giver"
    );
    println!("taker: the giver has ended, and the sum is still {sum}");
    Ok(())
}

fn sum(numbers: &Attachment, stream: &Stream) -> Result<f32, Box<dyn Error>> {
    let mut bytes = vec![0; usize::try_from(4 * MIB)?];
    numbers.read(stream, 4 * NUMBERS - 4 * MIB, &mut bytes)?;
    let floats = bytes.as_chunks::<4>().0.iter();
    Ok(floats.map(|&four| f32::from_ne_bytes(four)).sum())
}
