//! Recordings of memory over time, which `cuvmm picture` draws.
//!
//! A [`Recorder`] writes the figures of pools and ledgers when it is asked to. It has no thread and no
//! hook: a program without a recorder pays nothing, and a sample costs a read of statistics and a
//! write. [`Recording`] reads what was written, by a program or by `cuvmm record`.
//!
//! # The format
//!
//! Lines of JSON. The first has `recording`, the version 1, and `begun_us`, microseconds since 1970.
//! Each further line is a sample: `t_us`, microseconds since then; `source`, the pool or ledger; its
//! `limit` in bytes; and `parts`, lists of a name and the bytes that it holds. Further keys may be added.
//!
//! ```text
//! {"recording":1,"begun_us":1764432000000000}
//! {"t_us":250000,"source":"gpu 0","limit":1073741824,"parts":[["chat",629145600],["free",2097152]]}
//! ```
//!
//! # Examples
//! ```rust
//! # use cuvmm::{Device, Pool, driver::auto};
//! # let device = Device::open(auto::open(auto::OpenOptions::new())?.driver, 0)?;
//! use cuvmm::recording::{Recorder, Recording};
//!
//! let pool = Pool::builder(&device).build()?;
//! let chat = pool.tenant("chat").register()?;
//! let mut recorder = Recorder::new(Vec::new())?;
//! let block = chat.block(4 << 20).allocate()?;
//! recorder.pool("gpu 0", &pool)?;
//! drop(block);
//! recorder.pool("gpu 0", &pool)?;
//!
//! let recording = Recording::read(&*recorder.finish()?)?;
//! assert_eq!(recording.samples[0].parts[0], ("chat".to_owned(), 4 << 20));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod reader;

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Write};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

#[cfg(target_os = "linux")]
use crate::ledger::LedgerStats;
use crate::pool::Pool;

use self::reader::LONGEST;
pub use self::reader::{Recording, RecordingError};

/// The version of the format.
const VERSION: u32 = 1;

/// Memory that a pool holds for no tenant.
const FREE: &str = "free";
const QUARANTINED: &str = "quarantined";

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    recording: u32,
    begun_us: u64,
}

/// The figures of one pool or ledger at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Sample {
    /// The time since the recording began, in microseconds.
    pub t_us: u64,
    /// The name of the pool or ledger.
    pub source: String,
    /// The limit of all parts together, in bytes.
    pub limit: u64,
    /// Names and the bytes that they hold: tenants of a pool, processes of a ledger.
    pub parts: Vec<(String, u64)>,
}

/// Writes a recording. See [the module](self).
///
/// After an error of a write, further samples may be written: a line that was cut off is completed before
/// the next one, so that a disk that was full for a while leaves a gap and no broken line.
#[derive(Debug)]
pub struct Recorder<W> {
    out: W,
    begun: Instant,
    /// The end of the last line, which `out` has not taken.
    rest: Vec<u8>,
}

impl<W: Write> Recorder<W> {
    /// Begins a recording, and writes its first line. `out` gets one write for each line: a file needs
    /// no buffer, and one that ends early is a recording up to there.
    ///
    /// # Errors
    /// `out` refuses the write.
    pub fn new(out: W) -> io::Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let header = Header {
            recording: VERSION,
            begun_us: now.map_or(0, micros),
        };
        let begun = Instant::now();
        let rest = Vec::new();
        let mut recorder = Self { out, begun, rest };
        recorder.line(&header)?;
        Ok(recorder)
    }

    /// Writes a pool's figures: the memory charged to each tenant (tenants of one name together), and
    /// what the pool holds `free` and `quarantined`, if any. Makes no driver call.
    ///
    /// # Errors
    /// The write is refused, or the names of all tenants have more than 1 MiB.
    pub fn pool(&mut self, source: &str, pool: &Pool) -> io::Result<()> {
        let stats = pool.stats();
        let tenants = pool.tenants().into_iter().map(|tenant| {
            let stats = tenant.stats();
            (stats.name, stats.committed)
        });
        let rest = [(FREE, stats.free), (QUARANTINED, stats.quarantined)];
        let rest = rest.into_iter().filter(|&(_, bytes)| bytes > 0);
        let parts = tenants.chain(rest.map(|(name, bytes)| (name.to_owned(), bytes)));
        self.sample(source, stats.limit, parts)
    }

    /// Writes a ledger's figures: the memory charged to each process, by name and process id.
    ///
    /// # Errors
    /// The write is refused.
    #[cfg(target_os = "linux")]
    pub fn ledger(&mut self, source: &str, stats: &LedgerStats) -> io::Result<()> {
        let processes = stats.processes.iter();
        let parts = processes.map(|it| (format!("{} ({})", it.name, it.pid), it.charged));
        self.sample(source, stats.limit, parts)
    }

    fn sample(
        &mut self,
        source: &str,
        limit: u64,
        parts: impl Iterator<Item = (String, u64)>,
    ) -> io::Result<()> {
        let mut sums = BTreeMap::<String, u64>::new();
        for (name, bytes) in parts {
            let sum = sums.entry(name).or_default();
            *sum = sum.saturating_add(bytes);
        }
        self.line(&Sample {
            t_us: micros(self.begun.elapsed()),
            source: source.to_owned(),
            limit,
            parts: sums.into_iter().collect(),
        })
    }

    fn line(&mut self, value: &impl Serialize) -> io::Result<()> {
        self.complete()?;
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        let whole = line.len();
        if whole as u64 > LONGEST {
            let what = format!("a sample of {whole} bytes: a line has at most 1 MiB");
            return Err(io::Error::new(ErrorKind::InvalidInput, what));
        }
        self.rest = line;
        let written = self.complete();
        // A line of which nothing was written is left out.
        if self.rest.len() == whole {
            self.rest.clear();
        }
        written
    }

    /// Writes what was not written of the last line.
    fn complete(&mut self) -> io::Result<()> {
        while !self.rest.is_empty() {
            match self.out.write(&self.rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.rest.drain(..written.min(self.rest.len()))),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Ends the recording, and returns what it was written to.
    ///
    /// # Errors
    /// The last bytes cannot be written.
    pub fn finish(mut self) -> io::Result<W> {
        self.complete()?;
        self.out.flush()?;
        Ok(self.out)
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with room for some bytes, which takes at most 10 at a time.
    struct Disk {
        room: usize,
        has: Vec<u8>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.room).min(10);
            if taken == 0 {
                return Err(ErrorKind::StorageFull.into());
            }
            self.room -= taken;
            self.has.extend(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn recorded(room: usize) -> (usize, Recording) {
        let (has, samples) = (Vec::new(), 5);
        let mut recorder = Recorder::new(Disk { room: 1000, has }).unwrap();
        recorder.out.room = room;
        let mut taken = 0;
        for sample in 0..samples {
            let parts = [("x".to_owned(), sample)].into_iter();
            match recorder.sample("a", 9, parts) {
                Ok(()) => taken += 1,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::StorageFull);
                    // There is room again some time later.
                    recorder.out.room = 1000;
                }
            }
        }
        let disk = recorder.finish().unwrap();
        (taken, Recording::read(&*disk.has).unwrap())
    }

    #[test]
    fn a_disk_that_was_full_leaves_a_gap_and_no_broken_line() {
        for room in 0..200 {
            let (taken, recording) = recorded(room);
            // What was cut off is completed.
            let found = recording.samples.len();
            assert!(
                found == taken || found == taken + 1,
                "{room}: {found} of {taken}"
            );
            assert!((4..=5).contains(&taken), "{room}: {taken}");
            let held = recording.samples.iter().map(|sample| sample.parts[0].1);
            assert!(held.is_sorted(), "{room}");
        }
    }

    #[test]
    fn a_sample_that_could_not_be_read_is_not_written() {
        let mut recorder = Recorder::new(Vec::new()).unwrap();
        let names = |length: usize| [("x".repeat(length), 1)].into_iter();
        let refused = recorder.sample("a", 9, names(1 << 20)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput);
        recorder.sample("a", 9, names((1 << 20) - 100)).unwrap();
        let recording = Recording::read(&*recorder.finish().unwrap()).unwrap();
        assert_eq!(recording.samples.len(), 1);
    }
}
