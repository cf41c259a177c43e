//! The end of the process: the report, and the exit code that says that something was found.
//!
//! The report is made by the library's last function, after the program's own ones and those of the
//! libraries that it loaded later, so that memory which they release is no leak. A process that ends
//! by `_exit`, by a signal or by running another program reports nothing. A process reports if it
//! called `cuInit` itself: a forked child, which has its parent's objects and owns none of them, does
//! not.
//!
//! `unsafe` is allowed here to place that function, and to end the process from it.
#![allow(unsafe_code)]

use std::fs::OpenOptions;
use std::io::Write;

use crate::calls;
use crate::diagnosis::report::Report;
use crate::settings::{self, Target};
use crate::state::{State, state};
use crate::status;

/// The longest command line in a report.
const SHOWN: usize = 200;

/// The library's last function, in the table that the dynamic linker reads.
#[used]
#[unsafe(link_section = ".fini_array")]
static LAST: extern "C" fn() = last;

/// Returns the report of this moment.
pub(crate) fn report(state: &State) -> Report {
    let leaks = settings::get().map(|settings| settings.leaks);
    let mut program: String = std::env::args().collect::<Vec<_>>().join(" ");
    if let Some((end, _)) = program.char_indices().nth(SHOWN) {
        program.truncate(end);
        program.push_str("...");
    }
    Report {
        pid: std::process::id(),
        program,
        calls: calls::count(),
        injected: calls::injected(),
        findings: state
            .driver
            .found(leaks.unwrap_or_default(), &state.references()),
    }
}

extern "C" fn last() {
    // A panic must not unwind into the dynamic linker.
    let _ = std::panic::catch_unwind(finish);
}

fn finish() {
    let (Ok(state), Ok(settings)) = (state(), settings::get()) else {
        return;
    };
    let asked = settings.report.is_some() || settings.exit_code.is_some();
    if !asked || state.process != std::process::id() {
        return;
    }
    let report = report(state);
    let text = match settings.json {
        true => report.json(),
        false => report.text(),
    };
    let written = match &settings.report {
        Some(Target::File(path)) => {
            let path = path
                .to_string_lossy()
                .replace("%p", &report.pid.to_string());
            append(&path, &text)
        }
        Some(Target::Stderr) | None => std::io::stderr().write_all(text.as_bytes()),
    };
    if let Err(error) = written {
        // Nothing better can be done if standard error is closed too.
        let _ = writeln!(
            std::io::stderr(),
            "fakecuda: no report was written: {error}"
        );
    }
    let failed = report.findings.count() > 0;
    // The program's own failure says more.
    if let Some(code) = settings.exit_code
        && failed
        && status::of_end() == Some(0)
    {
        leave(code);
    }
}

/// Appends to a file in one write, so that reports of several processes do not mix.
fn append(path: &str, text: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(path)?;
    file.write_all(text.as_bytes())
}

/// Ends the process with a code.
fn leave(code: u8) -> ! {
    // SAFETY: null flushes every open stream of C, which ending the process here would skip.
    unsafe { libc::fflush(std::ptr::null_mut()) };
    // SAFETY: the functions that were to run at the end have run, except those of libraries that
    // were loaded before this one and do not use it.
    unsafe { libc::_exit(i32::from(code)) }
}
