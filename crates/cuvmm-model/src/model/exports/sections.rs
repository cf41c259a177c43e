//! Exports on Windows: handles of sections (`CreateFileMapping`).
//!
//! A section has one page, which names the kind, the identity, the size and the location of the memory.
//! There are no bytes of the memory in it: on Windows only the model exports, which has none. The maker
//! has a handle with write access; handles that are given out can only read, so that a process that
//! received one cannot change what it says.
//!
//! A physical's memory lives while another handle than the maker's is open. The system counts the
//! handles of an object in all processes (`NtQueryObject`).
//!
//! `unsafe` is needed for the system's calls, and to duplicate a handle that was passed as a value.
#![allow(unsafe_code)]

use std::hash::{BuildHasher as _, RandomState};
use std::os::windows::io::{AsRawHandle as _, FromRawHandle as _, OwnedHandle, RawHandle};
use std::ptr;

use windows_sys::Wdk::Foundation::{NtQueryObject, ObjectBasicInformation};
use windows_sys::Win32::Foundation::{
    DUPLICATE_HANDLE_OPTIONS, DUPLICATE_SAME_ACCESS, DuplicateHandle, INVALID_HANDLE_VALUE,
};
use windows_sys::Win32::System::Memory::{
    CreateFileMappingW, FILE_MAP, FILE_MAP_READ, FILE_MAP_WRITE, MEMORY_MAPPED_VIEW_ADDRESS,
    MapViewOfFile, PAGE_READWRITE, UnmapViewOfFile,
};
use windows_sys::Win32::System::Threading::GetCurrentProcess;
use windows_sys::Win32::System::WindowsProgramming::PUBLIC_OBJECT_BASIC_INFORMATION;

use super::{Found, Identity, POOL_FILE};
use crate::model::answer::{Answer, NOT_SUPPORTED, OUT_OF_MEMORY, UNKNOWN, require};
use cuvmm_driver::{Location, LocationKind};

/// The first words of the sections of a physical and of a memory pool.
const PHYSICAL: u64 = u64::from_le_bytes(*b"cuvmmphy");
const POOL: u64 = u64::from_le_bytes(*b"cuvmmpol");

/// The contents of a section: its kind, the two words of its identity, the size in bytes, the kind of the
/// location and its number.
type Words = [u64; 6];

/// Creates the section of a physical.
pub(crate) fn new_file(size: u64, location: Location) -> Answer<OwnedHandle> {
    new_section(PHYSICAL, size, location)
}

/// Creates the section of a memory pool.
pub(crate) fn new_pool_file(location: Location) -> Answer<OwnedHandle> {
    new_section(POOL, POOL_FILE, location)
}

fn new_section(kind: u64, size: u64, location: Location) -> Answer<OwnedHandle> {
    // SAFETY: a new section without a name, backed by the system's paging file.
    let made = unsafe {
        CreateFileMappingW(
            INVALID_HANDLE_VALUE,
            ptr::null(),
            PAGE_READWRITE,
            0,
            size_of::<Words>() as u32,
            ptr::null(),
        )
    };
    require(!made.is_null(), OUT_OF_MEMORY)?;
    // SAFETY: the handle was made above for this function, which gives it to one owner.
    let section = unsafe { OwnedHandle::from_raw_handle(made) };
    // The keys of the hash are random numbers.
    let random = || RandomState::new().hash_one(std::process::id());
    let Location { kind: place, id } = location;
    let words: Words = [kind, random(), random(), size, place.0 as u64, id as u64];
    let view = View::of(&section, FILE_MAP_WRITE).ok_or(OUT_OF_MEMORY)?;
    // SAFETY: the view is mapped for writing and holds the words; no other process has the section.
    unsafe { view.words().write_volatile(words) };
    Ok(section)
}

/// Refuses a dma-buf, which Windows does not have.
pub(crate) fn stand_in(_: u64) -> Answer<OwnedHandle> {
    Err(NOT_SUPPORTED)
}

/// Creates a handle of the same section, with which it can be read.
pub(crate) fn hand_out(section: &OwnedHandle) -> Answer<OwnedHandle> {
    duplicate(section.as_raw_handle(), FILE_MAP_READ, 0).ok_or(OUT_OF_MEMORY)
}

/// Returns `true` if any process has another handle of the section.
pub(crate) fn held_elsewhere(section: &OwnedHandle) -> bool {
    let mut about = PUBLIC_OBJECT_BASIC_INFORMATION::default();
    // SAFETY: the result is written to a local of that size.
    let status = unsafe {
        NtQueryObject(
            section.as_raw_handle(),
            ObjectBasicInformation,
            ptr::from_mut(&mut about).cast(),
            size_of_val(&about) as u32,
            ptr::null_mut(),
        )
    };
    status >= 0 && about.HandleCount > 1
}

pub(crate) fn identity(section: &OwnedHandle) -> Answer<Identity> {
    let [_, first, second, ..] = read(section)?;
    Ok(Identity([first, second]))
}

/// Examines a handle by value. Anything but a physical of a model is `UNKNOWN`, as on the GPU.
pub(crate) fn examine(handle: RawHandle) -> Answer<Found> {
    examine_as(PHYSICAL, handle)
}

/// Like [`examine`], for a memory pool.
pub(crate) fn examine_pool(handle: RawHandle) -> Answer<Found> {
    examine_as(POOL, handle)
}

fn examine_as(wanted: u64, handle: RawHandle) -> Answer<Found> {
    // -1 is no handle of an object but the calling process itself.
    require(!handle.is_null() && handle != INVALID_HANDLE_VALUE, UNKNOWN)?;
    let file = duplicate(handle, 0, DUPLICATE_SAME_ACCESS).ok_or(UNKNOWN)?;
    let [kind, first, second, size, place, id] = read(&file)?;
    require(kind == wanted, UNKNOWN)?;
    let location = Location {
        kind: LocationKind(place as i32),
        id: id as i32,
    };
    Ok(Found {
        identity: Identity([first, second]),
        size,
        location,
        file,
    })
}

/// Duplicates a handle in this process; `None` if the system refuses, as for a value that is no handle.
fn duplicate(
    handle: RawHandle,
    access: FILE_MAP,
    options: DUPLICATE_HANDLE_OPTIONS,
) -> Option<OwnedHandle> {
    let mut made = ptr::null_mut();
    // SAFETY: the result is written to a local. The caller of `import` promises that the handle is open
    // during the call, or is no handle at all, which the system refuses.
    let done = unsafe {
        let process = GetCurrentProcess();
        DuplicateHandle(process, handle, process, &mut made, access, 0, options)
    };
    // SAFETY: the system made the handle for this function, which gives it to one owner.
    (done != 0).then(|| unsafe { OwnedHandle::from_raw_handle(made) })
}

/// Reads what a section says. Anything but a section of that size is `UNKNOWN`.
fn read(section: &OwnedHandle) -> Answer<Words> {
    let view = View::of(section, FILE_MAP_READ).ok_or(UNKNOWN)?;
    // SAFETY: the view is mapped for reading and holds the words, and any bytes are words. Another process
    // could write meanwhile, so the read is volatile.
    Ok(unsafe { view.words().read_volatile() })
}

/// The first bytes of a section, mapped while this value lives.
struct View(MEMORY_MAPPED_VIEW_ADDRESS);

impl View {
    fn of(section: &OwnedHandle, access: FILE_MAP) -> Option<Self> {
        // SAFETY: a new mapping at an address chosen by the system touches no other.
        let view =
            unsafe { MapViewOfFile(section.as_raw_handle(), access, 0, 0, size_of::<Words>()) };
        (!view.Value.is_null()).then_some(Self(view))
    }

    const fn words(&self) -> *mut Words {
        self.0.Value.cast()
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: the mapping was made for this value, and no reference into it is left.
        unsafe { UnmapViewOfFile(self.0) };
    }
}
