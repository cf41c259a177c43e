//! Facts about processes from `/proc`.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Returns the number of this process.
pub(super) fn own_id() -> u32 {
    #[cfg(test)]
    if let Some(id) = super::probe::ask(|probe| probe.pid()) {
        return id;
    }
    std::process::id()
}

/// Returns `true` if the process of a number is known to have ended that started at `started`, 0 if
/// that is unknown.
pub(super) fn has_ended(pid: u32, started: u64) -> bool {
    #[cfg(test)]
    if let Some(ended) = super::probe::ask(|probe| probe.has_ended(pid)) {
        return ended;
    }
    let Some(id) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return false;
    };
    match pidfd_open(id, PidfdFlags::empty()) {
        Ok(process) => {
            // Read after the process was opened: its number cannot be reused from here on.
            let found = start_time(pid);
            if started != 0 && found.is_some_and(|found| found != started) {
                return true;
            }
            // Readable when all threads have ended.
            let mut polled = [PollFd::new(&process, PollFlags::IN)];
            matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..))
        }
        Err(errno) => errno == Errno::SRCH,
    }
}

/// Returns a number for this process's PID and time namespaces, or 0 if they are unknown. Start
/// times are different in different time namespaces.
pub(super) fn own_namespace() -> u64 {
    #[cfg(test)]
    if let Some(namespace) = super::probe::ask(|probe| probe.namespace()).flatten() {
        return namespace;
    }
    let inode = |name| fs::metadata(name).map_or(0, |found| found.ino());
    let (pids, times) = (inode("/proc/self/ns/pid"), inode("/proc/self/ns/time"));
    match pids {
        0 => 0,
        _ => pids ^ (times << 32),
    }
}

/// Returns `true` if process numbers of a PID namespace can be looked up by this process.
pub(super) fn is_visible(namespace: u64) -> bool {
    namespace != 0 && namespace == own_namespace()
}

/// Returns when a process started, in clock ticks since boot, or `None` if it is not there.
pub(super) fn start_time(pid: u32) -> Option<u64> {
    #[cfg(test)]
    if let Some(ticks) = super::probe::ask(|probe| probe.start_time()).flatten() {
        return Some(ticks);
    }
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in parentheses, which may contain anything.
    let end = stat.iter().rposition(|&byte| byte == b')')?;
    let rest = str::from_utf8(stat.get(end + 1..)?).ok()?;
    // Field 22; the rest begins with field 3.
    rest.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_visible_and_has_a_start_time() {
        let namespace = own_namespace();
        assert!(is_visible(namespace));
        assert!(!is_visible(namespace + 1));
        assert!(!is_visible(0));
        let own = start_time(std::process::id());
        assert!(own.is_some_and(|ticks| ticks > 0), "{own:?}");
        assert_eq!(start_time(0), None);
    }
}
