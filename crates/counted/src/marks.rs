//! Marks that a tracer sees as stops: a signal that the program sends itself.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
use nix::{
    sys::ptrace,
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Sets marks, or none while a path is warmed up.
pub(crate) struct Marks {
    traced: bool,
}

impl Marks {
    /// Has whoever started this program trace it.
    ///
    /// # Errors
    /// When the system does not allow that.
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

    /// Does the work between two marks.
    pub(crate) fn around<T>(&self, work: impl FnOnce() -> T) -> T {
        self.set();
        let outcome = work();
        self.set();
        outcome
    }

    /// Never inlined, so that it costs the same around nothing and around work.
    #[inline(never)]
    fn set(&self) {
        #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
        if self.traced {
            // A process can always send itself a signal, and its tracer keeps it from arriving.
            let _ = kill(Pid::this(), Signal::SIGUSR1);
        }
        #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
        let _ = self.traced;
    }
}
