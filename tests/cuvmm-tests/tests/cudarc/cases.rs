//! Cases that hold on a GPU and on the stand-in alike.
//!
//! `unsafe` is used for access to cudarc's own slices, within its rules.
#![allow(unsafe_code, dead_code)]

use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::sys::CUresult as TheirCode;
use cudarc::driver::{
    CudaContext, CudaStream, DevicePtr, DeviceSlice, DriverError, LaunchArgs, PushKernelArg,
};
use cuvmm::cudarc::{Committed, Context, Leased, MemoryMut, Part, PartMut, Slice};
use cuvmm::driver::{CUresult, StreamHandle};
use cuvmm::error::{ArgumentError, CudarcError, MemoryError};
use cuvmm::sparse::Holes;
use cuvmm::{
    Contents, CowBuffer, DeviceVec, Limit, Pool, Region, RingBuffer, SparseArray, Stream,
    UnifiedBuffer,
};

/// A context of cudarc's, and a stream as both libraries see it.
pub struct Rig {
    pub context: Context,
    pub theirs: Arc<CudaStream>,
    pub ours: Stream,
}

pub fn rig() -> Rig {
    let context = Context::open(0).unwrap();
    let theirs = context.as_cudarc().new_stream().unwrap();
    let ours = context.stream(&theirs).unwrap();
    Rig {
        context,
        theirs,
        ours,
    }
}

impl Rig {
    pub fn vec(&self, elements: &[u32]) -> DeviceVec<u32> {
        let mut vec = DeviceVec::new(self.context.device(), &self.ours, 1 << 20).unwrap();
        vec.extend_from_slice(elements).unwrap();
        vec
    }

    pub fn pool(&self) -> Pool {
        let pool = Pool::builder(self.context.device()).limit(Limit::Bytes(64 << 20));
        pool.build().unwrap()
    }

    pub fn g(&self) -> u64 {
        self.context.device().granularity()
    }

    /// Reads a slice with cudarc.
    pub fn seen<S: DevicePtr<u32>>(&self, slice: &S) -> Vec<u32> {
        self.theirs.clone_dtoh(slice).unwrap()
    }

    /// Checks that no drop failed, and that cudarc recorded no error, such as freeing memory that
    /// it does not own.
    pub fn nothing_went_wrong(&self) {
        self.theirs.synchronize().unwrap();
        self.context.as_cudarc().check_err().unwrap();
        assert_eq!(self.context.device().drop_failures(), 0);
        assert_eq!(self.context.device().lost(), None);
    }
}

pub fn copies_go_in_and_out() {
    let rig = rig();
    let numbers: Vec<u32> = (0..5_000).collect();
    let mut vec = rig.vec(&numbers);
    let slice = Slice::new(vec.view()).unwrap();
    assert_eq!(slice.len(), 5_000);
    assert_eq!(slice.num_bytes(), 20_000);
    assert_eq!(slice.stream(), &rig.theirs);
    assert_eq!(rig.seen(&slice), numbers);
    assert_eq!(
        rig.seen(&slice.try_slice(17..19).unwrap()),
        &numbers[17..19]
    );
    assert!(slice.try_slice(4_999..5_001).is_none());
    drop(slice);

    let mut slice = Slice::new(vec.view_mut()).unwrap();
    rig.theirs.memcpy_htod(&[7, 8, 9], &mut slice).unwrap();
    let (mut first, mut rest) = slice.try_split_at_mut(4_900).unwrap();
    rig.theirs.memset_zeros(&mut rest).unwrap();
    rig.theirs.memcpy_htod(&[1; 50], &mut rest).unwrap();
    rig.theirs.memcpy_dtod(&rest, &mut first).unwrap();
    let mut end = slice.try_slice_mut(4_998..5_000).unwrap();
    rig.theirs.memcpy_htod(&[3, 4], &mut end).unwrap();
    assert!(slice.try_split_at_mut(5_001).is_none());
    drop(slice);
    let seen = vec.to_vec().unwrap();
    assert_eq!(&seen[..50], &[1; 50]);
    assert_eq!(&seen[50..100], &[0; 50]);
    assert_eq!(&seen[100..4_900], &numbers[100..4_900]);
    assert_eq!(&seen[4_900..4_950], &[1; 50]);
    assert_eq!(&seen[4_950..4_998], &[0; 48]);
    assert_eq!(&seen[4_998..], &[3, 4]);
    drop(vec);
    rig.nothing_went_wrong();
}

/// Reads and writes the elements through cudarc.
fn doubled<M: MemoryMut<u32>>(rig: &Rig, memory: M) -> M {
    let mut slice = Slice::<u32, M>::new(memory).unwrap();
    let twice: Vec<u32> = rig.seen(&slice).iter().map(|number| 2 * number).collect();
    rig.theirs.memcpy_htod(&twice, &mut slice).unwrap();
    slice.into_memory()
}

pub fn every_container_lends() {
    let rig = rig();
    let (device, g) = (rig.context.device(), rig.g());
    let vec = doubled(&rig, rig.vec(&[1, 2, 3]));
    assert_eq!(vec.to_vec().unwrap(), [2, 4, 6]);

    let mut cow = CowBuffer::<u32>::zeroed(device, &rig.ours, 4).unwrap();
    cow.write(0, &[1, 2, 3, 4]).unwrap();
    let before = cow.snapshot().unwrap();
    doubled(&rig, cow.make_mut(1..3).unwrap());
    let of = |cow: &CowBuffer<u32>| rig.seen(&Slice::new(cow.view()).unwrap());
    assert_eq!(
        (of(&cow), of(&before)),
        (vec![1, 4, 6, 4], vec![1, 2, 3, 4])
    );

    let mut ring = RingBuffer::<u32>::new(device, &rig.ours, 100).unwrap();
    let capacity = ring.capacity();
    ring.extend_from_slice(&vec![0; capacity - 2]).unwrap();
    ring.consume(capacity - 2).unwrap();
    // Across the end of the buffer.
    let mut vacant = Slice::new(ring.spare_capacity_mut()).unwrap();
    rig.theirs.memcpy_htod(&[5, 6, 7, 8], &mut vacant).unwrap();
    drop(vacant);
    ring.produce(4).unwrap();
    assert_eq!(rig.seen(&Slice::new(ring.filled()).unwrap()), [5, 6, 7, 8]);

    let tile = (g / 4) as usize;
    let mut sparse = SparseArray::<u32>::new(device, &rig.ours, 4 * tile).unwrap();
    sparse.commit(tile..2 * tile).unwrap();
    sparse.write(tile, &[9, 9], Holes::Refuse).unwrap();
    doubled(&rig, sparse.view_mut(tile..tile + 2).unwrap());
    let there = Slice::new(sparse.view(tile..tile + 2).unwrap()).unwrap();
    assert_eq!(rig.seen(&there), [18, 18]);
    drop(there);

    let mut unified = UnifiedBuffer::<u32>::zeroed(device, &rig.ours, 3).unwrap();
    unified.host_mut().unwrap().copy_from_slice(&[1, 2, 3]);
    doubled(&rig, unified.device_mut(&rig.ours).unwrap());
    let read = unified.device_read(&rig.ours).unwrap();
    assert_eq!(rig.seen(&Slice::new(read).unwrap()), [2, 4, 6]);
    assert_eq!(unified.host().unwrap()[..], [2, 4, 6]);

    let mut region = Region::reserve(device, 4 * g).unwrap();
    region.commit(g..2 * g).unwrap();
    region.fill(&rig.ours, g..g + 8, 1).unwrap();
    doubled(&rig, Committed::new(&region, g..g + 8, &rig.ours).unwrap());
    let mut bytes = [0; 12];
    region.read(&rig.ours, g, &mut bytes).unwrap();
    assert_eq!(bytes, [2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0]);

    let pool = rig.pool();
    let tenant = pool.tenant("a").register().unwrap();
    let block = tenant.allocate_on(&rig.ours, 4).unwrap();
    block.write(0, &21_u32.to_ne_bytes()).unwrap();
    doubled(&rig, Leased::of(&block));
    let block = doubled(&rig, Leased::from(block)).into_block().unwrap();
    let mut bytes = [0; 4];
    block.read(0, &mut bytes).unwrap();
    assert_eq!(u32::from_ne_bytes(bytes), 84);
    rig.nothing_went_wrong();
}

pub fn a_clone_outlives_what_it_was_made_of() {
    let rig = rig();
    let pool = rig.pool();
    let tenant = pool.tenant("a").register().unwrap();
    let block = tenant.allocate_on(&rig.ours, rig.g()).unwrap();
    let mut slice = Slice::<u32, _>::new(Leased::from(block)).unwrap();
    rig.theirs.memcpy_htod(&[1, 2, 3], &mut slice).unwrap();
    // SAFETY: the slices are only read, on the home stream.
    let copies = unsafe {
        let theirs = slice.as_cuda_slice();
        [theirs.clone(), rig.theirs.clone_dtod(&slice).unwrap()]
    };
    rig.theirs.memset_zeros(&mut slice).unwrap();
    drop(slice);
    drop((tenant, pool));
    for copy in copies {
        assert_eq!(rig.seen(&copy)[..3], [1, 2, 3]);
    }
    rig.nothing_went_wrong();
}

pub fn the_frameworks_own_go_first() {
    let context = Context::open(0).unwrap();
    let theirs = context.as_cudarc().new_stream().unwrap();
    let ours = context.stream(&theirs).unwrap();
    let device = context.device().clone();
    let mut vec = DeviceVec::<u32>::new(&device, &ours, 1 << 20).unwrap();
    let pool = Pool::builder(&device).build().unwrap();
    let tenant = pool.tenant("a").register().unwrap();
    let block = tenant.allocate_on(&ours, device.granularity()).unwrap();
    let (its, of_context) = (Arc::downgrade(&theirs), Arc::downgrade(context.as_cudarc()));
    drop((context, theirs, ours, tenant));

    vec.extend_from_slice(&[1, 2, 3]).unwrap();
    let slice = Slice::new(vec).unwrap();
    let leased = Slice::<u8, _>::new(Leased::from(block)).unwrap();
    drop((device, pool));
    let stream = Arc::clone(slice.stream());
    assert_eq!(stream.clone_dtoh(&slice).unwrap(), [1, 2, 3]);
    let vec = slice.into_memory();
    assert_eq!(vec.to_vec().unwrap(), [1, 2, 3]);
    let checked = Arc::clone(stream.context());
    drop((vec, stream));
    assert!(its.upgrade().is_some(), "the lease holds the home stream");
    drop(leased);
    assert!(its.upgrade().is_none(), "destroyed by cudarc");
    checked.check_err().unwrap();
    drop(checked);
    assert!(of_context.upgrade().is_none(), "released by cudarc");
}

pub fn a_slice_can_be_taken_apart_and_given_back() {
    let rig = rig();
    let slice = Slice::new(rig.vec(&[1, 2, 3])).unwrap();
    // SAFETY: used on the home stream, and ended before the vector is used otherwise.
    let (theirs, vec) = unsafe { slice.into_parts() };
    assert_eq!(rig.seen(&theirs), [1, 2, 3]);
    assert_eq!(theirs.leak(), vec.address().0);
    rig.nothing_went_wrong();

    let mut slice = Slice::new(vec).unwrap();
    // SAFETY: used on the home stream, and the slice is not moved out.
    let theirs = unsafe { slice.as_cuda_slice_mut() };
    rig.theirs.memset_zeros(theirs).unwrap();
    assert_eq!(slice.into_memory().to_vec().unwrap(), [0; 3]);
    rig.nothing_went_wrong();
}

pub fn a_block_is_asked_when_the_slice_is_made() {
    let rig = rig();
    let g = rig.g();
    let pool = rig.pool();
    let tenant = pool.tenant("a").register().unwrap();
    let block = tenant.block(2 * g).largest_extent(g).home_stream(&rig.ours);
    let block = block.allocate().unwrap();
    tenant.blocks().sleep(Contents::Discard).unwrap();
    let leased = Leased::of(&block);
    let refused = Slice::<u32, _>::new(leased).unwrap_err();
    assert!(
        matches!(refused.reason, CudarcError::Memory(MemoryError::Asleep(size)) if size == 2 * g)
    );
    tenant.blocks().wake().unwrap();
    let leased = doubled(&rig, refused.owner);
    // Shared after the lease was taken.
    let fork = block.fork(g, 2 * g).unwrap();
    for leased in [leased, Leased::of(&block), Leased::of(&fork)] {
        let refused = Slice::<u32, _>::new(leased).unwrap_err();
        assert!(matches!(
            refused.reason,
            CudarcError::Memory(MemoryError::ReadOnly(bytes)) if bytes == (0..g)
        ));
    }
    drop((block, fork, tenant, pool));
    rig.nothing_went_wrong();
}

pub fn what_does_not_fit_is_refused_and_handed_back() {
    let rig = rig();
    let device = rig.context.device();
    let per_thread = rig.context.as_cudarc().per_thread_stream();
    assert!(matches!(
        rig.context.stream(&per_thread),
        Err(CudarcError::PerThread)
    ));
    let default = rig.context.as_cudarc().default_stream();
    rig.context.stream(&default).unwrap();

    // A stream that a stream of cudarc keeps alive is not that stream.
    // SAFETY: it is a stream of the context, which outlives everything made from it here.
    let disguised = unsafe {
        let handle = StreamHandle(rig.theirs.cu_stream().addr() as u64);
        Stream::from_raw(device, handle, default.clone()).unwrap()
    };
    let vec = DeviceVec::<u32>::new(device, &disguised, 8).unwrap();
    let refused = Slice::new(vec).unwrap_err();
    assert!(matches!(refused.reason, CudarcError::NotOfCudarc));

    let own = Stream::new(device).unwrap();
    let mut vec = DeviceVec::<u32>::new(device, &own, 8).unwrap();
    vec.push(5).unwrap();
    let refused = Slice::new(vec.view()).unwrap_err();
    assert!(matches!(refused, CudarcError::NotOfCudarc));
    let refused = Slice::new(vec).unwrap_err();
    assert!(matches!(refused.reason, CudarcError::NotOfCudarc));
    assert_eq!(
        refused.owner.to_vec().unwrap(),
        [5],
        "returned to the caller"
    );

    let pool = rig.pool();
    let tenant = pool.tenant("a").register().unwrap();
    let homeless = tenant.block(8).allocate().unwrap();
    let refused = Slice::<u32, _>::new(Leased::of(&homeless)).unwrap_err();
    assert!(matches!(refused.reason, CudarcError::NotOfCudarc));
    let block = tenant.allocate_on(&rig.ours, 10).unwrap();
    let refused = Slice::<u32, _>::new(Leased::from(block)).unwrap_err();
    assert!(matches!(
        refused.reason,
        CudarcError::Argument(ArgumentError::Misaligned {
            value: 10,
            multiple: 4,
            ..
        })
    ));
    let block = refused.owner.into_block().unwrap();
    assert_eq!(block.size(), 10, "returned to the caller");
    let refused = Slice::<(), _>::new(Leased::from(block)).unwrap_err();
    assert!(matches!(
        refused.reason,
        CudarcError::Argument(ArgumentError::Zero { .. })
    ));

    let g = rig.g();
    let mut region = Region::reserve(device, 2 * g).unwrap();
    region.commit(0..g).unwrap();
    let refused = Committed::new(&region, 8..g + 8, &rig.ours).unwrap_err();
    assert!(matches!(
        refused,
        CudarcError::Memory(MemoryError::NotCommitted(bytes)) if bytes == (8..g + 8)
    ));
    let fork = region.fork(&[]).unwrap();
    let (start, end) = (8, 16);
    for side in [&region, &fork] {
        let refused = Committed::new(side, start..end, &rig.ours).unwrap_err();
        assert!(matches!(
            refused,
            CudarcError::Memory(MemoryError::ReadOnly(bytes)) if bytes == (8..16)
        ));
    }
    drop(fork);
    region.unshare(0..g, &rig.ours, &[]).unwrap();
    let odd = Committed::new(&region, 2..10, &rig.ours).unwrap();
    let (address, alignment) = (region.address().0 + 2, 4);
    assert!(matches!(
        Slice::<u32, _>::new(odd).unwrap_err(),
        CudarcError::Argument(ArgumentError::Misaligned { value, multiple, .. })
            if (value, multiple) == (address, alignment)
    ));
    rig.nothing_went_wrong();
}

pub fn an_error_that_cudarc_kept_is_told() {
    let rig = rig();
    let vec = rig.vec(&[1]);
    let kept = || {
        let error = DriverError(TheirCode::CUDA_ERROR_MAP_FAILED);
        rig.context.as_cudarc().record_err::<()>(Err(error));
    };
    let code = CUresult::CUDA_ERROR_MAP_FAILED;
    kept();
    assert!(matches!(
        Slice::new(vec.view()).unwrap_err(),
        CudarcError::Cudarc(found) if found == code
    ));
    kept();
    let refused = Context::new(rig.context.as_cudarc()).unwrap_err();
    assert!(matches!(refused, CudarcError::Cudarc(found) if found == code));
    assert!(refused.to_string().contains("CUDA_ERROR_MAP_FAILED"));
    // Recorded once.
    assert_eq!(rig.seen(&Slice::new(vec.view()).unwrap()), [1]);
    rig.nothing_went_wrong();
}

pub fn a_context_of_another_device_than_it_says_is_refused() {
    let right = Context::open(0).unwrap();
    let context = right.as_cudarc();
    // SAFETY: the context belongs to its device. The value is never dropped, so the other owner
    // keeps it.
    let wrong = ManuallyDrop::new(unsafe {
        CudaContext::from_raw_context(7, context.cu_device(), context.cu_ctx()).unwrap()
    });
    let refused = Context::new(&wrong).unwrap_err();
    let (claimed, found) = (7, 0);
    assert!(
        matches!(
            refused,
            CudarcError::WrongDevice {
                claimed: 7,
                found: 0
            }
        ),
        "{claimed} {found} {refused:?}"
    );
    let stream = wrong.default_stream();
    assert!(matches!(
        right.stream(&stream),
        Err(CudarcError::WrongContext)
    ));
    context.check_err().unwrap();
}

/// Passes slices to a launch as cudarc's own are passed. The launch need not run.
pub fn is_an_argument<'a, M: MemoryMut<u32>>(
    launch: &mut LaunchArgs<'a>,
    slice: &'a Slice<u32, M>,
    written: &'a mut Slice<u32, M>,
    part: &'a Part<'a, u32>,
    part_mut: &'a mut PartMut<'a, u32>,
) {
    launch.arg(slice).arg(written).arg(part).arg(part_mut);
}

/// Checks that slices can be sent and shared between threads, like cudarc's.
pub fn is_sent_and_shared() {
    const fn check<T: Send + Sync>() {}
    check::<Slice<f32, DeviceVec<f32>>>();
    check::<Slice<u8, Leased>>();
    check::<Part<'static, f32>>();
    check::<Context>();
}
