//! The lock of a pool: what a thread may do while it holds the lock, and what happens when the lock
//! is released.
//!
//! Every locked section keeps three rules. Code and values of users are called and dropped after
//! the section's end (see [`crate::deferred`]). A forked child never waits for the lock, since a
//! thread that the child does not have may have held it at the fork; the child sees the state of a
//! pool without tenants instead. No page table is changed under the lock: an operation makes such
//! driver calls in [`Locked::unlocked`].
//!
//! An operation that has made such calls is *in flight* until it ends. It owns what it works on:
//! slots that it took [out](super::blocks::slots::tenancy) of their places, physicals that it took from the free
//! list, quotas of memory to be created, and its charges. All else that it read of the state may
//! have changed. Methods of [`State`] and of its halves never release the lock;
//! methods of `Locked` may.
//!
//! Keeps I-41, I-44 and I-109.
//!
//! `unsafe` here: releasing a lock whose guard is a field, and locking it again.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::num::NonZeroU64;
use std::ops::{Deref, DerefMut};
use std::sync::{OnceLock, PoisonError};
use std::time::Duration;

use super::accounts::{Budget, Joined};
use super::blocks::Blocks;
use super::blocks::slots::{Slot, SlotId};
use super::memory::Memory;
use super::state::State;
use super::supply::Room;
use crate::deferred::{self, Quiet, Section};
use crate::device::Device;
use crate::extents::{Urgency, Waker};
use crate::ledger::InLine;
use crate::own::AccessGrant;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, thread};

/// The most slots that one locked section opens or takes for blocks allocated together.
pub(super) const SLOTS_A_SECTION: usize = 1024;

pub(crate) struct Core {
    pub(crate) device: Device,
    /// The access of other devices to all memory of blocks and heaps.
    pub(super) guests: Vec<AccessGrant>,
    pub(super) state: Mutex<State>,
    /// The state of a pool without tenants, for a forked child. Never locked in this process.
    pub(super) after_fork: Mutex<State>,
    /// Notified when memory becomes idle.
    pub(super) freed: Condvar,
    /// The threads and futures that wait for memory.
    pub(super) waiting: AtomicUsize,
    /// Notified when an operation in flight has ended, and when the mapper has placed memory.
    pub(super) settled: Condvar,
    /// Held while a thread queries the driver's free memory and then creates memory.
    pub(super) creating: Mutex<()>,
    /// Free bytes that operations are about to create: the sum of their [`Room`].
    pub(super) claimed: AtomicU64,
    /// Does, at the end of an operation, work put off until slots are in their places. It uses
    /// modules that use this module, so the pool's builder passes it.
    finish: fn(&mut Locked<'_>),
    pub(super) waker: OnceLock<Waker>,
    pub(super) ledger: OnceLock<Joined>,
}

/// The lock on a pool's state. A drop ends the operation: it releases the lock, ends the section,
/// and then runs deferred user code.
pub(crate) struct Locked<'a> {
    /// Always set, except while [`Self::unlocked`] runs.
    state: ManuallyDrop<MutexGuard<'a, State>>,
    flight: Option<NonZeroU64>,
    core: &'a Core,
    /// The place of a waiting operation's request in the line of a ledger.
    pub(super) place: Option<InLine>,
    /// The bytes that the operation may create without asking how much is free.
    pub(super) room: Room<'a>,
    /// `true` if the operation has to zero memory that was used before, and its own too.
    pub(super) zeroes: bool,
    /// The flights of the operation's attempt that have ended.
    pub(super) own_ended: u64,
    /// The bytes of the operation that the driver refused to take back.
    pub(super) refused: u64,
    section: Section,
}

impl Core {
    pub(crate) fn new(
        device: Device,
        guests: Vec<AccessGrant>,
        state: State,
        finish: fn(&mut Locked<'_>),
    ) -> Self {
        let budget = Budget::new(state.memory.budget.totals().limits);
        let memory = Memory::new(device.clone(), state.memory.policy, budget);
        let after_fork = State::new(memory, Blocks::new(device.granule(), None));
        Self {
            device,
            guests,
            state: Mutex::new(state),
            after_fork: Mutex::new(after_fork),
            freed: Condvar::new(),
            waiting: AtomicUsize::new(0),
            settled: Condvar::new(),
            creating: Mutex::new(()),
            claimed: AtomicU64::new(0),
            finish,
            waker: OnceLock::new(),
            ledger: OnceLock::new(),
        }
    }

    /// Locks the state. Poisoning is ignored: after a panic the counters are right for the work
    /// that was done before it.
    #[inline]
    pub(crate) fn lock(&self) -> Locked<'_> {
        Locked {
            state: ManuallyDrop::new(self.guard()),
            flight: None,
            core: self,
            place: None,
            room: Room::new(&self.claimed, 0),
            zeroes: false,
            own_ended: 0,
            refused: 0,
            section: Section::enter(),
        }
    }

    #[inline]
    fn guard(&self) -> MutexGuard<'_, State> {
        let state = match self.device.is_forked() {
            false => &self.state,
            true => &self.after_fork,
        };
        state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the state. Work that was put off is left to the next operation, so a look makes no
    /// driver call that changes anything.
    pub(super) fn look<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        let section = Section::enter();
        let mut state = self.guard();
        let seen = look(&mut state);
        audit(&mut state);
        drop(state);
        drop(section);
        seen
    }

    /// Makes waiting requests try again because memory became idle.
    pub(super) fn announce(&self) {
        self.tell(1);
    }

    /// Wakes the waiting threads and, for futures, the mapper, unless this is the mapper's thread,
    /// which serves the queue next. `freed_count` is 0 if an operation has ended whose slots were
    /// out and may have idle memory now.
    fn tell(&self, freed_count: u64) {
        if !self.is_awaited() || Quiet::is_here::<Self>(self) {
            return;
        }
        let here = thread::current().id();
        let mapper = self.waker.get().filter(|mapper| mapper.thread() != here);
        // Under the lock, so that a thread that has just looked cannot begin to wait after the
        // notification. A look is no operation: this thread may be unwinding, and must not do work
        // that others put off.
        let (mapper, others_lack) = self.look(|state| {
            let serves = state.memory.line.announce(freed_count, mapper.is_some());
            (mapper.filter(|_| serves), state.memory.line.others_lack())
        });
        self.freed.notify_all();
        if let Some(joined) = self.ledger.get() {
            if joined.awaiting.load(Ordering::SeqCst) > 0 {
                joined.member.wake_waiting();
            }
            if freed_count > 0 && others_lack {
                joined.member.wake_keeper();
            }
        }
        if let Some(mapper) = mapper {
            mapper.wake(Urgency::Now);
        }
    }

    /// Returns the devices that have access to the memory of blocks, the pool's own first.
    pub(crate) fn users(&self) -> impl Iterator<Item = &Device> {
        let guests = self.guests.iter().filter_map(AccessGrant::named);
        std::iter::once(&self.device).chain(guests)
    }

    /// Returns `true` if the pool has a mapper that runs. Takes no lock.
    pub(crate) fn has_mapper(&self) -> bool {
        self.waker.get().is_some_and(|waker| !waker.is_dead())
    }

    /// Returns `true` if a request waits for memory. A beginning wait counts itself first, then
    /// sweeps the stream caches and tries once more.
    pub(crate) fn is_awaited(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Releases the lock, and wakes the mapper if an operation called it.
    pub(super) fn unlock(mut state: Locked<'_>) {
        let waker = state.blocks.take_urgency();
        drop(state);
        waker.inspect(|(waker, urgency)| waker.wake(*urgency));
    }

    /// Locks the state once no operation has the slot out.
    pub(super) fn lock_with(&self, id: SlotId) -> Locked<'_> {
        let mut state = self.lock();
        while state.is_out(id) {
            state = state.wait(&self.settled, None);
        }
        state
    }

    /// Waits until no operation has any of the slots out, and until the mapper has placed memory
    /// that it is placing and that the slots need. `wanted` has the bytes that each slot is to
    /// have. The caller must have no slot out.
    pub(super) fn await_slots<'a>(
        &'a self,
        mut state: Locked<'a>,
        wanted: impl Iterator<Item = (SlotId, u64)> + Clone,
    ) -> Locked<'a> {
        let waits = |state: &State| {
            let mut wanted = wanted.clone();
            wanted.any(|(id, size)| state.is_out(id) || state.blocks.waits_for_mapper(id, size))
        };
        while waits(&state) {
            state = state.wait(&self.settled, None);
        }
        state
    }

    /// Waits until neither an operation nor the mapper works on the slot.
    pub(super) fn await_slot<'a>(&'a self, state: Locked<'a>, id: SlotId) -> Locked<'a> {
        self.await_slots(state, std::iter::once((id, u64::MAX)))
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.lock().memory.gate.is_capturing()
    }
}

impl<'a> Locked<'a> {
    pub(super) const fn core(&self) -> &'a Core {
        self.core
    }

    /// Returns the number under which the operation takes slots out, and puts it in flight.
    pub(super) fn flight(&mut self) -> NonZeroU64 {
        if let Some(flight) = self.flight {
            return flight;
        }
        let flight = self.state.memory.gate.begin();
        self.flight = Some(flight);
        flight
    }

    /// Takes a slot out, works on it, and puts it back: `work` may release the lock. Returns `None`
    /// if there is no such slot, or if another operation has it.
    pub(super) fn with_slot_out<T>(
        &mut self,
        id: SlotId,
        work: impl FnOnce(&mut Self, &mut Slot) -> T,
    ) -> Option<T> {
        // A panic in the work drops no slot: its addresses, and what may be mapped there, stay with
        // the process.
        let mut slot = ManuallyDrop::new(self.take_out(id)?);
        let done = work(self, &mut slot);
        self.state.blocks.put_slot(ManuallyDrop::into_inner(slot));
        Some(done)
    }

    /// [Takes a slot out](Slots::take_out) for the operation.
    pub(super) fn take_out(&mut self, id: SlotId) -> Option<Box<Slot>> {
        let flight = self.flight();
        self.state.blocks.slots.take_out(id, flight)
    }

    /// Returns `true` if another operation is in flight, or the mapper places memory: that memory
    /// can be had when it ends.
    pub(super) fn others_in_flight(&self) -> bool {
        self.state.memory.gate.has_others(self.flight)
    }

    /// Ends the operation, and waits until one in flight has ended, unless one has since their
    /// [count](super::gate::Gate::ended) was `ended`.
    pub(super) fn wait_for_end(self, ended: u64) -> Self {
        match self.state.memory.gate.ended() == ended {
            true => {
                let core = self.core;
                self.wait(&core.settled, None)
            }
            false => self,
        }
    }

    /// Lets other threads have the lock after each 1,024 slots of an operation; `count` is their
    /// number so far.
    pub(super) fn end_section(&mut self, count: usize) {
        if count > 0 && count.is_multiple_of(SLOTS_A_SECTION) {
            self.unlocked(thread::yield_now);
        }
    }

    /// Releases the lock while `run` runs, for driver calls and for waiting for the GPU.
    pub(super) fn unlocked<T>(&mut self, run: impl FnOnce() -> T) -> T {
        /// Locks again, also if `run` panics.
        struct Again<'b, 'a>(&'b mut Locked<'a>);

        impl Drop for Again<'_, '_> {
            fn drop(&mut self) {
                self.0.state = ManuallyDrop::new(self.0.core.guard());
            }
        }

        self.flight();
        audit(self);
        let _unlocked = self.section.unlocked();
        // SAFETY: `_again` puts another guard in its place before `self` can be used or dropped.
        unsafe { ManuallyDrop::drop(&mut self.state) };
        let _again = Again(self);
        run()
    }

    /// Ends the operation, and releases the lock until `told` is notified, for at most `longest`.
    /// May return sooner.
    pub(super) fn wait(self, told: &Condvar, longest: Option<Duration>) -> Self {
        self.wait_by(|state| match longest {
            Some(longest) => {
                let waited = told.wait_timeout(state, longest);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => told.wait(state).unwrap_or_else(PoisonError::into_inner),
        })
    }

    /// Ends the operation, and releases the lock while `wait` waits. May return without having
    /// called it.
    pub(super) fn wait_unlocked(self, wait: impl FnOnce()) -> Self {
        let core = self.core;
        self.wait_by(|state| {
            drop(state);
            wait();
            core.guard()
        })
    }

    /// Ends the operation, and lets `wait` release the lock and take it again.
    fn wait_by(
        mut self,
        wait: impl FnOnce(MutexGuard<'a, State>) -> MutexGuard<'a, State>,
    ) -> Self {
        let (core, place) = (self.core, self.place);
        if self.land() {
            core.settled.notify_all();
        }
        audit(&mut self);
        if deferred::has_deferred_work() {
            // Threads that wait for memory may be waiting for the deferred work.
            drop(self);
            let mut locked = core.lock();
            locked.place = place;
            return locked;
        }
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, and not used after its fields are taken.
        let (state, section, room) = unsafe {
            let state = ManuallyDrop::take(&mut this.state);
            let section = std::ptr::read(&raw const this.section);
            (state, section, std::ptr::read(&raw const this.room))
        };
        // The operation has ended.
        drop(room);
        Self {
            state: ManuallyDrop::new(wait(state)),
            flight: None,
            core,
            place,
            room: Room::new(&core.claimed, 0),
            zeroes: false,
            own_ended: 0,
            refused: 0,
            section,
        }
    }

    /// Ends an operation that was in flight or finds work that was put off: does that work,
    /// releases the lock, and notifies waiting threads.
    ///
    /// # Safety
    /// `self` is being dropped: the state is not used again.
    #[cold]
    unsafe fn end(&mut self) {
        /// Releases the lock, also if the driver panics in work that was put off. The next operation
        /// then does the rest of the work.
        struct Ending<'b, 'a>(&'b mut Locked<'a>, bool);

        impl Drop for Ending<'_, '_> {
            fn drop(&mut self) {
                let Self(ending, is_done) = self;
                if !*is_done {
                    (ending.memory.has_deferred, ending.blocks.has_deferred) = (true, true);
                }
                // SAFETY: the lock is being dropped, and is not used after this.
                unsafe { ending.land_and_unlock() };
            }
        }

        let mut ending = Ending(self, true);
        if ending.0.state.has_deferred() && !std::thread::panicking() {
            ending.1 = false;
            (ending.0.core.finish)(ending.0);
            ending.1 = true;
        }
    }

    /// Ends the flight, releases the lock and notifies waiting threads.
    ///
    /// # Safety
    /// `self` is being dropped: the state is not used again.
    unsafe fn land_and_unlock(&mut self) {
        self.land();
        // SAFETY: the guard is there, and by the caller's promise it is not used after this call.
        let mut state = unsafe { ManuallyDrop::take(&mut self.state) };
        audit(&mut state);
        let waker = state.blocks.take_urgency();
        drop(state);
        self.core.settled.notify_all();
        self.core.tell(0);
        waker.inspect(|(waker, urgency)| waker.wake(*urgency));
    }

    /// Ends the flight; returns `false` if there was none.
    fn land(&mut self) -> bool {
        let Some(flight) = self.flight.take() else {
            return false;
        };
        self.state.memory.gate.end(flight);
        Quiet::note_ended::<Core>(self.core);
        self.state.blocks.end_flight(flight);
        true
    }
}

/// Checks in debug builds that the state is consistent before the lock is released.
#[inline]
fn audit(state: &mut State) {
    #[cfg(debug_assertions)]
    state.audit();
    #[cfg(not(debug_assertions))]
    let _ = state;
}

impl Drop for Locked<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.flight.is_some() || self.state.has_deferred() {
            // SAFETY: this is the drop.
            return unsafe { self.end() };
        }
        /// Releases the lock, also if the audit panics.
        struct LetGo<'b, 'a>(&'b mut Locked<'a>);

        impl Drop for LetGo<'_, '_> {
            #[inline]
            fn drop(&mut self) {
                // SAFETY: the guard is there, and is not used after this: its owner is being
                // dropped.
                unsafe { ManuallyDrop::drop(&mut self.0.state) };
            }
        }

        let going = LetGo(self);
        audit(going.0);
    }
}

impl Deref for Locked<'_> {
    type Target = State;

    #[inline]
    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}
