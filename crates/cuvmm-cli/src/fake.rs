//! `cuvmm fake`: runs a program on fakecuda, a driver library over host memory.
//!
//! The command sets variables and replaces itself by the program, so signals, the terminal and the
//! exit status are the program's own. The library checks the settings, in a process of its own before
//! that; the command checks only the settings that it has to understand.

mod check;
mod library;

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::ValueEnum;

use cuvmm_command::command::{usage, word};
use cuvmm_command::size::size;
use cuvmm_command::terminal::{shown, tell};

/// Exit statuses of shells: the program cannot be run; the program is not there.
const CANNOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Run a program on a CUDA driver without a GPU, and report what it leaks and misuses
///
/// The driver is fakecuda: memory calls of the driver API over host memory, with the answers of an
/// H200. It runs no kernels, and the CUDA runtime library does not work on it. The exit status and
/// all signals are those of the program.
///
/// The library is the file of `--library`, else of the variable FAKECUDA_LIBRARY, else the one
/// beside this command: libfakecuda.so, or ../lib/fakecuda/libcuda.so.1. `cargo build -p fakecuda`
/// in a clone makes it, and the wheel `fakecuda` for Python contains it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm fake --report -- ./my_test
  cuvmm fake --gpus 2 --memory 80GiB --report leaks.txt -- python3 -m pytest tests
  cuvmm fake --fail cuMemCreate:3 --report --exit-code 1 -- ./my_test
  cuvmm fake --late --unwritten --report --json -- ./my_test")]
pub(crate) struct Args {
    /// The number of GPUs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=64))]
    gpus: Option<u16>,

    /// The memory of each GPU; what is written to takes memory of this machine
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,

    /// A GPU whose answers are recorded, for name, memory and attributes: h100 or h200
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,

    /// The CUDA version of the driver; newer functions are absent
    #[arg(long, value_name = "VERSION")]
    cuda: Option<String>,

    /// Calls take the time that they take on a measured GPU (h200), or by a file of costs
    #[arg(long, value_name = "GPU|FILE")]
    latency: Option<OsString>,

    /// The calls that the driver accepts
    #[arg(long, value_enum)]
    manner: Option<Manner>,

    /// Run work when a call waits for it, which shows memory that is taken from queued work
    #[arg(long)]
    late: bool,

    /// Make a call fail: CALL:N, CALL:N-M or CALL:N-, and :CODE after it; may be repeated
    #[arg(long, value_name = "CALL:N")]
    fail: Vec<String>,

    /// Report at the end of each process, on standard error or to a file; %p is the process
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    report: Option<PathBuf>,

    /// Report one line of JSON for each process
    #[arg(long, requires = "report")]
    json: bool,

    /// The objects that count as leaks at the end
    #[arg(long, value_enum)]
    leaks: Option<Leaks>,

    /// Find reads of bytes that were never written
    #[arg(long)]
    unwritten: bool,

    /// The exit status of a program that ended with 0 and has findings
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    exit_code: Option<u8>,

    /// A file of settings, in TOML or JSON; options win over it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// The library
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,

    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Manner {
    /// Those that an H200 was measured to accept
    Measured,
    /// Those that the documentation permits
    Strict,
    /// Like strict, with values reused at once and any code that is documented
    Hostile,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Leaks {
    /// Memory and addresses
    Memory,
    /// Also streams, events, graphs and contexts
    All,
    /// Nothing
    None,
}

impl Args {
    /// Replaces this process by the program.
    ///
    /// # Errors
    /// The library is missing or is not fakecuda, a setting is wrong, or the report cannot be written.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let folder = library::folder(self.library.as_deref())?;
        let (program, words) = self
            .command
            .split_first()
            .ok_or_else(|| usage("no program is given after --"))?;
        let mut settings = self.settings()?;
        settings.push(("LD_LIBRARY_PATH", library::path_with(&folder)));
        check::check(&settings)?;
        let mut command = Command::new(program);
        command.args(words).envs(settings);
        let error = command.exec();
        tell(&format!("cuvmm: cannot run {}: {error}", program.display()));
        let missing = error.kind() == std::io::ErrorKind::NotFound;
        Ok(ExitCode::from(if missing { NOT_FOUND } else { CANNOT_RUN }))
    }

    /// Returns the environment variables that the library reads.
    fn settings(&self) -> anyhow::Result<Vec<(&'static str, OsString)>> {
        let mut settings: Vec<(&'static str, OsString)> = Vec::new();
        let mut set = |name, value: Option<OsString>| {
            settings.extend(value.map(|value| (name, value)));
        };
        let text = |text: &String| OsString::from(text);
        let on = |yes: bool| yes.then(|| OsString::from("1"));
        let number = |number: u64| OsString::from(number.to_string());
        set("FAKECUDA_DEVICES", self.gpus.map(u64::from).map(number));
        set("FAKECUDA_CAPACITY", self.memory.map(number));
        set("FAKECUDA_GPU", self.gpu.as_ref().map(text));
        set("FAKECUDA_VERSION", self.cuda.as_ref().map(text));
        set("FAKECUDA_LATENCY", self.latency.clone());
        set(
            "FAKECUDA_MANNER",
            self.manner.as_ref().map(word).map(OsString::from),
        );
        set("FAKECUDA_WORK", self.late.then(|| "late".into()));
        let faults = (!self.fail.is_empty()).then(|| self.fail.join(",").into());
        set("FAKECUDA_FAIL", faults);
        set("FAKECUDA_REPORT", self.report()?);
        set("FAKECUDA_REPORT_FORMAT", self.json.then(|| "json".into()));
        set(
            "FAKECUDA_LEAKS",
            self.leaks.as_ref().map(word).map(OsString::from),
        );
        set("FAKECUDA_UNWRITTEN", on(self.unwritten));
        let code = self.exit_code.map(u64::from).map(number);
        set("FAKECUDA_EXIT_CODE", code);
        set("FAKECUDA_CONFIG", self.config()?);
        Ok(settings)
    }

    /// Returns the path of the settings, wherever the program goes.
    fn config(&self) -> anyhow::Result<Option<OsString>> {
        let Some(path) = &self.config else {
            return Ok(None);
        };
        let wrong = |error| usage(format!("cannot read {}: {error}", shown(path)));
        std::fs::File::open(path).map_err(wrong)?;
        Ok(Some(std::path::absolute(path).map_err(wrong)?.into()))
    }

    /// Returns the destination of the report, and empties its file.
    fn report(&self) -> anyhow::Result<Option<OsString>> {
        let Some(path) = &self.report else {
            return Ok(None);
        };
        if path == Path::new("-") {
            return Ok(Some("-".into()));
        }
        let wrong = |error| usage(format!("cannot write {}: {error}", shown(path)));
        let path = std::path::absolute(path).map_err(wrong)?;
        if !path.to_string_lossy().contains("%p") {
            std::fs::File::create(&path).map_err(wrong)?;
        }
        Ok(Some(path.into()))
    }
}
