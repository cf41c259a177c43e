//! Finding the driver's library and the functions in it.
//!
//! No driver function is called, so nothing here checks that the library is a real driver: the
//! toolkit ships a stub named `libcuda.so` for linking, which has every symbol and returns
//! [`CUDA_ERROR_STUB_LIBRARY`](crate::CUresult) from every call. The caller of `cuInit` has to
//! check for that code.
//!
//! `unsafe` is allowed here because opening a library runs its initializers, and because looking up
//! a symbol trusts the library to define the function that CUDA defines under that name.
#![allow(unsafe_code)]

use core::ffi::c_void;
use core::fmt;
use core::ptr::NonNull;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::{Api, MissingSymbol};

/// The names under which the driver's library is looked for, in this order: the name that the
/// driver installs, its path in the Windows subsystem for Linux, and a name that a toolkit's stub
/// has too (see the [module](self)).
#[cfg(not(windows))]
const CANDIDATES: &[&str] = &[
    "libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "libcuda.so",
];
/// The name under which the driver installs its library on Windows.
#[cfg(windows)]
const CANDIDATES: &[&str] = &["nvcuda.dll"];

/// A library that could not be opened, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The name or path that was tried.
    pub library: PathBuf,
    /// The dynamic linker's message.
    pub reason: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.library.display(), self.reason)
    }
}

/// The reason why the driver's library could not be loaded.
///
/// The text of [`NotFound`](Self::NotFound) has the names that were tried; with `{:#}` it also has the
/// dynamic linker's message for each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No library could be opened, as on a machine without NVIDIA's driver.
    #[error(fmt = not_found)]
    NotFound {
        /// Each name that was tried, in order.
        tried: Vec<Attempt>,
    },

    /// The library lacks a required function: it is a driver older than
    /// [`CudaVersion::OLDEST_SUPPORTED`](crate::CudaVersion::OLDEST_SUPPORTED), or not a CUDA
    /// driver.
    #[error("{} is not a CUDA driver of version {oldest} or later: {missing}", library.display(),
            oldest = crate::CudaVersion::OLDEST_SUPPORTED)]
    MissingSymbol {
        /// The library that was opened.
        library: PathBuf,
        /// The function, and the CUDA version that introduced it.
        missing: MissingSymbol,
    },

    /// This crate knows the driver's binary interface on 64-bit Linux and Windows only.
    #[error("the CUDA driver is supported on 64-bit Linux and Windows only, and this is {system}")]
    Unsupported {
        /// The operating system and architecture of this build.
        system: String,
    },
}

/// Writes the names that were tried, and in the alternate form the linker's message for each.
fn not_found(tried: &[Attempt], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str("no CUDA driver library could be opened: ")?;
    let (before, between) = if f.alternate() {
        ("", "; ")
    } else {
        ("tried ", ", ")
    };
    for (index, attempt) in tried.iter().enumerate() {
        f.write_str(if index == 0 { before } else { between })?;
        match f.alternate() {
            true => fmt::Display::fmt(attempt, f)?,
            false => fmt::Display::fmt(&attempt.library.display(), f)?,
        }
    }
    Ok(())
}

impl Api {
    /// Opens the driver's library and looks up every function of the table.
    ///
    /// Tries `libcuda.so.1` by the dynamic linker's rules, then `/usr/lib/wsl/lib/libcuda.so.1`,
    /// then `libcuda.so`. On Windows tries `nvcuda.dll` in the system's folder, and in no other, so that
    /// a file beside the program does not take its place. The first library that opens is used and never
    /// unloaded. No driver function is called, so a toolkit's stub is not noticed here: its `cuInit`
    /// returns `CUDA_ERROR_STUB_LIBRARY`.
    ///
    /// # Errors
    ///
    /// [`LoadError::NotFound`] lists what was tried. [`LoadError::MissingSymbol`] names the
    /// required function that the library lacks. [`LoadError::Unsupported`] is returned on other
    /// systems.
    pub fn load() -> Result<Self, LoadError> {
        let mut tried = Vec::new();
        for candidate in CANDIDATES {
            // SAFETY: these are the names of NVIDIA's driver library. A user who installs another
            // library under them on the linker's path has replaced the driver for every program.
            match unsafe { open(Path::new(candidate), find) } {
                Ok(library) => {
                    // SAFETY: the library was opened under a name of NVIDIA's driver library.
                    return unsafe { resolve(library, candidate.into()) };
                }
                Err(OpenError::Unsupported(error)) => return Err(error),
                Err(OpenError::Failed(attempt)) => tried.push(attempt),
            }
        }
        Err(LoadError::NotFound { tried })
    }

    /// Opens the library at `path`, and no other, and looks up every function of the table.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Api::load`].
    ///
    /// # Safety
    ///
    /// The library at `path` must be NVIDIA's driver, or one that defines functions of the same
    /// names with the same signatures and the same behavior. A library that has none of these
    /// names, and whose initializers do nothing, does no harm: it is refused.
    pub unsafe fn load_from(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        let path = path.as_ref();
        // SAFETY: the caller vouches for the library.
        match unsafe { open(path, |path| Library::new(path)) } {
            // SAFETY: the caller vouches for the library.
            Ok(library) => unsafe { resolve(library, path.to_owned()) },
            Err(OpenError::Unsupported(error)) => Err(error),
            Err(OpenError::Failed(attempt)) => Err(LoadError::NotFound {
                tried: vec![attempt],
            }),
        }
    }
}

enum OpenError {
    Unsupported(LoadError),
    Failed(Attempt),
}

/// A function that opens a library and runs its initializers.
type Open = unsafe fn(&Path) -> Result<Library, libloading::Error>;

/// Opens the library of this name where the dynamic linker finds it.
#[cfg(not(windows))]
unsafe fn find(name: &Path) -> Result<Library, libloading::Error> {
    // SAFETY: the caller vouches for the initializers.
    unsafe { Library::new(name) }
}

/// Opens the library of this name in the system's folder.
#[cfg(windows)]
unsafe fn find(name: &Path) -> Result<Library, libloading::Error> {
    use libloading::os::windows as system;
    // SAFETY: the caller vouches for the initializers.
    unsafe { system::Library::load_with_flags(name, system::LOAD_LIBRARY_SEARCH_SYSTEM32) }
        .map(Into::into)
}

/// Opens one library with a function.
///
/// # Safety
///
/// It must be sound to run the library's initializers.
unsafe fn open(path: &Path, open: Open) -> Result<Library, OpenError> {
    let known = cfg!(any(target_os = "linux", windows)) && cfg!(target_pointer_width = "64");
    if !known {
        return Err(OpenError::Unsupported(LoadError::Unsupported {
            system: format!("{} on {}", std::env::consts::OS, std::env::consts::ARCH),
        }));
    }
    // SAFETY: the caller vouches for the initializers.
    unsafe { open(path) }.map_err(|error| {
        OpenError::Failed(Attempt {
            library: path.to_owned(),
            reason: reason(path, &error),
        })
    })
}

/// Returns the dynamic linker's message, which the error keeps as its source, without the library
/// name that most messages begin with.
fn reason(path: &Path, error: &libloading::Error) -> String {
    let text = match core::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    };
    match text.strip_prefix(&format!("{}: ", path.display())) {
        Some(rest) => rest.to_owned(),
        None => text,
    }
}

/// Fills the table from an open library.
///
/// # Safety
///
/// The symbols that the library exports under the names of the table must be the functions that
/// CUDA's driver API describes.
unsafe fn resolve(library: Library, path: PathBuf) -> Result<Api, LoadError> {
    // SAFETY: a symbol is read as an address here, which is right for every symbol; the caller
    // promises that it is a function of the table's type. The library stays loaded: it is forgotten
    // below on success.
    let api = unsafe {
        Api::from_symbols(path.clone(), |name| {
            library
                .get::<*mut c_void>(name)
                .ok()
                .and_then(|symbol| NonNull::new(*symbol))
        })
    };
    match api {
        Ok(api) => {
            // Threads of the driver may still run, and other libraries may hold its functions, so
            // the library stays loaded for the rest of the process.
            core::mem::forget(library);
            Ok(api)
        }
        Err(missing) => Err(LoadError::MissingSymbol {
            library: path,
            missing,
        }),
    }
}
