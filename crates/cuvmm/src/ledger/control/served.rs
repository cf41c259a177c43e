//! The socket of a process, and the end of the thread that serves it.

use std::fs;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use super::super::file::LedgerFile;

/// The end of the name of every socket. The name begins with that of the ledger's file, followed by
/// the file's number, the slot and how often it was taken. A file that was removed while processes
/// have it open leaves its number to no other.
const SOCKET_ENDING: &str = "control";

/// Returns the path of the socket of a process that took a ledger's slot.
pub(in crate::ledger) fn socket_path(file: &LedgerFile, slot: usize, generation: u64) -> PathBuf {
    let (mut path, number) = (file.path().as_os_str().to_owned(), file.number());
    path.push(format!("-{number}-{slot}-{generation}.{SOCKET_ENDING}"));
    path.into()
}

/// The socket of this process, which a thread serves.
#[derive(Debug)]
pub(in crate::ledger) struct Served {
    /// Shut down to end the thread. Closing it is not enough: a forked child has it too.
    pub(super) stop: UnixStream,
    pub(super) path: PathBuf,
}

impl Served {
    /// Ends the thread and removes the socket.
    pub(in crate::ledger) fn close(&self) {
        if let Err(error) = fs::remove_file(&self.path) {
            log!(debug, %error, "a ledger's socket could not be removed");
        }
        let _ = self.stop.shutdown(Shutdown::Both);
    }
}
