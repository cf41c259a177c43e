//! Host memory that the library uses for committed memory. Always runs on the model driver; the
//! model's own bookkeeping is measured by making the same mappings by hand, and subtracted.

use std::sync::Arc;

use anyhow::ensure;
use cuvmm::driver::model::{ModelDriver, ModelOptions};
use cuvmm::driver::{Driver as _, Ordinal};
use cuvmm::{Block, Device, Limit, Pool, Stream};

use super::by_hand::repeat_mappings;
use super::commit::PAGE;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use crate::heap::kept_by;

pub(super) const NAME: &str = "metadata";

const BASELINE: &str = "the 2 MiB of a block; all figures are bytes for a block";

const NOTE: &str = "counted by the allocator, on a model driver of its own";

/// Measures the heap bytes per block of one granule.
pub(super) fn measure(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    let count = stage.times(10_000, 2_000);
    let bytes = count as u64 * PAGE;
    let driver = Arc::new(ModelDriver::new(ModelOptions::new().capacity(bytes)));
    let device = Device::open(driver.clone(), 0)?;
    let pool = Pool::builder(&device).limit(Limit::Bytes(bytes)).build()?;
    let tenant = pool.tenant("tenant").register()?;
    let stream = Stream::new(&device)?;
    let mut blocks: Vec<Block> = Vec::with_capacity(count);
    let (allocated, both) = kept_by(|| {
        (0..count).try_for_each(|_| {
            let block = tenant.block(PAGE).home_stream(&stream).try_allocate()?;
            blocks.push(block);
            anyhow::Ok(())
        })
    });
    allocated?;
    let picture = driver.snapshot();
    let bare = ModelDriver::new(ModelOptions::new().capacity(bytes));
    // The first call creates the context, which must not be counted.
    bare.memory_info(Ordinal(0))?;
    let (repeated, theirs) = kept_by(|| repeat_mappings(&bare, Ordinal(0), &picture));
    repeated?;
    let mapped: u64 = bare.snapshot().mappings.iter().map(|at| at.size).sum();
    ensure!(mapped == bytes, "{mapped} bytes were mapped for {bytes}");
    let each = |bytes: i64| bytes as f64 / count as f64;
    let ours: Samples = [each(both - theirs)].into_iter().collect();
    let baseline: Samples = [PAGE as f64].into_iter().collect();
    let mut row = Row::new(NAME, &ours, BASELINE, &baseline).in_bytes();
    row.n = count;
    report.add(row.note(NOTE).count("model_bytes_each", each(theirs)));
    Ok(())
}
