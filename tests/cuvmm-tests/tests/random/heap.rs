//! Random programs of allocations on a heap, compared with a small reference. The programs hold
//! streams back, run kernels that write late, use memory on several streams, put the heap to sleep,
//! reclaim for another tenant, and inject faults.
//!
//! The reference knows the allocations that live and the byte that each holds. It knows nothing of
//! extents, windows or fences. Two allocations that had memory in common would change each other's
//! bytes, at whatever addresses they see it.

use crate::common;
use crate::common::books::books;
use crate::common::{D0, G, MIB, Rig};
use crate::programs::run;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::driver::{CUresult, DeviceAddress, Driver};
use cuvmm::error::MemoryError;
use cuvmm::heap::Preset;
use cuvmm::{Allocation, Contents, Heap, HostStore, Pool, Stream};
use proptest::prelude::*;

const LIMIT: u64 = 24;
const STREAMS: usize = 3;

#[derive(Clone, Debug)]
enum Step {
    Allocate {
        size: u64,
        alignment: u32,
        stream: usize,
    },
    Free {
        index: usize,
    },
    /// Reads an allocation on a second stream and records the use.
    Use {
        index: usize,
        stream: usize,
    },
    /// Holds a stream's work back.
    Hold {
        stream: usize,
    },
    Release {
        stream: usize,
    },
    Trim,
    /// Puts the heap to sleep, with its contents kept.
    Sleep,
    Wake,
    /// Another tenant allocates granules and drops them.
    Other {
        granules: u64,
    },
    /// Fails the nth driver call from here on, until the next step of this kind.
    Fail {
        nth: u64,
    },
    Heal,
}

#[derive(Clone, Copy, Debug)]
struct Options {
    preset: Preset,
    aliases: bool,
    waits: bool,
    faults: bool,
}

fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => 1..MIB,
        2 => MIB..3 * G,
        2 => (1..6 * G / 512).prop_map(|units| units * 512),
        1 => 3 * G..12 * G,
        1 => (1..8_u64).prop_map(|granules| granules * G),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let stream = || 0..STREAMS;
    prop_oneof![
        10 => (sizes(), 0..22_u32, stream()).prop_map(|(size, alignment, stream)| {
            let alignment = if alignment < 14 { 0 } else { alignment };
            Step::Allocate { size, alignment, stream }
        }),
        8 => any::<usize>().prop_map(|index| Step::Free { index }),
        2 => (any::<usize>(), stream()).prop_map(|(index, stream)| Step::Use { index, stream }),
        2 => stream().prop_map(|stream| Step::Hold { stream }),
        3 => stream().prop_map(|stream| Step::Release { stream }),
        1 => Just(Step::Trim),
        1 => Just(Step::Sleep),
        2 => Just(Step::Wake),
        2 => (1..LIMIT).prop_map(|granules| Step::Other { granules }),
        1 => (1..12_u64).prop_map(|nth| Step::Fail { nth }),
        1 => Just(Step::Heal),
    ]
}

struct Live {
    memory: Allocation,
    byte: u8,
    stream: usize,
    /// Streams beside its own that wait for its bytes.
    used_on: Vec<usize>,
}

struct Run<'a, B: Backing> {
    rig: &'a Rig<B>,
    pool: Pool,
    heap: Heap,
    store: HostStore,
    streams: Vec<Stream>,
    held: [bool; STREAMS],
    live: Vec<Live>,
    next: u8,
}

impl<B: Backing> Run<'_, B> {
    /// Writes a byte to each granule and to both ends.
    fn stamp(&self, memory: &Allocation, stream: usize, byte: u8) {
        let (at, size) = (memory.address().0, memory.size());
        let mut writes = vec![(DeviceAddress(at), size.min(64), byte)];
        let mut granule = (at / G + 1) * G;
        while granule < at + size {
            writes.push((DeviceAddress(granule), (at + size - granule).min(64), byte));
            granule += G;
        }
        let last = size.min(64);
        writes.push((DeviceAddress(at + size - last), last, byte));
        let stream = self.streams[stream].as_raw();
        self.rig
            .machine
            .queue_kernel(D0, stream, vec![], writes)
            .unwrap();
    }

    fn seen(&self, at: u64) -> u8 {
        let mut byte = [0];
        // SAFETY: the driver refuses the copy if nothing is mapped.
        #[allow(unsafe_code)]
        unsafe {
            self.rig
                .machine
                .copy_to_host(D0, &mut byte, DeviceAddress(at))
        }
        .unwrap();
        byte[0]
    }

    /// Checks the bytes of an allocation whose stream is not held.
    fn check_bytes(&self, live: &Live) {
        let held = self.held.iter().any(|&held| held);
        if !self.rig.keeps_bytes() || held || self.heap.is_asleep() {
            return;
        }
        let (at, size) = (live.memory.address().0, live.memory.size());
        let mut granule = (at / G + 1) * G;
        assert_eq!(self.seen(at), live.byte, "{:?}", live.memory);
        assert_eq!(self.seen(at + size - 1), live.byte, "{:?}", live.memory);
        while granule < at + size {
            assert_eq!(
                self.seen(granule),
                live.byte,
                "{:?} at {granule:#x}",
                live.memory
            );
            granule += G;
        }
    }

    fn check(&self) {
        let stats = self.heap.stats();
        let live: u64 = self.live.iter().map(|live| live.memory.size()).sum();
        assert_eq!(
            (stats.live, stats.allocations),
            (live, self.live.len() as u64)
        );
        assert!(stats.held + stats.asleep >= live && stats.held <= LIMIT * G);
        let is_asleep = self.heap.is_asleep();
        assert!(stats.held == 0 || !is_asleep, "{stats:?}");
        let seen = books(self.rig, &self.pool);
        let seen = seen
            .tenants
            .into_iter()
            .find(|tenant| tenant.name == "a")
            .unwrap();
        assert_eq!(seen.committed, stats.held, "{seen:#?}");
        assert_eq!(seen.in_use, if is_asleep { 0 } else { live });
        assert_eq!(seen.pending_free, stats.pending_free);
        let mut ranges: Vec<(u64, u64)> = self
            .live
            .iter()
            .map(|live| (live.memory.address().0, live.memory.size()))
            .collect();
        ranges.sort_unstable();
        for pair in ranges.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?} overlap");
        }
        self.live.iter().for_each(|live| self.check_bytes(live));
    }

    fn run(&mut self, step: &Step, options: Options) {
        match *step {
            Step::Allocate {
                size,
                alignment,
                stream,
            } => {
                let outcome = self
                    .heap
                    .allocate(size, 1 << alignment, &self.streams[stream]);
                match outcome {
                    Ok(memory) => {
                        assert!(memory.address().0.is_multiple_of(1 << alignment));
                        self.next = self.next % 250 + 1;
                        self.stamp(&memory, stream, self.next);
                        self.live.push(Live {
                            memory,
                            byte: self.next,
                            stream,
                            used_on: vec![],
                        });
                    }
                    Err(error) => {
                        let injected = self.rig.faults.injected() > 0;
                        let asleep = MemoryError::HeapAsleep(self.heap.stats().asleep);
                        let refused = self.heap.is_asleep() && error == asleep.into();
                        assert!(injected || refused || error.is_out_of_memory(), "{error}");
                    }
                }
            }
            Step::Free { index } if !self.live.is_empty() => {
                let live = self.live.swap_remove(index % self.live.len());
                self.check_bytes(&live);
                if self.heap.is_asleep() {
                    return;
                }
                // A last write, just before the drop.
                self.stamp(&live.memory, live.stream, 255);
                for stream in live.used_on {
                    self.stamp(&live.memory, stream, 254);
                }
            }
            Step::Use { index, stream } if !self.live.is_empty() => {
                let index = index % self.live.len();
                let live = &mut self.live[index];
                let recorded = live.memory.record_use(&self.streams[stream]);
                recorded.unwrap();
                live.used_on.push(stream);
            }
            Step::Hold { stream } => {
                self.rig.machine.hold(D0, self.streams[stream].as_raw());
                self.held[stream] = true;
            }
            Step::Release { stream } => {
                self.rig
                    .machine
                    .release_stream(D0, self.streams[stream].as_raw());
                self.held[stream] = false;
            }
            Step::Trim => {
                let trimmed = self.heap.trim();
                assert!(
                    trimmed.is_ok() || self.rig.faults.injected() > 0,
                    "{trimmed:?}"
                );
            }
            Step::Sleep => {
                let slept = self.heap.alone().sleep(Contents::Keep(&self.store));
                let busy = self.held.iter().any(|&held| held);
                let injected = self.rig.faults.injected() > 0;
                assert!(slept.is_ok() || busy || injected, "{slept:?}");
            }
            Step::Wake => {
                let woken = self.heap.alone().wake();
                let injected = self.rig.faults.injected() > 0;
                assert!(woken.is_ok() || injected, "{woken:?}");
            }
            Step::Other { granules } => {
                let tenant = self.pool.find_tenant("b").unwrap();
                if let Ok(block) = tenant.try_allocate(granules * G)
                    && self.rig.keeps_bytes()
                    && !self.held.iter().any(|&held| held)
                {
                    let mut seen = [1; 16];
                    if block.read(0, &mut seen).is_ok() {
                        assert_eq!(seen, [0; 16], "another tenant's bytes");
                    }
                }
                let _ = self.pool.trim(0);
            }
            Step::Fail { nth } if options.faults => {
                self.rig
                    .faults
                    .arm(Fault::nth(nth, CUresult::CUDA_ERROR_OUT_OF_MEMORY));
            }
            Step::Heal | Step::Fail { .. } => self.rig.faults.disarm(),
            Step::Free { .. } | Step::Use { .. } => {}
        }
        if self.rig.faults.injected() == 0 && !options.faults {
            self.check();
        }
    }
}

fn program(rig: &Rig<impl Backing>, options: Options, steps: &[Step]) {
    let pool = common::pool(rig, LIMIT);
    let [tenant, _other] = common::tenants(&pool);
    let heap = Heap::builder(&tenant)
        .preset(options.preset)
        .aliases(options.aliases)
        .stream_waits(options.waits)
        .addresses(1 << 30)
        .build()
        .unwrap();
    let streams = (0..STREAMS).map(|_| Stream::new(&rig.device).unwrap());
    let mut run = Run {
        rig,
        pool,
        heap,
        store: HostStore::builder(&rig.device)
            .limit(LIMIT * G)
            .build()
            .unwrap(),
        streams: streams.collect(),
        held: [false; STREAMS],
        live: vec![],
        next: 0,
    };
    for step in steps {
        run.run(step, options);
    }
    rig.faults.disarm();
    rig.machine.release_all_streams(D0);
    run.held = [false; STREAMS];
    let woken = run.heap.alone().wake();
    assert!(woken.is_ok() || options.faults, "{woken:?}");
    run.live.iter().for_each(|live| run.check_bytes(live));
    let failed = rig.device.drop_failures() > 0 || run.pool.stats().quarantined > 0;
    run.live.clear();
    run.heap.trim().unwrap();
    if !failed && !options.faults {
        assert_eq!(run.heap.stats().held, 0, "everything is free and complete");
    }
    assert!(rig.device.lost().is_none());
}

/// Runs a program, and checks that everything was returned to the driver if no call failed.
fn whole(rig: Rig<impl Backing>, options: Options, steps: &[Step]) {
    program(&rig, options, steps);
    if !options.faults {
        common::nothing_left(rig);
    }
}

fn programs(change: impl FnOnce(&mut Options), usual: u32, host: bool) {
    let mut options = Options {
        preset: Preset::Tight,
        aliases: true,
        waits: true,
        faults: false,
    };
    change(&mut options);
    run(usual, step(), 1..60, |steps| match host {
        true => whole(common::host(), options, steps),
        false => whole(common::model(), options, steps),
    });
}

// I-74
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn programs_over_real_memory() {
    programs(|_| {}, 150, true);
}

#[test]
fn programs_on_the_model() {
    programs(|_| {}, 300, false);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn programs_of_a_fast_heap() {
    programs(|it| it.preset = Preset::Fast, 80, true);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn programs_without_aliases() {
    programs(|it| it.aliases = false, 80, true);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn programs_without_stream_waits() {
    programs(|it| it.waits = false, 80, true);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn programs_with_faults() {
    programs(|it| it.faults = true, 150, true);
}
