//! `cuvmm share`: memory of the device that one process publishes and others read, from the command
//! line.
//!
//! From the bottom up: `folder` is where sockets lie, `file` reads safetensors, `publishers` finds who
//! publishes what; `publish`, `list` and `attach` are the commands, `elements` and `shown` what the last
//! one shows. How memory passes between processes is the library's.

mod attach;
mod elements;
mod file;
mod folder;
mod list;
mod publish;
mod publishers;
mod shown;
mod stop;

use std::process::ExitCode;

use bytesize::ByteSize;
use comfy_table::{CellAlignment, Table, presets};
use cuvmm::Device;

use cuvmm_cli::command::usage;
use cuvmm_cli::drivers::Choice;

/// Pass memory of the device between processes without a copy
///
/// One terminal publishes the weights of a safetensors file, others attach them: the device has the
/// bytes once. On the host driver it is the host's memory that is shared.
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
}

impl Args {
    /// Runs the command.
    ///
    /// # Errors
    /// Options that cannot be meant, a driver that cannot be had, and whatever fails.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Publish(args) => args.run(),
            Command::List(args) => args.run(),
            Command::Attach(args) => args.run(),
        }
    }
}

/// The device whose memory it is.
#[derive(Debug, clap::Args)]
struct Where {
    /// The driver; both sides must use the same one, and the model has no memory to share
    #[arg(long, value_enum, default_value_t)]
    driver: Choice,

    /// Which device of the driver
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

fn size(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

/// A table whose columns from `first` up to `end` are of numbers.
fn table(head: &[&str], first: usize, end: usize) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::ASCII_MARKDOWN)
        .set_header(head.to_vec());
    for column in table.column_iter_mut().take(end).skip(first) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
