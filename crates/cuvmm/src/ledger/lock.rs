//! Locks on a ledger's or a group's file, which the kernel releases when a process dies.
//!
//! They are open file description locks on single bytes (`fcntl(F_OFD_SETLK)`). They belong to the
//! open file, so two ledgers in one process exclude each other, and closing another descriptor of
//! the file releases nothing. A forked child shares the open file and keeps a lock of its dead
//! parent. So a held lock does not prove that its taker lives; see [`dead`](super::dead).
//!
//! `unsafe` in this file: `fcntl` with a lock, which no safe wrapper offers for a range of bytes.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd as _;

use rustix::io::Errno;

/// The locked byte, which need not exist in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lock {
    /// Held by the owner of a slot, and by a process that is taking the slot.
    Owner(usize),
    /// Held while a rank joins or leaves a [group](crate::group).
    Joining,
}

impl Lock {
    const fn byte(self) -> libc::off_t {
        match self {
            Self::Owner(slot) => 1_000 + slot as libc::off_t,
            Self::Joining => 999,
        }
    }

    const fn record(self, kind: libc::c_int) -> libc::flock {
        libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: self.byte(),
            l_len: 1,
            l_pid: 0,
        }
    }

    /// Takes the lock for this open file; returns `false` if another open file has it.
    pub(crate) fn take(self, file: &File) -> Result<bool, Errno> {
        reached();
        match set(file, libc::F_OFD_SETLK, &mut self.record(libc::F_WRLCK)) {
            Ok(()) => Ok(found(true)),
            Err(Errno::AGAIN | Errno::ACCESS) => Ok(found(false)),
            Err(errno) => Err(errno),
        }
    }

    /// Forked children that share the open file lose the lock too.
    pub(crate) fn release(self, file: &File) -> Result<(), Errno> {
        if !reached() {
            return Ok(());
        }
        set(file, libc::F_OFD_SETLK, &mut self.record(libc::F_UNLCK))
    }

    /// Returns `true` if another open file has the lock.
    pub(crate) fn is_held_elsewhere(self, file: &File) -> Result<bool, Errno> {
        reached();
        let mut record = self.record(libc::F_WRLCK);
        set(file, libc::F_OFD_GETLK, &mut record)?;
        Ok(found(record.l_type != libc::F_UNLCK as libc::c_short))
    }
}

/// Runs before a lock is used, or a file is named. Returns `false` if a test has ended the process.
pub(crate) fn reached() -> bool {
    #[cfg(test)]
    return super::probe::ask(|probe| probe.locks()).unwrap_or(true);
    #[cfg(not(test))]
    true
}

fn found(outcome: bool) -> bool {
    #[cfg(test)]
    super::probe::ask(|probe| probe.found(outcome.into()));
    outcome
}

fn set(file: &File, operation: libc::c_int, record: &mut libc::flock) -> Result<(), Errno> {
    loop {
        // SAFETY: the descriptor is open, and `record` is a valid `flock` that the call may write.
        let answer = unsafe { libc::fcntl(file.as_raw_fd(), operation, &raw mut *record) };
        if answer == 0 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::INVAL);
        if errno != Errno::INTR {
            return Err(errno);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_excludes_other_open_files_until_it_is_released() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let open = || {
            File::options()
                .create(true)
                .truncate(false)
                .read(true)
                .write(true)
                .open(&path)
                .unwrap()
        };
        let (one, other) = (open(), open());
        assert!(Lock::Owner(3).take(&one).unwrap());
        assert!(Lock::Owner(3).take(&one).unwrap(), "it has it already");
        assert!(!Lock::Owner(3).take(&other).unwrap());
        assert!(Lock::Owner(3).is_held_elsewhere(&other).unwrap());
        assert!(!Lock::Owner(3).is_held_elsewhere(&one).unwrap());
        assert!(Lock::Owner(4).take(&other).unwrap(), "another byte");
        drop(open());
        assert!(
            !Lock::Owner(3).take(&other).unwrap(),
            "closing releases nothing"
        );
        Lock::Owner(3).release(&one).unwrap();
        assert!(Lock::Owner(3).take(&other).unwrap());
        drop(other);
        assert!(
            Lock::Owner(3).take(&one).unwrap(),
            "the last descriptor was closed"
        );
    }
}
