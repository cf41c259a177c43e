//! Two devices: a region in stripes over both, written by one and read by the other.

use anyhow::ensure;
use cuvmm::{Device, Layout, Place, Region, Right, Stream};

use super::by_hand::Hand;
use super::calls::peer_of;
use super::commit::{GIB, MIB};
use super::pairs::alternate;
use super::queue::{FILLED, Memory, waited};
use super::report::Report;
use super::row::Row;
use super::stage::{Stage, skip};
use super::wanted::Wanted;

pub(super) const WRITE: &str = "stripe_write_1GiB";
pub(super) const READ: &str = "stripe_read_by_peer_1GiB";

const STRIPE: u64 = 32 * MIB;

const OPENED: &str =
    "a copy between the devices by hand: one physical on the other one, opened to both";
const PLAIN: &str = "a copy between memory of cuMemAlloc on each device";
const HALF: &str = "half of the stripes lie on the device that copies";
const NOT_ENABLED: &str = "no peer access was enabled, so the driver chooses the way";

fn against_plain(name: &str) -> String {
    format!("{name}_vs_plain")
}

/// The rows in order.
pub(super) fn names() -> Vec<String> {
    let with_rival = |name: &str| [name.to_owned(), against_plain(name)];
    [WRITE, READ].into_iter().flat_map(with_rival).collect()
}

/// The second device of a row: the next one that reaches the first and is reached by it.
///
/// # Errors
/// The row is skipped where there is none, or when it does not open.
pub(super) fn second(stage: &Stage) -> anyhow::Result<Device> {
    let none = || {
        let first = stage.hand.device();
        skip(format!(
            "takes a second device that reaches {first} and is reached by it"
        ))
    };
    let ordinal = peer_of(&stage.hand).ok_or_else(none)?;
    let driver = stage.hand.shared_driver();
    Ok(Device::open(driver, u32::try_from(ordinal.0)?)?)
}

/// A copy, from where to where.
struct Way<'a> {
    stage: &'a Stage,
    stream: &'a Stream,
    from: Memory<'a>,
    to: Memory<'a>,
}

impl<'a> Way<'a> {
    fn new(
        stage: &'a Stage,
        stream: &'a Stream,
        from: impl Into<Memory<'a>>,
        to: impl Into<Memory<'a>>,
    ) -> Self {
        Self {
            stage,
            stream,
            from: from.into(),
            to: to.into(),
        }
    }

    /// Nanoseconds until the bytes are there.
    fn time(&self) -> anyhow::Result<f64> {
        let (took, ()) = self.stage.watch.time(|| {
            waited(&self.stage.hand, self.stream, |queue| {
                queue.copy(self.to, self.from)
            })
        })?;
        Ok(took)
    }
}

/// Writes the stripes from the first device and reads them from the second.
///
/// # Errors
/// When a side fails, or other bytes were read than were written.
pub(super) fn measure(stage: &Stage, wanted: &Wanted, report: &mut Report) -> anyhow::Result<()> {
    let peer = second(stage)?;
    let size = stage.written(GIB);
    // On each device half of the stripes, memory of its own, and a rival's.
    stage.room(3 * size)?;
    stage.room_on(&peer, 3 * size)?;
    stage.room_to_write(5 * size)?;
    let (near, far) = (
        &stage.hand,
        &Hand::new(stage.hand.shared_driver(), peer.ordinal()),
    );
    let (stream, theirs) = (Stream::new(&stage.device)?, Stream::new(&peer)?);

    let stripes = [Place::from(&stage.device), Place::from(&peer)];
    let mut region = Region::builder(&stage.device, size)
        .layout(Layout::round_robin(stripes, STRIPE))
        .reserve()?;
    region.commit(0..size)?;
    region.grant(&peer, Right::Read)?;
    let (ours, others) = (near.plain(size)?, far.plain(size)?);
    waited(near, &stream, |queue| queue.fill((&ours).into()))?;

    let written = Way::new(stage, &stream, &ours, &region);
    let there = far.commit(&[size])?;
    there.let_in(near)?;
    let opened = Way::new(stage, &stream, &ours, &there);
    let plain = Way::new(stage, &stream, &ours, &others);
    rows(wanted, report, WRITE, size, [&written, &opened, &plain])?;
    there.give_back()?;

    // The rows of writing may not be wanted.
    written.time()?;
    let read = Way::new(stage, &theirs, &region, &others);
    let here = near.commit(&[size])?;
    here.let_in(far)?;
    let opened = Way::new(stage, &theirs, &here, &others);
    let plain = Way::new(stage, &theirs, &ours, &others);
    rows(wanted, report, READ, size, [&read, &opened, &plain])?;
    here.give_back()?;

    waited(near, &theirs, |queue| queue.clear((&others).into()))?;
    read.time()?;
    let mut seen = [0; 4096];
    others.read(&mut seen)?;
    ensure!(
        !stage.keeps_bytes() || seen == [FILLED; 4096],
        "other bytes were read than were written"
    );
    Ok(())
}

/// The rows of one direction: ours, a rival, and plain memory.
fn rows(
    wanted: &Wanted,
    report: &mut Report,
    name: &str,
    size: u64,
    [ours, opened, plain]: [&Way<'_>; 3],
) -> anyhow::Result<()> {
    let stage = ours.stage;
    let pairs = stage.times(20, 2);
    if wanted.has(name) {
        let (ours, floors) = alternate(pairs, || ours.time(), || opened.time())?;
        let row = Row::new(name, &ours, OPENED, &floors).note(HALF);
        report.add(stage.moved(row, size));
    }
    let name = against_plain(name);
    if wanted.has(&name) {
        match plain.time() {
            Ok(_) => {
                let (ours, floors) = alternate(pairs, || ours.time(), || plain.time())?;
                let row = Row::new(&name, &ours, PLAIN, &floors);
                report.add(stage.moved(row.note(HALF).note(NOT_ENABLED), size));
            }
            Err(refused) => {
                let reason = format!("plain memory of two devices is not copied: {refused:#}");
                report.skip(&name, reason);
            }
        }
    }
    Ok(())
}
