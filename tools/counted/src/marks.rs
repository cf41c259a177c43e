//! Marks that a tracer sees as stops: a signal that the program sends to itself.
//!
//! `unsafe` here: the system calls by which a thread lets itself be traced and stops.
#![allow(unsafe_code)]

/// Sets marks, or none while a path warms up.
#[derive(Clone, Copy)]
pub(crate) struct Marks {
    traced: bool,
}

impl Marks {
    /// Lets the parent process trace this thread.
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

    pub(crate) fn around<T>(&self, work: impl FnOnce() -> T) -> T {
        self.set();
        let outcome = work();
        self.set();
        outcome
    }

    /// Sets a mark on a thread that is not traced yet, and lets it be traced.
    pub(crate) fn set_on_this_thread(&self) {
        if self.traced {
            // A thread that is traced already refuses. Without the tracing its marks end the process.
            let _ = Self::new();
        }
        self.set();
    }

    /// Never inlined, so that its cost is the same around nothing and around work.
    #[inline(never)]
    pub(crate) fn set(&self) {
        #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
        if self.traced {
            // SAFETY: the call sends a signal to the calling thread, and its tracer suppresses it.
            let _ = unsafe { libc::raise(libc::SIGUSR1) };
        }
        #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
        let _ = self.traced;
    }
}
