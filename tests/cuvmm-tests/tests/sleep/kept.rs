//! Kept contents that are read while their block sleeps.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::{self, G, host, pool};
use crate::on_both;
use cuvmm::error::{ArgumentError, SleepError};
use cuvmm::{Contents, HostStore, Stream};

/// Returns bytes that differ in each part of a store and depend on where they are.
fn contents(size: u64) -> Vec<u8> {
    (0..size as usize).map(|at| (at / 4093) as u8).collect()
}

on_both! {
    fn bytes_of_sleeping_blocks_are_read_without_a_driver_call(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("model").register().unwrap();
        // The last part of the contents is not full.
        let size = 5 * G + 1000;
        let block = tenant.allocate(size).unwrap();
        let small = tenant.allocate(100).unwrap();
        let expected = contents(size);
        block.write(0, &expected).unwrap();
        small.write(0, &[7; 100]).unwrap();
        let pinned = HostStore::builder(&rig.device).pinned(8 * G).build().unwrap();
        let ordinary = HostStore::builder(&rig.device).ordinary(8 * G).staging(G);
        let ordinary = ordinary.build().unwrap();
        for store in [&pinned, &ordinary, &pinned] {
            tenant.blocks().sleep(Contents::Keep(store)).unwrap();
            let calls = pool.calls().total();
            let ranges = [
                0..size, 0..1, 1..G, G - 1..G + 1, G..3 * G, 2 * G - 3..5 * G + 7, size - 1..size, size..size,
            ];
            for range in ranges {
                let mut bytes = vec![1; (range.end - range.start) as usize];
                block.read_kept(range.start, &mut bytes).unwrap();
                let right = bytes == expected[range.start as usize..range.end as usize];
                assert!(right || !rig.keeps_bytes(), "{range:?}");
            }
            let mut bytes = [0; 100];
            small.read_kept(0, &mut bytes).unwrap();
            assert!(bytes == [7; 100] || !rig.keeps_bytes());
            assert_eq!(pool.calls().total(), calls);
            assert!(block.is_asleep() && small.is_asleep());
            assert_eq!(tenant.stats().in_use, 0);
            let woken = tenant.blocks().wake().unwrap();
            assert_eq!((woken.blocks, woken.restored), (2, size + 100));
            let mut bytes = vec![0; size as usize];
            block.read(0, &mut bytes).unwrap();
            assert!(bytes == expected || !rig.keeps_bytes());
        }
    }

    fn bytes_that_are_not_kept_are_refused(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("model").register().unwrap();
        let block = tenant.allocate(2 * G).unwrap();
        let mut bytes = [9; 4];
        let awake = block.read_kept(0, &mut bytes).unwrap_err();
        assert!(matches!(awake, SleepError::Awake { bytes } if bytes == 2 * G), "{awake}");
        tenant.blocks().sleep(Contents::Discard).unwrap();
        let lost = block.read_kept(0, &mut bytes).unwrap_err();
        assert!(matches!(lost, SleepError::NotKept { bytes } if bytes == 2 * G), "{lost}");
        tenant.blocks().wake().unwrap();
        let store = HostStore::builder(&rig.device).pinned(2 * G).build().unwrap();
        tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        for offset in [2 * G - 3, 2 * G + 1, u64::MAX - 3, u64::MAX] {
            let outside = block.read_kept(offset, &mut bytes).unwrap_err();
            let SleepError::Argument(ArgumentError::OutOfRange { start, len, .. }) = outside else {
                panic!("{outside}");
            };
            assert_eq!((start, len), (offset, 2 * G));
        }
        assert_eq!(bytes, [9; 4]);
        tenant.blocks().wake().unwrap();
    }

    fn contents_are_read_while_a_graph_is_captured(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("model").register().unwrap();
        let block = tenant.allocate(G).unwrap();
        block.write(0, &[5; 16]).unwrap();
        let store = HostStore::builder(&rig.device).pinned(G).build().unwrap();
        tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let guard = pool.capture_guard();
        let mut bytes = [0; 16];
        block.read_kept(0, &mut bytes).unwrap();
        assert!(bytes == [5; 16] || !rig.keeps_bytes());
        drop((guard, stream));
    }
}

/// Each read has the contents, or says that the block is not asleep.
/// Longer than the test takes.
const LONG: Duration = Duration::from_secs(60);

#[test]
fn blocks_sleep_and_wake_while_others_read() {
    let rig = common::clean(host());
    let pool = pool(&rig, 16);
    let tenant = pool.tenant("model").register().unwrap();
    let block = tenant.allocate(2 * G).unwrap();
    let expected = contents(2 * G);
    block.write(0, &expected).unwrap();
    let store = HostStore::builder(&rig.device)
        .pinned(2 * G)
        .build()
        .unwrap();
    let ended = AtomicBool::new(false);
    let read = |offset: usize| {
        let mut bytes = vec![0; G as usize];
        match block.read_kept(offset as u64, &mut bytes) {
            Ok(()) => assert_eq!(bytes, expected[offset..offset + G as usize]),
            Err(SleepError::Awake { .. } | SleepError::Busy { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    };
    thread::scope(|scope| {
        for offset in [0, 1_000_003] {
            let (read, ended) = (&read, &ended);
            scope.spawn(move || {
                while !ended.load(Ordering::SeqCst) {
                    read(offset);
                }
            });
        }
        for _ in 0..20 {
            // A read that is ending has a lease for a moment more.
            let blocks = tenant.blocks().timeout(LONG);
            blocks.sleep(Contents::Keep(&store)).unwrap();
            loop {
                match tenant.blocks().wake() {
                    Ok(woken) => {
                        assert_eq!(woken.restored, 2 * G);
                        break;
                    }
                    // A thread is reading.
                    Err(SleepError::Busy { blocks: 1, .. }) => thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            }
        }
        ended.store(true, Ordering::SeqCst);
    });
    let mut bytes = vec![0; 2 * G as usize];
    block.read(0, &mut bytes).unwrap();
    assert!(bytes == expected);
    assert_eq!(store.free(), 2 * G);
}
