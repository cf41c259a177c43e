//! A device to test on: a machine whose streams can be held back, behind a driver that fails when
//! told to.
#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic
)]

pub mod attention;
mod manner;
pub mod sweep;

use std::sync::Arc;

use cuvmm::driver::fault::{Fault, FaultDriver};
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::driver::model::{Backing, Machine, ModelDriver, ModelOptions};
use cuvmm::driver::{CUresult, Call, Driver, Ordinal};
use cuvmm::{Device, Limit, Pool};

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
}

impl<B: Backing> Rig<B>
where
    Machine<B>: Driver,
{
    /// The second device of the same driver.
    pub fn second(&self) -> Device {
        let driver: Arc<dyn Driver> = self.faults.clone();
        let device = Device::open(driver, 1).unwrap();
        self.faults.forget();
        device
    }

    /// Whether what is written can be read: the model has no memory.
    pub fn keeps_bytes(&self) -> bool {
        self.machine.kind() == cuvmm::driver::DriverKind::Host
    }
}

pub fn rig<B: Backing + 'static>(machine: Machine<B>) -> Rig<B>
where
    Machine<B>: Driver,
{
    let machine = Arc::new(machine);
    let inner: Arc<dyn Driver> = machine.clone();
    let faults = Arc::new(FaultDriver::new(inner));
    let driver: Arc<dyn Driver> = faults.clone();
    let device = Device::open(driver, 0).unwrap();
    faults.forget();
    Rig {
        machine,
        faults,
        device,
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

/// A pool of so many granules on the rig's device.
pub fn pool<B: Backing + 'static>(rig: &Rig<B>, granules: u64) -> Pool
where
    Machine<B>: Driver,
{
    let limit = Limit::Bytes(granules * G);
    Pool::builder(&rig.device).limit(limit).build().unwrap()
}

/// Driver calls through a pool's device that its mapper's thread did not make. The two counters
/// are not read at one moment: they are read until nothing happens between.
pub fn calls_without_mapper(device: &Device, pool: &Pool) -> u64 {
    let read = || (pool.calls().total(), device.mapper_calls().total());
    let mut last = read();
    loop {
        std::thread::sleep(std::time::Duration::from_millis(1));
        let now = read();
        if now == last {
            return now.0 - now.1;
        }
        last = now;
    }
}

/// Fails the nth call of these kinds, counted together.
pub fn nth_of(n: u64, code: CUresult, calls: &[Call]) -> Fault {
    let any = Fault::nth(n, code);
    calls.iter().fold(any, |fault, &call| fault.of(call))
}

/// How many random programs a test runs: as many as usual, or at most `PROPTEST_CASES`.
pub fn cases(usual: u32) -> u32 {
    let told = std::env::var("PROPTEST_CASES").ok();
    let most = told.and_then(|text| text.parse().ok());
    most.map_or(usual, |most| usual.min(most))
}

/// Runs a test on the model and on the host.
#[macro_export]
macro_rules! on_both {
    ($($(#[$meta:meta])* fn $name:ident($rig:ident) $body:block)+) => {
        $(
            mod $name {
                use super::*;

                fn body<B: cuvmm::driver::model::Backing + 'static>($rig: &common::Rig<B>)
                where
                    cuvmm::driver::model::Machine<B>: cuvmm::driver::Driver,
                $body

                $(#[$meta])*
                #[test]
                fn on_model() {
                    let rig = common::model();
                    body(&rig);
                    common::nothing_left(rig);
                }

                $(#[$meta])*
                #[test]
                fn on_host() {
                    let rig = common::host();
                    body(&rig);
                    common::nothing_left(rig);
                }
            }
        )+
    };
}

/// Everything that was had from the driver has been given back.
pub fn nothing_left<B: Backing + 'static>(rig: Rig<B>)
where
    Machine<B>: Driver,
{
    let live = rig.machine.live();
    assert!(live.is_nothing(), "left behind: {live:?}");
    assert_eq!(rig.device.drop_failures(), 0);
}
