//! Growth at the pace of a decoding program, with a mapper that precommits memory.

use std::time::{Duration, Instant};

use cuvmm::Stream;

use super::commit::{A_PAGE, GIB, MIB, PAGE, pages};
use super::mapper::Mapped;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use cuvmm_command::watch::wall;

pub(super) const NAME: &str = "grow_mapper_step";

/// Growth that is not counted: the mapper has to observe a growth rate before it can stay ahead.
const BEFORE: u64 = 64 * MIB;

const A_SECOND: u64 = GIB;

/// Measures each step after the first 64 MiB, at 1 GiB per second. The thread spins between steps,
/// in place of a program's other work.
pub(super) fn measure(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    let size = stage.times(8, 1) as u64 * GIB;
    stage.room(size + GIB)?;
    let mapped = Mapped::start(&stage.device, size)?;
    let tenant = mapped.pool.tenant("tenant").register()?;
    let stream = Stream::new(&stage.device)?;
    let first = tenant.block(PAGE).capacity(size).home_stream(&stream);
    let mut block = first.try_allocate()?;
    let pause = Duration::from_nanos(1_000_000_000 * PAGE / A_SECOND);
    let mut ours = Samples::with_room(usize::try_from(size / PAGE)?);
    let mut calls = mapped.calls_of_others();
    let mut next = Instant::now();
    for wanted in (2..=size / PAGE).map(|pages| pages * PAGE) {
        next += pause;
        while Instant::now() < next {
            std::hint::spin_loop();
        }
        let (took, ()) = wall(|| block.try_grow_to(wanted))?;
        if wanted > BEFORE {
            ours.add(took);
        } else {
            calls = mapped.calls_of_others();
        }
    }
    let calls = mapped.calls_of_others() - calls;
    drop(block);
    drop(tenant);
    mapped.stop();
    let row = Row::new(NAME, &ours, A_PAGE, &pages(stage)?)
        .count("driver_calls_on_this_thread", calls as f64);
    report.add(row.note(stage.watch.note_on_baseline()));
    Ok(())
}
