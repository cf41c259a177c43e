//! The last steps for another process that waits for memory: calling the hooks of this process's
//! tenants, and putting tenants to sleep if the process allows that. For a request of one of its own
//! pools a process calls the hooks of the others, and puts none to sleep.
//!
//! Keeps I-127, I-140 and I-155.
//!
//! Both call functions of the program, which may take long, so they have a thread of their own. The
//! process goes on releasing idle memory meanwhile.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::clock;
use super::control::{Commands, PoolReport};
use super::givers::Offer;
use super::member::Member;
use super::turns::Unmet;
use super::waiting::{FIRST_TURN, TURN};
use crate::wanted::HOOKS_AGAIN;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Hooks,
    Sleep,
}

#[derive(Debug, Default)]
pub(super) struct Appeals {
    /// The newest ticket of another process for which each step was begun.
    hooks: u64,
    sleep: u64,
    /// The newest ticket of this process for which hooks were called.
    own: u64,
    /// The first pass since the functions that were called last have ended.
    rests_since: Option<Instant>,
    /// `true` while functions of the program are called.
    at_work: Arc<AtomicBool>,
}

/// Returns the step of slot `me` after a number of rounds. All processes compute one order: first
/// the hooks of each, then the sleep of each, both in the [order](Offer::order) of their offers.
pub(super) fn turn(mut offers: Vec<Offer>, me: usize, rounds: u64) -> Option<Step> {
    offers.retain(|offer| offer.above > 0);
    offers.sort_by_key(Offer::order);
    let rank = offers.iter().position(|offer| offer.index == me)?;
    let begins = |turn: usize| FIRST_TURN + TURN * turn as u64;
    if rounds >= begins(offers.len() + rank) {
        return Some(Step::Sleep);
    }
    (rounds >= begins(rank)).then_some(Step::Hooks)
}

impl Appeals {
    #[cfg(test)]
    pub(super) fn at_work() -> Self {
        let appeals = Self::default();
        appeals.at_work.store(true, Ordering::SeqCst);
        appeals
    }

    /// Begins this process's next step, unless it was begun before for the newest waiting request.
    /// While a request waits, hooks are called [again](HOOKS_AGAIN).
    pub(super) fn begin(
        &mut self,
        member: &Arc<Member>,
        commands: &Arc<Commands>,
        offers: Vec<Offer>,
        unmet: &Unmet,
    ) {
        let Some(step) = turn(offers, member.index(), unmet.rounds) else {
            return;
        };
        if self.at_work.load(Ordering::SeqCst) {
            return;
        }
        let Some(step) = self.next_step(step, unmet) else {
            return;
        };
        self.at_work.store(true, Ordering::SeqCst);
        let appeal = Appeal {
            member: Arc::clone(member),
            commands: Arc::clone(commands),
            step,
            of_others: unmet.oldest.is_some(),
            wanted_by: match unmet.oldest {
                Some((_, index)) => member.file().layout().slots[index].name(),
                None => member.slot().name(),
            },
            _at_work: AtWork(Arc::clone(&self.at_work)),
        };
        let started = std::thread::Builder::new()
            .name("cuvmm-appeal".into())
            .spawn(move || appeal.run());
        if let Err(error) = started {
            log!(warn, %error, "no thread could be started to ask tenants for memory");
        }
    }

    /// Returns the step to begin while it is the turn of `step`, and notes that it begins for the
    /// requests up to the newest ticket. Requests for which hooks were called do not wait for sleep
    /// while newer ones come.
    fn next_step(&mut self, step: Step, unmet: &Unmet) -> Option<Step> {
        let rests_since = *self.rests_since.get_or_insert_with(clock::now);
        let waits = unmet.newest.max(unmet.own) > 0;
        let again = waits && clock::since(rests_since) >= HOOKS_AGAIN;
        let asked = unmet.newest.min(self.hooks);
        let step = if step == Step::Sleep && asked > self.sleep {
            self.sleep = asked;
            Step::Sleep
        } else if unmet.newest > self.hooks || unmet.own > self.own || again {
            self.hooks = self.hooks.max(unmet.newest);
            self.own = self.own.max(unmet.own);
            Step::Hooks
        } else {
            return None;
        };
        self.rests_since = None;
        Some(step)
    }
}

#[derive(Debug)]
struct AtWork(Arc<AtomicBool>);

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

struct Appeal {
    member: Arc<Member>,
    commands: Arc<Commands>,
    step: Step,
    /// `true` if a request of another process waits.
    of_others: bool,
    wanted_by: String,
    _at_work: AtWork,
}

impl Appeal {
    fn run(self) {
        match self.step {
            Step::Hooks => self.call_hooks(),
            Step::Sleep => self.put_to_sleep(),
        }
        // The keeper releases what is idle now.
        self.member.file().layout().header.wanted.ring();
    }

    /// Returns the bytes that other processes lack beyond the idle memory of this process.
    fn missing(&self) -> u64 {
        // The lock keeps memory that the keeper releases meanwhile from being missed.
        let _giving = self.member.giving();
        let need = Unmet::of(&self.member).need;
        let need = need.saturating_mul(self.member.granule().bytes());
        need.saturating_sub(self.member.idle_bytes())
    }

    fn call_hooks(&self) {
        let givers = self.member.givers();
        for giver in givers.ids() {
            // A request calls the hooks of its own pool itself.
            if !self.of_others && !self.member.account().stalls.has_beside(giver) {
                continue;
            }
            let mut asked = Vec::new();
            loop {
                let missing = self.missing();
                if missing == 0 {
                    return;
                }
                let next = givers.with(giver, |giver| {
                    giver.next_hook(missing, &self.wanted_by, &asked)
                });
                let Some((tenant, hook)) = next.flatten() else {
                    break;
                };
                asked.push(tenant);
                // The giver is not being called here, so the hook may drop the pool, or wait for a
                // thread that does.
                if catch_unwind(AssertUnwindSafe(hook)).is_err() {
                    log!(error, "a tenant's pressure hook panicked");
                }
                self.member.file().layout().header.wanted.ring();
            }
        }
    }

    /// Puts tenants that hold memory above their guarantees to sleep, until enough is idle: the
    /// lowest priority first, then the tenant furthest above its guarantee.
    fn put_to_sleep(&self) {
        if !self.commands.sleeps_for_others {
            return;
        }
        let mut pools = Vec::new();
        let givers = self.member.givers();
        givers.each(|giver| pools.push(giver.report()));
        for tenant in sleepers(&pools) {
            if self.missing() == 0 {
                return;
            }
            if let Err(reason) = self.commands.sleep(Some(tenant)) {
                log!(info, %tenant, %reason, "a tenant is not put to sleep");
            }
            self.member.file().layout().header.wanted.ring();
        }
    }
}

/// Names tenants in the order of their sleep.
fn sleepers(pools: &[PoolReport]) -> Vec<&str> {
    let tenants = pools.iter().flat_map(|pool| &pool.tenants);
    let mut tenants: Vec<_> = tenants
        .filter(|it| !it.draining && it.in_use > 0 && it.committed > it.guarantee)
        .collect();
    let above = |it: &super::TenantReport| it.committed - it.guarantee;
    tenants.sort_by_key(|it| (it.priority, std::cmp::Reverse(above(it))));
    tenants.into_iter().map(|it| it.name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::ledger::TenantReport;
    use crate::ledger::givers::{Giver, Hook};
    use crate::ledger::probe;
    use crate::ledger::tests::{G, members, stop_time};
    use crate::ledger::waiting::ROUND;
    use crate::wanted::{Change, Purpose};

    fn offer(index: usize, above: u64) -> Offer {
        Offer {
            index,
            above,
            ..Offer::default()
        }
    }

    #[test]
    fn each_process_has_its_turn_and_hooks_come_before_sleep() {
        let offers = vec![offer(0, 5), offer(1, 9), offer(2, 0)];
        let turns = |me: usize| -> Vec<_> {
            let rounds = [0, 1, 2, 11, 12, 21, 22, 31, 32];
            let of = |&rounds: &u64| turn(offers.clone(), me, rounds);
            rounds.iter().map(of).collect()
        };
        let (hooks, sleep) = (Some(Step::Hooks), Some(Step::Sleep));
        assert_eq!(
            turns(1),
            [None, None, hooks, hooks, hooks, hooks, sleep, sleep, sleep]
        );
        assert_eq!(
            turns(0),
            [None, None, None, None, hooks, hooks, hooks, hooks, sleep]
        );
        assert!(turns(2).iter().all(Option::is_none), "within its guarantee");
        assert!(turns(7).iter().all(Option::is_none), "no such process");
    }

    /// A step begins only in a round in which the waiting request wakes processes.
    #[test]
    #[ignore = "slow: `.ci/run` runs it"]
    fn each_step_begins_in_a_round_that_wakes() {
        use crate::ledger::waiting::wakes;
        let offers: Vec<Offer> = (0..128).map(|it| offer(it, 1)).collect();
        let last = FIRST_TURN + TURN * 256;
        let mut begun = 0;
        for me in 0..offers.len() {
            for round in 1..=last {
                let [before, now] = [round - 1, round].map(|it| turn(offers.clone(), me, it));
                assert!(before == now || wakes(round), "{me} in round {round}");
                begun += u32::from(before != now);
            }
        }
        assert_eq!(begun, 2 * 128, "two steps each");
        assert!(wakes(1), "all give from the first round on");
    }

    /// A pool whose hook gives nothing.
    #[derive(Default)]
    struct Asked(Arc<AtomicUsize>);

    impl Giver for Asked {
        fn idle(&self) -> u64 {
            0
        }

        fn give_back(&self, _: u64) {}

        fn read_driver_memory(&self) {}

        fn give_unneeded(&self) {}

        fn leave_idle_to_others(&self, _: bool) {}

        fn next_hook(&self, _: u64, wanted_by: &str, asked: &[u64]) -> Option<(u64, Hook)> {
            assert_eq!(wanted_by, "test");
            let calls = Arc::clone(&self.0);
            let hook = move || {
                calls.fetch_add(1, Ordering::SeqCst);
            };
            asked.is_empty().then(|| (0, Box::new(hook) as Hook))
        }

        fn report(&self) -> PoolReport {
            PoolReport::default()
        }

        fn change(&self, _: &str, _: Change) -> Option<Result<u64, String>> {
            None
        }
    }

    // I-127
    #[test]
    fn hooks_are_called_again_each_second_while_a_request_waits() {
        let (_dir, [one, other]) = members(100 * G);
        one.grant(100 * G, 0, Purpose::New, None).unwrap();
        let asked = Arc::new(Asked::default());
        let giver: Arc<dyn Giver> = asked.clone();
        one.givers().attach(Arc::downgrade(&giver));
        stop_time();
        let (mut appeals, commands) = (Appeals::default(), Arc::default());
        let mut waiting = Some(other.wait(other.line_up(), 10 * G, None));
        // In each round the request shows a sign of life, and functions that are called end.
        let mut calls_after = |rounds: u32, waits: bool| {
            waiting.take_if(|_| !waits);
            for _ in 0..rounds {
                clock::sleep(ROUND);
                waiting.iter_mut().for_each(|it| it.renew(10 * G));
                let offers = Offer::all(one.file().layout()).collect();
                appeals.begin(&one, &commands, offers, &Unmet::of(&one));
                while appeals.at_work.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
            }
            asked.0.load(Ordering::SeqCst)
        };
        assert_eq!([calls_after(1, true), calls_after(1, true)], [0, 1]);
        // Meanwhile it is the turn of sleep, which this process does not allow.
        assert_eq!(calls_after(11, true), 1);
        for calls in 2..=3 {
            assert_eq!(calls_after(199, true), calls - 1);
            assert_eq!(calls_after(1, true), calls);
            assert_eq!(calls_after(1, true), calls);
        }
        assert_eq!(calls_after(400, false), 3, "the request is withdrawn");
        probe::set(None);
    }

    // I-140
    #[test]
    fn newer_requests_do_not_keep_a_process_from_the_turn_of_sleep() {
        stop_time();
        let mut appeals = Appeals::default();
        // Functions take so long that a newer request has come when they end.
        let mut next = |newest, own| {
            let unmet = Unmet {
                newest,
                own,
                ..Unmet::default()
            };
            appeals.next_step(Step::Sleep, &unmet)
        };
        let steps = [1, 2, 3, 4, 4, 4, 4].map(|newest| next(newest, 0));
        let (hooks, sleep) = (Some(Step::Hooks), Some(Step::Sleep));
        assert_eq!(steps, [hooks, sleep, hooks, sleep, hooks, sleep, None]);
        // A request of the process itself puts none to sleep.
        assert_eq!([next(4, 5), next(4, 5), next(0, 8)], [hooks, None, hooks]);
        // One that another process had before, and that waits again, has its hooks first too.
        assert_eq!([next(7, 8), next(7, 8), next(7, 8)], [hooks, sleep, None]);
        probe::set(None);
    }

    #[test]
    fn the_lowest_priority_sleeps_first_and_guarantees_are_kept() {
        let tenant = |name: &str, priority, committed, guarantee| TenantReport {
            name: name.to_owned(),
            priority,
            guarantee,
            committed,
            in_use: committed,
            ..TenantReport::default()
        };
        let mut unused = tenant("unused", 0, 50, 0);
        unused.in_use = 0;
        let pool = |tenants| PoolReport {
            tenants,
            ..PoolReport::default()
        };
        let pools = [
            pool(vec![tenant("high", 5, 90, 0), tenant("small", 0, 10, 0)]),
            pool(vec![
                tenant("large", 0, 40, 10),
                tenant("kept", 0, 9, 9),
                unused,
            ]),
        ];
        assert_eq!(sleepers(&pools), ["large", "small", "high"]);
    }
}
