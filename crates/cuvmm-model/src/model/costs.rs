//! The costs of calls on the virtual clock.
//!
//! The figures are data: `costs/` has a table for each GPU that was measured, and one of them is
//! the default.

mod text;

pub use text::ParseCostsError;

use cuvmm_driver::Call;

const MIB: f64 = 1048576.0;

/// The indices of the three costs of a point.
const LOW: usize = 0;
const USUAL: usize = 1;
const HIGH: usize = 2;

/// The GPUs that were measured, each with its table. The first is the default. A name with `-heap` is
/// of calls within a heap under load.
const GPUS: &[(&str, &str)] = &[
    ("nvidia-h200", include_str!("../../costs/nvidia-h200.costs")),
    (
        "nvidia-h200-heap",
        include_str!("../../costs/nvidia-h200-heap.costs"),
    ),
];

/// A cost that depends on size: microseconds at some sizes in MiB, interpolated linearly.
///
/// Beyond the last point the last slope continues unless it is negative; below the first point the
/// first value applies. A point may also have a range, which contains most of the values measured
/// there.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve(Vec<(f64, [f64; 3])>);

impl Curve {
    /// Creates a curve through points of (MiB, microseconds), in ascending order of size.
    #[must_use]
    pub fn new(points: &[(f64, f64)]) -> Self {
        points.iter().map(|&(mib, cost)| (mib, [cost; 3])).collect()
    }

    /// Creates a curve with one cost for every size.
    #[must_use]
    pub fn flat(microseconds: f64) -> Self {
        Self::new(&[(0.0, microseconds)])
    }

    /// Returns the cost of `bytes` in microseconds.
    #[must_use]
    pub fn at(&self, bytes: u64) -> f64 {
        let size = bytes as f64 / MIB;
        let points = &self.0;
        let after = points.partition_point(|&(mib, _)| mib < size);
        let line = |(x0, [_, y0, _]): (f64, [f64; 3]), (x1, [_, y1, _]): (f64, [f64; 3])| {
            if x1 > x0 {
                y0 + (y1 - y0) * (size - x0) / (x1 - x0)
            } else {
                y1
            }
        };
        match points.len() {
            0 => 0.0,
            1 => points[0].1[USUAL],
            _ if after == 0 => points[0].1[USUAL],
            n if after == n => line(points[n - 2], points[n - 1]).max(points[n - 1].1[USUAL]),
            _ => line(points[after - 1], points[after]),
        }
    }

    fn has_range(&self) -> bool {
        self.0.iter().any(|&(_, [low, _, high])| low < high)
    }

    /// Returns the curve through one end of each point's range, without ranges.
    fn end(&self, end: usize) -> Self {
        let points = self.0.iter();
        points.map(|&(mib, cost)| (mib, [cost[end]; 3])).collect()
    }
}

/// Creates a curve through points of (MiB, \[low, usual, high\] microseconds), in ascending order
/// of size.
impl FromIterator<(f64, [f64; 3])> for Curve {
    fn from_iter<I: IntoIterator<Item = (f64, [f64; 3])>>(points: I) -> Self {
        Self(points.into_iter().collect())
    }
}

/// The costs of calls on a GPU, in microseconds. The default is an NVIDIA H200.
///
/// The driver charges per mapping: each cost by size is for one mapping, and a call over several
/// mappings costs their sum. Queuing work on a stream costs the caller a [`launch`](Self::launch);
/// the call that waits for the work pays its duration.
///
/// The text form has one line for each cost: `launch 2.8`, or by size as MiB:microseconds, `map
/// 2:0.9 1024:0.7`, with a range as MiB:low/usual/high, `map 2:0.4/0.9/1.6`. A cost that the text
/// omits keeps its default.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Costs {
    /// The measured GPU and driver, and the date, for people. One line without a `#`.
    pub about: String,
    /// The memory of the measured GPU in MiB, for programs that set up a model. The model does not
    /// use it.
    pub memory_mib: f64,
    /// `cuMemAddressReserve`.
    pub reserve: Curve,
    /// `cuMemAddressFree`.
    pub address_free: Curve,
    /// `cuMemCreate` if that much memory was released less than [`Costs::warm_for_us`] ago.
    pub create_warm: Curve,
    /// `cuMemCreate` in all other cases.
    pub create_cold: Curve,
    /// The time after the last of consecutive releases until the driver can reuse that many bytes
    /// of the released memory. Creates that reuse it wait until then.
    pub busy: Curve,
    /// `cuMemRelease` that frees memory.
    pub release: Curve,
    /// `cuMemMap`.
    pub map: Curve,
    /// `cuMemUnmap`, for each mapping.
    pub unmap: Curve,
    /// `cuMemSetAccess`, for each mapping and the first device.
    pub set_access: Curve,
    /// `cuMemSetAccess` for a mapping of memory that was created cold and has had no access before.
    pub set_access_cold: Curve,
    /// `cuMemSetAccess`, for each mapping and each further device.
    pub set_access_peer: Curve,
    /// `cuMemAlloc`.
    pub alloc: Curve,
    /// `cuMemFree`.
    pub free: Curve,
    /// A copy between host and device, until done.
    pub host_copy: Curve,
    /// A fill of device memory, until done.
    pub fill: Curve,
    /// A copy within or between device memories, until done.
    pub device_copy: Curve,
    /// The time after a release during which creating is cheap, in microseconds.
    pub warm_for_us: f64,
    /// Queuing one piece of work on a stream.
    pub launch: f64,
    /// `cuMemAllocAsync`, `cuMemAllocFromPoolAsync` and `cuMemFreeAsync`, with a warm pool.
    pub pool: f64,
    /// `cuMemGetInfo`.
    pub memory_info: f64,
    /// `cuEventRecord`.
    pub event_record: f64,
    /// `cuEventQuery` and `cuStreamQuery`.
    pub query: f64,
    /// `cuStreamWaitEvent`.
    pub wait_event: f64,
    /// A synchronization with nothing to wait for.
    pub synchronize: f64,
    /// All other calls.
    pub other: f64,
}

impl Costs {
    /// Returns costs of zero: the clock advances only through
    /// [`Machine::advance`](crate::model::Machine::advance).
    #[must_use]
    pub fn free_of_charge() -> Self {
        let nothing = Curve::flat(0.0);
        Self {
            about: "nothing costs anything".to_owned(),
            memory_mib: 0.0,
            reserve: nothing.clone(),
            address_free: nothing.clone(),
            create_warm: nothing.clone(),
            create_cold: nothing.clone(),
            busy: nothing.clone(),
            release: nothing.clone(),
            map: nothing.clone(),
            unmap: nothing.clone(),
            set_access: nothing.clone(),
            set_access_cold: nothing.clone(),
            set_access_peer: nothing.clone(),
            alloc: nothing.clone(),
            free: nothing.clone(),
            host_copy: nothing.clone(),
            fill: nothing.clone(),
            device_copy: nothing,
            warm_for_us: 300_000.0,
            launch: 0.0,
            pool: 0.0,
            memory_info: 0.0,
            event_record: 0.0,
            query: 0.0,
            wait_event: 0.0,
            synchronize: 0.0,
            other: 0.0,
        }
    }

    /// Returns the names of the built-in tables, for [`of_gpu`](Self::of_gpu).
    pub fn gpus() -> impl Iterator<Item = &'static str> {
        GPUS.iter().map(|&(name, _)| name)
    }

    /// Returns the table of a measured GPU by name: `nvidia-h200`, also written `NVIDIA H200` or
    /// `h200`; or `nvidia-h200-heap`, whose calls were timed within a heap under load and take about
    /// twice as long.
    #[must_use]
    pub fn of_gpu(name: &str) -> Option<Self> {
        let wanted = name.to_lowercase().replace([' ', '_'], "-");
        let (_, text) = GPUS
            .iter()
            .find(|(name, _)| *name == wanted || name.strip_prefix("nvidia-") == Some(&wanted))?;
        Self::built_in(text).ok()
    }

    fn built_in(text: &str) -> Result<Self, ParseCostsError> {
        let mut costs = Self::free_of_charge();
        costs.read(text)?;
        Ok(costs)
    }

    /// Returns this table with all ranges at their low end and with all at their high end, or
    /// `None` if no cost has a range. Costs that do not depend on a size are unchanged.
    #[must_use]
    pub fn range(&self) -> Option<(Self, Self)> {
        let (mut low, mut high) = (self.clone(), self.clone());
        if !low.curves().iter().any(|curve| curve.has_range()) {
            return None;
        }
        for (end, costs) in [(LOW, &mut low), (HIGH, &mut high)] {
            for curve in costs.curves() {
                *curve = curve.end(end);
            }
        }
        Some((low, high))
    }

    /// Returns the cost of a call that does not depend on a size; zero for calls that do.
    #[must_use]
    pub fn of_call(&self, call: Call) -> f64 {
        match call {
            Call::MemGetInfo => self.memory_info,
            Call::EventRecord | Call::CtxRecordEvent => self.event_record,
            Call::EventQuery | Call::StreamQuery => self.query,
            Call::StreamWaitEvent => self.wait_event,
            Call::CtxSynchronize | Call::StreamSynchronize | Call::EventSynchronize => {
                self.synchronize
            }
            Call::MemcpyDtoD
            | Call::MemcpyHtoDAsync
            | Call::MemcpyDtoHAsync
            | Call::MemcpyDtoDAsync
            | Call::MemsetD8
            | Call::MemsetD8Async
            | Call::GraphLaunch
            | Call::MemPrefetchAsync => self.launch,
            Call::MemAllocAsync | Call::MemAllocFromPoolAsync | Call::MemFreeAsync => self.pool,
            Call::MemAddressReserve
            | Call::MemAddressFree
            | Call::MemCreate
            | Call::MemRelease
            | Call::MemMap
            | Call::MemUnmap
            | Call::MemSetAccess
            | Call::MemcpyHtoD
            | Call::MemcpyDtoH
            | Call::MemAlloc
            | Call::MemFree => 0.0,
            _ => self.other,
        }
    }
}

impl Default for Costs {
    fn default() -> Self {
        let (_, text) = GPUS[0];
        // A test parses every built-in table, so the fallback is never used.
        Self::built_in(text).unwrap_or_else(|_| Self::free_of_charge())
    }
}

#[cfg(test)]
mod tests {
    use super::{Costs, Curve, GPUS};

    #[test]
    fn lines_between_points_and_beyond() {
        let curve = Curve::new(&[(2.0, 10.0), (4.0, 20.0), (8.0, 60.0)]);
        let at = |mib: u64| curve.at(mib << 20);
        assert_eq!((at(1), at(2), at(3), at(4)), (10.0, 10.0, 15.0, 20.0));
        assert_eq!((at(6), at(8), at(9)), (40.0, 60.0, 70.0));
        let falling = Curve::new(&[(2.0, 10.0), (4.0, 9.0)]);
        assert_eq!((falling.at(3 << 20), falling.at(64 << 20)), (9.5, 9.0));
        assert_eq!(Curve::new(&[]).at(5), 0.0);
        assert_eq!(Curve::flat(7.0).at(1 << 40), 7.0);
    }

    #[test]
    fn a_table_with_a_range_has_two_ends() {
        let free = Costs::free_of_charge();
        assert_eq!(free.range(), None);
        let ranged = |cost| Costs {
            map: [(2.0, cost)].into_iter().collect(),
            launch: 5.0,
            ..free.clone()
        };
        let (low, high) = ranged([1.0, 2.0, 4.0]).range().unwrap();
        assert_eq!((low, high), (ranged([1.0; 3]), ranged([4.0; 3])));
        assert_eq!(ranged([1.0, 2.0, 4.0]).map.at(2 << 20), 2.0);
    }

    #[test]
    fn every_table_that_is_built_in_says_all_and_whose_it_is() {
        for (name, text) in GPUS {
            let costs = Costs::built_in(text).unwrap();
            let same = costs.to_string();
            for line in same.lines() {
                let entry = line.split(' ').next().unwrap();
                let says = text
                    .lines()
                    .any(|line| line.split(' ').next() == Some(entry));
                assert!(says, "{name} does not say {entry}");
            }
            let words = name.replace('-', " ");
            assert!(
                costs.about.to_lowercase().contains(&words),
                "{name}: {}",
                costs.about
            );
            assert!(
                costs.about.contains("driver") && costs.about.contains("20"),
                "{name}"
            );
            assert!(costs.memory_mib > 1024.0, "{name}");
            assert_eq!(Costs::of_gpu(name), Some(costs));
        }
        assert_eq!(Costs::of_gpu("NVIDIA H200"), Some(Costs::default()));
        assert_eq!(Costs::of_gpu("h200"), Some(Costs::default()));
        assert_eq!(Costs::of_gpu("abacus"), None);
        assert_eq!(Costs::gpus().next(), Some("nvidia-h200"));
    }

    #[test]
    fn the_levers_that_were_measured_hold() {
        let costs = Costs::default();
        let pages = 4096.0 * (costs.set_access.at(2 << 20) + costs.map.at(2 << 20));
        let large = 16.0 * (costs.set_access.at(512 << 20) + costs.map.at(512 << 20));
        assert!(pages > 50.0 * large, "few large mappings are the lever");
    }
}
