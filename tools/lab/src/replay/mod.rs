//! `cuvmm replay`: a request trace against an elastic pool, beside the same memory split evenly.
//!
//! Time is virtual and comes from the trace; the memory operations are real, on any driver. From
//! the bottom up: `trace` and `workload` have the requests, `settings` their costs, `memory` the
//! simulator's interface to a memory and `shared` what processes of a ledger need beside it,
//! `simulate` plays the requests, `tenants` has the pools, `pooled` serves the requests with blocks
//! of these and `paged` with paged caches, `stamps` checks them, `timeline` and `figures` sum up,
//! `report` and `chart` show the result. `processes` plays in real time, in one process or several.

mod chart;
mod demand;
mod figures;
mod instant;
mod memory;
mod meter;
#[cfg(not(target_os = "linux"))]
mod one_process;
mod options;
mod paged;
mod policy;
mod pooled;
mod process;
#[cfg(target_os = "linux")]
mod processes;
mod progress;
mod report;
mod settings;
mod shared;
mod simulate;
mod stamps;
mod tenants;
mod timeline;
mod trace;
mod workload;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use cuvmm::Device;
use cuvmm::driver::DriverKind;
use cuvmm::driver::model::ModelDriver;
use indicatif::ProgressBar;

use self::chart::{Panel, Scale};
use self::figures::{Expected, PolicyFigures, Run};
use self::paged::Paged;
use self::policy::Policy;
use self::pooled::Pooled;
use self::report::Setup;
use self::shared::Shared;
use self::workload::Workload;
use cuvmm_command::costs;
use cuvmm_command::drivers::StandIn;
use cuvmm_command::page::Page;
use cuvmm_command::terminal::print;
#[cfg(not(target_os = "linux"))]
use one_process as processes;

pub use options::Args;
#[cfg(target_os = "linux")]
pub use processes::One;

impl Args {
    /// Replays and prints.
    ///
    /// # Errors
    /// Options contradict each other, a trace cannot be read, the driver fails, or a stamp is
    /// wrong.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let page = Page::verbose(self.verbose);
        let workload = self.workload()?;
        if let Some(file) = &self.chart {
            crate::chart::writable(file)?;
        }
        let table = self.cost_table()?;
        let costs = costs::about(&table).to_owned();
        let calls = table.to_string();
        let mut stand_in = StandIn {
            capacity: Some(self.capacity()),
            costs: Some(table),
            ..StandIn::default()
        };
        let opened = self.driver.open_as(&stand_in)?;
        let device = Device::open(Arc::clone(&opened.driver), self.device)?;
        let terms = self.terms(opened.driver.kind(), calls)?;
        let mut setup = self.setup(&workload, &device)?;
        setup.driver = opened.said();
        setup.stamps = opened.driver.kind() != DriverKind::Model;
        setup.speed = terms.as_ref().map(|terms| terms.speed);

        // The model expects a policy's effects on the next policy too.
        stand_in.granularity = Some(setup.granule);
        let model = Arc::new(stand_in.model());
        let mut results = Vec::new();
        let mut panels = Vec::new();
        for policy in self.policies() {
            let bar = || progress::bar(policy, workload.requests.len(), !self.json);
            let figures = |run: &Run| {
                PolicyFigures::new(&workload.models, &workload.requests, setup.unit(), run)
            };
            let run = match &terms {
                Some(terms) => processes::play(policy, &workload, &setup, terms, &bar()),
                None => play(policy, &workload, &setup, &device, opened.model(), &bar()),
            };
            let run = run.with_context(|| format!("policy {policy}"))?;
            let mut measured = figures(&run);
            if self.expect {
                let device = Device::open(model.clone(), 0)?;
                let setup = Setup {
                    stamps: false,
                    ..setup.clone()
                };
                let clock = Some(Arc::clone(&model));
                let foreseen = play(policy, &workload, &setup, &device, clock, &bar());
                let foreseen =
                    foreseen.with_context(|| format!("policy {policy}, on the model"))?;
                let foreseen = figures(&foreseen).all.cost;
                measured.expected = Some(Expected::new(&costs, &measured.all.cost, &foreseen));
            }
            results.push((policy, measured));
            panels.push(Panel {
                policy,
                memory: run.played.timeline,
                waiting: run.played.waiting,
            });
        }
        results.sort_by_key(|(policy, _)| *policy);
        panels.sort_by_key(|panel| panel.policy);
        if let Some(file) = &self.chart {
            let headline = report::headline(&results);
            chart::draw(file, &headline, &scale(&workload.models, &setup), &panels)?;
        }
        let report = if self.json {
            report::json(&setup, &results)?
        } else {
            report::text(&setup, &results, page)
        };
        print(&report)?;
        for (policy, figures) in &results {
            let verified = &figures.all.cost.verified;
            if let Some(first) = &verified.first_wrong {
                bail!(
                    "{policy}: {} of {} stamps are wrong: {first}",
                    verified.wrong,
                    verified.stamps
                );
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Returns the setup on a device. The caller names the driver.
    fn setup(&self, workload: &Workload, device: &Device) -> anyhow::Result<Setup> {
        let (granule, models) = (device.granularity(), workload.models.len());
        let memory = self.memory_limit(granule, models)?;
        let guarantee = self.guarantee(memory, granule, models)?;
        let share = tenants::share(memory, models, granule);
        let bytes = self.kv_bytes_per_token;
        Ok(Setup {
            driver: String::new(),
            device: device.name().to_owned(),
            workload: self.described(workload),
            demand: demand::mean(&workload.requests, &self.settings()),
            seed: self.models.is_empty().then_some(self.seed),
            load: self.load,
            memory,
            granule,
            guarantee,
            settings: self.settings(),
            stamps: true,
            speed: None,
            paged: self.caches.terms(bytes, granule, (share, guarantee))?,
        })
    }
}

fn scale<'a>(models: &'a [String], setup: &Setup) -> Scale<'a> {
    Scale {
        models,
        granule: setup.unit(),
        limit: setup.memory,
        share: tenants::share(setup.memory, models.len(), setup.granule),
    }
}

/// Plays the workload in virtual time, in pools of its own with their own counters.
fn play(
    policy: Policy,
    workload: &Workload,
    setup: &Setup,
    device: &Device,
    clock: Option<Arc<ModelDriver>>,
    bar: &ProgressBar,
) -> anyhow::Result<Run> {
    let division = setup.division(policy, workload.models.len());
    let (models, stamps) = (&workload.models, setup.stamps);
    match &setup.paged {
        None => {
            let memory = Pooled::new(device, models, &division, stamps, clock, None)?;
            play_in(memory, workload, setup, bar)
        }
        Some(terms) => {
            let memory = Paged::new(device, models, &division, terms, stamps, clock, None)?;
            play_in(memory, workload, setup, bar)
        }
    }
}

fn play_in<M: Shared>(
    mut memory: M,
    workload: &Workload,
    setup: &Setup,
    bar: &ProgressBar,
) -> anyhow::Result<Run> {
    let played = simulate::run(
        &workload.requests,
        workload.models.len(),
        &setup.settings,
        &mut memory,
        &mut || bar.inc(1),
    )?;
    let (costs, all) = memory.finish()?;
    Ok(Run {
        played,
        costs,
        all,
        processes: Vec::new(),
    })
}
