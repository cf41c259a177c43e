//! `cuvmm share keep`: has publications whose publishers have ended. `cuvmm share drop`: ends that.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::anyhow;
use cuvmm::share::{Keeper, Keeping, UserFolder};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::publishers;
use cuvmm_command::stop::Stop;
use cuvmm_command::terminal::{chain, print, safe, shown, tell};

/// Keep publications after their publishers have ended, until Ctrl-C
///
/// Publishers give what is to be kept: `cuvmm share publish --keep`, `Publisher::keep` in Rust, and
/// `Publication.keep` in Python. Readers find it by its name as before. It stays until the name is given
/// again or withdrawn, or `cuvmm share drop NAME`. The keeper uses no GPU: it only has descriptors open,
/// one for each extent. When it ends, what it kept is gone unless a process has it attached.
///
/// A keeper that is started again takes from the publishers that still run what they had given to the
/// one before.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm share keep
  cuvmm share keep --ledger /run/user/1000/serving")]
pub(super) struct KeepArgs {
    /// The socket to listen at [default: `keeper.sock` in the folder where `list` looks]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// The directory with the ledgers of the processes that publish [default: `$CUVMM_LEDGER`, else the
    /// folder where `list` looks]
    ///
    /// What is kept stays charged in its ledger.
    #[arg(long, value_name = "DIRECTORY")]
    ledger: Option<PathBuf>,
}

impl KeepArgs {
    /// # Errors
    /// Wrong options, or another process listens at the socket.
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let stop = Stop::on_signals()?;
        open_more_files();
        let socket = match self.socket {
            Some(socket) => socket,
            None => UserFolder::create(super::folder())?.keeper_socket(),
        };
        let set = || std::env::var_os("CUVMM_LEDGER").filter(|path| !path.is_empty());
        let given = self.ledger.or_else(|| set().map(PathBuf::from));
        let ledgers = given.unwrap_or_else(super::folder);
        let keeper = publishers::naming(&socket, Keeper::bind(&socket, Some(ledgers)))?;
        take_wanted(&keeper)?;
        print(&format!(
            "process {} keeps publications at {}, until Ctrl-C\n",
            std::process::id(),
            shown(&socket)
        ))?;
        stop.wait();
        Ok(ExitCode::SUCCESS)
    }
}

/// Takes from running publishers what they had given to a keeper.
fn take_wanted(keeper: &Keeper) -> anyhow::Result<()> {
    for publisher in publishers::find(None)?.publishers {
        let wanted = publisher.publications.iter();
        for one in wanted.filter(|one| one.keeping == Keeping::Wanted) {
            let name = safe(&one.name);
            match keeper.take(&one.name, &publisher.socket) {
                Ok(version) => print(&format!(
                    "took \"{name}\" version {version} of process {}\n",
                    publisher.pid
                ))?,
                Err(error) => tell(&format!("cuvmm: {name}: {}", chain(&error.into()))),
            }
        }
    }
    Ok(())
}

/// Raises the limit of open files as far as the system allows: each extent is one.
fn open_more_files() {
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // The library says so where the limit is too low.
    let _ = setrlimit(Resource::Nofile, most);
}

/// Drop a publication that is kept
///
/// Processes that have it attached go on. A publisher that still runs goes on publishing it, and a keeper
/// that is started again takes it from there again.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm share drop gpt2")]
pub(super) struct DropArgs {
    /// The name of the publication
    name: String,

    /// The keeper's socket [default: `keeper.sock` in the folder where `list` looks]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl DropArgs {
    /// # Errors
    /// No keeper listens, or it does not keep the name.
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let socket = match self.socket {
            Some(socket) => socket,
            None => UserFolder::create(super::folder())?.keeper_socket(),
        };
        let mut subscriber = publishers::keeper_at(&socket)?;
        match publishers::naming(&socket, subscriber.release(&self.name))? {
            true => print(&format!("dropped \"{}\"\n", safe(&self.name)))?,
            false => return Err(anyhow!("{:?} is not kept at {}", self.name, shown(&socket))),
        }
        Ok(ExitCode::SUCCESS)
    }
}
