//! Memory mapped at two addresses: ring buffers that never wrap, snapshots that copy on request.
//!
//! `unsafe` is used to read memory by its address through the driver, as a kernel would see it.
#![allow(unsafe_code)]

use crate::common;
use crate::common::{D0, G, Rig};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call, Driver};
use cuvmm::error::{ArgumentError, ContainerError, MemoryError};
use cuvmm::{Access, CowBuffer, Place, Region, RingBuffer, Stream};
use proptest::prelude::*;

/// Elements per granule.
const PER_GRANULE: usize = G as usize / 4;

fn numbers(from: u32, count: usize) -> Vec<u32> {
    (from..).take(count).collect()
}

/// Returns `count` elements of a sequence of different blocks, from its element `from`.
fn elements(from: u32, count: usize) -> Vec<u32> {
    // Blocks of numbers that differ by their first, copied: quick in a build that is not optimized.
    const BLOCK: u32 = 1021;
    let until = from + count as u32;
    let first = from / BLOCK * BLOCK;
    let block: Vec<u32> = (0..BLOCK)
        .map(|at| at.wrapping_mul(2_654_435_761))
        .collect();
    let mut numbers = block.repeat((until - first).div_ceil(BLOCK) as usize);
    for (number, block) in (first / BLOCK..).zip(numbers.chunks_mut(BLOCK as usize)) {
        block[0] = number;
    }
    numbers.drain(..(from - first) as usize);
    numbers.truncate(count);
    numbers
}

fn ring(rig: &Rig<impl Backing>, granules: usize) -> RingBuffer<u32> {
    let stream = Stream::new(&rig.device).unwrap();
    RingBuffer::new(&rig.device, &stream, granules * PER_GRANULE).unwrap()
}

/// Creates a buffer of `granules` granules, each one extent.
fn buffer(rig: &Rig<impl Backing>, granules: usize) -> CowBuffer<u32> {
    let stream = Stream::new(&rig.device).unwrap();
    CowBuffer::with_extents(&rig.device, &stream, granules * PER_GRANULE, G).unwrap()
}

on_both! {
    fn one_memory_at_two_places_of_a_region(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::region(rig, 16 * G, 3 * G);
        region.alias(0..3 * G, 8 * G).unwrap();
        assert_eq!((region.committed(), region.held(), region.mappings()), (6 * G, 3 * G, 4));
        region.write(&stream, 9 * G - 2, b"once").unwrap();
        let mut seen = [0; 4];
        region.read(&stream, G - 2, &mut seen).unwrap();
        rig.shows(&seen, b"once");
        let before = rig.device.memory_info().unwrap().free;
        region.decommit_after(0..3 * G, &[]).unwrap();
        region.purge().unwrap();
        assert_eq!(
            rig.device.memory_info().unwrap().free, before,
            "the memory is still mapped elsewhere"
        );
        assert_eq!((region.committed(), region.held()), (3 * G, 3 * G));
        region.read(&stream, 9 * G - 2, &mut seen).unwrap();
        rig.shows(&seen, b"once");
        region.decommit_after(8 * G..11 * G, &[]).unwrap();
        region.purge().unwrap();
        assert_eq!(rig.device.memory_info().unwrap().free, before + 3 * G);
    }

    fn aliases_that_cannot_be_are_refused(rig) {
        let mut region = common::committed(Region::builder(&rig.device, 16 * G).mapping_limit(4), 2 * G);
        region.back_with_zeros(12 * G..14 * G).unwrap();
        rig.faults.forget();
        assert!(matches!(region.alias(0..0, 4 * G), Err(MemoryError::Argument(ArgumentError::Empty { .. }))));
        assert!(matches!(region.alias(0..2 * G, 15 * G), Err(MemoryError::Argument(ArgumentError::OutOfRange { .. }))));
        assert!(matches!(region.alias(0..2 * G, 4 * G + 1), Err(MemoryError::Argument(ArgumentError::MisalignedRange { .. }))));
        assert!(matches!(region.alias(0..2 * G, u64::MAX), Err(MemoryError::Argument(ArgumentError::Empty { .. } | ArgumentError::OutOfRange { .. }))));
        assert!(matches!(region.alias(0..3 * G, 4 * G), Err(MemoryError::NotCommitted { .. })));
        assert!(matches!(region.alias(0..G, 4 * G), Err(MemoryError::CutsExtent(extent)) if extent.start == 0));
        assert!(matches!(region.alias(0..2 * G, G), Err(MemoryError::Overlap { taken: 0, .. })));
        assert!(matches!(region.alias(0..2 * G, 13 * G), Err(MemoryError::Overlap { taken, .. }) if taken == 12 * G));
        assert_eq!(rig.faults.total(), 0);
        rig.faults.arm(Fault::nth(1, CUresult::CUDA_ERROR_OUT_OF_MEMORY).of(Call::MemSetAccess));
        assert!(matches!(region.alias(0..2 * G, 4 * G), Err(MemoryError::Range { .. })));
        rig.faults.disarm();
        assert_eq!((region.committed(), region.mappings()), (2 * G, 2));
        region.alias(0..2 * G, 4 * G).unwrap();
        region.alias(0..2 * G, 6 * G).unwrap();
        assert!(
            matches!(region.alias(0..2 * G, 8 * G), Err(MemoryError::Mappings { .. })),
            "the limit of mappings"
        );
        assert!(matches!(region.fork(&[]), Err(MemoryError::Aliased)));
    }

    fn what_is_shown_twice_is_neither_moved_nor_forked_and_what_is_forked_not_shown_twice(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let mut region = common::region(rig, 16 * G, 2 * G);
        region.alias(0..2 * G, 4 * G).unwrap();
        region.write(&stream, 0, b"one").unwrap();
        let host = Place::HostNuma(0);
        let moved = region.relocate(0..2 * G, &host, &stream);
        assert!(matches!(moved, Err(MemoryError::Aliased)), "the two mappings would differ");
        assert!(matches!(region.fork(&[]), Err(MemoryError::Aliased)));
        // Without the second mapping both operations succeed.
        region.decommit_after(4 * G..6 * G, &[]).unwrap();
        region.purge().unwrap();
        region.relocate(0..2 * G, &host, &stream).unwrap();
        let fork = region.fork(&[]).unwrap();
        // Through a second mapping the memory could be written, and the fork with it.
        let shown = region.alias(0..2 * G, 4 * G);
        assert!(matches!(shown, Err(MemoryError::ReadOnly(bytes)) if bytes == (0..2 * G)));
        region.unshare(0..2 * G, &stream, &[]).unwrap();
        region.alias(0..2 * G, 4 * G).unwrap();
        region.write(&stream, 4 * G, b"two").unwrap();
        let mut seen = [[0; 3]; 2];
        region.read(&stream, 0, &mut seen[0]).unwrap();
        fork.read(&stream, 0, &mut seen[1]).unwrap();
        rig.shows(&seen, &[*b"two", *b"one"]);
    }

    fn a_ring_is_one_run_wherever_it_begins(rig) {
        let mut ring = ring(rig, 3);
        let capacity = ring.capacity();
        assert_eq!((capacity, ring.held(), ring.free()), (3 * PER_GRANULE, 3 * G, capacity));
        ring.extend_from_slice(&numbers(0, capacity - 2)).unwrap();
        let mut out = vec![0; capacity - 4];
        ring.pop_into(&mut out).unwrap();
        // These elements cross the end.
        ring.extend_from_slice(&numbers(500, 8)).unwrap();
        let base = ring.filled().address();
        assert_eq!(ring.filled().len(), 10);
        if rig.keeps_bytes() {
            assert_eq!(out, numbers(0, capacity - 4));
            let mut seen = [0; 40];
            // SAFETY: nothing writes to the range.
            unsafe { rig.machine.copy_to_host(D0, &mut seen, base) }.unwrap();
            let seen: &[u32] = bytemuck::cast_slice(&seen);
            assert_eq!(seen[..2], numbers(capacity as u32 - 4, 2));
            assert_eq!(seen[2..], numbers(500, 8));
        }
        // The free part is contiguous for kernels too.
        assert_eq!(ring.spare_capacity_mut().len(), capacity - 10);
        let home = ring.home_stream().as_raw();
        let writes = vec![(ring.spare_capacity_mut().address(), (capacity as u64 - 10) * 4, 0x11)];
        rig.machine.queue_kernel(D0, home, vec![], writes).unwrap();
        ring.produce(capacity - 10).unwrap();
        assert_eq!(ring.free(), 0);
        ring.consume(10).unwrap();
        let mut last = [0; 2];
        ring.peek(capacity - 12, &mut last).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(last, [0x1111_1111; 2]);
        }
    }

    fn rings_refuse_what_does_not_fit(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let stranger = Stream::new(&common::model().device).unwrap();
        assert!(matches!(RingBuffer::<u32>::new(&rig.device, &stranger, 1), Err(ContainerError::Argument(ArgumentError::WrongDevice { .. }))));
        assert!(matches!(RingBuffer::<()>::new(&rig.device, &stream, 1), Err(ContainerError::Argument(ArgumentError::Zero { .. }))));
        assert!(matches!(RingBuffer::<u8>::new(&rig.device, &stream, 0), Err(ContainerError::Argument(ArgumentError::Zero { .. }))));
        for elements in [usize::MAX, usize::MAX / 8, usize::MAX / 16] {
            assert!(RingBuffer::<u64>::new(&rig.device, &stream, elements).is_err());
        }
        let triples = RingBuffer::<[f32; 3]>::new(&rig.device, &stream, 1).unwrap();
        assert_eq!((triples.capacity(), triples.held()), (512 << 10, 3 * G));
        let mut ring = ring(rig, 1);
        ring.extend_from_slice(&numbers(0, 5)).unwrap();
        assert!(matches!(ring.extend_from_slice(&numbers(0, PER_GRANULE - 4)), Err(ContainerError::Full { len: 5, .. })));
        assert!(matches!(ring.produce(PER_GRANULE), Err(ContainerError::Full { .. })));
        assert!(matches!(ring.pop_into(&mut [0; 6]), Err(ContainerError::Argument(ArgumentError::OutOfRange { len: 5, .. }))));
        assert!(matches!(ring.consume(6), Err(ContainerError::Argument(ArgumentError::OutOfRange { .. }))));
        assert!(matches!(ring.peek(usize::MAX, &mut [0; 2]), Err(ContainerError::Argument(ArgumentError::OutOfRange { .. }))));
        assert_eq!(ring.len(), 5);
        rig.faults.arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::MemcpyHtoDAsync));
        assert!(matches!(ring.extend_from_slice(&[1]), Err(ContainerError::Memory(MemoryError::Range { .. }))));
        rig.faults.disarm();
        assert_eq!(ring.len(), 5);
    }

    fn a_snapshot_copies_when_told_to(rig) {
        let mut now = buffer(rig, 4);
        now.write(0, &numbers(0, 4 * PER_GRANULE)).unwrap();
        let free = rig.device.memory_info().unwrap().free;
        rig.faults.forget();
        let mut then = now.snapshot().unwrap();
        assert_eq!((rig.faults.count(Call::MemCreate), rig.faults.count(Call::MemMap)), (0, 4));
        assert_eq!((now.shared(), then.shared(), now.held()), (4 * G, 4 * G, 4 * G));
        assert_ne!(now.address(), then.address());
        let address = now.address();
        now.write(PER_GRANULE, &[77; 3]).unwrap();
        assert_eq!((now.shared(), now.address()), (3 * G, address));
        assert_eq!(free - rig.device.memory_info().unwrap().free, G, "one extent was copied");
        if rig.keeps_bytes() {
            assert_eq!(now.get(PER_GRANULE).unwrap(), 77);
            assert_eq!(now.get(PER_GRANULE + 3).unwrap(), PER_GRANULE as u32 + 3);
            assert_eq!(then.get(PER_GRANULE).unwrap(), PER_GRANULE as u32);
        }
        let view = then.make_mut(3 * PER_GRANULE - 1..3 * PER_GRANULE + 1).unwrap();
        assert_eq!(view.len(), 2);
        assert_eq!((now.shared(), then.shared()), (G, G));
        // Without another owner nothing has to be copied.
        drop(now);
        rig.faults.forget();
        then.write(0, &[1]).unwrap();
        assert_eq!((then.shared(), rig.faults.count(Call::MemCreate)), (0, 0));
        assert_eq!(rig.faults.count(Call::MemSetAccess), 1);
        rig.faults.forget();
        let _ = then.make_mut(0..4).unwrap();
        assert_eq!(rig.faults.total(), 0, "unshared memory needs no call");
    }

    fn a_write_to_what_is_shared_faults(rig) {
        let mut now = buffer(rig, 2);
        let then = now.snapshot().unwrap();
        let home = now.home_stream().as_raw();
        let reads = vec![(now.address(), 2 * G), (then.address(), 2 * G)];
        rig.machine.queue_kernel(D0, home, reads, vec![]).unwrap();
        now.home_stream().synchronize().unwrap();
        let own = now.make_mut(0..4).unwrap().address();
        rig.machine.queue_kernel(D0, home, vec![], vec![(own, 16, 1)]).unwrap();
        now.home_stream().synchronize().unwrap();
        let shared = cuvmm::driver::DeviceAddress(now.address().0 + G);
        rig.machine.queue_kernel(D0, home, vec![], vec![(shared, 16, 1)]).unwrap();
        assert!(now.home_stream().synchronize().is_err());
    }

    fn a_snapshot_waits_for_those_who_may_still_write(rig) {
        let mut now = buffer(rig, 2);
        let user = Stream::new(&rig.device).unwrap();
        now.record_use(&user).unwrap();
        rig.kernel(&user, &[], &[(now.address(), 2 * G, 3)]);
        let then = now.snapshot().unwrap();
        rig.shows(then.get(2 * PER_GRANULE - 1).unwrap(), 0x0303_0303);
        // The same for a region, without waiting.
        let mut region = common::region(rig, 4 * G, 4 * G);
        rig.held_kernel(&user, &[], &[(region.address(), G, 1)]);
        let fork = region.fork(std::slice::from_ref(&user));
        assert!(matches!(fork, Err(MemoryError::InUse { .. })));
        assert!(!region.is_read_only(0..4 * G));
        region.decommit_after(G..2 * G, std::slice::from_ref(&user)).unwrap();
        assert!(
            matches!(region.fork(&[]), Err(MemoryError::InUse { .. })),
            "a pending free is still written to"
        );
        rig.machine.release_all_streams(D0);
        let fork = region.fork(&[]).unwrap();
        assert_eq!((fork.committed(), fork.held()), (3 * G, 4 * G));
        assert!(region.is_read_only(0..4 * G) && fork.is_read_only(0..G));
        assert!(rig.device.lost().is_none());
    }

    fn a_fork_is_open_to_the_same_devices_and_has_the_same_zeros(rig) {
        let second = rig.second();
        let mut region = common::region(rig, 8 * G, 2 * G);
        region.grant(&second, Access::ReadWrite).unwrap();
        region.back_with_zeros(4 * G..8 * G).unwrap();
        let fork = region.fork(&[]).unwrap();
        assert_eq!((fork.access_of(&second), fork.zero_backed()), (Access::ReadWrite, 4 * G));
        let stream = Stream::new(&second).unwrap();
        fork.read(&stream, 0, &mut [0; 4]).unwrap();
        assert!(
            fork.write(&stream, 0, &[0; 4]).is_err(),
            "shared memory is read-only for both owners"
        );
        let home = Stream::new(&rig.device).unwrap();
        let missing = region.unshare(0..4 * G, &home, &[]);
        assert!(matches!(missing, Err(MemoryError::NotCommitted { .. })));
        let wrong = region.unshare(0..2 * G, &stream, &[]);
        assert!(matches!(wrong, Err(MemoryError::Argument(ArgumentError::WrongDevice { .. }))));
        assert_eq!(
            region.unshare(0..G, &home, &[stream]).unwrap(), 2 * G,
            "extents count as a whole"
        );
        assert!(!region.is_read_only(0..2 * G));
        assert_eq!(region.access_of(&second), Access::ReadWrite);
    }

    fn buffers_refuse_what_cannot_be(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let stranger = Stream::new(&common::model().device).unwrap();
        assert!(matches!(CowBuffer::<u32>::zeroed(&rig.device, &stranger, 1), Err(ContainerError::Argument(ArgumentError::WrongDevice { .. }))));
        assert!(matches!(CowBuffer::<()>::zeroed(&rig.device, &stream, 1), Err(ContainerError::Argument(ArgumentError::Zero { .. }))));
        assert!(matches!(CowBuffer::<u64>::zeroed(&rig.device, &stream, usize::MAX), Err(ContainerError::Argument(ArgumentError::Overflow { .. }))));
        assert!(matches!(CowBuffer::<u64>::zeroed(&rig.device, &stream, 0), Err(ContainerError::Argument(ArgumentError::Zero { .. }))));
        assert!(CowBuffer::<u64>::with_extents(&rig.device, &stream, 8, 3 * G).is_err());
        let mut buffer = buffer(rig, 1);
        #[allow(clippy::reversed_empty_ranges)]
        for range in [0..PER_GRANULE + 1, 3..2, usize::MAX..usize::MAX] {
            assert!(matches!(buffer.make_mut(range), Err(ContainerError::Argument(ArgumentError::OutOfRange { .. }))));
        }
        assert!(buffer.write(usize::MAX, &[1, 2]).is_err());
        assert!(buffer.get(PER_GRANULE).is_err());
        assert!(matches!(buffer.record_use(&stranger), Err(ContainerError::Argument(ArgumentError::WrongDevice { .. }))));
        assert!(buffer.make_mut(4..4).unwrap().is_empty());
    }

    fn every_call_of_a_snapshot_and_of_writing_may_fail_once(rig) {
        let calls = [
            Call::MemAddressReserve, Call::MemCreate, Call::MemMap, Call::MemSetAccess,
            Call::MemUnmap, Call::MemcpyDtoDAsync, Call::StreamSynchronize, Call::StreamQuery,
        ];
        for code in [CUresult::CUDA_ERROR_OUT_OF_MEMORY, CUresult::CUDA_ERROR_UNKNOWN] {
            for k in 1..200 {
                let mut now = buffer(rig, 3);
                now.write(0, &numbers(0, 3 * PER_GRANULE)).unwrap();
                rig.faults.forget();
                rig.faults.arm(common::nth_of(k, code, &calls));
                let snapshot = now.snapshot();
                let hit = rig.faults.injected() > 0;
                if snapshot.is_err() {
                    assert_eq!(now.shared(), 0, "{k}");
                    now.write(0, &[0]).unwrap();
                }
                let written = match &snapshot {
                    Ok(_) => now.write(PER_GRANULE - 1, &[9; 2]),
                    Err(_) => Ok(()),
                };
                let hit = hit || rig.faults.injected() > 0;
                rig.faults.disarm();
                if let Err(error) = written {
                    // A copy whose wait failed may have completed.
                    if rig.keeps_bytes() && !matches!(error, ContainerError::Memory(MemoryError::Range { .. })) {
                        assert_eq!(now.get(PER_GRANULE).unwrap(), PER_GRANULE as u32, "{k}");
                    }
                    now.write(PER_GRANULE - 1, &[9; 2]).unwrap();
                }
                if let Ok(then) = &snapshot && rig.keeps_bytes() {
                    assert_eq!(then.get(PER_GRANULE).unwrap(), PER_GRANULE as u32, "{k}");
                    assert_eq!(now.get(PER_GRANULE).unwrap(), 9);
                    assert_eq!(now.get(PER_GRANULE + 1).unwrap(), PER_GRANULE as u32 + 1);
                }
                drop((now, snapshot));
                let live = rig.machine.live();
                assert_eq!((live.physicals, live.mappings, live.reservations), (0, 0, 0), "{k}");
                if !hit {
                    assert!(k > 25, "{k}");
                    break;
                }
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Turn {
    Push(usize),
    Pop(usize),
    Peek(usize, usize),
}

fn turn() -> impl Strategy<Value = Turn> {
    let some = || 0..3 * PER_GRANULE;
    prop_oneof![
        some().prop_map(Turn::Push),
        some().prop_map(Turn::Pop),
        (some(), some()).prop_map(|(at, count)| Turn::Peek(at, count)),
    ]
}

#[derive(Clone, Debug)]
enum Act {
    Write(usize, usize, usize),
    Snapshot(usize),
    Drop(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (any::<usize>(), 0..6 * PER_GRANULE, 1..2 * PER_GRANULE)
            .prop_map(|(which, at, count)| Act::Write(which, at, count)),
        2 => any::<usize>().prop_map(Act::Snapshot),
        1 => any::<usize>().prop_map(Act::Drop),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(24), ..ProptestConfig::default() })]

    #[test]
    fn a_ring_holds_what_a_queue_would(turns in prop::collection::vec(turn(), 1..24)) {
        let rig = common::host();
        let mut ring = ring(&rig, 2);
        let mut known: Vec<u32> = Vec::new();
        let mut next = 0;
        for turn in turns {
            match turn {
                Turn::Push(count) => {
                    let more = elements(next, count);
                    let fits = count <= ring.capacity() - known.len();
                    assert_eq!(ring.extend_from_slice(&more).is_ok(), fits);
                    if fits {
                        known.extend_from_slice(&more);
                        next += count as u32;
                    }
                }
                Turn::Pop(count) => {
                    let mut out = common::filled(0, count);
                    let there = count <= known.len();
                    assert_eq!(ring.pop_into(&mut out).is_ok(), there);
                    if there {
                        assert!(known[..count] == out);
                        known.drain(..count);
                    }
                }
                Turn::Peek(at, count) => {
                    let mut out = common::filled(0, count);
                    let there = at + count <= known.len();
                    assert_eq!(ring.peek(at, &mut out).is_ok(), there);
                    if there {
                        assert!(known[at..at + count] == out);
                    }
                }
            }
            assert_eq!((ring.len(), ring.filled().len()), (known.len(), known.len()));
        }
    }

    #[test]
    #[ignore = "slow: `.ci/run` runs it"]
    fn snapshots_hold_what_copies_would(acts in prop::collection::vec(act(), 1..14)) {
        let rig = common::clean(common::host());
        let mut all = vec![(buffer(&rig, 6), common::filled(0u32, 6 * PER_GRANULE))];
        for (number, act) in acts.into_iter().enumerate() {
            match act {
                Act::Write(which, at, count) => {
                    let count = count.min(6 * PER_GRANULE - at);
                    let index = which % all.len();
                    let (buffer, known) = &mut all[index];
                    let elements = elements(number as u32 * 100_000, count);
                    known[at..at + count].copy_from_slice(&elements);
                    buffer.write(at, &elements).unwrap();
                }
                Act::Snapshot(which) => {
                    let index = which % all.len();
                    let (buffer, known) = &mut all[index];
                    let made = (buffer.snapshot().unwrap(), known.clone());
                    all.push(made);
                }
                Act::Drop(which) if all.len() > 1 => {
                    all.remove(which % all.len());
                }
                Act::Drop(_) => {}
            }
            // Memory is held once per distinct extent, and never more than copies would hold.
            let shown: u64 = all.iter().map(|(buffer, _)| buffer.held()).sum();
            assert!(rig.machine.live().physical_bytes <= shown);
            for (buffer, known) in &all {
                let mut seen = common::filled(0, known.len());
                buffer.read(0, &mut seen).unwrap();
                assert!(seen == *known, "after act {number}");
            }
        }
    }
}
