//! Single-stepping a program from mark to mark.
//!
//! The program requests to be traced and marks a stretch by sending itself `SIGUSR1` before and
//! after it. Between stretches it runs freely. Within one it stops after every instruction, which
//! is counted. This needs no hardware counter and no permission other than to trace a child.

use std::path::Path;
use std::process::{Child, Command};

use anyhow::{Context as _, Result, bail};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getcpu, sched_setaffinity};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use super::Stretches;

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

/// Runs a program to its end.
pub(super) fn trace(program: &Path, arguments: &[String]) -> Result<Stretches> {
    let mut child = Command::new(program)
        .args(arguments)
        .spawn()
        .with_context(|| program.display().to_string())?;
    let outcome = follow(&child);
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

fn follow(child: &Child) -> Result<Stretches> {
    let pid = Pid::from_raw(child.id().try_into().context("a process has a number")?);
    let mut tally = Tally::default();
    loop {
        // The signal that is passed on to the program; marks and steps are not.
        let mut signal = None;
        match waitpid(pid, None) {
            Ok(WaitStatus::Stopped(_, Signal::SIGUSR1)) => tally.mark(),
            Ok(WaitStatus::Stopped(_, Signal::SIGTRAP)) if tally.counts() => tally.step(),
            Ok(WaitStatus::Stopped(_, other)) => signal = Some(other),
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
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).context("waiting for counted"),
        }
        if tally.counts() {
            ptrace::step(pid, signal).context("stepping")?;
        } else {
            ptrace::cont(pid, signal).context("going on")?;
        }
    }
}

/// The steps counted, by stretch.
#[derive(Debug, Default)]
struct Tally {
    stretches: Vec<u64>,
    /// The steps since the mark that began the current stretch.
    running: Option<u64>,
}

impl Tally {
    const fn counts(&self) -> bool {
        self.running.is_some()
    }

    fn step(&mut self) {
        if let Some(steps) = &mut self.running {
            *steps += 1;
        }
    }

    /// Begins or ends a stretch.
    fn mark(&mut self) {
        match self.running.take() {
            Some(steps) => self.stretches.push(steps),
            None => self.running = Some(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_between_marks() {
        let mut tally = Tally::default();
        tally.step();
        assert!(!tally.counts());
        for steps in [0, 3] {
            tally.mark();
            assert!(tally.counts());
            (0..steps).for_each(|_| tally.step());
            tally.mark();
            tally.step();
        }
        tally.mark();
        assert_eq!(tally.stretches, [0, 3]);
    }
}
