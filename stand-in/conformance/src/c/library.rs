//! A library of C functions that is asked by name.
//!
//! `unsafe` is allowed here to open the library that the caller names and to call its functions.
//! Every function of the driver API takes integers and pointers only, which are passed alike, so a
//! call is a list of 64-bit numbers. A wrong argument may end the process: that is an answer too.
#![allow(unsafe_code)]

use std::ffi::{CString, c_void};

use cuvmm_driver::CUresult;
use libloading::os::unix::Library as Opened;

#[derive(Debug)]
pub(crate) struct Library {
    opened: Opened,
}

/// A legacy IPC handle, of memory or of an event. It is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

/// The type of a function by its number of arguments.
macro_rules! call {
    ($address:expr, $($argument:expr),*) => {{
        type Function = unsafe extern "C" fn($(call!(@number $argument)),*) -> i32;
        // SAFETY: the address is that of a C function whose arguments are all integers or pointers,
        // each passed in a register or a stack slot of 64 bits.
        let function: Function = unsafe { std::mem::transmute::<*mut c_void, Function>($address) };
        // SAFETY: the cases pass what the function expects, or ask what it answers to other things
        // in a process of their own.
        unsafe { function($($argument),*) }
    }};
    (@number $argument:expr) => { u64 };
}

impl Library {
    pub(crate) fn open(name: &str) -> Result<Self, String> {
        // SAFETY: the user names a driver library, whose initializers are those of a driver.
        let opened = unsafe { Opened::new(name) };
        Ok(Self {
            opened: opened.map_err(|error| error.to_string())?,
        })
    }

    pub(crate) fn address(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: the symbol is only used as an address here.
        let found = unsafe { self.opened.get::<*mut c_void>(name.as_bytes_with_nul()) };
        Some(found.ok()?.as_raw_ptr())
    }

    /// Calls a function, and returns `None` if the library does not export it.
    pub(crate) fn call(&self, name: &str, arguments: &[u64]) -> Option<CUresult> {
        Some(CUresult(call_at(self.address(name)?, arguments)))
    }

    /// Calls `cuIpcOpenMemHandle_v2` or `cuIpcOpenEventHandle`, whose handle is passed by value.
    pub(crate) fn open_ipc(
        &self,
        name: &str,
        out: u64,
        handle: IpcHandle,
        flags: Option<u32>,
    ) -> Option<CUresult> {
        type WithFlags = unsafe extern "C" fn(u64, IpcHandle, u32) -> i32;
        type Without = unsafe extern "C" fn(u64, IpcHandle) -> i32;
        let address = self.address(name)?;
        // SAFETY: the functions of these two names have these types, and `out` points to a number.
        let code = unsafe {
            match flags {
                Some(flags) => {
                    std::mem::transmute::<*mut c_void, WithFlags>(address)(out, handle, flags)
                }
                None => std::mem::transmute::<*mut c_void, Without>(address)(out, handle),
            }
        };
        Some(CUresult(code))
    }
}

pub(crate) fn call_at(address: *mut c_void, arguments: &[u64]) -> i32 {
    match *arguments {
        [] => call!(address,),
        [a] => call!(address, a),
        [a, b] => call!(address, a, b),
        [a, b, c] => call!(address, a, b, c),
        [a, b, c, d] => call!(address, a, b, c, d),
        [a, b, c, d, e] => call!(address, a, b, c, d, e),
        [a, b, c, d, e, f] => call!(address, a, b, c, d, e, f),
        [a, b, c, d, e, f, g] => call!(address, a, b, c, d, e, f, g),
        [a, b, c, d, e, f, g, h, ..] => call!(address, a, b, c, d, e, f, g, h),
    }
}

pub(crate) fn at<T: ?Sized>(value: &mut T) -> u64 {
    std::ptr::from_mut(value).cast::<u8>().expose_provenance() as u64
}

/// Reads a byte of memory that the process can access.
pub(crate) fn read(address: u64) -> u8 {
    let pointer = std::ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: the cases pass addresses of live host memory.
    unsafe { pointer.read_volatile() }
}

/// Writes a byte of memory that the process can access.
pub(crate) fn write(address: u64, byte: u8) {
    let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: the cases pass addresses of live host memory.
    unsafe { pointer.write_volatile(byte) };
}

/// Reads the text of a C string that lives as long as the library.
pub(crate) fn text(address: u64) -> String {
    if address == 0 {
        return "null".to_owned();
    }
    let pointer = std::ptr::with_exposed_provenance(address as usize);
    // SAFETY: the driver's texts are never freed.
    let text = unsafe { std::ffi::CStr::from_ptr(pointer) };
    text.to_string_lossy().into_owned()
}

/// Runs a closure in a forked child and waits for the child's end. What the child prints is part of
/// this process's output.
pub(crate) fn in_fork(act: impl FnOnce()) -> Option<i32> {
    // SAFETY: the child runs the closure and ends without returning into the parent's code.
    unsafe {
        match libc::fork() {
            -1 => None,
            0 => {
                // A child that waits for a lock of a thread that it does not have is ended.
                libc::alarm(20);
                act();
                libc::_exit(0)
            }
            child => {
                let mut status = 0;
                let waited = libc::waitpid(child, &mut status, 0);
                (waited == child).then_some(status)
            }
        }
    }
}
