//! Handles by which another process gets memory: the operating system's own, and fabric handles.
//!
//! The system's own handle is a file descriptor on Unix and a Win32 NT handle on Windows, so a build has
//! the one or the other. [`OsHandle`] and [`HandleTypes::OS`] name it on both.

#[cfg(unix)]
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
#[cfg(windows)]
use std::os::windows::io::{AsRawHandle as _, OwnedHandle, RawHandle};

use crate::HandleTypes;

/// A handle of the operating system, closed when it is dropped: a descriptor on Unix, an NT handle on
/// Windows.
#[cfg(unix)]
pub type OsHandle = OwnedFd;
/// A handle of the operating system, closed when it is dropped: a descriptor on Unix, an NT handle on
/// Windows.
#[cfg(windows)]
pub type OsHandle = OwnedHandle;

/// The value of an [`OsHandle`], without ownership.
#[cfg(unix)]
pub type RawOsHandle = RawFd;
/// The value of an [`OsHandle`], without ownership.
#[cfg(windows)]
pub type RawOsHandle = RawHandle;

impl HandleTypes {
    /// The type of the operating system's own handles, [`OsHandle`]: [`POSIX_FD`](Self::POSIX_FD) on Unix,
    /// [`WIN32`](Self::WIN32) on Windows.
    pub const OS: Self = if cfg!(windows) {
        Self::WIN32
    } else {
        Self::POSIX_FD
    };
}

/// The handle that `export` returns.
#[derive(Debug)]
#[non_exhaustive]
pub enum Exported {
    /// A close-on-exec descriptor that keeps the memory alive, for [`HandleTypes::POSIX_FD`].
    #[cfg(unix)]
    Fd(OwnedFd),
    /// An NT handle that child processes do not inherit and that keeps the memory alive, for
    /// [`HandleTypes::WIN32`]. Another process uses it after `DuplicateHandle`.
    #[cfg(windows)]
    Win32(OwnedHandle),
    /// 64 bytes that name the memory across nodes, for [`HandleTypes::FABRIC`].
    Fabric([u8; 64]),
}

impl Exported {
    /// Returns the handle as `import` takes it. The caller keeps this value alive during that call.
    #[must_use]
    pub fn as_source(&self) -> ImportSource {
        match self {
            #[cfg(unix)]
            Self::Fd(descriptor) => ImportSource::Fd(descriptor.as_raw_fd()),
            #[cfg(windows)]
            Self::Win32(handle) => ImportSource::Win32(handle.as_raw_handle()),
            Self::Fabric(name) => ImportSource::Fabric(*name),
        }
    }
}

impl From<OsHandle> for Exported {
    fn from(handle: OsHandle) -> Self {
        #[cfg(unix)]
        return Self::Fd(handle);
        #[cfg(windows)]
        return Self::Win32(handle);
    }
}

/// The handle that `import` takes.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum ImportSource {
    /// A descriptor by value. The caller keeps ownership.
    #[cfg(unix)]
    Fd(RawFd),
    /// An NT handle by value. The caller keeps ownership.
    #[cfg(windows)]
    Win32(RawHandle),
    /// A fabric handle.
    Fabric([u8; 64]),
}

impl ImportSource {
    /// Returns the type of the handle.
    #[must_use]
    pub const fn handle_type(&self) -> HandleTypes {
        match self {
            Self::Fabric(_) => HandleTypes::FABRIC,
            _ => HandleTypes::OS,
        }
    }

    /// Returns the value of the operating system's handle; `None` for a fabric handle.
    #[must_use]
    pub const fn os_handle(&self) -> Option<RawOsHandle> {
        match *self {
            #[cfg(unix)]
            Self::Fd(descriptor) => Some(descriptor),
            #[cfg(windows)]
            Self::Win32(handle) => Some(handle),
            Self::Fabric(_) => None,
        }
    }
}
