//! The end of the process: the report, and the exit code for findings.
//!
//! The library's last function makes the report, after the program's own last functions and those
//! of libraries loaded later, so that memory which they release is no leak. A process that ends by
//! `_exit`, by a signal or by running another program reports nothing. Only a process that called
//! `cuInit` itself reports: a forked child has its parent's objects and owns none of them.
//!
//! `unsafe` is allowed here to place that function, and to end the process from it.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use crate::calls;
use crate::contexts;
use crate::diagnosis::report::Report;
use crate::gate;
use crate::settings::{self, Target};
use crate::state::{State, state};
use crate::status;
use crate::watched::Contexts;

/// The longest command line in a report, in characters.
const SHOWN: usize = 200;

/// The library's last function, in the table that the dynamic linker reads.
#[used]
#[unsafe(link_section = ".fini_array")]
static LAST: extern "C" fn() = last;

pub(crate) fn living(state: &State) -> Contexts {
    Contexts {
        retained: state.references(),
        created: contexts::living(),
    }
}

pub(crate) fn report(state: &State) -> Report {
    let leaks = settings::get().map(|settings| settings.leaks);
    Report {
        pid: std::process::id(),
        program: command_line(std::env::args_os()),
        calls: calls::count(),
        injected: calls::injected(),
        findings: state
            .driver
            .found(leaks.unwrap_or_default(), &living(state)),
    }
}

/// Formats a command line in one line, cut to [`SHOWN`].
fn command_line(words: impl Iterator<Item = OsString>) -> String {
    let words: Vec<_> = words
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let line = words.join(" ").replace(char::is_control, " ");
    let mut shown: String = line.chars().take(SHOWN).collect();
    if shown.len() < line.len() {
        shown.push_str("...");
    }
    shown
}

extern "C" fn last() {
    // A panic must not unwind into the dynamic linker.
    let _ = std::panic::catch_unwind(finish);
}

fn finish() {
    gate::leave();
    let (Ok(state), Ok(settings)) = (state(), settings::get()) else {
        return;
    };
    if settings.report.is_none() && settings.exit_code.is_none() {
        return;
    }
    let report = report(state);
    let text = match settings.json {
        true => report.json(),
        false => report.text(),
    };
    let written = match &settings.report {
        Some(Target::File(path)) => append(&settings::file_of(path, report.pid), &text),
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
fn append(path: &Path, text: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(path)?;
    file.write_all(text.as_bytes())
}

fn leave(code: u8) -> ! {
    // SAFETY: null flushes every open stream of C, which ending the process here would skip.
    unsafe { libc::fflush(std::ptr::null_mut()) };
    // SAFETY: the functions that run at the end have run, except those of libraries that were
    // loaded before this one and do not use it.
    unsafe { libc::_exit(i32::from(code)) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;

    use super::*;

    #[test]
    fn a_command_line_is_one_line_of_text() {
        let line = |words: &[&[u8]]| {
            let words = words.iter().map(|word| OsString::from_vec(word.to_vec()));
            command_line(words)
        };
        assert_eq!(
            line(&[b"python3", b"-c", b"a = 1\nb"]),
            "python3 -c a = 1 b"
        );
        assert_eq!(line(&[b"x", b"\xff"]), "x \u{fffd}");
        let long = line(&["\u{e9}".repeat(300).as_bytes()]);
        assert_eq!(long, format!("{}...", "\u{e9}".repeat(SHOWN)));
    }
}
