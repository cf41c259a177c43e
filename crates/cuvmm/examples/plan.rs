//! Runs a plan in advance, to compare what a vector of 8 GiB costs when it grows in steps of 2 MiB
//! and when it is committed at once.
//!
//! Runs on the model driver, whose calls cost what they cost on an H200. Where there is a GPU, the plan
//! also runs on it, and both reports are printed.

mod support;

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use cuvmm::driver::model::ModelDriver;
use cuvmm::driver::{Call, DriverKind};
use cuvmm::plan::{Clock, Report, WallClock};
use cuvmm::{Device, Plan};

const GIB: u64 = 1 << 30;

/// The model's clock, which advances by the costs of the model's calls.
struct Virtual(Arc<ModelDriver>);

impl Clock for Virtual {
    fn now(&self) -> Duration {
        self.0.clock()
    }

    fn wait(&self, time: Duration) {
        self.0.advance(time);
    }
}

fn show(whose: &str, report: &Report) {
    for step in &report.steps {
        let extents = step.calls.get(&Call::MemCreate).copied().unwrap_or(0);
        let held = step.in_use;
        println!(
            "{whose}: step {} takes {:?} for {extents} extents; {} MiB held, \
             {} MiB of it precommitted",
            step.step,
            step.time,
            held.memory() >> 20,
            held.precommitted >> 20,
        );
    }
    if let Some(failure) = &report.failure {
        println!("{whose}: step {}: {}", failure.reached.step, failure.error);
    }
}

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let plan = Plan::new()
        .reserve("grown", 64 * GIB)
        .grow("grown", 8 * GIB - 5, 2 << 20)
        .reserve("at once", 64 * GIB)
        .commit("at once", 8 * GIB - 5);

    let model = Arc::new(ModelDriver::default());
    let devices = [Device::open(model.clone(), 0)?];
    let expected = plan.run(&devices, &Virtual(model.clone()))?;
    show("expected", &expected);
    println!("expected total: {:?}, {:?}", expected.time(), expected.peak);
    assert!(expected.is_done() && model.live().is_nothing());
    let [_, grown, _, once] = &expected.steps[..] else {
        return Err("the report lacks a step".into());
    };
    assert!(grown.calls[&Call::MemCreate] > once.calls[&Call::MemCreate]);
    assert_eq!(once.in_use.padding, 2 * 5);

    let driver = support::driver()?;
    if driver.kind() == DriverKind::Cuda {
        let devices = [Device::open(driver, 0)?];
        let measured = plan.run(&devices, &WallClock::new())?;
        show("measured", &measured);
        println!("measured total: {:?}", measured.time());
    }

    // A plan for twice the device's memory fails. The report says which step failed, and why.
    let much = 2 * devices[0].total_memory();
    let plan = Plan::new()
        .reserve("too much", much)
        .commit("too much", much);
    let refused = plan.run(&devices, &Virtual(model))?;
    let failure = refused.failure.ok_or("the plan succeeded")?;
    println!(
        "step {} does not fit: {}",
        failure.reached.step, failure.error
    );
    Ok(())
}
