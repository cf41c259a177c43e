//! Cold commits half a second after the last release, when the driver has cleared the returned
//! memory and no create is cheap any more.
//!
//! A round commits every size one after the other without releasing any in between, so that one
//! wait serves all of them. The baselines follow, each after a wait of its own. Each begins with a
//! small commit that is not counted: half a second also empties the processor's caches, which is
//! not what these rows measure.

use super::cold::Cold;
use super::commit::{GIB, ONE_PHYSICAL, PAGE, baseline, block};
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::{Stage, skip};
use super::wanted::Wanted;
use cuvmm_command::drivers::Concrete;

fn name(size: &str) -> String {
    format!("commit_truly_cold_{size}")
}

fn against_one(size: &str) -> String {
    format!("{}_vs_one_physical", name(size))
}

/// Returns the names of the rows of one size, in order.
pub(super) fn names((word, size): (&str, u64)) -> Vec<String> {
    let mut names = vec![name(word)];
    if size > GIB {
        names.push(against_one(word));
    }
    names
}

/// Checks that the driver's creates depend on the time since the last release, as they do on every
/// driver but the host.
///
/// # Errors
/// A `Skip` on the host driver.
pub(super) fn possible(stage: &Stage) -> anyhow::Result<()> {
    match stage.driver {
        Concrete::Host(_) => Err(skip("the host driver's creates cost the same at all times")),
        Concrete::Cuda(_) | Concrete::Model(_) => Ok(()),
    }
}

/// One size in a round, with its samples.
struct Size<'a> {
    word: &'a str,
    bytes: u64,
    extents: Vec<u64>,
    ours: Samples,
    same: Samples,
    one: Samples,
}

/// Measures all selected sizes.
///
/// # Errors
/// When a side fails, or cuvmm's side was not cold.
pub(super) fn measure(
    stage: &Stage,
    wanted: &Wanted,
    report: &mut Report,
    sizes: &[(&str, u64)],
) -> anyhow::Result<()> {
    possible(stage)?;
    let mut round = Vec::new();
    let mut together = 0;
    for &(word, bytes) in sizes {
        let mut names = names((word, bytes));
        names.retain(|name| wanted.has(name));
        if names.is_empty() {
            continue;
        }
        if let Err(error) = stage.room(PAGE + bytes) {
            for name in names {
                report.leave_out(&name, &error);
            }
            continue;
        }
        if PAGE + together + bytes > stage.memory() {
            measure_together(stage, wanted, report, &std::mem::take(&mut round))?;
            together = 0;
        }
        together += bytes;
        round.push((word, bytes));
    }
    measure_together(stage, wanted, report, &round)
}

fn measure_together(
    stage: &Stage,
    wanted: &Wanted,
    report: &mut Report,
    sizes: &[(&str, u64)],
) -> anyhow::Result<()> {
    if sizes.is_empty() {
        return Ok(());
    }
    let together: u64 = sizes.iter().map(|size| size.1).sum();
    let cold = Cold::new(stage, PAGE + together)?;
    let mut sizes = sizes
        .iter()
        .map(|&(word, bytes)| {
            let extents = cold.take(block(bytes))?.1.extents;
            cold.empty()?;
            Ok(Size {
                word,
                bytes,
                extents,
                ours: Samples::default(),
                same: Samples::default(),
                one: Samples::default(),
            })
        })
        .collect::<anyhow::Result<Vec<Size<'_>>>>()?;
    for _ in 0..stage.times(30, 2) {
        stage.settle()?;
        let mut taken = Vec::with_capacity(sizes.len() + 1);
        taken.push(cold.take(block(PAGE))?.1);
        for size in &mut sizes {
            let (took, block) = cold.take(block(size.bytes))?;
            size.ours.add(took);
            taken.push(block);
        }
        drop(taken);
        cold.empty()?;
        by_hand(stage, &mut sizes, |size| {
            let (_, extents) = baseline(size.bytes, &size.extents);
            Some((extents, &mut size.same))
        })?;
        by_hand(stage, &mut sizes, |size| {
            let name = against_one(size.word);
            (size.bytes > GIB && wanted.has(&name)).then_some((vec![size.bytes], &mut size.one))
        })?;
    }
    for size in &sizes {
        let mut add = |name: String, baseline, baselines| {
            let row = Row::new(name, &size.ours, baseline, baselines).note(stage.watch.note());
            report.add(row.count("extents", size.extents.len() as f64));
        };
        if wanted.has(&name(size.word)) {
            let (baseline, _) = baseline(size.bytes, &size.extents);
            add(name(size.word), baseline, &size.same);
        }
        if size.one.count() > 0 {
            add(against_one(size.word), ONE_PHYSICAL, &size.one);
        }
    }
    Ok(())
}

/// Measures one baseline of each size that has it, after a wait.
fn by_hand<'a>(
    stage: &Stage,
    sizes: &'a mut [Size<'_>],
    rival: impl Fn(&'a mut Size<'_>) -> Option<(Vec<u64>, &'a mut Samples)>,
) -> anyhow::Result<()> {
    let rivals: Vec<_> = sizes.iter_mut().filter_map(rival).collect();
    if rivals.is_empty() {
        return Ok(());
    }
    stage.settle()?;
    let mut taken = Vec::with_capacity(rivals.len() + 1);
    taken.push(stage.hand.commit(&[PAGE])?);
    for (extents, samples) in rivals {
        let (took, range) = stage.watch.time(|| stage.hand.commit(&extents))?;
        samples.add(took);
        taken.push(range);
    }
    for range in taken {
        range.give_back()?;
    }
    Ok(())
}
