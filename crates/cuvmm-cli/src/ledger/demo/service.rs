//! A service of `cuvmm demo`: weights, and a cache whose size follows the time of day.

use std::f64::consts::TAU;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime};

use cuvmm::error::BlockError;
use cuvmm::{CloseRefusal, Contents, Device, Ledger, Pool, Tenant};
use cuvmm_command::drivers::{Choice, StandIn};
use cuvmm_command::terminal::{chain, print, safe};

use super::NAMES;
use cuvmm_command::stop::Stop;
use cuvmm_command::subprocess::remove_left;

/// The start of the line that reports that the service has joined the ledger.
pub(super) const JOINED: &str = "joined on ";

const MIB: u64 = 1 << 20;

/// The limit of both services together.
const LIMIT: u64 = 1024 * MIB;

const GUARANTEE: u64 = 128 * MIB;

/// The capacity of a stand-in device: more than the limit, and nothing writes to the memory.
const CAPACITY: u64 = 4 * LIMIT;

const WEIGHTS: u64 = 64 * MIB;

const BLOCK: u64 = 32 * MIB;

/// The least and the greatest number of blocks that a cache wants. The two caches always want 30
/// blocks together, which with the weights is 64 MiB more than the limit.
const BLOCKS: [f64; 2] = [4.0, 26.0];

/// The time in which a cache grows and shrinks once.
const PERIOD: Duration = Duration::from_secs(16);

const TICK: Duration = Duration::from_millis(100);

const PATIENCE: Duration = Duration::from_millis(400);

/// Run one service of `cuvmm demo`, which starts this command
#[derive(Debug, clap::Args)]
pub(crate) struct Service {
    directory: PathBuf,
    name: String,
    #[arg(value_enum)]
    driver: Choice,
    device: u32,
}

impl Service {
    /// Serves until standard input ends. An error goes to standard output, for the command that
    /// started the service.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let served = self.serve();
        remove_left(&self.directory);
        match served {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(error) => {
                print(&format!("{}\n", safe(&chain(&error))))?;
                Ok(ExitCode::FAILURE)
            }
        }
    }

    fn serve(&self) -> anyhow::Result<()> {
        let stop = Stop::on_input_end()?;
        let opened = self.driver.open_as(&StandIn {
            capacity: Some(CAPACITY),
            ..StandIn::default()
        })?;
        let driver = opened.said();
        let device = Device::open(opened.driver, self.device)?;
        // The tenant that sleep and wake act on. No work is queued on its blocks.
        let sleeper: Arc<Mutex<Option<Tenant>>> = Arc::default();
        let ledger = self.ledger(&device, &sleeper)?;
        let pool = Pool::builder(&device).ledger(&ledger).build()?;
        let cache = pool.tenant("cache").register()?;
        let model = pool.tenant("weights").register()?;
        let weights = model.allocate(WEIGHTS)?;
        *sleeper.lock().unwrap_or_else(PoisonError::into_inner) = Some(model);
        print(&format!("{JOINED}{driver}\n"))?;
        let first = NAMES.first() == Some(&&*self.name);
        let done = work(&cache, first, &stop);
        *sleeper.lock().unwrap_or_else(PoisonError::into_inner) = None;
        drop((weights, cache));
        close(pool)?;
        done
    }

    /// Joins the ledger, with functions that put the tenant to sleep and wake it.
    fn ledger(
        &self,
        device: &Device,
        sleeper: &Arc<Mutex<Option<Tenant>>>,
    ) -> anyhow::Result<Ledger> {
        let (down, up) = (Arc::clone(sleeper), Arc::clone(sleeper));
        let chosen = |tenant: &Mutex<Option<Tenant>>| {
            let tenant = tenant.lock().unwrap_or_else(PoisonError::into_inner);
            tenant.clone().ok_or("the service starts or ends")
        };
        let ledger = Ledger::builder(device, &self.directory)
            .limit(LIMIT)
            .guarantee(GUARANTEE)
            .name(&self.name)
            .on_sleep(move |_| {
                let blocks = chosen(&down)?;
                let slept = blocks.blocks().release(true).sleep(Contents::Discard);
                slept.map(drop).map_err(|error| error.to_string())
            })
            .on_wake(move |_| {
                let woken = chosen(&up)?.blocks().wake();
                woken.map(drop).map_err(|error| error.to_string())
            });
        Ok(ledger.open()?)
    }
}

/// Closes the pool before the process ends. A thread of the ledger may still read the pool's
/// figures; as the last owner it would release the memory after the driver has ended.
fn close(mut pool: Pool) -> anyhow::Result<()> {
    for _ in 0..10 {
        match pool.close() {
            Err(refused) if refused.reason == CloseRefusal::InUse => pool = refused.owner,
            closed => return Ok(closed?),
        }
        thread::sleep(TICK);
    }
    Ok(())
}

/// Keeps the cache at the wanted size, as far as memory allows.
fn work(cache: &Tenant, first: bool, stop: &Stop) -> anyhow::Result<()> {
    let mut blocks = Vec::new();
    while !stop.within(TICK) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        let wanted = wanted(now, first);
        blocks.truncate(wanted);
        if blocks.len() < wanted {
            match cache.block(BLOCK).timeout(PATIENCE).allocate() {
                Ok(block) => blocks.push(block),
                // The next tick asks again, if the block is still wanted.
                Err(BlockError::OutOfMemory(_)) => {}
                Err(other) => return Err(other.into()),
            }
        }
    }
    Ok(())
}

/// Returns the number of blocks that a cache wants at a time since 1970. Both processes compute
/// from the same clock: one cache grows while the other shrinks.
fn wanted(now: Duration, first: bool) -> usize {
    let turn = (now.as_millis() % PERIOD.as_millis()) as f64 / PERIOD.as_millis() as f64;
    let wave = (turn * TAU).sin() * if first { 1.0 } else { -1.0 };
    let [fewest, most] = BLOCKS;
    (fewest + (most - fewest) * f64::midpoint(1.0, wave)).round() as usize
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, BLOCKS, Duration, GUARANTEE, LIMIT, PERIOD, WEIGHTS, wanted};

    #[test]
    fn one_cache_grows_while_the_other_shrinks_and_both_want_more_than_there_is() {
        let at = |part: u32| PERIOD * 1000 + PERIOD * part / 16;
        let seen: Vec<[usize; 2]> = (0..16)
            .map(|part| [true, false].map(|first| wanted(at(part), first)))
            .collect();
        let [fewest, most] = BLOCKS.map(|blocks| blocks as usize);
        assert_eq!(seen[4], [most, fewest]);
        assert_eq!(seen[12], [fewest, most]);
        for [one, other] in seen {
            let all = (one + other) as u64 * BLOCK + 2 * WEIGHTS;
            assert!(all > LIMIT && all < LIMIT + 2 * GUARANTEE, "{one} {other}");
        }
        assert_eq!(wanted(Duration::ZERO, true), wanted(Duration::ZERO, false));
    }
}
