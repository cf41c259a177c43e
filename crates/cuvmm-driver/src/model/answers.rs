//! The trait, answered: each method puts its call's name on what the rules say.
//!
//! `unsafe` is here because the trait's methods are; nothing in this file relies on what their
//! callers promise but the copies, which pass host pointers on to [`work`](super::work).
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;
use std::ptr;

use super::backing::Backing;
use super::machine::Machine;
use super::state::State;
use crate::error::Result;
use crate::{
    AccessDesc, AccessFlags, Advice, Call, CaptureMode, CaptureStatus, CudaVersion, DeviceAddress,
    DeviceAttribute, Driver, DriverKind, EventFlags, EventHandle, Exported, GranularityKind,
    GraphExecHandle, GraphHandle, HandleTypes, ImportSource, Location, MemoryInfo, Ordinal,
    PhysicalHandle, PhysicalProps, PointerAttribute, RangeAttribute, StreamFlags, StreamHandle,
};

impl<B: Backing> Driver for Machine<B> {
    fn kind(&self) -> DriverKind {
        B::KIND
    }

    fn version(&self) -> Result<CudaVersion> {
        self.ask(Call::DriverGetVersion, |_| Ok(self.version))
    }

    fn device_count(&self) -> Result<i32> {
        self.ask(Call::DeviceGetCount, |state| Ok(state.rules.devices))
    }

    fn device_name(&self, device: Ordinal) -> Result<String> {
        self.ask(Call::DeviceGetName, |state| state.device_name(device))
    }

    fn device_uuid(&self, device: Ordinal) -> Result<[u8; 16]> {
        self.ask(Call::DeviceGetUuid, |state| state.device_uuid(device))
    }

    fn device_attribute(&self, device: Ordinal, attribute: DeviceAttribute) -> Result<i32> {
        self.ask(Call::DeviceGetAttribute, |state| {
            state.device_attribute(device, attribute)
        })
    }

    fn total_memory(&self, device: Ordinal) -> Result<u64> {
        self.ask(Call::DeviceTotalMem, |state| state.total_memory(device))
    }

    fn memory_info(&self, device: Ordinal) -> Result<MemoryInfo> {
        self.ask(Call::MemGetInfo, |state| state.memory_info(device))
    }

    fn can_access_peer(&self, device: Ordinal, peer: Ordinal) -> Result<bool> {
        self.ask(Call::DeviceCanAccessPeer, |state| {
            state.can_access_peer(device, peer)
        })
    }

    fn allocation_granularity(&self, props: &PhysicalProps, kind: GranularityKind) -> Result<u64> {
        self.ask(Call::MemGetAllocationGranularity, |state| {
            state.allocation_granularity(props, kind)
        })
    }

    fn reserve(
        &self,
        size: u64,
        alignment: u64,
        hint: DeviceAddress,
        flags: u64,
    ) -> Result<DeviceAddress> {
        self.ask(Call::MemAddressReserve, |state| {
            state.reserve(size, alignment, hint, flags)
        })
    }

    unsafe fn free_reservation(&self, address: DeviceAddress, size: u64) -> Result<()> {
        self.ask(Call::MemAddressFree, |state| {
            state.free_reservation(address, size)
        })
    }

    fn create(&self, size: u64, props: &PhysicalProps, flags: u64) -> Result<PhysicalHandle> {
        self.ask(Call::MemCreate, |state| state.create(size, props, flags))
    }

    unsafe fn release(&self, handle: PhysicalHandle) -> Result<()> {
        self.ask(Call::MemRelease, |state| state.release(handle))
    }

    fn retain(&self, address: DeviceAddress) -> Result<PhysicalHandle> {
        self.ask(Call::MemRetainAllocationHandle, |state| {
            state.retain(address)
        })
    }

    unsafe fn physical_props(&self, handle: PhysicalHandle) -> Result<PhysicalProps> {
        self.ask(Call::MemGetAllocationPropertiesFromHandle, |state| {
            state.physical_props(handle)
        })
    }

    unsafe fn export(
        &self,
        handle: PhysicalHandle,
        handle_type: HandleTypes,
        flags: u64,
    ) -> Result<Exported> {
        self.ask(Call::MemExportToShareableHandle, |state| {
            state.export(handle, handle_type, flags)
        })
    }

    unsafe fn import(
        &self,
        source: ImportSource,
        handle_type: HandleTypes,
    ) -> Result<PhysicalHandle> {
        self.ask(Call::MemImportFromShareableHandle, |state| {
            state.import(source, handle_type)
        })
    }

    unsafe fn map(
        &self,
        address: DeviceAddress,
        size: u64,
        offset: u64,
        handle: PhysicalHandle,
        flags: u64,
    ) -> Result<()> {
        self.ask(Call::MemMap, |state| {
            state.map(address, size, offset, handle, flags)
        })
    }

    unsafe fn unmap(&self, address: DeviceAddress, size: u64) -> Result<()> {
        self.ask(Call::MemUnmap, |state| state.unmap(address, size))
    }

    unsafe fn set_access(
        &self,
        address: DeviceAddress,
        size: u64,
        access: &[AccessDesc],
    ) -> Result<()> {
        self.ask(Call::MemSetAccess, |state| {
            state.set_access(address, size, access)
        })
    }

    fn get_access(&self, address: DeviceAddress, location: Location) -> Result<AccessFlags> {
        self.ask(Call::MemGetAccess, |state| {
            state.get_access(address, location)
        })
    }

    fn address_range(
        &self,
        device: Ordinal,
        address: DeviceAddress,
    ) -> Result<(DeviceAddress, u64)> {
        self.ask(Call::MemGetAddressRange, |state| {
            state.address_range(device, address)
        })
    }

    fn pointer_attribute(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        attribute: PointerAttribute,
    ) -> Result<u64> {
        self.ask(Call::PointerGetAttribute, |state| {
            state.pointer_attribute(device, address, attribute)
        })
    }

    unsafe fn dma_buf(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
    ) -> Result<OwnedFd> {
        self.ask(Call::MemGetHandleForAddressRange, |state| {
            state.dma_buf(device, address, size)
        })
    }

    fn ipc_mem_handle(&self, device: Ordinal, address: DeviceAddress) -> Result<[u8; 64]> {
        self.ask(Call::IpcGetMemHandle, |state| {
            state.ipc_mem_handle(device, address)
        })
    }

    unsafe fn copy_to_device(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        source: &[u8],
    ) -> Result<()> {
        let (source, size) = (source.as_ptr(), source.len() as u64);
        let question = |state: &mut State<B>| {
            state.context(device)?;
            state.refuse_in_capture(None)?;
            let marks =
                state.copy_to_device(device, destination, source, size, StreamHandle::NULL)?;
            state.clock.spend(state.rules.costs.host_copy.at(size));
            Ok(marks.into_iter().collect())
        };
        self.ask_and_wait(Call::MemcpyHtoD, device, question, |_| Ok(()))
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
            state.clock.spend(state.rules.costs.host_copy.at(size));
            Ok(marks.into_iter().collect())
        };
        self.ask_and_wait(Call::MemcpyDtoH, device, question, |_| Ok(()))
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

    fn stream_create(&self, device: Ordinal, flags: StreamFlags) -> Result<StreamHandle> {
        self.ask(Call::StreamCreate, |state| {
            state.stream_create(device, flags)
        })
    }

    unsafe fn stream_destroy(&self, device: Ordinal, stream: StreamHandle) -> Result<()> {
        self.ask(Call::StreamDestroy, |state| {
            state.stream_destroy(device, stream)
        })
    }

    unsafe fn stream_synchronize(&self, device: Ordinal, stream: StreamHandle) -> Result<()> {
        let question = |state: &mut State<B>| {
            state.context(device)?;
            let key = state.stream(device, stream)?;
            state.refuse_in_capture(Some(key))?;
            Ok(state.streams.covered_by(key))
        };
        self.ask_and_wait(Call::StreamSynchronize, device, question, |_| Ok(()))
    }

    unsafe fn stream_query(&self, device: Ordinal, stream: StreamHandle) -> Result<bool> {
        self.ask(Call::StreamQuery, |state| {
            state.stream_query(device, stream)
        })
    }

    unsafe fn stream_wait_event(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<()> {
        self.ask(Call::StreamWaitEvent, |state| {
            state.stream_wait_event(device, stream, event)
        })
    }

    fn event_create(&self, device: Ordinal, flags: EventFlags) -> Result<EventHandle> {
        self.ask(Call::EventCreate, |state| state.event_create(device, flags))
    }

    unsafe fn event_destroy(&self, device: Ordinal, event: EventHandle) -> Result<()> {
        self.ask(Call::EventDestroy, |state| {
            state.event_destroy(device, event)
        })
    }

    unsafe fn event_record(
        &self,
        device: Ordinal,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<()> {
        self.ask(Call::EventRecord, |state| {
            state.event_record(device, event, stream)
        })
    }

    unsafe fn context_record_event(&self, device: Ordinal, event: EventHandle) -> Result<()> {
        self.ask(Call::CtxRecordEvent, |state| {
            state.context_record_event(device, event)
        })
    }

    unsafe fn event_query(&self, device: Ordinal, event: EventHandle) -> Result<bool> {
        self.ask(Call::EventQuery, |state| state.event_query(device, event))
    }

    unsafe fn event_synchronize(&self, device: Ordinal, event: EventHandle) -> Result<()> {
        let question = |state: &mut State<B>| state.event_marks(device, event);
        self.ask_and_wait(Call::EventSynchronize, device, question, |_| Ok(()))
    }

    fn context_synchronize(&self, device: Ordinal) -> Result<()> {
        let question = |state: &mut State<B>| {
            state.context(device)?;
            state.refuse_while_capturing(device.0)?;
            state.refuse_in_capture(None)?;
            Ok(state.streams.unfinished(device.0, false))
        };
        self.ask_and_wait(Call::CtxSynchronize, device, question, |_| Ok(()))
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        self.ask(Call::ThreadExchangeStreamCaptureMode, |state| {
            state.exchange_capture_mode(mode)
        })
    }

    unsafe fn capture_status(
        &self,
        device: Ordinal,
        stream: StreamHandle,
    ) -> Result<CaptureStatus> {
        self.ask(Call::StreamIsCapturing, |state| {
            state.capture_status(device, stream)
        })
    }

    unsafe fn capture_begin(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        mode: CaptureMode,
    ) -> Result<()> {
        self.ask(Call::StreamBeginCapture, |state| {
            state.capture_begin(device, stream, mode)
        })
    }

    unsafe fn capture_end(&self, device: Ordinal, stream: StreamHandle) -> Result<GraphHandle> {
        self.ask(Call::StreamEndCapture, |state| {
            state.capture_end(device, stream)
        })
    }

    unsafe fn graph_instantiate(
        &self,
        device: Ordinal,
        graph: GraphHandle,
    ) -> Result<GraphExecHandle> {
        self.ask(Call::GraphInstantiate, |state| {
            state.graph_instantiate(device, graph)
        })
    }

    unsafe fn graph_launch(
        &self,
        device: Ordinal,
        graph: GraphExecHandle,
        stream: StreamHandle,
    ) -> Result<()> {
        self.ask(Call::GraphLaunch, |state| {
            state.graph_launch(device, graph, stream)
        })
    }

    unsafe fn graph_destroy(&self, device: Ordinal, graph: GraphHandle) -> Result<()> {
        self.ask(Call::GraphDestroy, |state| {
            state.graph_destroy(device, graph)
        })
    }

    unsafe fn graph_exec_destroy(&self, device: Ordinal, graph: GraphExecHandle) -> Result<()> {
        self.ask(Call::GraphExecDestroy, |state| {
            state.graph_exec_destroy(device, graph)
        })
    }

    fn alloc(&self, device: Ordinal, size: u64) -> Result<DeviceAddress> {
        self.ask(Call::MemAlloc, |state| state.alloc(device, size))
    }

    unsafe fn free(&self, device: Ordinal, address: DeviceAddress) -> Result<()> {
        let question = |state: &mut State<B>| {
            state.check_free(device, address)?;
            Ok(state.streams.unfinished(device.0, false))
        };
        self.ask_and_wait(Call::MemFree, device, question, |state| state.free(address))
    }

    unsafe fn alloc_async(
        &self,
        device: Ordinal,
        size: u64,
        stream: StreamHandle,
    ) -> Result<DeviceAddress> {
        self.ask(Call::MemAllocAsync, |state| {
            state.alloc_async(device, size, stream)
        })
    }

    unsafe fn free_async(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<()> {
        self.ask(Call::MemFreeAsync, |state| {
            state.free_async(device, address, stream)
        })
    }

    fn host_alloc(&self, device: Ordinal, size: u64, flags: u32) -> Result<*mut u8> {
        let address = self.ask(Call::MemHostAlloc, |state| {
            state.host_alloc(device, size, flags)
        })?;
        Ok(ptr::with_exposed_provenance_mut(address as usize))
    }

    unsafe fn host_free(&self, device: Ordinal, pointer: *mut u8) -> Result<()> {
        let address = pointer.expose_provenance() as u64;
        self.ask(Call::MemFreeHost, |state| state.host_free(device, address))
    }

    fn managed_alloc(&self, device: Ordinal, size: u64, flags: u32) -> Result<DeviceAddress> {
        self.ask(Call::MemAllocManaged, |state| {
            state.managed_alloc(device, size, flags)
        })
    }

    unsafe fn prefetch(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        location: Location,
        stream: StreamHandle,
    ) -> Result<()> {
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
        self.ask(Call::MemAdvise, |state| {
            state.advise(device, address, size, advice, location)
        })
    }

    fn range_attribute(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        attribute: RangeAttribute,
    ) -> Result<i32> {
        self.ask(Call::MemRangeGetAttribute, |state| {
            state.range_attribute(device, address, size, attribute)
        })
    }
}
