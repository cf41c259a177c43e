//! Cases in a process of their own: starting it, and being it.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cuvmm_driver::Driver;

use crate::{Answer, Bench, Case, KernelToucher, find};

/// What stands before the answer on the line that a child prints.
const MARK: &str = "answer: ";

/// How to start a process that answers one case.
#[derive(Clone, Debug)]
pub struct Isolate {
    program: PathBuf,
    arguments: Vec<OsString>,
    patience: Duration,
}

impl Isolate {
    /// A program, and what to pass it before the name of the case. It should call
    /// [`run_in_own_process`].
    #[must_use]
    pub fn new(
        program: impl Into<PathBuf>,
        arguments: impl IntoIterator<Item = impl Into<OsString>>,
    ) -> Self {
        let arguments = arguments.into_iter().map(Into::into).collect();
        Self {
            program: program.into(),
            arguments,
            patience: Duration::from_secs(120),
        }
    }

    /// How long a child may take; by default two minutes.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The answer of a process that is asked one case; or why there is none. To die is an answer.
    pub(crate) fn ask(&self, case: &Case) -> Result<String, String> {
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .arg(case.name())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", self.program.display()))?;
        if let Err(reason) = wait(&mut child, self.patience) {
            // It may have ended this moment, which is as well.
            let _ = child.kill();
            let _ = child.wait();
            return Err(reason);
        }
        let output = child
            .wait_with_output()
            .map_err(|error| error.to_string())?;
        let stdout = String::from_utf8_lossy(&output.stdout);
        let answer = stdout.lines().find_map(|line| line.strip_prefix(MARK));
        match (answer, death(output.status)) {
            (Some(answer), None) => Ok(answer.to_owned()),
            (Some(answer), Some(death)) => Ok(format!("{answer}, then {death}")),
            (None, Some(death)) => Ok(death),
            (None, None) => {
                let stderr = String::from_utf8_lossy(&output.stderr);
                let last = stderr.lines().last().unwrap_or("and said nothing");
                Err(format!("its process ended with {}: {last}", output.status))
            }
        }
    }
}

/// Waits for a child that prints less than a pipe holds.
fn wait(child: &mut Child, patience: Duration) -> Result<(), String> {
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(_)) => return Ok(()),
            Ok(None) if start.elapsed() > patience => {
                return Err(format!(
                    "its process did not end within {} s",
                    patience.as_secs()
                ));
            }
            Ok(None) => thread::sleep(Duration::from_millis(2)),
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// `died: SIGSEGV`, for a process that a signal ended.
fn death(status: ExitStatus) -> Option<String> {
    let name = match status.signal()? {
        4 => "SIGILL".to_owned(),
        6 => "SIGABRT".to_owned(),
        7 => "SIGBUS".to_owned(),
        8 => "SIGFPE".to_owned(),
        9 => "SIGKILL".to_owned(),
        11 => "SIGSEGV".to_owned(),
        other => format!("signal {other}"),
    };
    Some(format!("died: {name}"))
}

/// Answers one case on standard output and ends this process, whatever the case did to it.
///
/// The case may kill the process or lose its context, so nothing of the caller runs afterwards.
pub fn run_in_own_process(
    driver: Arc<dyn Driver>,
    kernels: Option<Arc<dyn KernelToucher>>,
    name: &str,
) -> ! {
    let Some(case) = find(name) else {
        eprintln!("there is no case {name}");
        std::process::exit(2);
    };
    let asked = Bench::new(driver, kernels).and_then(|mut bench| {
        let answer = (case.ask)(&mut bench);
        // What the case still holds goes with the process.
        std::mem::forget(bench);
        answer
    });
    let answer = asked.unwrap_or_else(Answer::setup_failed);
    println!("{MARK}{answer}");
    // The line has to be out before anything else can go wrong.
    let _ = std::io::stdout().flush();
    std::process::exit(0);
}
