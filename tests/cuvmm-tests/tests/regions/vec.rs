//! A device vector compared with `std`'s, and its state after a failure.

use crate::common;
use crate::common::{D0, G, Rig};
use crate::on_both;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, Call};
use cuvmm::error::{ArgumentError, ContainerError};
use cuvmm::{DeviceVec, Stream};
use proptest::prelude::*;

/// Elements per granule.
const PER_GRANULE: usize = G as usize / 4;

fn numbers(from: u32, count: usize) -> Vec<u32> {
    (from..).take(count).collect()
}

fn empty(rig: &Rig<impl Backing>, granules: usize) -> DeviceVec<u32> {
    let stream = Stream::new(&rig.device).unwrap();
    DeviceVec::new(&rig.device, &stream, granules * PER_GRANULE).unwrap()
}

on_both! {
    fn it_grows_in_place_with_few_extents(rig) {
        let mut vec = empty(rig, 256);
        let address = vec.address();
        assert_eq!((vec.len(), vec.capacity(), vec.held()), (0, 0, 0));
        let before = rig.device.calls();
        let all = numbers(0, 256 * 7 + PER_GRANULE);
        for granule in 0..256 {
            vec.extend_from_slice(&all[granule * 7..][..PER_GRANULE]).unwrap();
            assert_eq!(vec.address(), address);
            // The capacity doubles at first; later it grows by 16 MiB, a 512th of the device's
            // memory, or an eighth, whichever is most.
            let bytes = vec.len() as u64 * 4;
            let step = (rig.device.total_memory() / 512).max(8 * G);
            assert!(vec.held() <= (2 * bytes).min((bytes + step).max(bytes * 9 / 8)));
        }
        let made = rig.device.calls().since(&before).count(Call::MemCreate);
        let expected = match rig.device.total_memory() >> 30 {
            // Eight doublings, and two steps of 128 MiB.
            64 => 8 + 2,
            // Five doublings, then steps of 16 MiB up to 128 MiB, then eight steps per doubling.
            _ => 5 + 6 + 16,
        };
        assert_eq!(made, expected);
        assert_eq!((vec.len(), vec.capacity()), (vec.max_len(), vec.max_len()));
        if rig.keeps_bytes() {
            for granule in [0, 100, 255] {
                assert_eq!(vec.get(granule * PER_GRANULE + 3).unwrap(), granule as u32 * 7 + 3);
            }
        }
        assert_eq!((vec.view().address(), vec.view().len()), (address, vec.len()));
    }

    fn in_a_tenant_it_has_16_mib_or_an_eighth_ahead(rig) {
        let pool = common::pool(rig, 256);
        let tenant = pool.tenant("vector").register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let region = tenant.region(256 * G).reserve().unwrap();
        let mut vec = DeviceVec::<u32>::from_region(region, &stream).unwrap();
        let before = rig.device.calls();
        for granules in 1..=128 {
            vec.reserve(granules as usize * PER_GRANULE).unwrap();
            let bytes = granules * G;
            assert!(vec.held() <= (bytes + 8 * G).max(bytes * 9 / 8));
        }
        let made = rig.device.calls().since(&before).count(Call::MemCreate);
        assert_eq!(made, 5 + 6 + 8);
    }

    fn what_cannot_be_is_refused_and_changes_nothing(rig) {
        let stream = Stream::new(&rig.device).unwrap();
        let other = common::model();
        let stranger = Stream::new(&other.device).unwrap();
        let made = DeviceVec::<u32>::new(&rig.device, &stranger, 8);
        assert!(matches!(made, Err(ContainerError::Argument(ArgumentError::WrongDevice { .. }))));
        let made = DeviceVec::<()>::new(&rig.device, &stream, 8);
        assert!(matches!(
            made,
            Err(ContainerError::Argument(ArgumentError::Zero("bytes of the elements")))
        ));
        let made = DeviceVec::<u64>::new(&rig.device, &stream, usize::MAX);
        assert!(matches!(
            made,
            Err(ContainerError::Argument(ArgumentError::Overflow { value: u64::MAX, .. }))
        ));
        let made = DeviceVec::<u32>::new(&rig.device, &stream, 0);
        assert!(matches!(
            made,
            Err(ContainerError::Argument(ArgumentError::Zero("bytes of the elements")))
        ));
        let mut vec = DeviceVec::<u32>::new(&rig.device, &stream, 10).unwrap();
        vec.extend_from_slice(&[1, 2, 3]).unwrap();
        assert!(matches!(
            vec.extend_from_slice(&[0; 8]),
            Err(ContainerError::Full { len: 3, additional: 8, capacity: 10 })
        ));
        assert!(matches!(vec.resize(11, 0), Err(ContainerError::Full { .. })));
        assert!(matches!(vec.reserve(usize::MAX), Err(ContainerError::Full { .. })));
        assert!(matches!(
            vec.get(3),
            Err(ContainerError::Argument(ArgumentError::OutOfRange { len: 3, .. }))
        ));
        assert!(matches!(
            vec.write(2, &[0; 2]),
            Err(ContainerError::Argument(ArgumentError::OutOfRange { .. }))
        ));
        assert!(matches!(
            vec.read(usize::MAX, &mut [0; 2]),
            Err(ContainerError::Argument(ArgumentError::OutOfRange { .. }))
        ));
        assert!(matches!(
            vec.record_use(&stranger),
            Err(ContainerError::Argument(ArgumentError::WrongDevice { .. }))
        ));
        vec.read(3, &mut []).unwrap();
        assert_eq!((vec.len(), vec.capacity()), (3, 10));
        rig.shows(vec.to_vec().unwrap(), [1, 2, 3]);
    }

    fn elements_are_made_on_the_device(rig) {
        let mut vec = empty(rig, 8);
        rig.faults.forget();
        vec.resize(3 * PER_GRANULE + 5, 0x0101_0101).unwrap();
        assert_eq!(rig.faults.count(Call::MemsetD8Async), 1);
        vec.resize(6 * PER_GRANULE + 7, 0x0102_0304).unwrap();
        // 256 KiB are copied from the host; five copies reach 24 times that.
        assert_eq!(rig.faults.count(Call::MemcpyHtoDAsync), 1);
        assert_eq!(rig.faults.count(Call::MemcpyDtoDAsync), 5);
        if rig.keeps_bytes() {
            let seen = vec.to_vec().unwrap();
            let (first, second) = seen.split_at(3 * PER_GRANULE + 5);
            assert!(first.iter().all(|&element| element == 0x0101_0101));
            assert!(second.iter().all(|&element| element == 0x0102_0304));
        }
    }

    fn a_kernel_writes_behind_the_last_element(rig) {
        let mut vec = empty(rig, 8);
        vec.extend_from_slice(&[1, 2]).unwrap();
        vec.reserve(PER_GRANULE).unwrap();
        let room = vec.capacity() - 2;
        let vacant = vec.spare_capacity_mut();
        assert_eq!((vacant.len(), vacant.address().0), (room, vec.address().0 + 8));
        let spare = vec.spare_capacity_mut().address();
        rig.kernel(vec.home_stream(), &[], &[(spare, 12, 0x22)]);
        assert!(matches!(
            vec.assume_written(room + 1),
            Err(ContainerError::Full { len: 2, additional, capacity })
                if (additional, capacity) == (room + 1, room + 2)
        ));
        vec.assume_written(3).unwrap();
        rig.shows(vec.to_vec().unwrap(), [1, 2, 0x2222_2222, 0x2222_2222, 0x2222_2222]);
        vec.assume_written(room - 3).unwrap();
        assert!(vec.spare_capacity_mut().is_empty());
    }

    fn memory_it_gives_up_waits_for_the_streams_that_used_it(rig) {
        let mut vec = empty(rig, 16);
        let user = Stream::new(&rig.device).unwrap();
        vec.resize(16 * PER_GRANULE, 5).unwrap();
        vec.record_use(&user).unwrap();
        rig.held_kernel(&user, &[], &[(vec.address(), 16 * G, 1)]);
        vec.truncate(1);
        assert_eq!(vec.capacity(), 16 * PER_GRANULE, "truncating keeps the memory");
        assert_eq!(vec.shrink_to_fit().unwrap(), 0, "a kernel may still write there");
        rig.machine.release_stream(D0, user.as_raw());
        let kept = vec.held();
        let given = vec.shrink_to_fit().unwrap();
        assert_eq!(given + vec.held(), kept);
        assert!(rig.device.lost().is_none());
        vec.resize(16 * PER_GRANULE, 9).unwrap();
        rig.shows(vec.get(16 * PER_GRANULE - 1).unwrap(), 9);
    }

    fn nothing_goes_before_work_of_streams_that_nobody_can_name(rig) {
        let mut vec = empty(rig, 16);
        let theirs = Stream::new(&rig.device).unwrap();
        vec.resize(16 * PER_GRANULE, 5).unwrap();
        assert_eq!(vec.streams(), Some(vec![vec.home_stream().clone()]));
        vec.record_use_anywhere();
        assert_eq!(vec.streams(), None);
        rig.held_kernel(&theirs, &[], &[(vec.address(), 16 * G, 1)]);
        vec.clear();
        let early = vec.shrink_to_fit();
        rig.machine.release_stream(D0, theirs.as_raw());
        assert_eq!(early.unwrap(), 0);
        assert!(vec.shrink_to_fit().unwrap() >= 16 * G);
        assert!(rig.device.lost().is_none());
    }

    fn every_call_of_growing_and_shrinking_may_fail_once(rig) {
        // Made once, because this takes longer than all else in a build that is not optimized.
        let all = numbers(1, 32 * PER_GRANULE);
        let from = |first: usize, granules: usize| &all[first - 1..][..granules * PER_GRANULE];
        for code in [CUresult::CUDA_ERROR_OUT_OF_MEMORY, CUresult::CUDA_ERROR_UNKNOWN] {
            for k in 1..100 {
                let mut vec = empty(rig, 64);
                vec.extend_from_slice(from(1, 20)).unwrap();
                rig.faults.forget();
                rig.faults.arm(common::nth_of(k, code, &[
                    Call::MemCreate, Call::MemMap, Call::MemSetAccess, Call::MemUnmap,
                    Call::MemcpyHtoDAsync, Call::StreamSynchronize,
                ]));
                let grown = vec.extend_from_slice(from(7, 5));
                let len = if grown.is_ok() { 25 } else { 20 } * PER_GRANULE;
                assert_eq!(vec.len(), len);
                vec.truncate(2 * PER_GRANULE);
                let shrunk = vec.shrink_to_fit();
                let hit = rig.faults.injected() > 0;
                rig.faults.disarm();
                assert!(hit || (grown.is_ok() && shrunk.is_ok()));
                vec.extend_from_slice(from(9, 30)).unwrap();
                if rig.keeps_bytes() {
                    assert_eq!(vec.get(2 * PER_GRANULE - 1).unwrap(), 2 * PER_GRANULE as u32);
                    assert_eq!(vec.get(2 * PER_GRANULE).unwrap(), 9);
                }
                drop(vec);
                let live = rig.machine.live();
                assert_eq!((live.physicals, live.reservations), (0, 0), "call {k}, {code}");
                if !hit {
                    assert!(k > 6, "{k}");
                    break;
                }
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Push(u32),
    Extend(usize),
    Resize(usize, u32),
    Truncate(usize),
    Shrink,
    Write(usize, usize),
    Reserve(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let most = 3 * PER_GRANULE;
    prop_oneof![
        any::<u32>().prop_map(Step::Push),
        (0..most).prop_map(Step::Extend),
        (0..2 * most, any::<u32>()).prop_map(|(len, element)| Step::Resize(len, element)),
        (0..2 * most).prop_map(Step::Truncate),
        Just(Step::Shrink),
        (0..most, 0..100usize).prop_map(|(at, count)| Step::Write(at, count)),
        (0..most).prop_map(Step::Reserve),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: common::cases(100), ..ProptestConfig::default() })]

    #[test]
    fn it_holds_what_std_s_would(steps in prop::collection::vec(step(), 1..12)) {
        let rig = common::clean(common::host());
        let mut vec = empty(&rig, 8);
        let (address, most) = (vec.address(), vec.max_len());
        let mut known: Vec<u32> = vec![];
        for (number, step) in steps.iter().enumerate() {
            let before = known.clone();
            let done = match *step {
                Step::Push(element) => {
                    known.push(element);
                    vec.push(element)
                }
                Step::Extend(count) => {
                    let more = numbers(number as u32 * 1000, count);
                    known.extend_from_slice(&more);
                    vec.extend_from_slice(&more)
                }
                Step::Resize(len, element) => {
                    known.resize(len, element);
                    vec.resize(len, element)
                }
                Step::Truncate(len) => {
                    known.truncate(len);
                    vec.truncate(len);
                    Ok(())
                }
                Step::Shrink => vec.shrink_to_fit().map(|_| ()),
                Step::Write(at, count) => {
                    let with = numbers(number as u32 * 77, count);
                    let fits = at + count <= known.len();
                    if fits {
                        known[at..at + count].copy_from_slice(&with);
                    }
                    let done = vec.write(at, &with);
                    prop_assert_eq!(done.is_ok(), fits);
                    Ok(())
                }
                Step::Reserve(count) => vec.reserve(count),
            };
            if let Err(error) = done {
                let over = matches!(error, ContainerError::Full { .. });
                prop_assert!(over, "{}", error);
                known = before;
            }
            prop_assert!(known.len() <= most);
            prop_assert_eq!(vec.len(), known.len());
            prop_assert!(vec.capacity() >= vec.len());
            prop_assert_eq!(vec.address(), address);
        }
        prop_assert_eq!(vec.to_vec().unwrap(), known);
    }
}
