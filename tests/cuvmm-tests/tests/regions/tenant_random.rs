//! Random programs of regions in a tenant: their bytes, and the pool's figures after each step.

use std::ops::Range;
use std::slice::from_ref;

use crate::common::books::books;
use crate::common::{self, G, Rig, cases, host, limited};
use cuvmm::driver::host::HostMemory;
use cuvmm::error::MemoryError;
use cuvmm::{Pool, Region, Stream, Tenant};

/// The granules of a region.
const SIZE: u64 = 8;

/// A region, and the byte that each of its granules begins with, if it is committed.
struct Known {
    region: Region,
    bytes: [Option<u8>; SIZE as usize],
    /// The byte that each granule began with when it was withdrawn.
    before: [u8; SIZE as usize],
}

struct World {
    regions: Vec<Known>,
    a: Tenant,
    b: Tenant,
    pool: Pool,
    home: Stream,
    random: fastrand::Rng,
}

fn granules(range: &Range<u64>) -> Range<usize> {
    (range.start / G) as usize..(range.end / G) as usize
}

impl World {
    fn new(rig: &Rig<HostMemory>, seed: u64) -> Self {
        let pool = limited(rig, 24).build().unwrap();
        let [a, b] = common::tenants(&pool);
        Self {
            regions: Vec::new(),
            a,
            b,
            pool,
            home: Stream::new(&rig.device).unwrap(),
            random: fastrand::Rng::with_seed(seed),
        }
    }

    fn range(&mut self) -> Range<u64> {
        let start = self.random.u64(0..SIZE);
        start * G..self.random.u64(start..SIZE) * G + G
    }

    /// Writes a byte to all committed granules of a range, after unsharing them.
    fn write(&mut self, at: usize, range: &Range<u64>) {
        let byte = self.random.u8(1..);
        let Known { region, bytes, .. } = &mut self.regions[at];
        let parts: Vec<Range<u64>> = region.committed_in(range.clone()).collect();
        for part in parts {
            match region.unshare(part.clone(), &self.home, &[]) {
                Ok(_) => {}
                Err(error) if error.is_out_of_memory() => continue,
                Err(error) => panic!("{error}"),
            }
            for granule in granules(&part) {
                region
                    .write(&self.home, granule as u64 * G, &[byte])
                    .unwrap();
                bytes[granule] = Some(byte);
            }
        }
    }

    fn commit(&mut self, at: usize, range: &Range<u64>) {
        let Known {
            region,
            bytes,
            before,
        } = &mut self.regions[at];
        let allowed = |error: &MemoryError| {
            let shared = matches!(error, MemoryError::ReadOnly(_));
            error.is_out_of_memory() || shared
        };
        if let Err(error) = region.commit(range.clone()) {
            assert!(allowed(&error), "{error}");
            return;
        }
        for granule in granules(range) {
            if bytes[granule].is_none() {
                let mut read = [1];
                region
                    .read(&self.home, granule as u64 * G, &mut read)
                    .unwrap();
                assert!(
                    [0, before[granule]].contains(&read[0]),
                    "another region's byte"
                );
                bytes[granule] = Some(read[0]);
            }
        }
    }

    fn decommit(&mut self, at: usize, range: &Range<u64>) {
        let Known {
            region,
            bytes,
            before,
        } = &mut self.regions[at];
        let parts: Vec<Range<u64>> = region.committed_in(range.clone()).collect();
        for part in parts {
            region
                .decommit_after(part.clone(), from_ref(&self.home))
                .unwrap();
            for granule in granules(&part) {
                before[granule] = bytes[granule].take().unwrap_or(0);
            }
        }
    }

    fn step(&mut self) {
        let range = self.range();
        let count = self.regions.len();
        if count == 0 || (count < 4 && self.random.u8(0..16) == 0) {
            let region = self.a.region(SIZE * G).largest_extent(2 * G);
            let region = region.home_stream(&self.home).reserve().unwrap();
            let bytes = [None; SIZE as usize];
            let before = [0; SIZE as usize];
            self.regions.push(Known {
                region,
                bytes,
                before,
            });
            return;
        }
        let at = self.random.usize(0..count);
        match self.random.u8(0..24) {
            0..8 => self.commit(at, &range),
            8..13 => self.decommit(at, &range),
            13..17 => self.write(at, &range),
            17..20 => {
                let size = range.end - range.start + self.random.u64(0..16) * G;
                if let Ok(block) = self.b.try_allocate(size) {
                    for granule in granules(&(0..size)) {
                        let mut read = [1];
                        block.read(granule as u64 * G, &mut read).unwrap();
                        assert!([0, b'b'].contains(&read[0]), "another tenant's byte");
                        block.write(granule as u64 * G, b"b").unwrap();
                    }
                }
            }
            20 if count < 5 => {
                let Known {
                    region,
                    bytes,
                    before,
                } = &mut self.regions[at];
                match region.fork(from_ref(&self.home)) {
                    Ok(region) => {
                        // An extent that is committed in part is shown whole.
                        let (bytes, before) = (*bytes, *before);
                        self.regions.push(Known {
                            region,
                            bytes,
                            before,
                        });
                    }
                    Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                }
            }
            21 => drop(self.regions.swap_remove(at)),
            _ => drop(self.regions[at].region.purge().unwrap()),
        }
    }

    /// Checks the figures against the driver's, and each region's bytes.
    fn check(&self, rig: &Rig<HostMemory>) {
        let stats = books(rig, &self.pool);
        let held: u64 = self.regions.iter().map(|it| it.region.held()).sum();
        let tenant = &stats.tenants[0];
        assert!(tenant.in_use <= held, "{tenant:#?}");
        // A dropped fork's memory is cached while another region of its family lives.
        assert!(
            tenant.committed == 0 || !self.regions.is_empty(),
            "{tenant:#?}"
        );
        for Known { region, bytes, .. } in &self.regions {
            for (granule, byte) in bytes.iter().enumerate() {
                let mut read = [0];
                let outcome = region.read(&self.home, granule as u64 * G, &mut read);
                assert_eq!(outcome.ok().map(|()| read[0]), *byte, "granule {granule}");
            }
        }
    }
}

#[test]
fn programs_keep_bytes_and_figures() {
    for seed in 0..u64::from(cases(12)) {
        let rig = common::clean(host());
        let mut world = World::new(&rig, seed);
        for _ in 0..150 {
            world.step();
            world.check(&rig);
        }
        world.regions.clear();
        world.pool.trim(0).unwrap();
        assert_eq!(
            books(&rig, &world.pool).tenants[0].committed,
            0,
            "seed {seed}"
        );
    }
}
