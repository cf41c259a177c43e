//! A driver whose memory is counted by a [device](super::device) of several processes.
//!
//! `unsafe` is allowed here because methods of the trait are `unsafe`; the caller's promise is
//! passed on to the inner driver unchanged.
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuvmm::driver::Result;
use cuvmm::driver::{
    AccessDesc, AccessFlags, Advice, CUresult, Call, CaptureMode, CaptureStatus, CudaVersion,
    DeviceAddress, DeviceAttribute, DeviceMemory, Driver, DriverError, DriverKind, EventFlags,
    EventHandle, Exported, GranularityKind, GraphExecHandle, GraphHandle, HandleTypes,
    ImportSource, Location, MemPoolAttribute, MemPoolHandle, MemPoolProps, MemPoolTicket,
    MemoryInfo, Ordinal, PhysicalHandle, PhysicalProps, PointerAttribute, RangeAttribute,
    StreamFlags, StreamHandle,
};

use super::device::{Topic, ask, tell};

/// A driver that asks the device before it creates memory and tells it of released memory.
#[derive(Debug)]
pub struct CountedDriver {
    inner: Arc<dyn Driver>,
    pid: u32,
    device: Mutex<UnixStream>,
    /// The memory that this process has created: its handle, its size, and how often it must be
    /// released. Imported memory is counted where it was created.
    created: Mutex<Vec<(PhysicalHandle, u64, u32)>>,
}

impl CountedDriver {
    /// Connects this process to the device at a path.
    pub fn connect(path: &Path, inner: Arc<dyn Driver>) -> Arc<Self> {
        let device = UnixStream::connect(path).unwrap();
        let pid = std::process::id();
        assert!(ask(&device, Topic::Process, pid.into()));
        Arc::new(Self {
            inner,
            pid,
            device: Mutex::new(device),
            created: Mutex::default(),
        })
    }

    fn device(&self) -> MutexGuard<'_, UnixStream> {
        assert_eq!(std::process::id(), self.pid, "a forked child makes no call");
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn created(&self) -> MutexGuard<'_, Vec<(PhysicalHandle, u64, u32)>> {
        self.created.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a connection that a forked child can report faults over.
    pub fn fault_line(&self) -> impl Fn(u64) + use<> {
        let socket = self.device().try_clone().unwrap();
        // If the test has ended, nothing is there to be told.
        move |fault| drop(tell(&socket, Topic::Fault, fault))
    }
}

/// Generates the methods that pass each call on, from lines of name, parameters and result.
macro_rules! pass_on {
    (
        safe { $($name:ident($($arg:ident: $ty:ty),*) -> $out:ty;)* }
        unsafe { $($uname:ident($($uarg:ident: $uty:ty),*) -> $uout:ty;)* }
    ) => {
        impl Driver for CountedDriver {
            fn kind(&self) -> DriverKind {
                self.inner.kind()
            }

            fn device_memory(&self) -> DeviceMemory {
                self.inner.device_memory()
            }

            fn create(
                &self,
                size: u64,
                props: &PhysicalProps,
                flags: u64,
            ) -> Result<PhysicalHandle> {
                let device = self.device();
                if !ask(&device, Topic::Create, size) {
                    let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
                    return Err(DriverError::new(Call::MemCreate, code));
                }
                let created = self.inner.create(size, props, flags);
                match &created {
                    Ok(handle) => self.created().push((*handle, size, 1)),
                    Err(_) => drop(ask(&device, Topic::Release, size)),
                }
                created
            }

            unsafe fn release(&self, handle: PhysicalHandle) -> Result<()> {
                let device = self.device();
                // SAFETY: the inner method requires what the caller of this method has promised.
                unsafe { self.inner.release(handle) }?;
                let mut created = self.created();
                if let Some(at) = created.iter().position(|it| it.0 == handle) {
                    created[at].2 -= 1;
                    if created[at].2 == 0 {
                        let (_, size, _) = created.swap_remove(at);
                        ask(&device, Topic::Release, size);
                    }
                }
                Ok(())
            }

            fn retain(&self, address: DeviceAddress) -> Result<PhysicalHandle> {
                let handle = self.inner.retain(address)?;
                if let Some(created) = self.created().iter_mut().find(|it| it.0 == handle) {
                    created.2 += 1;
                }
                Ok(handle)
            }

            $(
                fn $name(&self, $($arg: $ty),*) -> Result<$out> {
                    self.inner.$name($($arg),*)
                }
            )*

            $(
                unsafe fn $uname(&self, $($uarg: $uty),*) -> Result<$uout> {
                    // SAFETY: the inner method requires what the caller of this method has
                    // promised.
                    unsafe { self.inner.$uname($($uarg),*) }
                }
            )*
        }
    };
}

pass_on! {
    safe {
        version() -> CudaVersion;
        device_count() -> i32;
        device_name(device: Ordinal) -> String;
        device_uuid(device: Ordinal) -> [u8; 16];
        device_attribute(
            device: Ordinal, attribute: DeviceAttribute
        ) -> i32;
        total_memory(device: Ordinal) -> u64;
        memory_info(device: Ordinal) -> MemoryInfo;
        can_access_peer(device: Ordinal, peer: Ordinal) -> bool;
        allocation_granularity(
            props: &PhysicalProps, kind: GranularityKind
        ) -> u64;
        reserve(
            size: u64, alignment: u64, hint: DeviceAddress, flags: u64
        ) -> DeviceAddress;

        get_access(address: DeviceAddress, location: Location) -> AccessFlags;
        address_range(
            device: Ordinal, address: DeviceAddress
        ) -> (DeviceAddress, u64);
        pointer_attribute(
            device: Ordinal, address: DeviceAddress, attribute: PointerAttribute
        ) -> u64;
        ipc_mem_handle(device: Ordinal, address: DeviceAddress) -> [u8; 64];
        stream_create(device: Ordinal, flags: StreamFlags) -> StreamHandle;
        event_create(device: Ordinal, flags: EventFlags) -> EventHandle;
        context_synchronize(device: Ordinal) -> ();
        exchange_capture_mode(
            mode: CaptureMode
        ) -> CaptureMode;
        alloc(device: Ordinal, size: u64) -> DeviceAddress;
        host_alloc(device: Ordinal, size: u64, flags: u32) -> *mut u8;
        managed_alloc(
            device: Ordinal, size: u64, flags: u32
        ) -> DeviceAddress;
        advise(
            device: Ordinal, address: DeviceAddress, size: u64, advice: Advice, location: Location
        ) -> ();
        range_attribute(
            device: Ordinal, address: DeviceAddress, size: u64, attribute: RangeAttribute
        ) -> i32;
        range_accessed_by(
            device: Ordinal, address: DeviceAddress, size: u64
        ) -> Vec<Location>;
        mem_pool_create(
            device: Ordinal, props: &MemPoolProps
        ) -> MemPoolHandle;
        default_mem_pool(device: Ordinal) -> MemPoolHandle;
        current_mem_pool(device: Ordinal) -> MemPoolHandle;
        mem_pool_export_pointer(
            device: Ordinal, address: DeviceAddress
        ) -> MemPoolTicket;
    }
    unsafe {
        import(
            source: ImportSource, handle_type: HandleTypes
        ) -> PhysicalHandle;
        free_reservation(address: DeviceAddress, size: u64) -> ();

        physical_props(
            handle: PhysicalHandle
        ) -> PhysicalProps;
        export(
            handle: PhysicalHandle, handle_type: HandleTypes, flags: u64
        ) -> Exported;
        map(
            address: DeviceAddress, size: u64, offset: u64, handle: PhysicalHandle, flags: u64
        ) -> ();
        unmap(address: DeviceAddress, size: u64) -> ();
        set_access(
            address: DeviceAddress, size: u64, access: &[AccessDesc]
        ) -> ();
        dma_buf(
            device: Ordinal, address: DeviceAddress, size: u64
        ) -> OwnedFd;
        copy_to_device(
            device: Ordinal, destination: DeviceAddress, source: &[u8]
        ) -> ();
        copy_to_host(
            device: Ordinal, destination: &mut [u8], source: DeviceAddress
        ) -> ();
        copy_on_device(
            device: Ordinal, destination: DeviceAddress, source: DeviceAddress, size: u64
        ) -> ();
        copy_to_device_async(
            device: Ordinal, destination: DeviceAddress, source: *const u8, size: u64,
            stream: StreamHandle
        ) -> ();
        copy_to_host_async(
            device: Ordinal, destination: *mut u8, source: DeviceAddress, size: u64,
            stream: StreamHandle
        ) -> ();
        copy_on_device_async(
            device: Ordinal, destination: DeviceAddress, source: DeviceAddress, size: u64,
            stream: StreamHandle
        ) -> ();
        fill(device: Ordinal, destination: DeviceAddress, byte: u8, size: u64) -> ();
        fill_async(
            device: Ordinal, destination: DeviceAddress, byte: u8, size: u64, stream: StreamHandle
        ) -> ();
        stream_destroy(device: Ordinal, stream: StreamHandle) -> ();
        stream_synchronize(device: Ordinal, stream: StreamHandle) -> ();
        stream_query(device: Ordinal, stream: StreamHandle) -> bool;
        stream_wait_event(
            device: Ordinal, stream: StreamHandle, event: EventHandle
        ) -> ();
        event_destroy(device: Ordinal, event: EventHandle) -> ();
        event_record(
            device: Ordinal, event: EventHandle, stream: StreamHandle
        ) -> ();
        context_record_event(device: Ordinal, event: EventHandle) -> ();
        event_query(device: Ordinal, event: EventHandle) -> bool;
        event_synchronize(device: Ordinal, event: EventHandle) -> ();
        capture_status(
            device: Ordinal, stream: StreamHandle
        ) -> CaptureStatus;
        capture_begin(
            device: Ordinal, stream: StreamHandle, mode: CaptureMode
        ) -> ();
        capture_end(device: Ordinal, stream: StreamHandle) -> GraphHandle;
        graph_instantiate(
            device: Ordinal, graph: GraphHandle
        ) -> GraphExecHandle;
        graph_launch(
            device: Ordinal, graph: GraphExecHandle, stream: StreamHandle
        ) -> ();
        graph_destroy(device: Ordinal, graph: GraphHandle) -> ();
        graph_exec_destroy(device: Ordinal, graph: GraphExecHandle) -> ();
        free(device: Ordinal, address: DeviceAddress) -> ();
        alloc_async(
            device: Ordinal, size: u64, stream: StreamHandle
        ) -> DeviceAddress;
        free_async(
            device: Ordinal, address: DeviceAddress, stream: StreamHandle
        ) -> ();
        host_free(device: Ordinal, pointer: *mut u8) -> ();
        host_register(device: Ordinal, pointer: *mut u8, size: u64, flags: u32) -> ();
        host_unregister(device: Ordinal, pointer: *mut u8) -> ();
        prefetch(
            device: Ordinal, address: DeviceAddress, size: u64, location: Location,
            stream: StreamHandle
        ) -> ();
        mem_pool_destroy(device: Ordinal, pool: MemPoolHandle) -> ();
        mem_pool_attribute(
            device: Ordinal, pool: MemPoolHandle, attribute: MemPoolAttribute
        ) -> u64;
        mem_pool_set_attribute(
            device: Ordinal, pool: MemPoolHandle, attribute: MemPoolAttribute, value: u64
        ) -> ();
        mem_pool_trim(device: Ordinal, pool: MemPoolHandle, keep: u64) -> ();
        mem_pool_access(
            device: Ordinal, pool: MemPoolHandle, location: Location
        ) -> AccessFlags;
        mem_pool_set_access(
            device: Ordinal, pool: MemPoolHandle, access: &[AccessDesc]
        ) -> ();
        set_current_mem_pool(device: Ordinal, pool: MemPoolHandle) -> ();
        alloc_from_pool_async(
            device: Ordinal, size: u64, pool: MemPoolHandle, stream: StreamHandle
        ) -> DeviceAddress;
        mem_pool_export(
            device: Ordinal, pool: MemPoolHandle, handle_type: HandleTypes, flags: u64
        ) -> Exported;
        mem_pool_import(
            device: Ordinal, source: ImportSource, handle_type: HandleTypes, flags: u64
        ) -> MemPoolHandle;
        mem_pool_import_pointer(
            device: Ordinal, pool: MemPoolHandle, ticket: &MemPoolTicket
        ) -> DeviceAddress;
    }
}
