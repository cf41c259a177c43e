//! Work whose streams the owner of a region does not name: the region's own fills and copies, and
//! work of streams that were recorded through a registration.

use std::sync::Arc;

use crate::common::{self, D0, D1, G, Rig};
use crate::on_both;
use cuvmm::dlpack::{Consumer, Tensor};
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::MemoryError;
use cuvmm::{Access, DeviceVec, Region, Stream};

/// A region of committed granules, each with an extent of its own.
fn region(rig: &Rig<impl Backing>, granules: u64) -> Region {
    let builder = Region::builder(&rig.device, granules * G).largest_extent(G);

    common::committed(builder, granules * G)
}

/// A stream whose work is held back.
fn held(rig: &Rig<impl Backing>) -> Stream {
    let stream = Stream::new(&rig.device).unwrap();
    rig.machine.hold(D0, stream.as_raw());
    stream
}

fn release(rig: &Rig<impl Backing>, stream: &Stream) {
    rig.machine.release_stream(D0, stream.as_raw());
}

/// Queues a kernel that reads a granule.
fn read(rig: &Rig<impl Backing>, stream: &Stream, at: cuvmm::driver::DeviceAddress) {
    rig.kernel(stream, &[(at, G)], &[]);
}

/// A vector of two granules of bytes.
fn vector(rig: &Rig<impl Backing>, home: &Stream) -> DeviceVec<u8> {
    let region = Region::builder(&rig.device, 4 * G).largest_extent(G);
    let mut vector = DeviceVec::from_region(region.reserve().unwrap(), home).unwrap();
    vector.resize(2 * G as usize, 1).unwrap();
    home.synchronize().unwrap();
    vector
}

on_both! {
    fn a_fill_keeps_what_it_writes(rig) {
        let mut region = region(rig, 2);
        let stream = held(rig);
        region.fill(&stream, 0..G, 7).unwrap();
        region.decommit_after(0..G, &[]).unwrap();
        assert_eq!(region.purge().unwrap().given_back, 0);
        release(rig, &stream);
        assert_eq!(region.purge().unwrap().given_back, G);
        // Later work of the stream uses other memory.
        rig.held_kernel(&stream, &[], &[]);
        region.decommit_after(G..2 * G, &[]).unwrap();
        assert_eq!(region.purge().unwrap().given_back, G);
        release(rig, &stream);
    }

    fn a_fill_of_which_a_part_was_queued_keeps_what_it_writes(rig) {
        let places = [cuvmm::Place::from(&rig.device), cuvmm::Place::HostNuma(0)];
        let mut region = Region::reserve(&rig.device, 2 * G).unwrap();
        for (at, place) in (0..).zip(&places) {
            region.commit_at(at * G..(at + 1) * G, place).unwrap();
        }
        let stream = held(rig);
        rig.faults.arm(Fault::nth(2, CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemsetD8Async));
        assert!(region.fill(&stream, 0..2 * G, 7).is_err());
        rig.faults.disarm();
        region.decommit_after(0..2 * G, &[]).unwrap();
        assert_eq!(region.purge().unwrap().given_back, 0);
        release(rig, &stream);
        assert_eq!(region.purge().unwrap().given_back, 2 * G);
    }

    fn a_copy_keeps_both_ends(rig) {
        let mut within = region(rig, 2);
        let stream = held(rig);
        within.copy_within(&stream, 0..G, G).unwrap();
        let [mut from, mut to] = [(); 2].map(|()| region(rig, 1));
        to.copy_from(&stream, 0, &from, 0..G).unwrap();
        let size = |region: &Region| region.size();
        for region in [&mut within, &mut from, &mut to] {
            region.decommit_after(0..size(region), &[]).unwrap();
            assert_eq!(region.purge().unwrap().given_back, 0);
        }
        release(rig, &stream);
        for region in [&mut within, &mut from, &mut to] {
            assert_eq!(region.purge().unwrap().given_back, size(region));
        }
    }

    fn a_fork_is_refused_under_a_fill(rig) {
        let mut region = region(rig, 1);
        let stream = held(rig);
        region.fill(&stream, 0..G, 7).unwrap();
        let before = rig.machine.snapshot();
        assert!(matches!(region.fork(&[]), Err(MemoryError::InUse(_))));
        assert_eq!(rig.machine.snapshot(), before);
        release(rig, &stream);
        drop(region.fork(&[]).unwrap());
    }

    fn unsharing_waits_for_a_copy_that_reads(rig) {
        let mut one = region(rig, 1);
        let mut other = one.fork(&[]).unwrap();
        let target = region(rig, 1);
        let streams = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
        for (region, reader) in [(&mut one, &streams[0]), (&mut other, &streams[0])] {
            rig.machine.hold_until_awaited(D0, reader.as_raw());
            target.copy_from(reader, 0, region, 0..G).unwrap();
            region.unshare(0..G, &streams[1], &[]).unwrap();
        }
        assert!(streams[0].is_done().unwrap() || other.shared() == 0);
        release(rig, &streams[0]);
    }

    fn what_a_registration_recorded_is_waited_for(rig) {
        let [home, other] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
        let vector = vector(rig, &home);
        let registration = vector.register().unwrap();
        registration.record_use(&other).unwrap();
        rig.machine.hold_until_awaited(D0, other.as_raw());
        read(rig, &other, vector.address());
        drop(registration);
        drop(vector);
        assert!(other.is_done().unwrap(), "the drop has waited");
    }

    fn a_vector_that_shrinks_waits_for_what_a_registration_recorded(rig) {
        let [home, other] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
        let mut vector = vector(rig, &home);
        let registration = vector.register().unwrap();
        registration.record_use(&other).unwrap();
        drop(registration);
        rig.machine.hold(D0, other.as_raw());
        read(rig, &other, vector.address().checked_add(G).unwrap());
        vector.truncate(G as usize);
        assert_eq!(vector.shrink_to_fit().unwrap(), 0);
        release(rig, &other);
        assert_eq!(vector.shrink_to_fit().unwrap(), G);
    }

    fn a_registration_keeps_its_streams_for_a_region_too(rig) {
        let mut region = region(rig, 1);
        let stream = held(rig);
        let registration = region.register(0..G).unwrap();
        registration.record_use(&stream).unwrap();
        read(rig, &stream, region.address());
        drop(registration);
        region.decommit_after(0..G, &[]).unwrap();
        assert_eq!(region.purge().unwrap().given_back, 0);
        release(rig, &stream);
        assert_eq!(region.purge().unwrap().given_back, G);
    }

    fn fills_on_many_streams_are_all_waited_for(rig) {
        let mut region = region(rig, 2);
        // No two of them are on one stream, and none is complete.
        let streams: Vec<Stream> = (0..100).map(|_| held(rig)).collect();
        for stream in &streams {
            region.fill(stream, 0..G, 7).unwrap();
        }
        region.decommit_after(0..G, &[]).unwrap();
        for stream in &streams {
            assert_eq!(region.purge().unwrap().given_back, 0);
            release(rig, stream);
        }
        assert_eq!(region.purge().unwrap().given_back, G);
        // Streams whose fills are complete are let go.
        let before = rig.machine.live().streams;
        for _ in 0..200 {
            let stream = Stream::new(&rig.device).unwrap();
            region.fill(&stream, G..2 * G, 7).unwrap();
        }
        assert!(rig.machine.live().streams <= before + 64);
        region.decommit_after(G..2 * G, &[]).unwrap();
        assert_eq!(region.purge().unwrap().given_back, G);
    }

    fn what_a_peer_fills_and_what_is_copied_from_a_peer_is_waited_for(rig) {
        let second = rig.second();
        let [home, by] = [&rig.device, &second].map(|device| Stream::new(device).unwrap());
        let (mut region, mut source) = (region(rig, 2), Region::reserve(&second, G).unwrap());
        source.commit(0..G).unwrap();
        region.grant(&second, Access::ReadWrite).unwrap();
        source.grant(&rig.device, Access::ReadWrite).unwrap();
        rig.machine.hold(D1, by.as_raw());
        rig.machine.hold(D0, home.as_raw());
        region.fill(&by, 0..G, 7).unwrap();
        region.copy_from(&home, G, &source, 0..G).unwrap();
        region.decommit_after(0..2 * G, &[]).unwrap();
        source.decommit_after(0..G, &[]).unwrap();
        assert_eq!((region.purge().unwrap().given_back, source.purge().unwrap().given_back), (0, 0));
        rig.machine.release_stream(D1, by.as_raw());
        for _ in 0..3 {
            assert_eq!((region.purge().unwrap().given_back, source.purge().unwrap().given_back), (0, 0));
        }
        release(rig, &home);
        for region in [&mut region, &mut source] {
            while region.purge().unwrap().given_back == 0 {}
        }
    }

    fn what_a_registration_recorded_comes_before_what_a_vector_is_handed_to(rig) {
        let [home, other] = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
        let vector = Arc::new(vector(rig, &home));
        let registration = vector.register().unwrap();
        registration.record_use(&other).unwrap();
        drop(registration);
        assert_eq!(vector.streams().unwrap(), [home, other.clone()]);
        if rig.keeps_bytes() {
            rig.machine.hold_until_awaited(D0, other.as_raw());
            read(rig, &other, vector.address());
            let tensor = Tensor::of::<u8>(&[16]);
            drop(tensor.export(Arc::clone(&vector), &Consumer::Synchronized).unwrap());
            assert!(other.is_done().unwrap());
        }
    }
}
