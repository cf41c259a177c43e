//! Captures of other libraries: no wait, question or order of this library breaks one that it can
//! know of, and none draws a stream into it, whenever the capture begins.
//!
//! `unsafe` is used to begin captures on the machine itself, as another library would.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::captures::{before, begin, end};
use crate::common::{self, D0, G, Rig, pool, shareable, shareable_region};
use crate::on_both;
use cuvmm::dlpack::{Consumer, Tensor};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call, CaptureStatus, Driver, HandleTypes};
use cuvmm::error::{CallError, MemoryError, TensorError};
use cuvmm::share::{Manifest, Publisher};
use cuvmm::{Access, CowBuffer, DeviceVec, MemPool, Region, Stream, UnifiedBuffer};

fn status(rig: &Rig<impl Backing>, stream: &Stream) -> CaptureStatus {
    // SAFETY: the stream is alive.
    unsafe { rig.machine.capture_status(D0, stream.as_raw()) }.unwrap()
}

fn streams<B: Backing, const N: usize>(rig: &Rig<B>) -> [Stream; N] {
    [(); N].map(|()| Stream::new(&rig.device).unwrap())
}

/// Counts the calls that concern the whole context.
fn of_context(rig: &Rig<impl Backing>) -> u64 {
    rig.faults.count(Call::CtxSynchronize) + rig.faults.count(Call::CtxRecordEvent)
}

on_both! {
    fn a_stream_that_captures_is_not_waited_for_and_nothing_instead(rig) {
        let [home, theirs] = streams(rig);
        let mut cow = CowBuffer::<u8>::zeroed(&rig.device, &home, 16).unwrap();
        let mut vec = DeviceVec::<u8>::new(&rig.device, &home, 16).unwrap();
        vec.resize(16, 1).unwrap();
        let region = shareable_region(rig, 1);
        begin(&rig.machine, &home);
        begin(&rig.machine, &theirs);
        assert!(cow.snapshot().is_err());
        for failed in [region.read(&home, 0, &mut [0; 4]), region.write(&home, 0, &[0; 4])] {
            assert!(matches!(failed, Err(MemoryError::Capturing)), "{failed:?}");
        }
        assert!(vec.resize(1, 1).is_ok() && vec.shrink_to_fit().is_ok());
        let tensor = Tensor::of::<u8>(&[1]);
        if rig.keeps_bytes() {
            let refused = tensor.export(Arc::new(vec), &Consumer::Synchronized).err().unwrap();
            assert!(matches!(refused.reason, TensorError::NoOrder));
            vec = Arc::into_inner(refused.owner).unwrap();
        }
        rig.faults.forget();
        assert!(vec.read(0, &mut [0]).is_err());
        end(&rig.machine, &theirs);
        end(&rig.machine, &home);
        assert_eq!(rig.faults.count(Call::StreamSynchronize) + of_context(rig), 0);
        drop((vec, cow));
    }

    fn a_block_whose_stream_captures_is_not_published(rig) {
        let [home, theirs] = streams(rig);
        let folder = tempfile::tempdir().unwrap();
        let publisher = Publisher::bind(folder.path().join("socket")).unwrap();
        let (_pool, tenant) = common::with_tenant(shareable(rig, 8).build().unwrap());
        let block = tenant.allocate_on(&home, G).unwrap();
        begin(&rig.machine, &home);
        begin(&rig.machine, &theirs);
        let refused = publisher.publish("a", Manifest::default(), block).unwrap_err();
        end(&rig.machine, &theirs);
        end(&rig.machine, &home);
        publisher.publish("a", Manifest::default(), refused.owner).unwrap();
    }

    fn a_commit_in_a_tenant_whose_home_stream_captures_does_not_wait(rig) {
        let [home, theirs] = streams(rig);
        let pool = pool(rig, 8);
        let [a, b] = common::tenants(&pool);
        let long = Duration::from_secs(60);
        let region = a.region(4 * G).largest_extent(G).home_stream(&home);
        let mut region = region.timeout(long).reserve().unwrap();
        drop(b.block(8 * G).largest_extent(G).home_stream(&theirs).allocate().unwrap());
        begin(&rig.machine, &home);
        let begun = Instant::now();
        // The memory would have to be zeroed on the home stream.
        let refused = region.commit(0..4 * G).unwrap_err();
        assert!(refused.is_out_of_memory() && begun.elapsed() < long, "{refused}");
        end(&rig.machine, &home);
        region.commit(0..4 * G).unwrap();
    }

    // I-26
    fn a_capture_guard_excludes_what_concerns_the_context(rig) {
        let second = rig.second();
        let [theirs] = streams(rig);
        let folder = tempfile::tempdir().unwrap();
        let publisher = Publisher::bind(folder.path().join("socket")).unwrap();
        let pool = pool(rig, 8);
        // The memory is of the second device, and the first has access.
        let mut region = Region::reserve(&second, G).unwrap();
        region.commit(0..G).unwrap();
        region.grant(&rig.device, Access::ReadWrite).unwrap();
        let published = shareable_region(rig, 1);
        let mut unmapped = common::region(rig, G, G);
        unmapped.decommit(0..G).unwrap();
        let guard = pool.capture_guard();
        begin(&rig.machine, &theirs);
        rig.faults.forget();
        assert!(matches!(region.revoke(&rig.device), Err(MemoryError::InUse(_))));
        let refused = region.revoke_blocking(&rig.device);
        assert!(matches!(refused, Err(MemoryError::Call(CallError::Capturing))), "{refused:?}");
        let refused = publisher.publish("a", Manifest::default(), published).unwrap_err();
        assert_eq!(refused.owner.exported(), 0, "it is unchanged");
        assert_eq!(unmapped.purge().unwrap().given_back, 0);
        assert!(unmapped.purge_blocking().is_err());
        let mut exported = refused.owner;
        if rig.keeps_bytes() {
            for consumer in [Consumer::Synchronized, Consumer::PerThread] {
                let tensor = Tensor::of::<u8>(&[1]);
                let refused = tensor.export(exported, &consumer).err().unwrap();
                assert!(matches!(refused.reason, TensorError::NoOrder));
                exported = refused.owner;
            }
        }
        assert_eq!(of_context(rig), 0);
        end(&rig.machine, &theirs);
        drop(guard);
        region.revoke(&rig.device).unwrap();
        publisher.publish("a", Manifest::default(), exported).unwrap();
        unmapped.purge_blocking().unwrap();
    }

    // I-27
    fn a_capture_that_begins_before_an_event_is_recorded_is_not_broken(rig) {
        let [home] = streams(rig);
        let mut region = Region::reserve(&rig.device, G).unwrap();
        for over in [false, true] {
            region.commit(0..G).unwrap();
            rig.held_kernel(&home, &[], &[(region.address(), G, 1)]);
            region.decommit_after(0..G, std::slice::from_ref(&home)).unwrap();
            let begins = home.clone();
            before(rig, Call::EventRecord, 1, move |machine| begin(machine, &begins));
            if over {
                let (at, machine) = (home.clone(), Arc::clone(&rig.machine));
                let asked = AtomicU64::new(0);
                rig.faults.watch(Some(Arc::new(move |call| match call {
                    Call::EventRecord => begin(&machine, &at),
                    Call::StreamIsCapturing if asked.fetch_add(1, Ordering::SeqCst) == 1 => end(&machine, &at),
                    _ => {}
                })));
            }
            assert_eq!(region.purge().unwrap().given_back, 0);
            rig.faults.watch(None);
            for _ in 0..3 {
                assert_eq!(region.purge().unwrap().given_back, 0);
            }
            if !over {
                end(&rig.machine, &home);
            }
            assert_eq!(region.purge().unwrap().given_back, 0, "the kernel is queued");
            rig.machine.release_all_streams(D0);
            while region.purge().unwrap().given_back == 0 {}
        }
    }

    fn a_stream_is_not_drawn_into_a_capture_that_begins_meanwhile(rig) {
        let (_pool, tenant) = common::tenancy(rig, 1);
        let [home, other] = streams(rig);
        for (begins, call) in [(&home, Call::EventRecord), (&other, Call::StreamWaitEvent)] {
            let block = tenant.allocate_on(&home, G).unwrap();
            rig.held_kernel(&home, &[], &[(block.address(), G, 1)]);
            drop(block);
            let captures = begins.clone();
            before(rig, call, 1, move |machine| begin(machine, &captures));
            let early = tenant.allocate_on(&other, G);
            rig.faults.watch(None);
            assert!(early.is_err(), "its stream is not behind the kernel");
            match call {
                Call::EventRecord => {
                    assert_eq!(status(rig, &other), CaptureStatus::NONE);
                    end(&rig.machine, &home);
                }
                // The driver refuses the wait, which breaks the capture.
                // SAFETY: the stream is alive.
                _ => assert!(unsafe { rig.machine.capture_end(D0, other.as_raw()) }.is_err()),
            }
            let block = tenant.allocate_on(&other, G).unwrap();
            rig.machine.release_all_streams(D0);
            drop(block);
        }
    }

    fn memory_of_a_pool_does_not_draw_its_stream_into_a_capture(rig) {
        let [own, other] = streams(rig);
        let memory_pool = MemPool::builder(&rig.device).create().unwrap();
        let memory = memory_pool.allocate_on(&own, G).unwrap();
        let begins = own.clone();
        before(rig, Call::EventRecord, 1, move |machine| begin(machine, &begins));
        assert_eq!(memory.record_use(&other), Err(CallError::InUse));
        rig.faults.watch(None);
        assert_eq!(status(rig, &other), CaptureStatus::NONE);
        end(&rig.machine, &own);
        memory.record_use(&other).unwrap();
        let begins = other.clone();
        before(rig, Call::EventRecord, 1, move |machine| begin(machine, &begins));
        let refused = memory.close().unwrap_err();
        rig.faults.watch(None);
        assert_eq!(status(rig, &own), CaptureStatus::NONE);
        end(&rig.machine, &other);
        refused.owner.close().unwrap();
    }

    fn a_use_of_managed_memory_that_ends_in_a_capture_stays_open(rig) {
        let [stream, other] = streams(rig);
        let mut buffer = UnifiedBuffer::<u32>::zeroed(&rig.device, &other, 4).unwrap();
        drop(buffer.device_mut(&stream).unwrap());
        let access = buffer.device_mut(&stream).unwrap();
        let begins = stream.clone();
        before(rig, Call::EventRecord, 1, move |machine| begin(machine, &begins));
        drop(access);
        rig.faults.watch(None);
        assert!(buffer.host().is_err() && buffer.device_read(&other).is_err());
        end(&rig.machine, &stream);
        drop(buffer.device_read(&other).unwrap());
        assert!(buffer.host().is_ok());
    }

    fn managed_memory_is_waited_for_if_a_capture_took_in_the_end_of_its_use(rig) {
        let [stream, other] = streams(rig);
        type Use = fn(&mut UnifiedBuffer<u32>, &Stream);
        let uses: [Use; 4] = [
            |buffer, _| assert!(buffer.host().is_ok()),
            |buffer, other| drop(buffer.device_mut(other).unwrap()),
            // Its reader is looked at before another one begins.
            |buffer, other| drop(buffer.device_read(other).unwrap()),
            |_, _| {}
        ];
        for (nth, then) in uses.into_iter().enumerate() {
            let mut buffer = UnifiedBuffer::<u32>::zeroed(&rig.device, &other, 4).unwrap();
            drop(buffer.device_mut(&other).unwrap());
            rig.machine.hold_until_awaited(D0, stream.as_raw());
            let (at, machine) = (stream.clone(), Arc::clone(&rig.machine));
            let asked = AtomicU64::new(0);
            let watch = move |call| match call {
                Call::EventRecord => begin(&machine, &at),
                Call::StreamIsCapturing if asked.fetch_add(1, Ordering::SeqCst) == 1 => end(&machine, &at),
                _ => {}
            };
            let reads = nth == 2;
            let access = match reads {
                true => Err(buffer.device_read(&stream).unwrap()),
                false => Ok(buffer.device_mut(&stream).unwrap()),
            };
            rig.kernel(&stream, &[], &[]);
            rig.faults.watch(Some(Arc::new(watch)));
            drop(access);
            rig.faults.watch(None);
            then(&mut buffer, &other);
            drop(buffer);
            assert!(stream.is_done().unwrap(), "the use was waited for");
            assert_eq!(rig.device.drop_failures(), 0);
        }
    }

    fn a_stream_ends_beside_a_capture_of_another_library(rig) {
        let [theirs, one, other] = streams(rig);
        begin(&rig.machine, &theirs);
        assert!(one.try_end().unwrap());
        other.end().unwrap();
        end(&rig.machine, &theirs);
    }

    fn memory_is_not_published_while_a_stream_captures_that_its_registration_recorded(rig) {
        let [home, other] = streams(rig);
        let folder = tempfile::tempdir().unwrap();
        let publisher = Publisher::bind(folder.path().join("socket")).unwrap();
        let builder = Region::builder(&rig.device, G).shareable(HandleTypes::POSIX_FD);
        let mut vec = DeviceVec::<u8>::from_region(builder.reserve().unwrap(), &home).unwrap();
        vec.resize(16, 1).unwrap();
        let region = shareable_region(rig, 1);
        for registration in [vec.register().unwrap(), region.register(0..G).unwrap()] {
            registration.record_use(&other).unwrap();
        }
        let filled = shareable_region(rig, 1);
        filled.fill(&other, 0..G, 7).unwrap();
        begin(&rig.machine, &other);
        let vec = publisher.publish("a", Manifest::default(), vec).unwrap_err().owner;
        let region = publisher.publish("b", Manifest::default(), region).unwrap_err().owner;
        let filled = publisher.publish("c", Manifest::default(), filled).unwrap_err().owner;
        end(&rig.machine, &other);
        publisher.publish("a", Manifest::default(), vec).unwrap();
        publisher.publish("b", Manifest::default(), region).unwrap();
        publisher.publish("c", Manifest::default(), filled).unwrap();
    }
}

#[test]
fn a_copy_that_a_capture_took_in_breaks_that_capture_alone() {
    let rig = crate::common::host();
    let [stream, theirs] = streams(&rig);
    let region = shareable_region(&rig, 1);
    begin(&rig.machine, &theirs);
    let begins = stream.clone();
    before(&rig, Call::MemcpyHtoDAsync, 1, move |machine| {
        begin(machine, &begins);
    });
    assert!(region.write(&stream, 0, &[1; 4]).is_err());
    rig.faults.watch(None);
    // The graph would copy from memory of the host that is gone.
    // SAFETY: the stream is alive.
    assert!(unsafe { rig.machine.capture_end(D0, stream.as_raw()) }.is_err());
    end(&rig.machine, &theirs);
    assert_eq!(of_context(&rig), 0);
    rig.faults
        .arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::StreamSynchronize));
    assert!(region.write(&stream, 0, &[1; 4]).is_err());
    assert_eq!(
        of_context(&rig),
        1,
        "another refusal: all work is waited for"
    );
    rig.faults.disarm();
}

#[test]
fn a_vector_dropped_while_its_home_stream_captures_breaks_no_capture() {
    let rig = crate::common::model();
    let [home, theirs] = streams(&rig);
    let mut vec = DeviceVec::<u8>::new(&rig.device, &home, 16).unwrap();
    vec.resize(16, 1).unwrap();
    begin(&rig.machine, &home);
    begin(&rig.machine, &theirs);
    rig.faults.forget();
    drop(vec);
    assert_eq!(
        rig.faults.count(Call::StreamSynchronize) + of_context(&rig),
        0
    );
    assert_eq!((rig.device.drop_failures(), rig.device.leaked()), (1, G));
    end(&rig.machine, &theirs);
    end(&rig.machine, &home);
}
