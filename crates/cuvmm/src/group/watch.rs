//! Which ranks' processes have ended.
//!
//! A process in the same PID namespace is held by a pidfd from the first look on. Any other process
//! counts as running while it has its slot's lock, which the kernel releases when it ends.

use std::collections::BTreeMap;

use super::layout::{GroupFile, is_taken};
use crate::ledger::lock::Lock;
use crate::ledger::proc::{self, Life, Look, Process};

/// The processes of the other ranks, as far as they are held.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// By rank, with the state of the slot.
    held: BTreeMap<usize, (u64, Process)>,
}

impl Watch {
    /// Returns for each of the first ranks whether its slot is taken by a process that has ended.
    /// `own` is left out.
    pub(super) fn ended(
        &mut self,
        file: &GroupFile,
        own: Option<usize>,
        ranks: usize,
    ) -> Vec<bool> {
        let slots = file.layout().slots.iter().take(ranks);
        let states: Vec<u64> = slots.clone().map(|slot| slot.state.load()).collect();
        let mut ended = vec![false; states.len()];
        for (rank, &state) in states.iter().enumerate() {
            if Some(rank) != own && is_taken(state) {
                ended[rank] = self.look(file, rank, state);
            }
        }
        self.held
            .retain(|&rank, (state, _)| states.get(rank) == Some(&*state));
        let held: Vec<&Process> = self.held.values().map(|(_, process)| process).collect();
        let polled = proc::have_ended(&held);
        for (&rank, has_ended) in self.held.keys().zip(polled) {
            ended[rank] |= has_ended;
        }
        // A slot that was freed or taken anew meanwhile is another process's.
        for ((ended, state), slot) in ended.iter_mut().zip(states).zip(slots) {
            *ended &= slot.state.load() == state;
        }
        ended
    }

    /// Looks at a process that is not held. Returns `true` if it has ended.
    fn look(&mut self, file: &GroupFile, rank: usize, state: u64) -> bool {
        if self.held.get(&rank).is_some_and(|held| held.0 == state) {
            return false;
        }
        let slot = &file.layout().slots[rank];
        let words = [&slot.namespace, &slot.pid, &slot.started].map(|word| word.load());
        match proc::look(words[0], words[1], words[2]) {
            Look::Found(process) => {
                self.held.insert(rank, (state, process));
                false
            }
            Look::NotHeld(Life::Runs) => false,
            Look::NotHeld(Life::Ended) => true,
            Look::NotHeld(Life::Unknown) => {
                match Lock::Owner(rank).is_held_elsewhere(file.file()) {
                    Ok(is_held) => !is_held,
                    // A process that may run is waited for until the time is over.
                    Err(errno) => {
                        log!(warn, %errno, "the lock of a group's rank could not be looked at");
                        false
                    }
                }
            }
        }
    }
}
