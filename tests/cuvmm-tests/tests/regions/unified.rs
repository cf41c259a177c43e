//! Unified buffers: which accesses wait for which, what is refused, and which advice is in force.
//!
//! `unsafe` is used for fills that stand for kernels, for captures, and for the buffer's unsafe
//! functions.
#![allow(unsafe_code, clippy::drop_non_drop)]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common;
use crate::common::{D0, Rig, captures};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::driver::model::{Backing, ModelDriver};
use cuvmm::driver::{
    CUresult, Call, CudaVersion, DeviceAttribute, Driver, DriverError, Location, Ordinal,
};
use cuvmm::error::{ArgumentError, ContainerError, MemoryError};
use cuvmm::own::CloseRefusal;
use cuvmm::unified::{Advice, DeviceMut, PageLocation, Policy};
use cuvmm::{CallError, Device, Stream, UnifiedBuffer};
use proptest::prelude::*;

/// Elements per page of the host.
const PER_PAGE: usize = 1024;

fn zeroed(rig: &Rig<impl Backing>, len: usize) -> (UnifiedBuffer<u32>, Stream) {
    let home = Stream::new(&rig.device).unwrap();
    let buffer = UnifiedBuffer::zeroed(&rig.device, &home, len).unwrap();
    home.synchronize().unwrap();
    (buffer, home)
}

fn streams<B: Backing, const N: usize>(rig: &Rig<B>) -> [Stream; N] {
    std::array::from_fn(|_| Stream::new(&rig.device).unwrap())
}

/// Queues a fill of the whole buffer, as a kernel would.
fn launch(rig: &Rig<impl Backing>, access: &DeviceMut<'_, u32>, byte: u8) {
    let (bytes, stream) = (4 * access.len() as u64, access.stream());
    let device = stream.device().ordinal();
    // SAFETY: the access is alive, and the library keeps the memory until the stream's work is
    // complete.
    unsafe {
        rig.machine
            .fill_async(device, access.address(), byte, bytes, stream.as_raw())
            .unwrap();
    }
}

/// Queues a kernel without visible effects.
fn launch_reader(rig: &Rig<impl Backing>, stream: &Stream) {
    rig.kernel(stream, &[], &[]);
}

fn word(byte: u8) -> u32 {
    u32::from_ne_bytes([byte; 4])
}

/// Runs `act`, and returns `true` with its result if it returned only after all streams had been
/// let go.
fn waits<B: Backing, T>(rig: &Rig<B>, act: impl FnOnce() -> T) -> (bool, T) {
    let gone = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            gone.store(true, Ordering::SeqCst);
            rig.machine.release_all_streams(D0);
        });
        let outcome = act();
        (gone.load(Ordering::SeqCst), outcome)
    })
}

/// Returns all advice that the driver reports for a range.
fn in_force(
    buffer: &UnifiedBuffer<u32>,
    range: std::ops::Range<usize>,
) -> (bool, Option<Location>, Vec<Location>) {
    let mut users = buffer.accessed_by(range.clone()).unwrap();
    users.sort_unstable();
    let preferred = buffer.preferred_location(range.clone()).unwrap();
    (buffer.is_read_mostly(range).unwrap(), preferred, users)
}

/// Runs a test on the model and on the host driver, without a check of what it leaves behind.
macro_rules! leaving {
    ($(fn $name:ident($rig:ident) $body:block)+) => {
        $(
            #[test]
            fn $name() {
                fn body($rig: &Rig<impl Backing>)
                $body

                body(&common::model());
                body(&common::host());
            }
        )+
    };
}

const NOTHING: (bool, Option<Location>, Vec<Location>) = (false, None, vec![]);
const HERE: Location = Location::device(D0);

on_both! {
    fn elements_go_in_and_come_out(rig) {
        let (mut buffer, home) = zeroed(rig, 100_000);
        assert_eq!((buffer.len(), buffer.size(), buffer.is_empty()), (100_000, 400_000, false));
        assert!(buffer.is_host_accessible() && *buffer.home_stream() == home);
        assert!(buffer.host().unwrap().iter().all(|&number| number == 0));
        // Writes of the host are visible on every driver. Copies need a driver that keeps bytes.
        buffer.host_mut().unwrap()[99_999] = 7;
        assert_eq!(buffer.host().unwrap()[99_998..], [0, 7]);
        buffer.write(10, &[1, 2, 3]).unwrap();
        buffer.fill(50_000..=50_001, 0x0101_0101).unwrap();
        buffer.fill(60_000.., 0x1234_5678).unwrap();
        buffer.fill(70_000..70_000, 1).unwrap();
        if rig.keeps_bytes() {
            let host = buffer.host().unwrap();
            assert_eq!(host[9..14], [0, 1, 2, 3, 0]);
            assert_eq!(host[49_999..50_003], [0, 0x0101_0101, 0x0101_0101, 0]);
            assert_eq!(host[59_999], 0);
            assert!(host[60_000..].iter().all(|&number| number == 0x1234_5678));
            assert_eq!(*host, buffer.to_vec().unwrap());
            let mut some = [0; 3];
            buffer.read(11, &mut some).unwrap();
            assert_eq!((some, buffer.get(12).unwrap()), ([2, 3, 0], 3));
        }
        let odd = [[1u8, 2, 3], [4, 5, 6]];
        let mut triples = UnifiedBuffer::from_slice(&rig.device, &home, &odd).unwrap();
        if rig.keeps_bytes() {
            assert_eq!(*triples.host().unwrap(), odd);
            triples.fill(1.., [9, 8, 7]).unwrap();
            assert_eq!(triples.to_vec().unwrap(), [[1, 2, 3], [9, 8, 7]]);
        }
        triples.close().unwrap();
    }

    fn what_cannot_be_is_refused_before_the_driver_is_asked(rig) {
        let home = Stream::new(&rig.device).unwrap();
        let other = common::model();
        let stranger = Stream::new(&other.device).unwrap();
        let made = UnifiedBuffer::<()>::zeroed(&rig.device, &home, 8);
        assert!(matches!(made, Err(ContainerError::Argument(ArgumentError::Zero { .. }))));
        for len in [usize::MAX, isize::MAX as usize / 8 + 1] {
            let made = UnifiedBuffer::<u64>::zeroed(&rig.device, &home, len);
            assert!(matches!(
                made,
                Err(ContainerError::Argument(ArgumentError::TooLarge { value, .. })) if value == len as u64
            ));
        }
        let made = UnifiedBuffer::<u32>::zeroed(&rig.device, &stranger, 8);
        assert!(matches!(made, Err(ContainerError::Argument(ArgumentError::WrongDevice { .. }))));
        let (mut buffer, _home) = zeroed(rig, 10);
        rig.faults.forget();
        assert!(matches!(
            buffer.get(10),
            Err(ContainerError::Argument(ArgumentError::OutOfRange { len: 10, .. }))
        ));
        let outside = buffer.write(9, &[0; 2]);
        assert!(matches!(
            outside,
            Err(ContainerError::Argument(ArgumentError::OutOfRange { start: 9, end: 11, len: 10, .. }))
        ));
        let outside = buffer.read(usize::MAX, &mut [0; 2]);
        assert!(matches!(outside, Err(ContainerError::Argument(ArgumentError::OutOfRange { .. }))));
        let outside = buffer.fill(..=10, 1);
        assert!(matches!(outside, Err(ContainerError::Argument(ArgumentError::OutOfRange { .. }))));
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = buffer.fill(5..4, 1);
        assert!(matches!(backwards, Err(ContainerError::Argument(ArgumentError::OutOfRange { .. }))));
        let outside = buffer.set_policy(0..11, Policy::HostFirst);
        assert!(matches!(outside, Err(ContainerError::Argument(ArgumentError::OutOfRange { .. }))));
        assert!(matches!(
            buffer.accessed_by(..11),
            Err(ContainerError::Argument(ArgumentError::OutOfRange { .. }))
        ));
        assert!(matches!(
            buffer.device_read(&stranger),
            Err(ContainerError::Argument(ArgumentError::WrongDriver { .. }))
        ));
        assert!(matches!(
            buffer.device_mut(&stranger),
            Err(ContainerError::Argument(ArgumentError::WrongDriver { .. }))
        ));
        let moved = buffer.prefetch(.., PageLocation::Device(&other.device), &home);
        assert!(matches!(moved, Err(ContainerError::Argument(ArgumentError::WrongDriver { .. }))));
        let advised = buffer.advise(.., Advice::AccessedBy(&other.device));
        assert!(matches!(advised, Err(ContainerError::Argument(ArgumentError::WrongDriver { .. }))));
        for node in [-1, i32::MIN] {
            let place = PageLocation::HostNuma(node);
            let advised = buffer.advise(.., Advice::PreferredLocation(place));
            assert!(matches!(
                advised,
                Err(ContainerError::Argument(ArgumentError::NoSuch { number, .. })) if number == i64::from(node)
            ));
        }
        buffer.read(10, &mut []).unwrap();
        buffer.write(10, &[]).unwrap();
        assert_eq!(rig.faults.calls(), vec![], "the driver was called");
        // Arguments that only the driver can check.
        let advised = buffer.advise(2..5, Advice::PreferredLocation(PageLocation::HostNuma(99)));
        assert!(matches!(
            &advised,
            Err(ContainerError::Memory(MemoryError::Range { offset: 8, size: 12, .. }))
        ));
        let moved = buffer.prefetch(2..5, PageLocation::HostNuma(99), &home);
        let of_them = matches!(&moved, Err(ContainerError::Memory(MemoryError::Range { offset: 8, size: 12, .. })));
        assert!(of_them, "{moved:?}");
    }

    fn without_elements_everything_works_and_there_is_no_memory(rig) {
        let (mut buffer, home) = zeroed(rig, 0);
        assert_eq!(rig.machine.live().allocations, 0);
        assert!(buffer.is_empty() && buffer.host().unwrap().is_empty());
        assert!(buffer.host_mut().unwrap().is_empty());
        assert!(buffer.device_read(&home).unwrap().address().is_null());
        assert_eq!(buffer.device_mut(&home).unwrap().len(), 0);
        buffer.fill(.., 3).unwrap();
        buffer.prefetch(.., PageLocation::Host, &home).unwrap();
        buffer.advise(.., Advice::ReadMostly).unwrap();
        buffer.set_policy(.., Policy::DeviceFirst).unwrap();
        assert_eq!(in_force(&buffer, 0..0), NOTHING);
        assert!(buffer.to_vec().unwrap().is_empty());
        buffer.close().unwrap();
    }

    fn a_view_waits_for_the_kernels_that_write(rig) {
        let (mut buffer, home) = zeroed(rig, 5000);
        let [stream] = streams(rig);
        rig.machine.hold(D0, stream.as_raw());
        let access = buffer.device_mut(&stream).unwrap();
        launch(rig, &access, 3);
        drop(access);
        let (waited, view) = waits(rig, || buffer.host().unwrap());
        assert!(waited, "the host read while a kernel wrote");
        if rig.keeps_bytes() {
            assert!(view.iter().all(|&number| number == word(3)));
        }
        drop(view);
        // Copies on another stream wait too.
        rig.machine.hold(D0, stream.as_raw());
        let access = buffer.device_mut(&stream).unwrap();
        launch(rig, &access, 4);
        drop(access);
        let (waited, last) = waits(rig, || buffer.get(4999).unwrap());
        assert!(waited);
        rig.shows(last, word(4));
        drop(home);
    }

    fn readers_bear_each_other_and_a_writer_waits_for_all(rig) {
        let (mut buffer, _home) = zeroed(rig, 5000);
        buffer.host_mut().unwrap()[1] = 8;
        let [one, two] = streams(rig);
        rig.machine.hold(D0, one.as_raw());
        let reading = buffer.device_read(&one).unwrap();
        launch_reader(rig, &one);
        let also = buffer.device_read(&two).unwrap();
        assert_eq!(reading.address(), also.address());
        assert_eq!(buffer.host().unwrap()[1], 8, "while the device reads");
        drop((reading, also));
        assert!(two.is_done().unwrap(), "a reader was ordered behind a reader");
        assert_eq!(buffer.host().unwrap()[1], 8, "while work reads");
        rig.faults.forget();
        buffer.read(0, &mut [0; 3]).unwrap();
        assert_eq!(rig.faults.count(Call::EventRecord), 0, "the readers have been waited for");
        let (waited, mut view) = waits(rig, || buffer.host_mut().unwrap());
        assert!(waited, "the host wrote while a kernel read");
        view[1] = 9;
        drop(view);
        rig.machine.hold(D0, one.as_raw());
        drop(buffer.device_read(&one).unwrap());
        launch_reader(rig, &one);
        drop(buffer.device_read(&one).unwrap());
        let (waited, written) = waits(rig, || buffer.write(0, &[1]));
        written.unwrap();
        assert!(waited, "a copy wrote while a kernel read");
    }

    fn streams_come_behind_each_other_without_the_host(rig) {
        let (mut buffer, _home) = zeroed(rig, 5000);
        let [one, two, three] = streams(rig);
        rig.machine.hold(D0, one.as_raw());
        let access = buffer.device_mut(&one).unwrap();
        launch(rig, &access, 1);
        drop(access);
        let access = buffer.device_mut(&two).unwrap();
        launch(rig, &access, 2);
        drop(access);
        assert!(!two.is_done().unwrap(), "the second writer overtook the first");
        drop(buffer.device_read(&three).unwrap());
        launch_reader(rig, &three);
        assert!(!three.is_done().unwrap(), "a reader overtook a writer");
        rig.machine.release_stream(D0, one.as_raw());
        assert!(three.is_done().unwrap());
        if rig.keeps_bytes() {
            assert!(buffer.host().unwrap().iter().all(|&number| number == word(2)));
        }
        // A writer waits for readers on two streams.
        for held in [&one, &two] {
            rig.machine.hold(D0, held.as_raw());
            let reading = buffer.device_read(held).unwrap();
            launch_reader(rig, held);
            drop(reading);
        }
        let access = buffer.device_mut(&three).unwrap();
        launch(rig, &access, 3);
        drop(access);
        rig.machine.release_stream(D0, one.as_raw());
        assert!(!three.is_done().unwrap(), "one reader is pending");
        rig.machine.release_stream(D0, two.as_raw());
        assert!(three.is_done().unwrap());
    }

    fn an_end_that_cannot_be_marked_is_waited_for(rig) {
        let (mut buffer, _home) = zeroed(rig, 5000);
        let [stream] = streams(rig);
        for call in [Call::EventRecord, Call::StreamIsCapturing] {
            rig.machine.hold(D0, stream.as_raw());
            let access = buffer.device_mut(&stream).unwrap();
            launch(rig, &access, 5);
            rig.faults.arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(call));
            drop(access);
            rig.faults.disarm();
            let (waited, view) = waits(rig, || buffer.host().map(drop));
            view.unwrap();
            assert!(waited, "{call} failed, and the host did not wait");
        }
        // While the stream cannot be synchronized, the memory cannot be accessed.
        let access = buffer.device_mut(&stream).unwrap();
        rig.faults.arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::EventRecord));
        drop(access);
        rig.faults.arm(Fault::all(CUresult::CUDA_ERROR_UNKNOWN).of(Call::StreamSynchronize));
        assert!(matches!(buffer.host(), Err(ContainerError::Memory(MemoryError::Call(_)))));
        assert!(matches!(buffer.host_mut(), Err(ContainerError::Memory(MemoryError::Call(_)))));
        assert!(matches!(buffer.device_read(&stream), Err(ContainerError::Memory(MemoryError::Call(_)))));
        rig.faults.disarm();
        drop(buffer.host().unwrap());
    }

    fn captures_are_left_alone(rig) {
        let (mut buffer, home) = zeroed(rig, 5000);
        let [stream, theirs] = streams(rig);
        // A capture of the stream to be used: the access is refused, and the capture continues.
        captures::begin(&rig.machine, &stream);
            assert!(matches!(
                buffer.device_read(&stream),
                Err(ContainerError::Memory(MemoryError::Capturing))
            ));
            assert!(matches!(
                buffer.device_mut(&stream),
                Err(ContainerError::Memory(MemoryError::Capturing))
            ));
            let moved = buffer.prefetch(.., PageLocation::Host, &stream);
            assert!(matches!(moved, Err(ContainerError::Memory(MemoryError::Capturing))));
            let made = UnifiedBuffer::<u32>::zeroed(&rig.device, &stream, 4);
            assert!(matches!(made, Err(ContainerError::Memory(MemoryError::Capturing))));
        captures::end(&rig.machine, &stream);
        captures::begin(&rig.machine, &home);
            assert!(matches!(buffer.get(0), Err(ContainerError::Memory(MemoryError::Capturing))));
            assert!(matches!(buffer.write(0, &[1]), Err(ContainerError::Memory(MemoryError::Capturing))));
            assert!(matches!(buffer.fill(.., 1), Err(ContainerError::Memory(MemoryError::Capturing))));
        captures::end(&rig.machine, &home);
        // A capture of another stream by this very thread: everything works.
        captures::begin(&rig.machine, &theirs);
            let mut other = UnifiedBuffer::from_slice(&rig.device, &home, &[1, 2, 3]).unwrap();
            let access = other.device_mut(&stream).unwrap();
            launch(rig, &access, 2);
            drop(access);
            drop(other.host().unwrap());
            drop(other.device_read(&home).unwrap());
            other.host_mut().unwrap()[0] = 4;
            other.prefetch(.., PageLocation::Host, &stream).unwrap();
            other.set_policy(.., Policy::ReadMostly).unwrap();
            drop(other);
        captures::end(&rig.machine, &theirs);
        // A stream that captures when a guard on it ends: an event would become part of the graph.
        let access = buffer.device_mut(&stream).unwrap();
        launch(rig, &access, 2);
        captures::begin(&rig.machine, &stream);
            drop(access);
            assert!(matches!(buffer.host(), Err(ContainerError::Memory(MemoryError::Capturing))));
            assert!(matches!(buffer.device_read(&home), Err(ContainerError::Memory(MemoryError::Capturing))));
            let failed = buffer.close().unwrap_err();
            assert!(matches!(failed.reason, CloseRefusal::Call(_)), "{failed}");
            buffer = failed.owner;
        captures::end(&rig.machine, &stream);
        drop(buffer.host().unwrap());
        buffer.close().unwrap();
    }

    fn pages_are_advised_and_moved(rig) {
        let (buffer, home) = zeroed(rig, 10 * PER_PAGE);
        let whole = 0..10 * PER_PAGE;
        assert_eq!(in_force(&buffer, whole.clone()), NOTHING);
        assert_eq!(buffer.last_prefetch(..).unwrap(), None);
        buffer.advise(.., Advice::ReadMostly).unwrap();
        buffer.advise(.., Advice::PreferredLocation(PageLocation::Device(&rig.device))).unwrap();
        buffer.advise(.., Advice::AccessedByHost).unwrap();
        buffer.advise(..PER_PAGE, Advice::AccessedBy(&rig.device)).unwrap();
        assert_eq!(in_force(&buffer, whole.clone()), (true, Some(HERE), vec![Location::HOST]));
        assert_eq!(in_force(&buffer, 0..3), (true, Some(HERE), vec![HERE, Location::HOST]));
        // Advice for one element applies to its page, and to no other.
        let node = PageLocation::HostNuma(0);
        buffer.advise(3 * PER_PAGE + 5..=3 * PER_PAGE + 5, Advice::PreferredLocation(node)).unwrap();
        let at = |page: usize| buffer.preferred_location(page * PER_PAGE..(page + 1) * PER_PAGE).unwrap();
        // The driver does not report the node.
        assert_eq!((at(2), at(3), at(4)), (Some(HERE), None, Some(HERE)));
        assert_eq!(buffer.preferred_location(..).unwrap(), None, "not the same everywhere");
        buffer.unadvise(.., Advice::ReadMostly).unwrap();
        buffer.unadvise(.., Advice::AccessedByHost).unwrap();
        buffer.unadvise(.., Advice::AccessedBy(&rig.device)).unwrap();
        buffer.unadvise(.., Advice::PreferredLocation(PageLocation::Host)).unwrap();
        assert_eq!(in_force(&buffer, whole), NOTHING);
        buffer.unadvise(.., Advice::AccessedByHost).unwrap();

        buffer.prefetch(.., PageLocation::Device(&rig.device), &home).unwrap();
        assert_eq!(buffer.last_prefetch(..).unwrap(), Some(HERE));
        buffer.prefetch(5 * PER_PAGE.., PageLocation::Host, &home).unwrap();
        buffer.prefetch(9 * PER_PAGE.., node, &home).unwrap();
        assert_eq!(buffer.last_prefetch(..).unwrap(), None);
        assert_eq!(buffer.last_prefetch(..5 * PER_PAGE).unwrap(), Some(HERE));
        assert_eq!(buffer.last_prefetch(5 * PER_PAGE..9 * PER_PAGE).unwrap(), Some(Location::HOST));
        assert_eq!(buffer.last_prefetch(9 * PER_PAGE..).unwrap(), Some(Location::host_numa(0)));
    }

    fn a_move_counts_as_reading(rig) {
        let (mut buffer, _home) = zeroed(rig, 5000);
        let [one, two] = streams(rig);
        rig.machine.hold(D0, one.as_raw());
        let access = buffer.device_mut(&one).unwrap();
        launch(rig, &access, 1);
        drop(access);
        buffer.prefetch(.., PageLocation::Host, &two).unwrap();
        assert!(!two.is_done().unwrap(), "pages were moved before the write");
        rig.machine.release_stream(D0, one.as_raw());
        rig.machine.hold(D0, two.as_raw());
        buffer.prefetch(.., PageLocation::Host, &two).unwrap();
        drop(buffer.host().unwrap());
        let (waited, ()) = waits(rig, || drop(buffer));
        assert!(waited, "the memory was freed while its pages moved");
        assert_eq!(rig.machine.live().allocations, 0);
    }

    fn a_policy_undoes_what_stood_before(rig) {
        let (buffer, _home) = zeroed(rig, 8 * PER_PAGE);
        let expected = |policy| match policy {
            Policy::DeviceFirst => (false, Some(HERE), vec![Location::HOST]),
            Policy::HostFirst => (false, Some(Location::HOST), vec![HERE]),
            Policy::ReadMostly => (true, None, vec![]),
            _ => NOTHING,
        };
        let policies =
            [Policy::OnDemand, Policy::DeviceFirst, Policy::HostFirst, Policy::ReadMostly];
        for from in policies {
            for to in policies {
                buffer.set_policy(.., from).unwrap();
                buffer.set_policy(2 * PER_PAGE..4 * PER_PAGE, to).unwrap();
                assert_eq!(in_force(&buffer, 0..2 * PER_PAGE), expected(from));
                assert_eq!(in_force(&buffer, 2 * PER_PAGE..4 * PER_PAGE), expected(to));
                assert_eq!(in_force(&buffer, 4 * PER_PAGE..8 * PER_PAGE), expected(from));
                rig.faults.forget();
                buffer.set_policy(2 * PER_PAGE..4 * PER_PAGE, to).unwrap();
                assert_eq!(rig.faults.total(), 0, "the advice is in force already");
            }
        }
        buffer.set_policy(.., Policy::OnDemand).unwrap();
        // Every kind of advice on parts of the buffer is undone too, also where it makes other
        // advice redundant.
        buffer.advise(5.., Advice::ReadMostly).unwrap();
        buffer.advise(..3000, Advice::PreferredLocation(PageLocation::HostNuma(0))).unwrap();
        buffer.advise(7000..7001, Advice::AccessedBy(&rig.device)).unwrap();
        buffer.set_policy(.., Policy::DeviceFirst).unwrap();
        assert_eq!(in_force(&buffer, 0..8 * PER_PAGE), expected(Policy::DeviceFirst));
        buffer.set_policy(.., Policy::default()).unwrap();
        assert_eq!(in_force(&buffer, 0..8 * PER_PAGE), NOTHING);
    }

    fn a_policy_is_set_whole_or_not_at_all(rig) {
        let (buffer, _home) = zeroed(rig, 8 * PER_PAGE);
        buffer.set_policy(..4 * PER_PAGE, Policy::HostFirst).unwrap();
        buffer.advise(2 * PER_PAGE.., Advice::ReadMostly).unwrap();
        let picture = || -> Vec<_> {
            (0..8).map(|page| in_force(&buffer, page * PER_PAGE..(page + 1) * PER_PAGE)).collect()
        };
        let before = picture();
        let unknown = CUresult::CUDA_ERROR_UNKNOWN;
        for k in 1.. {
            rig.faults.forget();
            rig.faults.arm(Fault::nth(k, unknown).of(Call::MemAdvise));
            let set = buffer.set_policy(.., Policy::DeviceFirst);
            let hit = rig.faults.injected() > 0;
            rig.faults.disarm();
            if !hit {
                set.unwrap();
                assert!(k > 8, "{k}");
                break;
            }
            let error = set.unwrap_err();
            let all = 8 * (PER_PAGE * size_of::<u32>()) as u64;
            assert!(matches!(&error,
                ContainerError::Memory(MemoryError::Range { offset: 0, size, cause: CallError::Driver(cause) })
                if *size == all && cause.code() == Some(unknown)), "{error}");
            assert_eq!(picture(), before, "call {k}");
        }
        // If undoing fails too, the error says so, and the next policy starts from the advice in
        // force.
        buffer.set_policy(.., Policy::OnDemand).unwrap();
        rig.faults.arm(Fault::from(2, unknown).of(Call::MemAdvise));
        let error = buffer.set_policy(.., Policy::HostFirst).unwrap_err();
        assert!(matches!(error, ContainerError::PartlyApplied { .. }), "{error}");
        rig.faults.disarm();
        assert_ne!(in_force(&buffer, 0..8 * PER_PAGE), NOTHING);
        buffer.set_policy(.., Policy::ReadMostly).unwrap();
        assert_eq!(in_force(&buffer, 0..8 * PER_PAGE), (true, None, vec![]));
        // As much as possible is undone: the second half, although the first cannot be.
        let (first, second) = (0..4 * PER_PAGE, 4 * PER_PAGE..8 * PER_PAGE);
        buffer.set_policy(first.clone(), Policy::OnDemand).unwrap();
        let told = (in_force(&buffer, first.clone()), in_force(&buffer, second.clone()));
        // Two calls advise the first half and two the second; then the first half is undone.
        for k in [4, 5] {
            rig.faults.arm(Fault::nth(k, unknown).of(Call::MemAdvise));
        }
        let error = buffer.set_policy(.., Policy::DeviceFirst).unwrap_err();
        assert!(matches!(error, ContainerError::PartlyApplied { .. }), "{error}");
        rig.faults.disarm();
        assert_ne!(in_force(&buffer, first), told.0);
        assert_eq!(in_force(&buffer, second), told.1);
    }

    fn dropping_waits_before_it_frees(rig) {
        let (mut buffer, home) = zeroed(rig, 5000);
        let [one, two] = streams(rig);
        rig.machine.hold(D0, home.as_raw());
        launch_reader(rig, &home);
        drop(buffer.device_read(&home).unwrap());
        // The writer is ordered behind that reader, and its event covers both.
        let access = buffer.device_mut(&one).unwrap();
        launch(rig, &access, 1);
        drop(access);
        // One event covers both readers.
        drop(buffer.device_read(&two).unwrap());
        drop(buffer.device_read(&two).unwrap());
        rig.machine.release_all_streams(D0);
        rig.faults.forget();
        drop(buffer);
        let calls = rig.faults.calls();
        let of = |call| calls.iter().filter(|&&made| made == call).count();
        assert_eq!((of(Call::EventSynchronize), of(Call::MemFree)), (2, 1), "{calls:?}");
        let free = calls.iter().position(|&made| made == Call::MemFree);
        let wait = calls.iter().rposition(|&made| made == Call::EventSynchronize);
        assert!(wait < free, "{calls:?}");
        // The buffer has released the streams: only the test holds them.
        drop((home, one, two));
        assert!(rig.machine.live().is_nothing());
    }
}

// These tests leak memory on purpose.
leaving! {
    // I-68
    fn a_leaked_guard_is_waited_for(rig) {
        let (mut buffer, home) = zeroed(rig, 5000);
        let [stream] = streams(rig);
        let leak_writer = |buffer: &mut UnifiedBuffer<u32>, byte| {
            rig.machine.hold(D0, stream.as_raw());
            let access = buffer.device_mut(&stream).unwrap();
            launch(rig, &access, byte);
            std::mem::forget(access);
        };
        leak_writer(&mut buffer, 5);
        let (waited, view) = waits(rig, || buffer.host().unwrap());
        assert!(waited, "the guard was leaked, and the host did not wait");
        if rig.keeps_bytes() {
            assert!(view.iter().all(|&number| number == word(5)));
        }
        drop(view);
        rig.faults.forget();
        drop(buffer.host().unwrap());
        assert_eq!(rig.faults.total(), 0, "the first wait suffices");

        leak_writer(&mut buffer, 6);
        let (waited, access) = waits(rig, || buffer.device_read(&home).map(drop));
        access.unwrap();
        assert!(waited, "another stream cannot be ordered behind work without an event");

        rig.machine.hold(D0, stream.as_raw());
        let access = buffer.device_read(&stream).unwrap();
        launch_reader(rig, &stream);
        std::mem::forget(access);
        drop(buffer.host().unwrap());
        let (waited, view) = waits(rig, || buffer.host_mut().map(drop));
        view.unwrap();
        assert!(waited, "a writer must wait for a leaked reader");

        // Dropping a buffer waits too.
        leak_writer(&mut buffer, 7);
        let (waited, ()) = waits(rig, || drop(buffer));
        assert!(waited);
        assert_eq!(rig.machine.live().allocations, 0);
        assert!(rig.device.lost().is_none());
        // Only what the leaked guards held is leaked.
        drop((stream, home));
        assert_eq!(rig.machine.live().streams, 1);
    }

    fn what_cannot_be_waited_for_is_kept_and_told(rig) {
        let code = CUresult::CUDA_ERROR_UNKNOWN;
        let (mut buffer, _home) = zeroed(rig, 5000);
        let [stream] = streams(rig);
        drop(buffer.device_mut(&stream).unwrap());
        for call in [Call::EventSynchronize, Call::MemFree] {
            rig.faults.arm(Fault::all(code).of(call));
            let failed = buffer.close().unwrap_err();
            assert!(matches!(failed.reason, CloseRefusal::Call(CallError::Driver(error))
                if error.call() == call && error.code() == Some(code)), "{failed}");
            buffer = failed.owner;
            rig.faults.disarm();
            // The buffer still works.
            buffer.write(0, &[1]).unwrap();
            drop(buffer.device_mut(&stream).unwrap());
        }
        buffer.close().unwrap();

        let (mut buffer, _home) = zeroed(rig, 5000);
        drop(buffer.device_mut(&stream).unwrap());
        rig.faults.arm(Fault::all(code).of(Call::EventSynchronize));
        rig.faults.forget();
        drop(buffer);
        assert_eq!(rig.faults.count(Call::MemFree), 0, "freed while it may be in use");
        rig.faults.disarm();
        assert_eq!((rig.device.drop_failures(), rig.machine.live().allocations), (1, 1));
    }

    fn a_lost_context_is_an_error_and_a_quiet_end(rig) {
        let (mut buffer, home) = zeroed(rig, 5000);
        drop(buffer.device_mut(&home).unwrap());
        rig.machine.lose_context(D0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert!(matches!(
            buffer.host(),
            Err(ContainerError::Memory(MemoryError::Call(CallError::Driver(_))))
        ));
        let lost = |error: &ContainerError| matches!(error, ContainerError::Memory(MemoryError::Call(CallError::ContextLost(_))));
        assert!(lost(&buffer.host().unwrap_err()) && lost(&buffer.host_mut().unwrap_err()));
        assert!(lost(&buffer.get(0).unwrap_err()) && lost(&buffer.device_mut(&home).unwrap_err()));
        // This holds even if there is nothing to wait for.
        let other = UnifiedBuffer::<u32>::zeroed(&rig.device, &home, 4);
        assert!(matches!(other, Err(ContainerError::Memory(MemoryError::Call(CallError::ContextLost(_))))));
        let failed = buffer.close().unwrap_err();
        assert!(matches!(failed.reason, CloseRefusal::Call(_)));
        drop(failed.owner);
        assert_eq!(rig.device.drop_failures(), 0, "the memory was freed with the context");
    }
}

fn alone(rig: &Rig<impl Backing>) {
    let (mut buffer, home) = zeroed(rig, 5000);
    assert!(!buffer.is_host_accessible());
    let refused = |error: ContainerError| {
        let right = matches!(error, ContainerError::NoConcurrentAccess(D0));
        assert!(right, "{error}");
        assert!(error.to_string().contains("device 0"), "{error}");
    };
    refused(buffer.host().unwrap_err());
    refused(buffer.host_mut().unwrap_err());
    let here = PageLocation::Device(&rig.device);
    refused(buffer.prefetch(.., PageLocation::Host, &home).unwrap_err());
    refused(
        buffer
            .advise(.., Advice::PreferredLocation(here))
            .unwrap_err(),
    );
    refused(
        buffer
            .advise(.., Advice::AccessedBy(&rig.device))
            .unwrap_err(),
    );
    refused(buffer.set_policy(.., Policy::DeviceFirst).unwrap_err());
    refused(buffer.set_policy(.., Policy::HostFirst).unwrap_err());
    buffer.set_policy(.., Policy::ReadMostly).unwrap();
    assert_eq!(in_force(&buffer, 0..5000), (true, None, vec![]));
    // Copies and kernels work, and the unchecked accesses wait.
    buffer.write(0, &[1, 2, 3]).unwrap();
    buffer.fill(5.., 4).unwrap();
    rig.machine.hold(D0, home.as_raw());
    let access = buffer.device_mut(&home).unwrap();
    launch(rig, &access, 6);
    drop(access);
    let (waited, first) = waits(rig, || {
        // SAFETY: the stand-ins run no work by themselves.
        let view = unsafe { buffer.host_unchecked() }.unwrap();
        view[0]
    });
    assert!(waited);
    if rig.keeps_bytes() {
        assert_eq!(first, word(6));
        // SAFETY: the stand-ins run no work by themselves.
        unsafe { buffer.host_mut_unchecked() }.unwrap()[3] = 9;
        assert_eq!(buffer.get(3).unwrap(), 9);
    }
}

#[test]
fn where_a_device_works_alone_the_host_keeps_out() {
    let attribute = DeviceAttribute::CONCURRENT_MANAGED_ACCESS;
    let rig = common::rig(ModelDriver::new(
        common::model_options().attribute(attribute, 0),
    ));
    alone(&rig);
    common::nothing_left(rig);
    let options = HostOptions::new().manner(common::manner());
    let rig = common::rig(HostDriver::new(options.attribute(attribute, 0)));
    alone(&rig);
    common::nothing_left(rig);
}

#[test]
fn a_device_without_managed_memory_says_so() {
    let attribute = DeviceAttribute::MANAGED_MEMORY;
    let rig = common::rig(ModelDriver::new(
        common::model_options().attribute(attribute, 0),
    ));
    let home = Stream::new(&rig.device).unwrap();
    let made = UnifiedBuffer::<u32>::zeroed(&rig.device, &home, 4);
    let refused = MemoryError::NotSupported {
        device: HERE,
        what: "managed memory",
    };
    assert_eq!(made.unwrap_err().to_string(), refused.to_string());
}

#[test]
fn several_devices_use_one_buffer() {
    let rig = common::rig(HostDriver::new(
        HostOptions::new().manner(common::manner()).devices(2),
    ));
    let second = Device::open(rig.device.driver().clone(), 1).unwrap();
    let there = Location::device(Ordinal(1));
    let (mut buffer, home) = zeroed(&rig, 5000);
    let far = Stream::new(&second).unwrap();
    let wrong = UnifiedBuffer::<u32>::zeroed(&rig.device, &far, 4);
    assert!(matches!(
        wrong,
        Err(ContainerError::Argument(ArgumentError::WrongDevice { .. }))
    ));
    rig.machine.hold(D0, home.as_raw());
    let access = buffer.device_mut(&home).unwrap();
    launch(&rig, &access, 1);
    drop(access);
    let access = buffer.device_mut(&far).unwrap();
    launch(&rig, &access, 2);
    drop(access);
    assert!(
        !far.is_done().unwrap(),
        "the access overtook the other device's work"
    );
    let (waited, last) = waits(&rig, || buffer.host().unwrap()[4999]);
    assert!(waited);
    assert_eq!(last, word(2));
    buffer.advise(.., Advice::AccessedBy(&second)).unwrap();
    let place = PageLocation::Device(&second);
    buffer.advise(.., Advice::PreferredLocation(place)).unwrap();
    assert_eq!(
        in_force(&buffer, 0..5000),
        (false, Some(there), vec![there])
    );
    buffer.prefetch(.., place, &far).unwrap();
    assert_eq!(buffer.last_prefetch(..).unwrap(), Some(there));
    // The close waits for work of the other device. The loss of that device does not prevent
    // freeing the memory.
    drop(buffer.device_read(&far).unwrap());
    rig.machine
        .lose_context(Ordinal(1), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    buffer.close().unwrap();
    assert_eq!(rig.machine.live().allocations, 0);
}

#[test]
fn before_cuda_12_2_a_node_is_refused_by_the_name_of_what_is_missing() {
    let version = CudaVersion::new(12, 1);
    let rig = common::rig(ModelDriver::new(common::model_options().version(version)));
    let (buffer, home) = zeroed(&rig, 5000);
    let node = PageLocation::HostNuma(0);
    let refusals = [
        buffer
            .advise(.., Advice::PreferredLocation(node))
            .unwrap_err(),
        buffer.prefetch(.., node, &home).unwrap_err(),
    ];
    for error in refusals {
        let ContainerError::Memory(MemoryError::Range { cause, .. }) = error else {
            panic!("{error}");
        };
        let missing = matches!(cause.driver(), Some(DriverError::MissingSymbol { since, .. })
            if *since == CudaVersion::new(12, 2));
        assert!(missing, "{cause}");
    }
    for (place, told) in [
        (PageLocation::Host, Location::HOST),
        (PageLocation::Device(&rig.device), HERE),
    ] {
        buffer.advise(.., Advice::PreferredLocation(place)).unwrap();
        assert_eq!(buffer.preferred_location(..).unwrap(), Some(told));
        buffer.prefetch(.., place, &home).unwrap();
        assert_eq!(buffer.last_prefetch(..).unwrap(), Some(told));
    }
    buffer.set_policy(.., Policy::OnDemand).unwrap();
    assert_eq!(in_force(&buffer, 0..5000), NOTHING);
}

#[test]
fn many_threads_read_at_once() {
    let rig = common::clean(common::host());
    let (mut buffer, _home) = zeroed(&rig, 20_000);
    buffer.fill(.., 0x0102_0304).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    // A stream that is dropped at once does not leave its event behind.
                    let stream = Stream::new(&rig.device).unwrap();
                    drop(buffer.device_read(&stream).unwrap());
                    assert_eq!(buffer.host().unwrap()[19_999], 0x0102_0304);
                    assert_eq!(buffer.get(0).unwrap(), 0x0102_0304);
                }
            });
        }
    });
    assert!(rig.machine.live().streams < 20, "{:?}", rig.machine.live());
    buffer.host_mut().unwrap()[0] = 1;
    drop(buffer);
}

#[derive(Clone, Debug)]
enum Step {
    HostWrite(usize, u32),
    Write(usize, Vec<u32>),
    Fill(usize, usize, u32),
    Launch { stream: usize, byte: u8, leak: bool },
    Look { stream: usize, leak: bool },
    Read(usize, usize),
    Move(usize, usize, u8),
    Policy(usize, usize, Policy),
    Hold(usize),
}

const LEN: usize = 3 * PER_PAGE;

fn step() -> impl Strategy<Value = Step> {
    let policy = prop::sample::select(vec![
        Policy::OnDemand,
        Policy::DeviceFirst,
        Policy::HostFirst,
        Policy::ReadMostly,
    ]);
    prop_oneof![
        (0..LEN, any::<u32>()).prop_map(|(at, value)| Step::HostWrite(at, value)),
        (0..LEN, prop::collection::vec(any::<u32>(), 0..40))
            .prop_map(|(at, values)| Step::Write(at, values)),
        (0..LEN, 0..LEN, any::<u32>()).prop_map(|(a, b, value)| Step::Fill(a, b, value)),
        (0..3usize, any::<u8>(), prop::bool::weighted(0.2))
            .prop_map(|(stream, byte, leak)| Step::Launch { stream, byte, leak }),
        (0..3usize, prop::bool::weighted(0.2))
            .prop_map(|(stream, leak)| Step::Look { stream, leak }),
        (0..LEN, 0..50usize).prop_map(|(at, count)| Step::Read(at, count)),
        (0..LEN, 0..LEN, 0..3u8).prop_map(|(a, b, to)| Step::Move(a, b, to)),
        (0..LEN, 0..LEN, policy).prop_map(|(a, b, policy)| Step::Policy(a, b, policy)),
        (0..3usize).prop_map(Step::Hold),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(150), ..ProptestConfig::default() })]

    /// Streams are held back at random and let go later by another thread, so that an access that
    /// does not wait sees old elements.
    #[test]
    fn it_holds_what_std_s_would(steps in prop::collection::vec(step(), 1..25)) {
        let rig = common::host();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_micros(300));
                    rig.machine.release_all_streams(D0);
                }
            });
            let outcome = random_program(&rig, &steps);
            over.store(true, Ordering::SeqCst);
            outcome
        })?;
        prop_assert!(rig.device.lost().is_none());
        prop_assert_eq!(rig.machine.live().allocations, 0);
        prop_assert_eq!(rig.device.drop_failures(), 0);
    }
}

fn random_program(
    rig: &Rig<cuvmm::driver::host::HostMemory>,
    steps: &[Step],
) -> Result<(), TestCaseError> {
    let (mut buffer, home) = zeroed(rig, LEN);
    let others: [Stream; 2] = streams(rig);
    let all = [&home, &others[0], &others[1]];
    let mut known = vec![0u32; LEN];
    let mut policies = vec![Policy::OnDemand; LEN.div_ceil(PER_PAGE)];
    for step in steps {
        match step {
            Step::HostWrite(at, value) => {
                buffer.host_mut().unwrap()[*at] = *value;
                known[*at] = *value;
            }
            Step::Write(at, values) => {
                let fits = at + values.len() <= LEN;
                prop_assert_eq!(buffer.write(*at, values).is_ok(), fits);
                if fits {
                    known[*at..at + values.len()].copy_from_slice(values);
                }
            }
            Step::Fill(from, to, value) => {
                let done = buffer.fill(*from..*to, *value).is_ok();
                prop_assert_eq!(done, from <= to);
                if done {
                    known[*from..*to].fill(*value);
                }
            }
            Step::Launch { stream, byte, leak } => {
                let access = buffer.device_mut(all[*stream]).unwrap();
                launch(rig, &access, *byte);
                if *leak {
                    std::mem::forget(access);
                }
                known.fill(word(*byte));
            }
            Step::Look { stream, leak } => {
                let access = buffer.device_read(all[*stream]).unwrap();
                launch_reader(rig, all[*stream]);
                if *leak {
                    std::mem::forget(access);
                }
                prop_assert_eq!(&*buffer.host().unwrap(), &*known);
            }
            Step::Read(at, count) => {
                let mut into = vec![0; *count];
                let done = buffer.read(*at, &mut into).is_ok();
                prop_assert_eq!(done, at + count <= LEN);
                if done {
                    prop_assert_eq!(&*into, &known[*at..at + count]);
                }
            }
            Step::Move(from, to, place) => {
                let place = match place {
                    0 => PageLocation::Device(&rig.device),
                    1 => PageLocation::Host,
                    _ => PageLocation::HostNuma(0),
                };
                let done = buffer.prefetch(*from..*to, place, all[from % 3]).is_ok();
                prop_assert_eq!(done, from <= to);
            }
            Step::Policy(from, to, policy) => {
                let done = buffer.set_policy(*from..*to, *policy).is_ok();
                prop_assert_eq!(done, from <= to);
                if from < to {
                    policies[from / PER_PAGE..to.div_ceil(PER_PAGE)].fill(*policy);
                }
            }
            Step::Hold(stream) => rig.machine.hold(D0, all[*stream].as_raw()),
        }
    }
    for (page, policy) in policies.iter().enumerate() {
        let range = page * PER_PAGE..((page + 1) * PER_PAGE).min(LEN);
        let (read_mostly, preferred, users) = in_force(&buffer, range);
        prop_assert_eq!(read_mostly, *policy == Policy::ReadMostly);
        prop_assert_eq!(
            preferred,
            match policy {
                Policy::DeviceFirst => Some(HERE),
                Policy::HostFirst => Some(Location::HOST),
                _ => None,
            }
        );
        let expected: BTreeSet<_> = match policy {
            Policy::DeviceFirst => BTreeSet::from([Location::HOST]),
            Policy::HostFirst => BTreeSet::from([HERE]),
            _ => BTreeSet::new(),
        };
        prop_assert_eq!(users.into_iter().collect::<BTreeSet<_>>(), expected);
    }
    prop_assert_eq!(&*buffer.host().unwrap(), &*known);
    prop_assert_eq!(buffer.to_vec().unwrap(), known);
    Ok(())
}
