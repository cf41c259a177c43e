//! The interface between the simulator and its memory, so that tests can replace the memory.
//!
//! All sizes are whole granules, because each granule has a stamp at both ends. So a request calls
//! the memory only when a token begins in the next granule.
//!
//! A memory also has the clock. In virtual time an event takes place when it is due. In real time
//! it takes place at its turn, and a request that was refused may be served meanwhile.

use super::settings::Nanos;

/// Figures of a model's memory beside the blocks of running requests, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    /// Memory that no other model can have: extents that blocks in use touch, and what is reserved.
    pub(crate) held: u64,
    /// Blocks of ended requests, which are in use for their prefixes.
    pub(crate) kept: u64,
    /// Kept blocks that were evicted so far.
    pub(crate) evicted: u64,
}

/// Memory that several models share under one policy.
pub(crate) trait Memory {
    type Block;

    fn granule(&self) -> u64;

    /// Returns the largest size in granules of a block of the model while no other memory is in
    /// use.
    fn ceiling(&self, model: usize) -> u64;

    /// Allocates a block of `granules` granules that can grow to `capacity` granules, for one
    /// request. Returns `None` if it does not fit now.
    fn allocate(
        &mut self,
        model: usize,
        request: u64,
        granules: u64,
        capacity: u64,
    ) -> anyhow::Result<Option<Self::Block>>;

    /// Grows a block in place. Returns `false` and changes nothing if the growth does not fit now.
    fn grow(&mut self, block: &mut Self::Block, granules: u64) -> anyhow::Result<bool>;

    fn free(&mut self, block: Self::Block) -> anyhow::Result<()>;

    /// Waits until all freed memory can be reused.
    fn settle(&mut self) -> anyhow::Result<()>;

    fn last_refusal(&self) -> Option<String>;

    /// Returns the figures of a model's memory now, if it keeps account of them.
    fn usage(&self, _model: usize) -> anyhow::Result<Option<Usage>> {
        Ok(None)
    }

    /// Returns the time at which an event due at `due` takes place.
    fn now(&self, due: Nanos) -> Nanos {
        due
    }

    /// Waits until the next event is due or, without one, until the request that was refused last
    /// may fit. Returns the time if that request should be tried again before the event.
    fn pause(&mut self, _due: Option<Nanos>) -> anyhow::Result<Option<Nanos>> {
        Ok(None)
    }

    /// Returns `true` if every change of the timelines should be kept.
    fn keeps_course(&self) -> bool {
        false
    }
}

#[cfg(test)]
pub(crate) mod fake {
    //! A memory that only counts granules, by the pool's rule for guarantees.

    use super::Memory;

    /// Granules of each model, under one limit.
    #[derive(Debug)]
    pub(crate) struct Counted {
        pub(crate) granule: u64,
        pub(crate) limit: u64,
        /// Guarantee and limit of each model, in granules.
        pub(crate) tenants: Vec<(u64, u64)>,
        pub(crate) held: Vec<u64>,
        pub(crate) peak: u64,
        /// Every operation, with its result.
        pub(crate) log: Vec<String>,
    }

    #[derive(Debug)]
    pub(crate) struct Held {
        model: usize,
        request: u64,
        granules: u64,
        capacity: u64,
    }

    impl Counted {
        pub(crate) fn elastic(limit: u64, models: usize, guarantee: u64) -> Self {
            Self::new(limit, vec![(guarantee, limit); models])
        }

        pub(crate) fn split(limit: u64, models: usize) -> Self {
            let share = limit / models as u64;
            Self::new(limit, vec![(share, share); models])
        }

        fn new(limit: u64, tenants: Vec<(u64, u64)>) -> Self {
            let held = vec![0; tenants.len()];
            Self {
                granule: 1,
                limit,
                tenants,
                held,
                peak: 0,
                log: Vec::new(),
            }
        }

        fn charge(&mut self, model: usize, more: u64) -> bool {
            let owed = |other: usize| self.tenants[other].0.saturating_sub(self.held[other]);
            let kept: u64 = (0..self.tenants.len())
                .filter(|&other| other != model)
                .map(owed)
                .sum();
            let used: u64 = self.held.iter().sum();
            let fits = used + more + kept <= self.limit
                && self.held[model] + more <= self.tenants[model].1;
            if fits {
                self.held[model] += more;
                self.peak = self.peak.max(used + more);
            }
            fits
        }
    }

    impl Memory for Counted {
        type Block = Held;

        fn granule(&self) -> u64 {
            self.granule
        }

        fn ceiling(&self, model: usize) -> u64 {
            let kept: u64 = (0..self.tenants.len())
                .filter(|&other| other != model)
                .map(|other| self.tenants[other].0)
                .sum();
            self.tenants[model].1.min(self.limit - kept)
        }

        fn allocate(
            &mut self,
            model: usize,
            request: u64,
            granules: u64,
            capacity: u64,
        ) -> anyhow::Result<Option<Held>> {
            anyhow::ensure!(granules <= capacity && granules > 0);
            let fits = self.charge(model, granules);
            self.log.push(format!(
                "{} {request} {granules}",
                if fits { "allocate" } else { "refuse" }
            ));
            Ok(fits.then_some(Held {
                model,
                request,
                granules,
                capacity,
            }))
        }

        fn grow(&mut self, block: &mut Held, granules: u64) -> anyhow::Result<bool> {
            anyhow::ensure!(granules > block.granules && granules <= block.capacity);
            let fits = self.charge(block.model, granules - block.granules);
            self.log.push(format!(
                "{} {} {granules}",
                if fits { "grow" } else { "stay" },
                block.request
            ));
            if fits {
                block.granules = granules;
            }
            Ok(fits)
        }

        fn free(&mut self, block: Held) -> anyhow::Result<()> {
            self.held[block.model] -= block.granules;
            self.log
                .push(format!("free {} {}", block.request, block.granules));
            Ok(())
        }

        fn settle(&mut self) -> anyhow::Result<()> {
            Ok(())
        }

        fn last_refusal(&self) -> Option<String> {
            self.log.last().cloned()
        }
    }
}
