//! NCCL itself: the few functions that the comparison calls.
//!
//! `unsafe` here: calls through symbols of a library that is loaded at run time. Their types are
//! those of `nccl.h` of 2.19 to 2.32, and a library that says it is older is refused. Communicators
//! are ours and live as long as the group; addresses are the callers' duty.
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

/// `ncclMemAlloc` and `ncclCommRegister` came with it.
const OLDEST: c_int = 2_19_00;

const SUCCESS: c_int = 0;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

type Comm = *mut c_void;
type Answer = c_int;

/// Declares the table and how it is filled: a symbol of `nccl.h`, and its type.
macro_rules! table {
    ($($name:ident: fn($($argument:ty),*) -> $answer:ty;)+) => {
        #[allow(non_snake_case)]
        struct Table {
            $($name: unsafe extern "C" fn($($argument),*) -> $answer,)+
        }

        impl Table {
            /// # Safety
            /// What the library has under these names is what `nccl.h` says.
            unsafe fn of(library: &Library) -> anyhow::Result<Self> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the caller's promise.
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

/// A library that was loaded. It stays loaded for the rest of the process: threads of its own may
/// run.
pub(super) struct Nccl {
    table: Table,
    version: c_int,
    path: PathBuf,
}

impl Nccl {
    /// Loads the first that can be loaded.
    ///
    /// # Errors
    /// Why none could, or why one is of no use.
    pub(super) fn load(candidates: &[PathBuf]) -> anyhow::Result<Self> {
        let mut tried = vec![];
        for path in candidates {
            // SAFETY: the user of the command vouches for the library that it named, or for those
            // that are installed.
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
        // SAFETY: a library of this name is NCCL.
        let table = unsafe { Table::of(&library) };
        let table = table.with_context(|| path.display().to_string())?;
        std::mem::forget(library);
        let mut version = 0;
        // SAFETY: the result goes to a local.
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

    /// Its version as people write it.
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
        // SAFETY: both take any number and no communicator, and return text that stays.
        let (meaning, last) = unsafe {
            (
                text((self.table.ncclGetErrorString)(answer)),
                text((self.table.ncclGetLastError)(ptr::null_mut())),
            )
        };
        Err(anyhow!("{call}: {meaning}{}", told(&last)))
    }
}

/// Returns NCCL's last message, if there is one.
fn told(last: &str) -> String {
    match last.trim() {
        "" => String::new(),
        last => format!(" ({last})"),
    }
}

/// # Safety
/// Null, or text that stays.
unsafe fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(from) };
    text.to_string_lossy().into_owned()
}

/// Returns `true` for a version of NCCL that can be used. Before 2.9 they were counted in thousands, which
/// are less than any since.
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
    /// `true` after an abort: work that failed may be stuck, and is not waited for.
    aborted: AtomicBool,
}

impl Ranks {
    /// # Errors
    /// When NCCL does not bring the devices together.
    pub(super) fn new(
        nccl: Nccl,
        driver: Arc<CudaDriver>,
        devices: &[Device],
    ) -> anyhow::Result<Self> {
        let devices: Vec<Ordinal> = devices.iter().map(Device::ordinal).collect();
        let numbers: Vec<c_int> = devices.iter().map(|device| device.0).collect();
        let mut comms = vec![ptr::null_mut(); devices.len()];
        let count = c_int::try_from(devices.len())?;
        // SAFETY: there is room for as many communicators as there are devices.
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

    /// A rank's communicator, with its device current.
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
        // SAFETY: the result goes to a local.
        let answer =
            unsafe { (self.nccl.table.ncclMemAlloc)(&mut address, usize::try_from(bytes)?) };
        self.nccl.check("ncclMemAlloc", answer)?;
        Ok(DeviceAddress(address.expose_provenance() as u64))
    }

    unsafe fn free(&self, rank: usize, address: DeviceAddress) -> anyhow::Result<()> {
        let _current = self.enter(rank)?;
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise; the result goes to a local.
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
        // SAFETY: the caller's promise.
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
        // SAFETY: it takes nothing.
        let began = unsafe { (table.ncclGroupStart)() };
        self.nccl.check("ncclGroupStart", began)?;
        let sides = from.iter().zip(to).zip(streams).zip(&self.comms);
        let mut queued = Ok(());
        for (((&from, &to), stream), &comm) in sides {
            let stream = ptr::with_exposed_provenance_mut(stream.as_raw().0 as usize);
            // SAFETY: the caller's promise: `elements` numbers at each address until the streams have
            // been waited for.
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
        // SAFETY: it ends the group that was begun above, whatever came of that.
        let ended = unsafe { (table.ncclGroupEnd)() };
        let ended = self.nccl.check("ncclGroupEnd", ended);
        queued.and(ended)
    }

    fn abort(&self) {
        if self.aborted.swap(true, Ordering::Relaxed) {
            return;
        }
        for &comm in &self.comms {
            // SAFETY: a communicator of ours, which is not used any more. There is nothing to be done
            // about one that cannot even be aborted.
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
            // SAFETY: a communicator of ours, once; its work was waited for. The process ends soon.
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
