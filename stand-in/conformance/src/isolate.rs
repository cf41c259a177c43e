//! Cases in a separate process: starting it, and the code that runs in it.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cuvmm_driver::Driver;

use crate::{Answer, Bench, Case, KernelToucher, find};

/// The text before the answer on the line that a child prints.
const MARK: &str = "answer: ";

/// The command that starts a process for one case.
#[derive(Clone, Debug)]
pub struct Isolate {
    program: PathBuf,
    arguments: Vec<OsString>,
    patience: Duration,
}

impl Isolate {
    /// Creates a command from a program and the arguments before the name of the case. The program
    /// should call [`run_in_own_process`].
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

    /// Sets the time limit for a child process; default two minutes.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Runs one case in a process and returns its answer, or why there is none. A crash is an
    /// answer.
    pub(crate) fn ask(&self, case: &Case) -> Result<String, String> {
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .arg(case.name())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", self.program.display()))?;
        if wait(&mut child, self.patience)
            .map_err(|error| error.to_string())?
            .is_none()
        {
            let patience = self.patience.as_secs();
            return Err(format!("its process did not end within {patience} s"));
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

/// Waits for a child, and kills it after a time. Returns `None` for a child that was killed.
///
/// The child prints less than a pipe holds, or another thread reads what it prints.
pub(crate) fn wait(child: &mut Child, patience: Duration) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    while start.elapsed() <= patience {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(Duration::from_millis(2));
    }
    // The child may have ended meanwhile, which makes no difference.
    let _ = child.kill();
    let _ = child.wait();
    Ok(None)
}

/// Returns `died: SIGSEGV`, for a process that a signal ended.
pub(crate) fn death(status: ExitStatus) -> Option<String> {
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

/// Writes the answer of one case to standard output and ends this process, whatever state the case
/// left.
///
/// The case may kill the process or lose its context, so no code of the caller runs afterwards.
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
        // Resources that the case still holds are released by the end of the process.
        std::mem::forget(bench);
        answer
    });
    let answer = asked.unwrap_or_else(Answer::setup_failed);
    println!("{MARK}{answer}");
    // The line is flushed before anything else can fail.
    let _ = std::io::stdout().flush();
    std::process::exit(0);
}
