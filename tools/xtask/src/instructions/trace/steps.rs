//! Single-stepping a program from mark to mark.
//!
//! The program requests to be traced and marks a stretch by sending itself `SIGUSR1` before and
//! after it, on a thread that is traced too. Between stretches it runs freely, and so do its other
//! threads always. Within one it stops after every instruction, which
//! is counted. This needs no hardware counter and no permission other than to trace a child.

use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command};

use anyhow::{Context as _, Result, bail};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getcpu, sched_setaffinity};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::{Stretches, Visited};

/// The exit code of `counted` if it may not be traced.
const REFUSED: i32 = 77;

/// Keeps this process and its children on the current core, so that a step costs a context switch
/// and no wake-up on another core. A failure is ignored, because the counts do not depend on it.
pub(super) fn stay_on_one_core() {
    let mut cores = CpuSet::new();
    let chosen = sched_getcpu().and_then(|core| cores.set(core));
    if chosen.is_ok() {
        let _ = sched_setaffinity(Pid::from_raw(0), &cores);
    }
}

/// Runs a program to its end. Adds the instructions that it executes in stretches to `visited`.
pub(super) fn trace(
    program: &Path,
    arguments: &[String],
    visited: Option<&mut Visited>,
) -> Result<Stretches> {
    let mut child = Command::new(program)
        .args(arguments)
        .spawn()
        .with_context(|| program.display().to_string())?;
    let outcome = follow(&child, visited);
    if outcome.is_err() {
        end(&mut child);
    }
    outcome
}

/// Ends a program that may still be stopped. Does nothing if it has ended already.
fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

fn follow(child: &Child, mut visited: Option<&mut Visited>) -> Result<Stretches> {
    let program = Pid::from_raw(child.id().try_into().context("a process has a number")?);
    let mut tally = Tally::default();
    let mut loaded = None;
    loop {
        // The signal that is passed on to the program; marks and steps are not.
        let mut signal = None;
        // A thread that lets itself be traced is waited for like the program's first.
        let status = waitpid(None, Some(WaitPidFlag::__WALL));
        match status {
            Ok(WaitStatus::Stopped(thread, Signal::SIGUSR1)) => tally.mark(thread),
            Ok(WaitStatus::Stopped(thread, Signal::SIGTRAP)) if tally.counts(thread) => {
                tally.step();
                if let Some(visited) = &mut visited {
                    let code = match &loaded {
                        Some(code) => code,
                        None => loaded.insert(code_of(program)?),
                    };
                    let at = ptrace::getregs(thread).context("reading registers")?.rip;
                    if code.contains(&at) {
                        visited.insert(at - code.start);
                    }
                }
            }
            Ok(WaitStatus::Stopped(_, other)) => signal = Some(other),
            Ok(WaitStatus::Exited(thread, _)) if thread != program => continue,
            Ok(WaitStatus::Exited(_, 0)) => return Ok(Stretches::Counted(tally.stretches)),
            Ok(WaitStatus::Exited(_, REFUSED)) => {
                return Ok(Stretches::Refused("the system refuses tracing".to_owned()));
            }
            Ok(WaitStatus::Signaled(_, Signal::SIGSYS, _)) => {
                return Ok(Stretches::Refused(
                    "the system kills a process that requests tracing".to_owned(),
                ));
            }
            Ok(WaitStatus::Exited(_, code)) => bail!("counted ended with {code}"),
            Ok(WaitStatus::Signaled(_, signal, _)) => bail!("counted was ended by {signal}"),
            Ok(_) | Err(Errno::EINTR) => continue,
            Err(error) => return Err(error).context("waiting for counted"),
        }
        let Some(thread) = status.ok().and_then(|it| it.pid()) else {
            continue;
        };
        if tally.counts(thread) {
            ptrace::step(thread, signal).context("stepping")?;
        } else {
            ptrace::cont(thread, signal).context("going on")?;
        }
    }
}

/// Returns the addresses at which a program is loaded, without its libraries.
fn code_of(program: Pid) -> Result<Range<u64>> {
    let file = std::fs::read_link(format!("/proc/{program}/exe"))?;
    let maps = std::fs::read_to_string(format!("/proc/{program}/maps"))?;
    let mut ranges = maps
        .lines()
        .filter(|line| line.ends_with(&*file.to_string_lossy()))
        .filter_map(|line| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let number = |text| u64::from_str_radix(text, 16).ok();
            Some(number(start)?..number(end)?)
        });
    let first = ranges.next().context("a program is mapped")?;
    let end = ranges.next_back().map_or(first.end, |last| last.end);
    Ok(first.start..end)
}

#[derive(Debug, Default)]
struct Tally {
    stretches: Vec<u64>,
    /// The thread whose mark began the current stretch, and the steps since.
    running: Option<(Pid, u64)>,
}

impl Tally {
    /// Returns `true` if the current stretch is of this thread.
    fn counts(&self, thread: Pid) -> bool {
        self.running.is_some_and(|(running, _)| running == thread)
    }

    fn step(&mut self) {
        if let Some((_, steps)) = &mut self.running {
            *steps += 1;
        }
    }

    /// Begins or ends a stretch.
    fn mark(&mut self, thread: Pid) {
        match self.running.take() {
            Some((_, steps)) => self.stretches.push(steps),
            None => self.running = Some((thread, 0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_between_marks() {
        let (thread, other) = (Pid::from_raw(7), Pid::from_raw(8));
        let mut tally = Tally::default();
        tally.step();
        assert!(!tally.counts(thread));
        for steps in [0, 3] {
            tally.mark(thread);
            assert!(tally.counts(thread) && !tally.counts(other));
            (0..steps).for_each(|_| tally.step());
            tally.mark(thread);
            tally.step();
        }
        tally.mark(other);
        assert_eq!(tally.stretches, [0, 3]);
    }
}
