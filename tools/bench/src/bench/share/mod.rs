//! Attaching published memory from another process, which is this command started again.

mod reader;
mod sender;

use std::thread;

use anyhow::{anyhow, ensure};
use cuvmm::driver::{DriverKind, HandleTypes};
use cuvmm::share::{Manifest, Publisher};
use cuvmm::{Region, Stream};
use rustix::process::{Resource, getrlimit};

use self::reader::{ATTACHING, Reading};
use self::sender::Sender;
use super::commit::{GIB, MIB};
use super::pairs::alternate;
use super::queue::waited;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::{Stage, skip};
use super::wanted::Wanted;
use cuvmm_command::drivers::Choice;
use cuvmm_command::watch::wall;

pub(crate) use reader::Reader;

const SIZE: u64 = 8 * GIB;

/// The rows with their extent sizes: one extent, as `cuvmm share` publishes; the default of a
/// region; and the smallest.
pub(super) const SHARED: [(&str, u64); 3] = [
    ("share_attach_8GiB", SIZE),
    ("share_attach_8GiB_by_1GiB", GIB),
    ("share_attach_8GiB_by_2MiB", 2 * MIB),
];

const BY_HAND: &str = "the same extents by hand: reserve, connect, descriptors by 253, import and \
                       map each, one set_access, a copy of the first byte";
const COPY: &str = "a copy of as much on the device by hand into memory that was there before, \
                    waited for";
const NAME: &str = "weights";

/// Descriptors that a process needs for other purposes.
const BESIDES: u64 = 64;

pub(super) fn names((name, extent): (&str, u64)) -> Vec<String> {
    let mut names = vec![name.to_owned()];
    if extent == SIZE {
        names.push(vs_copy(name));
    }
    names
}

fn vs_copy(name: &str) -> String {
    format!("{name}_vs_copy")
}

/// Measures attaching from another process, until the first byte has been read.
pub(super) fn measure(
    stage: &Stage,
    wanted: &Wanted,
    report: &mut Report,
    (name, extent): (&str, u64),
) -> anyhow::Result<()> {
    if !stage.keeps_bytes() {
        return Err(skip("the model has no memory to share"));
    }
    let (reading, published) = read(stage, extent)?;
    let ours: Samples = reading.ours.iter().copied().collect();
    let by_hand: Samples = reading.by_hand.iter().copied().collect();
    let more = reading.free_before.saturating_sub(reading.free_within);
    let figures = |row: Row| {
        let calls = ATTACHING.iter().zip(&reading.calls);
        let row = calls.fold(row, |row, (&(_, name), micros)| row.count(name, *micros));
        row.count("mib", (SIZE / MIB) as f64)
            .count("extents", (SIZE / extent) as f64)
            .count("mib_more_in_use", (more / MIB) as f64)
            .count("publish_us", published / 1e3)
            .count("reader_opens_device_ms", reading.opened / 1e6)
    };
    report.add(figures(Row::new(name, &ours, BY_HAND, &by_hand)));
    let name = vs_copy(name);
    if extent == SIZE && wanted.has(&name) {
        let (copies, bytes) = copies(stage)?;
        let row = Row::new(name, &ours, COPY, &copies);
        report.add(figures(row).count("copied_mib", (bytes / MIB) as f64));
    }
    Ok(())
}

/// Publishes memory, runs the reader process, and returns its figures and the nanoseconds of
/// publishing.
fn read(stage: &Stage, extent: u64) -> anyhow::Result<(Reading, f64)> {
    stage.room(2 * SIZE)?;
    let count = usize::try_from(SIZE / extent)?;
    descriptors(stage, 2 * count as u64)?;
    let folder = tempfile::tempdir()?;
    let mut region = Region::builder(&stage.device, SIZE)
        .largest_extent(extent)
        .shareable(HandleTypes::POSIX_FD)
        .reserve()?;
    region.commit(0..SIZE)?;
    let publisher = Publisher::bind(folder.path().join("publisher"))?;
    let (published, _version) = wall(|| {
        let outcome = publisher.publish(NAME, Manifest::default(), region);
        outcome.map_err(|refused| anyhow!(refused.reason))
    })?;

    let bare = (0..count).map(|_| stage.hand.create_shareable(extent));
    let bare = bare.collect::<Result<Vec<_>, _>>()?;
    let by_hand = folder.path().join("by_hand");
    let sender = Sender::bind(&by_hand)?;
    let reader = Reader {
        driver: Choice::of(stage.device.driver().kind()),
        device: u32::try_from(stage.device.ordinal().0)?,
        publisher: publisher.path().to_owned(),
        name: NAME.to_owned(),
        sender: by_hand,
        extent,
        count,
        pairs: match extent {
            0..GIB => stage.times(20, 2),
            _ => stage.times(200, 5),
        },
    };
    let reading = thread::scope(|scope| {
        let serving = scope.spawn(|| sender.serve(&bare));
        let reading = reader.start();
        sender.close()?;
        let served = serving.join();
        // The reader's own error takes precedence.
        let reading = reading?;
        served.map_err(|_| anyhow!("serving by hand ended by a panic"))??;
        anyhow::Ok(reading)
    })?;
    ensure!(!reading.ours.is_empty(), "nothing was read");
    Ok((reading, published))
}

/// Checks that this process may hold `wanted` descriptors. On the host driver each shareable
/// physical takes one.
///
/// # Errors
/// A `Skip` if it may not.
fn descriptors(stage: &Stage, wanted: u64) -> anyhow::Result<()> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if stage.device.driver().kind() != DriverKind::Host || wanted + BESIDES <= limit {
        return Ok(());
    }
    Err(skip(format!(
        "takes {wanted} descriptors, and this process may have {limit}"
    )))
}

/// Measures copies of the same size, or a smaller one in a quick run, and returns the size with the
/// times.
fn copies(stage: &Stage) -> anyhow::Result<(Samples, u64)> {
    let size = stage.written(SIZE);
    stage.room(2 * size)?;
    stage.room_to_write(2 * size)?;
    let stream = Stream::new(&stage.device)?;
    let extents = vec![GIB.min(size); usize::try_from(size.div_ceil(GIB))?];
    let (from, to) = (stage.hand.commit(&extents)?, stage.hand.commit(&extents)?);
    waited(&stage.hand, &stream, |queue| queue.fill((&from).into()))?;
    let copy = || {
        stage.time(|| {
            waited(&stage.hand, &stream, |queue| {
                queue.copy((&to).into(), (&from).into())
            })
        })
    };
    let (copies, _) = alternate(stage.times(10, 2), copy, || Ok(0.0))?;
    Ok((copies, size))
}
