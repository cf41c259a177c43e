//! The work of a process of the test: commands, or random work until the next command.
//!
//! `unsafe` in this file: forking.
#![allow(unsafe_code)]

use std::io::{Write as _, stdin, stdout};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use cuvmm::driver::cuda::CudaDriver;
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::driver::{Driver, DriverKind, HandleTypes};
use cuvmm::error::{BlockError, LedgerError, MemoryError, PoolError, ShareError, SleepError};
use cuvmm::pool::futures::AllocateFuture;
use cuvmm::share::{Listener, sweep};
use cuvmm::{
    Access, Attachment, Block, Channel, Contents, Device, HostStore, Lease, Ledger, Limit, Mapper,
    Offer, Pool, Tenant,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, WaitOptions, getppid, set_parent_process_death_signal, wait};

use super::counted::CountedDriver;
use super::holders::{Holders, is_refused};
use super::process::{ANSWER, LONG, ON_GPU, PART};
use crate::common::{G, manner};

/// How long a forked child of the random work lives at most.
const SHORT_LIFE: Duration = Duration::from_millis(200);

/// How long a slow hook takes: longer than a request without signs of life counts.
const SLOW: Duration = Duration::from_millis(150);

/// The beginning of the names of sockets on which the random work offers blocks.
const SHARED: &str = "share ";

/// Plays a process if this program was started as one.
pub fn play() {
    let Ok(part) = std::env::var(PART) else {
        return;
    };
    let mut words = part.splitn(5, ':');
    let mut word = || words.next().unwrap();
    let (test, limit, driver) = (word(), word(), word());
    let (name, dir) = (word(), PathBuf::from(word()));
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let parent = getppid().map_or(0, |parent| parent.as_raw_nonzero().get());
    if parent.to_string() != test {
        return;
    }
    let inner: Arc<dyn Driver> = match driver {
        ON_GPU => Arc::new(CudaDriver::open().unwrap()),
        _ => {
            let host = HostOptions::new().manner(manner()).capacity(1 << 30);
            Arc::new(HostDriver::new(host))
        }
    };
    let driver = CountedDriver::connect(&dir.join("device"), inner);
    let shared: Arc<dyn Driver> = driver.clone();
    let device = Device::open(shared, 0).unwrap();
    assert_eq!(device.granularity(), G);
    let setting = Setting {
        store: HostStore::builder(&device)
            .ordinary(16 * G)
            .build()
            .unwrap(),
        driver,
        device,
        dir: dir.join("ledger"),
        limit: limit.parse().unwrap(),
        name: name.to_owned(),
    };
    let (send, commands) = channel();
    std::thread::spawn(move || {
        for line in stdin().lines().map_while(Result::ok) {
            let _ = send.send(line);
        }
    });
    let mut member = Member::join(&setting, 0);
    answer("ready");
    while let Ok(command) = commands.recv() {
        let words: Vec<&str> = command.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            "allocate" => answer(&member.allocate(number(1), number(2))),
            "drop" => {
                member.blocks.clear();
                answer("ok");
            }
            "offer" => answer(&member.offer(words[1], LONG)),
            "attach" => answer(&member.attach(words[1], LONG)),
            "release" => {
                member.attached.clear();
                answer("ok");
            }
            "fork" => {
                let child = member.fork(LONG);
                answer(&child.to_string());
            }
            "forked" => {
                let child = member.fork(Duration::ZERO);
                let status = wait(WaitOptions::empty()).unwrap().unwrap();
                assert_eq!(status.0.as_raw_nonzero().get(), child);
                answer(&format!("{:?}", status.1.exit_status()));
            }
            "storm" => {
                member = storm(member, &commands, number(1));
                // Cached memory stays.
                member.blocks.clear();
                member.attached.clear();
                member.requests.clear();
                member.kept.lock().unwrap().clear();
                member.ledger.set_process_limit(setting.limit * G).unwrap();
                member.holders.clear();
                member.tenants.truncate(1);
                member.known.lock().unwrap().truncate(1);
                member.tenants[0].set_guarantee(0).unwrap();
                member.ledger.set_guarantee(0).unwrap();
                answer("quiet");
            }
            other => panic!("a command: {other}"),
        }
    }
    let Member {
        pool,
        holders,
        known,
        blocks,
        attached,
        requests,
        kept,
        tenants,
        ..
    } = member;
    drop((holders, blocks, attached, requests, kept, known, tenants));
    pool.close().unwrap();
}

fn answer(text: &str) {
    println!("{ANSWER}{text}");
    stdout().flush().unwrap();
}

/// The parts that a process has for all of its life.
struct Setting {
    driver: Arc<CountedDriver>,
    device: Device,
    store: HostStore,
    dir: PathBuf,
    limit: u64,
    name: String,
}

/// A block, the first word of its first granule, which those of the others follow, and how many
/// granules have theirs.
struct Held {
    block: Block,
    stamp: u64,
    written: u64,
}

impl Held {
    fn new(block: Block, stamp: u64) -> Self {
        let mut held = Self {
            block,
            stamp,
            written: 0,
        };
        held.write();
        held
    }

    /// Keeps a lease on the block, unless it sleeps: the ledger's thread may put it to sleep.
    fn awake(&self) -> Option<Lease> {
        match self.block.lease_for(Access::ReadWrite) {
            Ok(lease) => Some(lease),
            Err(MemoryError::Asleep { .. }) => None,
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Writes the granules that have no words yet.
    fn write(&mut self) {
        let Some(_lease) = self.awake() else {
            return;
        };
        for granule in self.written..self.block.size() / G {
            let word = self.stamp.wrapping_add(granule);
            self.block.write(granule * G, &word.to_le_bytes()).unwrap();
        }
        self.written = self.block.size() / G;
    }

    fn check(&self) {
        let Some(_lease) = self.awake() else {
            return;
        };
        for granule in 0..self.written {
            let mut word = [0; 8];
            self.block.read(granule * G, &mut word).unwrap();
            let right = self.stamp.wrapping_add(granule).to_le_bytes();
            assert_eq!(word, right, "granule {granule} of {}", self.written);
        }
    }

    fn grow(&mut self, granules: u64) {
        let size = self.block.size() + granules * G;
        if short(self.block.try_grow_to(size)).is_some() {
            self.write();
        }
        self.check();
    }

    fn shrink(&mut self) {
        let size = self.block.size().div_ceil(2 * G) * G;
        if short(self.block.shrink_to(size)).is_some() {
            self.written = self.written.min(size / G);
        }
        self.check();
    }
}

/// The ledger, a pool and what it lends, dropped in this order reversed.
struct Member<'a> {
    holders: Holders,
    blocks: Vec<Held>,
    /// Memory of other processes.
    attached: Vec<Attachment>,
    requests: Vec<Pin<Box<AllocateFuture>>>,
    /// Blocks of futures, which the hook of the first tenant drops.
    kept: Arc<Mutex<Vec<Block>>>,
    /// The tenants as the ledger's thread knows them, which puts them to sleep.
    known: Arc<Mutex<Vec<Tenant>>>,
    tenants: Vec<Tenant>,
    pool: Pool,
    _mapper: Mapper,
    ledger: Ledger,
    setting: &'a Setting,
}

impl<'a> Member<'a> {
    /// Opens the ledger, with a guarantee if there is as much, and makes a pool of it.
    fn join(setting: &'a Setting, guarantee: u64) -> Self {
        let (mut guarantee, begun) = (guarantee * G, Instant::now());
        let known = Arc::<Mutex<Vec<Tenant>>>::default();
        let ledger = loop {
            let ledger = Ledger::builder(&setting.device, &setting.dir);
            let ledger = ledger.limit(setting.limit * G).name(&setting.name);
            let (sleepers, store) = (Arc::downgrade(&known), setting.store.clone());
            let ledger = ledger.sleep_for_others(true).on_sleep(move |name| {
                let known = sleepers.upgrade().ok_or("the process leaves")?;
                let known = known.lock().unwrap().clone();
                let mut named = known
                    .iter()
                    .filter(|it| name.is_none_or(|name| it.name() == name));
                named.try_for_each(|it| put_to_sleep(it, SHORT_LIFE / 20, &store))
            });
            match ledger.guarantee(guarantee).open() {
                Ok(ledger) => break ledger,
                Err(LedgerError::Short(_)) => guarantee = 0,
                // The file is another one for a moment.
                Err(_) if begun.elapsed() < LONG => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => panic!("{error}"),
            }
        };
        let pool = Pool::builder(&setting.device).limit(Limit::Bytes(setting.limit * G));
        let mapper = Mapper::start(&setting.device).unwrap();
        let pool = pool.shareable(HandleTypes::POSIX_FD).ledger(&ledger);
        let pool = pool.mapper(&mapper).build().unwrap();
        let (kept, calls) = (Arc::<Mutex<Vec<Block>>>::default(), AtomicU64::new(0));
        let gives = Arc::downgrade(&kept);
        let first = pool.tenant("first").on_pressure(move |_| {
            if calls.fetch_add(1, Ordering::SeqCst) % 8 == 7 {
                std::thread::sleep(SLOW);
            }
            let given = gives.upgrade().and_then(|kept| kept.lock().unwrap().pop());
            drop(given);
        });
        let tenants = vec![first.register().unwrap()];
        known.lock().unwrap().clone_from(&tenants);
        Self {
            holders: Holders::new(&setting.device),
            blocks: vec![],
            attached: vec![],
            requests: vec![],
            kept,
            known,
            tenants,
            pool,
            _mapper: mapper,
            ledger,
            setting,
        }
    }

    /// Allocates, and says how it went.
    fn allocate(&mut self, granules: u64, milliseconds: u64) -> String {
        let block = self.tenants[0].block(granules * G);
        let outcome = match milliseconds {
            0 => block.try_allocate(),
            _ => block
                .timeout(Duration::from_millis(milliseconds))
                .allocate(),
        };
        match outcome {
            Ok(block) => {
                self.blocks.push(Held::new(block, 7));
                "ok".to_owned()
            }
            Err(error) => match error.shortage().and_then(|it| it.ledger) {
                Some(refused) => format!("{:?}", refused.reason),
                None if error.is_out_of_memory() => "driver".to_owned(),
                None => panic!("{error}"),
            },
        }
    }

    /// Takes what futures were granted.
    fn poll_requests(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        self.requests.retain_mut(|request| {
            let polled = request.as_mut().poll(&mut context);
            if let Poll::Ready(outcome) = polled {
                self.kept.lock().unwrap().extend(short(outcome));
                return false;
            }
            true
        });
    }

    /// Gives its last block to the process that connects to a socket of this name.
    fn offer(&self, name: &str, wait: Duration) -> String {
        let path = self.setting.dir.join(format!("../{name}"));
        let Some(held) = self.blocks.last().filter(|held| !held.block.is_asleep()) else {
            return "no block".to_owned();
        };
        let sent = || -> Result<(), ShareError> {
            let offer = Offer::block(&held.block)?;
            let listener = Listener::bind(&path)?;
            let mut channel = listener.accept(wait)?;
            channel.set_timeout(wait);
            channel.send(&offer)
        };
        sent().map_or_else(|error| error.to_string(), |()| "ok".to_owned())
    }

    /// Returns the name of a socket of the random work.
    fn any_offer(&self, random: &mut fastrand::Rng) -> Option<String> {
        let files = std::fs::read_dir(self.setting.dir.join("..")).ok()?;
        let names = files
            .flatten()
            .map(|file| file.file_name().to_string_lossy().into_owned());
        let names: Vec<String> = names
            .filter(|name| name.starts_with(SHARED) && !name.ends_with("lock"))
            .collect();
        let any = random.usize(..names.len().max(1));
        let name = names.get(any).cloned()?;
        // That of a dead process is removed.
        let is_dead = sweep(self.setting.dir.join("..").join(&name)).ok()?;
        (!is_dead).then_some(name)
    }

    /// Attaches memory of the process that listens at a socket of this name.
    fn attach(&mut self, name: &str, wait: Duration) -> String {
        let path = self.setting.dir.join(format!("../{name}"));
        let begun = Instant::now();
        let mut channel = loop {
            match Channel::connect(&path) {
                Ok(channel) => break channel,
                Err(_) if begun.elapsed() < wait => std::thread::sleep(Duration::from_millis(1)),
                Err(error) => return error.to_string(),
            }
        };
        channel.set_timeout(wait);
        let how = Attachment::builder(&self.setting.device).ledger(&self.ledger);
        match channel.recv(&how) {
            Ok(attached) => {
                self.attached.push(attached);
                "ok".to_owned()
            }
            Err(error) => error.to_string(),
        }
    }

    /// Forks a child that finds its calls refused, and then lives until the test closes the
    /// standard input, at most for `life`. Returns its process id.
    fn fork(&self, life: Duration) -> i32 {
        let fault = self.setting.driver.fault_line();
        // SAFETY: the child uses only what was there before, and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child > 0 {
            return child;
        }
        let found = catch_unwind(AssertUnwindSafe(|| {
            let allocated = self.tenants[0].try_allocate(G);
            let waited = self.tenants[0].block(G).timeout(LONG).allocate();
            for outcome in [allocated, waited] {
                match outcome {
                    Ok(_) => return 1,
                    Err(error) if error.is_out_of_memory() => return 2,
                    Err(_) => {}
                }
            }
            match self.ledger.set_guarantee(G) {
                Err(LedgerError::Call(_)) => {}
                _ => return 3,
            }
            let opened = Ledger::builder(&self.setting.device, &self.setting.dir).open();
            if !matches!(opened, Err(LedgerError::Call(_))) {
                return 4;
            }
            let stats = self.pool.stats();
            drop((stats, self.ledger.clone()));
            u64::from(self.pool.trim(0).is_ok() || self.pool.clone().close().is_ok()) * 5
        }));
        let found = found.unwrap_or(6);
        if found > 0 {
            fault(found);
        }
        let input = stdin();
        let mut closed = [PollFd::new(&input, PollFlags::empty())];
        let life = Timespec::try_from(life).unwrap();
        let _ = poll(&mut closed, Some(&life));
        // SAFETY: ends the child without running any code of the parent's exit.
        unsafe { libc::_exit(found as i32) }
    }
}

/// Returns an outcome of the random work, or nothing if there was too little memory, or the block
/// sleeps.
fn short<T>(outcome: Result<T, BlockError>) -> Option<T> {
    match outcome {
        Ok(done) => Some(done),
        // A block that grows may have outlived its tenant.
        Err(error) if is_refused(&error) => None,
        Err(BlockError::Memory(MemoryError::Asleep { .. })) => None,
        Err(error) => panic!("{error:?}"),
    }
}

/// Puts a tenant to sleep, also on the ledger's thread.
fn put_to_sleep(tenant: &Tenant, wait: Duration, store: &HostStore) -> Result<(), String> {
    let blocks = tenant.blocks().timeout(wait).release(true);
    match blocks.sleep(Contents::Keep(store)) {
        Ok(_) => Ok(()),
        Err(
            error @ (SleepError::StoreFull { .. }
            | SleepError::Exported { .. }
            | SleepError::Leased { .. }
            | SleepError::Busy { .. }),
        ) => Err(error.to_string()),
        Err(error) => {
            eprintln!("{error:?}");
            std::process::abort();
        }
    }
}

/// Works at random until the next command.
fn storm<'a>(mut member: Member<'a>, commands: &Receiver<String>, seed: u64) -> Member<'a> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut stamp = seed << 32;
    // A closed input ends it too.
    while matches!(commands.try_recv(), Err(TryRecvError::Empty)) {
        step(&mut member, &mut random, &mut stamp);
        let _ = wait(WaitOptions::NOHANG);
        if random.u8(..100) == 0 {
            // Leaves the ledger, and opens it again.
            let setting = member.setting;
            drop(member);
            member = Member::join(setting, random.u64(..8));
        }
    }
    member
}

fn step(member: &mut Member<'_>, random: &mut fastrand::Rng, stamp: &mut u64) {
    let wait = Duration::from_millis(random.u64(..150));
    let most = member.setting.limit / 3;
    let any = random.usize(..member.blocks.len().max(1));
    let tenant = random.usize(..member.tenants.len());
    match random.u8(..156) {
        100..106 if !member.blocks.is_empty() => {
            // The process that attaches it may be killed meanwhile.
            let _ = member.offer(&format!("{SHARED}{}", member.setting.name), wait / 4);
        }
        106..114 if member.attached.len() < 3 => {
            if let Some(name) = member.any_offer(random) {
                let _ = member.attach(&name, wait / 4);
            }
        }
        114..117 if !member.attached.is_empty() => {
            let any = random.usize(..member.attached.len());
            drop(member.attached.swap_remove(any));
        }
        117..121 if member.requests.len() < 2 && member.kept.lock().unwrap().len() < 3 => {
            let size = random.u64(1..=most) * G;
            let request = Box::pin(member.tenants[tenant].allocate_async(size));
            member.requests.push(request);
            member.poll_requests();
        }
        117..123 => member.poll_requests(),
        123 => drop(member.requests.pop()),
        124 => member.ledger.set_priority(random.i32(-2..=2)).unwrap(),
        125 => {
            let limit = random.u64(member.setting.limit / 2..=member.setting.limit);
            member.ledger.set_process_limit(limit * G).unwrap();
        }
        0..35 if member.blocks.len() < 6 => {
            let block = member.tenants[tenant].block(random.u64(1..=most) * G);
            let block = block.capacity(member.setting.limit * G);
            let block = match random.bool() {
                true => block.try_allocate(),
                false => block.timeout(wait).allocate(),
            };
            if let Some(block) = short(block) {
                *stamp += 1 << 16;
                member.blocks.push(Held::new(block, *stamp));
            }
        }
        0..50 if !member.blocks.is_empty() => {
            member.blocks.swap_remove(any).check();
        }
        50..60 if !member.blocks.is_empty() => member.blocks[any].grow(random.u64(1..8)),
        60..65 if !member.blocks.is_empty() => member.blocks[any].shrink(),
        65..72 => drop(member.pool.trim(random.u64(..20) * G).unwrap()),
        72..76 if member.tenants.len() < 3 => {
            let name = random.u64(..).to_string();
            let tenant = member.pool.tenant(name).guarantee(random.u64(..10) * G);
            match tenant.register() {
                Ok(tenant) => {
                    member.known.lock().unwrap().push(tenant.clone());
                    member.tenants.push(tenant);
                }
                Err(PoolError::Ledger(_) | PoolError::GuaranteeTooLarge { .. }) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
        72..78 if member.tenants.len() > 1 => {
            member.known.lock().unwrap().pop();
            member.tenants.pop().unwrap().unregister();
        }
        78..81 => match member.ledger.set_guarantee(random.u64(..10) * G) {
            Ok(()) | Err(LedgerError::Short(_)) => {}
            Err(error) => panic!("{error:?}"),
        },
        // A forked child keeps the files of the real driver open, and so the memory of its parent if
        // that is killed.
        81..84 if member.setting.device.driver().kind() != DriverKind::Cuda => {
            member.fork(SHORT_LIFE.mul_f64(random.f64()));
        }
        84..90 => {
            let _ = put_to_sleep(&member.tenants[tenant], wait, &member.setting.store);
        }
        90..96 => match member.tenants[tenant].blocks().timeout(wait).wake() {
            Ok(_) => member.blocks.iter().for_each(Held::check),
            // The ledger's thread puts a block to sleep.
            Err(SleepError::Busy { .. }) => {}
            Err(error) if error.is_out_of_memory() => {}
            Err(SleepError::Block { cause, .. }) if cause.is_shortage() => {}
            Err(error) => panic!("{error:?}"),
        },
        126.. => {
            let (first, store) = (&member.tenants[0], &member.setting.store);
            member.holders.step(first, store, random, (stamp, wait));
        }
        _ => std::thread::sleep(wait / 10),
    }
}
