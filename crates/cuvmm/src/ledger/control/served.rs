//! The socket of a process, and the end of its thread.

use std::fs;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use super::super::file::LedgerFile;

/// The end of every socket's name. The beginning is the name of the ledger's file, followed by the
/// file's number, the slot and its generation. A removed file that is still open keeps its number
/// from other files.
const SOCKET_ENDING: &str = "control";

pub(in crate::ledger) fn socket_path(file: &LedgerFile, slot: usize, generation: u64) -> PathBuf {
    let (mut path, number) = (file.path().as_os_str().to_owned(), file.number());
    path.push(format!("-{number}-{slot}-{generation}.{SOCKET_ENDING}"));
    path.into()
}

#[derive(Debug)]
pub(in crate::ledger) struct Served {
    /// Shut down to end the thread. A close is not enough: a forked child has the socket too.
    pub(super) stop: UnixStream,
    pub(super) path: PathBuf,
}

impl Served {
    pub(in crate::ledger) fn close(&self) {
        if let Err(error) = fs::remove_file(&self.path) {
            log!(debug, %error, "a ledger's socket could not be removed");
        }
        let _ = self.stop.shutdown(Shutdown::Both);
    }
}
