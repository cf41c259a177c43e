//! Allocation of cached memory in a pool with 100,000 live blocks, compared with a pool with 100.
//! Always runs on the model driver, because these rows measure the library's own bookkeeping.

use std::sync::Arc;

use cuvmm::driver::model::{ModelDriver, ModelOptions};
use cuvmm::{Block, Device, Limit, Pool, Stream, Tenant};

use super::commit::PAGE;
use super::pairs::alternate;
use super::report::Report;
use super::row::Row;
use super::stage::Stage;
use super::wanted::Wanted;
use cuvmm_command::watch::wall;

pub(super) const NAME: &str = "scale_100k_blocks";
pub(super) const SAME_TENANT: &str = "scale_100k_blocks_same_tenant";

const TENANTS: usize = 1_000;
const BLOCKS_EACH: usize = 100;
const BATCH: usize = 64;

const BASELINE: &str = "the same with 100 blocks of one tenant";

const NOTE: &str = "real time, on a model driver; mean of batches of 64, tenant after tenant";
const SAME_NOTE: &str = "real time, on a model driver; mean of batches of 64 by one tenant";

/// A pool with tenants that have 100 live blocks and one cached block each.
struct Crowd {
    tenants: Vec<(Tenant, Vec<Block>)>,
    stream: Stream,
    next: usize,
}

impl Crowd {
    fn new(tenants: usize) -> anyhow::Result<Self> {
        let bytes = (tenants * (BLOCKS_EACH + 1)) as u64 * PAGE;
        let driver = ModelDriver::new(ModelOptions::new().capacity(bytes));
        let device = Device::open(Arc::new(driver), 0)?;
        let pool = Pool::builder(&device).limit(Limit::Bytes(bytes)).build()?;
        let stream = Stream::new(&device)?;
        let tenants = (0..tenants)
            .map(|number| {
                let tenant = pool.tenant(format!("tenant {number}")).register()?;
                let block = || tenant.block(PAGE).home_stream(&stream).try_allocate();
                let idle = block()?;
                let blocks = (0..BLOCKS_EACH)
                    .map(|_| block())
                    .collect::<Result<_, _>>()?;
                drop(idle);
                Ok((tenant, blocks))
            })
            .collect::<anyhow::Result<_>>()?;
        Ok(Self {
            tenants,
            stream,
            next: 0,
        })
    }

    /// Returns the nanoseconds of an allocation and a free, by one tenant or by each in turn.
    fn batch(&mut self, each: bool) -> anyhow::Result<f64> {
        let (took, ()) = wall(|| {
            for _ in 0..BATCH {
                self.next = (self.next + usize::from(each)) % self.tenants.len();
                let (tenant, _) = &self.tenants[self.next];
                let block = tenant.block(PAGE).home_stream(&self.stream);
                drop(block.try_allocate()?);
            }
            anyhow::Ok(())
        })?;
        Ok(took / BATCH as f64)
    }
}

/// Measures the large and the small pool alternately.
pub(super) fn measure(stage: &Stage, wanted: &Wanted, report: &mut Report) -> anyhow::Result<()> {
    let mut many = Crowd::new(TENANTS)?;
    let mut few = Crowd::new(1)?;
    let blocks: usize = many.tenants.iter().map(|(_, blocks)| blocks.len()).sum();
    for (name, each, note) in [(NAME, true, NOTE), (SAME_TENANT, false, SAME_NOTE)] {
        if wanted.has(name) {
            let times = stage.times(1_000, 50);
            let (ours, baselines) = alternate(times, || many.batch(each), || few.batch(each))?;
            let row = Row::new(name, &ours, BASELINE, &baselines).note(note);
            report.add(row.count("blocks", blocks as f64));
        }
    }
    Ok(())
}
