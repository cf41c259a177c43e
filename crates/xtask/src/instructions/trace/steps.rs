//! Stepping through a program from mark to mark.
//!
//! The program asks to be traced and marks a stretch by sending itself `SIGUSR1` before and after.
//! Between stretches it runs freely; within one it stops after every instruction, which is counted.
//! That needs no counter of the processor's and no right but to trace a child.

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

/// What `counted` ends with if it may not be traced.
const REFUSED: i32 = 77;

/// Keeps this process, and those it starts, on the core it is on: a step then costs a switch and
/// no wake-up elsewhere. It is all the same to the counts, so that it may fail.
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

/// Ends a program that is still stopped; one that is gone already is gone.
fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

fn follow(child: &Child) -> Result<Stretches> {
    let pid = Pid::from_raw(child.id().try_into().context("a process has a number")?);
    let mut tally = Tally::default();
    loop {
        // What is sent on to the program: none of our marks and steps.
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
                    "the system kills who asks for it".to_owned(),
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

/// Steps by stretches.
#[derive(Debug, Default)]
struct Tally {
    stretches: Vec<u64>,
    /// Steps since the mark that began the stretch.
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

    /// Begins a stretch, or ends it.
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
