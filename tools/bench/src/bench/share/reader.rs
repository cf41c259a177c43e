//! The reader process: attaches a publication through cuvmm and by hand, alternately, and prints
//! its figures.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;

use anyhow::{bail, ensure};
use cuvmm::driver::Call;
use cuvmm::share::{Publication, Subscriber};
use cuvmm::{Attachment, Device, Stream};
use serde::{Deserialize, Serialize};

use super::sender::fetch;
use crate::bench::by_hand::{Hand, Range};
use crate::bench::current::Current;
use crate::bench::options::PLAYED;
use crate::bench::pairs::alternate;
use crate::bench::queue::waited;
use cuvmm_command::drivers::{Choice, Concrete, StandIn};
use cuvmm_command::terminal::{json_line, print};
use cuvmm_command::watch::wall;

/// Read what a bench run publishes; started by the run
#[derive(Debug, clap::Args)]
pub(crate) struct Reader {
    #[arg(long, value_enum)]
    pub(super) driver: Choice,

    #[arg(long)]
    pub(super) device: u32,

    /// The publisher's socket
    #[arg(long)]
    pub(super) publisher: PathBuf,

    /// The name of the publication
    #[arg(long)]
    pub(super) name: String,

    /// The socket that sends the descriptors by hand
    #[arg(long)]
    pub(super) sender: PathBuf,

    /// The size of each extent sent there, in bytes
    #[arg(long)]
    pub(super) extent: u64,

    /// The number of extents
    #[arg(long)]
    pub(super) count: usize,

    #[arg(long)]
    pub(super) pairs: usize,
}

/// The driver calls of an attachment, with their names in the report.
pub(super) const ATTACHING: [(Call, &str); 5] = [
    (Call::MemAddressReserve, "reserve_us"),
    (Call::MemImportFromShareableHandle, "import_us"),
    (Call::MemGetAllocationPropertiesFromHandle, "properties_us"),
    (Call::MemMap, "map_us"),
    (Call::MemSetAccess, "set_access_us"),
];

/// The reader's figures. Times are in nanoseconds unless stated otherwise.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Reading {
    pub(super) ours: Vec<f64>,
    pub(super) by_hand: Vec<f64>,
    /// The time of each call of [`ATTACHING`] per attachment, in microseconds.
    pub(super) calls: Vec<f64>,
    /// Time to open the device, which creates a context on a GPU.
    pub(super) opened: f64,
    /// Free device memory by the driver, before and during one attachment.
    pub(super) free_before: u64,
    pub(super) free_within: u64,
}

impl Reader {
    /// Starts the reader process and waits for its figures.
    ///
    /// # Errors
    /// The process fails; the error includes its standard error.
    pub(super) fn start(&self) -> anyhow::Result<Reading> {
        let path = |path: &Path| path.display().to_string();
        let output = Command::new(std::env::current_exe()?)
            .arg("reader")
            .args(["--driver", self.driver.word()])
            .args(["--device", &self.device.to_string()])
            .args(["--publisher", &path(&self.publisher)])
            .args(["--name", &self.name])
            .args(["--sender", &path(&self.sender)])
            .args(["--extent", &self.extent.to_string()])
            .args(["--count", &self.count.to_string()])
            .args(["--pairs", &self.pairs.to_string()])
            .stdin(Stdio::null())
            .output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("the other process: {}, {}", output.status, said.trim());
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let opened = self.driver.open_as(&StandIn {
            devices: Some(PLAYED),
            ..StandIn::default()
        })?;
        let open = || Device::open(Arc::clone(&opened.driver), self.device);
        let (took, device) = wall(open)?;
        let stream = Stream::new(&device)?;
        let _current = match &opened.concrete {
            Concrete::Cuda(driver) => Some(Current::enter(Arc::clone(driver), device.ordinal())?),
            _ => None,
        };
        let hand = Hand::new(Arc::clone(&opened.driver), device.ordinal());

        let free_before = device.memory_info()?.free;
        let publication = self.attach(&device, &stream)?;
        let free_within = device.memory_info()?.free;
        let extents = publication.memory().extents().len();
        ensure!(extents == self.count, "{extents} extents were published");
        drop(publication);

        let before = device.calls();
        let ours = || {
            let (took, publication) = wall(|| self.attach(&device, &stream))?;
            drop(publication);
            Ok(took)
        };
        let by_hand = || {
            let (took, range) = wall(|| self.attach_by_hand(&hand, &stream))?;
            range.give_back()?;
            Ok(took)
        };
        let (ours, by_hand) = alternate(self.pairs, ours, by_hand)?;
        let made = device.calls().since(&before);
        let calls = ATTACHING.map(|(call, _)| {
            let micros = made.time(call).as_secs_f64() * 1e6;
            micros / ours.values().len().max(1) as f64
        });
        let reading = Reading {
            calls: calls.to_vec(),
            ours: ours.values().to_vec(),
            by_hand: by_hand.values().to_vec(),
            opened: took,
            free_before,
            free_within,
        };
        print(&json_line(&reading)?)?;
        Ok(ExitCode::SUCCESS)
    }

    fn attach(&self, device: &Device, stream: &Stream) -> anyhow::Result<Publication> {
        let mut subscriber = Subscriber::connect(&self.publisher)?;
        let publication = subscriber.attach(&self.name, &Attachment::builder(device))?;
        publication.memory().read(stream, 0, &mut [0])?;
        Ok(publication)
    }

    fn attach_by_hand<'a>(&self, hand: &'a Hand, stream: &Stream) -> anyhow::Result<Range<'a>> {
        let mut range = hand.reserve(self.extent * self.count as u64, self.count)?;
        fetch(&self.sender, self.count, |descriptor| {
            range.adopt(hand.import(descriptor.as_fd(), self.extent)?);
            Ok(())
        })?;
        range.map()?;
        let mut byte = [0];
        waited(hand, stream, |queue| {
            queue.download(&mut byte, (&range).into())
        })?;
        Ok(range)
    }
}
