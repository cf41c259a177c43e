//! `cuvmm ctl`: changes limits, guarantees and priorities of processes and tenants, and trims,
//! sleeps or wakes them.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use cuvmm::ControlError;
use cuvmm::ledger::{Control, GroupRequest};

use super::find::{Named, Where};
use cuvmm_command::command::usage;
use cuvmm_command::duration::duration;
use cuvmm_command::size::{bytes, iec};
use cuvmm_command::terminal::{print, safe};

/// Change what processes and tenants may have while they run
///
/// Asks the process itself, which does what its own program could do: memory in use is never taken.
/// A process is named by its name or process id, a tenant by its name behind a slash. Where that may
/// be several, `NAME@SLOT` is one of them. Exit code 1 when the process refuses, with the reason.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm ctl limit chat 40GiB
  cuvmm ctl limit chat none
  cuvmm ctl guarantee chat/weights 16GiB
  cuvmm ctl trim 41250
  cuvmm ctl sleep chat/weights --timeout 60
  cuvmm ctl sleep --group tp0 --tag weights")]
pub(crate) struct Args {
    #[command(flatten)]
    at: Where,

    /// How long to wait for the process's answer, in seconds or such as 500ms or 2min
    #[arg(long, global = true, value_name = "TIME", default_value = "30s", value_parser = duration)]
    timeout: Duration,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Set the most memory that a process or tenant may have
    Limit(Limit),
    /// Set the memory that a process or tenant can always have
    Guarantee(Amount),
    /// Set a priority: lower ones give memory first, processes if as far above their guarantees
    Priority(Priority),
    /// Give a process's idle memory back to the driver
    Trim(Trim),
    /// Put a tenant, or all of a process, to sleep with the program's own function
    Sleep(Moved),
    /// Wake a tenant, or all of a process, with the program's own function
    Wake(Moved),
}

#[derive(Debug, clap::Args)]
struct Moved {
    /// The process, by name or process id, or one of its tenants; NAME@SLOT where a name is not enough
    #[arg(
        value_name = "PROCESS[/TENANT]",
        value_parser = Named::parse,
        conflicts_with = "group"
    )]
    of: Option<Named>,

    /// All processes of a group, or none of them
    #[arg(long, value_name = "NAME")]
    group: Option<String>,

    /// Only the group's memory with this tag; may be given several times
    #[arg(long = "tag", value_name = "TAG", conflicts_with = "of")]
    tags: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct Of {
    /// The process, by name or process id, or one of its tenants; NAME@SLOT where a name is not enough
    #[arg(value_name = "PROCESS[/TENANT]", value_parser = Named::parse)]
    of: Named,
}

#[derive(Debug, clap::Args)]
struct Limit {
    #[command(flatten)]
    of: Of,

    /// The new value, such as 512MiB, or `none` to lift the limit
    #[arg(value_name = "SIZE", value_parser = limit)]
    size: u64,
}

/// Parses a size. `none` is [`u64::MAX`], which limits nothing.
fn limit(text: &str) -> Result<u64, String> {
    match text {
        "none" => Ok(u64::MAX),
        text => bytes(text),
    }
}

#[derive(Debug, clap::Args)]
struct Amount {
    #[command(flatten)]
    of: Of,

    /// The new value, such as 512MiB
    #[arg(value_name = "SIZE", value_parser = bytes)]
    size: u64,
}

#[derive(Debug, clap::Args)]
struct Priority {
    #[command(flatten)]
    of: Of,

    /// The new value; 0 is the default of every process and tenant
    #[arg(allow_negative_numbers = true)]
    priority: i32,
}

#[derive(Debug, clap::Args)]
struct Trim {
    /// The process, by name or process id, or as NAME@SLOT
    #[arg(value_name = "PROCESS", value_parser = Named::parse)]
    process: Named,

    /// Memory that the process may keep
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = bytes)]
    keep: u64,
}

impl Args {
    /// # Errors
    /// The process is missing, refuses the request or does not answer.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        if let Command::Sleep(it) | Command::Wake(it) = &self.command
            && let Some(group) = &it.group
        {
            let wake = matches!(self.command, Command::Wake(_));
            let request = GroupRequest::new(group, wake).tags(it.tags.clone());
            return self.ask_group(&request.timeout(self.timeout));
        }
        let (control, tenant) = match &self.command {
            Command::Limit(it) => self.at.target(&it.of.of)?,
            Command::Guarantee(it) => self.at.target(&it.of.of)?,
            Command::Priority(it) => self.at.target(&it.of.of)?,
            Command::Trim(it) => (self.at.process(&it.process)?, None),
            Command::Sleep(it) | Command::Wake(it) => match &it.of {
                Some(of) => self.at.target(of)?,
                None => return Err(usage("name a process, or a group with --group")),
            },
        };
        let control = control.timeout(self.timeout);
        let tenant = tenant.as_deref();
        let said = match &self.command {
            Command::Limit(it) => control.set_limit(tenant, it.size).map(excess),
            Command::Guarantee(it) => control.set_guarantee(tenant, it.size).map(|()| None),
            Command::Priority(it) => control.set_priority(tenant, it.priority).map(|()| None),
            Command::Trim(it) => control
                .trim(it.keep)
                .map(|bytes| Some(format!("gave back {}\n", iec(bytes)))),
            Command::Sleep(_) => control.sleep(tenant).map(|()| None),
            Command::Wake(_) => control.wake(tenant).map(|()| None),
        };
        if let Some(text) = said.map_err(plain)? {
            print(&text)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Args {
    /// Asks all ranks of a group. They decide together, so their reasons are mostly the same.
    fn ask_group(&self, request: &GroupRequest) -> anyhow::Result<ExitCode> {
        let ranks = self.at.ranks(&request.group)?;
        let answers = Control::group(&ranks, request);
        let reasons = answers.into_iter().filter_map(Result::err);
        let reasons: BTreeSet<String> = reasons.map(|error| error.to_string()).collect();
        match reasons.is_empty() {
            true => Ok(ExitCode::SUCCESS),
            false => {
                let reasons: Vec<String> = reasons.into_iter().collect();
                Err(anyhow::anyhow!("{}", safe(&reasons.join("; "))))
            }
        }
    }
}

fn excess(bytes: u64) -> Option<String> {
    let held = iec(bytes);
    let rule = "nothing more is charged until that is given up";
    (bytes > 0).then(|| format!("{held} more than that is still held: {rule}\n"))
}

/// Returns an error as one printable line: the other process wrote the reason of a refusal.
fn plain(error: ControlError) -> anyhow::Error {
    anyhow::anyhow!("{}", safe(&error.to_string()))
}
