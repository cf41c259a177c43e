//! Kinds of files on Windows, whose paths name neither pipes nor devices to be read.

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::path::Path;

pub(super) fn kind(found: FileType) -> &'static str {
    if found.is_dir() {
        return "a folder";
    }
    "no regular file"
}

pub(super) const fn is_pipe(_: FileType) -> bool {
    false
}

pub(super) const fn is_char_device(_: FileType) -> bool {
    false
}

pub(super) fn without_waiting(how: &mut OpenOptions, path: &Path) -> io::Result<File> {
    how.open(path)
}
