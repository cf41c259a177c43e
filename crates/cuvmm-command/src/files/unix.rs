//! Kinds of files on Unix, and opening without waiting.

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;

pub(super) fn kind(found: FileType) -> &'static str {
    match found {
        found if found.is_dir() => "a folder",
        found if is_pipe(found) => "a pipe",
        found if found.is_socket() => "a socket",
        found if is_char_device(found) || found.is_block_device() => "a device",
        _ => "no regular file",
    }
}

pub(super) fn is_pipe(found: FileType) -> bool {
    found.is_fifo()
}

pub(super) fn is_char_device(found: FileType) -> bool {
    found.is_char_device()
}

pub(super) fn without_waiting(how: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    how.custom_flags(flags.bits().cast_signed()).open(path)
}
