//! The ledger's thread in each process: it frees the slots of dead processes, gives memory back
//! when another process waits for it, and refunds what an idle process does not need.
//!
//! It never waits for memory, so two processes that wait for each other both go on giving.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::charge::Count;
use super::dead;
use super::file::LedgerFile;
use super::givers::{Offer, share};
use super::member::Member;
use crate::error::LedgerError;

/// How often the thread looks at the ledger unless it is woken.
const PASS: Duration = Duration::from_secs(1);

/// How often it looks while a process waits for memory or a slot is dying.
const QUICK_PASS: Duration = Duration::from_millis(5);

struct Keeper {
    file: Arc<LedgerFile>,
    member: Weak<Member>,
    /// When the last pass was that refunded idle memory, and the count of that time.
    idle_since: (Instant, Option<u64>),
}

/// Starts the thread of a member. It ends when the member is dropped.
pub(super) fn start(member: &Arc<Member>) -> Result<(), LedgerError> {
    let keeper = Keeper {
        file: Arc::clone(member.file()),
        member: Arc::downgrade(member),
        idle_since: (Instant::now(), None),
    };
    let started = std::thread::Builder::new()
        .name("cuvmm-ledger".into())
        .spawn(move || keeper.run());
    started.map(drop).map_err(|error| LedgerError::Thread {
        errno: Errno::from_io_error(&error).unwrap_or(Errno::AGAIN),
    })
}

impl Keeper {
    fn run(mut self) {
        let file = Arc::clone(&self.file);
        let bell = &file.layout().header.wanted;
        loop {
            let rung = bell.count();
            let Some(member) = self.member.upgrade() else {
                return;
            };
            let again = self.pass(&member);
            // If this was the last handle, the process leaves the ledger here.
            drop(member);
            bell.wait(rung, again);
        }
    }

    /// Does what there is to do; returns when to look again.
    fn pass(&mut self, member: &Member) -> Duration {
        member.slot().beat.add(1);
        let dying = dead::collect(&self.file, Some(member.index()), &mut member.seen());
        let (need, all_give) = self.unmet(member);
        if need > 0 {
            give(member, need, all_give);
        }
        let (since, count) = &mut self.idle_since;
        if since.elapsed() >= PASS {
            *since = Instant::now();
            let grants = member.grants();
            if *count == Some(grants) {
                member.givers().each(|giver| giver.give_unneeded());
                member.trim(0);
            }
            *count = Some(grants);
            publish_idle(member);
        }
        match dying || need > 0 {
            true => QUICK_PASS,
            false => PASS,
        }
    }

    /// Returns the granules that older requests of other processes, and those of this one if it has
    /// several pools, lack beyond what is left, and whether they have asked before.
    fn unmet(&self, member: &Member) -> (u64, bool) {
        let layout = self.file.layout();
        let own = member.oldest_ticket().unwrap_or(u64::MAX);
        let (mut want, mut again) = (0u64, false);
        let mut seen = member.seen();
        for (index, slot) in layout.slots.iter().enumerate() {
            let is_older = match index == member.index() {
                // Another pool of this process may have idle what one of them waits for.
                true => member.givers().are_several(),
                false => slot.ticket.load() < own,
            };
            if is_older && seen.is_waiting(index, slot) {
                want = want.saturating_add(slot.want.load());
                again |= slot.round.load() > 0;
            }
        }
        let charged = layout
            .charges
            .iter()
            .map(|it| Count::of(it.load()).charged());
        let left = layout.header.limit.load().saturating_sub(charged.sum());
        (want.saturating_sub(left), again)
    }
}

/// Gives back this process's share of `need` granules, or as much of it as there is if the
/// processes whose turn it was have not given it.
fn give(member: &Member, need: u64, all: bool) {
    let layout = member.file().layout();
    publish_idle(member);
    let offer = |(index, slot): (usize, &super::layout::Slot)| {
        let charged = Count::of(layout.charges[index].load()).charged();
        Offer {
            index,
            above: charged.saturating_sub(slot.guarantee.load()),
            priority: slot.priority.load().cast_signed(),
            idle: slot.idle.load(),
        }
    };
    let offers: Vec<Offer> = layout.slots.iter().enumerate().map(offer).collect();
    let mine = match all {
        true => offers
            .get(member.index())
            .map_or(0, |it| it.above.min(need)),
        false => share(offers, member.index(), need),
    };
    // What is charged without need is given first.
    let mut left = mine.saturating_sub(member.trim(0));
    member.givers().each(|giver| {
        if left > 0 {
            let before = member.used();
            giver.give_back(left.saturating_mul(member.granule().bytes()));
            let given = before.saturating_sub(member.used());
            left = left.saturating_sub(given / member.granule().bytes());
        }
    });
    if mine > 0 {
        member.trim(0);
        publish_idle(member);
    }
}

/// Shows other processes what this one could give back.
fn publish_idle(member: &Member) {
    let mut idle = 0u64;
    member
        .givers()
        .each(|giver| idle = idle.saturating_add(giver.idle()));
    let granules = member.granules(idle).saturating_add(member.unneeded());
    member.slot().idle.publish(granules);
}
