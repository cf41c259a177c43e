//! `cuvmm replay`: a request trace against an elastic pool, beside the same memory split evenly.
//!
//! Time is virtual and comes from the trace; the memory operations are real, on whichever driver.
//! From the bottom up: `trace` and `workload` say what is asked for, `settings` what it costs,
//! `memory` what the simulator asks of a memory, `simulate` plays it, `pooled` answers with the
//! library's pools and `stamps` checks them, `timeline` and `figures` sum up, `report` and `chart`
//! show it.

mod chart;
mod demand;
mod figures;
mod instant;
mod memory;
mod options;
mod policy;
mod pooled;
mod progress;
mod report;
mod settings;
mod simulate;
mod stamps;
mod timeline;
mod trace;
mod workload;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use cuvmm::Device;
use cuvmm::driver::DriverKind;
use cuvmm::driver::model::ModelDriver;

use self::chart::{Panel, Scale};
use self::figures::{Expected, PolicyFigures};
use self::policy::Policy;
use self::pooled::{Division, Pooled};
use self::report::Setup;
use self::workload::Workload;
use cuvmm_cli::costs;
use cuvmm_cli::drivers::StandIn;
use cuvmm_cli::files;
use cuvmm_cli::page::Page;
use cuvmm_cli::terminal::print;

/// The memory of a driver without a GPU beyond the replay's: no pool leaves anything free.
const SLACK: u64 = 256 << 20;
pub(crate) use options::Args;

impl Args {
    /// Replays and prints.
    ///
    /// # Errors
    /// Options that do not fit together, traces that cannot be read, failures of the driver, and
    /// stamps that are wrong.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let page = Page::verbose(self.verbose);
        let workload = self.workload()?;
        if let Some(file) = &self.chart {
            files::writable(file)?;
        }
        let table = self.table()?;
        let costs = costs::about(&table).to_owned();
        let mut stand_in = StandIn {
            capacity: Some(self.memory.saturating_add(SLACK)),
            costs: Some(table),
            ..StandIn::default()
        };
        let opened = self.driver.open_as(&stand_in)?;
        let device = Device::open(Arc::clone(&opened.driver), self.device)?;
        let granule = device.granularity();
        let memory = self.memory_limit(granule, workload.models.len())?;
        let setup = Setup {
            driver: opened.said(page),
            device: device.name().to_owned(),
            workload: self.described(&workload),
            demand: demand::mean(&workload.requests, &self.settings()),
            seed: self.models.is_empty().then_some(self.seed),
            memory,
            granule,
            guarantee: self.guarantee(memory, granule, workload.models.len())?,
            settings: self.settings(),
            stamps: opened.driver.kind() != DriverKind::Model,
        };

        // What one policy leaves to the next is expected too.
        stand_in.granularity = Some(granule);
        let model = Arc::new(stand_in.model());
        let mut results = Vec::new();
        let mut panels = Vec::new();
        for policy in self.policy.policies() {
            let clock = opened.model();
            let (mut figures, panel) = play(policy, &workload, &setup, &device, clock, !self.json)
                .with_context(|| format!("policy {policy}"))?;
            if self.expect {
                let device = Device::open(model.clone(), 0)?;
                let setup = Setup {
                    stamps: false,
                    ..setup.clone()
                };
                let clock = Some(Arc::clone(&model));
                let (foreseen, _) = play(policy, &workload, &setup, &device, clock, !self.json)
                    .with_context(|| format!("policy {policy}, on the model"))?;
                let (measured, model) = (&figures.all.cost, &foreseen.all.cost);
                figures.expected = Some(Expected::new(&costs, measured, model));
            }
            results.push((policy, figures));
            panels.push(panel);
        }
        if let Some(file) = &self.chart {
            let models = &workload.models;
            let scale = Scale {
                models,
                granule,
                limit: memory,
                share: pooled::share(memory, models.len(), granule),
            };
            chart::draw(file, &scale, &panels)?;
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
}

/// Plays the workload under one policy, in pools of its own with counters of their own.
fn play(
    policy: Policy,
    workload: &Workload,
    setup: &Setup,
    device: &Device,
    clock: Option<Arc<ModelDriver>>,
    bar: bool,
) -> anyhow::Result<(PolicyFigures, Panel)> {
    let division = Division {
        policy,
        limit: setup.memory,
        guarantee: setup.guarantee,
    };
    let mut memory = Pooled::new(device, &workload.models, &division, setup.stamps, clock)?;
    let bar = progress::bar(policy, workload.requests.len(), bar);
    let played = simulate::run(
        &workload.requests,
        workload.models.len(),
        &setup.settings,
        &mut memory,
        &mut || bar.inc(1),
    );
    bar.finish_and_clear();
    let played = played?;
    let (costs, all) = memory.finish()?;
    let figures = PolicyFigures::new(
        &workload.models,
        &workload.requests,
        &played,
        setup.granule,
        &costs,
        all,
    );
    let panel = Panel {
        policy,
        memory: played.timeline,
        waiting: played.waiting,
    };
    Ok((figures, panel))
}
