//! Marks that a tracer sees as stops: a signal that the program sends to itself.
//!
//! `unsafe` here: the system call by which the process lets itself be traced.
#![allow(unsafe_code)]

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
use rustix::process::{Signal, getpid, kill_process};

/// Sets marks, or none while a path warms up.
pub(crate) struct Marks {
    traced: bool,
}

impl Marks {
    /// Lets the parent process trace this process.
    ///
    /// # Errors
    /// Returns an error if the system does not allow it.
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    pub(crate) fn new() -> std::io::Result<Self> {
        // SAFETY: the request ignores its arguments, and touches no memory of the process.
        match unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) } {
            0 => Ok(Self { traced: true }),
            _ => Err(std::io::Error::last_os_error()),
        }
    }

    #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
    pub(crate) fn new() -> Result<Self, &'static str> {
        Err("instructions are counted on Linux on x86-64 only")
    }

    pub(crate) const fn silent() -> Self {
        Self { traced: false }
    }

    /// Runs the work between two marks.
    pub(crate) fn around<T>(&self, work: impl FnOnce() -> T) -> T {
        self.set();
        let outcome = work();
        self.set();
        outcome
    }

    /// Never inlined, so that its cost is the same around nothing and around work.
    #[inline(never)]
    fn set(&self) {
        #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
        if self.traced {
            // A process can always send a signal to itself, and its tracer suppresses it.
            let _ = kill_process(getpid(), Signal::USR1);
        }
        #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
        let _ = self.traced;
    }
}
