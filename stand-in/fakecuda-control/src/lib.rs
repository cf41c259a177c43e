//! Control of `fakecuda` from tests: streams are held back, calls fail, live objects are counted.
//!
//! `fakecuda` is a `libcuda.so.1` over host memory. It exports functions that no driver has, and
//! [`Control`] calls them. The library under test may load libcuda in any way: the loader gives every
//! part of a process the same library.
//!
//! ```no_run
//! use fakecuda_control::Control;
//!
//! let Some(control) = Control::of_process() else {
//!     return Ok(()); // a real driver, or none
//! };
//! control.watch(true)?;
//! let held = control.hold(0)?; // the default stream of the current context
//! // ... queue work, and check what the code under test does meanwhile ...
//! drop(held); // the work runs
//! assert_eq!(control.live()?.queued, 0);
//! # Ok::<(), fakecuda_control::Refused>(())
//! ```
//!
//! `unsafe` is allowed here to call the functions of the library.
#![allow(unsafe_code)]

use std::ffi::{CString, OsStr, c_char, c_void};
use std::fmt;
use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::os::fd::AsRawFd as _;

use libloading::Library;
use rustix::fs::{MemfdFlags, memfd_create};

/// The name under which every program loads the driver.
const NAME: &str = "libcuda.so.1";

/// A call that the library refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The function.
    pub function: &'static str,
    /// The driver's code, such as 201 without a current context or 3 before `cuInit`; 304 if the
    /// system refused.
    pub code: i32,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} returned the driver's code {}",
            self.function, self.code
        )
    }
}

impl std::error::Error for Refused {}

type Result<T> = std::result::Result<T, Refused>;

/// The code of an error of the operating system.
const SYSTEM: i32 = 304;

/// The code of a text that is wrong.
const INVALID_VALUE: i32 = 1;

/// The code of work that has not run.
const NOT_READY: i32 = 600;

/// The numbers of live objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Live {
    /// Ranges of addresses.
    pub reservations: u64,
    /// Physicals, also those that only a mapping keeps alive.
    pub physicals: u64,
    /// Mappings.
    pub mappings: u64,
    /// Plain, pooled, pinned and managed allocations.
    pub allocations: u64,
    /// Streams that were created and not destroyed.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Queued pieces of work.
    pub queued: u64,
    /// Devices whose primary context is retained.
    pub contexts: u64,
}

/// The functions of `fakecuda` in this process.
#[derive(Debug)]
pub struct Control {
    library: Library,
}

/// A stream, or all streams of a device, held back until this is dropped.
#[derive(Debug)]
#[must_use = "the stream is released when this is dropped"]
pub struct Held<'a> {
    control: &'a Control,
    /// The stream; `None` for all of the device.
    stream: Option<usize>,
}

impl Control {
    /// Returns the control of the `libcuda.so.1` that the loader gives this process, or `None` if
    /// there is none or it is a real driver.
    #[must_use]
    pub fn of_process() -> Option<Self> {
        Self::open(NAME)
    }

    /// Returns the control of a library by name or path, or `None` if it cannot be loaded or is not
    /// `fakecuda`.
    #[must_use]
    pub fn open(library: impl AsRef<OsStr>) -> Option<Self> {
        // SAFETY: the functions that run when a driver library is loaded are sound on every thread.
        let library = unsafe { Library::new(library.as_ref()) }.ok()?;
        // SAFETY: the symbol is looked up and not used.
        let there = unsafe { library.get::<*const c_void>(b"fakecuda_live\0") }.is_ok();
        there.then_some(Self { library })
    }

    /// Calls a function.
    ///
    /// # Safety
    /// `F` is the function's type, and what `call` passes fits its documentation.
    unsafe fn call<F: Copy>(
        &self,
        function: &'static str,
        call: impl FnOnce(F) -> i32,
    ) -> Result<()> {
        let refused = |code| Refused { function, code };
        // SAFETY: the caller promises the type.
        let found = unsafe { self.library.get::<F>(function.as_bytes()) };
        match call(*found.map_err(|_| refused(SYSTEM))?) {
            0 => Ok(()),
            code => Err(refused(code)),
        }
    }

    /// Calls a function that takes nothing.
    fn plain(&self, function: &'static str) -> Result<()> {
        // SAFETY: the callers name functions of this type.
        unsafe { self.call(function, |call: unsafe extern "C" fn() -> i32| call()) }
    }

    /// Calls a function that takes a truth value.
    fn switch(&self, function: &'static str, on: bool) -> Result<()> {
        // SAFETY: the callers name functions of this type.
        unsafe { self.call(function, |call: unsafe extern "C" fn(bool) -> i32| call(on)) }
    }

    /// Calls a function that writes a number.
    fn number(&self, function: &'static str) -> Result<u64> {
        let mut number = 0;
        // SAFETY: the callers name functions of this type, and the pointer is to a local.
        unsafe {
            self.call(function, |call: unsafe extern "C" fn(*mut u64) -> i32| {
                call(&raw mut number)
            })?;
        }
        Ok(number)
    }

    /// Counts the live objects.
    ///
    /// # Errors
    /// Code 3 before `cuInit`.
    pub fn live(&self) -> Result<Live> {
        let mut counts = [0_u64; 8];
        // SAFETY: the type is the function's, and the pointer is to a local.
        unsafe {
            self.call(
                "fakecuda_live",
                |call: unsafe extern "C" fn(*mut [u64; 8]) -> i32| call(&raw mut counts),
            )?;
        }
        let [
            reservations,
            physicals,
            mappings,
            allocations,
            streams,
            events,
            queued,
            contexts,
        ] = counts;
        Ok(Live {
            reservations,
            physicals,
            mappings,
            allocations,
            streams,
            events,
            queued,
            contexts,
        })
    }

    /// Holds a stream of the current context back: its work is queued. The stream is the value of its
    /// handle; 0 is the default stream.
    ///
    /// The thread that drops the result must have the same context current.
    ///
    /// # Errors
    /// Code 201 without a current context. A stream that does not exist is ignored.
    pub fn hold(&self, stream: usize) -> Result<Held<'_>> {
        self.set_held(stream, true)?;
        Ok(Held {
            control: self,
            stream: Some(stream),
        })
    }

    /// Holds back every stream of the current context's device, those created later included.
    ///
    /// # Errors
    /// Code 201 without a current context.
    pub fn hold_all(&self) -> Result<Held<'_>> {
        self.switch("fakecuda_hold_all", true)?;
        Ok(Held {
            control: self,
            stream: None,
        })
    }

    fn set_held(&self, stream: usize, held: bool) -> Result<()> {
        // SAFETY: the type is the function's, and the stream is looked up and not followed.
        unsafe {
            self.call(
                "fakecuda_hold",
                |call: unsafe extern "C" fn(usize, bool) -> i32| call(stream, held),
            )
        }
    }

    /// Runs the next piece of work of a stream that is held back. Returns `false` if there is none,
    /// or if it waits for work of another stream or for a function of the host.
    ///
    /// A function of the host is begun, and the stream is busy until it has returned.
    ///
    /// # Errors
    /// Code 201 without a current context.
    pub fn step(&self, stream: usize) -> Result<bool> {
        // SAFETY: the type is the function's, and the stream is looked up and not followed.
        let answer = unsafe {
            self.call(
                "fakecuda_step",
                |call: unsafe extern "C" fn(usize) -> i32| call(stream),
            )
        };
        match answer {
            Ok(()) => Ok(true),
            Err(refused) if refused.code == NOT_READY => Ok(false),
            Err(refused) => Err(refused),
        }
    }

    /// Loses the current context, like a kernel that faults: `ILLEGAL_ADDRESS` from then on.
    ///
    /// # Errors
    /// Code 201 without a current context.
    pub fn lose_context(&self) -> Result<()> {
        self.plain("fakecuda_lose")
    }

    /// Makes calls fail, in addition to those that are to fail already: `cuMemCreate:3`,
    /// `cuMemMap:2-:INVALID_VALUE`, with commas between several. They are counted from now on.
    ///
    /// # Errors
    /// Code 1 for a text that is wrong.
    pub fn fail(&self, faults: &str) -> Result<()> {
        let function = "fakecuda_fail";
        let text = CString::new(faults).map_err(|_| Refused {
            function,
            code: INVALID_VALUE,
        })?;
        // SAFETY: the type is the function's, and the text is null-terminated.
        unsafe {
            self.call(
                function,
                |call: unsafe extern "C" fn(*const c_char) -> i32| call(text.as_ptr()),
            )
        }
    }

    /// Makes no call fail any more.
    ///
    /// # Errors
    /// None that a test can cause.
    pub fn disarm(&self) -> Result<()> {
        // SAFETY: the type is the function's, which accepts null.
        unsafe {
            self.call(
                "fakecuda_fail",
                |call: unsafe extern "C" fn(*const c_char) -> i32| call(std::ptr::null()),
            )
        }
    }

    /// Counts the calls that were made to fail.
    ///
    /// # Errors
    /// None that a test can cause.
    pub fn injected(&self) -> Result<u64> {
        self.number("fakecuda_injected")
    }

    /// Turns the diagnosis on or off. With a report it is on from the start.
    ///
    /// # Errors
    /// Code 3 before `cuInit`.
    pub fn watch(&self, on: bool) -> Result<()> {
        self.switch("fakecuda_watch", on)
    }

    /// Counts the findings: misuse so far, and what would be leaked if the process ended now.
    ///
    /// # Errors
    /// Code 3 before `cuInit`.
    pub fn findings(&self) -> Result<u64> {
        self.number("fakecuda_findings")
    }

    /// Forgets all findings. What lives now is no leak from then on.
    ///
    /// # Errors
    /// Code 3 before `cuInit`.
    pub fn forget(&self) -> Result<()> {
        self.plain("fakecuda_forget")
    }

    /// Returns the report of this moment as text.
    ///
    /// # Errors
    /// Code 3 before `cuInit`, and 304 if the system lacks memory or descriptors.
    pub fn report(&self) -> Result<String> {
        self.written("fakecuda_report")
    }

    /// Returns the report of this moment as JSON.
    ///
    /// # Errors
    /// Code 3 before `cuInit`, and 304 if the system lacks memory or descriptors.
    pub fn report_json(&self) -> Result<String> {
        self.written("fakecuda_report_json")
    }

    /// Returns what a function writes to a descriptor.
    fn written(&self, function: &'static str) -> Result<String> {
        let refused = Refused {
            function,
            code: SYSTEM,
        };
        let memory = memfd_create("fakecuda-report", MemfdFlags::CLOEXEC);
        let memory = memory.map_err(|_| refused)?;
        let mut file = File::from(memory);
        let fd = file.as_raw_fd();
        // SAFETY: the callers name functions of this type, and the descriptor is open.
        let answer =
            unsafe { self.call(function, |call: unsafe extern "C" fn(i32) -> i32| call(fd)) };
        let mut text = String::new();
        answer?;
        let read = file.rewind().and_then(|()| file.read_to_string(&mut text));
        match read {
            Ok(_) => Ok(text),
            Err(_) => Err(refused),
        }
    }
}

impl Drop for Held<'_> {
    /// Releases the stream, or all of the device: the queued work runs.
    fn drop(&mut self) {
        // Without its context there is nothing to release, and a drop has no one to tell.
        let _ = match self.stream {
            Some(stream) => self.control.set_held(stream, false),
            None => self.control.switch("fakecuda_hold_all", false),
        };
    }
}

/// Compiles the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
