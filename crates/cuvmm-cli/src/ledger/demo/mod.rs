//! `cuvmm demo`: two services in two processes under one ledger, and `cuvmm top` beside them.
//!
//! `service` is one of the two processes; this command starts it.

mod service;

use std::io::{BufRead as _, BufReader, IsTerminal as _, Read as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::ValueEnum as _;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use cuvmm_command::drivers::Choice;
use cuvmm_command::duration::duration;
use cuvmm_command::terminal::{safe, tell};
use tempfile::TempDir;

use super::find::Where;
use super::top;
use cuvmm_command::stop::{Stop, Stopped};
use cuvmm_command::subprocess;

pub(crate) use self::service::Service;

const NAMES: [&str; 2] = ["chat", "code"];

const INTERVAL: Duration = Duration::from_secs(1);

/// The time after which the figures are printed if there is no terminal.
const UNSEEN: Duration = Duration::from_secs(10);

/// Run two services under one memory limit, with `cuvmm top` beside them
///
/// Each service is a process with a cache that grows and shrinks, one while the other does the
/// opposite, and both want more than the 1 GiB that a ledger allows them together. On a terminal
/// it shows `cuvmm top` until `q` is pressed. The ledger is in a private folder that `top` names: give
/// it to `cuvmm ctl --ledger` in a second terminal. Both services and the folder are gone at the end,
/// also when this command is killed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm demo
  cuvmm demo --seconds 10
  cuvmm demo --driver cuda --device 1")]
pub(crate) struct Args {
    /// The driver of both services
    #[arg(long, default_value = Choice::Auto.word(), value_parser = with_memory())]
    driver: Choice,

    /// The device of the driver
    #[arg(long, value_name = "ORDINAL", default_value_t = 0)]
    device: u32,

    /// Print the figures once after this time, in seconds or such as 2min, and stop [default without a
    /// terminal: 10]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    seconds: Option<Duration>,
}

/// Parses a driver whose memory two processes can share: all but the model.
fn with_memory() -> impl TypedValueParser<Value = Choice> {
    let all = Choice::value_variants().iter();
    let words = all.filter(|it| **it != Choice::Model);
    PossibleValuesParser::new(words.filter_map(Choice::to_possible_value))
        .try_map(|word| Choice::from_str(&word, false))
}

impl Args {
    /// # Errors
    /// The driver or the terminal cannot be used, a service fails, or a signal comes before the
    /// figures are printed.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let terminal = std::io::stdout().is_terminal();
        let seconds = self.seconds.or((!terminal).then_some(UNSEEN));
        let mut services = Services::new()?;
        let at = Where::at(services.folder.path());
        let Some(seconds) = seconds else {
            // Services must not write over the picture on the terminal.
            services.start(&self, Stdio::null)?;
            return top::live(&at, INTERVAL, || services.end());
        };
        let stop = Stop::on_signals()?;
        services.start(&self, Stdio::inherit)?;
        if stop.within(seconds) {
            return Err(Stopped.into());
        }
        top::once(&at)?;
        services.end()?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The services and their private folder. A drop ends the services and removes the folder.
#[derive(Debug)]
struct Services {
    each: Vec<Running>,
    folder: TempDir,
}

#[derive(Debug)]
struct Running {
    name: &'static str,
    process: Child,
    /// One line when the service has joined the ledger, and one with the reason if the service
    /// fails.
    output: BufReader<ChildStdout>,
}

impl Services {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            each: Vec::new(),
            folder: subprocess::private_directory("cuvmm-demo-")?,
        })
    }

    /// Starts all services and waits until each has joined the ledger.
    ///
    /// # Errors
    /// A process cannot be started, or a service cannot join (with its reason).
    fn start(&mut self, args: &Args, errors: fn() -> Stdio) -> anyhow::Result<()> {
        for name in NAMES {
            let mut command = Command::new(std::env::current_exe()?);
            command
                .arg("demo-service")
                .arg(self.folder.path())
                .arg(name);
            command.args([args.driver.word(), &args.device.to_string()]);
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            // Ctrl-C reaches only this process, which then ends the services.
            let process = command.stderr(errors()).process_group(0).spawn();
            let mut process = process.with_context(|| format!("{name}: no process"))?;
            let output = process.stdout.take().context("output is piped")?;
            self.each.push(Running {
                name,
                process,
                output: BufReader::new(output),
            });
        }
        for (index, service) in self.each.iter_mut().enumerate() {
            let mut line = String::new();
            service.output.read_line(&mut line)?;
            let line = line.trim_end();
            match line.strip_prefix(service::JOINED) {
                Some(driver) if index == 0 => tell(&format!("two services on {driver}")),
                Some(_) => {}
                None => bail!("{}: {}", service.name, said(line)),
            }
        }
        Ok(())
    }

    /// Ends all services, waits for them, and removes the folder.
    ///
    /// # Errors
    /// The reason of a service that failed earlier.
    fn end(&mut self) -> anyhow::Result<()> {
        for service in &mut self.each {
            drop(service.process.stdin.take());
        }
        let until = subprocess::grace();
        let mut failed = Ok(());
        for mut service in self.each.drain(..) {
            let status = subprocess::end(&mut service.process, until)?;
            if !status.success() && failed.is_ok() {
                let mut line = String::new();
                // Unreadable output counts as no reason.
                let _ = service.output.read_to_string(&mut line);
                failed = Err(anyhow::anyhow!(
                    "{} ({status}): {}",
                    service.name,
                    said(&line)
                ));
            }
        }
        failed
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        // The error that led to this drop is reported already.
        let _ = self.end();
    }
}

fn said(line: &str) -> String {
    match line.trim() {
        "" => "it ended and named no reason".to_owned(),
        line => safe(line).into_owned(),
    }
}
