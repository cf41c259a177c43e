//! Calls that name the device and pass all arguments on unchanged.
//!
//! `unsafe` is allowed here for the reasons given at the top of `memory`.
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;

use cuvmm_driver::{
    AccessDesc, AccessFlags, CaptureStatus, DeviceAddress, DriverError, EventHandle, Exported,
    GraphExecHandle, GraphHandle, HandleTypes, ImportSource, Location, MemPoolAttribute,
    MemPoolHandle, MemPoolTicket, StreamHandle,
};

use super::Bench;

/// Defines methods by the name of the trait's method and the order of its arguments.
macro_rules! asks {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty = $method:ident($($passed:ident),*);)*) => {
        impl Bench {$(
            pub(crate) fn $name(&self, $($arg: $ty),*) -> Result<$out, DriverError> {
                // SAFETY: see `memory`.
                unsafe { self.driver.$method(self.device, $($passed),*) }
            }
        )*}
    };
}

/// Defines methods that add what the call has made to a list of the ledger.
macro_rules! makes {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty
        = $method:ident($($passed:ident),*) adds to $list:ident;)*) => {
        impl Bench {$(
            pub(crate) fn $name(&mut self, $($arg: $ty),*) -> Result<$out, DriverError> {
                // SAFETY: see `memory`.
                let made = unsafe { self.driver.$method(self.device, $($passed),*) }?;
                self.ledger.$list.push(made);
                Ok(made)
            }
        )*}
    };
}

asks! {
    fn dma_buf(address: DeviceAddress, size: u64) -> OwnedFd = dma_buf(address, size);
    fn fill(address: DeviceAddress, byte: u8, size: u64) -> () = fill(address, byte, size);
    fn fill_async(address: DeviceAddress, byte: u8, size: u64, stream: StreamHandle) -> ()
        = fill_async(address, byte, size, stream);
    fn write(address: DeviceAddress, bytes: &[u8]) -> () = copy_to_device(address, bytes);
    fn read_into(address: DeviceAddress, bytes: &mut [u8]) -> () = copy_to_host(bytes, address);
    fn copy(destination: DeviceAddress, source: DeviceAddress, size: u64) -> ()
        = copy_on_device(destination, source, size);
    fn copy_async(
        destination: DeviceAddress, source: DeviceAddress, size: u64, stream: StreamHandle
    ) -> () = copy_on_device_async(destination, source, size, stream);
    fn prefetch_on(
        stream: StreamHandle, address: DeviceAddress, size: u64, location: Location
    ) -> () = prefetch(address, size, location, stream);
    fn synchronize(stream: StreamHandle) -> () = stream_synchronize(stream);
    fn stream_is_done(stream: StreamHandle) -> bool = stream_query(stream);
    fn wait_event(stream: StreamHandle, event: EventHandle) -> ()
        = stream_wait_event(stream, event);
    fn record(event: EventHandle, stream: StreamHandle) -> () = event_record(event, stream);
    fn record_context(event: EventHandle) -> () = context_record_event(event);
    fn event_is_done(event: EventHandle) -> bool = event_query(event);
    fn synchronize_event(event: EventHandle) -> () = event_synchronize(event);
    fn capture_status(stream: StreamHandle) -> CaptureStatus = capture_status(stream);
    fn launch(exec: GraphExecHandle, stream: StreamHandle) -> () = graph_launch(exec, stream);
    fn pool_attribute(pool: MemPoolHandle, attribute: MemPoolAttribute) -> u64
        = mem_pool_attribute(pool, attribute);
    fn set_pool_attribute(pool: MemPoolHandle, attribute: MemPoolAttribute, value: u64) -> ()
        = mem_pool_set_attribute(pool, attribute, value);
    fn trim_pool(pool: MemPoolHandle, keep: u64) -> () = mem_pool_trim(pool, keep);
    fn pool_access(pool: MemPoolHandle, location: Location) -> AccessFlags
        = mem_pool_access(pool, location);
    fn set_pool_access(pool: MemPoolHandle, access: &[AccessDesc]) -> ()
        = mem_pool_set_access(pool, access);
    fn export_pool(pool: MemPoolHandle, handle_type: HandleTypes, flags: u64) -> Exported
        = mem_pool_export(pool, handle_type, flags);
}

makes! {
    fn alloc_async(size: u64, stream: StreamHandle) -> DeviceAddress
        = alloc_async(size, stream) adds to plain;
    fn instantiate(graph: GraphHandle) -> GraphExecHandle = graph_instantiate(graph) adds to execs;
    fn alloc_from(pool: MemPoolHandle, size: u64, stream: StreamHandle) -> DeviceAddress
        = alloc_from_pool_async(size, pool, stream) adds to plain;
    fn import_pool(source: ImportSource, handle_type: HandleTypes, flags: u64) -> MemPoolHandle
        = mem_pool_import(source, handle_type, flags) adds to pools;
    fn import_pointer(pool: MemPoolHandle, ticket: &MemPoolTicket) -> DeviceAddress
        = mem_pool_import_pointer(pool, ticket) adds to plain;
}
