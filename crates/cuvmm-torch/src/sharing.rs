//! The functions of C that publish tensors and attach publications.
//!
//! `unsafe` is used to export the functions under their C names, and for the addresses that C passes.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int};
use std::time::Duration;

use crate::edge::{self, guard, status};
use crate::error::Error;
use crate::{attachments, folder, publications};

/// Writes the path of this process's default socket, and makes its folder if needed. On failure
/// returns 0 and keeps the error.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_socket(buffer: *mut c_char, length: usize) -> usize {
    let path = guard(None, || kept(folder::own_socket()));
    let path = path.map(|path| path.into_os_string().into_encoded_bytes());
    // SAFETY: the caller says so.
    path.map_or(0, |path| unsafe { edge::write(path, buffer, length) })
}

/// Copies bytes into shareable memory, and publishes it under a name. Writes the version, which
/// counts from 1 for each name. Waits for all work of the device. Refused while a graph is
/// captured. Returns -3 if there is too little memory.
///
/// The keys of the JSON object: `name`; `path`, the socket, or null for the default socket;
/// `users`, a list of other users that may attach; `device`; `size`, the bytes of the publication;
/// `manifest`, with `tensors` and `metadata` as in [`cuvmm::share::Manifest`]; and `parts`, the
/// bytes to copy, a list of objects with `address`, `offset`, `size` and `is_host`.
///
/// # Safety
/// `json` is null or ends with a zero byte, and `version` is null or valid for writing. The parts
/// are readable, on the device or the host as they say, and nothing queued after this call writes
/// them before it returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_publish(json: *const c_char, version: *mut u64) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let json = unsafe { edge::read(json) }?.ok_or(Error::NotText)?;
        // SAFETY: the caller says so.
        let version = unsafe { version.as_mut() }.ok_or(Error::Null)?;
        // SAFETY: the caller says so.
        *version = unsafe { publications::publish(json) }?;
        Ok(())
    })
}

/// Withdraws a name that this process publishes at a path, or at the default socket for null.
/// Processes that have attached it keep its memory, which is otherwise released, after a capture if
/// a graph is captured. Returns -4 if the name is not published there.
///
/// # Safety
/// The texts are null or end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_withdraw(name: *const c_char, path: *const c_char) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let (name, path) = unsafe { (edge::read(name)?, edge::read(path)?) };
        publications::withdraw(name.ok_or(Error::NotText)?, path.map(Into::into))
    })
}

/// Attaches the newest version of a name for reading, without a copy, and writes the attachment's
/// number.
///
/// The keys of the JSON object: `name`; `path`, the socket, or null to search the usual folder;
/// `users`, a list of other users that the publisher may have; and `device`.
///
/// Returns -4 if the name is not published, or the publisher has ended.
///
/// # Safety
/// `json` is null or ends with a zero byte, and `number` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_attach(json: *const c_char, number: *mut u64) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let json = unsafe { edge::read(json) }?.ok_or(Error::NotText)?;
        // SAFETY: the caller says so.
        let number = unsafe { number.as_mut() }.ok_or(Error::Null)?;
        *number = attachments::attach(json)?;
        Ok(())
    })
}

/// Describes an attachment as one JSON object: name, version, device, path, address, size and
/// manifest. Returns 0 and keeps the error for an unknown number. Makes no driver call.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_attached(number: u64, buffer: *mut c_char, length: usize) -> usize {
    let description = guard(None, || kept(attachments::describe(number)));
    // SAFETY: the caller says so.
    description.map_or(0, |text| unsafe { edge::write(text, buffer, length) })
}

/// Waits up to some milliseconds for another version than the attached one, and writes its number,
/// or 0 if there is none. Returns -4 if the name is not published any more, or the publisher has
/// ended.
///
/// # Safety
/// `version` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_newer(number: u64, millis: u64, version: *mut u64) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let version = unsafe { version.as_mut() }.ok_or(Error::Null)?;
        let newer = attachments::newer(number, Duration::from_millis(millis))?;
        *version = newer.unwrap_or(0);
        Ok(())
    })
}

/// Waits for all work of the devices with access, and detaches the memory, which stays with other
/// processes.
///
/// Refused while a graph is captured, and if a device cannot be waited for. The attachment then
/// keeps its number until a later call that may wait detaches it, such as
/// [`cuvmm_reset`](crate::cuvmm_reset), `cuvmm_attach`, or an allocation that is short of memory.
///
/// # Safety
/// Work queued later does not use the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_detach(number: u64) -> c_int {
    status(|| attachments::detach(number))
}

/// Detaches an attachment later, like a refused [`cuvmm_detach`]. For a thread that captures a
/// graph unknown to this library.
///
/// # Safety
/// The requirements of [`cuvmm_detach`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_detach_later(number: u64) -> c_int {
    status(|| attachments::detach_later(number))
}

fn kept<T>(outcome: Result<T, Error>) -> Option<T> {
    outcome.inspect_err(edge::keep).ok()
}
