//! `cuvmm-bench run`: the costs of the library and of the driver, in one run.
//!
//! `docs/bench.md` describes the rows. From the bottom up: `samples` and `row` hold figures,
//! `report` shows them; `by_hand` and `calls` are the driver's own calls, `queue` work on memory,
//! `pinned` host memory, `kernels` device code, `busy` work that lasts, `mapper` a pool with a
//! mapper; `stage` has the common parts of all rows; `cold` is cuvmm's cold side and `pairs` takes
//! turns. Then a file for each kind of row, and `prices` for the table of costs.

mod beside_taking;
mod beside_waiter;
mod busy;
mod by_hand;
mod calls;
mod cold;
mod commit;
mod current;
mod cut;
mod doubling;
mod drop_under;
mod exchange;
mod free;
mod grants;
mod grow;
mod kernels;
mod kv;
mod kv_fork;
mod ledger;
mod lower_limit;
mod mapper;
mod memory_pool;
mod metadata;
mod options;
mod paced;
mod paged;
mod pairs;
mod peers;
mod pinned;
mod prices;
mod queue;
mod relocate;
mod report;
mod ring;
mod row;
mod samples;
mod scale;
mod share;
mod sleep;
mod snapshot;
mod sparse;
mod stage;
mod take_back;
mod threads;
mod vector;
mod waiting_futures;
mod wanted;
mod warm;

use std::process::ExitCode;

use anyhow::anyhow;
use cuvmm::Scrub;

use self::report::Report;
use self::stage::Stage;
use self::wanted::Wanted;
use cuvmm_command::files;
use cuvmm_command::terminal::print;

pub(crate) use options::Args;
pub(crate) use samples::Samples;
pub(crate) use share::Reader;

type Measure = Box<dyn Fn(&Stage, &Wanted, &mut Report) -> anyhow::Result<()>>;

struct Group {
    names: Vec<String>,
    measure: Measure,
}

impl Group {
    fn new(
        names: impl IntoIterator<Item = impl Into<String>>,
        measure: impl Fn(&Stage, &Wanted, &mut Report) -> anyhow::Result<()> + 'static,
    ) -> Self {
        Self {
            names: names.into_iter().map(Into::into).collect(),
            measure: Box::new(measure),
        }
    }

    fn one(
        name: &str,
        measure: impl Fn(&Stage, &mut Report) -> anyhow::Result<()> + 'static,
    ) -> Self {
        Self::new([name], move |stage, _, report| measure(stage, report))
    }

    /// Measures the selected rows; afterwards each is in the report, or named as left out.
    fn run(&self, stage: &Stage, wanted: &Wanted, report: &mut Report) {
        let names: Vec<&String> = self.names.iter().filter(|name| wanted.has(name)).collect();
        if names.is_empty() {
            return;
        }
        let outcome = (self.measure)(stage, wanted, report);
        let error = outcome.err().unwrap_or_else(|| anyhow!("it was forgotten"));
        for name in names {
            if !report.has(name) {
                report.leave_out(name, &error);
            }
        }
    }
}

fn groups() -> Vec<Group> {
    let mut groups = Vec::new();
    groups.extend(commit::SIZES.map(|size| {
        Group::one(&commit::name(size.0), move |stage, report| {
            commit::measure(stage, report, size)
        })
    }));
    groups.push(Group::one(free::NAME, free::measure));
    groups.extend(warm::SIZES.map(|size| {
        Group::one(&warm::name(size.0), move |stage, report| {
            warm::measure(stage, report, size)
        })
    }));
    groups.push(Group::one(grow::NAME, grow::measure));
    groups.push(Group::one(paced::NAME, paced::measure));
    groups.push(Group::one(vector::NAME, vector::measure));
    groups.extend(
        kv::STEPS.map(|of| Group::one(of.0, move |stage, report| kv::step(stage, report, of))),
    );
    groups.push(Group::one(kv::CREATE, kv::create));
    let names = [kv_fork::SMALL, kv_fork::FEW];
    groups.push(Group::new(names, kv_fork::measure));
    groups.push(Group::new([paged::BACK, paged::RELEASE], paged::there));
    groups.push(Group::one(paged::STEP, paged::step));
    groups.push(Group::one(paged::STEP_AHEAD, paged::step_ahead));
    groups.extend(
        paged::TAKES
            .map(|of| Group::one(of.0, move |stage, report| paged::take(stage, report, of))),
    );
    groups.extend(sleep::DISCARDED.map(|of| {
        Group::new(of.names(), move |stage, wanted, report| {
            sleep::discard(stage, wanted, report, of)
        })
    }));
    for (names, staged) in [(sleep::KEPT, false), (sleep::STAGED, true)] {
        groups.push(Group::new(names, move |stage, wanted, report| {
            sleep::keep(stage, wanted, report, staged)
        }));
    }
    groups.push(Group::new(exchange::names(), exchange::measure));
    groups.extend(containers());
    groups.extend(share::SHARED.map(|of| {
        Group::new(share::names(of), move |stage, wanted, report| {
            share::measure(stage, wanted, report, of)
        })
    }));
    groups.push(Group::one(take_back::PLAIN, |stage, report| {
        take_back::measure(stage, report, Scrub::Never)
    }));
    groups.push(Group::one(take_back::SCRUBBED, |stage, report| {
        take_back::measure(stage, report, Scrub::BetweenTenants)
    }));
    groups.push(Group::one(lower_limit::NAME, lower_limit::measure));
    let names = [memory_pool::ALLOCATE, memory_pool::CURRENT];
    groups.push(Group::new(names, |stage, _, report| {
        memory_pool::allocate(stage, report)
    }));
    let names = [
        memory_pool::RESERVE,
        memory_pool::EXCHANGE,
        memory_pool::TRIM,
    ];
    groups.push(Group::new(names, |stage, _, report| {
        memory_pool::change(stage, report)
    }));
    groups.push(Group::one(ledger::CHARGE, ledger::charge));
    groups.push(Group::one(ledger::TAKE, ledger::take));
    groups.push(Group::one(ledger::WAIT, ledger::wait));
    let names = [waiting_futures::ONE, waiting_futures::TOGETHER];
    groups.push(Group::new(names, waiting_futures::measure));
    groups.push(Group::one(drop_under::NAME, drop_under::measure));
    groups.push(Group::one(beside_waiter::NAME, beside_waiter::measure));
    groups.push(Group::new(beside_taking::NAMES, |stage, _, report| {
        beside_taking::measure(stage, report)
    }));
    groups.push(Group::one(metadata::NAME, metadata::measure));
    let names = [scale::NAME, scale::SAME_TENANT];
    groups.push(Group::new(names, scale::measure));
    let names = [threads::NAME, threads::TENANT_EACH, threads::OTHER_SIZES];
    groups.push(Group::new(names, threads::measure));
    groups
}

/// Rows of containers and regions, and of two devices.
fn containers() -> Vec<Group> {
    let mut groups = Vec::new();
    groups.extend(doubling::SIZES.map(|size| {
        Group::new(doubling::names(size.0), move |stage, wanted, report| {
            doubling::measure(stage, wanted, report, size)
        })
    }));
    groups.push(Group::one(sparse::COMMIT, sparse::commit));
    groups.push(Group::one(sparse::ZEROS, sparse::zeros));
    groups.extend(snapshot::SNAPSHOTS.map(|of| {
        Group::one(of.0, move |stage, report| {
            snapshot::snapshot(stage, report, of)
        })
    }));
    groups.push(Group::one(snapshot::MAKE_MUT, snapshot::make_mut));
    groups.push(Group::one(ring::NAME, ring::measure));
    groups.push(Group::one(cut::NAME, cut::measure));
    groups.push(Group::one(cut::SHRINK, cut::shrink));
    let names = [relocate::TO_HOST, relocate::TO_DEVICE];
    groups.push(Group::new(names, relocate::measure));
    groups.push(Group::new(peers::names(), peers::measure));
    groups.extend(grants::SIZES.map(|size| {
        Group::new(grants::names(size.0), move |stage, wanted, report| {
            grants::measure(stage, wanted, report, size)
        })
    }));
    groups
}

impl Args {
    /// Measures and prints.
    ///
    /// # Errors
    /// Options contradict each other, a driver is missing, a file cannot be read or written, or
    /// rows failed.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let groups = groups();
        let known: Vec<String> = groups
            .iter()
            .flat_map(|group| group.names.iter().cloned())
            .collect();
        let wanted = Wanted::new(&self.only, &known)?;
        let opened = self.open()?;
        let about = format!("{}, CUDA {}", opened.said(), opened.driver.version()?);
        let driver = opened.driver.kind().name();
        let stage = Stage::new(opened, self.device, self.quick)?;
        let device = stage.device.name().to_owned();
        let mut report = Report::new(driver, device, about.clone(), self.quick, self.verbose);
        for group in &groups {
            group.run(&stage, &wanted, &mut report);
        }
        let text = if self.json {
            report.json()?
        } else {
            report.text()
        };
        print(&text)?;
        if let Some(file) = &self.save_costs {
            let table = prices::written(&stage, &prices::measure(&stage)?);
            files::write(file, &table)?;
        }
        let failed = report.failed();
        if failed.is_empty() {
            return Ok(ExitCode::SUCCESS);
        }
        Err(anyhow!("rows that failed: {}", failed.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::groups;

    #[test]
    fn no_row_is_there_twice() {
        let groups = groups();
        let names: Vec<&String> = groups.iter().flat_map(|group| &group.names).collect();
        let different: BTreeSet<_> = names.iter().collect();
        assert_eq!(names.len(), different.len(), "{names:?}");
    }
}
