//! Processes in which this command runs itself again, and the private directory of their ledger.
//!
//! Such a process ends when its standard input ends ([`Stop::on_input_end`]), so also when its
//! starter ends in any way, SIGKILL included. No process outlives the command, and the last process
//! removes the directory if the command could not.
//!
//! [`Stop::on_input_end`]: crate::stop::Stop::on_input_end

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use cuvmm::LedgerView;
use cuvmm::ledger::FILE_ENDING;
use tempfile::TempDir;

/// The time in which a process has to end after its input.
const GRACE: Duration = Duration::from_secs(2);

/// The interval of looks at a process that should end.
const LOOK: Duration = Duration::from_millis(2);

/// Makes a directory that only this user can open, in memory if possible.
///
/// # Errors
/// No directory can be made.
pub fn private_directory(prefix: &str) -> anyhow::Result<TempDir> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    let places = runtime.into_iter().chain(["/dev/shm".into()]);
    let mut builder = tempfile::Builder::new();
    let builder = builder.prefix(prefix).permissions(only_this_user());
    let made = places
        .filter_map(|place| builder.tempdir_in(place).ok())
        .next();
    made.map_or_else(|| builder.tempdir(), Ok)
        .context("no private directory for the ledger")
}

fn only_this_user() -> Permissions {
    Permissions::from_mode(0o700)
}

/// Removes a private directory when no process is left in its ledger, even if the command that made
/// it was killed. Otherwise the next process that ends removes it. A directory with other files
/// than ledgers' stays.
pub fn remove_left(directory: &Path) {
    let files = std::fs::read_dir(directory).into_iter().flatten().flatten();
    // Only the name counts: a directory's name above says nothing about a file.
    let is_ledgers = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default();
        name.to_string_lossy().contains(FILE_ENDING)
    };
    let (ledgers, others): (Vec<PathBuf>, Vec<PathBuf>) =
        files.map(|file| file.path()).partition(is_ledgers);
    let used = |path: &PathBuf| {
        let ledger = LedgerView::open(path);
        ledger.is_ok_and(|ledger| !ledger.stats().processes.is_empty())
    };
    if others.is_empty() && !ledgers.iter().any(used) {
        ledgers.iter().for_each(|path| {
            // Another process that ends may have removed the file.
            let _ = std::fs::remove_file(path);
        });
        let _ = std::fs::remove_dir(directory);
    }
}

/// Returns the instant by which processes whose input ends now should have ended.
pub fn grace() -> Instant {
    Instant::now() + GRACE
}

/// Returns how a process ended, if it ends by `until`.
pub fn ended(process: &mut Child, until: Instant) -> Option<ExitStatus> {
    loop {
        match process.try_wait() {
            Ok(None) if Instant::now() < until => thread::sleep(LOOK),
            outcome => return outcome.ok().flatten(),
        }
    }
}

/// Waits for a process whose input has ended, and kills it if it has not ended by `until`. Returns
/// how it ended.
///
/// # Errors
/// The process cannot be waited for.
pub fn end(process: &mut Child, until: Instant) -> io::Result<ExitStatus> {
    match ended(process, until) {
        Some(status) => Ok(status),
        None => {
            // It fails if the process has ended meanwhile.
            let _ = process.kill();
            process.wait()
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{FILE_ENDING, private_directory, remove_left};

    #[test]
    fn a_directory_with_other_files_stays_whatever_its_name_is() {
        let folder = private_directory(&format!("cuvmm-test{FILE_ENDING}-")).unwrap();
        let [ledger, other] = [format!("gpu{FILE_ENDING}"), "notes".to_owned()];
        let [ledger, other] = [ledger, other].map(|name| folder.path().join(name));
        std::fs::write(&ledger, "").unwrap();
        std::fs::write(&other, "").unwrap();
        remove_left(folder.path());
        assert!(ledger.exists() && other.exists());
        std::fs::remove_file(&other).unwrap();
        remove_left(folder.path());
        assert!(!folder.path().exists());
    }
}
