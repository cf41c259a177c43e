//! The ledger's thread in each process. It frees the slots of dead processes, refunds memory that
//! no importer has any more, releases memory when another process waits for it, and refunds what an
//! idle process does not need.
//!
//! The thread never waits for memory, so two processes that wait for each other both go on
//! releasing.

use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::appeal::Appeals;
use super::clock;
use super::control::Commands;
use super::dead;
use super::file::LedgerFile;
use super::givers::{Offer, share};
use super::member::Member;
use super::stall::Averages;
use super::turns::Unmet;
use super::word::Word;
use crate::error::LedgerError;
use crate::sync::Mutex;
use crate::sync::atomic::Ordering;

const PASS: Duration = Duration::from_secs(1);

/// The longest pause while a slot is dying, or a request of this process waits: a dead process may
/// have had the memory.
const QUICK_PASS: Duration = Duration::from_millis(5);

/// The longest pause while a process waits for memory.
const LONGEST_NAP: Duration = Duration::from_millis(20);

/// The first pause after a request has begun to wait, or the process has freed memory while a
/// request waits. It doubles up to [`LONGEST_NAP`], because the GPU often uses freed memory for a
/// moment longer. A request that goes on waiting wakes the thread too, but does not shorten the
/// pause, which would cost all members processor time.
const FIRST_PASS: Duration = Duration::from_micros(100);

pub(super) struct Keeper {
    file: Arc<LedgerFile>,
    member: Weak<Member>,
    /// Held while this thread has a handle of the member.
    passing: Arc<Mutex<()>>,
    commands: Arc<Commands>,
    appeals: Appeals,
    /// When the last pass refunded idle memory, and the count of grants then.
    idle_since: (Instant, Option<u64>),
    nap: Duration,
    /// The newest request of another process at the last pass.
    newest: u64,
    averages: [Averages; 2],
}

/// Starts the thread of a member, which ends when the member is dropped.
pub(super) fn start(member: &Arc<Member>, commands: &Arc<Commands>) -> Result<(), LedgerError> {
    let keeper = Keeper {
        file: Arc::clone(member.file()),
        member: Arc::downgrade(member),
        passing: Arc::clone(&member.passing),
        commands: Arc::clone(commands),
        appeals: Appeals::default(),
        idle_since: (clock::now(), None),
        nap: FIRST_PASS,
        newest: 0,
        averages: Default::default(),
    };
    let started = std::thread::Builder::new()
        .name("cuvmm-ledger".into())
        .spawn(move || keeper.run());
    let thread = started.map_err(|error| {
        LedgerError::Thread(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
    })?;
    member.keeper.get_or_init(|| thread.thread().id());
    Ok(())
}

impl Member {
    pub(crate) fn wake_keeper(&self) {
        self.has_freed.store(true, Ordering::Relaxed);
        self.file().layout().header.wanted.ring();
    }
}

impl Keeper {
    /// Returns a keeper without a thread, which calls no function of the program.
    #[cfg(test)]
    pub(super) fn quiet(member: &Arc<Member>) -> Self {
        Self {
            file: Arc::clone(member.file()),
            member: Weak::new(),
            passing: Arc::default(),
            commands: Arc::default(),
            appeals: Appeals::at_work(),
            idle_since: (clock::now(), None),
            nap: FIRST_PASS,
            newest: 0,
            averages: Default::default(),
        }
    }

    fn run(mut self) {
        let file = Arc::clone(&self.file);
        let bell = &file.layout().header.wanted;
        let passing = Arc::clone(&self.passing);
        loop {
            let rung = bell.count();
            let pass = passing.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(member) = self.member.upgrade().filter(|it| !it.has_left()) else {
                return;
            };
            let again = self.pass(&member);
            // If this was the last handle, the process leaves the ledger here.
            drop(member);
            drop(pass);
            bell.wait(rung, again);
        }
    }

    /// Returns the pause until the next pass.
    pub(super) fn pass(&mut self, member: &Arc<Member>) -> Duration {
        member.slot().beat.add(1);
        member.show_waiting();
        let dying = dead::collect(&self.file, Some(member.index()), &mut member.seen());
        member.settle_lent();
        let unmet = Unmet::of(member);
        let need = unmet.need;
        let has_freed = member.has_freed.swap(false, Ordering::Relaxed);
        if has_freed || std::mem::replace(&mut self.newest, unmet.newest) != unmet.newest {
            self.nap = FIRST_PASS;
        }
        let others_lack = need > 0 && unmet.oldest.is_some();
        member
            .givers()
            .each(|giver| giver.leave_idle_to_others(others_lack));
        let passed = clock::since(self.idle_since.0);
        let is_time = passed >= PASS;
        if need > 0 || is_time {
            member.givers().each(|giver| giver.read_driver_memory());
        }
        if need > 0 {
            let offers = give(member, &unmet);
            self.appeals.begin(member, &self.commands, offers, &unmet);
        }
        let (since, count) = &mut self.idle_since;
        if is_time {
            average(&mut self.averages, passed, member);
            *since = clock::now();
            let grants = member.grants();
            member.foreign_is_less();
            member.look_for_file();
            if *count == Some(grants) {
                member.givers().each(|giver| giver.give_unneeded());
                member.trim(0);
            }
            *count = Some(grants);
            publish_idle(member);
        }
        let nap = match need > 0 {
            true => {
                let next = (2 * self.nap).min(LONGEST_NAP);
                std::mem::replace(&mut self.nap, next)
            }
            false => PASS,
        };
        match dying || member.oldest_ticket().is_some() {
            true => nap.min(QUICK_PASS),
            false => nap,
        }
    }
}

/// Releases this process's share of what others lack, or all that it can if the processes whose
/// turn it was have not released enough. Returns each process's offer from before.
fn give(member: &Member, unmet: &Unmet) -> Vec<Offer> {
    let need = unmet.need;
    let _giving = member.giving();
    let layout = member.file().layout();
    publish_idle(member);
    let offers: Vec<Offer> = Offer::all(layout).collect();
    let mine = match unmet.rounds > 0 {
        true => offers
            .iter()
            .find(|offer| offer.index == member.index())
            .map_or(0, |it| it.above.min(need)),
        false => share(offers.clone(), member.index(), need),
    };
    let begun = clock::now();
    // Unneeded charge is refunded first.
    let mut given = member.trim(0);
    let mut left = mine.saturating_sub(given);
    member.givers().each(|giver| {
        if left > 0 {
            let before = member.used();
            giver.give_back(left.saturating_mul(member.granule().bytes()));
            let gave = before.saturating_sub(member.used()) / member.granule().bytes();
            left = left.saturating_sub(gave);
            given = given.saturating_add(gave);
        }
    });
    if mine > 0 {
        member.trim(0);
        publish_idle(member);
    }
    if given > 0 {
        member.note_given(given, clock::since(begun));
    }
    offers
}

/// Publishes the shares of the time in which requests waited lately.
fn average([own, all]: &mut [Averages; 2], passed: Duration, member: &Member) {
    let (slot, header) = (member.slot(), &member.file().layout().header);
    let totals = [&slot.stalled, &slot.stalled_full].map(Word::load);
    let own = own.add(passed, totals);
    let totals = [&header.stalled, &header.stalled_full].map(Word::load);
    let all = all.add(passed, totals);
    let words = slot.averages.iter().chain(&slot.ledger_averages);
    for (word, value) in words.zip(own.into_iter().chain(all)) {
        word.publish(value);
    }
    slot.averaged.add(1);
}

fn publish_idle(member: &Member) {
    let granules = member.granules(member.idle_bytes());
    member.slot().idle.publish(granules);
}
