//! The machine: the rules behind a lock, and controls for tests.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use cuvmm_driver::sys::{SYMBOLS, Symbol};

use super::answer::{Answer, INVALID_VALUE};
use super::backing::Backing;
use super::capture::Recording;
use super::hazards::Hazard;
use super::objects::Object;
use super::options::Rules;
use super::picture::{Live, Snapshot};
use super::shadow::Unwritten;
use super::spite::{RandomFailures, Spiting};
use super::state::State;
use super::stream_table::Mark;
use super::work::{Use, Work};
use cuvmm_driver::Result;
use cuvmm_driver::{
    CUresult, Call, CudaVersion, DeviceAddress, DriverError, Location, LocationKind, MemPoolHandle,
    MemPoolProps, Ordinal, StreamHandle,
};

/// A driver without a GPU: the rules of the real driver over a replacement for device memory.
///
/// [`ModelDriver`](super::ModelDriver) and [`HostDriver`](crate::host::HostDriver) are the two
/// machines.
///
/// Besides [`Driver`](cuvmm_driver::Driver) it has methods for tests: they hold streams back and
/// release them, queue work that accesses memory only when it runs, lose a context, read the clock,
/// count live objects, and take snapshots of the page tables.
///
/// # Work
/// Work runs in the call that submits it. A held stream queues its work instead. Work that waits
/// for queued work or for a function of the program is queued too: queries return "not done", and
/// synchronizing calls block until another thread releases the stream or the function returns.
/// Queued work looks up its memory when it runs, so a late write goes to the memory mapped at its
/// address by then. If nothing is mapped there, or the device has no access, the context is lost as
/// on a GPU: launches, copies, fills, queries and synchronizations return `ILLEGAL_ADDRESS` from
/// then on, while the virtual-memory calls still work.
///
/// # Hazards
/// A GPU may run queued work at any moment. Here it runs only on release, so an earlier change of
/// its memory would go unnoticed. Therefore each call that unmaps, lowers access or frees a range
/// named by queued work records a [`Hazard`]. The results of the calls stay those of a GPU. A test
/// fixture checks [`hazards`](Self::hazards) when it ends.
pub struct Machine<B> {
    state: Mutex<State<B>>,
    /// Notified when queued work was done or discarded.
    progress: Condvar,
    /// Calls whose symbol is newer than the reported version.
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
        // No panic inside this crate leaves the state half-changed, and a driver that stops working
        // after a panic in the caller would hide the cause of that panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn ask<T>(
        &self,
        call: Call,
        question: impl FnOnce(&mut State<B>) -> Answer<T>,
    ) -> Result<T> {
        self.present(call)?;
        let answered = |state: &mut State<B>| {
            let cost = state.rules.costs.of_call(call);
            state.clock.spend(cost);
            state.apply_scheduled(call);
            if let Some(code) = state.with_random_failures(call) {
                return Err(code);
            }
            let answer = question(state);
            answer.map_err(|code| state.refusal(call, code))
        };
        self.with(|state| state.spending(call, answered))
            .map_err(|code| DriverError::new(call, code))
    }

    /// Runs the rules, waits for the work they return, then runs `after`.
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
            // The test that holds streams back has failed and will not release them.
            let devices = 0..state.devices.len();
            drop(state);
            devices.for_each(|index| self.release_all_streams(Ordinal(index as i32)));
            state = self.lock();
        }
        loop {
            state.context(device).map_err(named)?;
            if state.rules.late && !state.streams.are_done(&marks) {
                state.hurry();
                self.progress.notify_all();
                state.context(device).map_err(named)?;
            }
            if state.streams.are_done(&marks) {
                let answer = state.spending(call, after);
                return answer.map_err(|code| named(state.refusal(call, code)));
            }
            if let Some((device, stream)) = state.until_awaited.pop() {
                drop(state);
                self.release_stream(device, stream);
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
        // Work that other streams wait for may have been done meanwhile.
        state.run_all();
        if std::mem::take(&mut state.progress) {
            self.progress.notify_all();
        }
        outcome
    }

    /// Waits until `find` returns a value. Asks again whenever work was done.
    pub(super) fn wait_until<T>(&self, mut find: impl FnMut(&mut State<B>) -> Option<T>) -> T {
        let mut state = self.lock();
        loop {
            let found = find(&mut state);
            if std::mem::take(&mut state.progress) {
                self.progress.notify_all();
            }
            if let Some(found) = found {
                return found;
            }
            state = self
                .progress
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
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

    /// Checks that the version has the symbol `younger` of a call. Locations other than devices and
    /// the host as a whole require it.
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

    /// Holds a stream back: work submitted to it from now on is queued.
    ///
    /// The null handle is the default stream. Does nothing for a stream that does not exist. A
    /// synchronizing call releases all streams if its thread unwinds from a panic, so that a failed
    /// test ends.
    pub fn hold(&self, device: Ordinal, stream: StreamHandle) {
        self.set_held(device, stream, true);
    }

    /// Holds a stream back until a thread waits for work of any stream, like a kernel that runs
    /// until then.
    pub fn hold_until_awaited(&self, device: Ordinal, stream: StreamHandle) {
        self.hold(device, stream);
        self.with(|state| state.until_awaited.push((device, stream)));
    }

    /// Releases a stream: its queued work, and all work that waited for it, runs in this call.
    #[doc(alias = "let_go")]
    pub fn release_stream(&self, device: Ordinal, stream: StreamHandle) {
        self.set_held(device, stream, false);
    }

    fn set_held(&self, device: Ordinal, stream: StreamHandle, held: bool) {
        self.with(|state| {
            if let Ok(key) = state.stream(device, stream) {
                state.streams.hold(key, held);
            }
        });
    }

    /// Holds back every stream of a device, including streams created later.
    pub fn hold_all(&self, device: Ordinal) {
        self.set_all_held(device, true);
    }

    /// Releases every stream of a device, including streams held individually or destroyed since.
    pub fn release_all_streams(&self, device: Ordinal) {
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

    /// Runs the next piece of work of a held stream, which stays held.
    ///
    /// Returns `false` if there is none, or if the work waits for another stream or for a function
    /// of the program.
    pub fn step(&self, device: Ordinal, stream: StreamHandle) -> bool {
        self.with(|state| {
            state
                .stream(device, stream)
                .is_ok_and(|key| state.step(key))
        })
    }

    /// Queues a stand-in for a kernel: when it runs, it reads the ranges in `reads` and fills those
    /// in `writes` with a byte each.
    ///
    /// The ranges are not checked before it runs. Pinned and managed memory is out of reach,
    /// because the program may hold references into it.
    ///
    /// # Errors
    /// Returns the code that lost the context, `INVALID_HANDLE` for a stream that does not exist,
    /// or `STREAM_CAPTURE_*`.
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

    /// Loses a device's context, like an uncorrectable memory error. Work queued in it never runs.
    pub fn lose_context(&self, device: Ordinal, code: CUresult) {
        self.with(|state| state.lose(device.0, code));
    }

    /// Makes calls fail at random from now on, as often as `spite` says; `None` ends that.
    pub fn set_random_failures(&self, spite: Option<RandomFailures>) {
        self.lock().spiting = spite.map(Spiting::from);
    }

    /// Returns the number of calls that have failed at random.
    #[must_use]
    pub fn with_random_failures(&self) -> u64 {
        self.lock().with_random_failures
    }

    /// Takes the recorded hazards: calls that took memory away while queued work named it.
    ///
    /// Returns the first 64 since the last call; later ones are only counted.
    #[must_use]
    pub fn take_hazards(&self) -> Vec<Hazard> {
        self.lock().hazards.take()
    }

    /// Returns the number of recorded hazards that were not taken.
    #[must_use]
    pub fn hazards(&self) -> u64 {
        self.lock().hazards.count()
    }

    /// Takes the reads of bytes that were never written, if the options record them: the first 64
    /// since the last call.
    #[must_use]
    pub fn take_unwritten(&self) -> Vec<Unwritten> {
        self.lock().take_unwritten()
    }

    /// Returns the virtual time: the cost of all calls so far.
    #[must_use]
    pub fn clock(&self) -> Duration {
        self.lock().clock.now()
    }

    /// Returns the virtual time that calls of one kind have cost, including the work they waited
    /// for.
    #[must_use]
    pub fn spent(&self, call: Call) -> Duration {
        let state = self.lock();
        state.spent.get(call as usize).copied().unwrap_or_default()
    }

    /// Advances the virtual time.
    pub fn advance(&self, by: Duration) {
        self.lock().clock.advance(by);
    }

    /// Returns the default memory pool of host or managed memory with these properties, which lives
    /// as long as the driver. `Driver::default_mem_pool` returns a device's default pool.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` before CUDA 13.0, and for a device without memory pools; otherwise those of
    /// `Driver::mem_pool_create`.
    #[doc(alias = "cuMemGetDefaultMemPool")]
    pub fn default_mem_pool_of(&self, props: &MemPoolProps) -> Result<MemPoolHandle> {
        let asked = |state: &mut State<B>| state.default_mem_pool_of(props);
        self.ask(Call::DeviceGetDefaultMemPool, asked)
    }

    /// Returns what a stream records for, or `None` if it does not capture.
    ///
    /// # Errors
    /// Returns the code that lost the context, or `INVALID_HANDLE` for a stream that does not exist.
    #[doc(alias = "cuStreamGetCaptureInfo")]
    pub fn recording(
        &self,
        device: Ordinal,
        stream: StreamHandle,
    ) -> std::result::Result<Option<Recording>, CUresult> {
        self.with(|state| state.captured_graph(device, stream))
    }

    /// Runs a call of this thread that copies. The memory of pools that it reads must be accessible
    /// to `from`, and the memory that it writes to `to`, instead of to the device that copies.
    pub fn copying<T>(&self, from: Ordinal, to: Ordinal, call: impl FnOnce() -> T) -> T {
        let thread = thread::current().id();
        self.with(|state| state.parties.insert(thread, (from.0, to.0)));
        let answer = call();
        self.with(|state| state.parties.remove(&thread));
        answer
    }

    /// Counts the live objects.
    #[must_use]
    pub fn live(&self) -> Live {
        self.with(State::live)
    }

    /// Lists the live objects, sorted by kind and value. Default streams and default memory pools
    /// are not listed, nor is an allocation that queued work will free.
    #[must_use]
    pub fn objects(&self) -> Vec<Object> {
        self.with(State::objects)
    }

    /// Takes a snapshot of the page tables and physicals.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.with(State::snapshot)
    }

    /// Reads a range as `device` would read it now, regardless of queued work and the state of the
    /// context.
    ///
    /// # Errors
    /// Returns `INVALID_VALUE` where the device has no access, and for pinned and managed memory.
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

/// Returns the calls for which this version has no symbol.
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
