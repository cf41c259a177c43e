//! `cuvmm share publish`: the tensors of files as memory that other processes attach.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use cuvmm::driver::HandleTypes;
use cuvmm::share::Publisher;
use cuvmm::{Device, Region, Stream};

use super::file::{Stamp, Weights};
use super::stop::{Stop, Stopped};
use super::{Where, folder, publishers, size};
use cuvmm_cli::command::usage;
use cuvmm_cli::files;
use cuvmm_cli::terminal::{self, chain, counted, print, shown};
use cuvmm_cli::watch::{in_words, nanos};

/// Nothing of a version is ever given back alone, and each reader pays for each extent: so they are as
/// large as they can be.
const LARGEST_EXTENT: u64 = 64 << 30;

/// How often a file that is followed is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// Publish the tensors of safetensors files until Ctrl-C
///
/// Each file is read into memory of the device once, in few large extents, and published whole under a
/// name. What lies where is as in the file. Ends at SIGINT, SIGTERM or SIGHUP, and removes its socket
/// then; readers keep what they have attached. A second signal ends it at once, and leaves the socket
/// for the next `list` to remove.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm share publish gpt2.safetensors
  cuvmm share publish --follow --name model weights.safetensors")]
pub(super) struct Args {
    /// The files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// The name to publish under, where there is one file [default: the file's, without its ending]
    #[arg(long)]
    name: Option<String>,

    /// Where to listen [default: a socket of this process in the folder where `list` looks]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Publish a file again when it was replaced, as a newer version
    ///
    /// The memory for both versions is needed meanwhile. Replace a file by renaming another over it:
    /// one that is written in place is read as soon as it has not changed for a quarter of a second.
    #[arg(long)]
    follow: bool,

    #[command(flatten)]
    at: Where,
}

impl Args {
    /// # Errors
    /// Options that cannot be meant, and the first file that cannot be published. What goes wrong with
    /// a newer version is told, and the one before stays.
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let mut sources = self.sources()?;
        let all = sources.iter().map(Source::open);
        let all = all.collect::<anyhow::Result<Vec<_>>>()?;
        let stop = Stop::on_signals()?;
        let device = self.at.open()?;
        let socket = match self.socket {
            Some(socket) => socket,
            None => folder::own_socket()?,
        };
        let publisher = publishers::naming(&socket, Publisher::bind(&socket))?;
        let press = Press {
            stream: Stream::new(&device)?,
            device,
            publisher,
            stop,
        };
        for (source, weights) in sources.iter_mut().zip(all) {
            press.publish(source, weights)?;
        }
        print(&format!(
            "process {} at {}, until Ctrl-C\n",
            std::process::id(),
            shown(&socket)
        ))?;
        match self.follow {
            true => press.follow(&mut sources)?,
            false => press.stop.wait(),
        }
        Ok(ExitCode::SUCCESS)
    }

    fn sources(&self) -> anyhow::Result<Vec<Source>> {
        if self.name.is_some() && self.files.len() > 1 {
            let what = "--name is for one file: of several each has its own name";
            return Err(usage(what.to_owned()));
        }
        let mut sources: Vec<Source> = vec![];
        for path in &self.files {
            let name = match &self.name {
                Some(name) => name.clone(),
                None => stem(path)?,
            };
            if let Err(refusal) = Publisher::check_name(&name) {
                let what = match &self.name {
                    Some(name) => format!("--name {name:?}"),
                    None => format!("{}: its name {name:?}", shown(path)),
                };
                return Err(usage(format!("{what}: {refusal}")));
            }
            if let Some(other) = sources.iter().find(|other| other.name == name) {
                let (one, other) = (shown(&other.path), shown(path));
                return Err(usage(format!("{one} and {other} are both named {name:?}")));
            }
            sources.push(Source {
                path: path.clone(),
                name,
                tried: None,
                seen: None,
            });
        }
        Ok(sources)
    }
}

fn stem(path: &Path) -> anyhow::Result<String> {
    let stem = path.file_stem().and_then(|stem| stem.to_str());
    let named = stem.map(str::to_owned);
    named.ok_or_else(|| usage(format!("{} has no name to publish under", shown(path))))
}

/// A file and its name.
#[derive(Debug)]
struct Source {
    path: PathBuf,
    name: String,
    /// The file that was published last, or could not be.
    tried: Option<Stamp>,
    /// The file that was there at the last look.
    seen: Option<Stamp>,
}

impl Source {
    /// Opens the file that is there now.
    ///
    /// # Errors
    /// Wrong usage: it is no safetensors file, or has nothing to publish.
    fn open(&self) -> anyhow::Result<Weights> {
        let weights = Weights::open(&self.path)?;
        match weights.bytes() {
            0 => Err(files::wrong(&self.path, "this holds no bytes to publish")),
            _ => Ok(weights),
        }
    }
}

/// The device, the publisher and the signal of a run.
struct Press {
    stream: Stream,
    device: Device,
    publisher: Publisher,
    stop: Stop,
}

impl Press {
    /// Publishes the file of a source that was opened.
    fn publish(&self, source: &mut Source, weights: Weights) -> anyhow::Result<()> {
        let begun = Instant::now();
        source.tried = Some(weights.stamp());
        let bytes = weights.bytes();
        let path = shown(&source.path);
        let region = self
            .load(&weights)
            .with_context(|| format!("{path}: {} to load", size(bytes)))?;
        let extents = region.extents().len();
        let manifest = weights.manifest().clone();
        let tensors = manifest.tensors.len();
        let version = self
            .publisher
            .publish(&source.name, manifest, region)
            .map_err(|refused| anyhow!("{path}: {}", refused.reason))?;
        let took = nanos(begun.elapsed());
        print(&format!(
            "published {:?} version {version}: {} of {} in {}, {}, {:.2} GB/s\n",
            source.name,
            size(bytes),
            counted(tensors as u64, "tensor"),
            counted(extents as u64, "extent"),
            in_words(took),
            // Bytes in a nanosecond are gigabytes in a second.
            bytes as f64 / took,
        ))
    }

    fn load(&self, weights: &Weights) -> anyhow::Result<Region> {
        let mut region = Region::builder(&self.device, weights.bytes())
            .shareable(HandleTypes::POSIX_FD)
            .largest_extent(LARGEST_EXTENT)
            .reserve()?;
        region.commit(0..region.size())?;
        weights.each_chunk(|offset, chunk| {
            self.stop.check()?;
            Ok(region.write(&self.stream, offset, chunk)?)
        })?;
        Ok(region)
    }

    /// Publishes each file again that was replaced, until the process is asked to end.
    fn follow(&self, sources: &mut [Source]) -> anyhow::Result<()> {
        while !self.stop.within(LOOK) {
            for source in &mut *sources {
                // Between two files there may be none.
                let now = Stamp::of(&source.path).ok();
                let settled = std::mem::replace(&mut source.seen, now) == now;
                if now.is_none() || now == source.tried || !settled {
                    continue;
                }
                source.tried = now;
                match source
                    .open()
                    .and_then(|weights| self.publish(source, weights))
                {
                    Err(error) if error.is::<Stopped>() => return Ok(()),
                    Err(error) => {
                        terminal::tell(&format!("cuvmm: {}", chain(&error)));
                    }
                    Ok(()) => {}
                }
            }
        }
        Ok(())
    }
}
