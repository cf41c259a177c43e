//! The contract between the library and whoever answers for the driver.
//!
//! # Who validates
//! The caller does. A `Driver` passes on what it is given: it rounds nothing, retries nothing and
//! adds no check of its own. What the real driver refuses is refused with the same code by every
//! backend; what it lets through (unmapping over a hole, mapping past the end of a reservation)
//! is let through by every backend in its usual manner.
//!
//! # Safety
//! Calls that take an address or a handle are `unsafe` where a wrong one can end the process or
//! pull memory away from somebody: the real driver dies when a released handle is mapped, and
//! unmaps memory that a kernel is using. The common obligation, unless a method says otherwise:
//! *every handle passed in was handed out by this same driver and has not been given back since,
//! and no device work that is running or queued uses memory that the call takes away.* Model and
//! host answer such misuse with an error, but code written against the trait may not count on it.
//!
//! # Threads and order
//! Every method may be called from any thread at any time. Calls of one thread take effect in
//! their order. The virtual-memory calls need no current context and wait for no device work.
//! Methods that take a device make its context current for the call and leave the thread's
//! current context as they found it.
//!
//! # Ownership
//! Handles are plain numbers: whoever gets one gives it back, once, to the driver it came from.
//! A driver that is dropped takes nothing with it but its own context references; it is an error
//! of the caller to have live handles then.
//!
//! # Failure
//! A call that fails has changed nothing, as measured on the real driver.
//!
//! `unsafe` here: the declarations only, for the reasons above.
#![allow(unsafe_code)]

use std::fmt::Debug;
use std::os::fd::OwnedFd;

use cuvmm_sys::CudaVersion;

use crate::error::Result;
use crate::types::{
    AccessDesc, AccessFlags, Advice, CaptureMode, CaptureStatus, DeviceAddress, DeviceAttribute,
    EventFlags, EventHandle, Exported, GranularityKind, GraphExecHandle, GraphHandle, HandleTypes,
    ImportSource, Location, MemoryInfo, Ordinal, PhysicalHandle, PhysicalProps, PointerAttribute,
    RangeAttribute, StreamFlags, StreamHandle,
};

/// Which backend answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DriverKind {
    /// The real driver, `libcuda`.
    Cuda,
    /// The rules of the driver over real host memory.
    Host,
    /// The rules of the driver without memory.
    Model,
}

impl DriverKind {
    /// The word used on the command line and in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Host => "host",
            Self::Model => "model",
        }
    }
}

/// What lies behind the addresses of a driver's device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceMemory {
    /// Memory of a device, which its work reaches and the host's processors do not.
    Device,
    /// Memory of this process, which the processors reach where access was granted to a device.
    Host,
    /// None: what is written is lost.
    Nothing,
}

/// The driver's memory calls. See the [module](self) for the contract.
///
/// Sizes are in bytes throughout.
pub trait Driver: Debug + Send + Sync {
    // --- who answers ---------------------------------------------------------------------

    /// Which backend answers in the end; a wrapper says what it wraps.
    fn kind(&self) -> DriverKind;

    /// What lies behind the addresses of device memory; a wrapper says so of what it wraps.
    fn device_memory(&self) -> DeviceMemory;

    /// The CUDA version that the driver implements.
    #[doc(alias = "cuDriverGetVersion")]
    fn version(&self) -> Result<CudaVersion>;

    /// How many devices there are.
    #[doc(alias = "cuDeviceGetCount")]
    fn device_count(&self) -> Result<i32>;

    /// The product name of a device.
    #[doc(alias = "cuDeviceGetName")]
    fn device_name(&self, device: Ordinal) -> Result<String>;

    /// The device's identity, the same in every process.
    #[doc(alias = "cuDeviceGetUuid_v2")]
    fn device_uuid(&self, device: Ordinal) -> Result<[u8; 16]>;

    /// One attribute of a device.
    #[doc(alias = "cuDeviceGetAttribute")]
    fn device_attribute(&self, device: Ordinal, attribute: DeviceAttribute) -> Result<i32>;

    /// All memory of a device. Needs no context.
    #[doc(alias = "cuDeviceTotalMem")]
    fn total_memory(&self, device: Ordinal) -> Result<u64>;

    /// Free and total memory of a device.
    #[doc(alias = "cuMemGetInfo")]
    fn memory_info(&self, device: Ordinal) -> Result<MemoryInfo>;

    /// Whether `device` can reach the memory of `peer`.
    #[doc(alias = "cuDeviceCanAccessPeer")]
    fn can_access_peer(&self, device: Ordinal, peer: Ordinal) -> Result<bool>;

    /// What sizes and addresses of such physicals must be multiples of.
    #[doc(alias = "cuMemGetAllocationGranularity")]
    fn allocation_granularity(&self, props: &PhysicalProps, kind: GranularityKind) -> Result<u64>;

    // --- addresses -----------------------------------------------------------------------

    /// Reserves a range of addresses. `alignment` 0 means the granularity; `hint` may be ignored.
    #[doc(alias = "cuMemAddressReserve")]
    fn reserve(
        &self,
        size: u64,
        alignment: u64,
        hint: DeviceAddress,
        flags: u64,
    ) -> Result<DeviceAddress>;

    /// Gives a whole reservation back.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuMemAddressFree")]
    unsafe fn free_reservation(&self, address: DeviceAddress, size: u64) -> Result<()>;

    // --- physical memory -----------------------------------------------------------------

    /// Creates one physical allocation; it reads as zero.
    #[doc(alias = "cuMemCreate")]
    fn create(&self, size: u64, props: &PhysicalProps, flags: u64) -> Result<PhysicalHandle>;

    /// Gives one reference to a physical back. The memory lives until its last mapping, reference
    /// and exported descriptor have gone.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuMemRelease")]
    unsafe fn release(&self, handle: PhysicalHandle) -> Result<()>;

    /// The handle of the physical mapped at an address, counted once more.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    fn retain(&self, address: DeviceAddress) -> Result<PhysicalHandle>;

    /// What a physical was made with.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
    unsafe fn physical_props(&self, handle: PhysicalHandle) -> Result<PhysicalProps>;

    /// A handle of the given type that another process can import.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuMemExportToShareableHandle")]
    unsafe fn export(
        &self,
        handle: PhysicalHandle,
        handle_type: HandleTypes,
        flags: u64,
    ) -> Result<Exported>;

    /// A physical that another process, or this one, exported.
    ///
    /// # Safety
    /// A descriptor in `source` is open and stays open for the call, or is no descriptor at all
    /// (which is an error).
    #[doc(alias = "cuMemImportFromShareableHandle")]
    unsafe fn import(
        &self,
        source: ImportSource,
        handle_type: HandleTypes,
    ) -> Result<PhysicalHandle>;

    // --- mappings ------------------------------------------------------------------------

    /// Places a whole physical at an address. Nothing has access yet.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuMemMap")]
    unsafe fn map(
        &self,
        address: DeviceAddress,
        size: u64,
        offset: u64,
        handle: PhysicalHandle,
        flags: u64,
    ) -> Result<()>;

    /// Takes away every mapping that lies whole in the range.
    ///
    /// # Safety
    /// No device work that is running or queued uses the range, and no reference into it lives.
    #[doc(alias = "cuMemUnmap")]
    unsafe fn unmap(&self, address: DeviceAddress, size: u64) -> Result<()>;

    /// Sets the rights of the given locations on the mappings in the range.
    ///
    /// # Safety
    /// No device work that is running or queued uses the range with a right that goes away.
    #[doc(alias = "cuMemSetAccess")]
    unsafe fn set_access(
        &self,
        address: DeviceAddress,
        size: u64,
        access: &[AccessDesc],
    ) -> Result<()>;

    /// The right that a location has at an address.
    #[doc(alias = "cuMemGetAccess")]
    fn get_access(&self, address: DeviceAddress, location: Location) -> Result<AccessFlags>;

    /// First address and size of the mapping or allocation that an address lies in.
    /// `NOT_FOUND` where there is none, or a mapping that was not opened to the device.
    #[doc(alias = "cuMemGetAddressRange")]
    fn address_range(
        &self,
        device: Ordinal,
        address: DeviceAddress,
    ) -> Result<(DeviceAddress, u64)>;

    /// One attribute of what lies at an address.
    #[doc(alias = "cuPointerGetAttribute")]
    fn pointer_attribute(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        attribute: PointerAttribute,
    ) -> Result<u64>;

    /// A dma-buf over a mapped range.
    ///
    /// # Safety
    /// The range stays mapped for as long as the descriptor is used.
    #[doc(alias = "cuMemGetHandleForAddressRange")]
    unsafe fn dma_buf(&self, device: Ordinal, address: DeviceAddress, size: u64)
    -> Result<OwnedFd>;

    /// The legacy handle for sharing; mappings have none.
    #[doc(alias = "cuIpcGetMemHandle")]
    fn ipc_mem_handle(&self, device: Ordinal, address: DeviceAddress) -> Result<[u8; 64]>;

    // --- copies and fills ----------------------------------------------------------------

    /// Copies from the host and returns when that is done.
    ///
    /// # Safety
    /// Nobody else writes or reads the destination during the call.
    #[doc(alias = "cuMemcpyHtoD")]
    unsafe fn copy_to_device(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        source: &[u8],
    ) -> Result<()>;

    /// Copies to the host and returns when that is done.
    ///
    /// # Safety
    /// Nobody writes the source during the call.
    #[doc(alias = "cuMemcpyDtoH")]
    unsafe fn copy_to_host(
        &self,
        device: Ordinal,
        destination: &mut [u8],
        source: DeviceAddress,
    ) -> Result<()>;

    /// Copies between two places that `device` reaches. It is queued on the default stream and
    /// may return before it is done.
    ///
    /// # Safety
    /// Both ranges stay mapped until it is done, and nobody else uses the destination.
    #[doc(alias = "cuMemcpyDtoD")]
    unsafe fn copy_on_device(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        source: DeviceAddress,
        size: u64,
    ) -> Result<()>;

    /// Queues a copy from the host.
    ///
    /// # Safety
    /// `source` is readable for `size` bytes and not written, and the destination stays mapped,
    /// until the copy is done.
    #[doc(alias = "cuMemcpyHtoDAsync")]
    unsafe fn copy_to_device_async(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        source: *const u8,
        size: u64,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Queues a copy to the host.
    ///
    /// # Safety
    /// `destination` is writable for `size` bytes and used by nobody else, and the source stays
    /// mapped, until the copy is done.
    #[doc(alias = "cuMemcpyDtoHAsync")]
    unsafe fn copy_to_host_async(
        &self,
        device: Ordinal,
        destination: *mut u8,
        source: DeviceAddress,
        size: u64,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Queues a copy between two places that `device` reaches.
    ///
    /// # Safety
    /// Both ranges stay mapped until it is done, and nobody else uses the destination.
    #[doc(alias = "cuMemcpyDtoDAsync")]
    unsafe fn copy_on_device_async(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        source: DeviceAddress,
        size: u64,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Fills with one byte. It is queued on the default stream and may return before it is done.
    ///
    /// # Safety
    /// The range stays mapped until it is done, and nobody else uses it.
    #[doc(alias = "cuMemsetD8")]
    unsafe fn fill(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        byte: u8,
        size: u64,
    ) -> Result<()>;

    /// Queues a fill with one byte.
    ///
    /// # Safety
    /// The range stays mapped until it is done, and nobody else uses it.
    #[doc(alias = "cuMemsetD8Async")]
    unsafe fn fill_async(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        byte: u8,
        size: u64,
        stream: StreamHandle,
    ) -> Result<()>;

    // --- streams and events --------------------------------------------------------------

    /// Makes a stream.
    #[doc(alias = "cuStreamCreate")]
    fn stream_create(&self, device: Ordinal, flags: StreamFlags) -> Result<StreamHandle>;

    /// Destroys a stream; its work still runs to its end.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuStreamDestroy")]
    unsafe fn stream_destroy(&self, device: Ordinal, stream: StreamHandle) -> Result<()>;

    /// Waits until all work of the stream is done.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuStreamSynchronize")]
    unsafe fn stream_synchronize(&self, device: Ordinal, stream: StreamHandle) -> Result<()>;

    /// Whether all work of the stream is done.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuStreamQuery")]
    unsafe fn stream_query(&self, device: Ordinal, stream: StreamHandle) -> Result<bool>;

    /// Later work of the stream waits for what the event's last record covers.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuStreamWaitEvent")]
    unsafe fn stream_wait_event(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<()>;

    /// Makes an event; until recorded it counts as done.
    #[doc(alias = "cuEventCreate")]
    fn event_create(&self, device: Ordinal, flags: EventFlags) -> Result<EventHandle>;

    /// Destroys an event.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuEventDestroy")]
    unsafe fn event_destroy(&self, device: Ordinal, event: EventHandle) -> Result<()>;

    /// The event now covers all work queued on the stream so far.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuEventRecord")]
    unsafe fn event_record(
        &self,
        device: Ordinal,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<()>;

    /// The event now covers all work queued on all streams of the device's context so far.
    /// Refused while a stream of the context captures, and breaks that capture. CUDA 12.5.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuCtxRecordEvent")]
    unsafe fn context_record_event(&self, device: Ordinal, event: EventHandle) -> Result<()>;

    /// Whether what the event covers is done.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuEventQuery")]
    unsafe fn event_query(&self, device: Ordinal, event: EventHandle) -> Result<bool>;

    /// Waits until what the event covers is done.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuEventSynchronize")]
    unsafe fn event_synchronize(&self, device: Ordinal, event: EventHandle) -> Result<()>;

    /// Waits until all work of the device's context is done.
    #[doc(alias = "cuCtxSynchronize")]
    fn context_synchronize(&self, device: Ordinal) -> Result<()>;

    // --- capture -------------------------------------------------------------------------

    /// Sets this thread's capture mode and returns what it was. Needs no context.
    #[doc(alias = "cuThreadExchangeStreamCaptureMode")]
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode>;

    /// Whether the stream records instead of running.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuStreamIsCapturing")]
    unsafe fn capture_status(&self, device: Ordinal, stream: StreamHandle)
    -> Result<CaptureStatus>;

    /// From here on the stream records its work into a graph.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuStreamBeginCapture")]
    unsafe fn capture_begin(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        mode: CaptureMode,
    ) -> Result<()>;

    /// Ends a capture and returns the graph.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuStreamEndCapture")]
    unsafe fn capture_end(&self, device: Ordinal, stream: StreamHandle) -> Result<GraphHandle>;

    /// Makes a graph ready to launch.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuGraphInstantiateWithFlags")]
    unsafe fn graph_instantiate(
        &self,
        device: Ordinal,
        graph: GraphHandle,
    ) -> Result<GraphExecHandle>;

    /// Queues a graph's work on a stream.
    ///
    /// # Safety
    /// The common obligation of the [module](self), for all memory that the graph names.
    #[doc(alias = "cuGraphLaunch")]
    unsafe fn graph_launch(
        &self,
        device: Ordinal,
        graph: GraphExecHandle,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Destroys a graph; what was instantiated from it stays.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuGraphDestroy")]
    unsafe fn graph_destroy(&self, device: Ordinal, graph: GraphHandle) -> Result<()>;

    /// Destroys an instantiated graph.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuGraphExecDestroy")]
    unsafe fn graph_exec_destroy(&self, device: Ordinal, graph: GraphExecHandle) -> Result<()>;

    // --- memory that is not ours to map --------------------------------------------------

    /// Plain device memory.
    #[doc(alias = "cuMemAlloc")]
    fn alloc(&self, device: Ordinal, size: u64) -> Result<DeviceAddress>;

    /// Gives plain or managed memory back; waits for the device.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuMemFree")]
    unsafe fn free(&self, device: Ordinal, address: DeviceAddress) -> Result<()>;

    /// Memory of the device's current memory pool, ordered on a stream.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuMemAllocAsync")]
    unsafe fn alloc_async(
        &self,
        device: Ordinal,
        size: u64,
        stream: StreamHandle,
    ) -> Result<DeviceAddress>;

    /// Gives memory of a memory pool back, ordered on a stream.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuMemFreeAsync")]
    unsafe fn free_async(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Pinned host memory, reachable from every device.
    #[doc(alias = "cuMemHostAlloc")]
    fn host_alloc(&self, device: Ordinal, size: u64, flags: u32) -> Result<*mut u8>;

    /// Gives pinned host memory back.
    ///
    /// # Safety
    /// The common obligation of the [module](self), and no reference into it lives.
    #[doc(alias = "cuMemFreeHost")]
    unsafe fn host_free(&self, device: Ordinal, pointer: *mut u8) -> Result<()>;

    /// Managed memory: one address for host and device, pages move to who touches them.
    /// `flags`: 1 global, 2 host.
    #[doc(alias = "cuMemAllocManaged")]
    fn managed_alloc(&self, device: Ordinal, size: u64, flags: u32) -> Result<DeviceAddress>;

    /// Queues moving a managed range to a location. Devices, the host, and from CUDA 12.2 on its
    /// NUMA nodes; the range is any number of bytes, and whole pages are moved.
    ///
    /// # Safety
    /// The common obligation of the [module](self).
    #[doc(alias = "cuMemPrefetchAsync")]
    unsafe fn prefetch(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        location: Location,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Advises how a managed range will be used; in force when it returns. The range is any number
    /// of bytes, and whole pages are meant. Advice that names no location ignores it. A NUMA node
    /// may be preferred, from CUDA 12.2 on, and is not accessed by.
    #[doc(alias = "cuMemAdvise")]
    fn advise(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        advice: Advice,
        location: Location,
    ) -> Result<()>;

    /// What is in force for a managed range.
    #[doc(alias = "cuMemRangeGetAttribute")]
    fn range_attribute(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        attribute: RangeAttribute,
    ) -> Result<i32>;

    /// Who all of a managed range is advised to be kept mapped for: devices and the host, in no
    /// particular order.
    #[doc(alias = "cuMemRangeGetAttribute")]
    fn range_accessed_by(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
    ) -> Result<Vec<Location>>;
}
