//! Marks that a tracer sees as stops: a signal that the program sends to itself.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
use nix::{
    sys::ptrace,
    sys::signal::{Signal, kill},
    unistd::Pid,
};

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
    pub(crate) fn new() -> nix::Result<Self> {
        ptrace::traceme()?;
        Ok(Self { traced: true })
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
            let _ = kill(Pid::this(), Signal::SIGUSR1);
        }
        #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
        let _ = self.traced;
    }
}
