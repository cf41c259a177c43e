//! Random programs of two tenants whose blocks sleep and wake, compared with a small reference:
//! which blocks sleep, what each holds, and the books, which must match the driver's.

use std::time::Duration;

use crate::common;
use crate::common::books::balanced;
use crate::common::{D0, G, Rig};
use crate::programs::run;
use cuvmm::driver::CUresult;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::error::{BlockError, MemoryError, SleepError};
use cuvmm::sleep::{Blocks, Progress};
use cuvmm::{Block, Contents, Exchange, HostStore, Pool, Stream, Tenant};
use proptest::prelude::*;

const TAGS: [&str; 2] = ["weights", "cache"];

/// Granules of the pool, and of the store.
const LIMIT: u64 = 24;
const KEPT: u64 = 14;

/// The contents that a sleep keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keep {
    Nothing,
    All,
    /// The first half of each block, which is marked.
    Half,
}

impl Keep {
    const fn of(self, size: u64) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::All => size,
            Self::Half => size / 2,
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate {
        tenant: usize,
        granules: u64,
        tag: usize,
    },
    Free(usize),
    Grow(usize, u64),
    Shrink(usize),
    /// Queues a kernel that writes to the whole block, now or when its stream is let go.
    Launch(usize, bool),
    LetGo(usize),
    Sleep {
        tenant: usize,
        tag: Option<usize>,
        keep: Keep,
        release: bool,
        stop: Option<u64>,
    },
    Wake {
        tenant: usize,
        tag: Option<usize>,
        stop: Option<u64>,
    },
    /// Puts blocks of a tenant to sleep, and wakes those of the other one.
    Exchange {
        tenant: usize,
        tag: Option<usize>,
        keep: Keep,
        stop: Option<u64>,
    },
    /// Makes the nth driver call from now fail and, if the flag is set, all later calls too.
    Fail(u64, bool),
}

fn step() -> impl Strategy<Value = Step> {
    let tag = || prop::option::of(0..2usize);
    let stop = || prop::option::weighted(0.2, 1..20u64);
    let keep = || prop::sample::select(vec![Keep::Nothing, Keep::All, Keep::Half]);
    prop_oneof![
        4 => (0..2usize, 1..7u64, 0..2usize).prop_map(|(tenant, granules, tag)| Step::Allocate {
            tenant,
            granules,
            tag
        }),
        2 => (0..8usize).prop_map(Step::Free),
        2 => (0..8usize, 1..3u64).prop_map(|(block, by)| Step::Grow(block, by)),
        1 => (0..8usize).prop_map(Step::Shrink),
        4 => (0..8usize, any::<bool>()).prop_map(|(block, held)| Step::Launch(block, held)),
        2 => (0..2usize).prop_map(Step::LetGo),
        4 => (0..2usize, tag(), keep(), any::<bool>(), stop()).prop_map(
            |(tenant, tag, keep, release, stop)| Step::Sleep {
                tenant,
                tag,
                keep,
                release,
                stop
            }
        ),
        4 => (0..2usize, tag(), stop()).prop_map(|(tenant, tag, stop)| Step::Wake {
            tenant,
            tag,
            stop
        }),
        2 => (0..2usize, tag(), keep(), stop()).prop_map(
            |(tenant, tag, keep, stop)| Step::Exchange {
                tenant,
                tag,
                keep,
                stop
            }
        ),
        1 => (1..30u64, any::<bool>()).prop_map(|(nth, lasts)| Step::Fail(nth, lasts)),
    ]
}

/// Returns a callback that stops an operation on `bytes` bytes after `stop` granules.
fn watch(bytes: u64, stop: Option<u64>) -> impl Fn(&Progress) -> bool {
    move |progress| {
        assert_eq!(progress.total, bytes);
        stop.is_none_or(|stop| progress.done < stop * G)
    }
}

/// A block, and what is known about it.
struct Known {
    block: Block,
    tenant: usize,
    tag: usize,
    asleep: bool,
    /// The bytes that are kept while it sleeps.
    kept: u64,
    /// The byte that its first bytes hold, and their number, if known.
    byte: Option<(u8, u64)>,
    address: u64,
}

impl Known {
    /// Checks that the contents can be read if they are kept, and else that the error says why not.
    fn reads_kept(&self, keeps_bytes: bool) {
        let size = self.block.size();
        for offset in [0, size / 2, size - 4] {
            let mut bytes = [0; 4];
            match self.block.read_kept(offset, &mut bytes) {
                Ok(()) => {
                    assert!(self.asleep && offset + 4 <= self.kept);
                    let known = self.byte.filter(|&(_, known)| offset + 4 <= known);
                    let expected = known.map_or(bytes, |(byte, _)| [byte; 4]);
                    assert!(!keeps_bytes || bytes == expected, "at {offset} of {size}");
                }
                Err(SleepError::Awake { bytes }) => assert_eq!((bytes, self.asleep), (size, false)),
                Err(SleepError::NotKept { bytes }) => {
                    assert_eq!((bytes, self.asleep), (size, true));
                    assert!(offset + 4 > self.kept);
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

struct World<'a, B: Backing> {
    rig: &'a Rig<B>,
    pool: Pool,
    tenants: [Tenant; 2],
    streams: [Stream; 2],
    store: HostStore,
    blocks: Vec<Known>,
    held: [bool; 2],
    stamp: u8,
    /// Calls may fail.
    faulty: bool,
}

impl<B: Backing> Drop for World<'_, B> {
    /// Disarms faults and lets streams go, also after a failure, which would wait for held streams
    /// otherwise.
    fn drop(&mut self) {
        self.rig.faults.disarm();
        self.rig.machine.release_all_streams(D0);
    }
}

impl<B: Backing> World<'_, B> {
    fn run(&mut self, step: &Step) {
        match *step {
            Step::Allocate {
                tenant,
                granules,
                tag,
            } => self.allocate(tenant, granules, tag),
            Step::Free(index) => {
                if index < self.blocks.len() {
                    drop(self.blocks.swap_remove(index));
                }
            }
            Step::Grow(index, by) => {
                let Some(known) = self.blocks.get_mut(index) else {
                    return;
                };
                let size = known.block.size() + by * G;
                let outcome = known.block.try_grow_to(size);
                if known.asleep {
                    let expected = size > known.block.capacity();
                    assert!(
                        expected
                            || matches!(
                                outcome,
                                Err(BlockError::Memory(MemoryError::Asleep { .. }))
                            ),
                        "{outcome:?}"
                    );
                } else if outcome.is_ok() {
                    known.byte = None;
                }
            }
            Step::Shrink(index) => {
                if let Some(known) = self.blocks.get_mut(index) {
                    let size = known.block.size().div_ceil(2);
                    assert_eq!(known.block.shrink_to(size).is_err(), known.asleep);
                }
            }
            Step::Launch(index, held) => self.launch(index, held),
            Step::LetGo(stream) => {
                self.rig
                    .machine
                    .release_stream(D0, self.streams[stream].as_raw());
                self.held[stream] = false;
            }
            Step::Sleep {
                tenant,
                tag,
                keep,
                release,
                stop,
            } => self.sleep(tenant, tag, keep, release, stop),
            Step::Wake { tenant, tag, stop } => self.wake(tenant, tag, stop),
            Step::Exchange {
                tenant,
                tag,
                keep,
                stop,
            } => self.exchange(tenant, tag, keep, stop),
            Step::Fail(nth, lasts) if !self.faulty => {
                self.rig.faults.forget();
                let code = CUresult::CUDA_ERROR_UNKNOWN;
                self.rig.faults.arm(match lasts {
                    true => Fault::from(nth, code),
                    false => Fault::nth(nth, code),
                });
                self.faulty = true;
            }
            Step::Fail(..) => {}
        }
    }

    fn allocate(&mut self, tenant: usize, granules: u64, tag: usize) {
        if self.blocks.len() >= 8 {
            return;
        }
        let size = granules * G - 4;
        let block = self.tenants[tenant].block(size).capacity(12 * G);
        let block = block.tag(TAGS[tag]).home_stream(&self.streams[tenant]);
        match block.try_allocate() {
            Ok(block) => self.blocks.push(Known {
                address: block.address().0,
                block,
                tenant,
                tag,
                asleep: false,
                kept: 0,
                byte: None,
            }),
            Err(error) => assert!(self.faulty || error.is_shortage(), "{error}"),
        }
    }

    fn launch(&mut self, index: usize, held: bool) {
        let Some(known) = self.blocks.get_mut(index) else {
            return;
        };
        if known.asleep {
            return;
        }
        let stream = self.streams[known.tenant].as_raw();
        if held {
            self.rig.machine.hold(D0, stream);
            self.held[known.tenant] = true;
        }
        self.stamp = self.stamp % 250 + 1;
        let writes = vec![(known.block.address(), known.block.size(), self.stamp)];
        let queued = self.rig.machine.queue_kernel(D0, stream, vec![], writes);
        queued.unwrap();
        known.byte = Some((self.stamp, known.block.size()));
    }

    fn chosen(&self, tenant: usize, tag: Option<usize>, asleep: bool) -> Vec<usize> {
        let chosen = |known: &Known| {
            let tagged = tag.is_none_or(|tag| known.tag == tag);
            known.tenant == tenant && tagged && known.asleep == asleep
        };
        let blocks = self.blocks.iter().enumerate();
        blocks
            .filter(|(_, known)| chosen(known))
            .map(|(index, _)| index)
            .collect()
    }

    fn bytes(&self, chosen: &[usize]) -> u64 {
        let sizes = chosen.iter().map(|&index| self.blocks[index].block.size());
        sizes.sum()
    }

    fn blocks(&self, tenant: usize, tag: Option<usize>) -> Blocks<'_> {
        let blocks = self.tenants[tenant].blocks();
        match tag {
            Some(tag) => blocks.tag(TAGS[tag]),
            None => blocks,
        }
    }

    fn sleep(
        &mut self,
        tenant: usize,
        tag: Option<usize>,
        keep: Keep,
        release: bool,
        stop: Option<u64>,
    ) {
        let chosen = self.chosen(tenant, tag, false);
        self.mark(&chosen, keep);
        let sizes = chosen.iter().map(|&index| self.blocks[index].block.size());
        let bytes = match keep {
            Keep::Nothing => self.bytes(&chosen),
            keep => sizes.map(|size| keep.of(size)).sum(),
        };
        let watch = watch(bytes, stop);
        let blocks = self
            .blocks(tenant, tag)
            .release(release)
            .on_progress(&watch);
        let contents = self.contents(keep);
        match blocks.sleep(contents) {
            Ok(slept) => {
                assert_eq!(slept.blocks, chosen.len() as u64);
                self.are_asleep(&chosen, keep);
            }
            Err(SleepError::Cancelled) => assert!(stop.is_some_and(|stop| stop * G <= bytes)),
            Err(SleepError::Busy { .. }) => assert!(self.held[tenant] || self.faulty),
            Err(SleepError::StoreFull { wanted, .. }) => {
                assert!(keep != Keep::Nothing && wanted == bytes);
            }
            Err(SleepError::Stayed {
                blocks,
                bytes,
                cause,
            }) => {
                let cancelled = matches!(*cause, SleepError::Cancelled);
                assert!(self.faulty && (stop.is_some() || !cancelled), "{cause}");
                // One failure is undone. A second one during the roll-back is not.
                assert!(self.rig.faults.injected() > 1);
                let stayed = |&index: &usize| self.blocks[index].block.is_asleep();
                let stayed: Vec<usize> = chosen.into_iter().filter(stayed).collect();
                assert_eq!((blocks, bytes), (stayed.len() as u64, self.bytes(&stayed)));
                self.are_asleep(&stayed, keep);
            }
            Err(error) => assert!(self.faulty, "{error}"),
        }
    }

    /// Marks what is kept of blocks.
    fn mark(&self, chosen: &[usize], keep: Keep) {
        for &index in chosen {
            let block = &self.blocks[index].block;
            let half = (keep == Keep::Half).then_some(0..block.size() / 2);
            block.set_kept(half).unwrap();
        }
    }

    fn contents(&self, keep: Keep) -> Contents<'_> {
        match keep {
            Keep::All => Contents::Keep(&self.store),
            Keep::Half => Contents::KeepMarked(&self.store),
            Keep::Nothing => Contents::Discard,
        }
    }

    fn are_asleep(&mut self, indices: &[usize], keep: Keep) {
        for &index in indices {
            let known = &mut self.blocks[index];
            (known.asleep, known.kept) = (true, keep.of(known.block.size()));
        }
    }

    fn wake(&mut self, tenant: usize, tag: Option<usize>, stop: Option<u64>) {
        let chosen = self.chosen(tenant, tag, true);
        let known = chosen.iter().map(|&index| &self.blocks[index]);
        let moved = known.map(|known| match known.kept {
            0 => known.block.size(),
            kept => kept,
        });
        let bytes = moved.sum();
        let watch = watch(bytes, stop);
        match self.blocks(tenant, tag).on_progress(&watch).wake() {
            Ok(woken) => {
                assert_eq!(woken.blocks, chosen.len() as u64);
                for index in chosen {
                    let known = &mut self.blocks[index];
                    known.asleep = false;
                    known.byte = known.byte.map(|(byte, size)| (byte, size.min(known.kept)));
                }
            }
            Err(SleepError::Cancelled) => assert!(stop.is_some_and(|stop| stop * G <= bytes)),
            Err(SleepError::Block { cause, .. }) => {
                let stuck = self.pool.stats().quarantined > 0;
                let stuck =
                    stuck || matches!(cause, BlockError::Memory(MemoryError::Quarantined { .. }));
                assert!(self.faulty || stuck || cause.is_shortage(), "{cause}");
            }
            Err(error) => assert!(self.faulty, "{error}"),
        }
    }

    fn exchange(&mut self, tenant: usize, tag: Option<usize>, keep: Keep, stop: Option<u64>) {
        let (falling, waking) = (
            self.chosen(tenant, tag, false),
            self.chosen(1 - tenant, None, true),
        );
        self.mark(&falling, keep);
        let watch = |progress: &Progress| stop.is_none_or(|stop| progress.done < stop * G);
        let contents = self.contents(keep);
        let outcome = Exchange::new()
            .sleep(self.blocks(tenant, tag).on_progress(&watch), contents)
            .wake(self.blocks(1 - tenant, None))
            .run();
        match outcome {
            Ok(exchanged) => {
                let counts = (exchanged.slept.blocks, exchanged.woken.blocks);
                assert_eq!(counts, (falling.len() as u64, waking.len() as u64));
                self.are_asleep(&falling, keep);
                for index in waking {
                    let known = &mut self.blocks[index];
                    known.asleep = false;
                    known.byte = known.byte.map(|(byte, size)| (byte, size.min(known.kept)));
                }
            }
            Err(SleepError::Stayed { .. } | SleepError::Lost { .. }) => {
                // Contents that were not all kept are not brought back.
                assert!(self.faulty || keep != Keep::All);
                let asleep = |&index: &usize| self.blocks[index].block.is_asleep();
                for index in falling.into_iter().filter(asleep).collect::<Vec<usize>>() {
                    let kept = self.blocks[index].block.read_kept(0, &mut [0]).is_ok();
                    assert!(kept || self.faulty || keep == Keep::Nothing);
                    self.are_asleep(&[index], if kept { keep } else { Keep::Nothing });
                }
            }
            Err(SleepError::Cancelled) => assert!(stop.is_some()),
            Err(SleepError::Busy { .. }) => assert!(self.held[tenant] || self.faulty),
            Err(SleepError::StoreFull { .. }) => assert!(keep != Keep::Nothing),
            Err(SleepError::Block { cause, .. }) => {
                let stuck = self.pool.stats().quarantined > 0;
                let stuck =
                    stuck || matches!(cause, BlockError::Memory(MemoryError::Quarantined { .. }));
                assert!(self.faulty || stuck || cause.is_shortage(), "{cause}");
            }
            Err(error) => assert!(self.faulty, "{error}"),
        }
    }

    fn check(&mut self) {
        let stats = balanced(self.rig, &self.pool);
        assert!(stats.committed + stats.free + stats.quarantined <= LIMIT * G);
        let (mut in_use, mut asleep, mut kept) = (0, 0, 0);
        for known in &self.blocks {
            assert_eq!(known.block.is_asleep(), known.asleep);
            assert_eq!(known.block.address().0, known.address);
            let size = known.block.size();
            if known.asleep {
                asleep += size.div_ceil(G) * G;
                kept += known.kept.div_ceil(G) * G;
                assert!(known.block.read(0, &mut [0]).is_err());
            } else {
                in_use += size;
            }
            known.reads_kept(self.rig.keeps_bytes());
        }
        assert_eq!((stats.in_use, stats.asleep), (in_use, asleep), "{stats:#?}");
        assert_eq!(self.store.free(), KEPT * G - kept);
        if !self.rig.keeps_bytes() {
            return;
        }
        for known in &self.blocks {
            // Writes of a held stream are not visible yet, and reading would wait for them.
            if let (false, false, Some((byte, size))) =
                (known.asleep, self.held[known.tenant], known.byte)
            {
                let size = size.min(known.block.size());
                let offsets = [0, size / 2, size.saturating_sub(4)];
                for offset in offsets.into_iter().filter(|_| size >= 8) {
                    let mut bytes = [0; 4];
                    known.block.read(offset, &mut bytes).unwrap();
                    assert_eq!(bytes, [byte; 4], "at {offset} of {size}");
                }
            }
        }
    }
}

fn program(rig: Rig<impl Backing>, steps: &[Step]) {
    let pool = common::pool(&rig, LIMIT);
    let tenants = ["one", "two"].map(|name| pool.tenant(name).register().unwrap());
    let streams = [(); 2].map(|()| Stream::new(&rig.device).unwrap());
    let store = HostStore::builder(&rig.device)
        .pinned(6 * G)
        .ordinary((KEPT - 6) * G);
    let store = store.staging(3 * G).build().unwrap();
    let mut world = World {
        rig: &rig,
        pool,
        tenants,
        streams,
        store,
        blocks: Vec::new(),
        held: [false; 2],
        stamp: 0,
        faulty: false,
    };
    for step in steps {
        world.run(step);
        if !matches!(step, Step::Fail(..)) {
            rig.faults.disarm();
            world.check();
            world.faulty = false;
        }
    }
    rig.faults.disarm();
    // All sleeping blocks wake once there is enough memory.
    rig.machine.release_all_streams(D0);
    world.held = [false; 2];
    for tenant in 0..2 {
        let mut room = LIMIT;
        world.blocks.retain(|known| {
            let takes = known.block.size().div_ceil(G);
            let fits = known.tenant != tenant || room >= takes;
            if known.tenant == tenant && known.asleep && fits {
                room -= takes;
            }
            known.asleep && fits
        });
        // After a failed roll-back there may never be enough memory.
        let longest = match world.pool.stats().quarantined {
            0 => Duration::from_secs(60),
            _ => Duration::from_millis(50),
        };
        let patient = world.tenants[tenant].blocks().timeout(longest);
        let asleep = world.chosen(tenant, None, true);
        match patient.wake() {
            Ok(woken) => assert_eq!(woken.blocks, asleep.len() as u64),
            // A permanent failure: stuck memory occupies a block's addresses, or is missing.
            Err(error) => {
                // A stuck mapping of another block's memory counts no bytes.
                let cause = match &error {
                    SleepError::Block { cause, .. } => Some(cause),
                    _ => None,
                };
                let at = matches!(
                    cause,
                    Some(BlockError::Memory(MemoryError::Quarantined { .. }))
                );
                assert!(at || world.pool.stats().quarantined > 0, "{error}");
                continue;
            }
        }
        for index in asleep {
            let known = &mut world.blocks[index];
            known.asleep = false;
            known.byte = known.byte.map(|(byte, size)| (byte, size.min(known.kept)));
        }
        world.check();
        world.blocks.retain(|known| known.tenant != tenant);
    }
    drop(world);
    common::only_counted_left(&rig);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn programs_on_the_model() {
    run(200, step(), 1..40, |steps| program(common::model(), steps));
}

#[test]
fn programs_on_the_host() {
    run(100, step(), 1..40, |steps| program(common::host(), steps));
}

fn sleep_and_stop(keep: Keep) -> Step {
    Step::Sleep {
        tenant: 0,
        tag: None,
        keep,
        release: false,
        stop: Some(1),
    }
}

fn allocate(granules: u64) -> Step {
    Step::Allocate {
        tenant: 0,
        granules,
        tag: 0,
    }
}

/// Each call of a canceled sleep or wake fails, alone or with all later calls.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn cancelled_while_a_driver_call_fails() {
    let all = [Keep::Nothing, Keep::All, Keep::Half];
    for (lasts, keep) in all
        .into_iter()
        .flat_map(|keep| [(false, keep), (true, keep)])
    {
        for nth in 1..20 {
            let fail = Step::Fail(nth, lasts);
            let falling = [allocate(3), allocate(2), fail.clone(), sleep_and_stop(keep)];
            program(common::model(), &falling);
            program(common::host(), &falling);
            let sleep = Step::Sleep {
                tenant: 0,
                tag: None,
                keep,
                release: true,
                stop: None,
            };
            let wake = Step::Wake {
                tenant: 0,
                tag: None,
                stop: Some(1),
            };
            let waking = [allocate(3), allocate(2), sleep, fail, wake];
            program(common::model(), &waking);
            program(common::host(), &waking);
        }
    }
}

/// Each call of a sleep or wake fails once, while another tenant's work keeps the device busy.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_copy_that_is_refused_once_waits_for_no_other_tenant() {
    let held = [
        Step::Allocate {
            tenant: 1,
            granules: 1,
            tag: 0,
        },
        Step::Launch(0, true),
        allocate(3),
        allocate(2),
    ];
    let sleep = Step::Sleep {
        tenant: 0,
        tag: None,
        keep: Keep::All,
        release: true,
        stop: None,
    };
    let wake = Step::Wake {
        tenant: 0,
        tag: None,
        stop: None,
    };
    for nth in 1..40 {
        let fail = Step::Fail(nth, false);
        let falling = [fail.clone(), sleep.clone()];
        let waking = [sleep.clone(), fail, wake.clone()];
        for steps in [falling.as_slice(), waking.as_slice()] {
            let steps = [held.as_slice(), steps].concat();
            program(common::model(), &steps);
            program(common::host(), &steps);
        }
    }
}
