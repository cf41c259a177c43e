//! Processes that work at random and are killed at random, one after the other, while what they have
//! is counted: by the ledger, by the [device](super::device), and by a real GPU. Now and then the
//! ledger's file is taken away or shortened for a moment.

use std::time::Duration;

use cuvmm::LedgerView;
use cuvmm::ledger::ProcessState;
use rustix::process::Signal;

use super::process::{Place, Process, until};
use crate::common::{G, MIB};

/// How many processes live at a time, and how many of them have joined before one is killed.
const LIVING: usize = 8;
const JOINED: usize = 6;

/// The memory that a context of a GPU may take beside what it took when its process had joined: the
/// driver loads more when more is used.
const SLACK: u64 = 128 * MIB;

/// Returns the number of kills: `usual`, or `CUVMM_STORM_KILLS`.
pub fn kills(usual: u64) -> u64 {
    let kills = std::env::var("CUVMM_STORM_KILLS").ok();
    kills.map_or(usual, |kills| kills.parse().unwrap())
}

/// The memory of a GPU, as its driver counts it. Sizes in bytes.
struct Gpu<'a> {
    device: &'a cuvmm::Device,
    /// The free memory before the first process.
    before: u64,
    /// The memory that the context of one process takes.
    context: u64,
    /// The most that was used beside contexts and what the ledger has charged.
    most: u64,
}

impl<'a> Gpu<'a> {
    fn of(device: &'a cuvmm::Device) -> Self {
        let mut gpu = Self {
            device,
            before: 0,
            context: 0,
            most: 0,
        };
        gpu.before = gpu.free();
        gpu
    }

    fn free(&self) -> u64 {
        self.device.memory_info().unwrap().free
    }

    /// Measures the context of the only process, which has no memory yet.
    fn measure(&mut self) {
        self.context = self.before.saturating_sub(self.free());
        println!("a context takes {} MiB", self.context / MIB);
    }

    /// Waits until contexts and the ledger's charges explain what is used: the driver takes a moment
    /// longer to free the context of a process that has ended.
    fn settle(&mut self, processes: usize, charged: u64) {
        let explained = charged + processes as u64 * self.context;
        let beside = || self.before.saturating_sub(self.free() + explained);
        let most = (processes as u64).max(1) * SLACK;
        until("contexts and charges do not explain what is used", || {
            beside() <= most
        });
        self.most = self.most.max(beside());
    }
}

/// Kills processes at random until `kills` of them had joined the ledger, and counts after each:
/// the processes never have more than the limit, what they have is charged, and what a killed one
/// had is not. Then checks that everything is there again. Of a GPU it looks at the device's memory
/// too.
pub fn run(place: &Place, gpu: Option<&cuvmm::Device>, kills: u64) {
    let mut gpu = gpu.map(Gpu::of);
    let seed = std::env::var("PROPTEST_RNG_SEED").ok();
    let seed = seed.map_or(1, |seed| seed.parse::<u64>().unwrap());
    let mut random = fastrand::Rng::with_seed(seed << 20 | kills);
    let mut started = 0;
    let mut start = || {
        started += 1;
        place.start(&format!("storm {started}"))
    };
    let work = |mut process: Process| {
        let seed = process.name().to_owned();
        process.tell(&seed);
        process
    };
    let mut first = start();
    first.await_joined();
    gpu.iter_mut().for_each(Gpu::measure);
    let view = place.view();
    let mut living = vec![work(first)];
    living.extend((1..LIVING).map(|_| work(start())));
    let (mut killed, mut created) = (0, 0);
    while killed < kills {
        until("processes join", || {
            let joined = living.iter_mut().map(Process::has_joined);
            joined.filter(|&it| it).count() >= JOINED
        });
        std::thread::sleep(Duration::from_millis(random.u64(..50)));
        // However busy the machine is, something is done between two kills.
        until("no process gets memory", || {
            place.device.counts().created > created + 8
        });
        created = place.device.counts().created;
        if random.u8(..5) == 0 {
            let stopped = &living[random.usize(..living.len())];
            stopped.stop();
            std::thread::sleep(Duration::from_millis(random.u64(..200)));
            stopped.signal(Signal::CONT);
        }
        if random.u8(..3) == 0 {
            place.without_ledger(random.bool(), Duration::from_millis(random.u64(..50)));
        }
        let mut process = living.swap_remove(random.usize(..living.len()));
        killed += u64::from(process.has_joined());
        let name = process.name().to_owned();
        end_one(process, gpu.is_some(), &mut random);
        await_gone(&view, &name);
        audit(place, &view, &living, gpu.as_mut());
        living.push(work(start()));
    }
    end(place, &view, living);
    let counts = place.device.counts();
    let peak = counts.peak / G;
    println!(
        "{killed} kills: memory was created {} times, {peak} granules of {} at most",
        counts.created, place.limit
    );
    if let Some(mut gpu) = gpu {
        gpu.settle(0, 0);
        let beside = gpu.most / MIB;
        println!("beside contexts and charges, at most {beside} MiB of the device were used");
    }
}

/// Ends processes at random: at once, stopped first, or as the driver of a real GPU ends them, whose
/// memory is free 60 to 90 ms after the process was killed, long after its locks.
fn end_one(process: Process, on_gpu: bool, random: &mut fastrand::Rng) {
    match random.u8(..10) {
        0 => {
            process.stop();
            std::thread::sleep(Duration::from_millis(random.u64(..200)));
        }
        1..4 if !on_gpu => {
            process.stop();
            process.lose_locks();
            std::thread::sleep(Duration::from_millis(random.u64(60..90)));
        }
        _ => {}
    }
    process.kill();
}

/// Waits until a killed process has no slot, or one for memory that others have of it.
fn await_gone(view: &LedgerView, name: &str) {
    until("what a killed process had is charged to it", || {
        let stats = view.stats();
        let mut found = stats.processes.iter().filter(|it| it.name == name);
        found.all(|it| it.state == ProcessState::Lending)
    });
}

/// Stops all processes, checks that all that is theirs is charged within the limit, and lets them go
/// on.
fn audit(place: &Place, view: &LedgerView, living: &[Process], gpu: Option<&mut Gpu<'_>>) {
    living.iter().for_each(Process::stop);
    let stats = view.stats();
    let each = stats.processes.iter();
    let obtained: u64 = each.clone().map(|it| it.obtained).sum();
    assert_eq!(stats.charged, each.map(|it| it.charged).sum::<u64>());
    assert!(
        obtained <= stats.charged && stats.charged <= stats.limit,
        "{obtained} bytes are known to the ledger: {stats}"
    );
    // The device's thread may not have noticed yet who has ended.
    until("more memory is there than the ledger knows", || {
        place.device.counts().now <= obtained
    });
    if let Some(gpu) = gpu {
        gpu.settle(living.len(), stats.charged);
    }
    place.within_limit();
    for process in living {
        process.signal(Signal::CONT);
    }
}

/// Ends the work, and checks that one process can have all memory, and none has any after it.
fn end(place: &Place, view: &LedgerView, mut living: Vec<Process>) {
    for process in &mut living {
        process.await_joined();
        process.tell("quiet");
    }
    for process in &living {
        assert_eq!(process.answer(), "quiet");
    }
    // The others live, and give back what they have cached.
    let mut last = place.join("last");
    let all = place.limit;
    assert_eq!(last.ask(&format!("allocate {all} 60000")), "ok");
    assert_eq!(place.device.counts().now, all * G);
    until("the killed processes' slots are free", || {
        let stats = view.stats();
        let waiting = stats.processes.iter().any(|it| it.waits_for.is_some());
        stats.processes.len() == LIVING + 1 && !waiting
    });
    living.into_iter().for_each(Process::end);
    until("the slots are free", || view.stats().processes.len() == 1);
    assert_eq!(
        (view.stats().charged, view.stats().limit),
        (all * G, all * G)
    );
    last.end();
    assert_eq!((view.stats().charged, view.stats().processes.len()), (0, 0));
    until("the device has everything back", || {
        place.device.counts().now == 0
    });
    place.within_limit();
    let files = place.files();
    assert_eq!(files.len(), 1, "sockets are left: {files:?}");
}
