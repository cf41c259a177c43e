//! The machine: the rules behind a lock, and what tests can do to it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cuvmm_sys::{SYMBOLS, Symbol};

use super::answer::{Answer, INVALID_VALUE};
use super::backing::Backing;
use super::hazards::Hazard;
use super::options::Rules;
use super::picture::{Live, Snapshot};
use super::spite::{Spite, Spiting};
use super::state::State;
use super::stream_table::Mark;
use super::work::{Use, Work};
use crate::error::Result;
use crate::{
    CUresult, Call, CudaVersion, DeviceAddress, DriverError, Location, LocationKind, Ordinal,
    StreamHandle,
};

/// A driver that is not there: the rules of the real one over something else behind the
/// addresses. [`ModelDriver`](super::ModelDriver) and [`HostDriver`](crate::host::HostDriver)
/// are two of them.
///
/// Beside [`Driver`](crate::Driver) it has methods for tests: hold streams back and let them go,
/// queue work that touches memory only when it runs, lose a context, look at the clock, count
/// what is alive, and take a picture of the page tables.
///
/// # Work
/// Work runs in the call that submits it. On a stream that is held back it queues instead, and so
/// does work that waits for it: queries answer "not done", synchronising calls block until
/// another thread lets the stream go. Queued work finds its memory when it runs, so a write that
/// comes late lands in whatever is mapped at its address by then. If nothing is, or the device
/// has no right there, the context is lost as on a GPU: launches, copies, fills, queries and
/// synchronisations answer `ILLEGAL_ADDRESS` from then on, while the virtual-memory calls go on.
///
/// # Hazards
/// A GPU may run queued work at any moment; here it runs only when it is let go, and memory that
/// was swapped at its addresses before that would go unseen. So each call that unmaps, lowers
/// access or frees while queued work names the range notes a [`Hazard`]. The answers stay those of
/// a GPU. A test fixture looks at [`hazards`](Self::hazards) when it ends.
pub struct Machine<B> {
    state: Mutex<State<B>>,
    /// Told whenever queued work was done or given up.
    progress: Condvar,
    /// Calls whose symbol came after the version that is answered.
    missing: HashMap<Call, (&'static str, CudaVersion)>,
    pub(super) version: CudaVersion,
}

impl<B: Backing> Machine<B> {
    pub(crate) fn build(rules: Rules, backing: B) -> Self {
        Self {
            version: rules.version,
            missing: missing(rules.version),
            state: Mutex::new(State::new(rules, backing)),
            progress: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        // No state is left half-changed by a panic that this crate could cause; and a driver that
        // refuses to answer helps nobody find the one that the caller caused.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the rules and puts the call's name on what they answer.
    pub(super) fn ask<T>(
        &self,
        call: Call,
        question: impl FnOnce(&mut State<B>) -> Answer<T>,
    ) -> Result<T> {
        self.present(call)?;
        let answered = |state: &mut State<B>| {
            let cost = state.rules.costs.of_call(call);
            state.clock.spend(cost);
            state.let_arrive(call);
            if let Some(code) = state.spited(call) {
                return Err(code);
            }
            let answer = question(state);
            answer.map_err(|code| state.refusal(call, code))
        };
        self.with(|state| state.spending(call, answered))
            .map_err(|code| DriverError::new(call, code))
    }

    /// As [`ask`](Self::ask), for calls that then wait for work and finish something after it.
    pub(super) fn ask_and_wait(
        &self,
        call: Call,
        device: Ordinal,
        question: impl FnOnce(&mut State<B>) -> Answer<Vec<Mark>>,
        after: impl FnOnce(&mut State<B>) -> Answer,
    ) -> Result<()> {
        let marks = self.ask(call, question)?;
        let named = |code| DriverError::new(call, code);
        let mut state = self.lock();
        if std::thread::panicking() {
            // The test that holds streams back has failed, and will let none go.
            let devices = 0..state.devices.len();
            drop(state);
            devices.for_each(|index| self.let_go_all(Ordinal(index as i32)));
            state = self.lock();
        }
        loop {
            state.context(device).map_err(named)?;
            if state.streams.are_done(&marks) {
                let answer = state.spending(call, after);
                return answer.map_err(|code| named(state.refusal(call, code)));
            }
            if let Some((device, stream)) = state.until_awaited.pop() {
                drop(state);
                self.let_go(device, stream);
                state = self.lock();
                continue;
            }
            state = self
                .progress
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn with<T>(&self, act: impl FnOnce(&mut State<B>) -> T) -> T {
        let mut state = self.lock();
        let outcome = act(&mut state);
        // Something that others waited for may have been done on the way.
        state.run_all();
        if std::mem::take(&mut state.progress) {
            self.progress.notify_all();
        }
        outcome
    }

    fn present(&self, call: Call) -> Result<()> {
        match self.missing.get(&call) {
            Some(&(symbol, since)) => Err(DriverError::MissingSymbol {
                call,
                symbol,
                since,
            }),
            None => Ok(()),
        }
    }

    /// Places other than devices and the host as a whole want the younger symbol of a call.
    pub(super) fn present_for(&self, call: Call, place: Location, younger: &str) -> Result<()> {
        if [LocationKind::DEVICE, LocationKind::HOST].contains(&place.kind) {
            return Ok(());
        }
        let lacking = |symbol: &&Symbol| symbol.name == younger && symbol.since > self.version;
        match SYMBOLS.iter().find(lacking) {
            Some(&Symbol { name, since, .. }) => Err(DriverError::MissingSymbol {
                call,
                symbol: name,
                since,
            }),
            None => Ok(()),
        }
    }

    // --- for tests -----------------------------------------------------------------------

    /// Holds a stream back: what is submitted to it from now on queues up. The null handle is the
    /// default stream. A stream that does not exist is not held.
    ///
    /// A synchronising call lets all streams go if its thread unwinds from a panic, so that a test
    /// which has failed ends.
    pub fn hold(&self, device: Ordinal, stream: StreamHandle) {
        self.set_held(device, stream, true);
    }

    /// Holds a stream back until a thread has to wait for work of any stream. It stands for a kernel
    /// that runs until then.
    pub fn hold_until_awaited(&self, device: Ordinal, stream: StreamHandle) {
        self.hold(device, stream);
        self.with(|state| state.until_awaited.push((device, stream)));
    }

    /// Lets a stream go: what queued up on it runs now, in this call, with whatever waited for it.
    pub fn let_go(&self, device: Ordinal, stream: StreamHandle) {
        self.set_held(device, stream, false);
    }

    fn set_held(&self, device: Ordinal, stream: StreamHandle, held: bool) {
        self.with(|state| {
            if let Ok(key) = state.stream(device, stream) {
                state.streams.hold(key, held);
            }
        });
    }

    /// Holds back every stream of a device, and those that will be made.
    pub fn hold_all(&self, device: Ordinal) {
        self.set_all_held(device, true);
    }

    /// Lets every stream of a device go, also those that were held one by one or have been
    /// destroyed since.
    pub fn let_go_all(&self, device: Ordinal) {
        self.set_all_held(device, false);
    }

    fn set_all_held(&self, device: Ordinal, held: bool) {
        self.with(|state| {
            if let Ok(index) = state.device(device) {
                state.devices[index].hold_new = held;
                state.streams.hold_all(device.0, held);
            }
        });
    }

    /// Runs the next piece of work of a held stream and leaves it held. False when there is none,
    /// or it waits for work of another stream.
    pub fn step(&self, device: Ordinal, stream: StreamHandle) -> bool {
        self.with(|state| {
            state
                .stream(device, stream)
                .is_ok_and(|key| state.step(key))
        })
    }

    /// Launches what stands for a kernel: when it runs, it reads the ranges in `reads` and fills
    /// those in `writes` with a byte each. What it touches is not checked before it runs. Pinned
    /// and managed memory is out of its reach: a program may hold references into it.
    ///
    /// # Errors
    /// The code that lost the context; `INVALID_HANDLE` for a stream that does not exist;
    /// `STREAM_CAPTURE_*`.
    pub fn queue_kernel(
        &self,
        device: Ordinal,
        stream: StreamHandle,
        reads: Vec<(DeviceAddress, u64)>,
        writes: Vec<(DeviceAddress, u64, u8)>,
    ) -> Result<(), CUresult> {
        let reads = reads
            .into_iter()
            .map(|(from, size)| (from.0, size))
            .collect();
        let writes = writes
            .into_iter()
            .map(|(to, size, byte)| (to.0, size, byte))
            .collect();
        self.with(|state| {
            state.context(device)?;
            let cost = state.rules.costs.launch;
            state.clock.spend(cost);
            state.submit(device, stream, Work::Kernel { reads, writes })?;
            Ok(())
        })
    }

    /// Loses a device's context, as an uncorrectable memory error would. Work that is queued on
    /// it never runs.
    pub fn lose_context(&self, device: Ordinal, code: CUresult) {
        self.with(|state| state.lose(device.0, code));
    }

    /// From now on calls fail out of the blue as often as this says; none do without.
    pub fn set_spite(&self, spite: Option<Spite>) {
        self.lock().spiting = spite.map(Spiting::from);
    }

    /// How many calls have failed out of the blue.
    #[must_use]
    pub fn spited(&self) -> u64 {
        self.lock().spited
    }

    /// Takes the hazards noted so far: calls that took memory away while queued work named it. The
    /// first 64 since the last time come with their figures.
    #[must_use]
    pub fn take_hazards(&self) -> Vec<Hazard> {
        self.lock().hazards.take()
    }

    /// How many hazards were noted and not taken.
    #[must_use]
    pub fn hazards(&self) -> u64 {
        self.lock().hazards.count()
    }

    /// The virtual time: what all calls so far would have cost.
    #[must_use]
    pub fn clock(&self) -> Duration {
        self.lock().clock.now()
    }

    /// The part of it that calls of one kind cost, with what they waited for.
    #[must_use]
    pub fn spent(&self, call: Call) -> Duration {
        let state = self.lock();
        state.spent.get(call as usize).copied().unwrap_or_default()
    }

    /// Lets virtual time pass with nothing done.
    pub fn advance(&self, by: Duration) {
        self.lock().clock.advance(by);
    }

    /// Counts what is alive.
    #[must_use]
    pub fn live(&self) -> Live {
        self.with(State::live)
    }

    /// A picture of the page tables and physicals.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.with(State::snapshot)
    }

    /// All the bytes of a range as `device` would read them now, past every queue and whatever
    /// the state of the context.
    ///
    /// # Errors
    /// `INVALID_VALUE` where the device has no right to read, and for pinned and managed memory.
    pub fn peek(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        bytes: &mut [u8],
    ) -> Result<(), CUresult> {
        self.with(|state| {
            let size = bytes.len() as u64;
            let pieces = state.resolve_apart(device.0, address.0, size, Use::Read);
            let mut rest = bytes;
            for piece in pieces.ok_or(INVALID_VALUE)? {
                let (part, behind) = rest.split_at_mut(piece.size as usize);
                state.backing.read(piece.place, part)?;
                rest = behind;
            }
            Ok(())
        })
    }
}

/// The calls that no symbol of this version answers, by the table of symbols.
fn missing(version: CudaVersion) -> HashMap<Call, (&'static str, CudaVersion)> {
    let mut missing = HashMap::new();
    for &call in Call::ALL {
        let name = call.name();
        let serves = |symbol: &str| {
            let rest = symbol.strip_prefix(name);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("_v"))
        };
        let mut served = SYMBOLS.iter().filter(|symbol| serves(symbol.name));
        let oldest = served.next().map(|first| {
            served.fold(first, |oldest, other| {
                if other.since < oldest.since {
                    other
                } else {
                    oldest
                }
            })
        });
        if let Some(oldest) = oldest.filter(|oldest| oldest.since > version) {
            missing.insert(call, (oldest.name, oldest.since));
        }
    }
    missing
}

impl<B: Backing> fmt::Debug for Machine<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(B::KIND.name())
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}
