//! cudarc over the stand-in for libcuda: the whole of both libraries, without a GPU.
//!
//! Each case runs in a process of its own, whose loader finds the stand-in, and at whose end everything
//! is counted.
//!
//! `unsafe` here: calling what the stand-in has for tests, and doing what a rule forbids, to see that it
//! would show.
#![allow(
    unsafe_code,
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

#[path = "cudarc/cases.rs"]
mod cases;
#[path = "../examples/cudarc_slices.rs"]
mod cudarc_slices;
#[path = "cudarc/stand_in.rs"]
mod stand_in;

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, DevicePtr, SyncOnDrop};
use cuvmm::cudarc::{Context, Leased, Slice};
use cuvmm::driver::{CUresult, auto};
use cuvmm::error::{ArgumentError, CallError, CudarcError, MemoryError};
use cuvmm::{DeviceVec, Limit, Pool};
use stand_in::{hold, let_go};

stand_in::on_stand_in! {
    /// A use on a stream that the owner does not know is over when cudarc returns.
    fn a_stream_that_is_not_known_is_waited_for() {
        let rig = cases::rig();
        let mut slice = Slice::new(rig.vec(&[1, 2, 3])).unwrap();
        let other = rig.context.as_cudarc().new_stream().unwrap();
        let mut copy = rig.theirs.alloc_zeros::<u32>(3).unwrap();
        rig.theirs.synchronize().unwrap();

        hold(&other);
        let done = std::thread::scope(|scope| {
            let copying = scope.spawn(|| other.memcpy_dtod(&slice, &mut copy).unwrap());
            std::thread::sleep(Duration::from_millis(50));
            let early = copying.is_finished();
            let_go(&other);
            copying.join().unwrap();
            !early
        });
        assert!(done, "it returned while the stream was held back");
        assert_eq!(rig.seen(&copy), [1, 2, 3]);

        // Behind what the home stream has queued.
        hold(&rig.theirs);
        rig.theirs.memcpy_htod(&[4, 5, 6], &mut slice).unwrap();
        std::thread::scope(|scope| {
            let copying = scope.spawn(|| other.memcpy_dtod(&slice, &mut copy).unwrap());
            std::thread::sleep(Duration::from_millis(50));
            assert!(!copying.is_finished());
            let_go(&rig.theirs);
            copying.join().unwrap();
        });
        assert_eq!(rig.seen(&copy), [4, 5, 6]);
        drop((slice, copy, other));
        rig.nothing_went_wrong();
    }

    /// A use on a stream that was recorded is not waited for; whoever has the memory next comes behind
    /// it. cudarc's events have no part in that.
    fn a_stream_that_was_recorded_keeps_the_memory() {
        let rig = cases::rig();
        // SAFETY: everything is written before another stream reads it, and the memory waits for both.
        unsafe { rig.context.as_cudarc().disable_event_tracking() };
        let g = rig.g();
        let pool = Pool::builder(rig.context.device()).limit(Limit::Bytes(g));
        let pool = pool.build().unwrap();
        let tenant = pool.tenant("a").register().unwrap();
        let [other, third] = [(), ()].map(|()| rig.context.as_cudarc().new_stream().unwrap());
        let mut copy = rig.theirs.alloc_zeros::<u32>((g / 4) as usize).unwrap();

        let block = tenant.allocate_on(&rig.ours, g).unwrap();
        let address = block.address();
        let mut slice = Slice::<u32, _>::new(Leased::from(block)).unwrap();
        slice.record_use(&rig.context.stream(&other).unwrap()).unwrap();
        rig.theirs.memcpy_htod(&[1, 2, 3], &mut slice).unwrap();
        hold(&other);
        other.memcpy_dtod(&slice, &mut copy).unwrap();
        drop(slice);

        let ours = rig.context.stream(&third).unwrap();
        let next = tenant.allocate_on(&ours, g).unwrap();
        assert_eq!(next.address(), address, "the same memory");
        let mut next = Slice::<u32, _>::new(Leased::from(next)).unwrap();
        third.memset_zeros(&mut next).unwrap();
        let_go(&other);
        assert_eq!(rig.seen(&copy)[..3], [1, 2, 3]);
        assert_eq!(third.clone_dtoh(&next).unwrap()[..3], [0; 3]);
        drop((next, copy, other));
        rig.nothing_went_wrong();
    }

    /// A vector that lent its elements gives memory up behind every stream that it was told of, and
    /// a lent slice knows those.
    fn what_a_container_was_told_its_slices_know() {
        let rig = cases::rig();
        let other = rig.context.as_cudarc().new_stream().unwrap();
        let mut vec = rig.vec(&[7]);
        vec.try_resize(1 << 20, 7).unwrap();
        vec.record_use(&rig.context.stream(&other).unwrap()).unwrap();
        let mut copy = rig.theirs.alloc_zeros::<u32>(vec.len()).unwrap();
        hold(&other);
        let slice = Slice::new(vec.view()).unwrap();
        other.memcpy_dtod(&slice, &mut copy).unwrap();
        drop(slice);
        vec.truncate(1);
        assert_eq!(vec.shrink_to_fit().unwrap(), 0, "the copy has not run");
        let_go(&other);
        assert!(vec.shrink_to_fit().unwrap() > 0);
        assert!(rig.seen(&copy).iter().all(|&number| number == 7));
        drop((vec, copy, other));
        rig.nothing_went_wrong();
    }

    /// Uses of several streams are ordered by cudarc's events, from slice to slice too.
    fn streams_come_behind_each_other() {
        let rig = cases::rig();
        let other = rig.context.as_cudarc().new_stream().unwrap();
        let mut vec = rig.vec(&[0; 3]);
        vec.record_use(&rig.context.stream(&other).unwrap()).unwrap();
        let mut copy = rig.theirs.alloc_zeros::<u32>(3).unwrap();
        rig.theirs.synchronize().unwrap();
        hold(&rig.theirs);
        let mut slice = Slice::new(vec.view_mut()).unwrap();
        rig.theirs.memcpy_htod(&[1, 2, 3], &mut slice).unwrap();
        drop(slice);
        // A slice that has seen nothing of that.
        let mut slice = Slice::new(vec.view_mut()).unwrap();
        other.memcpy_dtod(&slice, &mut copy).unwrap();
        rig.theirs.memcpy_htod(&[9; 3], &mut slice).unwrap();
        drop(slice);
        let_go(&rig.theirs);
        assert_eq!(rig.seen(&copy), [1, 2, 3]);
        assert_eq!(vec.to_vec().unwrap(), [9; 3]);
        drop((vec, copy, other));
        rig.nothing_went_wrong();
    }

    /// Nobody need drop a slice for the memory to be safe.
    fn a_forgotten_slice_hides_no_use() {
        let rig = cases::rig();
        let other = rig.context.as_cudarc().new_stream().unwrap();
        let mut vec = rig.vec(&[1, 2, 3]);
        vec.record_use(&rig.context.stream(&other).unwrap()).unwrap();
        let mut copy = rig.theirs.alloc_zeros::<u32>(3).unwrap();
        rig.theirs.synchronize().unwrap();
        hold(&other);
        let slice = Slice::new(vec.view()).unwrap();
        other.memcpy_dtod(&slice, &mut copy).unwrap();
        std::mem::forget(slice);
        vec.clear();
        assert_eq!(vec.shrink_to_fit().unwrap(), 0, "the copy has not run");
        let_go(&other);
        assert_eq!(rig.seen(&copy), [1, 2, 3]);
        rig.nothing_went_wrong();
        // What was forgotten holds events and a reference to the stream for good.
        stand_in::leaks(&["streams", "events", "retained"]);
    }

    /// What a dropped `CudaSlice` of ours would do, so that the other cases are known to see it.
    fn a_free_that_is_not_cudarcs_would_show() {
        let rig = cases::rig();
        let slice = Slice::new(rig.vec(&[1, 2, 3])).unwrap();
        // SAFETY: it is dropped against the rule: the stand-in refuses to free a mapping.
        let (theirs, vec) = unsafe { slice.into_parts() };
        drop(theirs);
        let error = rig.context.as_cudarc().check_err().unwrap_err();
        assert_eq!(error.0 as i32, 1, "{error}");
        assert_eq!(vec.to_vec().unwrap(), [1, 2, 3]);
        drop(vec);
        rig.nothing_went_wrong();
    }

    /// While cudarc tracks no events, none are made, and what is not known is waited for all the same.
    fn without_cudarcs_events() {
        let context = Context::open(0).unwrap();
        // SAFETY: the streams below are waited for.
        unsafe { context.as_cudarc().disable_event_tracking() };
        let theirs = context.as_cudarc().new_stream().unwrap();
        let ours = context.stream(&theirs).unwrap();
        let mut vec = DeviceVec::<u32>::new(context.device(), &ours, 8).unwrap();
        vec.try_extend_from_slice(&[1, 2, 3]).unwrap();
        let events = stand_in::live()[5];
        let slice = Slice::new(vec.view()).unwrap();
        assert_eq!(stand_in::live()[5], events);
        let other = context.as_cudarc().default_stream();
        let (_, known) = slice.device_ptr(&theirs);
        let (_, unknown) = slice.device_ptr(&other);
        assert!(matches!(known, SyncOnDrop::Record(None)));
        assert!(matches!(unknown, SyncOnDrop::Sync(Some(_))));
        drop((known, unknown));
        drop(slice);

        let mut slice = Slice::new(vec.view_mut()).unwrap();
        let mut copy = theirs.alloc_zeros::<u32>(3).unwrap();
        hold(&theirs);
        theirs.memcpy_htod(&[4, 5, 6], &mut slice).unwrap();
        std::thread::scope(|scope| {
            let copying = scope.spawn(|| other.memcpy_dtod(&slice, &mut copy).unwrap());
            std::thread::sleep(Duration::from_millis(50));
            assert!(!copying.is_finished(), "it came before the home stream's work");
            let_go(&theirs);
            copying.join().unwrap();
        });
        assert_eq!(theirs.clone_dtoh(&copy).unwrap(), [4, 5, 6]);
        drop((slice, copy));
        drop(vec);
        context.as_cudarc().check_err().unwrap();
    }

    /// The default stream has one handle in every context.
    fn another_contexts_default_stream_is_another() {
        let context = Context::open(0).unwrap();
        let theirs = context.as_cudarc().default_stream();
        let ours = context.stream(&theirs).unwrap();
        let mut vec = DeviceVec::<u32>::new(context.device(), &ours, 8).unwrap();
        vec.try_push(1).unwrap();
        let second = Context::open(1).unwrap();
        let foreign = second.as_cudarc().default_stream();
        assert!(matches!(
            context.stream(&foreign),
            Err(CudarcError::WrongContext)
        ));
        let mut slice = Slice::new(vec).unwrap();
        let (_, known) = slice.device_ptr(&theirs);
        let (_, unknown) = slice.device_ptr(&foreign);
        assert!(matches!(known, SyncOnDrop::Record(_)));
        assert!(matches!(unknown, SyncOnDrop::Sync(Some(_))));
        drop((known, unknown));
        let foreign = second.stream(&foreign).unwrap();
        assert!(matches!(
            slice.record_use(&foreign),
            Err(CudarcError::Argument(ArgumentError::WrongDevice { .. }))
        ));
        let vec = slice.into_memory();
        let other = DeviceVec::<u32>::new(second.device(), &ours, 8);
        assert!(other.is_err());
        drop(vec);
        context.as_cudarc().check_err().unwrap();
    }

    fn a_lost_context_lends_nothing() {
        let rig = cases::rig();
        let vec = rig.vec(&[1]);
        let slice = Slice::new(vec.view()).unwrap();
        stand_in::lose_the_context();
        let code = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
        assert!(
            matches!(Slice::new(vec.view()).unwrap_err(), CudarcError::Cudarc(found) if found == code),
            "found by cudarc, where it would panic"
        );
        let lost = rig.ours.synchronize().unwrap_err();
        let refused = Slice::new(vec.view()).unwrap_err();
        assert!(
            matches!(refused, CudarcError::Memory(MemoryError::Call(CallError::ContextLost(_)))),
            "{lost} {refused:?}"
        );
        drop(slice);
        drop(vec);
        assert_eq!(rig.context.device().drop_failures(), 0);
    }

    /// A forked child gives nothing back that is its parent's.
    fn a_forked_child_drops_nothing() {
        let rig = cases::rig();
        let slice = Slice::new(rig.vec(&[1, 2, 3])).unwrap();
        let before = stand_in::live();
        // SAFETY: the child drops a slice, counts, and ends.
        match unsafe { libc::fork() } {
            0 => {
                drop(slice);
                let same = stand_in::live() == before;
                // SAFETY: it ends the child without running anything else.
                unsafe { libc::_exit(i32::from(!same)) }
            }
            child => {
                let mut status = -1;
                // SAFETY: the child is this process's, and the result goes to a local.
                let ended = unsafe { libc::waitpid(child, &mut status, 0) };
                assert_eq!((ended, status), (child, 0));
            }
        }
        assert_eq!(slice.into_memory().to_vec().unwrap(), [1, 2, 3]);
        rig.nothing_went_wrong();
    }

    fn the_example() {
        cudarc_slices::main().unwrap();
    }
}

stand_in::cases_on_stand_in!(
    copies_go_in_and_out,
    every_container_lends,
    a_clone_outlives_what_it_was_made_of,
    the_frameworks_own_go_first,
    a_slice_can_be_taken_apart_and_given_back,
    a_block_is_asked_when_the_slice_is_made,
    what_does_not_fit_is_refused_and_handed_back,
    an_error_that_cudarc_kept_is_told,
    a_context_of_another_device_than_it_says_is_refused,
);

/// cudarc asks the loader for other names first than this library does.
#[test]
fn another_copy_of_the_driver_is_refused() {
    stand_in::run("two_drivers", stand_in::Library::Twice);
}

#[test]
#[ignore = "wants two copies of the stand-in; `another_copy_of_the_driver_is_refused` runs it"]
fn two_drivers() {
    let refused = Context::open(0).unwrap_err();
    let CudarcError::Driver(auto::OpenError::NotCurrent { current: 0, .. }) = refused else {
        panic!("{refused:?}");
    };
    let context = CudaContext::new(0).unwrap();
    assert!(Context::new(&context).is_err());
    assert_eq!(Arc::strong_count(&context), 1, "nothing is kept");
    drop(context);
    stand_in::ended();
}

/// Where cudarc would panic there is an error.
#[test]
fn without_a_driver_it_is_an_error() {
    match Context::open(0) {
        Ok(context) => assert_eq!(context.device().ordinal().0, 0),
        Err(error) => assert!(matches!(error, CudarcError::Driver(_)), "{error:?}"),
    }
}

// With other features the compiler names things by other paths: recorded with all of them.
#[cfg(feature = "dlpack")]
#[test]
fn what_the_types_forbid_does_not_compile() {
    cases::is_sent_and_shared();
    trybuild::TestCases::new().compile_fail("tests/cudarc/compile_fail/*.rs");
}
