//! Blocks of several ranks sleep and wake together. Every driver call of one rank fails once: all
//! ranks are then as before, with their contents.

use std::path::Path;
use std::time::Duration;

use crate::common::{self, G, Rig};
use cuvmm::driver::CUresult;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::host::HostMemory;
use cuvmm::error::{GroupError, SleepError, Undone};
use cuvmm::{Block, Contents, Group, HostStore, Tenant};

/// Longer than any test runs.
const LONG: Duration = Duration::from_secs(600);

/// A rank with a device, blocks with contents, and a store for them.
struct Member {
    tenant: Tenant,
    blocks: Vec<Block>,
    store: HostStore,
    group: Group,
    rig: Rig<HostMemory>,
}

impl Member {
    fn new(directory: &Path, rank: u32) -> Self {
        let rig = common::host();
        let tenant = common::pool(&rig, 16).tenant("model").register().unwrap();
        let blocks = [2 * G, G].map(|size| {
            let block = tenant.block(size).tag("weights").allocate().unwrap();
            block.write(0, &[rank as u8 + 1; 99]).unwrap();
            block
        });
        Self {
            blocks: blocks.into(),
            store: HostStore::builder(&rig.device)
                .pinned(3 * G)
                .build()
                .unwrap(),
            group: Group::join(directory, "tp0", 2, Some(rank)).unwrap(),
            tenant,
            rig,
        }
    }

    fn sleep(&self, keep: bool) -> Result<(), GroupError> {
        self.sleep_with(match keep {
            true => Contents::Keep(&self.store),
            false => Contents::Discard,
        })
    }

    /// Marks the bytes that [`has_contents`](Self::has_contents) reads, and keeps only these.
    fn sleep_marked(&self) -> Result<(), GroupError> {
        for block in &self.blocks {
            block.set_kept(Some(0..99)).unwrap();
        }
        self.sleep_with(Contents::KeepMarked(&self.store))
    }

    fn sleep_with(&self, contents: Contents<'_>) -> Result<(), GroupError> {
        let blocks = self.tenant.blocks().tag("weights");
        let slept = self.group.sleep(&blocks, contents, LONG)?;
        assert_eq!((slept.blocks, slept.given), (2, 3 * G));
        Ok(())
    }

    fn wake(&self) -> Result<(), GroupError> {
        let woken = self
            .group
            .wake(&self.tenant.blocks().tag("weights"), LONG)?;
        assert_eq!((woken.blocks, woken.mapped), (2, 3 * G));
        Ok(())
    }

    fn is_asleep(&self) -> bool {
        let asleep = self.blocks.iter().filter(|block| block.is_asleep()).count();
        assert!(asleep == 0 || asleep == 2, "{asleep} blocks sleep");
        asleep == 2
    }

    fn has_contents(&self) -> bool {
        let rank = self.group.rank() as u8;
        self.blocks.iter().all(|block| {
            let mut bytes = [0; 99];
            block.read(0, &mut bytes).unwrap();
            bytes == [rank + 1; 99]
        })
    }
}

fn together(
    members: &[Member; 2],
    act: impl Fn(&Member) -> Result<(), GroupError> + Sync,
) -> [Result<(), GroupError>; 2] {
    std::thread::scope(|scope| {
        let threads = members.each_ref().map(|member| scope.spawn(|| act(member)));
        threads.map(|it| it.join().unwrap())
    })
}

fn done(outcomes: [Result<(), GroupError>; 2]) {
    for outcome in outcomes {
        outcome.unwrap();
    }
}

type Act = fn(&Member) -> Result<(), GroupError>;

/// Fails each driver call of an operation in the second rank, after another operation if one is
/// given, which puts all to sleep. Returns the number of calls.
fn sweep(before: Option<Act>, kept: bool, act: Act) -> u64 {
    let asleep = before.is_some();
    for k in 1.. {
        assert!(k < 200, "the operation never ends");
        let directory = tempfile::tempdir().unwrap();
        let members = [0, 1].map(|rank| Member::new(directory.path(), rank));
        if let Some(before) = before {
            done(together(&members, before));
        }
        let faults = &members[1].rig.faults;
        faults.forget();
        faults.arm(Fault::nth(k, CUresult::CUDA_ERROR_UNKNOWN));
        let [first, second] = together(&members, act);
        let injected = faults.injected();
        faults.disarm();
        if injected == 0 {
            done([first, second]);
            return k - 1;
        }
        match (first, second) {
            (Ok(()), Ok(())) => {}
            (Err(first), Err(GroupError::Sleep(own))) => {
                let reason = own.to_string();
                assert!(
                    matches!(&first, GroupError::Undone { rank: 1, cause, .. }
                        if *cause == Undone::Failed(reason.clone())),
                    "{first}: {reason}"
                );
                assert!(
                    members.iter().all(|it| it.is_asleep() == asleep),
                    "call {k}"
                );
                if !asleep {
                    assert!(members.iter().all(Member::has_contents), "call {k}");
                }
                done(together(&members, act));
            }
            outcomes => panic!("call {k}: {outcomes:?}"),
        }
        assert!(
            members.iter().all(|it| it.is_asleep() != asleep),
            "call {k}"
        );
        if kept {
            if !asleep {
                done(together(&members, Member::wake));
            }
            assert!(members.iter().all(Member::has_contents), "call {k}");
        }
    }
    unreachable!()
}

#[test]
fn every_fault_of_one_rank_leaves_all_ranks_as_they_were() {
    let calls = sweep(None, true, |it| it.sleep(true));
    assert!(
        calls >= 5,
        "{calls}: copies, and an unmapping for each extent"
    );
    let calls = sweep(None, false, |it| it.sleep(false));
    assert!(calls >= 2, "{calls}: an unmapping for each extent");
    let calls = sweep(None, true, Member::sleep_marked);
    assert!(
        calls >= 4,
        "{calls}: a copy and an unmapping for each block"
    );
    let all: [Act; 2] = [|it| it.sleep(true), Member::sleep_marked];
    for before in all {
        let calls = sweep(Some(before), true, Member::wake);
        assert!(calls >= 5, "{calls}: mappings, access and copies");
    }
}

#[test]
fn a_refusal_of_one_rank_is_shown_in_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let members = [0, 1].map(|rank| Member::new(directory.path(), rank));
    let lease = members[0].blocks[0].lease();
    let [first, second] = together(&members, |it| it.sleep(true));
    assert!(matches!(
        first,
        Err(GroupError::Sleep(SleepError::Leased { blocks: 1, .. }))
    ));
    let pid = std::process::id();
    let text = format!(
        "group \"tp0\" has undone {:?}: rank 0 (process {pid}) failed: leases keep 1 block (4 MiB): drop the leases",
        r#"sleep ["weights"] keep"#
    );
    assert_eq!(second.unwrap_err().to_string(), text);
    assert!(
        members
            .iter()
            .all(|it| !it.is_asleep() && it.has_contents())
    );
    drop(lease);
    done(together(&members, |it| it.sleep(true)));
    assert!(members.iter().all(Member::is_asleep));
}

/// The watcher of a rank cancels: the others' copies are undone.
#[test]
fn a_rank_that_cancels_undoes_all() {
    let directory = tempfile::tempdir().unwrap();
    let members = [0, 1].map(|rank| Member::new(directory.path(), rank));
    let outcomes = together(&members, |it| {
        let goes_on = |_: &_| it.group.rank() == 0;
        let blocks = it.tenant.blocks().on_progress(&goes_on);
        let contents = Contents::Keep(&it.store);
        it.group.sleep(&blocks, contents, LONG).map(drop)
    });
    let [first, second] = outcomes;
    assert!(matches!(
        second,
        Err(GroupError::Sleep(SleepError::Cancelled))
    ));
    let cause = Undone::Failed(SleepError::Cancelled.to_string());
    assert!(
        matches!(first, Err(GroupError::Undone { rank: 1, cause: found, .. }) if found == cause)
    );
    assert!(
        members
            .iter()
            .all(|it| !it.is_asleep() && it.has_contents())
    );
}

/// Asserts that ranks with other operations are refused before any driver call.
fn differ(act: impl Fn(&Member) -> Result<(), GroupError> + Sync) {
    let directory = tempfile::tempdir().unwrap();
    let members = [0, 1].map(|rank| Member::new(directory.path(), rank));
    for member in &members {
        member.rig.faults.forget();
    }
    for outcome in together(&members, act) {
        let error = outcome.unwrap_err();
        assert!(
            matches!(
                &error,
                GroupError::Undone {
                    cause: Undone::OtherOperation { .. },
                    ..
                }
            ),
            "{error}"
        );
    }
    assert!(
        members.iter().all(|it| it.rig.faults.total() == 0),
        "no driver call"
    );
    assert!(
        members
            .iter()
            .all(|it| !it.is_asleep() && it.has_contents())
    );
}

#[test]
fn ranks_that_keep_other_contents_change_nothing() {
    differ(|it| it.sleep(it.group.rank() == 0));
}

#[test]
fn tags_that_look_alike_in_a_list_are_other_operations() {
    let alike: [[&[&str]; 2]; 3] = [
        [&["a, b"], &["a", "b"]],
        [&["all blocks"], &[]],
        [&["a\", \"b"], &["a", "b"]],
    ];
    for tags in alike {
        differ(|it| {
            let tags = tags[it.group.rank() as usize].iter();
            let blocks = tags.fold(it.tenant.blocks(), |all, &tag| all.tag(tag));
            it.group.sleep(&blocks, Contents::Discard, LONG).map(drop)
        });
    }
    // Their order is not of importance.
    let directory = tempfile::tempdir().unwrap();
    let members = [0, 1].map(|rank| Member::new(directory.path(), rank));
    done(together(&members, |it| {
        let tags = match it.group.rank() {
            0 => ["weights", "cache"],
            _ => ["cache", "weights"],
        };
        let blocks = it.tenant.blocks().tag(tags[0]).tag(tags[1]);
        it.group.sleep(&blocks, Contents::Discard, LONG).map(drop)
    }));
    assert!(members.iter().all(Member::is_asleep));
}
