//! `cuvmm share attach`: attaches and reads memory that another process publishes.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use cuvmm::error::ShareError;
use cuvmm::share::{Publication, Subscriber};
use cuvmm::{Attachment, Device, Stream};
use serde_json::Value;

use super::file::Weights;
use super::publishers::{self, Publisher};
use super::shown::{Attached, Dump};
use super::{Where, elements};
use cuvmm_command::size::iec;
use cuvmm_command::terminal::{json, json_line, print, shown};

/// The timeout of one request for a newer version, after which the request is repeated.
const LONG: Duration = Duration::from_secs(3600);

const CHUNK: u64 = 16 << 20;

/// Attach memory that another process of this user publishes, for reading
///
/// The time to attach is measured from before connecting until the memory is mapped; the device is
/// open already. Nothing is copied, as the driver's figure of free memory shows.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm share attach gpt2
  cuvmm share attach gpt2 --verify gpt2.safetensors
  cuvmm share attach gpt2 --dump wte.weight --count 4")]
pub(super) struct Args {
    /// The name of the publication
    name: String,

    /// The publisher's socket [default: found by the name, in the folder where `list` looks]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Compare manifest and bytes with this safetensors file
    #[arg(long, value_name = "FILE")]
    verify: Option<PathBuf>,

    /// Show the first elements of a tensor
    #[arg(long, value_name = "TENSOR")]
    dump: Option<String>,

    /// The number of elements to show
    #[arg(long, value_name = "N", default_value_t = 8, requires = "dump")]
    count: u64,

    /// List all tensors instead of the first ten
    #[arg(long)]
    all: bool,

    /// Keep the memory attached, and attach every newer version, until the publisher ends
    ///
    /// The last version is then read once more, and compared again if --verify is given.
    #[arg(long)]
    watch: bool,

    /// Print one JSON object; with --watch, one line of JSON for each version and one at the end
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    at: Where,
}

impl Args {
    /// # Errors
    /// Wrong options, no publisher or several, memory that cannot be attached, or bytes that differ
    /// from the file.
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        if let Some(path) = &self.verify {
            // Refuses an unusable file before attaching. The comparison opens the file again.
            drop(Weights::open(path)?);
        }
        let device = self.at.open()?;
        let stream = Stream::new(&device)?;
        let publisher = publishers::of(&self.name, self.socket.as_deref())?;
        let reader = Reader {
            args: &self,
            device: &device,
            stream: &stream,
            publisher: &publisher,
        };
        let (mut subscriber, publication) = reader.attach()?;
        if self.watch {
            reader.watch(&mut subscriber, publication)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn object(&self, object: &Value) -> anyhow::Result<()> {
        let text = match self.watch {
            true => json_line(object)?,
            false => json(object)?,
        };
        print(&text)
    }
}

struct Reader<'a> {
    args: &'a Args,
    device: &'a Device,
    stream: &'a Stream,
    publisher: &'a Publisher,
}

impl Reader<'_> {
    /// Attaches the newest version over a new connection, verifies it, and prints the result.
    fn attach(&self) -> anyhow::Result<(Subscriber, Publication)> {
        let free_before = self.device.memory_info()?.free;
        let begun = Instant::now();
        let socket = &self.publisher.socket;
        let mut subscriber = publishers::naming(socket, Subscriber::connect(socket))?;
        let how = Attachment::builder(self.device);
        let publication = subscriber.attach(&self.args.name, &how).with_context(|| {
            format!(
                "{:?} cannot be attached to {}",
                self.args.name,
                self.device()
            )
        })?;
        let attached = begun.elapsed();
        let memory = publication.memory();
        let first = memory.runs().first().map_or(0, |run| run.start);
        memory.read(self.stream, first, &mut [0])?;
        let read = begun.elapsed();
        let free_after = self.device.memory_info()?.free;
        let dump = match &self.args.dump {
            Some(tensor) => Some(self.dump(&publication, tensor)?),
            None => None,
        };
        self.verify(&publication)?;
        let told = Attached {
            publisher: self.publisher,
            publication: &publication,
            attach_us: micros(attached),
            first_byte_us: micros(read),
            free_before,
            free_after,
            verified: self.args.verify.as_deref(),
            dump,
        };
        match self.args.json {
            true => self.args.object(&told.object())?,
            false => print(&told.text(self.args.all))?,
        }
        Ok((subscriber, publication))
    }

    fn device(&self) -> String {
        let kind = self.device.driver().kind().name();
        format!("device {} of the {kind} driver", self.device.ordinal().0)
    }

    /// Attaches newer versions until the publisher ends, then reads and verifies the last version
    /// again.
    fn watch(&self, subscriber: &mut Subscriber, first: Publication) -> anyhow::Result<()> {
        let mut held = first;
        loop {
            match subscriber.wait_for_newer(&held, LONG) {
                Ok(None) => {}
                // The old version is detached after the new one is attached.
                Ok(Some(_)) => (*subscriber, held) = self.attach()?,
                Err(ShareError::NotFound { .. } | ShareError::Channel(_)) => break,
                Err(error) => return Err(error.into()),
            }
        }
        self.read_all(&held)?;
        self.verify(&held)?;
        let (version, bytes) = (held.version(), held.memory().held());
        if self.args.json {
            return self.args.object(&serde_json::json!({
                "publisher": "gone",
                "version": version,
                "bytes": bytes,
                "verified": self.args.verify.is_some(),
            }));
        }
        print(&format!(
            "the publisher has gone; all {} of version {version} are still here\n",
            iec(bytes)
        ))
    }

    fn dump(&self, publication: &Publication, name: &str) -> anyhow::Result<Dump> {
        let tensor = publication.manifest().tensor(name);
        let tensor = tensor.with_context(|| format!("there is no tensor {name:?}"))?;
        let wanted = self
            .args
            .count
            .saturating_mul(elements::width(&tensor.dtype));
        let mut bytes = vec![0; usize::try_from(wanted.min(tensor.size))?];
        publication
            .memory()
            .read(self.stream, tensor.offset, &mut bytes)?;
        Ok(Dump {
            tensor: name.to_owned(),
            elements: elements::shown(&tensor.dtype, &bytes),
        })
    }

    /// Compares manifest and bytes with the file of `--verify`, if given.
    fn verify(&self, publication: &Publication) -> anyhow::Result<()> {
        let Some(path) = &self.args.verify else {
            return Ok(());
        };
        let weights = Weights::open(path)?;
        let shown = shown(path);
        ensure!(
            weights.manifest() == publication.manifest(),
            "the manifest of {:?} is not that of {shown}",
            publication.name()
        );
        let mut ours = vec![];
        weights.each_chunk(|offset, theirs| {
            ours.resize(theirs.len(), 0);
            publication.memory().read(self.stream, offset, &mut ours)?;
            match ours
                .iter()
                .zip(theirs)
                .position(|(one, other)| one != other)
            {
                None => Ok(()),
                Some(index) => Err(differs(publication, offset + index as u64))
                    .with_context(|| format!("this is not {shown}")),
            }
        })
    }

    fn read_all(&self, publication: &Publication) -> anyhow::Result<()> {
        let memory = publication.memory();
        let mut bytes = vec![0; CHUNK as usize];
        for run in memory.runs() {
            for offset in run.clone().step_by(CHUNK as usize) {
                let part = bytes.get_mut(..(run.end - offset).min(CHUNK) as usize);
                memory.read(self.stream, offset, part.unwrap_or_default())?;
            }
        }
        Ok(())
    }
}

fn differs(publication: &Publication, offset: u64) -> anyhow::Error {
    let tensors = &publication.manifest().tensors;
    let tensor = tensors
        .iter()
        .find(|tensor| tensor.range().contains(&offset));
    let name = tensor.map_or("", |tensor| &tensor.name);
    anyhow!("byte {offset} differs, in tensor {name:?}")
}

fn micros(time: Duration) -> f64 {
    (time.as_nanos() as f64 / 100.0).round() / 10.0
}
