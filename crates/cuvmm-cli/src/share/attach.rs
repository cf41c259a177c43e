//! `cuvmm share attach`: memory that another process published, read here.

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
use super::{Where, elements, size};
use cuvmm_cli::terminal::{json, json_line, print, shown};

/// How long the publisher is asked to wait for something newer before it is asked again.
const LONG: Duration = Duration::from_secs(3600);

/// Bytes read at a time.
const CHUNK: u64 = 16 << 20;

/// Attach what another process of this user publishes, to be read
///
/// The time to attach counts from before connecting until the memory is mapped, the device being open
/// already. Nothing is copied: the driver's own figure of free memory shows it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm share attach gpt2
  cuvmm share attach gpt2 --verify gpt2.safetensors
  cuvmm share attach gpt2 --dump wte.weight --count 4")]
pub(super) struct Args {
    /// The name under which it is published
    name: String,

    /// The publisher's socket [default: that of the only publisher of the name in the folder where `list` looks]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Compare manifest and bytes with this safetensors file
    #[arg(long, value_name = "FILE")]
    verify: Option<PathBuf>,

    /// Show the first elements of a tensor
    #[arg(long, value_name = "TENSOR")]
    dump: Option<String>,

    /// How many elements to show
    #[arg(long, value_name = "N", default_value_t = 8, requires = "dump")]
    count: u64,

    /// List all tensors instead of the first ten
    #[arg(long)]
    all: bool,

    /// Keep it, and attach every newer version, until the publisher goes
    ///
    /// What is attached then is read once more, and compared if it is to be.
    #[arg(long)]
    watch: bool,

    /// Print one JSON object; with --watch one on a line for each version, and one for the end
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    at: Where,
}

impl Args {
    /// # Errors
    /// Options that cannot be meant, a name with no publisher or more than one, what cannot be
    /// attached, and bytes that are not those of the file.
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        if let Some(path) = &self.verify {
            // It is opened again to be compared with; a wrong one should not be found out after attaching.
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

/// The command line, the device and the publisher of an attachment.
struct Reader<'a> {
    args: &'a Args,
    device: &'a Device,
    stream: &'a Stream,
    publisher: &'a Publisher,
}

impl Reader<'_> {
    /// Attaches the newest version over a connection of its own, looks at it and tells.
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

    /// Attaches newer versions until the publisher goes, and looks at the last one once more then.
    fn watch(&self, subscriber: &mut Subscriber, first: Publication) -> anyhow::Result<()> {
        let mut held = first;
        loop {
            match subscriber.wait_for_newer(&held, LONG) {
                Ok(None) => {}
                // The old one goes when the new one is there.
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
            size(bytes)
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

    /// Compares all with the file that was named.
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
