//! Two blocks that change places, compared with copies by hand in both directions at once.

use anyhow::ensure;
use cuvmm::{Block, Contents, Event, Exchange, HostStore, Limit, Pool, Stream, Tenant};

use super::commit::{GIB, MIB};
use super::pinned::Pinned;
use super::queue::{FILLED, Memory, waited};
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::{Stage, skip};
use super::wanted::Wanted;

const SIZE: u64 = 8 * GIB;

pub(super) const NAME: &str = "exchange_8GiB";

/// The sizes of the pieces that are copied out and then in by hand, in MiB.
const PIECES: [u64; 6] = [2, 8, 16, 32, 64, 256];

const BOTH: &str = "cuMemcpyDtoHAsync and cuMemcpyHtoDAsync of as much on two streams at once, 1 GiB of each again and again";

/// Returns the names of all rows.
pub(super) fn names() -> Vec<String> {
    let pieces = PIECES.map(pieces_of);
    std::iter::once(NAME.to_owned()).chain(pieces).collect()
}

fn pieces_of(mib: u64) -> String {
    format!("exchange_pieces_{mib}MiB")
}

/// Two tenants of a pool that has memory for one of them.
struct Models {
    tenants: [Tenant; 2],
    blocks: [Block; 2],
    store: HostStore,
}

impl Models {
    /// Makes two blocks with contents, of which the second one is awake.
    fn new(stage: &Stage, stream: &Stream, size: u64) -> anyhow::Result<Self> {
        let device = stage.device.with_own_counters();
        let pool = Pool::builder(&device).limit(Limit::Bytes(size)).build()?;
        let store = HostStore::builder(&stage.device).pinned(2 * size).build()?;
        let tenants = [
            pool.tenant("one").register()?,
            pool.tenant("two").register()?,
        ];
        let make = |tenant: &Tenant, byte| {
            let block = tenant.allocate_on(stream, size)?;
            for at in (0..size).step_by(usize::try_from(64 * MIB)?) {
                let bytes = vec![byte; usize::try_from((size - at).min(64 * MIB))?];
                block.write(at, &bytes)?;
            }
            anyhow::Ok(block)
        };
        let first = make(&tenants[0], FILLED)?;
        tenants[0].blocks().sleep(Contents::Keep(&store))?;
        let second = make(&tenants[1], !FILLED)?;
        Ok(Self {
            tenants,
            blocks: [first, second],
            store,
        })
    }

    fn exchange(&self, falls: usize, wakes: usize) -> anyhow::Result<()> {
        let exchanged = Exchange::new()
            .sleep(self.tenants[falls].blocks(), Contents::Keep(&self.store))
            .wake(self.tenants[wakes].blocks())
            .run()?;
        ensure!(exchanged.passed == self.blocks[0].size(), "{exchanged:?}");
        Ok(())
    }

    fn shows(&self, which: usize, byte: u8) -> anyhow::Result<()> {
        let block = &self.blocks[which];
        for at in (0..block.size()).step_by(usize::try_from(16 * MIB)?) {
            let mut seen = [0; 4096];
            block.read(at, &mut seen)?;
            ensure!(seen == [byte; 4096], "bytes were lost on the way");
        }
        Ok(())
    }
}

/// Memory of the device and buffers of the host, for copies by hand.
struct Both<'a> {
    stage: &'a Stage,
    streams: [Stream; 2],
    down: Pinned<'a>,
    up: Pinned<'a>,
    part: u64,
}

impl Both<'_> {
    /// Copies in both directions at once, to and from different memory.
    fn copy(&mut self, out: Memory<'_>, into: Memory<'_>) -> anyhow::Result<()> {
        let hand = &self.stage.hand;
        let [first, second] = &self.streams;
        let (down, up) = (self.down.bytes_mut(), self.up.bytes());
        waited(hand, first, |outward| {
            outward.download(down, out)?;
            waited(hand, second, |inward| inward.upload(into, up))
        })
    }

    /// Copies each piece out, and then another in at its place, which an event orders.
    fn exchange(&mut self, memory: Memory<'_>, piece: u64, events: &[Event]) -> anyhow::Result<()> {
        let (hand, part) = (&self.stage.hand, self.part);
        let [first, second] = &self.streams;
        let size = usize::try_from(piece.min(part))?;
        let (down, up) = (self.down.bytes_mut(), self.up.bytes());
        let pairs = down.chunks_mut(size).zip(up.chunks(size)).zip(events);
        waited(hand, first, |outward| {
            waited(hand, second, |inward| {
                for (number, ((down, up), event)) in (0..).zip(pairs) {
                    let at = number * piece;
                    let here = memory.part(at..at + up.len() as u64)?;
                    outward.download(down, here)?;
                    event.record(first)?;
                    second.wait(event)?;
                    inward.upload(here, up)?;
                }
                Ok(())
            })
        })
    }
}

/// Measures exchanging two blocks, alternately with copies by hand in both directions, and with the
/// same in place by hand in pieces of several sizes.
///
/// # Errors
/// Bytes were changed. The rows are skipped on the model driver.
pub(super) fn measure(stage: &Stage, wanted: &Wanted, report: &mut Report) -> anyhow::Result<()> {
    if !stage.keeps_bytes() {
        return Err(skip(
            "the model's copies are of real memory, and there is not so much",
        ));
    }
    let size = stage.written(SIZE);
    let part = size.min(GIB);
    stage.room(2 * size)?;
    stage.room_to_write(5 * size)?;
    let stream = Stream::new(&stage.device)?;
    let models = match wanted.has(NAME) {
        true => Some(Models::new(stage, &stream, size)?),
        false => None,
    };
    let there = stage.hand.commit(&[part, part])?;
    let whole = Memory::from(&there);
    let (out, into) = (whole.part(0..part)?, whole.part(part..2 * part)?);
    let bytes = usize::try_from(part)?;
    let mut both = Both {
        stage,
        streams: [Stream::new(&stage.device)?, Stream::new(&stage.device)?],
        down: Pinned::new(&stage.hand, bytes)?,
        up: Pinned::new(&stage.hand, bytes)?,
        part,
    };
    let most = part.div_ceil(PIECES[0] * MIB);
    let events = (0..most).map(|_| Event::new(&stage.device));
    let events: Vec<Event> = events.collect::<Result<_, _>>()?;
    let parts = size / part;
    let mut by_hand = Samples::default();
    let mut ours = Samples::default();
    let mut pieces: [Samples; PIECES.len()] = Default::default();
    for turn in 0..=stage.times(10, 1) {
        if let Some(models) = &models {
            let there = stage.time(|| models.exchange(1, 0))?;
            models.shows(0, FILLED)?;
            let back = stage.time(|| models.exchange(0, 1))?;
            models.shows(1, !FILLED)?;
            if turn > 0 {
                ours.add(there);
                ours.add(back);
            }
        }
        let took = stage.time(|| (0..parts).try_for_each(|_| both.copy(out, into)))?;
        if turn > 0 {
            by_hand.add(took);
        }
        for (mib, samples) in PIECES.into_iter().zip(&mut pieces) {
            if wanted.has(&pieces_of(mib)) {
                let exchange =
                    || (0..parts).try_for_each(|_| both.exchange(out, mib * MIB, &events));
                let took = stage.time(exchange)?;
                if turn > 0 {
                    samples.add(took);
                }
            }
        }
    }
    let pieces = PIECES.into_iter().map(pieces_of).zip(&pieces);
    let rows = std::iter::once((NAME.to_owned(), &ours)).chain(pieces);
    for (name, samples) in rows.filter(|(name, _)| wanted.has(name)) {
        let row = Row::new(name, samples, BOTH, &by_hand).turned_over();
        report.add(stage.moved(row, 2 * size));
    }
    Ok(())
}
