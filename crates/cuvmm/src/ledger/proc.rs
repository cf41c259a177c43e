//! Processes, by their numbers: whether one has ended.
//!
//! A number means something only in its own PID namespace, and can later be another process's. The
//! start time tells the two apart. `/proc` shows it, but a process that enters a new namespace
//! keeps the mounted `/proc` of the old one. So start times count only where `/proc` is that of the
//! process's own namespace.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    Runs,
    /// All of its threads have ended.
    Ended,
    Unknown,
}

/// A process that ran when it was found, and whose end can be noticed later.
#[derive(Debug)]
pub(crate) enum Process {
    Pidfd(OwnedFd),
    #[cfg(test)]
    Probed(u32),
}

#[derive(Debug)]
pub(crate) enum Look {
    Found(Process),
    /// The system gives no descriptor of the process.
    NotHeld(Life),
}

/// `started` is 0 if unknown.
pub(crate) fn look(namespace: u64, pid: u64, started: u64) -> Look {
    let id = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let Some(id) = id.filter(|_| namespace != 0 && namespace == own_namespace()) else {
        return Look::NotHeld(Life::Unknown);
    };
    #[cfg(test)]
    if let Some(look) = probed(id.as_raw_nonzero().get().cast_unsigned()) {
        return look;
    }
    let opened = pidfd_open(id, PidfdFlags::empty());
    let has_ended = match &opened {
        Ok(pidfd) => is_readable(pidfd),
        Err(Errno::SRCH) => true,
        Err(_) => test_kill_process(id) == Err(Errno::SRCH),
    };
    if has_ended {
        return Look::NotHeld(Life::Ended);
    }
    // The stat file is read after the number was opened: if its start time matches, the descriptor
    // is of the process in question.
    match (Stat::of(id), opened) {
        (Ok(found), _) if started != 0 && (found.started != started || found.has_ended) => {
            Look::NotHeld(Life::Ended)
        }
        (Ok(_), Ok(pidfd)) if started != 0 => Look::Found(Process::Pidfd(pidfd)),
        (Ok(_), Err(_)) if started != 0 => Look::NotHeld(Life::Runs),
        (Ok(_), _) => Look::NotHeld(Life::Unknown),
        // `/proc` can hide the processes of other users.
        (Err(error), _) if is_hidden(&error) => Look::NotHeld(Life::Unknown),
        // The number is in use. Without a descriptor, the next look decides whether by another
        // process.
        (Err(_), _) => Look::NotHeld(Life::Runs),
    }
}

/// Returns for each process whether all of its threads have ended, with one system call.
pub(crate) fn have_ended(processes: &[&Process]) -> Vec<bool> {
    #[cfg(test)]
    if let Some(answers) = processes.iter().map(|it| it.probed()).collect() {
        return answers;
    }
    let pidfds = processes.iter().filter_map(|it| it.pidfd());
    // A pidfd is readable when all threads have ended.
    let mut polled: Vec<PollFd<'_>> = pidfds.map(|it| PollFd::new(it, PollFlags::IN)).collect();
    match poll(&mut polled, Some(&Timespec::default())) {
        Ok(_) => polled.iter().map(|it| !it.revents().is_empty()).collect(),
        // More descriptors than the process may open by now.
        Err(Errno::INVAL) if processes.len() > 1 => {
            processes.iter().flat_map(|it| have_ended(&[it])).collect()
        }
        Err(_) => vec![false; processes.len()],
    }
}

impl Process {
    fn pidfd(&self) -> Option<&OwnedFd> {
        match self {
            Self::Pidfd(pidfd) => Some(pidfd),
            #[cfg(test)]
            Self::Probed(_) => None,
        }
    }

    #[cfg(test)]
    fn probed(&self) -> Option<bool> {
        match self {
            Self::Pidfd(_) => None,
            Self::Probed(pid) => {
                let life = super::probe::ask(|probe| probe.look(*pid)).flatten();
                life.map(|life| life == Life::Ended)
            }
        }
    }
}

#[cfg(test)]
fn probed(pid: u32) -> Option<Look> {
    let (life, holds) = super::probe::ask(|probe| (probe.look(pid), probe.holds()))?;
    Some(match life? {
        Life::Runs if holds => Look::Found(Process::Probed(pid)),
        life => Look::NotHeld(life),
    })
}

fn is_readable(pidfd: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(pidfd, PollFlags::IN)];
    matches!(poll(&mut polled, Some(&Timespec::default())), Ok(1..))
}

/// Returns `true` if `/proc` does not show a process that may exist all the same.
fn is_hidden(error: &io::Error) -> bool {
    use io::ErrorKind::{NotFound, PermissionDenied};
    let is_gone = error.raw_os_error() == Some(Errno::SRCH.raw_os_error());
    is_gone || matches!(error.kind(), NotFound | PermissionDenied)
}

pub(crate) fn own_id() -> u32 {
    #[cfg(test)]
    if let Some(id) = super::probe::ask(|probe| probe.pid()) {
        return id;
    }
    std::process::id()
}

/// Returns a number for this process's PID and time namespaces, or 0 if they are unknown. Start
/// times are different in different time namespaces.
pub(crate) fn own_namespace() -> u64 {
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

/// Returns when this process started, in clock ticks since boot, or 0 if `/proc` does not show it.
pub(crate) fn own_start() -> u64 {
    #[cfg(test)]
    if super::probe::ask(|probe| probe.namespace())
        .flatten()
        .is_some()
    {
        return 0;
    }
    Stat::of(rustix::process::getpid()).map_or(0, |it| it.started)
}

/// The part of `/proc/PID/stat` that identifies a process.
#[derive(Debug)]
struct Stat {
    /// In clock ticks since boot.
    started: u64,
    /// `true` if all threads have ended, and the parent has not reaped the process.
    has_ended: bool,
}

impl Stat {
    fn of(pid: Pid) -> io::Result<Self> {
        if !is_own_proc(&fs::read_to_string("/proc/self/status")?) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let stat = fs::read(format!("/proc/{pid}/stat"))?;
        Self::parse(&stat).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn parse(stat: &[u8]) -> Option<Self> {
        // The second field is the program's name in parentheses, which may contain anything.
        let end = stat.iter().rposition(|&byte| byte == b')')?;
        let rest = str::from_utf8(stat.get(end + 1..)?).ok()?;
        // The rest begins with field 3. Field 20 counts the threads, and field 22 is the start.
        let mut fields = rest.split_whitespace();
        let state = fields.next()?;
        let threads: u64 = fields.nth(16)?.parse().ok()?;
        Some(Self {
            started: fields.nth(1)?.parse().ok()?,
            // The state is that of the first thread.
            has_ended: matches!(state, "Z" | "X") && threads <= 1,
        })
    }
}

/// Returns `true` if `/proc` belongs to this process's PID namespace, by `/proc/self/status`: the
/// `/proc` of an outer namespace shows one number for each namespace from there on.
fn is_own_proc(status: &str) -> bool {
    let mut lines = status.lines();
    let numbers = lines.find_map(|line| line.strip_prefix("NSpid:"));
    let numbers = numbers.map(|it| it.split_whitespace().count());
    numbers == Some(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(look: &Look) -> Life {
        match look {
            Look::Found(process) if have_ended(&[process]) == [true] => Life::Ended,
            Look::Found(_) => Life::Runs,
            Look::NotHeld(life) => *life,
        }
    }

    #[test]
    fn this_process_runs_and_is_no_other() {
        let (namespace, pid) = (own_namespace(), u64::from(std::process::id()));
        let started = own_start();
        assert!(namespace != 0 && started != 0);
        let look = |namespace, pid, started| life(&super::look(namespace, pid, started));
        assert_eq!(look(namespace, pid, started), Life::Runs);
        assert_eq!(look(namespace, pid, started + 1), Life::Ended);
        assert_eq!(look(namespace, pid, 0), Life::Unknown);
        for (namespace, pid) in [(namespace + 1, pid), (0, pid), (namespace, 0)] {
            assert_eq!(look(namespace, pid, started), Life::Unknown);
        }
        assert_eq!(look(namespace, i32::MAX as u64, started), Life::Ended);
        assert_eq!(look(namespace, u64::MAX, started), Life::Unknown);
    }

    #[test]
    fn a_process_has_ended_also_before_its_parent_is_told() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let (namespace, pid) = (own_namespace(), u64::from(child.id()));
        let started = Stat::of(Pid::from_child(&child)).unwrap().started;
        let found = look(namespace, pid, started);
        assert_eq!(life(&found), Life::Runs);
        child.kill().unwrap();
        let Look::Found(process) = &found else {
            panic!("it is not held")
        };
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while have_ended(&[process]) == [false] {
            assert!(std::time::Instant::now() < until);
        }
        assert!(Stat::of(Pid::from_child(&child)).unwrap().has_ended);
        assert_eq!(life(&look(namespace, pid, 0)), Life::Ended);
        child.wait().unwrap();
        assert_eq!(life(&look(namespace, pid, started)), Life::Ended);
        assert!(have_ended(&[]).is_empty());
        assert_eq!(have_ended(&[process, process]), [true, true]);
    }

    #[test]
    fn a_process_whose_first_thread_has_ended_runs() {
        let line = |state, threads| {
            format!("7 (a) b) {state} 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 {threads} 18 19 20")
        };
        let parse = |state, threads| Stat::parse(line(state, threads).as_bytes()).unwrap();
        assert_eq!(parse('S', 1).started, 19);
        assert!(!parse('S', 1).has_ended && !parse('Z', 2).has_ended && parse('Z', 1).has_ended);
        assert!(Stat::parse(b"7 (a) Z 1").is_none() && Stat::parse(b"").is_none());
    }

    #[test]
    fn an_outer_proc_is_not_this_process_s_own() {
        assert!(is_own_proc("Name:\ta\nNSpid:\t7\nNSpgid:\t7\n"));
        assert!(!is_own_proc("Name:\ta\nNSpid:\t7\t1\n") && !is_own_proc(""));
    }
}
