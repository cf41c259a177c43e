//! The host driver, watched: calls that make, release or use an object are noted for the report.
//!
//! The methods here hide the trait's methods of the same names and parameters. Calls without notes
//! go to the host driver directly and need no line here.
//!
//! `unsafe` is allowed here to pass calls on: the requirements of each method are those of the host
//! driver's.
#![allow(unsafe_code)]

mod leaks;
mod noting;

pub(crate) use noting::Contexts;

use std::ops::Deref;
use std::os::fd::AsRawFd as _;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use cuvmm_driver::{
    AccessDesc, AccessFlags, CaptureMode, CaptureStatus, DeviceAddress, Driver, EventFlags,
    EventHandle, Exported, GraphExecHandle, GraphHandle, HandleTypes, ImportSource, Location,
    MemPoolAttribute, MemPoolHandle, MemPoolProps, MemPoolTicket, Ordinal, PhysicalHandle,
    PhysicalProps, Result, StreamFlags, StreamHandle,
};
use cuvmm_model::host::HostDriver;

use crate::diagnosis::books::{Books, Class};
use crate::diagnosis::findings::Findings;

/// The host driver with notes of its objects.
#[derive(Debug)]
pub(crate) struct Watched {
    host: HostDriver,
    on: AtomicBool,
    books: Mutex<Books>,
    findings: Mutex<Findings>,
}

impl Deref for Watched {
    type Target = HostDriver;

    fn deref(&self) -> &HostDriver {
        &self.host
    }
}

/// Generates methods that make an object of a class. `as` names the result and gives its value and
/// size.
macro_rules! makes {
    ($($class:ident: fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty
        as |$made:ident| ($value:expr, $size:expr);)*) => {
        impl Watched {$(
            pub(crate) fn $name(&self, $($arg: $ty),*) -> Result<$out> {
                let $made = self.host.$name($($arg),*)?;
                self.note_made(Class::$class, $value, $size);
                Ok($made)
            }
        )*}
    };
}

/// Generates methods that make an object of a class, and use others by their handles.
macro_rules! makes_with {
    ($($class:ident: fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty
        as |$made:ident| ($value:expr, $size:expr) uses [$($used:ident $handle:expr),*];)*) => {
        impl Watched {$(
            /// # Safety
            /// The trait's method requires it.
            pub(crate) unsafe fn $name(&self, $($arg: $ty),*) -> Result<$out> {
                $(self.note_use(Class::$used, $handle);)*
                // SAFETY: as the caller promised.
                let $made = unsafe { self.host.$name($($arg),*) }?;
                self.note_made(Class::$class, $value, $size);
                Ok($made)
            }
        )*}
    };
}

/// Generates methods that end an object of a class.
macro_rules! ends {
    ($($class:ident $value:expr => fn $name:ident($($arg:ident: $ty:ty),*)
        uses [$($used:ident $handle:expr),*];)*) => {
        impl Watched {$(
            /// # Safety
            /// The trait's method requires it.
            pub(crate) unsafe fn $name(&self, $($arg: $ty),*) -> Result<()> {
                $(self.note_use(Class::$used, $handle);)*
                // SAFETY: as the caller promised.
                self.ending(Class::$class, $value, || unsafe { self.host.$name($($arg),*) })
            }
        )*}
    };
}

/// Generates methods that use objects by their handles, and addresses.
macro_rules! uses {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty;
        uses [$($used:ident $handle:expr),*] at [$($address:expr),*];)*) => {
        impl Watched {$(
            /// # Safety
            /// The trait's method requires it.
            pub(crate) unsafe fn $name(&self, $($arg: $ty),*) -> Result<$out> {
                $(self.note_use(Class::$used, $handle);)*
                // SAFETY: as the caller promised.
                let answer = unsafe { self.host.$name($($arg),*) };
                self.note_addresses(answer.as_ref().err(), &[$($address),*]);
                answer
            }
        )*}
    };
}

makes! {
    Reservation: fn reserve(size: u64, alignment: u64, hint: DeviceAddress, flags: u64)
        -> DeviceAddress as |made| (made.0, size);
    Physical: fn create(size: u64, props: &PhysicalProps, flags: u64)
        -> PhysicalHandle as |made| (made.0, size);
    Physical: fn retain(address: DeviceAddress) -> PhysicalHandle as |made| (made.0, 0);
    Memory: fn alloc(device: Ordinal, size: u64) -> DeviceAddress as |made| (made.0, size);
    Memory: fn managed_alloc(device: Ordinal, size: u64, flags: u32)
        -> DeviceAddress as |made| (made.0, size);
    Memory: fn host_alloc(device: Ordinal, size: u64, flags: u32)
        -> *mut u8 as |made| (made.addr() as u64, size);
    Stream: fn stream_create(device: Ordinal, flags: StreamFlags)
        -> StreamHandle as |made| (made.0, 0);
    Event: fn event_create(device: Ordinal, flags: EventFlags)
        -> EventHandle as |made| (made.0, 0);
    MemPool: fn mem_pool_create(device: Ordinal, props: &MemPoolProps)
        -> MemPoolHandle as |made| (made.0, 0);
}

makes_with! {
    Physical: fn import(source: ImportSource, handle_type: HandleTypes)
        -> PhysicalHandle as |made| (made.0, 0) uses [];
    Memory: fn alloc_async(device: Ordinal, size: u64, stream: StreamHandle)
        -> DeviceAddress as |made| (made.0, size) uses [Stream stream.0];
    Memory: fn alloc_from_pool_async(
        device: Ordinal, size: u64, pool: MemPoolHandle, stream: StreamHandle
    ) -> DeviceAddress as |made| (made.0, size) uses [MemPool pool.0, Stream stream.0];
    MemPool: fn mem_pool_import(
        device: Ordinal, source: ImportSource, handle_type: HandleTypes, flags: u64
    ) -> MemPoolHandle as |made| (made.0, 0) uses [];
    Memory: fn mem_pool_import_pointer(
        device: Ordinal, pool: MemPoolHandle, ticket: &MemPoolTicket
    ) -> DeviceAddress as |made| (made.0, 1) uses [MemPool pool.0];
    Graph: fn capture_end(device: Ordinal, stream: StreamHandle)
        -> GraphHandle as |made| (made.0, 0) uses [Stream stream.0];
    GraphExec: fn graph_instantiate(device: Ordinal, graph: GraphHandle)
        -> GraphExecHandle as |made| (made.0, 0) uses [Graph graph.0];
}

ends! {
    Physical handle.0 => fn release(handle: PhysicalHandle) uses [];
    Reservation address.0 => fn free_reservation(address: DeviceAddress, size: u64) uses [];
    Memory address.0 => fn free(device: Ordinal, address: DeviceAddress) uses [];
    Memory address.0 => fn free_async(
        device: Ordinal, address: DeviceAddress, stream: StreamHandle
    ) uses [Stream stream.0];
    Memory pointer.addr() as u64 => fn host_free(device: Ordinal, pointer: *mut u8) uses [];
    Stream stream.0 => fn stream_destroy(device: Ordinal, stream: StreamHandle) uses [];
    Event event.0 => fn event_destroy(device: Ordinal, event: EventHandle) uses [];
    MemPool pool.0 => fn mem_pool_destroy(device: Ordinal, pool: MemPoolHandle) uses [];
    Graph graph.0 => fn graph_destroy(device: Ordinal, graph: GraphHandle) uses [];
    GraphExec graph.0 => fn graph_exec_destroy(device: Ordinal, graph: GraphExecHandle) uses [];
}

uses! {
    fn physical_props(handle: PhysicalHandle) -> PhysicalProps; uses [Physical handle.0] at [];
    fn set_access(address: DeviceAddress, size: u64, access: &[AccessDesc]) -> ();
        uses [] at [address];
    fn copy_to_device(device: Ordinal, destination: DeviceAddress, source: &[u8]) -> ();
        uses [] at [destination];
    fn copy_to_host(device: Ordinal, destination: &mut [u8], source: DeviceAddress) -> ();
        uses [] at [source];
    fn copy_on_device(
        device: Ordinal, destination: DeviceAddress, source: DeviceAddress, size: u64
    ) -> (); uses [] at [destination, source];
    fn copy_to_device_async(
        device: Ordinal, destination: DeviceAddress, source: *const u8, size: u64,
        stream: StreamHandle
    ) -> (); uses [Stream stream.0] at [destination];
    fn copy_now_to_device(
        device: Ordinal, destination: DeviceAddress, bytes: &[u8], stream: StreamHandle
    ) -> (); uses [Stream stream.0] at [destination];
    fn copy_to_host_async(
        device: Ordinal, destination: *mut u8, source: DeviceAddress, size: u64,
        stream: StreamHandle
    ) -> (); uses [Stream stream.0] at [source];
    fn copy_on_device_async(
        device: Ordinal, destination: DeviceAddress, source: DeviceAddress, size: u64,
        stream: StreamHandle
    ) -> (); uses [Stream stream.0] at [destination, source];
    fn fill(device: Ordinal, destination: DeviceAddress, byte: u8, size: u64) -> ();
        uses [] at [destination];
    fn host_register(device: Ordinal, pointer: *mut u8, size: u64, flags: u32) -> (); uses [] at [];
    fn host_unregister(device: Ordinal, pointer: *mut u8) -> (); uses [] at [];
    fn fill_async(
        device: Ordinal, destination: DeviceAddress, byte: u8, size: u64, stream: StreamHandle
    ) -> (); uses [Stream stream.0] at [destination];
    fn stream_synchronize(device: Ordinal, stream: StreamHandle) -> ();
        uses [Stream stream.0] at [];
    fn stream_query(device: Ordinal, stream: StreamHandle) -> bool; uses [Stream stream.0] at [];
    fn stream_wait_event(device: Ordinal, stream: StreamHandle, event: EventHandle) -> ();
        uses [Stream stream.0, Event event.0] at [];
    fn event_record(device: Ordinal, event: EventHandle, stream: StreamHandle) -> ();
        uses [Event event.0, Stream stream.0] at [];
    fn context_record_event(device: Ordinal, event: EventHandle) -> ();
        uses [Event event.0] at [];
    fn event_query(device: Ordinal, event: EventHandle) -> bool; uses [Event event.0] at [];
    fn event_synchronize(device: Ordinal, event: EventHandle) -> (); uses [Event event.0] at [];
    fn capture_status(device: Ordinal, stream: StreamHandle) -> CaptureStatus;
        uses [Stream stream.0] at [];
    fn capture_begin(device: Ordinal, stream: StreamHandle, mode: CaptureMode) -> ();
        uses [Stream stream.0] at [];
    fn graph_launch(device: Ordinal, graph: GraphExecHandle, stream: StreamHandle) -> ();
        uses [GraphExec graph.0, Stream stream.0] at [];
    fn prefetch(
        device: Ordinal, address: DeviceAddress, size: u64, location: Location,
        stream: StreamHandle
    ) -> (); uses [Stream stream.0] at [address];
    fn mem_pool_attribute(device: Ordinal, pool: MemPoolHandle, attribute: MemPoolAttribute)
        -> u64; uses [MemPool pool.0] at [];
    fn mem_pool_set_attribute(
        device: Ordinal, pool: MemPoolHandle, attribute: MemPoolAttribute, value: u64
    ) -> (); uses [MemPool pool.0] at [];
    fn mem_pool_trim(device: Ordinal, pool: MemPoolHandle, keep: u64) -> ();
        uses [MemPool pool.0] at [];
    fn mem_pool_access(device: Ordinal, pool: MemPoolHandle, location: Location) -> AccessFlags;
        uses [MemPool pool.0] at [];
    fn mem_pool_set_access(device: Ordinal, pool: MemPoolHandle, access: &[AccessDesc]) -> ();
        uses [MemPool pool.0] at [];
    fn set_current_mem_pool(device: Ordinal, pool: MemPoolHandle) -> ();
        uses [MemPool pool.0] at [];
}

impl Watched {
    pub(crate) fn context_synchronize(&self, device: Ordinal) -> Result<()> {
        let answer = self.host.context_synchronize(device);
        self.note_addresses(None, &[]);
        answer
    }

    /// # Safety
    /// The host driver's method requires it.
    pub(crate) unsafe fn prefetch_all(
        &self,
        device: Ordinal,
        ranges: &[(DeviceAddress, u64, Option<Location>)],
        stream: StreamHandle,
    ) -> Result<()> {
        self.note_use(Class::Stream, stream.0);
        // SAFETY: as the caller promised.
        let answer = unsafe { self.host.prefetch_all(device, ranges, stream) };
        let addresses: Vec<_> = ranges.iter().map(|&(address, ..)| address).collect();
        self.note_addresses(answer.as_ref().err(), &addresses);
        answer
    }

    /// # Safety
    /// The trait's method requires it.
    pub(crate) unsafe fn map(
        &self,
        address: DeviceAddress,
        size: u64,
        offset: u64,
        handle: PhysicalHandle,
        flags: u64,
    ) -> Result<()> {
        self.note_use(Class::Physical, handle.0);
        // SAFETY: as the caller promised.
        let answer = unsafe { self.host.map(address, size, offset, handle, flags) };
        match &answer {
            Ok(()) => self.note_made(Class::Mapping, address.0, size),
            Err(error) => self.note_place(error, address),
        }
        answer
    }

    /// # Safety
    /// The trait's method requires it.
    pub(crate) unsafe fn unmap(&self, address: DeviceAddress, size: u64) -> Result<()> {
        // SAFETY: as the caller promised.
        let answer = self.unmapping(address.0, size, || unsafe {
            self.host.unmap(address, size)
        });
        self.note_addresses(answer.as_ref().err(), &[address]);
        answer
    }

    /// # Safety
    /// The trait's method requires it.
    pub(crate) unsafe fn export(
        &self,
        handle: PhysicalHandle,
        handle_type: HandleTypes,
        flags: u64,
    ) -> Result<Exported> {
        self.note_use(Class::Physical, handle.0);
        // SAFETY: as the caller promised.
        let exported = unsafe { self.host.export(handle, handle_type, flags) }?;
        if let Exported::Fd(fd) = &exported {
            self.note_descriptor(fd.as_raw_fd(), "exported descriptor of a physical");
        }
        Ok(exported)
    }

    /// # Safety
    /// The trait's method requires it.
    pub(crate) unsafe fn mem_pool_export(
        &self,
        device: Ordinal,
        pool: MemPoolHandle,
        handle_type: HandleTypes,
        flags: u64,
    ) -> Result<Exported> {
        self.note_use(Class::MemPool, pool.0);
        // SAFETY: as the caller promised.
        let exported = unsafe { self.host.mem_pool_export(device, pool, handle_type, flags) }?;
        if let Exported::Fd(fd) = &exported {
            self.note_descriptor(fd.as_raw_fd(), "exported descriptor of a memory pool");
        }
        Ok(exported)
    }

    /// # Safety
    /// The trait's method requires it.
    pub(crate) unsafe fn dma_buf(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
    ) -> Result<std::os::fd::OwnedFd> {
        // SAFETY: as the caller promised.
        let answer = unsafe { self.host.dma_buf(device, address, size) };
        match &answer {
            Ok(fd) => self.note_descriptor(fd.as_raw_fd(), "dma-buf"),
            Err(error) => self.note_addresses(Some(error), &[address]),
        }
        answer
    }
}
