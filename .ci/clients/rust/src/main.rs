//! The safe interfaces of cudarc and baracuda-driver on the stand-in for libcuda.

use std::error::Error;

type Outcome = Result<(), Box<dyn Error>>;

const GRANULE: usize = 2 << 20;

fn main() -> Outcome {
    cudarc_memory()?;
    cudarc_streams()?;
    baracuda_mappings()?;
    baracuda_memory()?;
    println!("cudarc and baracuda-driver: as expected");
    Ok(())
}

/// Allocates, copies, fills and frees with cudarc, in a primary and in a created context.
fn cudarc_memory() -> Outcome {
    use cudarc::driver::CudaContext;

    for context in [CudaContext::new(0)?, CudaContext::new_non_primary(0, 0)?] {
        assert_eq!(context.compute_capability()?, (9, 0));
        let (free, total) = context.mem_get_info()?;
        assert!(free <= total && total == context.total_mem()?);
        let stream = context.default_stream();
        let numbers: Vec<u32> = (0..1000).collect();
        let mut device = stream.clone_htod(&numbers)?;
        assert_eq!(stream.clone_dtoh(&device)?, numbers);
        let part = stream.clone_dtod(&device.slice(10..20))?;
        assert_eq!(stream.clone_dtoh(&part)?, numbers[10..20]);
        stream.memset_zeros(&mut device)?;
        assert_eq!(stream.clone_dtoh(&device)?, vec![0; 1000]);
        let zeros = stream.alloc_zeros::<f32>(10)?;
        assert_eq!(stream.clone_dtoh(&zeros)?, vec![0.0; 10]);
        let too_much = stream.alloc_zeros::<u8>(1 << 40);
        assert!(too_much.is_err());
        drop((device, part, zeros));
        context.synchronize()?;
        context.check_err()?;
    }
    Ok(())
}

/// Orders work between streams of cudarc.
fn cudarc_streams() -> Outcome {
    use cudarc::driver::{CudaContext, sys::CUevent_flags};

    let context = CudaContext::new(0)?;
    let (one, two) = (context.new_stream()?, context.new_stream_with_priority(-5)?);
    let start = context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?;
    let end = context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?;
    start.record(&one)?;
    let written = one.clone_htod(&[7u8; 64])?;
    two.join(&one)?;
    let copied = two.clone_dtod(&written)?;
    end.record(&two)?;
    two.synchronize()?;
    assert!(start.elapsed_ms(&end)? >= 0.0 && end.is_complete());
    assert_eq!(two.clone_dtoh(&copied)?, [7u8; 64]);
    let own = context.per_thread_stream();
    assert_eq!(own.clone_dtoh(&own.clone_htod(&[1u8, 2, 3])?)?, [1, 2, 3]);
    Ok(())
}

/// Reserves, creates, maps and grants access with baracuda-driver.
fn baracuda_mappings() -> Outcome {
    use baracuda_driver::vmm::{
        AccessFlags, AddressRange, MappedRange, PhysicalMemory, allocation_granularity,
    };
    use baracuda_driver::{Context, Device};

    baracuda_driver::init()?;
    let device = Device::get(0)?;
    let context = Context::new(&device)?;
    assert_eq!(allocation_granularity(&device, false)?, GRANULE);
    let range = AddressRange::reserve(&context, 4 * GRANULE, 0)?;
    let physical = PhysicalMemory::create(&context, &device, GRANULE)?;
    let first = MappedRange::new(&range, &physical, 0)?;
    let alias = MappedRange::new(&range, &physical, 2 * GRANULE)?;
    assert!(baracuda_driver::memory::memset_u32(first.as_raw(), 1, 4).is_err());
    first.set_access(&device, AccessFlags::ReadWrite)?;
    alias.set_access(&device, AccessFlags::Read)?;
    baracuda_driver::memory::memset_u32(first.as_raw(), 0x0102_0304, 16)?;
    assert!(baracuda_driver::memory::memset_u32(alias.as_raw(), 1, 4).is_err());
    let mut read = [0u8; 64];
    // SAFETY: the array has 64 bytes, and the mapping is larger.
    unsafe { copy_out(&mut read, alias.as_raw().0)? };
    assert_eq!(read[..4], [4, 3, 2, 1]);
    Ok(())
}

/// Copies from a device address.
///
/// # Safety
/// Memory of the array's size is mapped there.
unsafe fn copy_out(to: &mut [u8; 64], from: u64) -> Outcome {
    use baracuda_driver::memory::memcpy;
    use baracuda_cuda_sys::CUdeviceptr;

    let to_address = CUdeviceptr(to.as_mut_ptr().expose_provenance() as u64);
    // SAFETY: the caller promises that the memory is there.
    unsafe { memcpy(to_address, CUdeviceptr(from), 64)? };
    Ok(())
}

/// Allocates, registers and pools memory with baracuda-driver.
fn baracuda_memory() -> Outcome {
    use baracuda_driver::mempool::MemoryPool;
    use baracuda_driver::{Context, Device, DeviceBuffer, Event, PinnedRegistration, Stream};

    let device = Device::get(0)?;
    let context = Context::new(&device)?;
    let stream = Stream::with_priority(&context, 1, -3)?;
    assert_eq!((stream.priority()?, stream.flags()?), (-3, 1));
    let numbers: Vec<u32> = (0..100).collect();
    let buffer = DeviceBuffer::from_slice(&context, &numbers)?;
    let mut back = vec![0; 100];
    buffer.copy_to_host(&mut back)?;
    assert_eq!(back, numbers);
    let mut ours = vec![0u8; 8192];
    let registered = PinnedRegistration::register(&mut ours)?;
    assert_ne!(registered.device_ptr()?.0, 0);
    drop(registered);
    let pool = MemoryPool::new(&context, &device)?;
    let memory = pool.alloc_async(4096, &stream)?;
    assert!(memory.0 != 0 && pool.used_bytes()? >= 4096);
    let called = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
    let calls = std::sync::Arc::clone(&called);
    stream.launch_host_func(move || {
        calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    })?;
    let (start, end) = (Event::new(&context)?, Event::new(&context)?);
    start.record(&stream)?;
    end.record(&stream)?;
    stream.synchronize()?;
    assert_eq!(called.load(std::sync::atomic::Ordering::SeqCst), 1);
    assert!(Event::elapsed_time_ms(&start, &end)? >= 0.0);
    Ok(())
}
