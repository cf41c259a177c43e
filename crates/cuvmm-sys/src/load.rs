//! Finding libcuda and the functions in it.
//!
//! Nothing is called. In particular nobody asks here whether the library is a real driver: the
//! toolkit ships a stub named `libcuda.so` for linking, which has every symbol and answers every
//! call, `cuInit` first of all, with [`CUDA_ERROR_STUB_LIBRARY`](crate::CUresult). Whoever calls
//! `cuInit` has to look for that answer.
//!
//! `unsafe` is allowed here because opening a library runs its initialisers, and because looking
//! up a symbol trusts the library to mean by a name what CUDA means by it.
#![allow(unsafe_code)]

use core::ffi::c_void;
use core::fmt;
use core::ptr::NonNull;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::{Api, MissingSymbol};

/// Where the driver's library is looked for, in this order: under the name that the driver
/// installs, where the Windows subsystem for Linux keeps it, and under the name that a toolkit's
/// stub has too (see the [module](self)).
const CANDIDATES: &[&str] = &[
    "libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "libcuda.so",
];

/// A library that could not be opened, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The name or path that was tried.
    pub library: PathBuf,
    /// The dynamic linker's own words.
    pub reason: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.library.display(), self.reason)
    }
}

/// Why there is no [`Api`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No library could be opened. On a machine without NVIDIA's driver this is the answer.
    #[error("no CUDA driver library could be opened: {}", join(.tried))]
    NotFound {
        /// Each name that was tried, in order.
        tried: Vec<Attempt>,
    },

    /// The library lacks a function that is required: it is a driver older than
    /// [`CudaVersion::OLDEST_SUPPORTED`](crate::CudaVersion::OLDEST_SUPPORTED), or no CUDA
    /// driver at all.
    #[error("{} is not a CUDA driver of version {oldest} or later: {missing}", library.display(),
            oldest = crate::CudaVersion::OLDEST_SUPPORTED)]
    MissingSymbol {
        /// The library that was opened.
        library: PathBuf,
        /// The function, and the CUDA version that brings it.
        missing: MissingSymbol,
    },

    /// This crate knows the driver's binary interface on 64-bit Linux only.
    #[error("the CUDA driver is supported on 64-bit Linux only, and this is {system}")]
    Unsupported {
        /// The operating system and architecture of this build.
        system: String,
    },
}

fn join(tried: &[Attempt]) -> String {
    let each: Vec<String> = tried.iter().map(Attempt::to_string).collect();
    each.join("; ")
}

impl Api {
    /// Opens the driver's library and looks up every function of the table.
    ///
    /// `libcuda.so.1` is looked for by the dynamic linker's rules, then
    /// `/usr/lib/wsl/lib/libcuda.so.1`, then `libcuda.so`. The first that opens is taken and
    /// never unloaded. No driver function is called, so a toolkit's stub is not noticed here:
    /// `cuInit` answers `CUDA_ERROR_STUB_LIBRARY` then.
    ///
    /// # Errors
    ///
    /// [`LoadError::NotFound`] says what was tried, [`LoadError::MissingSymbol`] which required
    /// function the library lacks, [`LoadError::Unsupported`] comes on other systems.
    pub fn load() -> Result<Self, LoadError> {
        let mut tried = Vec::new();
        for candidate in CANDIDATES {
            // SAFETY: these are the names of NVIDIA's driver library; whoever puts something
            // else under them on the linker's path has replaced the driver for every program.
            match unsafe { open(Path::new(candidate)) } {
                Ok(library) => {
                    // SAFETY: as above.
                    return unsafe { resolve(library, candidate.into()) };
                }
                Err(OpenError::Unsupported(error)) => return Err(error),
                Err(OpenError::Failed(attempt)) => tried.push(attempt),
            }
        }
        Err(LoadError::NotFound { tried })
    }

    /// The same as [`Api::load`], with the library at `path` and no other.
    ///
    /// # Errors
    ///
    /// As for [`Api::load`].
    ///
    /// # Safety
    ///
    /// The library at `path` must be NVIDIA's driver, or one that defines functions of the same
    /// names with the same signatures and keeps the same promises. A library that has none of
    /// these names, or whose initialisers do nothing, does no harm: it is refused.
    pub unsafe fn load_from(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        let path = path.as_ref();
        // SAFETY: the caller vouches for the library.
        match unsafe { open(path) } {
            // SAFETY: as above.
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

/// Opens one library.
///
/// # Safety
///
/// The library's initialisers run.
unsafe fn open(path: &Path) -> Result<Library, OpenError> {
    if !cfg!(all(target_os = "linux", target_pointer_width = "64")) {
        return Err(OpenError::Unsupported(LoadError::Unsupported {
            system: format!("{} on {}", std::env::consts::OS, std::env::consts::ARCH),
        }));
    }
    // SAFETY: the caller vouches for the initialisers.
    unsafe { Library::new(path) }.map_err(|error| {
        OpenError::Failed(Attempt {
            library: path.to_owned(),
            reason: reason(path, &error),
        })
    })
}

/// What the dynamic linker said, which the error keeps as its source, without the name of the
/// library that most of its sentences begin with.
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
/// What the library exports under the names of the table must be the functions that CUDA's
/// driver API describes.
unsafe fn resolve(library: Library, path: PathBuf) -> Result<Api, LoadError> {
    // SAFETY: a symbol is read as an address here, which is right for every symbol; that a
    // function of the table's type is behind it is the caller's promise. The library stays
    // loaded: it is forgotten below on success.
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
            // Threads of the driver may still run, and other libraries may hold its functions:
            // it stays for the rest of the process.
            core::mem::forget(library);
            Ok(api)
        }
        Err(missing) => Err(LoadError::MissingSymbol {
            library: path,
            missing,
        }),
    }
}
