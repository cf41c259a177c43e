//! Which thread goes on at each point: all orders, or random ones.

use std::collections::HashSet;

/// What happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// A thread goes on to its next point.
    Run(usize),
    /// A process is killed. Its locks are free at once, and it has ended at once or later.
    Kill(usize, End),
    /// A process is stopped.
    Stop(usize),
    /// A stopped process goes on.
    Resume(usize),
    /// A waiting request is dropped.
    Cancel(usize),
}

impl Choice {
    pub(super) const fn is_fault(self) -> bool {
        !matches!(self, Self::Run(_) | Self::Resume(_))
    }
}

/// How a killed process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    AtOnce,
    /// As on a GPU, where the driver frees the memory first.
    Late,
    /// A forked child lives on and keeps the locks.
    Forked,
}

/// The rule by which threads are chosen, over many runs.
#[derive(Debug)]
pub(super) enum Schedule {
    All(All),
    Random(Random),
}

/// Random orders.
#[derive(Debug)]
pub(super) struct Random {
    random: fastrand::Rng,
    /// For about how many points the same thread goes on.
    stays: u32,
    last: Choice,
}

/// All orders, depth first. A state that was reached before is not explored again.
#[derive(Debug, Default)]
pub(super) struct All {
    /// The choice at each point of this run, and how many there were.
    path: Vec<(usize, usize)>,
    at: usize,
    reached: HashSet<u64>,
}

impl Schedule {
    /// Returns `true` if the next choice depends on which states were reached before.
    pub(super) fn needs_key(&self) -> bool {
        matches!(self, Self::All(all) if all.at >= all.path.len())
    }

    /// Returns `true` if the state was not reached before.
    pub(super) fn is_new(&mut self, key: u64) -> bool {
        match self {
            Self::All(all) => all.reached.insert(key),
            Self::Random(_) => true,
        }
    }

    /// Chooses; `None` if this run need not go on. `key` is a number for the state.
    pub(super) fn pick(
        &mut self,
        choices: &[Choice],
        key: Option<u64>,
    ) -> Result<Option<Choice>, String> {
        match self {
            Self::All(all) => {
                let at = all.pick(choices.len(), key)?;
                Ok(at.map(|at| choices[at]))
            }
            Self::Random(random) => Ok(Some(random.pick(choices))),
        }
    }
}

impl Random {
    pub(super) fn with_seed(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let stays = [0, 3, 7, 31, 127][random.usize(..5)];
        Self {
            random,
            stays,
            last: Choice::Run(0),
        }
    }

    fn pick(&mut self, choices: &[Choice]) -> Choice {
        let Self {
            random,
            stays,
            last,
        } = self;
        let (faults, others): (Vec<Choice>, _) = choices.iter().partition(|it| it.is_fault());
        if random.u8(..60) == 0 && !faults.is_empty() {
            return faults[random.usize(..faults.len())];
        }
        if !others.contains(last) || random.u32(..=*stays) == 0 {
            *last = others[random.usize(..others.len())];
        }
        *last
    }
}

impl All {
    fn pick(&mut self, count: usize, key: Option<u64>) -> Result<Option<usize>, String> {
        self.at += 1;
        if let Some(&(taken, before)) = self.path.get(self.at - 1) {
            return match before == count {
                true => Ok(Some(taken)),
                false => Err(format!("{before} choices became {count} in the same order")),
            };
        }
        if key.is_some_and(|key| !self.reached.insert(key)) {
            return Ok(None);
        }
        self.path.push((0, count));
        Ok(Some(0))
    }

    /// Goes on to the next order; returns `false` if there is none.
    pub(super) fn next(&mut self) -> bool {
        self.at = 0;
        while let Some((taken, count)) = self.path.pop() {
            if taken + 1 < count {
                self.path.push((taken + 1, count));
                return true;
            }
        }
        false
    }

    /// Begins anew.
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }

    pub(super) fn states(&self) -> usize {
        self.reached.len()
    }
}
