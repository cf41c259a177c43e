//! `cuvmm share`: device memory that one process publishes and other processes read.
//!
//! From the bottom up: `file` reads safetensors files, and `publishers` finds publishers and their
//! publications. `publish`, `list`, `attach` and `keep` are the commands; `elements` and `shown` format the
//! output of `attach`. The library passes the memory between processes.

mod attach;
mod elements;
mod file;
mod keep;
mod list;
mod publish;
mod publishers;
mod shown;

use std::path::PathBuf;
use std::process::ExitCode;

use cuvmm::Device;
use cuvmm::share::UserFolder;

use cuvmm_command::command::usage;
use cuvmm_command::drivers::Choice;

/// Returns the path of the folder with this user's sockets and ledgers.
pub(crate) fn folder() -> PathBuf {
    UserFolder::path_in(std::env::var_os("XDG_RUNTIME_DIR").as_deref())
}

/// Share device memory between processes without a copy
///
/// One process publishes the weights of a safetensors file, and other processes attach them: the
/// device holds the bytes once. On the host driver, host memory is shared.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Publish(publish::Args),
    List(list::Args),
    Attach(attach::Args),
    Keep(keep::KeepArgs),
    Drop(keep::DropArgs),
}

impl Args {
    /// # Errors
    /// Wrong options, a driver that cannot be opened, or an error of the command.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Publish(args) => args.run(),
            Command::List(args) => args.run(),
            Command::Attach(args) => args.run(),
            Command::Keep(args) => args.run(),
            Command::Drop(args) => args.run(),
        }
    }
}

#[derive(Debug, clap::Args)]
struct Where {
    /// The driver, the same for publisher and readers; the model has no memory to share
    #[arg(long, value_enum, default_value_t)]
    driver: Choice,

    /// The device of the driver
    #[arg(long, value_name = "ORDINAL", default_value_t = 0)]
    device: u32,
}

impl Where {
    fn open(&self) -> anyhow::Result<Device> {
        if self.driver == Choice::Model {
            return Err(usage("the model has no memory to share".to_owned()));
        }
        let opened = self.driver.open()?;
        Ok(Device::open(opened.driver, self.device)?)
    }
}
