//! The functions of C that publish tensors, attach publications, and give blocks to processes.
//!
//! `unsafe` is used to export the functions under their C names, and for the addresses that C passes.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd as _, OwnedFd};
use std::time::Duration;

use cuvmm::driver::Exported;
use rustix::io::Errno;

use crate::edge::{self, guard, status};
use crate::error::Error;
use crate::tags::shared;
use crate::{attachments, folder, offers, publications};

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
/// With `in_place`, nothing is copied and the memory is not made read-only. The parts are then the
/// memory of the tensors, in their order, which shareable tags or a shareable heap have; `size` and
/// all offsets are ignored. The memory of the tags' blocks and of the heap's allocations is kept until
/// the name is withdrawn or published again.
///
/// # Safety
/// `json` is null or ends with a zero byte, and `version` is null or valid for writing. Parts that are
/// copied are readable, on the device or the host as they say, and nothing queued after this call
/// writes them before it returns.
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

/// Gives the newest version of a name that this process publishes at a path, or at the default socket
/// for null, to the keeper at another path, or to this user's keeper for null. Writes the version.
/// Returns -4 if the name is not published there.
///
/// # Safety
/// The texts are null or end with a zero byte, and `version` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_publication_keep(
    name: *const c_char,
    path: *const c_char,
    keeper: *const c_char,
    version: *mut u64,
) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        let (name, path, keeper) =
            unsafe { (edge::read(name)?, edge::read(path)?, edge::read(keeper)?) };
        // SAFETY: the caller says so.
        let version = unsafe { version.as_mut() }.ok_or(Error::Null)?;
        let name = name.ok_or(Error::NotText)?;
        *version = publications::keep(name, path.map(Into::into), keeper.map(Into::into))?;
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

/// Makes the memory of a tag shareable with other processes, for good. An error is a tag that has or
/// had other memory.
///
/// # Safety
/// `name` is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_tag_shareable(name: *const c_char) -> c_int {
    status(|| {
        // SAFETY: the caller says so.
        shared::make_shareable(unsafe { edge::read(name) }?.ok_or(Error::NotText)?)
    })
}

/// Begins an offer of the block of a shareable tag that has some memory, and writes its number. The
/// block's memory stays in place until [`cuvmm_offer_end`]. Waits for all work of the device.
/// Refused while a graph is captured.
///
/// Returns 1 if the memory is no tag's and of no other process, with nothing begun.
///
/// # Safety
/// `number` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_offer(address: *mut c_void, size: u64, number: *mut u64) -> c_int {
    // SAFETY: the caller says so.
    unsafe { found(number, || offers::begin(address.addr(), size)) }
}

/// Describes an offer as one JSON object: `device`, `address` and `size` of the block, the number
/// of `handles`, and the `description` for [`cuvmm_receive`]. Returns 0 and keeps the error for an
/// unknown number. Makes no driver call.
///
/// # Safety
/// `buffer` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_offered(number: u64, buffer: *mut c_char, length: usize) -> usize {
    let description = guard(None, || kept(offers::describe(number)));
    // SAFETY: the caller says so.
    description.map_or(0, |text| unsafe { edge::write(text, buffer, length) })
}

/// Writes a new descriptor for each extent of an offer (`cuMemExportToShareableHandle`), which the
/// caller closes.
///
/// An error is an unknown number, another number of handles than the offer has, or a refusal of the
/// driver. No descriptor is open then.
///
/// # Safety
/// `handles` is null or valid for writing `length` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_offer_handles(
    number: u64,
    handles: *mut c_int,
    length: usize,
) -> c_int {
    status(|| {
        let made = offers::handles(number)?;
        if handles.is_null() || made.len() != length {
            return Err(Error::Null);
        }
        for (index, descriptor) in made.into_iter().enumerate() {
            // SAFETY: the caller says so.
            unsafe { handles.add(index).write(descriptor.into_raw_fd()) };
        }
        Ok(())
    })
}

/// Ends an offer. The block's memory is kept until it was ended as many times as begun. Does nothing
/// for an unknown number.
#[unsafe(no_mangle)]
pub extern "C" fn cuvmm_offer_end(number: u64) {
    guard((), || offers::end(number));
}

/// Attaches a block that a process offers, and writes the attachment's number. [`cuvmm_attached`]
/// has its address, and [`cuvmm_detach`] ends it, which waits for this process's work, writes the byte
/// `L` to the socket `giver` and shuts it. A socket that closes without that byte is that of a process
/// whose work may still run.
///
/// The keys of the JSON object: `key`, the giver's name for the block; `device`, as the giver
/// counts, which may have another number here; `offset` and `size`, the bytes that are to be used; `read_only`; and `description`, or
/// null to attach the block only if it is mapped here. A block is mapped once for each access.
///
/// All descriptors are copied: the caller closes its own. Returns 1 if the block is not mapped and
/// there is no description.
///
/// # Safety
/// `json` is null or ends with a zero byte, `handles` is null or valid for reading `count` numbers
/// of open descriptors, `giver` is an open descriptor, and `number` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuvmm_receive(
    json: *const c_char,
    handles: *const c_int,
    count: usize,
    giver: c_int,
    number: *mut u64,
) -> c_int {
    let receive = || {
        // SAFETY: the caller says so.
        let json = unsafe { edge::read(json) }?.ok_or(Error::NotText)?;
        let handles = match handles.is_null() {
            true => &[],
            // SAFETY: the caller says so.
            false => unsafe { std::slice::from_raw_parts(handles, count) },
        };
        // SAFETY: the caller says so.
        let copies = handles.iter().map(|&it| unsafe { copy(it) });
        let copies = copies.map(|copy| copy.map(Exported::from));
        let copies = copies.collect::<Result<_, _>>()?;
        // SAFETY: the caller says so.
        attachments::receive(json, copies, unsafe { copy(giver) }?)
    };
    // SAFETY: the caller says so.
    unsafe { found(number, receive) }
}

/// Copies a descriptor.
///
/// # Safety
/// A descriptor that is not negative is open.
unsafe fn copy(descriptor: c_int) -> Result<OwnedFd, Error> {
    if descriptor < 0 {
        return Err(Error::NoDescriptor(descriptor));
    }
    // SAFETY: it is open by the caller's promise, and only borrowed for this call.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let copied = borrowed.try_clone_to_owned();
    copied.map_err(
        |error| match error.raw_os_error() == Some(Errno::MFILE.raw_os_error()) {
            true => Error::NoMoreDescriptors,
            false => Error::NoDescriptor(descriptor),
        },
    )
}

/// Runs the body of a C function that writes a number, or returns 1 if there is none.
///
/// # Safety
/// `number` is null or valid for writing.
unsafe fn found(number: *mut u64, body: impl FnOnce() -> Result<Option<u64>, Error>) -> c_int {
    let mut is_none = false;
    let code = status(|| {
        // SAFETY: the caller says so.
        let number = unsafe { number.as_mut() }.ok_or(Error::Null)?;
        let found = body()?;
        is_none = found.is_none();
        *number = found.unwrap_or(0);
        Ok(())
    });
    if is_none { 1 } else { code }
}

fn kept<T>(outcome: Result<T, Error>) -> Option<T> {
    outcome.inspect_err(edge::keep).ok()
}
