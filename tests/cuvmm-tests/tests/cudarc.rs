//! cudarc over the stand-in for libcuda: both libraries as a whole, without a GPU.
//!
//! Each case runs in a process of its own, whose loader finds the stand-in. At its end everything
//! is counted.
//!
//! `unsafe` is used to call the stand-in's functions for tests, and to violate a rule, to see that
//! the violation would be noticed.
#![allow(unsafe_code)]

#[path = "cudarc/cases.rs"]
mod cases;
#[path = "../../../crates/cuvmm/examples/cudarc_slices.rs"]
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
use stand_in::{hold, release};

stand_in::on_stand_in! {
    /// A use on a stream that the owner does not know is complete when cudarc returns.
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
            release(&other);
            copying.join().unwrap();
            !early
        });
        assert!(done, "returned while the stream was held back");
        assert_eq!(rig.seen(&copy), [1, 2, 3]);

        // The use is ordered behind the home stream's work.
        hold(&rig.theirs);
        rig.theirs.memcpy_htod(&[4, 5, 6], &mut slice).unwrap();
        std::thread::scope(|scope| {
            let copying = scope.spawn(|| other.memcpy_dtod(&slice, &mut copy).unwrap());
            std::thread::sleep(Duration::from_millis(50));
            assert!(!copying.is_finished());
            release(&rig.theirs);
            copying.join().unwrap();
        });
        assert_eq!(rig.seen(&copy), [4, 5, 6]);
        drop((slice, copy, other));
        rig.nothing_went_wrong();
    }

    /// A use on a recorded stream is not waited for. The next owner of the memory is ordered behind
    /// it, independently of cudarc's events.
    fn a_stream_that_was_recorded_keeps_the_memory() {
        let rig = cases::rig();
        // SAFETY: every byte is written before another stream reads it, and the memory waits for
        // both streams.
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
        release(&other);
        assert_eq!(rig.seen(&copy)[..3], [1, 2, 3]);
        assert_eq!(third.clone_dtoh(&next).unwrap()[..3], [0; 3]);
        drop((next, copy, other));
        rig.nothing_went_wrong();
    }

    /// A vector that lends its elements gives memory up behind every stream that was recorded on
    /// it, and a lent slice knows these streams.
    fn what_a_container_was_told_its_slices_know() {
        let rig = cases::rig();
        let other = rig.context.as_cudarc().new_stream().unwrap();
        let mut vec = rig.vec(&[7]);
        vec.resize(1 << 20, 7).unwrap();
        vec.record_use(&rig.context.stream(&other).unwrap()).unwrap();
        let mut copy = rig.theirs.alloc_zeros::<u32>(vec.len()).unwrap();
        hold(&other);
        let slice = Slice::new(vec.view()).unwrap();
        other.memcpy_dtod(&slice, &mut copy).unwrap();
        drop(slice);
        vec.truncate(1);
        assert_eq!(vec.shrink_to_fit().unwrap(), 0, "the copy is pending");
        release(&other);
        assert!(vec.shrink_to_fit().unwrap() > 0);
        assert!(rig.seen(&copy).iter().all(|&number| number == 7));
        drop((vec, copy, other));
        rig.nothing_went_wrong();
    }

    /// cudarc's events order uses on several streams, also from one slice to the next.
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
        // A new slice, which has recorded none of these uses.
        let mut slice = Slice::new(vec.view_mut()).unwrap();
        other.memcpy_dtod(&slice, &mut copy).unwrap();
        rig.theirs.memcpy_htod(&[9; 3], &mut slice).unwrap();
        drop(slice);
        release(&rig.theirs);
        assert_eq!(rig.seen(&copy), [1, 2, 3]);
        assert_eq!(vec.to_vec().unwrap(), [9; 3]);
        drop((vec, copy, other));
        rig.nothing_went_wrong();
    }

    /// The memory is safe even if a slice is never dropped.
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
        assert_eq!(vec.shrink_to_fit().unwrap(), 0, "the copy is pending");
        release(&other);
        assert_eq!(rig.seen(&copy), [1, 2, 3]);
        rig.nothing_went_wrong();
        // A forgotten slice leaks its events and its reference to the stream.
        stand_in::leaks(&["streams", "events", "retained"]);
    }

    /// Shows that the other cases would notice if cudarc freed memory that it does not own.
    fn a_free_that_is_not_cudarcs_would_show() {
        let rig = cases::rig();
        let slice = Slice::new(rig.vec(&[1, 2, 3])).unwrap();
        // SAFETY: dropping the slice violates the rule, but the stand-in refuses to free a mapping.
        let (theirs, vec) = unsafe { slice.into_parts() };
        drop(theirs);
        let error = rig.context.as_cudarc().check_err().unwrap_err();
        assert_eq!(error.0 as i32, 1, "{error}");
        assert_eq!(vec.to_vec().unwrap(), [1, 2, 3]);
        drop(vec);
        rig.nothing_went_wrong();
    }

    /// If cudarc tracks no events, none are created, and uses on unknown streams are still waited
    /// for.
    fn without_cudarcs_events() {
        let context = Context::open(0).unwrap();
        // SAFETY: the streams below are synchronized.
        unsafe { context.as_cudarc().disable_event_tracking() };
        let theirs = context.as_cudarc().new_stream().unwrap();
        let ours = context.stream(&theirs).unwrap();
        let mut vec = DeviceVec::<u32>::new(context.device(), &ours, 8).unwrap();
        vec.extend_from_slice(&[1, 2, 3]).unwrap();
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
            assert!(!copying.is_finished(), "not ordered behind the home stream's work");
            release(&theirs);
            copying.join().unwrap();
        });
        assert_eq!(theirs.clone_dtoh(&copy).unwrap(), [4, 5, 6]);
        drop((slice, copy));
        drop(vec);
        context.as_cudarc().check_err().unwrap();
    }

    /// The default stream has the same handle in every context.
    fn another_contexts_default_stream_is_another() {
        let context = Context::open(0).unwrap();
        let theirs = context.as_cudarc().default_stream();
        let ours = context.stream(&theirs).unwrap();
        let mut vec = DeviceVec::<u32>::new(context.device(), &ours, 8).unwrap();
        vec.push(1).unwrap();
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
            "an error where cudarc would panic"
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

    /// A forked child releases nothing of its parent's.
    fn a_forked_child_drops_nothing() {
        let rig = cases::rig();
        let slice = Slice::new(rig.vec(&[1, 2, 3])).unwrap();
        let before = stand_in::live();
        // SAFETY: the child drops a slice, counts, and ends.
        match unsafe { libc::fork() } {
            0 => {
                drop(slice);
                let same = stand_in::live() == before;
                // SAFETY: ends the child without running any other code.
                unsafe { libc::_exit(i32::from(!same)) }
            }
            child => {
                let mut status = -1;
                // SAFETY: the process is a child of this one, and the status is written to a local
                // variable.
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

/// cudarc asks the loader for other names first, so it may find another copy of the driver.
#[test]
fn another_copy_of_the_driver_is_refused() {
    stand_in::run("two_drivers", stand_in::Library::Twice);
}

#[test]
#[ignore = "needs two copies of the stand-in; `another_copy_of_the_driver_is_refused` runs it"]
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

/// Without a driver cudarc would panic; this is an error instead.
#[test]
fn without_a_driver_it_is_an_error() {
    match Context::open(0) {
        Ok(context) => assert_eq!(context.device().ordinal().0, 0),
        Err(error) => assert!(matches!(error, CudarcError::Driver(_)), "{error:?}"),
    }
}

#[test]
fn slices_are_sent_and_shared() {
    cases::is_sent_and_shared();
}
