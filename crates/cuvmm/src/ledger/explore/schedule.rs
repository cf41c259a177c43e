//! Which thread goes on at each point: all orders, or random ones.

use std::collections::HashSet;

/// One step of a run.
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
    /// Some time later: the driver of a GPU frees the memory first.
    Late,
    /// A forked child lives on and keeps the locks.
    Forked,
}

/// The means by which members find out whether each other's processes have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    /// They hold descriptors.
    Pidfds,
    /// They look at numbers each time.
    Numbers,
    /// Only the locks tell.
    Nothing,
}

/// How members are disturbed.
#[derive(Clone, Debug)]
pub(super) struct Faults {
    /// How many processes are killed or stopped and how many requests dropped, at most.
    pub(super) most: usize,
    pub(super) ends: &'static [End],
    pub(super) sight: Sight,
    /// `true` if processes are stopped too.
    pub(super) stops: bool,
    /// How often a member is interrupted that could go on, at most; any number of times if this is
    /// `None`.
    pub(super) interruptions: Option<usize>,
}

/// The rule by which threads are chosen, over many runs.
#[derive(Debug)]
pub(super) enum Schedule {
    All(All),
    Random(Random),
}

/// Random orders: the thread with the highest priority goes on, and a few times, at random points,
/// the one whose turn it is gets the lowest. So a thread can be interrupted at one point until
/// another has done much.
#[derive(Debug)]
pub(super) struct Random {
    random: fastrand::Rng,
    /// The priority of each thread; a higher number goes first.
    priorities: [i32; 8],
    /// The numbers of the points at which the priorities change.
    changes: Vec<u32>,
    points: u32,
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

    /// Begins anew.
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }

    pub(super) fn states(&self) -> usize {
        self.reached.len()
    }
}
