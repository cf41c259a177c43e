//! Exchange: some blocks fall asleep while others wake in their memory, so that both directions of
//! the bus are used at once.
//!
//! Keeps I-93.

mod at_once;
mod pieces;

use super::prepared::{Chosen, PreparedSleep};
use super::{Blocks, Contents, Progress, Slept, Woken, wake};
use crate::error::{ArgumentError, SleepError};
use crate::pool::Choice;
use crate::store::HostStore;

/// Blocks that fall asleep while others wake, in one operation.
///
/// Two models that take turns on one GPU move twice as fast as with [`sleep`](Blocks::sleep) and
/// then [`wake`](Blocks::wake): the contents of one go to the host while those of the other come
/// back. On an H200, one direction of PCIe carries 55 GB/s and both together 102.
///
/// - **Memory that passes**: each physical of the blocks that fall asleep is mapped at the addresses
///   of a block that wakes, if an extent there may be as large. It is saved piece by piece, 16 MiB
///   each, and each piece is overwritten by the other block's contents once it is saved. Its charge
///   passes with it, so neither a limit nor a ledger's is ever exceeded. Blocks of the same sizes
///   pass all their memory.
/// - **Other memory**: what the blocks that wake need beyond that is charged and placed before the
///   first copy, and what they do not need is given up. If there is not enough, or the extents do
///   not fit, the blocks go in turn: all fall asleep, then the others wake.
/// - **In turn** goes also an exchange with a heap or a paged cache, of contents that are discarded or
///   marked, or of several pools. If waking fails then, blocks whose contents were kept are woken
///   again; discarded ones stay asleep.
/// - **Failures**: what was overwritten is copied back, and everything is as before. If that fails
///   too, blocks sleep with their contents in the store, and the error says how many.
///
/// The [conditions](super) of sleep hold for the blocks that fall asleep. No selection to sleep may
/// have a tag, a heap or a paged cache in common with one to wake: with selections of all blocks of one tenant, it
/// would have. Each selection keeps its [timeout](Blocks::timeout) for leases and for work
/// in use. A function that [observes](Blocks::on_progress) one of them observes the exchange, in
/// bytes copied in both directions. With [`release`](Blocks::release), memory that does not pass
/// goes to the driver.
///
/// # Examples
/// ```
/// # use cuvmm::driver::host::{HostDriver, HostOptions};
/// # use cuvmm::{Contents, Device, Exchange, HostStore, Limit, Pool};
/// # let driver = std::sync::Arc::new(HostDriver::new(HostOptions::new()));
/// # let device = Device::open(driver, 0)?;
/// let pool = Pool::builder(&device).limit(Limit::Bytes(64 << 20)).build()?;
/// let (chat, code) = (pool.tenant("chat").register()?, pool.tenant("code").register()?);
/// let store = HostStore::builder(&device).pinned(128 << 20).build()?;
///
/// let one = code.allocate(64 << 20)?;
/// one.write(0, b"code")?;
/// code.blocks().sleep(Contents::Keep(&store))?;
/// let other = chat.allocate(64 << 20)?; // takes all memory of the pool
///
/// let exchange = Exchange::new().sleep(chat.blocks(), Contents::Keep(&store));
/// let exchanged = exchange.wake(code.blocks()).run()?;
/// assert_eq!(exchanged.passed, 64 << 20);
/// assert!(other.is_asleep() && !one.is_asleep());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "nothing is exchanged before `run`"]
pub struct Exchange<'a> {
    sleep: Vec<(Blocks<'a>, Contents<'a>)>,
    wake: Vec<Blocks<'a>>,
}

/// The outcome of an exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Exchanged {
    /// The blocks that fell asleep. The memory that they gave up includes what passed.
    pub slept: Slept,
    /// The blocks that woke.
    pub woken: Woken,
    /// The bytes of memory that passed from the former to the latter, copied in both directions at
    /// once. 0 if the blocks went in turn.
    pub passed: u64,
}

/// A selection that falls asleep and keeps its contents in a store.
struct Sleeping<'a> {
    blocks: &'a Blocks<'a>,
    store: &'a HostStore,
}

impl<'a> Exchange<'a> {
    /// Returns an exchange of no blocks.
    pub const fn new() -> Self {
        Self {
            sleep: Vec::new(),
            wake: Vec::new(),
        }
    }

    /// Adds blocks to be put to sleep, those of the selection that are awake.
    pub fn sleep(mut self, blocks: Blocks<'a>, contents: Contents<'a>) -> Self {
        self.sleep.push((blocks, contents));
        self
    }

    /// Adds blocks to be woken, those of the selection that are asleep.
    pub fn wake(mut self, blocks: Blocks<'a>) -> Self {
        self.wake.push(blocks);
        self
    }

    /// Exchanges the blocks. When this returns, all contents are where they belong.
    ///
    /// For each physical that passes, this calls `cuMemMap` and `cuMemSetAccess` before the first
    /// copy and `cuMemUnmap`; for each 2 MiB of contents, `cuMemcpyDtoHAsync` and
    /// `cuMemcpyHtoDAsync`; and `cuMemsetD8Async` for memory of a woken block that no contents
    /// overwrite. In turn it makes the calls of [`sleep`](Blocks::sleep) and
    /// [`wake`](Blocks::wake).
    ///
    /// # Errors
    /// [`ArgumentError::SleepsAndWakes`] if blocks, a heap or a paged cache are in a selection to sleep and in one to
    /// wake, and the errors of sleep and wake. All blocks are then as before, unless the error is
    /// [`SleepError::Stayed`]: then blocks that were to sleep do, with their contents in the store,
    /// and those that were to wake sleep on. [`SleepError::Lost`] says that contents are lost,
    /// after several refusals of the driver.
    #[doc(alias("cuMemMap", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "swap"))]
    pub fn run(self) -> Result<Exchanged, SleepError> {
        for (blocks, contents) in &self.sleep {
            if self.wake.iter().any(|waking| waking.overlaps(blocks)) {
                return Err(ArgumentError::SleepsAndWakes.into());
            }
            if let Contents::Keep(store) | Contents::KeepMarked(store) = contents
                && !store.device().is_same(blocks.tenant.device())
            {
                return Err(ArgumentError::WrongDevice("the store").into());
            }
        }
        if let Some(store) = self.store() {
            match at_once::exchange(&self, store) {
                Err(SleepError::Block { cause, .. }) if cause.is_shortage() => {
                    log!(debug, %cause, "blocks are exchanged in turn");
                }
                Ok(None) => {}
                Ok(Some(exchanged)) => return Ok(exchanged),
                Err(error) => return Err(error),
            }
        }
        self.in_turn()
    }

    /// Returns a store to copy with if blocks fall asleep whose contents are all kept, and all blocks
    /// have one pool.
    fn store(&self) -> Option<&HostStore> {
        let sleeping = self.sleep.iter().map(|(blocks, _)| blocks);
        let mut all = sleeping.chain(&self.wake);
        let (first, _) = self.sleep.first()?;
        let goes_at_once = all
            .all(|blocks| blocks.holders.is_empty() && blocks.tenant.is_beside(first.tenant))
            && self.sleeping().count() == self.sleep.len();
        let store = self.sleeping().next().map(|sleeping| sleeping.store);
        store.filter(|_| goes_at_once)
    }

    /// Returns the selections whose contents are kept.
    fn sleeping(&self) -> impl Iterator<Item = Sleeping<'_>> {
        self.sleep
            .iter()
            .filter_map(|(blocks, contents)| match contents {
                Contents::Keep(store) => Some(Sleeping { blocks, store }),
                Contents::Discard | Contents::KeepMarked(_) => None,
            })
    }

    fn granule(&self) -> Option<u64> {
        let (blocks, _) = self.sleep.first()?;
        Some(blocks.tenant.device().granule().bytes())
    }

    /// Calls the functions that observe the exchange.
    fn go_on(&self, done: u64, total: u64) -> Result<(), SleepError> {
        let sleeping = self.sleep.iter().map(|(blocks, _)| blocks);
        let progress = Progress { done, total };
        match sleeping.chain(&self.wake).all(|it| it.goes_on(&progress)) {
            true => Ok(()),
            false => Err(SleepError::Cancelled),
        }
    }

    /// Puts all blocks to sleep, and then wakes the others.
    fn in_turn(&self) -> Result<Exchanged, SleepError> {
        let prepared = self.sleep.iter();
        let prepared = prepared.map(|(blocks, contents)| blocks.prepare_sleep(*contents));
        let prepared = prepared.collect::<Result<Vec<_>, _>>()?;
        let slept: Vec<Chosen> = prepared.iter().map(PreparedSleep::chosen).collect();
        let mut exchanged = Exchanged::default();
        for one in prepared {
            exchanged.slept.add_all(one.finish());
        }
        let woken = self.wake.iter().map(Blocks::prepare_wake);
        match woken.collect::<Result<Vec<_>, _>>() {
            Ok(woken) => {
                for one in woken {
                    exchanged.woken.add_all(one.finish());
                }
                Ok(exchanged)
            }
            Err(cause) => Err(self.go_back(slept, cause)),
        }
    }

    /// Wakes again what has fallen asleep of each selection.
    fn go_back(&self, slept: Vec<Chosen>, cause: SleepError) -> SleepError {
        let mut stayed = (0, 0);
        for ((blocks, contents), slept) in self.sleep.iter().zip(slept) {
            let count = (slept.blocks.len() + slept.holders.len()) as u64;
            let again = Blocks {
                holders: slept.holders,
                ..blocks.clone()
            };
            let choice = Choice {
                addresses: Some(&slept.blocks),
                ..blocks.choice()
            };
            let woken = match contents {
                Contents::Discard | Contents::KeepMarked(_) => None,
                Contents::Keep(_) => wake::wake(&again, choice)
                    .inspect_err(|error| log!(warn, %error, "exchanged blocks stay asleep"))
                    .ok(),
            };
            match woken {
                Some(woken) => drop(woken.finish()),
                None => stayed = (stayed.0 + count, stayed.1 + slept.bytes),
            }
        }
        match stayed {
            (0, _) => cause,
            (blocks, bytes) => SleepError::Stayed {
                blocks,
                bytes,
                cause: Box::new(cause),
            },
        }
    }
}
