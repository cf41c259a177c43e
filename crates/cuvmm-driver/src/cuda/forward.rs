//! The implementation of the trait, which forwards each method to the file that implements it.
//!
//! `unsafe` is allowed here because methods that are `unsafe` in the trait are `unsafe` in these
//! files too, and the caller's obligation is passed on unchanged.
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;

use cuvmm_sys::CudaVersion;

use super::{
    CudaDriver, addresses, capture, copies, devices, events, managed, mapping, physical, plain,
    pools, streams,
};
use crate::{
    AccessDesc, AccessFlags, Advice, CaptureMode, CaptureStatus, DeviceAddress, DeviceAttribute,
    DeviceMemory, Driver, DriverKind, EventFlags, EventHandle, Exported, GranularityKind,
    GraphExecHandle, GraphHandle, HandleTypes, ImportSource, Location, MemPoolAttribute,
    MemPoolHandle, MemPoolProps, MemPoolTicket, MemoryInfo, Ordinal, PhysicalHandle, PhysicalProps,
    PointerAttribute, RangeAttribute, Result, StreamFlags, StreamHandle,
};

macro_rules! forward {
    ($(
        $file:ident {
            $(safe { $(
                fn $safe:ident($($safe_argument:ident: $safe_type:ty),* $(,)?) -> $safe_out:ty;
            )* })?
            $(unsafe { $(
                fn $danger:ident($($argument:ident: $type:ty),* $(,)?) -> $out:ty;
            )* })?
        }
    )*) => {
        impl Driver for CudaDriver {
            fn kind(&self) -> DriverKind {
                DriverKind::Cuda
            }

            fn device_memory(&self) -> DeviceMemory {
                DeviceMemory::Device
            }

            $(
                $($(
                    fn $safe(&self, $($safe_argument: $safe_type),*) -> Result<$safe_out> {
                        $file::$safe(self, $($safe_argument),*)
                    }
                )*)?
                $($(
                    unsafe fn $danger(&self, $($argument: $type),*) -> Result<$out> {
                        // SAFETY: the function has the same obligation as this method, and the
                        // caller has met it.
                        unsafe { $file::$danger(self, $($argument),*) }
                    }
                )*)?
            )*
        }
    };
}

forward! {
    devices {
        safe {
            fn version() -> CudaVersion;
            fn device_count() -> i32;
            fn device_name(device: Ordinal) -> String;
            fn device_uuid(device: Ordinal) -> [u8; 16];
            fn device_attribute(device: Ordinal, attribute: DeviceAttribute) -> i32;
            fn total_memory(device: Ordinal) -> u64;
            fn memory_info(device: Ordinal) -> MemoryInfo;
            fn can_access_peer(device: Ordinal, peer: Ordinal) -> bool;
            fn allocation_granularity(props: &PhysicalProps, kind: GranularityKind) -> u64;
        }
    }
    addresses {
        safe {
            fn reserve(size: u64, alignment: u64, hint: DeviceAddress, flags: u64) -> DeviceAddress;
        }
        unsafe {
            fn free_reservation(address: DeviceAddress, size: u64) -> ();
        }
    }
    physical {
        safe {
            fn create(size: u64, props: &PhysicalProps, flags: u64) -> PhysicalHandle;
            fn retain(address: DeviceAddress) -> PhysicalHandle;
        }
        unsafe {
            fn release(handle: PhysicalHandle) -> ();
            fn physical_props(handle: PhysicalHandle) -> PhysicalProps;
            fn export(handle: PhysicalHandle, handle_type: HandleTypes, flags: u64) -> Exported;
            fn import(source: ImportSource, handle_type: HandleTypes) -> PhysicalHandle;
        }
    }
    mapping {
        safe {
            fn get_access(address: DeviceAddress, location: Location) -> AccessFlags;
            fn address_range(device: Ordinal, address: DeviceAddress) -> (DeviceAddress, u64);
            fn pointer_attribute(
                device: Ordinal,
                address: DeviceAddress,
                attribute: PointerAttribute,
            ) -> u64;
            fn ipc_mem_handle(device: Ordinal, address: DeviceAddress) -> [u8; 64];
        }
        unsafe {
            fn map(
                address: DeviceAddress,
                size: u64,
                offset: u64,
                handle: PhysicalHandle,
                flags: u64,
            ) -> ();
            fn unmap(address: DeviceAddress, size: u64) -> ();
            fn set_access(address: DeviceAddress, size: u64, access: &[AccessDesc]) -> ();
            fn dma_buf(device: Ordinal, address: DeviceAddress, size: u64) -> OwnedFd;
        }
    }
    copies {
        unsafe {
            fn copy_to_device(device: Ordinal, destination: DeviceAddress, source: &[u8]) -> ();
            fn copy_to_host(device: Ordinal, destination: &mut [u8], source: DeviceAddress) -> ();
            fn copy_on_device(
                device: Ordinal,
                destination: DeviceAddress,
                source: DeviceAddress,
                size: u64,
            ) -> ();
            fn copy_to_device_async(
                device: Ordinal,
                destination: DeviceAddress,
                source: *const u8,
                size: u64,
                stream: StreamHandle,
            ) -> ();
            fn copy_to_host_async(
                device: Ordinal,
                destination: *mut u8,
                source: DeviceAddress,
                size: u64,
                stream: StreamHandle,
            ) -> ();
            fn copy_on_device_async(
                device: Ordinal,
                destination: DeviceAddress,
                source: DeviceAddress,
                size: u64,
                stream: StreamHandle,
            ) -> ();
            fn fill(device: Ordinal, destination: DeviceAddress, byte: u8, size: u64) -> ();
            fn fill_async(
                device: Ordinal,
                destination: DeviceAddress,
                byte: u8,
                size: u64,
                stream: StreamHandle,
            ) -> ();
        }
    }
    streams {
        safe {
            fn stream_create(device: Ordinal, flags: StreamFlags) -> StreamHandle;
        }
        unsafe {
            fn stream_destroy(device: Ordinal, stream: StreamHandle) -> ();
            fn stream_synchronize(device: Ordinal, stream: StreamHandle) -> ();
            fn stream_query(device: Ordinal, stream: StreamHandle) -> bool;
            fn stream_wait_event(device: Ordinal, stream: StreamHandle, event: EventHandle) -> ();
        }
    }
    events {
        safe {
            fn event_create(device: Ordinal, flags: EventFlags) -> EventHandle;
            fn context_synchronize(device: Ordinal) -> ();
        }
        unsafe {
            fn event_destroy(device: Ordinal, event: EventHandle) -> ();
            fn event_record(device: Ordinal, event: EventHandle, stream: StreamHandle) -> ();
            fn context_record_event(device: Ordinal, event: EventHandle) -> ();
            fn event_query(device: Ordinal, event: EventHandle) -> bool;
            fn event_synchronize(device: Ordinal, event: EventHandle) -> ();
        }
    }
    capture {
        safe {
            fn exchange_capture_mode(mode: CaptureMode) -> CaptureMode;
        }
        unsafe {
            fn capture_status(device: Ordinal, stream: StreamHandle) -> CaptureStatus;
            fn capture_begin(device: Ordinal, stream: StreamHandle, mode: CaptureMode) -> ();
            fn capture_end(device: Ordinal, stream: StreamHandle) -> GraphHandle;
            fn graph_instantiate(device: Ordinal, graph: GraphHandle) -> GraphExecHandle;
            fn graph_launch(device: Ordinal, graph: GraphExecHandle, stream: StreamHandle) -> ();
            fn graph_destroy(device: Ordinal, graph: GraphHandle) -> ();
            fn graph_exec_destroy(device: Ordinal, graph: GraphExecHandle) -> ();
        }
    }
    plain {
        safe {
            fn alloc(device: Ordinal, size: u64) -> DeviceAddress;
            fn host_alloc(device: Ordinal, size: u64, flags: u32) -> *mut u8;
        }
        unsafe {
            fn free(device: Ordinal, address: DeviceAddress) -> ();
            fn alloc_async(device: Ordinal, size: u64, stream: StreamHandle) -> DeviceAddress;
            fn free_async(device: Ordinal, address: DeviceAddress, stream: StreamHandle) -> ();
            fn host_free(device: Ordinal, pointer: *mut u8) -> ();
        }
    }
    pools {
        safe {
            fn mem_pool_create(device: Ordinal, props: &MemPoolProps) -> MemPoolHandle;
            fn default_mem_pool(device: Ordinal) -> MemPoolHandle;
            fn current_mem_pool(device: Ordinal) -> MemPoolHandle;
            fn mem_pool_export_pointer(device: Ordinal, address: DeviceAddress) -> MemPoolTicket;
        }
        unsafe {
            fn mem_pool_destroy(device: Ordinal, pool: MemPoolHandle) -> ();
            fn mem_pool_attribute(
                device: Ordinal,
                pool: MemPoolHandle,
                attribute: MemPoolAttribute,
            ) -> u64;
            fn mem_pool_set_attribute(
                device: Ordinal,
                pool: MemPoolHandle,
                attribute: MemPoolAttribute,
                value: u64,
            ) -> ();
            fn mem_pool_trim(device: Ordinal, pool: MemPoolHandle, keep: u64) -> ();
            fn mem_pool_access(
                device: Ordinal,
                pool: MemPoolHandle,
                location: Location,
            ) -> AccessFlags;
            fn mem_pool_set_access(
                device: Ordinal,
                pool: MemPoolHandle,
                access: &[AccessDesc],
            ) -> ();
            fn set_current_mem_pool(device: Ordinal, pool: MemPoolHandle) -> ();
            fn alloc_from_pool_async(
                device: Ordinal,
                size: u64,
                pool: MemPoolHandle,
                stream: StreamHandle,
            ) -> DeviceAddress;
            fn mem_pool_export(
                device: Ordinal,
                pool: MemPoolHandle,
                handle_type: HandleTypes,
                flags: u64,
            ) -> Exported;
            fn mem_pool_import(
                device: Ordinal,
                source: ImportSource,
                handle_type: HandleTypes,
                flags: u64,
            ) -> MemPoolHandle;
            fn mem_pool_import_pointer(
                device: Ordinal,
                pool: MemPoolHandle,
                ticket: &MemPoolTicket,
            ) -> DeviceAddress;
        }
    }
    managed {
        safe {
            fn managed_alloc(device: Ordinal, size: u64, flags: u32) -> DeviceAddress;
            fn advise(
                device: Ordinal,
                address: DeviceAddress,
                size: u64,
                advice: Advice,
                location: Location,
            ) -> ();
            fn range_attribute(
                device: Ordinal,
                address: DeviceAddress,
                size: u64,
                attribute: RangeAttribute,
            ) -> i32;
            fn range_accessed_by(
                device: Ordinal,
                address: DeviceAddress,
                size: u64,
            ) -> Vec<Location>;
        }
        unsafe {
            fn prefetch(
                device: Ordinal,
                address: DeviceAddress,
                size: u64,
                location: Location,
                stream: StreamHandle,
            ) -> ();
        }
    }
}
