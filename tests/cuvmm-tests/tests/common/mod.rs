//! A device to test on: a machine whose streams can be held back, behind a driver that injects
//! faults.
#![allow(dead_code)]

pub mod attention;
pub mod books;
pub mod busy;
pub mod captures;
pub mod compaction;
pub mod executor;
mod manner;
pub mod panics;
pub mod sweep;
pub mod world;

use std::fmt::Debug;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cuvmm::driver::fault::{Fault, FaultDriver};
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::driver::model::{Backing, Machine, ModelDriver, ModelOptions};
use cuvmm::driver::{CUresult, Call, DeviceAddress, Driver, HandleTypes, Ordinal};
use cuvmm::pool::PoolBuilder;
use cuvmm::region::RegionBuilder;
use cuvmm::{Block, Device, Limit, Mapper, Pool, Region, Stream, Tenant};

pub use manner::manner;

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;
/// The granule of every test machine.
pub const G: u64 = 2 * MIB;
pub const D0: Ordinal = Ordinal(0);
pub const D1: Ordinal = Ordinal(1);

pub struct Rig<B: Backing> {
    pub machine: Arc<Machine<B>>,
    pub faults: Arc<FaultDriver>,
    pub device: Device,
    /// Dropped last.
    _hazards: NoHazards<B>,
}

/// Fails the test that drops it if a call took memory away while queued work named it. A test that
/// does so on purpose takes the hazards from the machine.
struct NoHazards<B: Backing>(Arc<Machine<B>>);

impl<B: Backing> Drop for NoHazards<B> {
    fn drop(&mut self) {
        let (count, first) = (self.0.hazards(), self.0.take_hazards());
        if count == 0 || std::thread::panicking() {
            return;
        }
        let first: Vec<_> = first.iter().map(ToString::to_string).collect();
        panic!(
            "memory was taken away under queued work {count} times:\n{}",
            first.join("\n")
        );
    }
}

impl<B: Backing> Rig<B> {
    /// Opens the second device of the same driver.
    pub fn second(&self) -> Device {
        let driver: Arc<dyn Driver> = self.faults.clone();
        let device = Device::open(driver, 1).unwrap();
        self.faults.forget();
        device
    }

    /// Queues a kernel that reads and writes these ranges of the first device's memory.
    pub fn kernel(
        &self,
        stream: &Stream,
        reads: &[(DeviceAddress, u64)],
        writes: &[(DeviceAddress, u64, u8)],
    ) {
        let (reads, writes) = (reads.to_vec(), writes.to_vec());
        let queued = self
            .machine
            .queue_kernel(D0, stream.as_raw(), reads, writes);
        queued.unwrap();
    }

    /// Holds a stream back, and queues a kernel on it.
    pub fn held_kernel(
        &self,
        stream: &Stream,
        reads: &[(DeviceAddress, u64)],
        writes: &[(DeviceAddress, u64, u8)],
    ) {
        self.machine.hold(D0, stream.as_raw());
        self.kernel(stream, reads, writes);
    }

    /// Checks what was read, on a driver that keeps bytes.
    pub fn shows<T: PartialEq<U> + Debug, U: Debug>(&self, seen: T, expected: U) {
        if self.keeps_bytes() {
            assert_eq!(seen, expected);
        }
    }

    /// Returns `true` if written bytes can be read. The model has no memory.
    pub fn keeps_bytes(&self) -> bool {
        self.machine.kind() == cuvmm::driver::DriverKind::Host
    }
}

pub fn rig<B: Backing>(machine: Machine<B>) -> Rig<B> {
    let machine = Arc::new(machine);
    let inner: Arc<dyn Driver> = machine.clone();
    let faults = Arc::new(FaultDriver::new(inner));
    let driver: Arc<dyn Driver> = faults.clone();
    let device = Device::open(driver, 0).unwrap();
    faults.forget();
    let _hazards = NoHazards(machine.clone());
    Rig {
        machine,
        faults,
        device,
        _hazards,
    }
}

pub fn model_options() -> ModelOptions {
    ModelOptions::new()
        .manner(manner())
        .devices(2)
        .numa_nodes(2)
}

pub fn model() -> Rig<cuvmm::driver::model::Nothing> {
    rig(ModelDriver::new(model_options().capacity(64 * GIB)))
}

pub fn host() -> Rig<cuvmm::driver::host::HostMemory> {
    rig(HostDriver::new(
        HostOptions::new()
            .manner(manner())
            .devices(2)
            .numa_nodes(2)
            .capacity(GIB),
    ))
}

/// Creates a pool of `granules` granules on the rig's device.
pub fn pool(rig: &Rig<impl Backing>, granules: u64) -> Pool {
    limited(rig, granules).build().unwrap()
}

/// Creates a pool of `granules` granules with one tenant.
pub fn tenancy(rig: &Rig<impl Backing>, granules: u64) -> (Pool, Tenant) {
    with_tenant(pool(rig, granules))
}

/// Creates a pool of `granules` granules with one tenant, and a stream.
pub fn scene(rig: &Rig<impl Backing>, granules: u64) -> (Pool, Tenant, Stream) {
    with_stream(rig, pool(rig, granules))
}

/// Registers a tenant of a pool.
pub fn with_tenant(pool: Pool) -> (Pool, Tenant) {
    let tenant = pool.tenant("a").register().unwrap();
    (pool, tenant)
}

/// Registers a tenant of a pool, and creates a stream.
pub fn with_stream(rig: &Rig<impl Backing>, pool: Pool) -> (Pool, Tenant, Stream) {
    let (tenant, stream) = joined(rig, &pool);
    (pool, tenant, stream)
}

/// Registers a tenant of a pool that is there, and creates a stream.
pub fn joined(rig: &Rig<impl Backing>, pool: &Pool) -> (Tenant, Stream) {
    let tenant = pool.tenant("a").register().unwrap();
    (tenant, Stream::new(&rig.device).unwrap())
}

/// Creates a pool of `granules` granules with two tenants, and a stream.
pub fn pair(rig: &Rig<impl Backing>, granules: u64) -> (Pool, [Tenant; 2], Stream) {
    let pool = pool(rig, granules);
    let tenants = tenants(&pool);
    (pool, tenants, Stream::new(&rig.device).unwrap())
}

/// Registers two tenants of a pool.
pub fn tenants(pool: &Pool) -> [Tenant; 2] {
    ["a", "b"].map(|name| pool.tenant(name).register().unwrap())
}

/// Creates a pool of `granules` granules with a mapper.
pub fn mapped_pool(rig: &Rig<impl Backing>, granules: u64, mapper: &Mapper) -> Pool {
    limited(rig, granules).mapper(mapper).build().unwrap()
}

/// Creates a mapper, and a pool of `granules` granules with one tenant.
pub fn mapped(rig: &Rig<impl Backing>, granules: u64) -> (Mapper, Pool, Tenant) {
    let mapper = Mapper::start(&rig.device).unwrap();
    let (pool, tenant) = with_tenant(mapped_pool(rig, granules, &mapper));
    (mapper, pool, tenant)
}

/// Returns a builder for a pool of `granules` granules whose blocks can be exported.
pub fn shareable(rig: &Rig<impl Backing>, granules: u64) -> PoolBuilder<'_> {
    limited(rig, granules).shareable(HandleTypes::POSIX_FD)
}

pub fn limited(rig: &Rig<impl Backing>, granules: u64) -> PoolBuilder<'_> {
    let limit = Limit::Bytes(granules * G);
    Pool::builder(&rig.device).limit(limit)
}

/// Reserves `size` bytes for a region, and commits the first of them.
pub fn region(rig: &Rig<impl Backing>, size: u64, committed: u64) -> Region {
    self::committed(Region::builder(&rig.device, size), committed)
}

/// Reserves a region, and commits its first bytes.
pub fn committed(builder: RegionBuilder<'_>, bytes: u64) -> Region {
    let mut region = builder.reserve().unwrap();
    region.commit(0..bytes).unwrap();
    region
}

/// Creates a fully committed region that can be exported, in extents of a granule.
pub fn shareable_region(rig: &Rig<impl Backing>, granules: u64) -> Region {
    let builder = Region::builder(&rig.device, granules * G).largest_extent(G);
    self::committed(builder.shareable(HandleTypes::POSIX_FD), granules * G)
}

/// Returns a number of equal elements. They are copied, which in a build that is not optimized takes a
/// small part of the time of `vec![value; count]`.
pub fn filled<T: Copy>(value: T, count: usize) -> Vec<T> {
    let mut elements = [value; 1024].repeat(count.div_ceil(1024));
    elements.truncate(count);
    elements
}

/// Queues a kernel that will write to the whole block, and holds it back.
pub fn busy(rig: &Rig<impl Backing>, stream: &Stream, block: &Block, byte: u8) {
    rig.held_kernel(stream, &[], &[(block.address(), block.size(), byte)]);
}

/// Reads bytes at an address by the driver's own copy, or returns `None` if nothing is mapped
/// there.
pub fn copy(rig: &Rig<impl Backing>, at: u64) -> Option<[u8; 4]> {
    let mut bytes = [0; 4];
    // SAFETY: the driver refuses the copy if nothing is mapped, and a read changes nothing.
    #[allow(unsafe_code)]
    let copied = unsafe { rig.machine.copy_to_host(D0, &mut bytes, DeviceAddress(at)) };
    copied.ok().map(|()| bytes)
}

/// Waits until the pool's mapper has done something, for far longer than it takes.
pub fn until(pool: &Pool, what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        let waited = begun.elapsed();
        assert!(
            waited.as_secs() < 120,
            "timed out ({what}): {:#?}",
            pool.stats()
        );
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Waits until something is done, for far longer than it takes.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed().as_secs() < 120, "timed out ({what})");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the number of driver calls through a pool's device that the mapper's thread did not
/// make. The two counters cannot be read at once, so they are read until neither changes.
pub fn calls_without_mapper(device: &Device, pool: &Pool) -> u64 {
    let read = || (pool.calls().total(), device.mapper_calls().total());
    let mut last = read();
    loop {
        std::thread::sleep(Duration::from_millis(1));
        let now = read();
        if now == last {
            return now.0 - now.1;
        }
        last = now;
    }
}

/// Returns a fault that fails the nth call of these kinds, counted together.
pub fn nth_of(n: u64, code: CUresult, calls: &[Call]) -> Fault {
    let any = Fault::nth(n, code);
    calls.iter().fold(any, |fault, &call| fault.of(call))
}

/// Returns the number of random programs that a test runs: `usual`, `CUVMM_PROGRAMS` times as many,
/// or at most `PROPTEST_CASES`. The programs are determined by `PROPTEST_RNG_SEED`, for which
/// `.cargo/config.toml` sets a default for the workspace.
pub fn cases(usual: u32) -> u32 {
    let told = |name| {
        std::env::var(name)
            .ok()
            .and_then(|text| text.parse::<f64>().ok())
    };
    let times = told("CUVMM_PROGRAMS").unwrap_or(1.0);
    let most = told("PROPTEST_CASES").unwrap_or(f64::MAX);
    (f64::from(usual) * times).min(most).max(1.0) as u32
}

/// Runs a test on the model and on the host driver.
#[macro_export]
macro_rules! on_both {
    ($($(#[$meta:meta])* fn $name:ident($rig:ident) $body:block)+) => {
        $(
            mod $name {
                use super::*;

                fn body<B: cuvmm::driver::model::Backing>($rig: &$crate::common::Rig<B>)
                $body

                $(#[$meta])*
                #[test]
                fn on_model() {
                    let rig = $crate::common::model();
                    body(&rig);
                    $crate::common::nothing_left(rig);
                }

                $(#[$meta])*
                #[test]
                fn on_host() {
                    let rig = $crate::common::host();
                    body(&rig);
                    $crate::common::nothing_left(rig);
                }
            }
        )+
    };
}

/// Checks that everything was returned to the driver.
pub fn nothing_left(rig: Rig<impl Backing>) {
    let Rig {
        machine, device, ..
    } = rig;
    assert_eq!((device.drop_failures(), device.leaked()), (0, 0));
    // Memory pools that were current are never destroyed.
    let kept = device.kept_memory_pools();
    let live = || {
        let mut live = machine.live();
        live.mem_pools -= kept;
        live
    };
    // An open device keeps the events that it has recorded for reuse.
    drop(device);
    ended(|| live().is_nothing());
    let live = live();
    assert!(live.is_nothing(), "left behind: {live:?}");
}

/// A rig that checks at its end that everything was returned to the driver. What a test made of it is
/// dropped before.
pub struct Clean<B: Backing> {
    rig: Option<Rig<B>>,
    leaves: AtomicBool,
}

pub fn clean<B: Backing>(rig: Rig<B>) -> Clean<B> {
    Clean {
        rig: Some(rig),
        leaves: AtomicBool::new(false),
    }
}

impl<B: Backing> Clean<B> {
    /// Leaves the check out, where a test makes a drop fail on purpose.
    pub fn leaves(&self) {
        self.leaves.store(true, Ordering::Relaxed);
    }
}

impl<B: Backing> Deref for Clean<B> {
    type Target = Rig<B>;

    fn deref(&self) -> &Rig<B> {
        self.rig.as_ref().unwrap()
    }
}

impl<B: Backing> Drop for Clean<B> {
    fn drop(&mut self) {
        let rig = self.rig.take().unwrap();
        if !self.leaves.load(Ordering::Relaxed) && !std::thread::panicking() {
            nothing_left(rig);
        }
    }
}

/// Waits at most five seconds for the end of pools. A pool that a ledger's thread asks while its last handle is
/// dropped ends on that thread.
fn ended(is_it: impl Fn() -> bool) {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while !is_it() && std::time::Instant::now() < until {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Checks that everything was returned to the driver, except what drops could not release because
/// of a failed call, which was counted. Returns that count.
pub fn only_counted_left(rig: &Rig<impl Backing>) -> u64 {
    let books = || {
        let (live, failures) = (rig.machine.live(), rig.device.drop_failures());
        let memory = live.reservations + live.mappings + live.allocations + live.registered;
        let things = memory + live.streams;
        let pools = live.mem_pools - rig.device.kept_memory_pools();
        let left = (things + pools) as u64 + live.references;
        // An open device keeps at most two events.
        let events = live.events as u64;
        let kept = events.saturating_sub(2)..=events;
        let counted = left <= failures && kept.contains(&(failures - left));
        (counted, failures, live)
    };
    ended(|| books().0);
    let (counted, failures, live) = books();
    assert!(counted, "{failures} failures, left behind: {live:?}");
    failures
}
