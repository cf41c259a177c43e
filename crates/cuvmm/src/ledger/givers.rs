//! The pools of this process that can release memory when another process needs it, and the share
//! of each process.

use std::sync::{PoisonError, Weak};

use super::charge::Count;
use super::control::PoolReport;
use super::layout::Layout;
use crate::sync::thread::{self, ThreadId};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::wanted::Change;

pub(crate) trait Giver: Send + Sync {
    fn idle(&self) -> u64;

    /// Returns about `bytes` to the ledger, without waiting: bytes that the pool does not need,
    /// then memory that it releases to the driver.
    fn give_back(&self, bytes: u64);

    /// Reads and counts what the driver's memory pools hold, which only the driver knows.
    fn read_driver_memory(&self);

    /// Returns unneeded bytes to the ledger, without a driver call.
    fn give_unneeded(&self);

    /// Sets whether new blocks leave idle memory to an older request of another process.
    fn leave_idle_to_others(&self, yes: bool);

    /// Returns the next hook to be called for a process that lacks `bytes`, and the hook's tenant:
    /// the tenant of the lowest priority that holds memory above its guarantee and is not in
    /// `asked`.
    fn next_hook(&self, bytes: u64, wanted_by: &str, asked: &[u64]) -> Option<(u64, Hook)>;

    fn report(&self) -> PoolReport;

    /// Changes a term of the tenant with this name. Returns the bytes that the tenant still holds
    /// beyond a new limit, or the reason of a refusal; `None` if there is no such tenant.
    fn change(&self, tenant: &str, change: Change) -> Option<Result<u64, String>>;
}

pub(crate) type Hook = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(crate) struct Givers {
    state: Mutex<State>,
    /// Notified when a thread of the ledger has returned from a giver.
    done: Condvar,
}

#[derive(Default)]
struct State {
    attached: Vec<(u64, Weak<dyn Giver>)>,
    next: u64,
    /// Givers that are being called, and the calling threads.
    serving: Vec<(u64, ThreadId)>,
    detaching: usize,
}

impl Givers {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the giver's number for [`detach`](Self::detach).
    pub(crate) fn attach(&self, giver: Weak<dyn Giver>) -> u64 {
        let mut state = self.lock();
        let id = state.next;
        state.next += 1;
        state.attached.push((id, giver));
        id
    }

    pub(super) fn are_none(&self) -> bool {
        self.lock().attached.is_empty()
    }

    pub(super) fn are_several(&self) -> bool {
        self.lock().attached.len() > 1
    }

    /// Detaches a giver, and waits until no other thread calls it.
    pub(crate) fn detach(&self, id: u64) {
        let mut state = self.lock();
        state.attached.retain(|&(attached, _)| attached != id);
        let here = thread::current().id();
        state.detaching += 1;
        while state.serving.iter().any(|it| it.0 == id && it.1 != here) {
            state = self
                .done
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state.detaching -= 1;
    }

    /// Calls each giver, on a thread of the ledger and not within a call of a giver.
    pub(super) fn each(&self, mut call: impl FnMut(&dyn Giver)) {
        for id in self.ids() {
            self.with(id, &mut call);
        }
    }

    /// Calls a giver, unless it is detached, on a thread of the ledger and not within a call of a
    /// giver.
    pub(super) fn with<R>(&self, id: u64, call: impl FnOnce(&dyn Giver) -> R) -> Option<R> {
        /// Ends the call of a giver, also if the call panics.
        struct Served<'a>(&'a Givers, (u64, ThreadId));

        impl Drop for Served<'_> {
            fn drop(&mut self) {
                let mut state = self.0.lock();
                state.serving.retain(|it| *it != self.1);
                // Notifying is a system call, and the ledger's thread calls givers all the time.
                if state.detaching > 0 {
                    self.0.done.notify_all();
                }
            }
        }

        let mut state = self.lock();
        let attached = state.attached.iter().find(|(attached, _)| *attached == id);
        let giver = attached?.1.upgrade()?;
        let call_of = (id, thread::current().id());
        state.serving.push(call_of);
        drop(state);
        let _served = Served(self, call_of);
        let result = call(&*giver);
        // This may be the pool's last owner: the pool is dropped before `detach` learns that the
        // call has ended.
        drop(giver);
        Some(result)
    }

    /// In the order of attachment.
    pub(super) fn ids(&self) -> Vec<u64> {
        self.lock().attached.iter().map(|&(id, _)| id).collect()
    }
}

impl std::fmt::Debug for Givers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Givers").finish_non_exhaustive()
    }
}

/// A process that could release memory. Sizes in granules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) index: usize,
    /// The charge above the guarantee.
    pub(super) above: u64,
    pub(super) priority: i64,
    /// The memory that it could release without waiting, as it last found: the part above the
    /// guarantee.
    pub(super) idle: u64,
}

impl Offer {
    /// Returns the offer of the process of a slot, if it is charged.
    pub(super) fn of(layout: &Layout, index: usize) -> Option<Self> {
        // The charges lie together, and each slot has cache lines of its own: while a request waits,
        // all members read offers again and again.
        let charged = Count::of(layout.charges.get(index)?.load()).charged();
        let slot = layout.slots.get(index).filter(|_| charged > 0)?;
        let above = charged.saturating_sub(slot.guarantee.load());
        Some(Self {
            index,
            above,
            priority: slot.priority.load().cast_signed(),
            idle: slot.idle.load().min(above),
        })
    }

    /// Returns the offers of all processes.
    pub(super) fn all(layout: &Layout) -> impl Iterator<Item = Self> {
        (0..layout.charges.len()).filter_map(|index| Self::of(layout, index))
    }

    /// Returns the key of the order in which processes release: first the process furthest above
    /// its guarantee, then the lower priority.
    pub(super) const fn order(&self) -> (std::cmp::Reverse<u64>, i64, usize) {
        (std::cmp::Reverse(self.above), self.priority, self.index)
    }
}

/// Returns the part of `need` that the process of slot `me` releases. All processes compute one
/// [order](Offer::order), and none releases below its guarantee.
pub(super) fn share(mut offers: Vec<Offer>, me: usize, need: u64) -> u64 {
    offers.sort_by_key(Offer::order);
    let mut left = need;
    for offer in offers {
        let gives = offer.idle.min(offer.above).min(left);
        if offer.index == me {
            return gives;
        }
        left -= gives;
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(index: usize, above: u64, priority: i64, idle: u64) -> Offer {
        Offer {
            index,
            above,
            priority,
            idle,
        }
    }

    fn shares(offers: &[Offer], need: u64) -> Vec<u64> {
        let of = |offer: &Offer| share(offers.to_vec(), offer.index, need);
        offers.iter().map(of).collect()
    }

    #[test]
    fn the_process_furthest_above_its_guarantee_gives_first() {
        let offers = [offer(0, 10, 0, 10), offer(1, 30, 9, 20), offer(2, 5, 0, 5)];
        assert_eq!(shares(&offers, 15), [0, 15, 0]);
        assert_eq!(shares(&offers, 25), [5, 20, 0]);
        assert_eq!(shares(&offers, 100), [10, 20, 5]);
        assert_eq!(share(offers.to_vec(), 7, 100), 0);
    }

    #[test]
    fn at_the_same_distance_the_lower_priority_gives_first() {
        let offers = [
            offer(0, 10, 1, 10),
            offer(1, 10, -1, 10),
            offer(2, 10, -1, 10),
        ];
        assert_eq!(shares(&offers, 15), [0, 10, 5]);
    }

    #[test]
    fn no_process_gives_below_its_guarantee() {
        assert_eq!(shares(&[offer(0, 3, 0, 10)], 100), [3]);
        assert_eq!(shares(&[offer(0, 0, 0, 10)], 100), [0]);
    }
}
