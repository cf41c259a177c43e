//! A recording by ledgers and pools: the bands of each over time.

use std::collections::BTreeMap;

use cuvmm::recording::{Recording, Sample};
use cuvmm_command::size::iec;
use cuvmm_command::terminal::counted;

/// The most ledgers and pools of a recording.
const SOURCES: usize = 64;

/// The samples of one ledger or pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Series {
    pub(super) source: String,
    /// The names of the bands, in the order in which they appear.
    pub(super) bands: Vec<String>,
    /// The most bytes that each band holds at any time.
    pub(super) peaks: Vec<u64>,
    pub(super) points: Vec<Point>,
    /// The end of the whole recording, in microseconds.
    pub(super) end: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Point {
    /// Microseconds since the recording began.
    pub(super) time: u64,
    pub(super) limit: u64,
    /// The bytes of the bands that the sample names, in the order of their numbers. Bands of other
    /// samples take no memory here: they would make all points together the square of a recording.
    pub(super) held: Vec<(usize, u64)>,
}

impl Point {
    pub(super) fn of(&self, band: usize) -> u64 {
        let found = self.held.binary_search_by_key(&band, |&(band, _)| band);
        let held = found.ok().and_then(|at| self.held.get(at));
        held.map_or(0, |&(_, held)| held)
    }

    pub(super) fn total(&self) -> u64 {
        let held = self.held.iter();
        held.fold(0, |sum, &(_, held)| sum.saturating_add(held))
    }
}

impl Series {
    /// Returns the series of a recording, in the order in which they appear.
    ///
    /// # Errors
    /// There are no samples, or too many ledgers and pools.
    pub(super) fn of(recording: &Recording) -> Result<Vec<Self>, String> {
        let end = recording
            .samples
            .last()
            .ok_or("this recording has no samples")?;
        let (mut all, mut places) = (Vec::<(Self, BTreeMap<&str, usize>)>::new(), BTreeMap::new());
        for sample in &recording.samples {
            let place = *places.entry(&*sample.source).or_insert(all.len());
            if place == SOURCES {
                return Err(format!(
                    "more than {SOURCES} ledgers and pools cannot be drawn"
                ));
            }
            if place == all.len() {
                all.push((Self::new(&sample.source, end.t_us), BTreeMap::new()));
            }
            if let Some((series, bands)) = all.get_mut(place) {
                series.add(sample, bands);
            }
        }
        Ok(all.into_iter().map(|(series, _)| series).collect())
    }

    fn new(source: &str, end: u64) -> Self {
        Self {
            source: source.to_owned(),
            bands: Vec::new(),
            peaks: Vec::new(),
            points: Vec::new(),
            end,
        }
    }

    fn add<'a>(&mut self, sample: &'a Sample, places: &mut BTreeMap<&'a str, usize>) {
        let mut held = BTreeMap::<usize, u64>::new();
        for (name, bytes) in &sample.parts {
            let place = *places.entry(name).or_insert(self.bands.len());
            if place == self.bands.len() {
                self.bands.push(name.clone());
                self.peaks.push(0);
            }
            let sum = held.entry(place).or_default();
            *sum = sum.saturating_add(*bytes);
        }
        for (&place, &held) in &held {
            if let Some(peak) = self.peaks.get_mut(place) {
                *peak = held.max(*peak);
            }
        }
        self.points.push(Point {
            time: sample.t_us,
            limit: sample.limit,
            held: held.into_iter().collect(),
        });
    }

    /// Returns the largest limit, or the most that is held if that is more.
    pub(super) fn top(&self) -> u64 {
        let tops = self
            .points
            .iter()
            .map(|point| point.limit.max(point.total()));
        tops.max().unwrap_or(0)
    }

    /// Describes the series in one line.
    pub(super) fn described(&self) -> String {
        let peak = self.points.iter().map(Point::total).max().unwrap_or(0);
        let samples = counted(self.points.len() as u64, "sample");
        let bands = counted(self.bands.len() as u64, "band");
        let (of, peak) = (&self.source, iec(peak));
        format!("{of}: {samples}, {bands}, at most {peak} held")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(lines: &[String]) -> Result<Vec<Series>, String> {
        let text = format!("{{\"recording\":1,\"begun_us\":0}}\n{}", lines.concat());
        Series::of(&Recording::read(text.as_bytes()).unwrap())
    }

    fn sample(time: u64, source: &str, parts: &str) -> String {
        format!("{{\"t_us\":{time},\"source\":\"{source}\",\"limit\":100,\"parts\":[{parts}]}}\n")
    }

    #[test]
    fn bands_come_and_go() {
        let found = series(&[
            sample(0, "a", "[\"x\",1]"),
            sample(1, "b", "[\"x\",7]"),
            sample(2, "a", "[\"y\",2],[\"x\",3],[\"y\",4]"),
            sample(3, "a", "[\"y\",200]"),
        ]);
        let found = found.unwrap();
        assert_eq!(
            (found.len(), &*found[0].bands),
            (2, &["x".to_owned(), "y".to_owned()][..])
        );
        let held: Vec<_> = found[0]
            .points
            .iter()
            .map(|it| (it.of(0), it.of(1)))
            .collect();
        assert_eq!(held, [(1, 0), (3, 6), (0, 200)]);
        assert_eq!(
            (&*found[0].peaks, found[0].top(), found[1].top()),
            (&[3, 200][..], 200, 100)
        );
        assert_eq!(
            found[1].described(),
            "b: 1 sample, 1 band, at most 7 B held"
        );
    }

    #[test]
    fn sums_do_not_overflow_and_numbers_are_bounded() {
        let most = format!("[\"x\",{0}],[\"y\",{0}]", u64::MAX);
        assert_eq!(series(&[sample(0, "a", &most)]).unwrap()[0].top(), u64::MAX);
        assert!(series(&[]).unwrap_err().contains("no samples"));
        let sources: Vec<_> = (0..65).map(|it| sample(0, &format!("{it}"), "")).collect();
        assert!(series(&sources[..64]).is_ok());
        assert!(series(&sources).unwrap_err().contains("more than 64"));
    }

    /// A ledger's processes come and go, and each has a number of its own.
    #[test]
    fn points_have_the_bands_of_their_samples_alone() {
        let samples: Vec<_> = (0..10_000)
            .map(|it| sample(it, "a", &format!("[\"{it}\",{it}]")))
            .collect();
        let found = series(&samples).unwrap();
        assert_eq!(found[0].bands.len(), 10_000);
        for (number, point) in found[0].points.iter().enumerate() {
            assert_eq!(point.held, [(number, number as u64)]);
            assert_eq!((point.of(number), point.of(number + 1)), (number as u64, 0));
        }
    }
}
