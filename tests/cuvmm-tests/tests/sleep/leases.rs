//! Leases that are taken and end while their blocks fall asleep.

use crate::common;
use crate::common::{D0, G, busy, host, model, pool};
use cuvmm::error::SleepError;
use cuvmm::sleep::Progress;
use cuvmm::{Block, Contents, HostStore, Stream};

/// Puts two blocks to sleep. While that runs, a lease is taken on the second one, work is queued, and
/// the lease ends.
fn lease_meanwhile(
    act: impl Fn(&common::Rig<cuvmm::driver::model::Nothing>, &Stream, &Block) + Sync,
) {
    let rig = model();
    let pool = pool(&rig, 16);
    let tenant = pool.tenant("model").register().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let blocks = [G, 2 * G].map(|size| tenant.allocate_on(&stream, size).unwrap());
    let watch = |progress: &Progress| {
        if progress.done < progress.total {
            assert_eq!(progress.done, G, "the second block is still mapped");
            act(&rig, &stream, &blocks[1]);
        }
        true
    };
    let slept = tenant.blocks().on_progress(&watch).sleep(Contents::Discard);
    let hazards = rig.machine.take_hazards();
    assert!(
        hazards.is_empty(),
        "unmapped under queued work: {}",
        hazards[0]
    );
    let busy = matches!(
        slept,
        Err(SleepError::Busy { .. } | SleepError::Leased { .. })
    );
    assert!(busy, "{slept:?}");
    assert!(blocks.iter().all(|block| !block.is_asleep()));
    rig.machine.release_all_streams(D0);
}

#[test]
fn work_that_was_queued_under_a_lease_while_blocks_fall_asleep_is_not_cut_off() {
    lease_meanwhile(|rig, stream, block| {
        let lease = block.lease();
        busy(rig, stream, block, 7);
        drop(lease);
    });
}

#[test]
fn work_of_another_stream_that_a_lease_recorded_is_not_cut_off() {
    lease_meanwhile(|rig, _, block| {
        let lease = block.lease();
        let other = Stream::new(&rig.device).unwrap();
        busy(rig, &other, block, 7);
        lease.record_use(&other).unwrap();
        drop(lease);
    });
}

// I-91
#[test]
fn what_is_written_under_a_lease_after_the_copy_is_not_lost() {
    let rig = host();
    let pool = pool(&rig, 16);
    let tenant = pool.tenant("model").register().unwrap();
    let stream = Stream::new(&rig.device).unwrap();
    let block = tenant.allocate_on(&stream, G).unwrap();
    block.write(0, &[1; 4]).unwrap();
    let store = HostStore::builder(&rig.device).pinned(4 * G).build();
    let store = store.unwrap();
    let write_after_the_copy = |progress: &Progress| {
        assert_eq!(progress.done, progress.total);
        let lease = block.lease();
        rig.kernel(&stream, &[], &[(lease.address(), 4, 7)]);
        stream.synchronize().unwrap();
        true
    };
    let blocks = tenant.blocks().on_progress(&write_after_the_copy);
    let leased = blocks.sleep(Contents::Keep(&store)).unwrap_err();
    assert!(
        matches!(leased, SleepError::Leased { blocks: 1, .. }),
        "{leased}"
    );
    assert!(!block.is_asleep());
    let lease_alone = |_: &Progress| {
        drop(block.lease());
        true
    };
    // Contents that are not kept cannot be lost.
    let blocks = tenant.blocks().on_progress(&lease_alone);
    tenant.blocks().sleep(Contents::Keep(&store)).unwrap();
    blocks.wake().unwrap();
    let mut seen = [0; 4];
    block.read(0, &mut seen).unwrap();
    assert_eq!(seen, [7; 4]);
    blocks.sleep(Contents::Discard).unwrap();
}
