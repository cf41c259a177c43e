//! Tensors over memory of this library in the hands of another library: ownership, lifetime, and
//! refusals.
//!
//! `unsafe` is used to play the other library, which accesses memory through a pointer.
#![allow(unsafe_code)]

mod common;

use std::sync::Arc;
use std::thread;

use common::{D0, G, Rig};
use cuvmm::dlpack::dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLManagedTensorVersioned};
use cuvmm::dlpack::dlpark::{DlpackElement, DlpackFlags, Managed, ManagedTensorBase, versioned};
use cuvmm::dlpack::{Consumer, Imported, Memory, Tensor};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{
    ArgumentError, BlockError, CallError, MemoryError, SleepError, TensorError,
    TensorError as Refusal,
};
use cuvmm::own::CloseRefusal;
use cuvmm::{Block, Contents, Device, DeviceVec, Layout, Place, Region, Stream};

/// Reads the elements of a contiguous tensor as another library would.
fn seen<T: DlpackElement + Copy>(tensor: &Managed<impl ManagedTensorBase>) -> Vec<T> {
    let view = tensor.validate().unwrap();
    // SAFETY: the tensor is alive, and nothing writes to it now.
    unsafe { view.cpu_slice::<T>() }.unwrap().to_vec()
}

/// Reads the elements of a tensor that is not contiguous, by its strides.
fn strided<T: DlpackElement + Copy>(tensor: &versioned::Dlpack) -> Vec<T> {
    let view = tensor.validate().unwrap();
    let strides = view.strides().unwrap();
    // SAFETY: the tensor is alive.
    let data = unsafe { view.offset_data_ptr::<T>() }.unwrap();
    let mut places = vec![0];
    for (&length, &stride) in view.shape().iter().zip(strides) {
        places = places
            .iter()
            .flat_map(|place| (0..length).map(move |n| place + n * stride))
            .collect();
    }
    // SAFETY: shape and strides stay within the tensor's memory.
    let at = |place: &i64| unsafe { *data.add(usize::try_from(*place).unwrap()) };
    places.iter().map(at).collect()
}

/// Writes an element of a tensor as another library would.
fn put<T: DlpackElement>(tensor: &mut versioned::Dlpack, index: usize, value: T) {
    let mut view = tensor.validate_mut().unwrap();
    // SAFETY: the tensor is alive, and nothing else accesses it now.
    unsafe { view.cpu_slice_mut::<T>() }.unwrap()[index] = value;
}

fn refusal<O: Memory>(tensor: &Tensor, owner: O) -> (Refusal, O) {
    let refused = tensor.export(owner, &Consumer::Synchronized).err().unwrap();
    assert!(refused.to_string().contains(&refused.reason.to_string()));
    (refused.reason, refused.owner)
}

fn bytes_of(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

/// Queues a kernel that writes to the block's first granule, and holds it back.
fn busy(rig: &Rig<impl Backing>, stream: &Stream, block: &Block, byte: u8) {
    rig.held_kernel(stream, &[], &[(block.address(), G, byte)]);
}

on_both! {
    fn a_tensor_needs_memory(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut numbers = DeviceVec::<u32>::new(&rig.device, &stream, 100).unwrap();
        numbers.extend_from_slice(&[5; 10]).unwrap();
        let tensor = Tensor::of::<u32>(&[10]);
        if rig.keeps_bytes() {
            let tensor = tensor.export(numbers, &Consumer::Synchronized).unwrap();
            assert_eq!(tensor.validate().unwrap().device(), DLDevice::CPU);
            assert_eq!(seen::<u32>(&tensor), [5; 10]);
        } else {
            let (reason, numbers) = refusal(&tensor, numbers);
            assert!(matches!(reason, Refusal::NoMemory), "{reason}");
            assert_eq!(numbers.len(), 10);
        }
    }
}

#[test]
fn the_block_lives_in_the_tensor_and_ends_with_it() {
    let rig = common::clean(common::host());
    let (pool, tenant, stream) = common::scene(&rig, 4);
    let block = tenant.allocate_on(&stream, 3 * G).unwrap();
    block.write(G, &bytes_of(&[1, 2, 3, 4, 5, 6])).unwrap();
    let address = block.address();
    let mut tensor = Tensor::of::<u32>(&[2, 3])
        .offset(G)
        .export(block, &Consumer::Synchronized)
        .unwrap();

    let view = tensor.validate().unwrap();
    assert_eq!(view.shape(), [2, 3]);
    assert_eq!(view.strides().unwrap(), [3, 1]);
    assert_eq!(view.dtype(), DLDataType::U32);
    // PyTorch ignores `byte_offset`.
    assert_eq!(
        (view.data_ptr().addr() as u64, view.byte_offset()),
        (address.0 + G, 0)
    );
    assert_eq!(seen::<u32>(&tensor), [1, 2, 3, 4, 5, 6]);
    put(&mut tensor, 4, 50u32);
    assert_eq!(seen::<u32>(&tensor), [1, 2, 3, 4, 50, 6]);

    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.tenants[0].leases), (3 * G, 1));
    assert!(
        tenant.try_allocate(4 * G).is_err(),
        "the memory is not released"
    );
    thread::spawn(move || drop(tensor)).join().unwrap();
    let stats = pool.stats();
    assert_eq!(
        (stats.in_use, stats.leased, stats.tenants[0].leases),
        (0, 0, 0)
    );
    assert_eq!(tenant.try_allocate(4 * G).unwrap().size(), 4 * G);
    drop((tenant, stream));
    pool.close().unwrap();
}

#[test]
fn several_tensors_and_we_hold_one_block() {
    let rig = common::clean(common::host());
    let (pool, tenant, stream) = common::scene(&rig, 4);
    let block = Arc::new(tenant.allocate_on(&stream, 2 * G).unwrap());
    block.write(0, &bytes_of(&[1, 2, 3, 4, 5, 6])).unwrap();
    let whole = Tensor::of::<u32>(&[6]);
    let mut whole = whole
        .export(Arc::clone(&block), &Consumer::Synchronized)
        .unwrap();
    // Transposed, and with a stride of zero that repeats elements.
    let turned = Tensor::of::<u32>(&[3, 2]).strides(&[1, 3]);
    let turned = turned
        .export(Arc::clone(&block), &Consumer::Synchronized)
        .unwrap();
    let same = Tensor::of::<u32>(&[2, 2])
        .strides(&[0, 1])
        .offset(8)
        .read_only();
    let same = same
        .export(Arc::clone(&block), &Consumer::Synchronized)
        .unwrap();
    assert_eq!(strided::<u32>(&turned), [1, 4, 2, 5, 3, 6]);
    assert_eq!(strided::<u32>(&same), [3, 4, 3, 4]);
    assert_eq!(
        (whole.flags(), same.flags()),
        (DlpackFlags::empty(), DlpackFlags::READ_ONLY)
    );

    // Writes of the other library are visible here, and the reverse.
    put(&mut whole, 2, 30u32);
    let mut bytes = [0; 4];
    block.read(8, &mut bytes).unwrap();
    assert_eq!(bytes, 30u32.to_le_bytes());
    block.write(12, &40u32.to_le_bytes()).unwrap();
    assert_eq!(strided::<u32>(&same), [30, 40, 30, 40]);

    drop((whole, turned));
    assert_eq!(Arc::strong_count(&block), 2);
    drop(block);
    assert_eq!(pool.stats().in_use, 2 * G);
    assert_eq!(
        strided::<u32>(&same),
        [30, 40, 30, 40],
        "the tensor outlives its owner"
    );
    drop(same);
    assert_eq!(pool.stats().in_use, 0);
    drop((tenant, stream));
    pool.close().unwrap();
}

// I-66
/// The deleter may be called while work runs on streams that were never named to this library.
#[test]
fn memory_waits_for_work_of_streams_that_nobody_named() {
    for by_lease in [false, true] {
        let rig = common::clean(common::host());
        let (pool, [a, b], stream) = common::pair(&rig, 4);
        let theirs = Stream::new(&rig.device).unwrap();
        let block = a.allocate_on(&stream, 4 * G).unwrap();
        let address = block.address();
        let tensor = Tensor::of::<u8>(&[G as usize]);
        let tensor = if by_lease {
            let tensor = tensor
                .export(block.lease(), &Consumer::Synchronized)
                .unwrap();
            busy(&rig, &theirs, &block, 9);
            drop(block);
            assert_eq!(pool.stats().leased, 4 * G);
            tensor
        } else {
            busy(&rig, &theirs, &block, 9);
            tensor.export(block, &Consumer::Synchronized).unwrap()
        };
        rig.faults.forget();
        drop(tensor);
        assert_eq!(rig.faults.total(), 0, "the deleter waits for nothing");
        assert_eq!(pool.stats().pending_free, 4 * G);
        let refused = b.try_allocate(G).unwrap_err();
        assert!(
            matches!(refused, BlockError::OutOfMemory(shortage) if shortage.pending_free == 4 * G)
        );
        // On its home stream the memory is reusable at once, ordered behind that work.
        let again = a.block(4 * G).home_stream(&stream).try_allocate().unwrap();
        assert_eq!(again.address(), address);
        rig.kernel(&stream, &[], &[(address, G, 3)]);
        assert!(!stream.is_done().unwrap());
        rig.machine.release_all_streams(D0);
        let mut byte = [0];
        again.read(G - 1, &mut byte).unwrap();
        assert_eq!(byte, [3], "the late write was not last");
        assert!(rig.device.lost().is_none());
        drop((again, a, b, stream, theirs));
        pool.close().unwrap();
    }
}

#[test]
fn a_region_waits_for_work_that_was_queued_before_its_tensor_went() {
    let rig = common::host();
    let theirs = Stream::new(&rig.device).unwrap();
    let region = common::region(&rig, G, G);
    let region = Arc::new(region);
    let tensor = Tensor::of::<u8>(&[G as usize]);
    let consumer = Consumer::Synchronized;
    let tensor = tensor.export(Arc::clone(&region), &consumer).unwrap();
    rig.held_kernel(&theirs, &[], &[(region.address(), G, 9)]);
    drop(tensor);
    let mut region = Arc::into_inner(region).unwrap();
    region.decommit_after(0..G, &[]).unwrap();
    assert_eq!(
        region.purge().unwrap().given_back,
        0,
        "the kernel is queued"
    );
    rig.machine.release_all_streams(D0);
    while region.purge().unwrap().given_back == 0 {}
}

/// Memory that a block gave up while it was lent is no longer the block's, but stays lent.
#[test]
fn what_a_lent_block_gave_up_waits_too() {
    let rig = common::clean(common::host());
    let (pool, [tenant, other], stream) = common::pair(&rig, 4);
    let theirs = Stream::new(&rig.device).unwrap();
    let mut block = tenant
        .block(G)
        .capacity(4 * G)
        .home_stream(&stream)
        .allocate()
        .unwrap();
    block.grow_to(4 * G).unwrap();
    let lease = block.lease();
    assert_eq!(lease.size(), 4 * G);
    let last = block.address().checked_add(3 * G).unwrap();
    let tensor = Tensor::of::<u8>(&[4 * G as usize])
        .export(lease, &Consumer::Synchronized)
        .unwrap();
    block.shrink_to(G).unwrap();
    assert_eq!(pool.stats().leased, 3 * G);
    // Request it and be refused, so that the fence has been polled.
    assert!(other.try_allocate(2 * G).is_err());
    rig.held_kernel(&theirs, &[], &[(last, G, 9)]);
    drop(tensor);
    assert!(
        other.try_allocate(2 * G).is_err(),
        "the importer's work still uses it"
    );
    rig.machine.release_all_streams(D0);
    drop(other.try_allocate(2 * G).unwrap());
    assert!(rig.device.lost().is_none(), "the work found its memory");
    drop((block, tenant, other, stream, theirs));
    pool.close().unwrap();
}

#[test]
fn the_consumer_comes_behind_what_is_queued() {
    let rig = common::clean(common::host());
    let (pool, tenant) = common::tenancy(&rig, 4);
    let (home, other) = (
        Stream::new(&rig.device).unwrap(),
        Stream::new(&rig.device).unwrap(),
    );
    let theirs = Stream::new(&rig.device).unwrap();
    let block = Arc::new(tenant.allocate_on(&home, G).unwrap());
    block.record_use(&other).unwrap();
    assert_eq!(block.streams(), Some(vec![home.clone(), other.clone()]));
    busy(&rig, &other, &block, 7);
    let tensor = Tensor::of::<u8>(&[G as usize]);

    // `Ordered`: the export orders nothing, so the queued work has not run.
    let early = tensor
        .export(Arc::clone(&block), &Consumer::Ordered)
        .unwrap();
    assert_eq!(seen::<u8>(&early)[..2], [0, 0]);
    // Consumers of host memory access it at once, so the export waits even if they name a stream.
    for consumer in [Consumer::Synchronized, Consumer::Stream(theirs.clone())] {
        rig.held_kernel(&other, &[], &[(block.address(), G, 8)]);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let tensor = tensor.export(Arc::clone(&block), &consumer).unwrap();
                seen::<u8>(&tensor)[0]
            });
            thread::sleep(std::time::Duration::from_millis(5));
            assert!(!waiting.is_finished());
            rig.machine.release_all_streams(D0);
            assert_eq!(waiting.join().unwrap(), 8);
        });
    }
    drop(early);
    assert_eq!(
        block.streams(),
        None,
        "use by unknown streams is assumed from now on"
    );
    drop((block, tenant, home, other, theirs));
    pool.close().unwrap();
}

#[test]
fn a_capture_is_not_broken() {
    let rig = common::clean(common::host());
    let (pool, tenant, home) = common::scene(&rig, 4);
    let block = tenant.allocate_on(&home, G).unwrap();
    let stray = tenant.try_allocate(G).unwrap();
    let tensor = Tensor::of::<u8>(&[4]);
    let guard = pool.capture_guard();
    // The export would have to wait for all work of the device.
    let (reason, stray) = refusal(&tensor, stray);
    assert!(matches!(reason, Refusal::NoOrder), "{reason}");
    common::captures::begin(&rig.machine, &home);
    let (reason, block) = refusal(&tensor, block);
    assert!(matches!(reason, Refusal::NoOrder), "{reason}");
    let tensor = tensor.export(stray, &Consumer::Ordered).unwrap();
    drop(tensor);
    common::captures::end(&rig.machine, &home);
    drop((guard, block, tenant, home));
    pool.close().unwrap();
}

#[test]
fn what_python_calls_a_stream() {
    let rig = common::clean(common::host());
    let stream = Stream::new(&rig.device).unwrap();
    let numbers = DeviceVec::<u32>::new(&rig.device, &stream, 1).unwrap();
    // SAFETY: none of the streams is used.
    let of = |number| unsafe { Consumer::from_python(&numbers, number) };
    for (number, handle) in [(None, 0), (Some(1), 0), (Some(77), 77)] {
        let Ok(Consumer::Stream(stream)) = of(number) else {
            panic!("{number:?} is a stream");
        };
        assert_eq!(stream.as_raw().0, handle);
    }
    assert!(matches!(of(Some(2)), Ok(Consumer::PerThread)));
    assert!(matches!(of(Some(-1)), Ok(Consumer::Ordered)));
    for number in [0, -2, i64::MIN] {
        let what = "stream";
        assert_eq!(
            of(Some(number)).unwrap_err(),
            ArgumentError::NoSuch { what, number }
        );
    }
}

#[test]
fn a_vector_is_lent_as_long_as_it_is() {
    let rig = common::clean(common::host());
    let stream = Stream::new(&rig.device).unwrap();
    let mut numbers = DeviceVec::<f32>::new(&rig.device, &stream, 4 << 20).unwrap();
    numbers.resize(2 << 20, 1.5).unwrap();
    numbers.reserve(1 << 20).unwrap();
    // There is memory behind the elements, but no elements.
    let (reason, numbers) = refusal(&Tensor::of::<f32>(&[(2 << 20) + 1]), numbers);
    assert!(
        matches!(reason, Refusal::Argument(ArgumentError::OutOfRange { start: 0, end, len, .. }) if end == (8 << 20) + 4 && len == 8 << 20),
        "{reason}"
    );
    let numbers = Arc::new(numbers);
    let tensor = Tensor::of::<f32>(&[2 << 20]);
    let tensor = tensor
        .export(Arc::clone(&numbers), &Consumer::Synchronized)
        .unwrap();
    assert!(
        Arc::into_inner(numbers).is_none(),
        "the tensor is an owner too"
    );
    assert_eq!(seen::<f32>(&tensor)[(2 << 20) - 1], 1.5);
    drop(tensor);
    assert_eq!(rig.machine.live().mappings, 0);

    // Streams that were not named used the vector, so it gives up nothing before their work is
    // complete.
    let mut numbers = DeviceVec::<f32>::new(&rig.device, &stream, 4 << 20).unwrap();
    numbers.resize(4 << 20, 0.0).unwrap();
    let shared = Arc::new(numbers);
    let tensor = Tensor::of::<f32>(&[4 << 20]);
    let tensor = tensor
        .export(Arc::clone(&shared), &Consumer::Synchronized)
        .unwrap();
    let theirs = Stream::new(&rig.device).unwrap();
    rig.machine.hold(D0, theirs.as_raw());
    rig.kernel(
        &theirs,
        &[],
        &[(shared.address().checked_add(12 << 20).unwrap(), G, 1)],
    );
    drop(tensor);
    let mut numbers = Arc::into_inner(shared).unwrap();
    assert_eq!(numbers.streams(), None);
    numbers.truncate(0);
    assert_eq!(
        numbers.shrink_to_fit().unwrap(),
        0,
        "the importer's work still uses it"
    );
    rig.machine.release_all_streams(D0);
    assert!(numbers.shrink_to_fit().unwrap() >= 16 << 20);
    assert!(rig.device.lost().is_none());
}

#[test]
fn of_a_region_what_is_committed() {
    let rig = common::clean(common::host());
    let stream = Stream::new(&rig.device).unwrap();
    let mut region = Region::reserve(&rig.device, 8 * G).unwrap();
    region.commit(G..4 * G).unwrap();
    region.write(&stream, 2 * G - 2, &[1, 2, 3, 4]).unwrap();
    let tensor = Tensor::of::<u8>(&[2 * G as usize]);
    let (reason, region) = refusal(&tensor, region);
    assert!(
        matches!(reason, Refusal::Memory(MemoryError::NotCommitted(ref bytes)) if *bytes == (0..2 * G)),
        "{reason}"
    );
    let (reason, region) = refusal(&tensor.clone().offset(7 * G), region);
    assert!(
        matches!(reason, Refusal::Argument(ArgumentError::OutOfRange { start, end, len, .. }) if (start, end, len) == (7 * G, 9 * G, 8 * G)),
        "{reason}"
    );
    let tensor = tensor
        .offset(2 * G - 2)
        .export(region, &Consumer::Synchronized)
        .unwrap();
    assert_eq!(seen::<u8>(&tensor)[..4], [1, 2, 3, 4]);
}

#[test]
fn what_is_shared_by_a_fork_is_lent_to_be_read() {
    let rig = common::clean(common::host());
    let mut region = common::region(&rig, 2 * G, 2 * G);
    let _fork = region.fork(&[]).unwrap();
    let tensor = Tensor::of::<u8>(&[8]).offset(G);
    let (reason, region) = refusal(&tensor, region);
    assert!(
        matches!(reason, Refusal::Memory(MemoryError::ReadOnly(ref bytes)) if *bytes == (G..G + 8)),
        "{reason}"
    );
    let tensor = tensor
        .read_only()
        .export(region, &Consumer::Synchronized)
        .unwrap();
    assert_eq!(seen::<u8>(&tensor), [0; 8]);
}

#[test]
fn a_lease_lends_no_more_than_its_block() {
    let rig = common::clean(common::host());
    let (pool, tenant, stream) = common::scene(&rig, 16);
    let root = tenant.block(4 * G).largest_extent(G).home_stream(&stream);
    let root = root.allocate().unwrap();
    root.write(0, &[1; 8]).unwrap();
    let before = root.lease();
    let fork = root.fork(2 * G, 4 * G).unwrap();
    let shared = MemoryError::ReadOnly(0..2 * G);
    let tensor = Tensor::of::<u8>(&[8]);
    for lease in [before, root.lease(), fork.lease()] {
        let (reason, lease) = refusal(&tensor, lease);
        assert!(
            matches!(reason, Refusal::Memory(ref found) if *found == shared),
            "{reason}"
        );
        let to_read = tensor.clone().read_only();
        let shown = to_read.export(lease, &Consumer::Synchronized).unwrap();
        assert_eq!(seen::<u8>(&shown), [1; 8]);
        drop(shown);
        // The memory behind the shared prefix is the block's own.
        let behind = tensor.clone().offset(2 * G);
        drop(
            behind
                .export(root.lease(), &Consumer::Synchronized)
                .unwrap(),
        );
    }
    let (reason, fork) = refusal(&tensor, fork);
    assert!(matches!(reason, Refusal::Memory(ref found) if *found == shared));
    drop((root, fork, tenant));
    pool.close().unwrap();
}

#[test]
fn a_sleeping_block_is_not_lent() {
    let rig = common::clean(common::host());
    let (pool, tenant, stream) = common::scene(&rig, 16);
    let block = tenant.allocate_on(&stream, 2 * G).unwrap();
    tenant.blocks().sleep(Contents::Discard).unwrap();
    let asleep = MemoryError::Asleep(2 * G);
    let tensor = Tensor::of::<u8>(&[8]);
    for tensor in [tensor.clone(), tensor.clone().read_only()] {
        let (reason, _) = refusal(&tensor, block.lease());
        assert!(
            matches!(reason, Refusal::Memory(ref found) if *found == asleep),
            "{reason}"
        );
    }
    let (reason, block) = refusal(&tensor, Arc::new(block));
    assert!(matches!(reason, Refusal::Memory(ref found) if *found == asleep));
    // An awake block can be lent, and cannot sleep while it is.
    tenant.blocks().wake().unwrap();
    let mut lent = tensor
        .export(Arc::clone(&block), &Consumer::Synchronized)
        .unwrap();
    let refused = tenant.blocks().sleep(Contents::Discard);
    assert!(matches!(refused, Err(SleepError::Leased { blocks: 1, .. })));
    put::<u8>(&mut lent, 7, 9);
    drop(lent);

    // A lease of a block that was freed while asleep has no memory.
    tenant.blocks().sleep(Contents::Discard).unwrap();
    let lease = block.lease();
    drop(block);
    let (reason, lease) = refusal(&tensor, lease);
    assert!(
        matches!(
            reason,
            Refusal::Memory(MemoryError::NotCommitted(ref bytes)) if *bytes == (0..8)
        ),
        "{reason}"
    );
    drop((lease, tenant));
    pool.close().unwrap();
}

#[test]
fn host_memory_under_a_region_is_the_processors() {
    let rig = common::clean(common::host());
    let stream = Stream::new(&rig.device).unwrap();
    let region = common::committed(
        Region::builder(&rig.device, 2 * G).layout(Layout::on(Place::HostNuma(0))),
        2 * G,
    );
    region.write(&stream, 0, &[1, 2, 3, 4]).unwrap();
    let tensor = Tensor::of::<u8>(&[4])
        .export(region, &Consumer::Stream(stream))
        .unwrap();
    assert_eq!(seen::<u8>(&tensor), [1, 2, 3, 4]);
}

#[test]
fn figures_are_checked_before_anything_is_lent() {
    let rig = common::clean(common::host());
    let (pool, tenant) = common::tenancy(&rig, 4);
    let block = tenant.try_allocate(100).unwrap();
    let float = Tensor::of::<f32>;
    let strange = DLDataType::new(DLDataTypeCode::FLOAT, 0, 1);
    rig.faults.forget();
    let mut block = Some(block);
    let mut refused = |tensor: &Tensor| {
        let (reason, back) = refusal(tensor, block.take().unwrap());
        block = Some(back);
        reason
    };
    let outside = |reason: &Refusal, figures: (u64, u64, u64)| matches!(*reason, Refusal::Argument(ArgumentError::OutOfRange { start, end, len, .. }) if (start, end, len) == (figures.0, figures.0.saturating_add(figures.1), figures.2));
    for (tensor, figures) in [
        (float(&[26]), (0, 104, 100)),
        (float(&[25]).offset(4), (4, 100, 100)),
        (float(&[5, 5]).strides(&[6, 1]), (0, 116, 100)),
        (float(&[]).offset(u64::MAX), (u64::MAX, 4, 100)),
        (float(&[0, 3]).offset(101), (101, 0, 100)),
    ] {
        let reason = refused(&tensor);
        assert!(outside(&reason, figures), "{tensor:?}: {reason}");
    }
    let reason = refused(&float(&[2]).offset(6));
    assert!(
        matches!(reason, Refusal::Argument(ArgumentError::Misaligned { value, multiple: 4, .. }) if value % 8 == 6)
    );
    let reason = refused(&float(&[usize::MAX, 3]));
    assert!(matches!(reason, Refusal::TooLarge { .. }));
    let reason = refused(&float(&[2, 2]).strides(&[1]));
    assert!(matches!(
        reason,
        Refusal::Argument(ArgumentError::TooSmall {
            what: "strides",
            value: 1,
            least: 2
        })
    ));
    let reason = refused(&Tensor::new(strange, &[2]));
    assert!(matches!(
        reason,
        Refusal::Argument(ArgumentError::Zero { .. })
    ));
    let block = block.unwrap();
    let legacy = float(&[4])
        .read_only()
        .export_legacy(block, &Consumer::Synchronized);
    let refused = legacy.err().unwrap();
    assert!(matches!(refused.reason, Refusal::ReadOnly));
    assert_eq!(rig.faults.total(), 0);

    // Packed elements of less than a byte, and no elements.
    let block = Arc::new(refused.owner);
    let half_bytes = Tensor::new(DLDataType::F4E2M1FN, &[199]).offset(0);
    let tensor = half_bytes
        .export(Arc::clone(&block), &Consumer::Synchronized)
        .unwrap();
    assert_eq!(tensor.validate().unwrap().num_bytes(), 100);
    let none = float(&[3, 0])
        .offset(100)
        .export(Arc::clone(&block), &Consumer::Synchronized)
        .unwrap();
    assert!(none.validate().unwrap().data_ptr().is_null());
    assert!(seen::<f32>(&none).is_empty());
    let one = float(&[])
        .export_legacy(block, &Consumer::Synchronized)
        .unwrap();
    assert_eq!(seen::<f32>(&one), [0.0]);
    drop((tensor, none, one, tenant));
    pool.close().unwrap();
}

/// A deleter is called from C, so it must not panic.
#[test]
fn no_panic_leaves_a_deleter() {
    let rig = common::host();
    let stream = Stream::new(&rig.device).unwrap();
    let mut numbers = DeviceVec::<u8>::new(&rig.device, &stream, 100).unwrap();
    numbers.resize(100, 1).unwrap();
    let tensor = Tensor::of::<u8>(&[100])
        .export(numbers, &Consumer::Synchronized)
        .unwrap();
    rig.device
        .on_drop_failure(Some(Arc::new(|_| panic!("a hook that panics"))));
    rig.faults
        .arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemUnmap));
    drop(tensor);
    assert!(rig.device.drop_failures() > 0);
}

/// After the failure of any driver call of an export, the owner is returned and the next attempt
/// succeeds.
#[test]
fn an_export_that_fails_hands_the_owner_back() {
    let rig = common::clean(common::host());
    let (pool, tenant, stream) = common::scene(&rig, 4);
    let tensor = Tensor::of::<u8>(&[4]);
    for homeless in [false, true] {
        let mut calls = 0;
        for n in 1.. {
            let block = if homeless {
                tenant.try_allocate(G).unwrap()
            } else {
                tenant.allocate_on(&stream, G).unwrap()
            };
            let before = (rig.machine.live(), pool.stats().tenants[0].leases);
            rig.faults.forget();
            rig.faults.arm(Fault::nth(n, CUresult::CUDA_ERROR_UNKNOWN));
            let outcome = tensor.export(block, &Consumer::Synchronized);
            let failed = rig.faults.injected() > 0;
            rig.faults.disarm();
            let refused = match (outcome, failed) {
                (Ok(_), false) => break,
                // A failed call that undoes something is retried.
                (Ok(_), true) => continue,
                (Err(refused), _) => refused,
            };
            assert!(
                failed
                    && matches!(
                        refused.reason,
                        Refusal::Memory(MemoryError::Call(CallError::Driver(_)))
                    )
            );
            assert_eq!(
                format!("{:?}", rig.machine.live()),
                format!("{:?}", before.0)
            );
            assert_eq!(pool.stats().tenants[0].leases, before.1);
            assert_eq!(refused.owner.streams().is_none(), homeless);
            drop(
                tensor
                    .export(refused.owner, &Consumer::Synchronized)
                    .unwrap(),
            );
            calls = n;
        }
        // A stream is waited for twice if the driver fails once.
        assert_eq!(calls > 0, homeless);
    }
    drop((tenant, stream));
    pool.close().unwrap();
}

#[test]
fn a_forked_child_gives_nothing_back() {
    let rig = common::clean(common::host());
    let (pool, tenant, stream) = common::scene(&rig, 4);
    let block = tenant.allocate_on(&stream, G).unwrap();
    let mut numbers = DeviceVec::<u8>::new(&rig.device, &stream, 100).unwrap();
    numbers.resize(100, 1).unwrap();
    let whole = |bytes| Tensor::of::<u8>(&[bytes]);
    let block = whole(G as usize)
        .export(block, &Consumer::Synchronized)
        .unwrap();
    let numbers = whole(100).export(numbers, &Consumer::Synchronized).unwrap();
    let ours =
        Tensor::of::<u8>(&[4]).export(tenant.try_allocate(G).unwrap(), &Consumer::Synchronized);
    // SAFETY: the memory is mapped, and nothing writes to it.
    let imported = unsafe { Imported::new(&stream, ours.unwrap()) }.unwrap();
    rig.faults.forget();
    // SAFETY: the child only uses what this test created, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop((block, numbers, imported));
        let right = rig.faults.total() == 0 && rig.device.drop_failures() == 0;
        // SAFETY: ends the child without running any code of the parent's exit.
        unsafe { libc::_exit(i32::from(!right)) }
    }
    let mut status = -1;
    // SAFETY: waits for the child that was just created.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child's checks");
    assert_eq!(seen::<u8>(&block)[..3], [0; 3]);
    assert_eq!(seen::<u8>(&numbers), [1; 100]);
    drop((block, numbers, imported, tenant, stream));
    pool.close().unwrap();
}

/// A tensor as another library would make it, and its owner, whose count shows whether the deleter
/// ran.
fn foreign(rig_device: &Device, numbers: &[u32]) -> (Tensor, Arc<DeviceVec<u32>>) {
    let stream = Stream::new(rig_device).unwrap();
    let mut vec = DeviceVec::new(rig_device, &stream, numbers.len()).unwrap();
    vec.extend_from_slice(numbers).unwrap();
    (Tensor::of::<u32>(&[numbers.len()]), Arc::new(vec))
}

fn import(stream: &Stream, tensor: versioned::Dlpack) -> Imported {
    // SAFETY: the tensors that this file exports describe their memory truthfully.
    unsafe { Imported::new(stream, tensor) }.unwrap()
}

#[test]
fn an_imported_tensor_is_read_and_written_and_let_go_of_once() {
    let rig = common::clean(common::host());
    let stream = Stream::new(&rig.device).unwrap();
    let (tensor, theirs) = foreign(&rig.device, &[1, 2, 3, 4, 5, 6]);
    let exported = tensor
        .export(Arc::clone(&theirs), &Consumer::Synchronized)
        .unwrap();
    let mut imported = import(&stream, exported);
    assert_eq!((imported.shape(), imported.strides()), (&[6][..], &[1][..]));
    assert_eq!(imported.element(), DLDataType::U32);
    assert_eq!(
        (imported.address(), imported.size()),
        (theirs.address(), 24)
    );
    assert!(imported.is_on_host() && imported.is_compact() && !imported.is_read_only());
    assert_eq!(imported.home_stream(), &stream);
    let mut bytes = [0; 8];
    imported.read(4, &mut bytes).unwrap();
    assert_eq!(bytes, bytes_of(&[2, 3])[..]);
    imported.write(20, &60u32.to_le_bytes()).unwrap();
    assert_eq!(theirs.get(5).unwrap(), 60);
    let beyond = imported.read(21, &mut bytes[..4]);
    assert!(
        matches!(
            beyond,
            Err(TensorError::Argument(ArgumentError::OutOfRange { .. }))
        ),
        "{beyond:?}"
    );
    imported.read(24, &mut []).unwrap();

    // Kernels of the host driver can access host memory.
    assert_eq!(imported.view::<u32>().unwrap().len(), 6);
    assert_eq!(
        imported.view_mut::<u32>().unwrap().address(),
        theirs.address()
    );
    let other = imported.view::<f32>().err().unwrap();
    assert!(matches!(
        other,
        TensorError::OtherElements {
            found: DLDataType::U32,
            wanted: DLDataType::F32
        }
    ));
    assert_eq!(Arc::strong_count(&theirs), 2);
    drop(imported);
    assert_eq!(Arc::strong_count(&theirs), 1);
}

#[test]
fn an_imported_tensor_waits_for_our_work_before_it_goes() {
    let rig = common::host();
    let (home, other) = (
        Stream::new(&rig.device).unwrap(),
        Stream::new(&rig.device).unwrap(),
    );
    let (tensor, theirs) = foreign(&rig.device, &[0; 4]);
    let take = || {
        let exported = tensor
            .export(Arc::clone(&theirs), &Consumer::Synchronized)
            .unwrap();
        let mut imported = import(&home, exported);
        imported.record_use(&other).unwrap();
        imported
    };
    let queue = |byte| {
        rig.held_kernel(&other, &[], &[(theirs.address(), 16, byte)]);
    };
    // Dropped: the deleter is called only when the importer's work is done.
    let imported = take();
    queue(1);
    thread::scope(|scope| {
        let dropping = scope.spawn(|| drop(imported));
        thread::sleep(std::time::Duration::from_millis(5));
        assert!(!dropping.is_finished());
        assert_eq!(Arc::strong_count(&theirs), 2);
        rig.machine.release_all_streams(D0);
    });
    assert_eq!(Arc::strong_count(&theirs), 1);

    // Given back: the library's stream is ordered behind that work, and no thread waits.
    let producer = Stream::new(&rig.device).unwrap();
    let imported = take();
    queue(2);
    imported.give_back(&producer).unwrap();
    assert_eq!(Arc::strong_count(&theirs), 1);
    rig.kernel(&producer, &[], &[(theirs.address(), 8, 3)]);
    assert!(!producer.is_done().unwrap());
    rig.machine.release_all_streams(D0);
    assert_eq!(
        theirs.to_vec().unwrap(),
        [0x0303_0303, 0x0303_0303, 0x0202_0202, 0x0202_0202]
    );

    // A stream that cannot be synchronized keeps the tensor, unless no work is left on it.
    let imported = take();
    rig.faults
        .arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::StreamSynchronize));
    let kept = imported.close().unwrap_err();
    assert!(matches!(kept.reason, CloseRefusal::Call(_)));
    assert_eq!(Arc::strong_count(&theirs), 2);
    rig.faults.disarm();
    let foreign_stream = Stream::new(&common::model().device).unwrap();
    let kept = kept.owner.give_back(&foreign_stream).unwrap_err();
    assert!(matches!(
        kept.reason,
        CloseRefusal::Call(CallError::WrongDriver)
    ));
    kept.owner.close().unwrap();
    assert_eq!(Arc::strong_count(&theirs), 1);
    let imported = take();
    rig.faults
        .arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::StreamSynchronize));
    drop(imported);
    assert_eq!(
        (Arc::strong_count(&theirs), rig.device.drop_failures()),
        (2, 1)
    );
}

#[test]
fn a_lost_context_still_lets_go_of_a_tensor() {
    let rig = common::host();
    let stream = Stream::new(&rig.device).unwrap();
    let (tensor, theirs) = foreign(&rig.device, &[0; 4]);
    let exported = tensor
        .export(Arc::clone(&theirs), &Consumer::Synchronized)
        .unwrap();
    let imported = import(&stream, exported);
    rig.machine
        .lose_context(D0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(rig.device.synchronize().is_err());
    drop(imported);
    assert_eq!(Arc::strong_count(&theirs), 1);
    assert_eq!(rig.device.drop_failures(), 0);
}

#[test]
fn narrow_elements_go_out_and_come_in() {
    let rig = common::clean(common::host());
    let stream = Stream::new(&rig.device).unwrap();
    let (_, theirs) = foreign(&rig.device, &[1, 2, 3, 4, 5, 6]);
    let out = |tensor: &Tensor| tensor.export(Arc::clone(&theirs), &Consumer::Synchronized);
    let pair = DLDataType::new(DLDataTypeCode::FLOAT4_E2M1FN, 4, 2);
    for (element, shape, size) in [
        (DLDataType::F8E4M3FN, [3, 8], 24),
        (DLDataType::F8E5M2, [3, 5], 15),
        (DLDataType::F8E8M0FNU, [2, 1], 2),
        (DLDataType::F4E2M1FN, [3, 8], 12),
        (DLDataType::F4E2M1FN, [3, 5], 8),
        (pair, [3, 8], 24),
        (DLDataType::F6E3M2FN, [3, 5], 12),
    ] {
        let exported = out(&Tensor::new(element, &shape)).unwrap();
        let view = exported.validate().unwrap();
        assert_eq!((view.dtype(), view.shape().len()), (element, 2));
        let imported = import(&stream, exported);
        assert_eq!(
            (imported.element(), imported.size()),
            (element, size),
            "{element:?}"
        );
        let mut bytes = vec![0; size as usize];
        imported.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, bytes_of(&[1, 2, 3, 4, 5, 6])[..size as usize]);
        assert!(imported.read(1, &mut bytes).is_err(), "past the last byte");
    }
    // As many bytes as elements, if the other library says that each takes one.
    let exported = out(&Tensor::new(DLDataType::F4E2M1FN, &[3, 8])).unwrap();
    // SAFETY: nothing else accesses the descriptor, and the memory has as many bytes.
    unsafe { (*exported.as_ptr()).flags = DlpackFlags::IS_SUBBYTE_TYPE_PADDED };
    assert_eq!(import(&stream, exported).size(), 24);

    // A number of bits that is not the type's is refused on both ways.
    let wrong = DLDataType::new(DLDataTypeCode::FLOAT4_E2M1FN, 8, 1);
    let is_refused = |reason: &TensorError| matches!(*reason, TensorError::ElementBits { found, expected: 4 } if found == wrong);
    let reason = out(&Tensor::new(wrong, &[3])).err().unwrap().reason;
    assert!(is_refused(&reason), "{reason}");
    let exported = out(&Tensor::new(pair, &[3])).unwrap();
    // SAFETY: nothing else accesses the descriptor.
    unsafe { (*exported.as_ptr()).dl_tensor.dtype = wrong };
    // SAFETY: the import must refuse the descriptor before it uses any memory.
    let refused = unsafe { Imported::new(&stream, exported) }.unwrap_err();
    assert!(is_refused(&refused.reason), "{}", refused.reason);
    drop(refused);
    assert_eq!(Arc::strong_count(&theirs), 1);
}

#[test]
fn what_is_imported_is_looked_at() {
    let rig = common::clean(common::host());
    let stream = Stream::new(&rig.device).unwrap();
    let (_, theirs) = foreign(&rig.device, &[1, 2, 3, 4, 5, 6]);
    let taken = |tensor: Tensor, change: &dyn Fn(&mut DLManagedTensorVersioned)| {
        let tensor = tensor
            .export(Arc::clone(&theirs), &Consumer::Synchronized)
            .unwrap();
        // SAFETY: nothing else accesses the descriptor.
        change(unsafe { &mut *tensor.as_ptr() });
        // SAFETY: the import must find the error in the descriptor before it uses any memory.
        unsafe { Imported::new(&stream, tensor) }
    };
    let six = || Tensor::of::<u32>(&[6]);
    let two_by_three = || Tensor::of::<u32>(&[2, 3]);
    fn set(strides: *mut i64, dimension: usize, stride: i64) {
        // SAFETY: the strides are in the descriptor's own memory.
        unsafe { *strides.add(dimension) = stride };
    }

    let refused = taken(six(), &|tensor| tensor.dl_tensor.device = DLDevice::cuda(0)).unwrap_err();
    assert!(matches!(
        refused.reason,
        TensorError::WrongDevice { found, device } if found == DLDevice::cuda(0) && device == D0
    ));
    // The refusal returns the tensor unchanged.
    assert_eq!(Arc::strong_count(&theirs), 2);
    drop(refused);
    assert_eq!(Arc::strong_count(&theirs), 1);

    let refused = taken(six(), &|tensor| set(tensor.dl_tensor.strides, 0, -1));
    assert!(matches!(
        refused.unwrap_err().reason,
        TensorError::NegativeStride {
            dimension: 0,
            stride: -1
        }
    ));
    let refused = taken(six(), &|tensor| {
        tensor.dl_tensor.data = std::ptr::null_mut()
    });
    assert!(matches!(
        refused.unwrap_err().reason,
        TensorError::Argument(ArgumentError::OutOfRange { .. })
    ));
    let refused = taken(six(), &|tensor| tensor.dl_tensor.byte_offset = u64::MAX - 5);
    assert!(matches!(
        refused.unwrap_err().reason,
        TensorError::Argument(ArgumentError::OutOfRange { .. })
    ));
    let refused = taken(six(), &|tensor| tensor.dl_tensor.ndim = -1);
    assert!(matches!(
        refused.unwrap_err().reason,
        TensorError::Imported(_)
    ));

    // `byte_offset` is honored, and strides of dimensions of length 1 are ignored.
    let second = taken(Tensor::of::<u32>(&[5]), &|tensor| {
        tensor.dl_tensor.byte_offset = 4
    })
    .unwrap();
    assert_eq!(second.address().0, theirs.address().0 + 4);
    let row = taken(Tensor::of::<u32>(&[1, 6]), &|tensor| {
        set(tensor.dl_tensor.strides, 0, 1)
    })
    .unwrap();
    assert!(row.is_compact());
    let none = taken(Tensor::of::<u32>(&[0, 6]), &|tensor| {
        set(tensor.dl_tensor.strides, 0, -7)
    })
    .unwrap();
    assert_eq!((none.size(), none.address().0), (0, 0));
    none.read(0, &mut []).unwrap();

    // Bytes can be copied from any offset. A kernel requires aligned elements.
    let mut odd = taken(Tensor::of::<u32>(&[5]), &|tensor| {
        tensor.dl_tensor.byte_offset = 2
    })
    .unwrap();
    let misaligned = odd.view::<u32>().unwrap_err();
    assert!(matches!(
        misaligned,
        TensorError::Argument(ArgumentError::Misaligned { value, multiple: 4, .. })
            if value == theirs.address().0 + 2
    ));
    assert!(odd.view_mut::<u32>().is_err());
    let mut bytes = [0; 4];
    odd.read(2, &mut bytes).unwrap();
    assert_eq!(bytes, bytes_of(&[2])[..]);
    drop(odd);

    let turned = taken(two_by_three().strides(&[1, 2]), &|_| ()).unwrap();
    let mut bytes = [0; 4];
    assert!(matches!(
        turned.read(0, &mut bytes),
        Err(TensorError::NotCompact { shape, strides }) if shape == [2, 3] && strides == [1, 2]
    ));
    assert!(matches!(
        turned.view::<u32>(),
        Err(TensorError::NotCompact { .. })
    ));
    let mut fixed = taken(six().read_only(), &|_| ()).unwrap();
    assert!(matches!(fixed.write(0, &[1]), Err(TensorError::ReadOnly)));
    assert!(matches!(
        fixed.view_mut::<u32>(),
        Err(TensorError::ReadOnly)
    ));
    fixed.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, 1u32.to_le_bytes());
    assert!(matches!(
        fixed.record_use(&Stream::new(&rig.second()).unwrap()),
        Err(TensorError::Argument(ArgumentError::WrongDevice { .. }))
    ));
    drop((second, row, none, turned, fixed));
    assert_eq!(Arc::strong_count(&theirs), 1);
}
