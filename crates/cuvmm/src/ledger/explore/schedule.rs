//! The choice of the next thread at each point: all orders, or random ones.

use std::collections::HashSet;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Run(usize),
    /// Kills a process. Its locks are free at once, and it has ended at once or later.
    Kill(usize, End),
    Stop(usize),
    Resume(usize),
    /// Drops a waiting request.
    Cancel(usize),
}

impl Choice {
    pub(super) const fn is_fault(self) -> bool {
        !matches!(self, Self::Run(_) | Self::Resume(_))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    AtOnce,
    /// Some time later: the driver of a GPU frees the memory first.
    Late,
    /// A forked child lives on and keeps the locks.
    Forked,
}

/// The means by which members notice the ends of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    /// Held descriptors.
    Pidfds,
    /// A look at the number each time.
    Numbers,
    /// Only the locks.
    Nothing,
}

#[derive(Clone, Debug)]
pub(super) struct Faults {
    /// The most kills, stops and dropped requests.
    pub(super) most: usize,
    pub(super) ends: &'static [End],
    pub(super) sight: Sight,
    pub(super) stops: bool,
    /// The most interruptions of a runnable member; `None` if unlimited.
    pub(super) interruptions: Option<usize>,
}

#[derive(Debug)]
pub(super) enum Schedule {
    All(All),
    Random(Random),
}

/// Random orders. The thread with the highest priority runs; at a few random points the running
/// thread gets the lowest priority. So a thread can be interrupted at one point until another has
/// done much.
#[derive(Debug)]
pub(super) struct Random {
    random: fastrand::Rng,
    /// The priority of each thread; the highest runs.
    priorities: [i32; 8],
    /// The numbers of the points at which priorities change.
    changes: Vec<u32>,
    points: u32,
}

/// All orders, depth first. A state that was reached before is not explored again.
#[derive(Debug, Default)]
pub(super) struct All {
    /// The choice at each point of this run, and the number of choices there.
    path: Vec<(usize, usize)>,
    at: usize,
    reached: HashSet<u64>,
}

impl Schedule {
    /// Returns `true` if the next choice depends on the states reached before.
    pub(super) fn needs_key(&self) -> bool {
        matches!(self, Self::All(all) if all.at >= all.path.len())
    }

    pub(super) fn is_new(&mut self, key: u64) -> bool {
        match self {
            Self::All(all) => all.reached.insert(key),
            Self::Random(_) => true,
        }
    }

    /// Chooses; `None` if this run need not go on. `key` identifies the state.
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
        let mut priorities = [0, 1, 2, 3, 4, 5, 6, 7];
        random.shuffle(&mut priorities);
        let within = [60, 250, 1_000][random.usize(..3)];
        let count = [1, 2, 5, 60][random.usize(..4)];
        Self {
            priorities,
            changes: (0..count).map(|_| random.u32(..within)).collect(),
            points: 0,
            random,
        }
    }

    fn pick(&mut self, choices: &[Choice]) -> Choice {
        let (faults, others): (Vec<Choice>, _) = choices.iter().partition(|it| it.is_fault());
        if self.random.u8(..60) == 0 && !faults.is_empty() {
            return faults[self.random.usize(..faults.len())];
        }
        let resumes = |it: &&Choice| matches!(it, Choice::Resume(_));
        if let Some(resume) = others.iter().find(resumes)
            && self.random.u8(..20) == 0
        {
            return *resume;
        }
        self.points += 1;
        let priorities = self.priorities;
        let priority = |it: &&Choice| match **it {
            Choice::Run(thread) => priorities[thread],
            _ => i32::MIN,
        };
        let first = *others.iter().max_by_key(priority).unwrap_or(&choices[0]);
        if let Choice::Run(thread) = first
            && self.changes.contains(&self.points)
        {
            let lowest = priorities.iter().min().copied().unwrap_or_default();
            self.priorities[thread] = lowest - 1;
        }
        first
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

    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }

    pub(super) fn states(&self) -> usize {
        self.reached.len()
    }
}
