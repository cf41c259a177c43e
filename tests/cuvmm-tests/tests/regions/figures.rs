//! Random programs of regions, their forks and aliases: what a purge and a compaction say they gave
//! back, against the memory that the driver or the pool has more.

use std::ops::Range;

use crate::common::{self, D0, G, Rig, cases, pool};
use crate::on_both;
use cuvmm::driver::HandleTypes;
use cuvmm::driver::model::Backing;
use cuvmm::region::Registration;
use cuvmm::{Pool, Region, Stream};

/// The granules of a region.
const SIZE: u64 = 24;

struct World<'a, B: Backing> {
    rig: &'a Rig<B>,
    pool: Option<Pool>,
    regions: Vec<Region>,
    registrations: Vec<Registration>,
    home: Stream,
    busy: Stream,
    random: fastrand::Rng,
}

impl<'a, B: Backing> World<'a, B> {
    fn new(rig: &'a Rig<B>, seed: u64, in_tenant: bool) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let pool = in_tenant.then(|| pool(rig, 5 * SIZE));
        let home = Stream::new(&rig.device).unwrap();
        let tenant = pool
            .as_ref()
            .map(|pool| pool.tenant("a").register().unwrap());
        let builder = match &tenant {
            Some(tenant) => tenant.region(SIZE * G).home_stream(&home),
            None => Region::builder(&rig.device, SIZE * G).shareable(HandleTypes::POSIX_FD),
        };
        let builder = builder.largest_extent(G << random.u32(0..4));
        let region = builder.expect_shrink(random.bool()).reserve().unwrap();
        Self {
            rig,
            pool,
            regions: vec![region],
            registrations: vec![],
            home,
            busy: Stream::new(&rig.device).unwrap(),
            random,
        }
    }

    /// The memory that the regions do not hold: the driver's, or the pool's.
    fn free(&self) -> u64 {
        match &self.pool {
            Some(pool) => 5 * SIZE * G - pool.stats().committed,
            None => self.rig.device.memory_info().unwrap().free,
        }
    }

    fn release(&self) {
        self.rig.machine.release_all_streams(D0);
        self.home.synchronize().unwrap();
        self.busy.synchronize().unwrap();
    }

    fn decommit(&mut self, at: usize, range: Range<u64>) {
        let streams = [self.home.clone(), self.busy.clone()];
        let region = &mut self.regions[at];
        let parts: Vec<Range<u64>> = region.committed_in(range).collect();
        for part in parts {
            // Registered memory is refused.
            let _ = region.decommit_after(part, &streams);
        }
    }

    fn step(&mut self) {
        let start = self.random.u64(0..SIZE);
        let range = start * G..self.random.u64(start..SIZE) * G + G;
        let at = self.random.usize(0..self.regions.len());
        match self.random.u8(0..24) {
            0..6 => drop(self.regions[at].commit(range)),
            6..11 => self.decommit(at, range),
            11 => {
                let to = self.random.u64(0..SIZE) * G;
                let _ = self.regions[at].alias(range, to);
            }
            12 if self.regions.len() < 4 => {
                let streams = [self.home.clone(), self.busy.clone()];
                let fork = self.regions[at].fork(&streams);
                self.regions.extend(fork);
            }
            13 => self.registrations.extend(self.regions[at].register(range)),
            14 => self.registrations.truncate(1),
            15 => drop(self.regions[at].export(range, HandleTypes::POSIX_FD)),
            16 => {
                let stream = self.busy.as_raw();
                self.rig.machine.hold_until_awaited(D0, stream);
                let region = &self.regions[at];
                for part in region.committed_in(range.clone()) {
                    // Memory that a fork shows is read-only.
                    let reads = vec![(region.address() + part.start, 8)];
                    let queued = self.rig.machine.queue_kernel(D0, stream, reads, vec![]);
                    queued.unwrap();
                }
            }
            17 => self.release(),
            18 if self.regions.len() > 1 => {
                self.release();
                drop(self.regions.swap_remove(at));
            }
            19 => {
                self.release();
                let _ = self.regions[at].unshare(range, &self.home, &[]);
            }
            20..22 => {
                self.release();
                let before = self.free();
                let done = self.regions[at].compact(&self.home).unwrap();
                assert_eq!(self.free() - before, done.given_back, "{done:?}");
                assert_eq!(done.kept.partly_used, 0, "there is memory for copies");
            }
            _ => {
                let before = self.free();
                let purged = self.regions[at].purge().unwrap();
                assert_eq!(self.free() - before, purged.given_back, "{purged}");
            }
        }
    }

    fn check(&self) {
        for region in &self.regions {
            let stats = region.stats();
            let parts = stats.committed + stats.pending_free + stats.stranded + stats.quarantined;
            let addresses: u64 = region.extents().iter().map(|it| it.size).sum();
            match self.pool.is_some() {
                false => assert_eq!(parts, addresses, "{stats}"),
                true => assert!(parts >= addresses, "{stats}"),
            }
            // An alias has addresses and no memory.
            assert!(stats.held <= parts, "{stats}");
        }
    }

    fn end(mut self) {
        self.release();
        self.registrations.clear();
        for region in self.regions.drain(..) {
            assert!(region.close().is_ok());
        }
    }
}

on_both! {
    fn what_goes_back_is_what_the_driver_or_the_pool_has_more(rig) {
        for seed in 0..u64::from(cases(24)) {
            let mut world = World::new(rig, seed, seed % 2 == 1);
            for _ in 0..200 {
                world.step();
                world.check();
            }
            world.end();
        }
    }

    fn memory_that_a_fork_or_an_alias_shows_too_goes_back_with_the_last(rig) {
        let mut region = common::committed(Region::builder(&rig.device, 16 * G).largest_extent(4 * G), 8 * G);
        region.alias(0..4 * G, 8 * G).unwrap();
        region.decommit_after(0..4 * G, &[]).unwrap();
        assert_eq!(region.purge().unwrap().given_back, 0, "its alias stays");
        region.decommit_after(8 * G..12 * G, &[]).unwrap();
        assert_eq!(region.purge().unwrap().given_back, 4 * G);
        let mut fork = region.fork(&[]).unwrap();
        region.decommit_after(4 * G..8 * G, &[]).unwrap();
        assert_eq!(region.purge().unwrap().given_back, 0, "the fork stays");
        fork.decommit_after(4 * G..8 * G, &[]).unwrap();
        assert_eq!(fork.purge().unwrap().given_back, 4 * G);
    }
}
