//! Memory that one process gives to another, without a copy: a vector to be read, and a region to be
//! written. Who gave it ends first.
//!
//! Runs on the host; on a GPU with `CUVMM_DRIVER=cuda`. The giver is this program again, in a process
//! of its own.

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
/// A second process may have to make a context on a GPU first.
const PATIENCE: Duration = Duration::from_secs(60);
/// What runs the example as a test.
const TEST: &str = "what_one_process_gives_another_keeps";

/// Runs the example.
///
/// # Errors
/// Whatever the library says.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    match process::socket() {
        None => take(&device),
        Some(socket) => give(&device, &socket),
    }
}

/// The second process: makes memory, gives it, and ends when it sees the answer in it.
fn give(device: &Device, socket: &Path) -> Result<(), Box<dyn Error>> {
    let stream = Stream::new(device)?;
    // What is to be shared is made for it: whether it can be exported is decided with its creation.
    let region = |size| {
        Region::builder(device, size)
            .shareable(HandleTypes::POSIX_FD)
            .reserve()
    };
    let before = device.memory_info()?.free;
    let mut numbers = DeviceVec::<f32>::over(region(4 * NUMBERS)?, &stream)?;
    numbers.try_extend_from_slice(&vec![0.5; usize::try_from(NUMBERS)?])?;
    let mut board = region(2 * MIB)?;
    board.commit(0..board.size())?;
    let taken = before - device.memory_info()?.free;
    println!("giver: {} MiB of the device for it", taken / MIB);

    let mut channel = Channel::connect(socket)?;
    channel.set_timeout(PATIENCE);
    channel.give(&Offer::vec(&numbers)?)?;
    channel.give(&Offer::region(&board, 0..board.size())?.read_write())?;

    let begun = Instant::now();
    let mut seen = [0; REPLY.len()];
    while seen != *REPLY {
        if begun.elapsed() > PATIENCE {
            return Err("nothing was written".into());
        }
        std::thread::sleep(Duration::from_millis(1));
        board.read(&stream, 0, &mut seen)?;
    }
    println!("giver: {:?}", String::from_utf8_lossy(&seen));
    Ok(())
}

/// The first process: waits for the giver, reads what it gave, writes, and reads on without it.
fn take(device: &Device) -> Result<(), Box<dyn Error>> {
    let stream = Stream::new(device)?;
    let folder = tempfile::tempdir()?;
    let listener = Listener::bind(folder.path().join("socket"))?;
    let mut giver = process::again(TEST, listener.path())?.spawn()?;
    let mut channel = listener.accept(PATIENCE)?;
    channel.set_timeout(PATIENCE);

    // The driver's own figure of the whole device, or of this process where it is the host.
    let before = device.memory_info()?.free;
    let numbers = channel.take(&Attachment::builder(device))?;
    let board = channel.take(&Attachment::builder(device).read_write())?;
    let after = device.memory_info()?.free;
    println!(
        "taker: {} MiB of process {}, {} MiB of the device for it",
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
        "taker: a kernel sees {} numbers at {}",
        view.len(),
        view.address()
    );
    let refused = numbers.write(&stream, 0, &[0; 4]);
    println!("taker: {}", refused.err().ok_or("it could be written")?);

    let sum = sum(&numbers, &stream)?;
    board.write(&stream, 0, REPLY)?;
    process::ended(&mut giver)?;
    assert_eq!(
        self::sum(&numbers, &stream)?,
        sum,
        "it lives on without its giver"
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
