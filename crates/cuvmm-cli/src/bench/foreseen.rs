//! What a plan expects of cold commits beside what they take: at once after a release of the same
//! size, and half a second after the last one.

use std::slice;
use std::sync::Arc;

use cuvmm::driver::model::Costs;
use cuvmm::plan::Report as Outcome;
use cuvmm::{Device, Plan};

use super::commit::{PAGE, SIZES};
use super::prices;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use super::truly_cold::possible;
use super::wanted::Wanted;
use crate::drivers::StandIn;
use crate::watch::{A_WHILE, Watch, nanos};

const EXPECTED: &str = "the same plan on the model, by the table of costs";

fn at_once(size: &str) -> String {
    format!("plan_at_once_{size}")
}

fn truly_cold(size: &str) -> String {
    format!("plan_truly_cold_{size}")
}

/// The rows, in order.
pub(super) fn names() -> Vec<String> {
    let at_once = SIZES.map(|(size, _)| at_once(size));
    let cold = SIZES.map(|(size, _)| truly_cold(size));
    at_once.into_iter().chain(cold).collect()
}

/// Addresses of a size with memory everywhere.
fn commit(plan: Plan, size: u64) -> Plan {
    let name = format!("{size} bytes");
    plan.reserve(name.clone(), size).commit(name, size)
}

/// Half a second, a commit that does not count, then each size.
fn round(sizes: &[(&str, u64)]) -> Plan {
    let begun = Plan::new()
        .wait(A_WHILE)
        .reserve("first", PAGE)
        .commit("first", PAGE);
    sizes
        .iter()
        .fold(begun, |plan, &(_, size)| commit(plan, size))
}

/// Steps of a round before those of the sizes.
const BEGUN: usize = 3;

/// Nanoseconds of a commit whose two steps begin at an index.
fn took(outcome: &Outcome, first: usize) -> anyhow::Result<f64> {
    if let Some(failure) = &outcome.failure {
        anyhow::bail!("step {} failed: {}", failure.reached.step, failure.error);
    }
    let steps = outcome.steps.iter().skip(first).take(2);
    Ok(nanos(steps.map(|step| step.time).sum()))
}

/// A model like the device, on which plans are expected.
struct Expecting {
    device: Device,
    watch: Watch,
}

impl Expecting {
    fn new(stage: &Stage, costs: &Costs) -> anyhow::Result<Self> {
        let stand_in = StandIn {
            capacity: Some(stage.memory()),
            costs: Some(costs.clone()),
            granularity: Some(stage.device.granularity()),
            ..StandIn::default()
        };
        let model = Arc::new(stand_in.model());
        Ok(Self {
            device: Device::open(model.clone(), 0)?,
            watch: Watch::Virtual(model),
        })
    }

    fn run(&self, plan: &Plan) -> anyhow::Result<Outcome> {
        Ok(plan.run(slice::from_ref(&self.device), &self.watch)?)
    }
}

/// Measures all rows that are asked for.
///
/// # Errors
/// When a call fails.
pub(super) fn measure(stage: &Stage, wanted: &Wanted, report: &mut Report) -> anyhow::Result<()> {
    let costs = prices::table(stage)?;
    let run = |plan: &Plan| anyhow::Ok(plan.run(slice::from_ref(&stage.device), &stage.watch)?);
    let row = |name: String, measured: &Samples, expected: f64| {
        let expected = [expected].into_iter().collect();
        Row::new(name, measured, EXPECTED, &expected).note(stage.watch.note())
    };
    for (word, size) in SIZES {
        let name = at_once(word);
        if !wanted.has(&name) {
            continue;
        }
        if let Err(error) = stage.room(size) {
            report.leave_out(&name, &error);
            continue;
        }
        let plan = commit(Plan::new(), size);
        let expecting = Expecting::new(stage, costs)?;
        expecting.run(&plan)?;
        let expected = took(&expecting.run(&plan)?, 0)?;
        run(&plan)?;
        let mut measured = Samples::default();
        for _ in 0..stage.times(15, 2) {
            measured.add(took(&run(&plan)?, 0)?);
        }
        report.add(row(name, &measured, expected));
    }
    let mut sizes = Vec::new();
    let mut together = PAGE;
    for (word, size) in SIZES {
        let name = truly_cold(word);
        if !wanted.has(&name) {
            continue;
        }
        if let Err(error) = possible(stage).and_then(|()| stage.room(together + size)) {
            report.leave_out(&name, &error);
            continue;
        }
        together += size;
        sizes.push((word, size));
    }
    if sizes.is_empty() {
        return Ok(());
    }
    let plan = round(&sizes);
    let expected = Expecting::new(stage, costs)?.run(&plan)?;
    let mut measured = vec![Samples::default(); sizes.len()];
    for _ in 0..stage.times(15, 2) {
        let outcome = run(&plan)?;
        for (samples, index) in measured.iter_mut().zip(0..) {
            samples.add(took(&outcome, BEGUN + 2 * index)?);
        }
    }
    for ((&(word, _), samples), index) in sizes.iter().zip(&measured).zip(0..) {
        let expected = took(&expected, BEGUN + 2 * index)?;
        report.add(row(truly_cold(word), samples, expected));
    }
    Ok(())
}
