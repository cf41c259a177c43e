//! Times that a plan predicts for cold commits, compared with measured times: immediately after a
//! release of the same size, and half a second after the last release. If no cost table was given,
//! prices and commits are measured alternately, so that slow periods of the driver affect both.

use std::slice;
use std::sync::Arc;

use cuvmm::driver::model::Costs;
use cuvmm::plan::Report as Outcome;
use cuvmm::{Device, Plan};

use super::commit::{PAGE, SIZES};
use super::prices::{self, Beside};
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use super::truly_cold::possible;
use super::wanted::Wanted;
use cuvmm_cli::drivers::StandIn;
use cuvmm_cli::watch::{A_WHILE, Watch, nanos};

const EXPECTED: &str = "the same plan on the model, by the table of costs";

fn at_once(size: &str) -> String {
    format!("plan_at_once_{size}")
}

fn truly_cold(size: &str) -> String {
    format!("plan_truly_cold_{size}")
}

/// Returns the names of the rows, in order.
pub(super) fn names() -> Vec<String> {
    let at_once = SIZES.map(|(size, _)| at_once(size));
    let cold = SIZES.map(|(size, _)| truly_cold(size));
    at_once.into_iter().chain(cold).collect()
}

/// Adds a reservation of `size` bytes to the plan, and commits all of it.
fn commit(plan: Plan, size: u64) -> Plan {
    let name = format!("{size} bytes");
    plan.reserve(name.clone(), size).commit(name, size)
}

/// Returns a plan that waits half a second, makes a commit that is not counted, then commits each
/// size.
fn round(sizes: impl Iterator<Item = u64>) -> Plan {
    let begun = Plan::new()
        .wait(A_WHILE)
        .reserve("first", PAGE)
        .commit("first", PAGE);
    sizes.fold(begun, commit)
}

/// Steps of a round before those of the first size.
const BEGUN: usize = 3;

/// Returns the nanoseconds of the commit whose two steps begin at index `first`.
fn took(outcome: &Outcome, first: usize) -> anyhow::Result<f64> {
    if let Some(failure) = &outcome.failure {
        anyhow::bail!("step {} failed: {}", failure.reached.step, failure.error);
    }
    let steps = outcome.steps.iter().skip(first).take(2);
    Ok(nanos(steps.map(|step| step.time).sum()))
}

/// A model of the device, on which plans predict times.
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

/// The measured commits of one row.
struct Measured {
    name: String,
    size: u64,
    samples: Samples,
}

impl Measured {
    /// Returns the row, compared with the time that the table predicts; if the table has a range,
    /// the times for its ends are added as counts.
    fn row(
        &self,
        stage: &Stage,
        costs: &Costs,
        take: impl Fn(&Expecting) -> anyhow::Result<f64>,
    ) -> anyhow::Result<Row> {
        let by = |costs: &Costs| take(&Expecting::new(stage, costs)?);
        let expected = by(costs)?;
        let baselines = [expected].into_iter().collect();
        let row = Row::new(self.name.clone(), &self.samples, EXPECTED, &baselines);
        let row = row.note(stage.watch.note());
        let Some((low, high)) = costs.range() else {
            return Ok(row);
        };
        let (low, high) = (by(&low)?.min(expected), by(&high)?.max(expected));
        Ok(row
            .count("expected_low_ns", low)
            .count("expected_high_ns", high))
    }
}

/// The commits of all selected rows.
struct Rows<'a> {
    stage: &'a Stage,
    at_once: Vec<Measured>,
    cold: Vec<Measured>,
    round: Plan,
}

impl<'a> Rows<'a> {
    fn new(stage: &'a Stage, wanted: &Wanted, report: &mut Report) -> Self {
        let mut asked = |name: String, size, there: &dyn Fn() -> anyhow::Result<()>| {
            if !wanted.has(&name) {
                return None;
            }
            match there() {
                Ok(()) => Some(Measured {
                    name,
                    size,
                    samples: Samples::default(),
                }),
                Err(error) => {
                    report.leave_out(&name, &error);
                    None
                }
            }
        };
        let at_once = SIZES.iter().filter_map(|&(word, size)| {
            let there = || stage.room(size);
            asked(at_once(word), size, &there)
        });
        let at_once = at_once.collect();
        let mut together = PAGE;
        let cold = SIZES.iter().filter_map(|&(word, size)| {
            let there = || possible(stage).and_then(|()| stage.room(together + size));
            let row = asked(truly_cold(word), size, &there)?;
            together += size;
            Some(row)
        });
        let cold: Vec<_> = cold.collect();
        Self {
            stage,
            at_once,
            round: round(cold.iter().map(|row| row.size)),
            cold,
        }
    }

    fn run(&self, plan: &Plan) -> anyhow::Result<Outcome> {
        Ok(plan.run(slice::from_ref(&self.stage.device), &self.stage.watch)?)
    }

    /// Takes the samples that follow the prices just measured.
    fn take(&mut self, beside: Beside) -> anyhow::Result<()> {
        match beside {
            Beside::AtOnce(size) => {
                let Some(index) = self.at_once.iter().position(|row| row.size == size) else {
                    return Ok(());
                };
                let plan = commit(Plan::new(), size);
                self.run(&plan)?;
                let sample = took(&self.run(&plan)?, 0)?;
                self.at_once[index].samples.add(sample);
            }
            Beside::Cold if self.cold.is_empty() => {}
            Beside::Cold => {
                let outcome = self.run(&self.round)?;
                for (row, index) in self.cold.iter_mut().zip(0..) {
                    row.samples.add(took(&outcome, BEGUN + 2 * index)?);
                }
            }
        }
        Ok(())
    }

    /// Takes the samples of all turns, and returns the cost table for the predictions: the given
    /// one, or else the one measured between the samples.
    fn turns(&mut self) -> anyhow::Result<&'a Costs> {
        let stage = self.stage;
        let Some(given) = &stage.given else {
            return prices::measured_beside(stage, &mut |beside| self.take(beside));
        };
        for _ in 0..stage.times(15, 2) {
            stage.settle()?;
            for (_, size) in SIZES {
                self.take(Beside::AtOnce(size))?;
            }
            self.take(Beside::Cold)?;
        }
        Ok(given)
    }
}

/// Measures all selected rows.
///
/// # Errors
/// When a call fails.
pub(super) fn measure(stage: &Stage, wanted: &Wanted, report: &mut Report) -> anyhow::Result<()> {
    let mut rows = Rows::new(stage, wanted, report);
    if rows.at_once.is_empty() && rows.cold.is_empty() {
        return Ok(());
    }
    let costs = rows.turns()?;
    for row in &rows.at_once {
        let plan = commit(Plan::new(), row.size);
        report.add(row.row(stage, costs, |expecting| {
            expecting.run(&plan)?;
            took(&expecting.run(&plan)?, 0)
        })?);
    }
    for (row, index) in rows.cold.iter().zip(0..) {
        report.add(row.row(stage, costs, |expecting| {
            took(&expecting.run(&rows.round)?, BEGUN + 2 * index)
        })?);
    }
    Ok(())
}
