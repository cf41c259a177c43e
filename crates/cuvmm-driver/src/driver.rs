//! The trait [`Driver`] and its contract.
//!
//! # Validation
//! The caller validates. An implementation passes on its arguments: it rounds nothing, retries
//! nothing and adds no checks. A call that the real driver refuses is refused with the same code by
//! every backend. A call that the real driver accepts (unmapping over a hole, mapping past the end
//! of a reservation) is accepted by every backend with the usual effect.
//!
//! # Safety
//! Calls that take an address or a handle are `unsafe` where a wrong argument can end the process
//! or remove memory that is in use: the real driver crashes when a released handle is mapped, and
//! unmaps memory that a kernel is using. Unless a method says otherwise, the *common obligation*
//! applies: *every handle passed in was returned by this driver and has not been released since,
//! and no running or queued device work uses memory that the call takes away.* The model and host
//! drivers return an error for such misuse. Code written against the trait must not rely on that.
//!
//! # Threads and order
//! Every method may be called from any thread at any time. The calls of one thread take effect in
//! order. The virtual-memory calls need no current context and do not wait for device work. Methods
//! that take a device make its context current for the call and restore the thread's current
//! context afterwards.
//!
//! # Ownership
//! Handles are plain numbers. The caller that receives a handle releases it once, to the driver
//! that returned it. Dropping a driver releases only its own context references; the caller must
//! not have live handles at that time.
//!
//! # Failure
//! A call that fails has changed nothing, as measured on the real driver.
//!
//! The crate `cuvmm-model` has an example, which runs without a GPU.
//!
//! This file contains `unsafe` declarations only, for the reasons above.
#![allow(unsafe_code)]

use std::fmt::Debug;

use cuvmm_sys::CudaVersion;

use crate::error::Result;
use crate::shareable::{Exported, ImportSource, OsHandle};
use crate::types::{
    AccessDesc, AccessFlags, Advice, CaptureMode, CaptureStatus, DeviceAddress, DeviceAttribute,
    EventFlags, EventHandle, GranularityKind, GraphExecHandle, GraphHandle, HandleTypes, Location,
    MemPoolAttribute, MemPoolHandle, MemPoolProps, MemPoolTicket, MemoryInfo, Ordinal,
    PhysicalHandle, PhysicalProps, PointerAttribute, RangeAttribute, StreamFlags, StreamHandle,
};

/// The kind of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DriverKind {
    /// The real driver, `libcuda.so.1` or `nvcuda.dll`.
    Cuda,
    /// The host driver: the rules of the driver over real host memory.
    Host,
    /// The model: the rules of the driver without memory.
    Model,
}

impl DriverKind {
    /// Returns the word for this kind on the command line and in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Host => "host",
            Self::Model => "model",
        }
    }
}

/// The memory behind a driver's device addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceMemory {
    /// Memory of a device. Its work can access it, the host's processors cannot.
    Device,
    /// Memory of this process. The processors can access it where access was granted to a device.
    Host,
    /// No memory: data that is written is lost.
    Nothing,
}

/// The driver's memory calls. See the [module](self) for the contract and an example.
///
/// All sizes are in bytes.
pub trait Driver: Debug + Send + Sync {
    // --- identification ------------------------------------------------------------------

    /// Returns the kind of this driver; for a wrapper, the kind of the wrapped driver.
    fn kind(&self) -> DriverKind;

    /// Returns the kind of memory behind device addresses; for a wrapper, that of the wrapped
    /// driver.
    fn device_memory(&self) -> DeviceMemory;

    /// Returns the CUDA version that the driver implements.
    #[doc(alias = "cuDriverGetVersion")]
    fn version(&self) -> Result<CudaVersion>;

    /// Returns the number of devices.
    #[doc(alias = "cuDeviceGetCount")]
    fn device_count(&self) -> Result<i32>;

    /// Returns the product name of a device.
    #[doc(alias = "cuDeviceGetName")]
    fn device_name(&self, device: Ordinal) -> Result<String>;

    /// Returns the UUID of a device, which is the same in every process.
    #[doc(alias = "cuDeviceGetUuid_v2")]
    fn device_uuid(&self, device: Ordinal) -> Result<[u8; 16]>;

    /// Returns one attribute of a device.
    #[doc(alias = "cuDeviceGetAttribute")]
    fn device_attribute(&self, device: Ordinal, attribute: DeviceAttribute) -> Result<i32>;

    /// Returns the total memory of a device in bytes. Needs no context.
    #[doc(alias = "cuDeviceTotalMem")]
    fn total_memory(&self, device: Ordinal) -> Result<u64>;

    /// Returns the free and the total memory of a device.
    #[doc(alias = "cuMemGetInfo")]
    fn memory_info(&self, device: Ordinal) -> Result<MemoryInfo>;

    /// Returns `true` if `device` can access the memory of `peer`.
    #[doc(alias = "cuDeviceCanAccessPeer")]
    fn can_access_peer(&self, device: Ordinal, peer: Ordinal) -> Result<bool>;

    /// Returns the granularity, in bytes, of sizes and addresses of physicals with these
    /// properties.
    #[doc(alias = "cuMemGetAllocationGranularity")]
    fn allocation_granularity(&self, props: &PhysicalProps, kind: GranularityKind) -> Result<u64>;

    // --- addresses -----------------------------------------------------------------------

    /// Reserves a range of addresses. An `alignment` of 0 means the granularity. The driver may
    /// ignore `hint`.
    #[doc(alias = "cuMemAddressReserve")]
    fn reserve(
        &self,
        size: u64,
        alignment: u64,
        hint: DeviceAddress,
        flags: u64,
    ) -> Result<DeviceAddress>;

    /// Frees a whole reservation.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemAddressFree")]
    unsafe fn free_reservation(&self, address: DeviceAddress, size: u64) -> Result<()>;

    // --- physical memory -----------------------------------------------------------------

    /// Creates one physical allocation. Its memory reads as zero.
    #[doc(alias = "cuMemCreate")]
    fn create(&self, size: u64, props: &PhysicalProps, flags: u64) -> Result<PhysicalHandle>;

    /// Releases one reference to a physical. Its memory lives until the last mapping, reference and
    /// exported descriptor are gone.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemRelease")]
    unsafe fn release(&self, handle: PhysicalHandle) -> Result<()>;

    /// Returns the handle of the physical mapped at an address and adds a reference to it.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    fn retain(&self, address: DeviceAddress) -> Result<PhysicalHandle>;

    /// Returns the properties that a physical was created with.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
    unsafe fn physical_props(&self, handle: PhysicalHandle) -> Result<PhysicalProps>;

    /// Exports a physical as a handle of the given type that another process can import.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemExportToShareableHandle")]
    unsafe fn export(
        &self,
        handle: PhysicalHandle,
        handle_type: HandleTypes,
        flags: u64,
    ) -> Result<Exported>;

    /// Imports a physical that another process, or this one, exported.
    ///
    /// # Safety
    /// A handle of the operating system in `source` is open and stays open during the call, or is not a
    /// handle at all (which is an error).
    #[doc(alias = "cuMemImportFromShareableHandle")]
    unsafe fn import(
        &self,
        source: ImportSource,
        handle_type: HandleTypes,
    ) -> Result<PhysicalHandle>;

    // --- mappings ------------------------------------------------------------------------

    /// Maps a whole physical at an address. No location has access to the mapping yet.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemMap")]
    unsafe fn map(
        &self,
        address: DeviceAddress,
        size: u64,
        offset: u64,
        handle: PhysicalHandle,
        flags: u64,
    ) -> Result<()>;

    /// Removes every mapping that is entirely in the range.
    ///
    /// # Safety
    /// No running or queued device work uses the range, and no reference into it is live.
    #[doc(alias = "cuMemUnmap")]
    unsafe fn unmap(&self, address: DeviceAddress, size: u64) -> Result<()>;

    /// Sets the access of the given locations to the mappings in the range.
    ///
    /// # Safety
    /// No running or queued device work uses the range with access that the call removes.
    #[doc(alias = "cuMemSetAccess")]
    unsafe fn set_access(
        &self,
        address: DeviceAddress,
        size: u64,
        access: &[AccessDesc],
    ) -> Result<()>;

    /// Returns the access that a location has at an address.
    #[doc(alias = "cuMemGetAccess")]
    fn get_access(&self, address: DeviceAddress, location: Location) -> Result<AccessFlags>;

    /// Returns the first address and the size of the mapping or allocation that contains an
    /// address.
    ///
    /// Returns `NOT_FOUND` where there is none, or where the device has no access to the mapping.
    #[doc(alias = "cuMemGetAddressRange")]
    fn address_range(
        &self,
        device: Ordinal,
        address: DeviceAddress,
    ) -> Result<(DeviceAddress, u64)>;

    /// Returns one attribute of the memory at an address.
    #[doc(alias = "cuPointerGetAttribute")]
    fn pointer_attribute(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        attribute: PointerAttribute,
    ) -> Result<u64>;

    /// Exports a mapped range as a dma-buf, which only Linux has.
    ///
    /// # Safety
    /// The range stays mapped for as long as the descriptor is used.
    #[doc(alias = "cuMemGetHandleForAddressRange")]
    unsafe fn dma_buf(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
    ) -> Result<OsHandle>;

    /// Returns the legacy IPC handle of an allocation. Mappings have none.
    #[doc(alias = "cuIpcGetMemHandle")]
    fn ipc_mem_handle(&self, device: Ordinal, address: DeviceAddress) -> Result<[u8; 64]>;

    // --- copies and fills ----------------------------------------------------------------

    /// Copies from the host and returns when the copy is done.
    ///
    /// # Safety
    /// No other thread or device work reads or writes the destination during the call.
    #[doc(alias = "cuMemcpyHtoD")]
    unsafe fn copy_to_device(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        source: &[u8],
    ) -> Result<()>;

    /// Copies to the host and returns when the copy is done.
    ///
    /// # Safety
    /// No thread or device work writes the source during the call.
    #[doc(alias = "cuMemcpyDtoH")]
    unsafe fn copy_to_host(
        &self,
        device: Ordinal,
        destination: &mut [u8],
        source: DeviceAddress,
    ) -> Result<()>;

    /// Queues a copy between two ranges that `device` can access on the default stream. The call
    /// may return before the copy is done.
    ///
    /// # Safety
    /// Both ranges stay mapped until the copy is done, and nothing else uses the destination.
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
    /// `source` is readable for `size` bytes and is not written, and the destination stays mapped,
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
    /// `destination` is writable for `size` bytes and not used otherwise, and the source stays
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

    /// Queues a copy between two ranges that `device` can access.
    ///
    /// # Safety
    /// Both ranges stay mapped until the copy is done, and nothing else uses the destination.
    #[doc(alias = "cuMemcpyDtoDAsync")]
    unsafe fn copy_on_device_async(
        &self,
        device: Ordinal,
        destination: DeviceAddress,
        source: DeviceAddress,
        size: u64,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Queues a fill with one byte on the default stream. The call may return before the fill is
    /// done.
    ///
    /// # Safety
    /// The range stays mapped until the fill is done, and nothing else uses it.
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
    /// The range stays mapped until the fill is done, and nothing else uses it.
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

    /// Creates a stream.
    #[doc(alias = "cuStreamCreate")]
    fn stream_create(&self, device: Ordinal, flags: StreamFlags) -> Result<StreamHandle>;

    /// Destroys a stream. Work queued on it still runs to completion.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuStreamDestroy")]
    unsafe fn stream_destroy(&self, device: Ordinal, stream: StreamHandle) -> Result<()>;

    /// Waits until all work of a stream is done.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuStreamSynchronize")]
    unsafe fn stream_synchronize(&self, device: Ordinal, stream: StreamHandle) -> Result<()>;

    /// Returns `true` if all work of a stream is done.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuStreamQuery")]
    unsafe fn stream_query(&self, device: Ordinal, stream: StreamHandle) -> Result<bool>;

    /// Makes later work of a stream wait for the work that the event's last record covers.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuStreamWaitEvent")]
    unsafe fn stream_wait_event(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<()>;

    /// Creates an event. Until it is recorded, it counts as done.
    #[doc(alias = "cuEventCreate")]
    fn event_create(&self, device: Ordinal, flags: EventFlags) -> Result<EventHandle>;

    /// Destroys an event.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuEventDestroy")]
    unsafe fn event_destroy(&self, device: Ordinal, event: EventHandle) -> Result<()>;

    /// Records an event: it then covers all work queued on the stream so far.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuEventRecord")]
    unsafe fn event_record(
        &self,
        device: Ordinal,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Records an event for a whole context: it then covers all work queued so far on all streams
    /// of the device's context.
    ///
    /// Since CUDA 12.5. The driver refuses the call while a stream of the context captures, and the
    /// capture is invalidated.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuCtxRecordEvent")]
    unsafe fn context_record_event(&self, device: Ordinal, event: EventHandle) -> Result<()>;

    /// Returns `true` if the work that the event covers is done.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuEventQuery")]
    unsafe fn event_query(&self, device: Ordinal, event: EventHandle) -> Result<bool>;

    /// Waits until the work that the event covers is done.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuEventSynchronize")]
    unsafe fn event_synchronize(&self, device: Ordinal, event: EventHandle) -> Result<()>;

    /// Waits until all work of the device's context is done.
    #[doc(alias = "cuCtxSynchronize")]
    fn context_synchronize(&self, device: Ordinal) -> Result<()>;

    // --- capture -------------------------------------------------------------------------

    /// Sets the capture mode of the calling thread and returns the previous mode. Needs no context.
    #[doc(alias = "cuThreadExchangeStreamCaptureMode")]
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode>;

    /// Returns whether a stream is capturing.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuStreamIsCapturing")]
    unsafe fn capture_status(&self, device: Ordinal, stream: StreamHandle)
    -> Result<CaptureStatus>;

    /// Begins a capture: from now on the stream records its work into a graph instead of running
    /// it.
    ///
    /// # Safety
    /// The [common obligation](self).
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
    /// The [common obligation](self).
    #[doc(alias = "cuStreamEndCapture")]
    unsafe fn capture_end(&self, device: Ordinal, stream: StreamHandle) -> Result<GraphHandle>;

    /// Instantiates a graph, so that it can be launched.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuGraphInstantiateWithFlags")]
    unsafe fn graph_instantiate(
        &self,
        device: Ordinal,
        graph: GraphHandle,
    ) -> Result<GraphExecHandle>;

    /// Queues a graph's work on a stream.
    ///
    /// # Safety
    /// The [common obligation](self), for all memory that the graph uses.
    #[doc(alias = "cuGraphLaunch")]
    unsafe fn graph_launch(
        &self,
        device: Ordinal,
        graph: GraphExecHandle,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Destroys a graph. Executable graphs instantiated from it stay valid.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuGraphDestroy")]
    unsafe fn graph_destroy(&self, device: Ordinal, graph: GraphHandle) -> Result<()>;

    /// Destroys an executable graph.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuGraphExecDestroy")]
    unsafe fn graph_exec_destroy(&self, device: Ordinal, graph: GraphExecHandle) -> Result<()>;

    // --- allocations outside virtual memory management -----------------------------------

    /// Allocates plain device memory.
    #[doc(alias = "cuMemAlloc")]
    fn alloc(&self, device: Ordinal, size: u64) -> Result<DeviceAddress>;

    /// Frees plain or managed memory. Waits for the device.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemFree")]
    unsafe fn free(&self, device: Ordinal, address: DeviceAddress) -> Result<()>;

    /// Allocates from the device's current memory pool, ordered on a stream.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemAllocAsync")]
    unsafe fn alloc_async(
        &self,
        device: Ordinal,
        size: u64,
        stream: StreamHandle,
    ) -> Result<DeviceAddress>;

    /// Frees memory of a memory pool, ordered on a stream.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemFreeAsync")]
    unsafe fn free_async(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Allocates pinned host memory, accessible from every device.
    #[doc(alias = "cuMemHostAlloc")]
    fn host_alloc(&self, device: Ordinal, size: u64, flags: u32) -> Result<*mut u8>;

    /// Frees pinned host memory.
    ///
    /// # Safety
    /// The [common obligation](self), and no reference into the memory is live.
    #[doc(alias = "cuMemFreeHost")]
    unsafe fn host_free(&self, device: Ordinal, pointer: *mut u8) -> Result<()>;

    /// Pins `size` bytes of the program's memory, so that devices copy to and from it at full speed.
    ///
    /// `flags` is a sum of 1 for all contexts (portable), 2 for a device address, which all memory
    /// has under unified addressing, and 8 for memory that the device only reads.
    ///
    /// # Safety
    /// The [common obligation](self), and the memory stays mapped until it is unregistered.
    #[doc(alias = "cuMemHostRegister")]
    unsafe fn host_register(
        &self,
        device: Ordinal,
        pointer: *mut u8,
        size: u64,
        flags: u32,
    ) -> Result<()>;

    /// Unpins memory that was registered with this first byte.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemHostUnregister")]
    unsafe fn host_unregister(&self, device: Ordinal, pointer: *mut u8) -> Result<()>;

    /// Allocates managed memory: host and device use one address, and pages migrate on access.
    ///
    /// `flags` is 1 for global and 2 for host attachment.
    #[doc(alias = "cuMemAllocManaged")]
    fn managed_alloc(&self, device: Ordinal, size: u64, flags: u32) -> Result<DeviceAddress>;

    /// Queues moving a managed range to a location: a device, the host, or, since CUDA 12.2, a NUMA
    /// node of the host.
    ///
    /// The range is any number of bytes; whole pages are moved.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemPrefetchAsync")]
    unsafe fn prefetch(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        location: Location,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Advises how a managed range will be used. The advice is in force when the call returns.
    ///
    /// The range is any number of bytes and is extended to whole pages. Advice that needs no
    /// location ignores it. Since CUDA 12.2 the preferred location may be a NUMA node; the
    /// accessing location may not.
    #[doc(alias = "cuMemAdvise")]
    fn advise(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        advice: Advice,
        location: Location,
    ) -> Result<()>;

    /// Returns one attribute that is in force for a managed range.
    #[doc(alias = "cuMemRangeGetAttribute")]
    fn range_attribute(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
        attribute: RangeAttribute,
    ) -> Result<i32>;

    /// Returns the locations that the whole managed range is advised to stay mapped for: devices
    /// and the host, in no particular order.
    #[doc(alias = "cuMemRangeGetAttribute")]
    fn range_accessed_by(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
    ) -> Result<Vec<Location>>;

    // --- memory pools --------------------------------------------------------------------

    /// Creates a memory pool. A location on a device is that of `props`, not `device`, whose
    /// context is only current during the call.
    ///
    /// Memory of a device is accessible to that device, memory of the host to its processors.
    #[doc(alias = "cuMemPoolCreate")]
    fn mem_pool_create(&self, device: Ordinal, props: &MemPoolProps) -> Result<MemPoolHandle>;

    /// Destroys a memory pool. The handle is invalid at once; the memory is released when all its
    /// allocations are freed.
    ///
    /// If it was the current pool of its device, the default pool becomes the current one.
    ///
    /// # Safety
    /// The [common obligation](self). A default pool is refused.
    #[doc(alias = "cuMemPoolDestroy")]
    unsafe fn mem_pool_destroy(&self, device: Ordinal, pool: MemPoolHandle) -> Result<()>;

    /// Returns an attribute of a memory pool.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemPoolGetAttribute")]
    unsafe fn mem_pool_attribute(
        &self,
        device: Ordinal,
        pool: MemPoolHandle,
        attribute: MemPoolAttribute,
    ) -> Result<u64>;

    /// Sets an attribute of a memory pool.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemPoolSetAttribute")]
    unsafe fn mem_pool_set_attribute(
        &self,
        device: Ordinal,
        pool: MemPoolHandle,
        attribute: MemPoolAttribute,
        value: u64,
    ) -> Result<()>;

    /// Releases memory that a pool does not use, and leaves it at least `keep` bytes. Memory whose
    /// free was not seen to be done by a synchronization may stay.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemPoolTrimTo")]
    unsafe fn mem_pool_trim(&self, device: Ordinal, pool: MemPoolHandle, keep: u64) -> Result<()>;

    /// Returns the access that a location has to the memory of a pool.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemPoolGetAccess")]
    unsafe fn mem_pool_access(
        &self,
        device: Ordinal,
        pool: MemPoolHandle,
        location: Location,
    ) -> Result<AccessFlags>;

    /// Sets the access of locations to the memory of a pool, allocated already or later.
    ///
    /// # Safety
    /// No running or queued device work uses memory of the pool with access that the call removes.
    #[doc(alias = "cuMemPoolSetAccess")]
    unsafe fn mem_pool_set_access(
        &self,
        device: Ordinal,
        pool: MemPoolHandle,
        access: &[AccessDesc],
    ) -> Result<()>;

    /// Returns the default memory pool of a device, which exists for as long as the driver.
    #[doc(alias = "cuDeviceGetDefaultMemPool")]
    fn default_mem_pool(&self, device: Ordinal) -> Result<MemPoolHandle>;

    /// Returns the memory pool of a device that [`alloc_async`](Self::alloc_async) allocates from.
    #[doc(alias = "cuDeviceGetMemPool")]
    fn current_mem_pool(&self, device: Ordinal) -> Result<MemPoolHandle>;

    /// Sets the memory pool of a device that [`alloc_async`](Self::alloc_async) allocates from.
    /// The pool's memory must be on the device.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuDeviceSetMemPool")]
    unsafe fn set_current_mem_pool(&self, device: Ordinal, pool: MemPoolHandle) -> Result<()>;

    /// Allocates from a memory pool, ordered on a stream. The pool may be of another device.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemAllocFromPoolAsync")]
    unsafe fn alloc_from_pool_async(
        &self,
        device: Ordinal,
        size: u64,
        pool: MemPoolHandle,
        stream: StreamHandle,
    ) -> Result<DeviceAddress>;

    /// Exports a memory pool as a handle of the given type that another process can import.
    ///
    /// # Safety
    /// The [common obligation](self).
    #[doc(alias = "cuMemPoolExportToShareableHandle")]
    unsafe fn mem_pool_export(
        &self,
        device: Ordinal,
        pool: MemPoolHandle,
        handle_type: HandleTypes,
        flags: u64,
    ) -> Result<Exported>;

    /// Imports a memory pool that another process exported. Nothing can be allocated from it.
    ///
    /// # Safety
    /// A handle of the operating system in `source` is open and stays open during the call, or is not a
    /// handle at all (which is an error).
    #[doc(alias = "cuMemPoolImportFromShareableHandle")]
    unsafe fn mem_pool_import(
        &self,
        device: Ordinal,
        source: ImportSource,
        handle_type: HandleTypes,
        flags: u64,
    ) -> Result<MemPoolHandle>;

    /// Returns the data by which another process imports one allocation of an exported pool.
    #[doc(alias = "cuMemPoolExportPointer")]
    fn mem_pool_export_pointer(
        &self,
        device: Ordinal,
        address: DeviceAddress,
    ) -> Result<MemPoolTicket>;

    /// Imports one allocation of an imported pool. It is freed as other memory of pools is, before
    /// the exporting process frees it.
    ///
    /// # Safety
    /// The [common obligation](self). The allocation is not freed in the exporting
    /// process before it is freed here.
    #[doc(alias = "cuMemPoolImportPointer")]
    unsafe fn mem_pool_import_pointer(
        &self,
        device: Ordinal,
        pool: MemPoolHandle,
        ticket: &MemPoolTicket,
    ) -> Result<DeviceAddress>;
}
