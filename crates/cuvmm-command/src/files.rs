//! Files that the command line names.
//!
//! A file that does not exist, cannot be opened, or is of the wrong kind is wrong usage, like an
//! invalid option: exit code 2, with the path and the kind of file found.

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, IsTerminal as _, Read as _};
use std::path::Path;

use anyhow::Context as _;

use crate::command::usage;
use crate::size::iec;
use crate::terminal::shown;
#[cfg(unix)]
use unix as system;
#[cfg(windows)]
use windows as system;

/// The most bytes of a text file that is read whole: a plan, a cost table, recorded answers.
const MOST_TEXT: u64 = 64 << 20;

/// Returns the error for an unusable file: wrong usage, with the path.
pub fn wrong(path: &Path, what: impl std::fmt::Display) -> anyhow::Error {
    usage(format!("{}: {what}", shown(path)))
}

/// Opens a regular file for reading. Opening does not block, as it would for a pipe without a
/// writer.
///
/// # Errors
/// Wrong usage: the file cannot be opened or is not a regular file.
pub fn regular(path: &Path) -> anyhow::Result<File> {
    let file = system::without_waiting(OpenOptions::new().read(true), path);
    let file = file.map_err(|error| wrong(path, error))?;
    let found = file.metadata().map_err(|error| wrong(path, error))?;
    match found.is_file() {
        true => Ok(file),
        false => {
            let kind = system::kind(found.file_type());
            Err(wrong(
                path,
                format!("this is {kind}, and a regular file is needed"),
            ))
        }
    }
}

/// Reads a text file or a pipe to its end.
///
/// # Errors
/// Wrong usage: the file cannot be read, is too large, or is not text in UTF-8.
pub fn text(path: &Path) -> anyhow::Result<String> {
    let bytes = bytes(path, MOST_TEXT)?;
    String::from_utf8(bytes).map_err(|_| wrong(path, "this is no text in UTF-8"))
}

/// Reads a file or a pipe of at most `most` bytes to its end.
///
/// # Errors
/// Wrong usage: the file cannot be read, is too large, or is not a file, a pipe or a terminal.
pub fn bytes(path: &Path, most: u64) -> anyhow::Result<Vec<u8>> {
    let other = io::Error::other::<String>;
    let read = || -> io::Result<Vec<u8>> {
        // The type is checked before opening too, because opening a device may have side effects.
        let readable = |found: FileType| found.is_file() || system::is_pipe(found);
        let found = std::fs::metadata(path)?.file_type();
        if !readable(found) && !system::is_char_device(found) {
            let kind = system::kind(found);
            return Err(other(format!("this is {kind}, and a file is needed")));
        }
        let file = File::open(path)?;
        if !readable(file.metadata()?.file_type()) && !file.is_terminal() {
            return Err(other("this is a device, and a file is needed".to_owned()));
        }
        let mut bytes = vec![];
        let read = file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
        if read as u64 > most {
            let most = iec(most);
            let what = format!("this has more than {most}, the most that is read");
            return Err(other(what));
        }
        Ok(bytes)
    };
    read().map_err(|error| wrong(path, error))
}

/// Checks that a file can be written, before work that takes minutes. Creates a missing file, and
/// keeps the content of others.
///
/// # Errors
/// Wrong usage: the file cannot be opened for writing.
pub fn writable(path: &Path) -> anyhow::Result<()> {
    let opened = system::without_waiting(OpenOptions::new().append(true).create(true), path);
    opened.map(drop).map_err(|error| wrong(path, error))
}

/// Opens a file to be written from its beginning. Creates a missing file, and discards the content of
/// others.
///
/// # Errors
/// Wrong usage: the file cannot be opened for writing.
pub fn replace(path: &Path) -> anyhow::Result<File> {
    writable(path)?;
    let opened = OpenOptions::new().write(true).truncate(true).open(path);
    opened.map_err(|error| wrong(path, error))
}

/// Writes `text` as the whole content of a file.
///
/// # Errors
/// The file cannot be written; the error names its path.
pub fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| shown(path))
}
