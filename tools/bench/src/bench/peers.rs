//! Two devices: a region striped over both, written from one and read from the other.

use anyhow::ensure;
use cuvmm::driver::AccessFlags;
use cuvmm::{Access, Device, Layout, Place, Region, Stream};

use super::by_hand::{Hand, access};
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
const ONCE: &str = "the same in one copy of the driver's";
const PLAIN: &str = "a copy between memory of cuMemAlloc on each device";
const HALF: &str = "half of the stripes lie on the device that copies";
const NOT_ENABLED: &str = "no peer access was enabled, so the driver chooses the way";

fn against_plain(name: &str) -> String {
    format!("{name}_vs_plain")
}

fn against_once(name: &str) -> String {
    format!("{name}_vs_one_copy")
}

pub(super) fn names() -> Vec<String> {
    let with_rival = |name: &str| [name.to_owned(), against_once(name), against_plain(name)];
    [WRITE, READ].into_iter().flat_map(with_rival).collect()
}

/// Opens the second device of a row, by [`peer_of`].
///
/// # Errors
/// A `Skip` if there is no such device; another error if the device cannot be opened.
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

enum Way<'a> {
    /// One driver call.
    Once { from: Memory<'a>, to: Memory<'a> },
    /// A copy between regions through the library.
    Ours { from: &'a Region, to: &'a Region },
}

impl<'a> Way<'a> {
    fn once(from: impl Into<Memory<'a>>, to: impl Into<Memory<'a>>) -> Self {
        Self::Once {
            from: from.into(),
            to: to.into(),
        }
    }

    fn time(&self, stage: &Stage, stream: &Stream) -> anyhow::Result<f64> {
        stage.time(|| match self {
            Self::Once { from, to } => waited(&stage.hand, stream, |queue| queue.copy(*to, *from)),
            Self::Ours { from, to } => {
                to.copy_from(stream, 0, from, 0..from.size())?;
                Ok(stream.synchronize()?)
            }
        })
    }
}

/// Measures writing the stripes from the first device and reading them from the second.
///
/// # Errors
/// The bytes read differ from those written.
pub(super) fn measure(stage: &Stage, wanted: &Wanted, report: &mut Report) -> anyhow::Result<()> {
    let peer = second(stage)?;
    let size = stage.written(GIB);
    // Each device holds half of the stripes, a region of its own, and memory of a baseline.
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
    region.grant(&peer, Access::Read)?;
    let (mut mine, mut other) = (
        Region::reserve(&stage.device, size)?,
        Region::reserve(&peer, size)?,
    );
    mine.commit(0..size)?;
    other.commit(0..size)?;
    waited(near, &stream, |queue| queue.fill((&mine).into()))?;

    let (plain, far_plain) = (near.plain(size)?, far.plain(size)?);
    let there = far.commit(&[size])?;
    there.set_access(
        0,
        &[access(stage.device.ordinal(), AccessFlags::READ_WRITE)],
    )?;
    let ways = Ways {
        ours: Way::Ours {
            from: &mine,
            to: &region,
        },
        once: Way::once(&mine, &region),
        opened: Way::once(&mine, &there),
        plain: Way::once(&plain, &far_plain),
    };
    rows(stage, &stream, wanted, report, WRITE, size, &ways)?;
    there.give_back()?;

    // The stripes are written in any case: the rows of writing may not be selected.
    let (from, to) = (&mine, &region);
    Way::Ours { from, to }.time(stage, &stream)?;
    let here = near.commit(&[size])?;
    here.set_access(0, &[access(peer.ordinal(), AccessFlags::READ_WRITE)])?;
    let ways = Ways {
        ours: Way::Ours {
            from: &region,
            to: &other,
        },
        once: Way::once(&region, &other),
        opened: Way::once(&here, &other),
        plain: Way::once(&plain, &far_plain),
    };
    rows(stage, &theirs, wanted, report, READ, size, &ways)?;
    here.give_back()?;

    waited(near, &theirs, |queue| queue.clear((&other).into()))?;
    let (from, to) = (&region, &other);
    Way::Ours { from, to }.time(stage, &theirs)?;
    let mut seen = [0; 4096];
    other.read(&theirs, 0, &mut seen)?;
    ensure!(
        !stage.keeps_bytes() || seen == [FILLED; 4096],
        "other bytes were read than were written"
    );
    Ok(())
}

struct Ways<'a> {
    ours: Way<'a>,
    once: Way<'a>,
    opened: Way<'a>,
    plain: Way<'a>,
}

fn rows(
    stage: &Stage,
    stream: &Stream,
    wanted: &Wanted,
    report: &mut Report,
    name: &str,
    size: u64,
    ways: &Ways<'_>,
) -> anyhow::Result<()> {
    let pairs = stage.times(20, 2);
    let rivals = [
        (name.to_owned(), &ways.opened, OPENED, HALF),
        (against_once(name), &ways.once, ONCE, HALF),
        (against_plain(name), &ways.plain, PLAIN, NOT_ENABLED),
    ];
    for (name, rival, baseline, note) in rivals {
        if !wanted.has(&name) {
            continue;
        }
        match rival.time(stage, stream) {
            Ok(_) => {
                let (ours, baselines) = alternate(
                    pairs,
                    || ways.ours.time(stage, stream),
                    || rival.time(stage, stream),
                )?;
                let row = Row::new(&name, &ours, baseline, &baselines).note(note);
                report.add(stage.moved(row, size));
            }
            Err(refused) => {
                let reason = format!("the driver does not copy {baseline}: {refused:#}");
                report.skip(&name, reason);
            }
        }
    }
    Ok(())
}
