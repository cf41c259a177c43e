//! Members of one ledger that take turns at each use of a shared word: all orders of two members
//! with a few operations each, and random orders of more. At each of these points a process can
//! also be killed or stopped, or its waiting request dropped.
//!
//! Each member runs the ledger's own code in a thread; only the time and the process numbers are
//! the test's (see [`probe`](super::probe)). After each step the charges are compared with the
//! driver's view of the memory, and in the end one process must get everything.
//!
//! The time goes on when all threads sleep. So an interrupted thread takes no time, unless its
//! process is stopped.
//!
//! A state is the content of the file, what each thread has read, and the time. No order is
//! explored beyond a known state. Where there are too many orders, a scenario limits how often a
//! runnable member is interrupted, or takes random orders.

mod actor;
mod ghost;
mod scenarios;
mod schedule;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actor::{Actor, G, Op, TERMS, wishes};
use schedule::{All, End, Faults, Random, Schedule, Sight};
use world::{Handle, Killed, Uses, World};

use super::charge::Count;
use super::layout::State;
use super::member::Member;
use super::seen::Seen;
use super::{clock, dead, exports, probe};
use crate::wanted::Purpose;

/// The operations of one member: uninterrupted preparations, then interrupted ones.
#[derive(Clone, Debug, Default)]
struct Script {
    before: Vec<Op>,
    ops: Vec<Op>,
}

#[derive(Clone, Debug)]
struct Scenario {
    /// In granules.
    limit: u64,
    scripts: Vec<Script>,
    faults: Faults,
}

impl Scenario {
    fn run(&self, path: &Path, schedule: Schedule, uses: &Arc<Uses>) -> (Schedule, Option<String>) {
        let count = self.scripts.len();
        let world = World::new(count, &self.faults, schedule, Arc::clone(uses));
        let player = |(me, script)| {
            let world = &world;
            world::player(move || self.play(world, me, script, path))
        };
        let mut players: Vec<_> = self.scripts.iter().enumerate().map(player).collect();
        for me in 0..count {
            world.turn_to(&mut players, me);
        }
        world.begin(&mut players);
        drop(players);
        let is_over = world.lock().is_over();
        if !is_over {
            let judged = catch_unwind(AssertUnwindSafe(|| judge(&world, path, self.limit)));
            probe::set(None);
            if let Err(fault) = judged.unwrap_or_else(|_| Err("the judge panicked".into())) {
                world.lock().fail(fault);
            }
        }
        let mut inner = world.lock();
        let report = inner.report();
        let used = Schedule::Random(Random::with_seed(0));
        (std::mem::replace(&mut inner.schedule, used), report)
    }

    fn play(&self, world: &Arc<World>, me: usize, script: &Script, path: &Path) {
        let handle = Rc::new(Handle::new(world, me));
        let shared: Rc<dyn probe::Probe> = handle.clone();
        probe::set(Some(shared));
        let mut actor = Actor::new(&handle, path.to_owned(), self.limit);
        let played = catch_unwind(AssertUnwindSafe(|| {
            script.before.iter().for_each(|&op| actor.act(op));
            if !world.prepared(me) {
                return false;
            }
            script.ops.iter().for_each(|&op| actor.act(op));
            handle.rest();
            world.lock().hush(me);
            actor.leave();
            true
        }));
        match played {
            Ok(true) => {}
            Ok(false) => handle.die(),
            Err(payload) => {
                handle.die();
                if !payload.is::<Killed>() {
                    let said = payload.downcast_ref::<String>().cloned();
                    let said = said.unwrap_or_else(|| "?".into());
                    world.lock().fail(format!("{me} panics: {said}"));
                }
            }
        }
        actor.vanish();
        probe::set(None);
        world.done(me);
    }

    /// Explores all orders. Returns the number of different states and of runs, or the fault.
    fn explore(&self) -> Result<(usize, usize), String> {
        let dir = super::tests::directory();
        let uses = Uses::new(false);
        let path = dir.path().join("ledger");
        // Finds most words that several members use before the first order.
        for seed in 0..100 {
            self.run_at_random(&path, seed, &uses)?;
        }
        let (mut all, mut runs) = (All::default(), 0);
        loop {
            let _ = std::fs::remove_file(&path);
            let (schedule, fault) = self.run(&path, Schedule::All(all), &uses);
            if let Some(fault) = fault {
                return Err(fault);
            }
            let Schedule::All(used) = schedule else {
                return Err("another schedule".into());
            };
            all = used;
            runs += 1;
            if uses
                .has_grown
                .swap(false, std::sync::atomic::Ordering::SeqCst)
            {
                all.restart();
            } else if !all.next() {
                return Ok((all.states(), runs));
            }
        }
    }

    fn run_at_random(&self, path: &Path, seed: u64, uses: &Arc<Uses>) -> Result<(), String> {
        let _ = std::fs::remove_file(path);
        let random = Schedule::Random(Random::with_seed(seed));
        let (_, fault) = self.run(path, random, uses);
        fault.map_or(Ok(()), |fault| Err(format!("seed {seed}: {fault}")))
    }
}

/// Checks the end state as another member.
fn judge(world: &Arc<World>, path: &Path, limit: u64) -> Result<(), String> {
    let me = world.lock().ghost.members.len() - 1;
    let shared: Rc<dyn probe::Probe> = Rc::new(Handle::new(world, me));
    probe::set(Some(shared));
    let member = Member::join(path.to_owned(), TERMS, &wishes(limit)).map(Arc::new);
    let member = member.map_err(|error| format!("the last member cannot join: {error}"))?;
    let file = member.file();
    let layout = file.layout();
    let mut seen = Seen::default();
    let slots = || layout.slots.iter().enumerate();
    let is_left =
        || slots().any(|(index, it)| index != member.index() && it.state().0 != State::Free);
    let mut passes = 0;
    while dead::collect(file, Some(member.index()), &mut seen) || is_left() {
        passes += 1;
        if passes > 1_000 {
            return Err(format!("slots are left: {:?}", states(&member)));
        }
        clock::sleep(Duration::from_millis(20));
    }
    let charged = |word: &super::word::Word| Count::of(word.load()).total();
    let left: u64 = layout.charges.iter().map(charged).sum();
    let names: Vec<_> = exports::all(layout)
        .map(|it| (it.owner, it.holders))
        .collect();
    let named = exports::named(layout);
    if left > 0 || !names.is_empty() || named > 0 {
        return Err(format!(
            "{left} granules, exports {names:?}, {named} names are left"
        ));
    }
    let taken = member.grant(limit * G, 0, Purpose::New, None);
    taken.map_err(|refused| format!("the last member gets too little: {refused:?}"))?;
    member.give(limit * G);
    world.lock().kept.clear();
    drop(member);
    Ok(())
}

fn states(member: &Member) -> Vec<(usize, State)> {
    let slots = member.file().layout().slots.iter().enumerate();
    let states = slots.map(|(index, it)| (index, it.state().0));
    states.filter(|it| it.1 != State::Free).collect()
}
