//! `cuvmm share publish`: publishes the tensors of files for other processes to attach.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use cuvmm::driver::HandleTypes;
use cuvmm::share::{Publisher, UserFolder};
use cuvmm::{Device, Region, Stream};

use super::file::{Stamp, Weights};
use super::{Where, publishers};
use cuvmm_command::command::usage;
use cuvmm_command::files;
use cuvmm_command::size::iec;
use cuvmm_command::stop::{Stop, Stopped};
use cuvmm_command::terminal::{self, chain, counted, print, shown};
use cuvmm_command::watch::{in_words, nanos};

/// The largest extent of a published version, in bytes. Extents are as large as possible, because a
/// version is only released as a whole and every reader maps every extent.
const LARGEST_EXTENT: u64 = 64 << 30;

/// The interval at which followed files are checked.
const LOOK: Duration = Duration::from_millis(250);

/// Publish the tensors of safetensors files until Ctrl-C
///
/// Each file is read into device memory once, in few large extents, and published under a name. The
/// tensors have the same offsets as in the file, unless one of them is not aligned to its elements there:
/// then each lies at a multiple of 512 bytes. SIGINT, SIGTERM or SIGHUP ends the command and
/// removes its socket; readers keep the memory that they have attached. A second signal ends the
/// command at once and leaves the socket for the next `list` to remove.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm share publish gpt2.safetensors
  cuvmm share publish --follow --name model weights.safetensors
  cuvmm share publish --keep gpt2.safetensors")]
pub(super) struct Args {
    /// The safetensors files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// The name to publish a single file under [default: the file name without its extension]
    #[arg(long)]
    name: Option<String>,

    /// The socket to listen at [default: one for this process in the folder where `list` looks]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Publish a file again as a newer version when it is replaced
    ///
    /// This needs memory for both versions at once. Replace a file by renaming another file over
    /// it: a file that is written in place is read once it has not changed for a quarter of a
    /// second.
    #[arg(long)]
    follow: bool,

    /// Give each version to this user's keeper, which has it after this command has ended
    ///
    /// `cuvmm share keep` is the keeper.
    #[arg(long)]
    keep: bool,

    /// The socket of another keeper
    #[arg(long, value_name = "PATH", conflicts_with = "keep")]
    keeper: Option<PathBuf>,

    #[command(flatten)]
    at: Where,
}

impl Args {
    /// # Errors
    /// Wrong options, or the first file that cannot be published. An error with a newer version
    /// goes to standard error, and the version before stays published.
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let mut sources = self.sources()?;
        let all = sources.iter().map(Source::open);
        let all = all.collect::<anyhow::Result<Vec<_>>>()?;
        let stop = Stop::on_signals()?;
        let device = self.at.open()?;
        let socket = match self.socket {
            Some(socket) => socket,
            None => UserFolder::create(super::folder())?.own_socket(),
        };
        let keeper = match self.keep {
            true => Some(UserFolder::create(super::folder())?.keeper_socket()),
            false => self.keeper,
        };
        if let Some(keeper) = &keeper {
            // Before anything is read.
            publishers::keeper_at(keeper)?;
        }
        let publisher = publishers::naming(&socket, Publisher::bind(&socket))?;
        let press = Press {
            keeper,
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
                is_unkept: false,
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

#[derive(Debug)]
struct Source {
    path: PathBuf,
    name: String,
    /// The stamp of the file at the last attempt to publish it.
    tried: Option<Stamp>,
    /// The stamp of the file at the last check.
    seen: Option<Stamp>,
    /// True if the newest version was not given to the keeper, for which that is tried again.
    is_unkept: bool,
}

impl Source {
    /// Opens the file that is currently at the path.
    ///
    /// # Errors
    /// Wrong usage: the file is not a safetensors file, or has no bytes to publish.
    fn open(&self) -> anyhow::Result<Weights> {
        let weights = Weights::open(&self.path)?;
        match weights.bytes() {
            0 => Err(files::wrong(&self.path, "this holds no bytes to publish")),
            _ => Ok(weights),
        }
    }
}

struct Press {
    stream: Stream,
    device: Device,
    publisher: Publisher,
    /// The keeper's socket.
    keeper: Option<PathBuf>,
    stop: Stop,
}

impl Press {
    fn publish(&self, source: &mut Source, weights: Weights) -> anyhow::Result<()> {
        let begun = Instant::now();
        source.tried = Some(weights.stamp());
        let bytes = weights.bytes();
        let path = shown(&source.path);
        let region = self
            .load(&weights)
            .with_context(|| format!("{path}: {} to load", iec(bytes)))?;
        let extents = region.extents().len();
        let manifest = weights.manifest().clone();
        let tensors = manifest.tensors.len();
        let version = self
            .publisher
            .publish(&source.name, manifest, region)
            .map_err(|refused| anyhow!("{path}: {}", refused.reason))?;
        self.keep(source)
            .with_context(|| format!("{path}: published, and not kept"))?;
        let took = nanos(begun.elapsed());
        print(&format!(
            "published {:?} version {version}: {} of {} in {}, {}, {:.2} GB/s\n",
            source.name,
            iec(bytes),
            counted(tensors as u64, "tensor"),
            counted(extents as u64, "extent"),
            in_words(took),
            // Bytes per nanosecond are gigabytes per second.
            bytes as f64 / took,
        ))
    }

    /// Gives the newest version to the keeper, if there is one.
    fn keep(&self, source: &mut Source) -> anyhow::Result<()> {
        if let Some(keeper) = &self.keeper {
            source.is_unkept = true;
            publishers::naming(keeper, self.publisher.keep(&source.name, keeper))?;
            source.is_unkept = false;
        }
        Ok(())
    }

    fn load(&self, weights: &Weights) -> anyhow::Result<Region> {
        let mut region = Region::builder(&self.device, weights.size())
            .shareable(HandleTypes::POSIX_FD)
            .largest_extent(LARGEST_EXTENT)
            .reserve()?;
        region.commit(0..region.size())?;
        weights.each_chunk(|offset, chunk| {
            self.stop.check()?;
            let places = weights.places().iter();
            for (to, part) in places.filter_map(|place| place.part(offset, chunk)) {
                region.write(&self.stream, to, part)?;
            }
            Ok(())
        })?;
        Ok(region)
    }

    /// Publishes each replaced file again, until a signal asks the process to end. Versions that a keeper
    /// did not take, such as one that is started again, are given to it again.
    fn follow(&self, sources: &mut [Source]) -> anyhow::Result<()> {
        while !self.stop.within(LOOK) {
            for source in &mut *sources {
                if source.is_unkept && self.keep(source).is_ok() {
                    print(&format!("kept {:?}\n", source.name))?;
                }
                // While a file is replaced there may be none.
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
