//! What each call costs on the virtual clock.

mod text;

pub use text::ParseCostsError;

use crate::Call;

const MIB: f64 = 1048576.0;

/// A cost by size: microseconds at some sizes in MiB, straight lines between them. Beyond the
/// last point the last slope goes on; below the first the first value holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve(Vec<(f64, f64)>);

impl Curve {
    /// A curve through points of (MiB, microseconds), in growing order of size.
    #[must_use]
    pub fn new(points: &[(f64, f64)]) -> Self {
        Self(points.to_vec())
    }

    /// The same cost for every size.
    #[must_use]
    pub fn flat(microseconds: f64) -> Self {
        Self(vec![(0.0, microseconds)])
    }

    /// The cost of `bytes` in microseconds.
    #[must_use]
    pub fn at(&self, bytes: u64) -> f64 {
        let size = bytes as f64 / MIB;
        let points = &self.0;
        let after = points.partition_point(|&(mib, _)| mib < size);
        let line = |(x0, y0): (f64, f64), (x1, y1): (f64, f64)| {
            if x1 > x0 {
                y0 + (y1 - y0) * (size - x0) / (x1 - x0)
            } else {
                y1
            }
        };
        match points.len() {
            0 => 0.0,
            1 => points[0].1,
            _ if after == 0 => points[0].1,
            n if after == n => line(points[n - 2], points[n - 1]),
            _ => line(points[after - 1], points[after]),
        }
    }
}

/// What the calls cost, in microseconds. The default is one NVIDIA H200 under driver 580.
///
/// The costs by size are of one mapping each: the driver charges per mapping, so a call over many
/// mappings costs their sum.
///
/// Written and parsed as text, a line for each cost: `launch 2.8`, or by size as
/// MiB:microseconds, `map 2:0.9 1024:0.7`. What a text leaves out keeps its default.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Costs {
    /// `cuMemAddressReserve`.
    pub reserve: Curve,
    /// `cuMemAddressFree`.
    pub address_free: Curve,
    /// `cuMemCreate` when that much was released less than [`Costs::warm_for_us`] ago.
    pub create_warm: Curve,
    /// `cuMemCreate` otherwise.
    pub create_cold: Curve,
    /// `cuMemRelease` that gives memory back.
    pub release: Curve,
    /// `cuMemMap`.
    pub map: Curve,
    /// `cuMemUnmap`, for each mapping.
    pub unmap: Curve,
    /// `cuMemSetAccess`, for each mapping and the first device.
    pub set_access: Curve,
    /// `cuMemSetAccess`, for each mapping and each further device.
    pub set_access_peer: Curve,
    /// `cuMemAlloc`.
    pub alloc: Curve,
    /// `cuMemFree`.
    pub free: Curve,
    /// A copy between host and device that waits.
    pub host_copy: Curve,
    /// How long released memory is cheap to create again.
    pub warm_for_us: f64,
    /// Putting one piece of work on a stream.
    pub launch: f64,
    /// `cuMemAllocAsync` and `cuMemFreeAsync`, warm.
    pub pool: f64,
    /// `cuMemGetInfo`.
    pub memory_info: f64,
    /// `cuEventRecord`.
    pub event_record: f64,
    /// `cuEventQuery` and `cuStreamQuery`.
    pub query: f64,
    /// `cuStreamWaitEvent`.
    pub wait_event: f64,
    /// Any synchronisation with nothing to wait for.
    pub synchronize: f64,
    /// Everything else.
    pub other: f64,
}

impl Costs {
    /// Everything costs nothing: the clock moves only when told to.
    #[must_use]
    pub fn free_of_charge() -> Self {
        let nothing = Curve::flat(0.0);
        Self {
            reserve: nothing.clone(),
            address_free: nothing.clone(),
            create_warm: nothing.clone(),
            create_cold: nothing.clone(),
            release: nothing.clone(),
            map: nothing.clone(),
            unmap: nothing.clone(),
            set_access: nothing.clone(),
            set_access_peer: nothing.clone(),
            alloc: nothing.clone(),
            free: nothing.clone(),
            host_copy: nothing,
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

    /// The cost of a call that does not depend on a size; nothing for those that do.
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
            Call::MemAllocAsync | Call::MemFreeAsync => self.pool,
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
        let curve = Curve::new;
        Self {
            reserve: curve(&[(2.0, 1.5), (1024.0, 2.0), (1_048_576.0, 3.0)]),
            address_free: curve(&[(2.0, 1.0), (1024.0, 2.0), (1_048_576.0, 5.0)]),
            create_warm: curve(&[
                (2.0, 8.0),
                (128.0, 9.9),
                (512.0, 12.8),
                (1024.0, 15.0),
                (8192.0, 43.0),
                (32768.0, 142.0),
            ]),
            create_cold: curve(&[
                (2.0, 11.5),
                (1024.0, 380.0),
                (8192.0, 2_400.0),
                (32768.0, 11_600.0),
            ]),
            release: curve(&[
                (2.0, 11.0),
                (8.0, 11.0),
                (32.0, 20.0),
                (128.0, 42.0),
                (512.0, 131.0),
                (1024.0, 270.0),
                (8192.0, 2_300.0),
            ]),
            map: curve(&[(2.0, 0.9), (512.0, 0.6), (1024.0, 0.7), (8192.0, 4.5)]),
            unmap: curve(&[
                (2.0, 15.0),
                (128.0, 15.0),
                (512.0, 19.0),
                (1024.0, 28.0),
                (8192.0, 111.0),
            ]),
            set_access: curve(&[
                (2.0, 23.0),
                (128.0, 24.0),
                (512.0, 38.0),
                (1024.0, 59.0),
                (8192.0, 281.0),
            ]),
            set_access_peer: curve(&[(2.0, 813.0), (128.0, 935.0), (2048.0, 9_786.0)]),
            alloc: curve(&[(2.0, 48.0), (1024.0, 84.0), (8192.0, 553.0)]),
            free: curve(&[(2.0, 35.0), (1024.0, 298.0), (8192.0, 3_663.0)]),
            host_copy: curve(&[(0.0, 8.0), (4096.0, 77_400.0)]),
            warm_for_us: 300_000.0,
            launch: 2.8,
            pool: 1.6,
            memory_info: 3.0,
            event_record: 0.13,
            query: 0.14,
            wait_event: 0.11,
            synchronize: 0.31,
            other: 0.2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Costs, Curve};

    #[test]
    fn lines_between_points_and_beyond() {
        let curve = Curve::new(&[(2.0, 10.0), (4.0, 20.0), (8.0, 60.0)]);
        let at = |mib: u64| curve.at(mib << 20);
        assert_eq!((at(1), at(2), at(3), at(4)), (10.0, 10.0, 15.0, 20.0));
        assert_eq!((at(6), at(8), at(9)), (40.0, 60.0, 70.0));
        assert_eq!(Curve::new(&[]).at(5), 0.0);
        assert_eq!(Curve::flat(7.0).at(1 << 40), 7.0);
    }

    #[test]
    fn the_levers_that_were_measured_hold() {
        let costs = Costs::default();
        let pages = 4096.0 * (costs.set_access.at(2 << 20) + costs.map.at(2 << 20));
        let large = 16.0 * (costs.set_access.at(512 << 20) + costs.map.at(512 << 20));
        assert!(pages > 100.0 * large, "few large mappings are the lever");
        assert!(costs.create_cold.at(8 << 30) > 30.0 * costs.create_warm.at(8 << 30));
    }
}
