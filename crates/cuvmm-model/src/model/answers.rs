//! The implementation of the trait: each method runs the rules and adds the name of its call.
//!
//! `unsafe` is here because methods of the trait are `unsafe`. Only the copies rely on their
//! callers' promises; they pass host pointers on to [`execution`](super::execution).
#![allow(unsafe_code)]

use std::ptr;

use super::backing::Backing;
use super::machine::Machine;
use super::source::Source;
use super::state::State;
use cuvmm_driver::Result;
use cuvmm_driver::{
    AccessDesc, AccessFlags, Advice, Call, CaptureMode, CaptureStatus, CudaVersion, DeviceAddress,
    DeviceAttribute, DeviceMemory, Driver, DriverKind, EventFlags, EventHandle, Exported,
    GranularityKind, GraphExecHandle, GraphHandle, HandleTypes, ImportSource, Location,
    MemPoolAttribute, MemPoolHandle, MemPoolProps, MemPoolTicket, MemoryInfo, Ordinal, OsHandle,
    PhysicalHandle, PhysicalProps, PointerAttribute, RangeAttribute, StreamFlags, StreamHandle,
};

/// Generates the methods of the trait. Methods that only run the rules are lines of call, name,
/// parameters and result; the other methods are written out at the end.
macro_rules! answers {
    (
        safe { $($call:ident = $name:ident($($arg:ident: $ty:ty),*) -> $out:ty;)* }
        unsafe { $($ucall:ident = $uname:ident($($uarg:ident: $uty:ty),*) -> $uout:ty;)* }
        $($written_out:tt)*
    ) => {
        impl<B: Backing> Machine<B> {
    /// Queues a copy to the device, and reads the bytes at the call, as from pageable memory.
    ///
    /// # Errors
    /// Those of `Driver::copy_to_device_async`.
    ///
    /// # Safety
    /// As for `Driver::copy_to_device_async`, except that the bytes are used during the call only.
    pub unsafe fn copy_now_to_device(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        bytes: &[u8],
        stream: StreamHandle,
    ) -> Result<()> {
        let source = Source::Now(bytes.as_ptr().expose_provenance());
        self.ask(Call::MemcpyHtoDAsync, |state| {
            let size = bytes.len() as u64;
            let queued = state.copy_to_device(device, destination, source, size, stream);
            queued.map(drop)
        })
    }

    /// Queues prefetches of several ranges of managed memory as one piece of work. A range without
    /// a location is discarded: its bytes, which a program must not rely on, stay as they are.
    ///
    /// # Errors
    /// Those of `Driver::prefetch`. If a location or the first range is refused, nothing is queued; if
    /// a later range is, the ranges before it are moved.
    ///
    /// # Safety
    /// As for `Driver::prefetch`.
    pub unsafe fn prefetch_all(
        &self,
        device: Ordinal,
        ranges: &[(DeviceAddress, u64, Option<Location>)],
        stream: StreamHandle,
    ) -> Result<()> {
        self.ask(Call::MemPrefetchAsync, |state| {
            state.prefetch_all(device, ranges, stream)
        })
    }
}

impl<B: Backing> Driver for Machine<B> {
            $(
                fn $name(&self, $($arg: $ty),*) -> Result<$out> {
                    self.ask(Call::$call, |state| state.$name($($arg),*))
                }
            )*

            $(
                unsafe fn $uname(&self, $($uarg: $uty),*) -> Result<$uout> {
                    self.ask(Call::$ucall, |state| state.$uname($($uarg),*))
                }
            )*

            $($written_out)*
        }
    };
}

answers! {
    safe {
        DeviceGetName = device_name(device: Ordinal) -> String;
        DeviceGetUuid = device_uuid(device: Ordinal) -> [u8; 16];
        DeviceGetAttribute = device_attribute(device: Ordinal, attribute: DeviceAttribute) -> i32;
        DeviceTotalMem = total_memory(device: Ordinal) -> u64;
        MemGetInfo = memory_info(device: Ordinal) -> MemoryInfo;
        DeviceCanAccessPeer = can_access_peer(device: Ordinal, peer: Ordinal) -> bool;
        MemGetAllocationGranularity = allocation_granularity(
            props: &PhysicalProps, kind: GranularityKind
        ) -> u64;
        MemAddressReserve = reserve(
            size: u64, alignment: u64, hint: DeviceAddress, flags: u64
        ) -> DeviceAddress;
        MemCreate = create(size: u64, props: &PhysicalProps, flags: u64) -> PhysicalHandle;
        MemRetainAllocationHandle = retain(address: DeviceAddress) -> PhysicalHandle;
        MemGetAccess = get_access(address: DeviceAddress, location: Location) -> AccessFlags;
        MemGetAddressRange = address_range(
            device: Ordinal, address: DeviceAddress
        ) -> (DeviceAddress, u64);
        PointerGetAttribute = pointer_attribute(
            device: Ordinal, address: DeviceAddress, attribute: PointerAttribute
        ) -> u64;
        IpcGetMemHandle = ipc_mem_handle(device: Ordinal, address: DeviceAddress) -> [u8; 64];
        StreamCreate = stream_create(device: Ordinal, flags: StreamFlags) -> StreamHandle;
        EventCreate = event_create(device: Ordinal, flags: EventFlags) -> EventHandle;
        ThreadExchangeStreamCaptureMode = exchange_capture_mode(mode: CaptureMode) -> CaptureMode;
        MemAlloc = alloc(device: Ordinal, size: u64) -> DeviceAddress;
        MemAllocManaged = managed_alloc(device: Ordinal, size: u64, flags: u32) -> DeviceAddress;
        MemRangeGetAttribute = range_attribute(
            device: Ordinal, address: DeviceAddress, size: u64, attribute: RangeAttribute
        ) -> i32;
        MemRangeGetAttribute = range_accessed_by(
            device: Ordinal, address: DeviceAddress, size: u64
        ) -> Vec<Location>;
        MemPoolCreate = mem_pool_create(
            device: Ordinal, props: &MemPoolProps
        ) -> MemPoolHandle;
        DeviceGetDefaultMemPool = default_mem_pool(device: Ordinal) -> MemPoolHandle;
        DeviceGetMemPool = current_mem_pool(device: Ordinal) -> MemPoolHandle;
        MemPoolExportPointer = mem_pool_export_pointer(
            device: Ordinal, address: DeviceAddress
        ) -> MemPoolTicket;
    }
    unsafe {
        MemAddressFree = free_reservation(address: DeviceAddress, size: u64) -> ();
        MemRelease = release(handle: PhysicalHandle) -> ();
        MemGetAllocationPropertiesFromHandle = physical_props(
            handle: PhysicalHandle
        ) -> PhysicalProps;
        MemExportToShareableHandle = export(
            handle: PhysicalHandle, handle_type: HandleTypes, flags: u64
        ) -> Exported;
        MemImportFromShareableHandle = import(
            source: ImportSource, handle_type: HandleTypes
        ) -> PhysicalHandle;
        MemMap = map(
            address: DeviceAddress, size: u64, offset: u64, handle: PhysicalHandle, flags: u64
        ) -> ();
        MemUnmap = unmap(address: DeviceAddress, size: u64) -> ();
        MemSetAccess = set_access(address: DeviceAddress, size: u64, access: &[AccessDesc]) -> ();
        MemGetHandleForAddressRange = dma_buf(
            device: Ordinal, address: DeviceAddress, size: u64
        ) -> OsHandle;
        StreamDestroy = stream_destroy(device: Ordinal, stream: StreamHandle) -> ();
        StreamQuery = stream_query(device: Ordinal, stream: StreamHandle) -> bool;
        StreamWaitEvent = stream_wait_event(
            device: Ordinal, stream: StreamHandle, event: EventHandle
        ) -> ();
        EventDestroy = event_destroy(device: Ordinal, event: EventHandle) -> ();
        EventRecord = event_record(device: Ordinal, event: EventHandle, stream: StreamHandle) -> ();
        CtxRecordEvent = context_record_event(device: Ordinal, event: EventHandle) -> ();
        EventQuery = event_query(device: Ordinal, event: EventHandle) -> bool;
        StreamIsCapturing = capture_status(device: Ordinal, stream: StreamHandle) -> CaptureStatus;
        StreamBeginCapture = capture_begin(
            device: Ordinal, stream: StreamHandle, mode: CaptureMode
        ) -> ();
        StreamEndCapture = capture_end(device: Ordinal, stream: StreamHandle) -> GraphHandle;
        GraphInstantiate = graph_instantiate(
            device: Ordinal, graph: GraphHandle
        ) -> GraphExecHandle;
        GraphLaunch = graph_launch(
            device: Ordinal, graph: GraphExecHandle, stream: StreamHandle
        ) -> ();
        GraphDestroy = graph_destroy(device: Ordinal, graph: GraphHandle) -> ();
        GraphExecDestroy = graph_exec_destroy(device: Ordinal, graph: GraphExecHandle) -> ();
        MemAllocAsync = alloc_async(
            device: Ordinal, size: u64, stream: StreamHandle
        ) -> DeviceAddress;
        MemFreeAsync = free_async(
            device: Ordinal, address: DeviceAddress, stream: StreamHandle
        ) -> ();
        MemPoolDestroy = mem_pool_destroy(device: Ordinal, pool: MemPoolHandle) -> ();
        MemPoolGetAttribute = mem_pool_attribute(
            device: Ordinal, pool: MemPoolHandle, attribute: MemPoolAttribute
        ) -> u64;
        MemPoolSetAttribute = mem_pool_set_attribute(
            device: Ordinal, pool: MemPoolHandle, attribute: MemPoolAttribute, value: u64
        ) -> ();
        MemPoolTrimTo = mem_pool_trim(device: Ordinal, pool: MemPoolHandle, keep: u64) -> ();
        MemPoolGetAccess = mem_pool_access(
            device: Ordinal, pool: MemPoolHandle, location: Location
        ) -> AccessFlags;
        MemPoolSetAccess = mem_pool_set_access(
            device: Ordinal, pool: MemPoolHandle, access: &[AccessDesc]
        ) -> ();
        DeviceSetMemPool = set_current_mem_pool(device: Ordinal, pool: MemPoolHandle) -> ();
        MemAllocFromPoolAsync = alloc_from_pool_async(
            device: Ordinal, size: u64, pool: MemPoolHandle, stream: StreamHandle
        ) -> DeviceAddress;
        MemPoolExportToShareableHandle = mem_pool_export(
            device: Ordinal, pool: MemPoolHandle, handle_type: HandleTypes, flags: u64
        ) -> Exported;
        MemPoolImportFromShareableHandle = mem_pool_import(
            device: Ordinal, source: ImportSource, handle_type: HandleTypes, flags: u64
        ) -> MemPoolHandle;
        MemPoolImportPointer = mem_pool_import_pointer(
            device: Ordinal, pool: MemPoolHandle, ticket: &MemPoolTicket
        ) -> DeviceAddress;
    }

    fn kind(&self) -> DriverKind {
        B::KIND
    }

    fn device_memory(&self) -> DeviceMemory {
        B::MEMORY
    }

    fn version(&self) -> Result<CudaVersion> {
        self.ask(Call::DriverGetVersion, |_| Ok(self.version))
    }

    fn device_count(&self) -> Result<i32> {
        self.ask(Call::DeviceGetCount, |state| Ok(state.rules.devices))
    }

    unsafe fn copy_to_device(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        source: &[u8],
    ) -> Result<()> {
        let (address, size) = (source.as_ptr().expose_provenance(), source.len() as u64);
        let question = |state: &mut State<B>| {
            state.context(device)?;
            state.refuse_in_capture(None)?;
            let (source, stream) = (Source::At(address), StreamHandle::NULL);
            let marks = state.copy_to_device(device, destination, source, size, stream)?;
            Ok(marks.into_iter().collect())
        };
        self.ask_and_wait(Call::MemcpyHtoD, device, question, |state| {
            state.wait_for(device, StreamHandle::NULL)
        })
    }

    unsafe fn copy_to_host(
        &self,
        device: Ordinal,
        destination: &mut [u8],
        source: DeviceAddress,
    ) -> Result<()> {
        let (target, size) = (destination.as_mut_ptr(), destination.len() as u64);
        let question = |state: &mut State<B>| {
            state.context(device)?;
            state.refuse_in_capture(None)?;
            let marks = state.copy_to_host(device, target, source, size, StreamHandle::NULL)?;
            Ok(marks.into_iter().collect())
        };
        self.ask_and_wait(Call::MemcpyDtoH, device, question, |state| {
            state.wait_for(device, StreamHandle::NULL)
        })
    }

    unsafe fn copy_on_device(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        source: DeviceAddress,
        size: u64,
    ) -> Result<()> {
        let stream = StreamHandle::NULL;
        self.ask(Call::MemcpyDtoD, |state| {
            state.copy_on_device(device, destination, source, size, stream)
        })
    }

    unsafe fn copy_to_device_async(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        source: *const u8,
        size: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        let source = Source::At(source.expose_provenance());
        self.ask(Call::MemcpyHtoDAsync, |state| {
            state
                .copy_to_device(device, destination, source, size, stream)
                .map(drop)
        })
    }

    unsafe fn copy_to_host_async(
        &self,
        device: Ordinal,
        destination: *mut u8,
        source: DeviceAddress,
        size: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        self.ask(Call::MemcpyDtoHAsync, |state| {
            state
                .copy_to_host(device, destination, source, size, stream)
                .map(drop)
        })
    }

    unsafe fn copy_on_device_async(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        source: DeviceAddress,
        size: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        self.ask(Call::MemcpyDtoDAsync, |state| {
            state.copy_on_device(device, destination, source, size, stream)
        })
    }

    unsafe fn fill(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        byte: u8,
        size: u64,
    ) -> Result<()> {
        self.ask(Call::MemsetD8, |state| {
            state.fill(device, destination, byte, size, StreamHandle::NULL)
        })
    }

    unsafe fn fill_async(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        byte: u8,
        size: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        self.ask(Call::MemsetD8Async, |state| {
            state.fill(device, destination, byte, size, stream)
        })
    }

    unsafe fn stream_synchronize(&self, device: Ordinal, stream: StreamHandle) -> Result<()> {
        let question = |state: &mut State<B>| {
            state.context(device)?;
            let key = state.stream(device, stream)?;
            state.refuse_in_capture(Some(key))?;
            Ok(state.streams.covered_by(key))
        };
        self.ask_and_wait(Call::StreamSynchronize, device, question, |state| {
            state.wait_for(device, stream)?;
            state.synchronized(device)
        })
    }

    unsafe fn event_synchronize(&self, device: Ordinal, event: EventHandle) -> Result<()> {
        let question = |state: &mut State<B>| state.event_marks(device, event);
        self.ask_and_wait(Call::EventSynchronize, device, question, |state| {
            state.wait_for_event(event)?;
            state.synchronized(device)
        })
    }

    fn context_synchronize(&self, device: Ordinal) -> Result<()> {
        let question = |state: &mut State<B>| {
            state.context(device)?;
            state.refuse_while_capturing(device.0)?;
            state.refuse_in_capture(None)?;
            Ok(state.streams.unfinished(device.0, false))
        };
        self.ask_and_wait(Call::CtxSynchronize, device, question, |state| {
            state.wait_for_all(device)?;
            state.synchronized(device)
        })
    }

    unsafe fn free(&self, device: Ordinal, address: DeviceAddress) -> Result<()> {
        let question = |state: &mut State<B>| {
            state.check_free(device, address)?;
            Ok(state.streams.unfinished(device.0, false))
        };
        self.ask_and_wait(Call::MemFree, device, question, |state| {
            state.wait_for_all(device)?;
            state.free(device, address)
        })
    }

    fn host_alloc(&self, device: Ordinal, size: u64, flags: u32) -> Result<*mut u8> {
        let address = self.ask(Call::MemHostAlloc, |state| {
            state.host_alloc(device, size, flags)
        })?;
        Ok(ptr::with_exposed_provenance_mut(address as usize))
    }

    unsafe fn prefetch(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        location: Location,
        stream: StreamHandle,
    ) -> Result<()> {
        self.present_for(Call::MemPrefetchAsync, location, "cuMemPrefetchAsync_v2")?;
        self.ask(Call::MemPrefetchAsync, |state| {
            state.prefetch(device, address, size, location, stream)
        })
    }

    fn advise(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        advice: Advice,
        location: Location,
    ) -> Result<()> {
        self.present_for(Call::MemAdvise, location, "cuMemAdvise_v2")?;
        self.ask(Call::MemAdvise, |state| {
            state.advise(device, address, size, advice, location)
        })
    }

    unsafe fn host_free(&self, device: Ordinal, pointer: *mut u8) -> Result<()> {
        let address = pointer.expose_provenance() as u64;
        self.ask(Call::MemFreeHost, |state| state.host_free(device, address))
    }

    unsafe fn host_register(
        &self,
        device: Ordinal,
        pointer: *mut u8,
        size: u64,
        flags: u32,
    ) -> Result<()> {
        let address = pointer.expose_provenance() as u64;
        self.ask(Call::MemHostRegister, |state| {
            state.host_register(device, address, size, flags)
        })
    }

    unsafe fn host_unregister(&self, device: Ordinal, pointer: *mut u8) -> Result<()> {
        let address = pointer.expose_provenance() as u64;
        self.ask(Call::MemHostUnregister, |state| {
            state.host_unregister(device, address)
        })
    }
}
