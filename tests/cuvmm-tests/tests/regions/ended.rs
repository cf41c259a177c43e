//! Streams that another library says to have ended: their handles are not given to the driver any more,
//! and the memory that was used on them stays usable.
//!
//! `unsafe` is used to create and destroy streams as another library would.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::common::{self, D0, G, Rig};
use crate::on_both;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{Driver, StreamFlags};
use cuvmm::error::{CallError, MemoryError};
use cuvmm::{Event, MemPool, Stream, UnifiedBuffer};

/// Creates a stream of another library.
fn foreign(rig: &Rig<impl Backing>) -> Stream {
    // SAFETY: the stream is destroyed once it is said to end.
    unsafe {
        let raw = rig.machine.stream_create(D0, StreamFlags::NON_BLOCKING);
        Stream::from_raw(&rig.device, raw.unwrap(), Arc::new(())).unwrap()
    }
}

/// Says that a stream ends, and destroys it.
fn end(rig: &Rig<impl Backing>, stream: &Stream) {
    stream.end().unwrap();
    // SAFETY: nothing uses the stream from here on.
    unsafe { rig.machine.stream_destroy(D0, stream.as_raw()) }.unwrap();
}

on_both! {
    fn memory_of_a_pool_outlives_the_streams_that_used_it(rig) {
        let memory_pool = MemPool::builder(&rig.device).create().unwrap();
        let [own, used, live] = [(); 3].map(|()| foreign(rig));
        let memory = memory_pool.allocate_on(&own, G).unwrap();
        memory.record_use(&used).unwrap();
        end(rig, &used);
        end(rig, &own);
        memory.record_use(&live).unwrap();
        rig.held_kernel(&live, &[(memory.address(), G)], &[]);
        memory.close().unwrap();
        rig.machine.release_stream(D0, live.as_raw());
        end(rig, &live);
        rig.device.synchronize().unwrap();
    }

    fn nothing_is_queued_on_a_stream_that_has_ended(rig) {
        let (stream, live) = (foreign(rig), Stream::new(&rig.device).unwrap());
        let mut region = common::region(rig, G, G);
        let memory_pool = MemPool::builder(&rig.device).create().unwrap();
        let event = Event::new(&rig.device).unwrap();
        end(rig, &stream);
        rig.faults.forget();
        let refusals: [Result<(), MemoryError>; 7] = [
            region.fill(&stream, 0..G, 7),
            region.read(&stream, 0, &mut [0]),
            region.write(&stream, 0, &[0]),
            region.copy_within(&stream, 0..1, 1),
            event.record(&stream).map_err(Into::into),
            stream.wait(&event).map_err(Into::into),
            memory_pool.allocate_on(&stream, G).map(drop),
        ];
        for refused in refusals {
            let error = refused.unwrap_err();
            assert_eq!(error.call(), Some(&CallError::StreamEnded), "{error:?}");
        }
        assert!(UnifiedBuffer::<u32>::zeroed(&rig.device, &stream, 4).is_err());
        region.decommit_after(0..G, &[stream.clone(), live.clone()]).unwrap();
        assert_eq!(region.purge().unwrap().given_back, G);
        let (_pool, tenant) = common::tenancy(rig, 2);
        let busy = tenant.allocate_on(&live, 2 * G).unwrap();
        rig.held_kernel(&live, &[(busy.address(), G)], &[]);
        drop(busy);
        assert!(tenant.allocate_on(&stream, 2 * G).is_err(), "it cannot wait for the kernel");
        rig.machine.release_stream(D0, live.as_raw());
    }
}
