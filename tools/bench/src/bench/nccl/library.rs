//! Bindings to the NCCL functions that the comparison calls.
//!
//! `unsafe` here: calls through symbols of a library that is loaded at run time. Their types are
//! those of `nccl.h` of 2.19 to 2.32, and a library that reports an older version is refused.
//! [`Ranks`] owns the communicators, which live as long as it does; callers guarantee that
//! addresses are valid.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, anyhow, bail, ensure};
use cuvmm::driver::cuda::CudaDriver;
use cuvmm::driver::{DeviceAddress, Ordinal};
use cuvmm::{Device, Stream};
use libloading::Library;

use super::memory::{Group, Handle};
use crate::bench::current::Current;

/// The oldest supported version, the first with `ncclMemAlloc` and `ncclCommRegister`.
const OLDEST: c_int = 2_19_00;

const SUCCESS: c_int = 0;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

type Comm = *mut c_void;
type Answer = c_int;

/// Declares the table of functions and its loader from symbols of `nccl.h` and their types.
macro_rules! table {
    ($($name:ident: fn($($argument:ty),*) -> $answer:ty;)+) => {
        #[allow(non_snake_case)]
        struct Table {
            $($name: unsafe extern "C" fn($($argument),*) -> $answer,)+
        }

        impl Table {
            /// Looks up all functions of the table.
            ///
            /// # Safety
            /// The library's symbols of these names have the types that `nccl.h` declares.
            unsafe fn of(library: &Library) -> anyhow::Result<Self> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the caller guarantees the type of the symbol.
                        let found = unsafe { library.get(stringify!($name)) };
                        *found.with_context(|| format!(
                            "{} is missing; NCCL has it since {}",
                            stringify!($name),
                            in_words(OLDEST),
                        ))?
                    },)+
                })
            }
        }
    };
}

table! {
    ncclGetVersion: fn(*mut c_int) -> Answer;
    ncclGetErrorString: fn(Answer) -> *const c_char;
    ncclGetLastError: fn(Comm) -> *const c_char;
    ncclCommInitAll: fn(*mut Comm, c_int, *const c_int) -> Answer;
    ncclCommDestroy: fn(Comm) -> Answer;
    ncclCommAbort: fn(Comm) -> Answer;
    ncclCommRegister: fn(Comm, *mut c_void, usize, *mut *mut c_void) -> Answer;
    ncclCommDeregister: fn(Comm, *mut c_void) -> Answer;
    ncclMemAlloc: fn(*mut *mut c_void, usize) -> Answer;
    ncclMemFree: fn(*mut c_void) -> Answer;
    ncclGroupStart: fn() -> Answer;
    ncclGroupEnd: fn() -> Answer;
    ncclAllReduce: fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Comm,
        *mut c_void
    ) -> Answer;
}

/// A loaded library. It stays loaded for the rest of the process, because its own threads may run.
pub(super) struct Nccl {
    table: Table,
    version: c_int,
    path: PathBuf,
}

impl Nccl {
    /// Loads the first candidate that can be loaded.
    ///
    /// # Errors
    /// When no candidate can be loaded, or the loaded library is not usable.
    pub(super) fn load(candidates: &[PathBuf]) -> anyhow::Result<Self> {
        let mut tried = vec![];
        for path in candidates {
            // SAFETY: loading runs the library's initializers; the user of the command named the
            // library, or installed it where it is found.
            match unsafe { Library::new(path) } {
                Ok(library) => return Self::of(library, path),
                Err(error) => tried.push(format!("{}: {error}", path.display())),
            }
        }
        bail!(
            "no NCCL to load, name one with --nccl ({})",
            tried.join("; ")
        )
    }

    fn of(library: Library, path: &Path) -> anyhow::Result<Self> {
        // SAFETY: the library was named as NCCL or has NCCL's name, so its symbols are those of
        // `nccl.h`.
        let table = unsafe { Table::of(&library) };
        let table = table.with_context(|| path.display().to_string())?;
        std::mem::forget(library);
        let mut version = 0;
        // SAFETY: the result is written to a local.
        let answer = unsafe { (table.ncclGetVersion)(&mut version) };
        ensure!(answer == SUCCESS, "ncclGetVersion: {answer}");
        let path = path.to_owned();
        ensure!(
            recent(version),
            "{} is NCCL {}, and {} is the oldest that registers memory",
            path.display(),
            in_words(version),
            in_words(OLDEST)
        );
        Ok(Self {
            table,
            version,
            path,
        })
    }

    /// Returns the version as text, such as 2.32.3.
    pub(super) fn version(&self) -> String {
        in_words(self.version)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn check(&self, call: &str, answer: Answer) -> anyhow::Result<()> {
        if answer == SUCCESS {
            return Ok(());
        }
        // SAFETY: the first function takes any number and the second a null communicator; both
        // return null or text that stays valid.
        let (meaning, last) = unsafe {
            (
                text((self.table.ncclGetErrorString)(answer)),
                text((self.table.ncclGetLastError)(ptr::null_mut())),
            )
        };
        Err(anyhow!("{call}: {meaning}{}", told(&last)))
    }
}

/// Formats NCCL's last error message in parentheses, or returns an empty string if there is none.
fn told(last: &str) -> String {
    match last.trim() {
        "" => String::new(),
        last => format!(" ({last})"),
    }
}

/// Copies a text of NCCL; null gives an empty string.
///
/// # Safety
/// `from` is null, or points to text with a terminating zero that stays valid during the call.
unsafe fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: it is not null, and the caller guarantees a terminated text.
    let text = unsafe { CStr::from_ptr(from) };
    text.to_string_lossy().into_owned()
}

/// Returns `true` if the version that NCCL reports is supported. Versions before 2.9 were encoded
/// in thousands, which gives smaller numbers than all later ones.
const fn recent(version: c_int) -> bool {
    version >= OLDEST
}

fn in_words(version: c_int) -> String {
    let unit = if version < 10_000 { 1_000 } else { 10_000 };
    format!(
        "{}.{}.{}",
        version / unit,
        version % unit / 100,
        version % 100
    )
}

/// One communicator for each device, all in this process.
pub(super) struct Ranks {
    nccl: Nccl,
    driver: Arc<CudaDriver>,
    devices: Vec<Ordinal>,
    comms: Vec<Comm>,
    /// Set after a failure: the communicators may be stuck and are not waited for.
    aborted: AtomicBool,
}

impl Ranks {
    /// Creates the communicators.
    ///
    /// # Errors
    /// When NCCL cannot connect the devices.
    pub(super) fn new(
        nccl: Nccl,
        driver: Arc<CudaDriver>,
        devices: &[Device],
    ) -> anyhow::Result<Self> {
        let devices: Vec<Ordinal> = devices.iter().map(Device::ordinal).collect();
        let numbers: Vec<c_int> = devices.iter().map(|device| device.0).collect();
        let mut comms = vec![ptr::null_mut(); devices.len()];
        let count = c_int::try_from(devices.len())?;
        // SAFETY: the vector has space for one communicator per device.
        let answer =
            unsafe { (nccl.table.ncclCommInitAll)(comms.as_mut_ptr(), count, numbers.as_ptr()) };
        nccl.check("ncclCommInitAll", answer)?;
        Ok(Self {
            nccl,
            driver,
            devices,
            comms,
            aborted: AtomicBool::new(false),
        })
    }

    pub(super) const fn nccl(&self) -> &Nccl {
        &self.nccl
    }

    /// Returns a rank's communicator, with its device's context current.
    fn enter(&self, rank: usize) -> anyhow::Result<(Current, Comm)> {
        let (device, comm) = (self.devices.get(rank), self.comms.get(rank));
        let (&device, &comm) = device.zip(comm).context("there is no such rank")?;
        Ok((Current::enter(Arc::clone(&self.driver), device)?, comm))
    }
}

impl Group for Ranks {
    fn allocate(&self, rank: usize, bytes: u64) -> anyhow::Result<DeviceAddress> {
        let _current = self.enter(rank)?;
        let mut address = ptr::null_mut();
        // SAFETY: the result is written to a local.
        let answer =
            unsafe { (self.nccl.table.ncclMemAlloc)(&mut address, usize::try_from(bytes)?) };
        self.nccl.check("ncclMemAlloc", answer)?;
        Ok(DeviceAddress(address.expose_provenance() as u64))
    }

    unsafe fn free(&self, rank: usize, address: DeviceAddress) -> anyhow::Result<()> {
        let _current = self.enter(rank)?;
        // SAFETY: the caller guarantees that `allocate` returned the address and no work uses it.
        let answer = unsafe { (self.nccl.table.ncclMemFree)(pointer(address)) };
        self.nccl.check("ncclMemFree", answer)
    }

    unsafe fn register(
        &self,
        rank: usize,
        address: DeviceAddress,
        bytes: u64,
    ) -> anyhow::Result<Handle> {
        let (_current, comm) = self.enter(rank)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the caller guarantees that the range is mapped and stays mapped; the result is
        // written to a local.
        let answer = unsafe {
            (self.nccl.table.ncclCommRegister)(
                comm,
                pointer(address),
                usize::try_from(bytes)?,
                &mut handle,
            )
        };
        self.nccl.check("ncclCommRegister", answer)?;
        Ok(Handle(handle.expose_provenance()))
    }

    unsafe fn deregister(&self, rank: usize, handle: Handle) -> anyhow::Result<()> {
        if self.aborted.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (_current, comm) = self.enter(rank)?;
        let handle = ptr::with_exposed_provenance_mut(handle.0);
        // SAFETY: the caller guarantees that the handle is registered on this rank and unused.
        let answer = unsafe { (self.nccl.table.ncclCommDeregister)(comm, handle) };
        self.nccl.check("ncclCommDeregister", answer)
    }

    unsafe fn all_reduce(
        &self,
        from: &[DeviceAddress],
        to: &[DeviceAddress],
        elements: u64,
        streams: &[Stream],
    ) -> anyhow::Result<()> {
        let table = &self.nccl.table;
        let elements = usize::try_from(elements)?;
        // SAFETY: the function takes no arguments.
        let began = unsafe { (table.ncclGroupStart)() };
        self.nccl.check("ncclGroupStart", began)?;
        let sides = from.iter().zip(to).zip(streams).zip(&self.comms);
        let mut queued = Ok(());
        for (((&from, &to), stream), &comm) in sides {
            let stream = ptr::with_exposed_provenance_mut(stream.as_raw().0 as usize);
            // SAFETY: the caller guarantees `elements` numbers at each address until the streams
            // have been waited for.
            let answer = unsafe {
                (table.ncclAllReduce)(
                    pointer(from).cast_const(),
                    pointer(to),
                    elements,
                    FLOAT32,
                    SUM,
                    comm,
                    stream,
                )
            };
            queued = queued.and_then(|()| self.nccl.check("ncclAllReduce", answer));
        }
        // SAFETY: the call ends the group that was started above, even if queueing failed.
        let ended = unsafe { (table.ncclGroupEnd)() };
        let ended = self.nccl.check("ncclGroupEnd", ended);
        queued.and(ended)
    }

    fn abort(&self) {
        if self.aborted.swap(true, Ordering::Relaxed) {
            return;
        }
        for &comm in &self.comms {
            // SAFETY: this value owns the communicator, which is not used after this. An error of
            // the abort cannot be handled.
            let _ = unsafe { (self.nccl.table.ncclCommAbort)(comm) };
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        if self.aborted.load(Ordering::Relaxed) {
            return;
        }
        for &comm in &self.comms {
            // SAFETY: this value owns the communicator and destroys it once; its work was waited
            // for. Errors are ignored, because the process ends soon.
            let _ = unsafe { (self.nccl.table.ncclCommDestroy)(comm) };
        }
    }
}

fn pointer(address: DeviceAddress) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address.0 as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_in_both_countings() {
        assert_eq!(in_words(2_32_03), "2.32.3");
        assert_eq!(in_words(OLDEST), "2.19.0");
        assert_eq!(in_words(2_804), "2.8.4");
        assert!(recent(2_19_00) && recent(2_28_09) && recent(3_00_00));
        assert!(!recent(2_18_05) && !recent(2_804) && !recent(0));
    }

    #[test]
    fn what_cannot_be_loaded_is_named() {
        let nowhere = ["/nowhere/a.so".into(), "/nowhere/b.so".into()];
        let error = Nccl::load(&nowhere).err().map(|error| error.to_string());
        let error = error.unwrap();
        assert!(error.contains("/nowhere/a.so: "), "{error}");
        assert!(
            error.contains("/nowhere/b.so: ") && error.contains("--nccl"),
            "{error}"
        );
    }

    #[test]
    fn what_nccl_noted_stands_behind_its_word() {
        assert_eq!(told("\n"), "");
        assert_eq!(told(" no such device \n"), " (no such device)");
    }
}
