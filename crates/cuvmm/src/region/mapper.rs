//! The thread that maps ahead and unmaps behind, one for a device.
//!
//! It knows neither pools nor blocks: whoever has work for it attaches, wakes it when there
//! is something to do, and is called on its thread. More threads would gain nothing, since the
//! driver holds a lock while it maps. Everything works without it.

use std::fmt;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::device::Device;
use crate::error::DeviceError;
use crate::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use crate::sync::thread::{self, JoinHandle, ThreadId};
use crate::sync::{Condvar, Mutex, MutexGuard, TIMES_OUT};

/// Waking a thread costs whoever does it several microseconds. So the mapper's thread looks up by
/// itself this often, as long as somebody wakes it now and then, and those who can wait so long need not wake it.
const LOOKS_UP: Duration = Duration::from_millis(1);

/// How long after the last waking it does so.
const STAYS_UP: Duration = Duration::from_secs(1);

/// How soon the mapper is to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Urgency {
    /// Within a millisecond or two.
    Soon,
    /// At once.
    Now,
}

/// Nobody has woken it: below any [`Urgency`].
const QUIET: u8 = 0;

impl Urgency {
    const fn as_u8(self) -> u8 {
        match self {
            Self::Soon => 1,
            Self::Now => 2,
        }
    }
}

/// Work for the mapper's thread.
pub(crate) trait MapperWork: Send + Sync {
    /// Does what there is to do, until `stop` says that it should not go on. Returns after what
    /// time it wants to be called again if nobody wakes it.
    fn work(&self, stop: &AtomicBool) -> Option<Duration>;

    /// The thread ends, and calls no more.
    fn ended(&self);
}

/// A thread that does driver calls for the pools of one device: it commits memory ahead of blocks
/// that grow, as fast as they grow, and takes memory back behind those that went.
///
/// Give it to [`PoolBuilder::mapper`](crate::pool::PoolBuilder::mapper). It ends when it is
/// stopped or dropped; pools go on without it then.
pub struct Mapper {
    shared: Arc<Shared>,
    device: Device,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// Told when there is something to do.
    woken: Condvar,
    /// Told when the thread is done with somebody's chores.
    done: Condvar,
    stop: AtomicBool,
    /// The most urgent waking that the thread has not seen yet.
    wanted: AtomicU8,
    /// Whether the thread sleeps until somebody wakes it.
    sleeps: AtomicBool,
}

#[derive(Default)]
struct State {
    attached: Vec<(u64, Weak<dyn MapperWork>)>,
    next: u64,
    /// Whose chores are being done.
    serving: Option<u64>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        /// No pool is served from here on, also if the thread panicked.
        struct Ended<'a>(&'a Shared);

        impl Drop for Ended<'_> {
            fn drop(&mut self) {
                self.0.stop.store(true, Ordering::SeqCst);
                // A panic may have ended it while it served one.
                self.0.lock().serving = None;
                self.0.done.notify_all();
                self.0.each(|work| work.ended());
            }
        }

        let _ended = Ended(self);
        let mut again = None;
        let mut woken = Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            self.sleep(again, woken);
            if self.wanted.swap(QUIET, Ordering::SeqCst) != QUIET {
                woken = Instant::now();
            }
            again = None;
            self.each(|work| {
                let wish = work.work(&self.stop);
                again = [again, wish].into_iter().flatten().min();
            });
        }
    }

    /// Calls each that is attached.
    fn each(&self, mut call: impl FnMut(&dyn MapperWork)) {
        let mut at = 0;
        while let Some((id, work)) = self.begin(at) {
            at = id + 1;
            call(&*work);
            // This may be the pool's last owner: it ends before `detach` hears that it was served.
            drop(work);
            self.lock().serving = None;
            self.done.notify_all();
        }
    }

    /// Waits until the mapper is woken, or for so long. Whether it was is looked at now and then, as
    /// long as the last waking, at `woken`, is not long ago.
    fn sleep(&self, long: Option<Duration>, woken: Instant) {
        let begun = Instant::now();
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            let left = long.map(|long| long.saturating_sub(now.duration_since(begun)));
            let up = TIMES_OUT && now.duration_since(woken) < STAYS_UP;
            self.sleeps.store(!up, Ordering::SeqCst);
            // Asked after that was said: who wakes it says so first, and looks then whether to wake it.
            let called = self.wanted.load(Ordering::SeqCst) != QUIET
                || self.stop.load(Ordering::SeqCst)
                || left == Some(Duration::ZERO);
            if called {
                break;
            }
            let most = up.then_some(LOOKS_UP);
            state = match [left, most].into_iter().flatten().min() {
                Some(long) => {
                    let waited = self.woken.wait_timeout(state, long);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => {
                    let waited = self.woken.wait(state);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
        self.sleeps.store(false, Ordering::SeqCst);
    }

    /// The next to be served whose number is at least `at`.
    fn begin(&self, at: u64) -> Option<(u64, Arc<dyn MapperWork>)> {
        let mut state = self.lock();
        state.attached.retain(|(_, work)| work.strong_count() > 0);
        let (id, work) = state
            .attached
            .iter()
            .filter(|(id, _)| *id >= at)
            .find_map(|(id, work)| Some((*id, work.upgrade()?)))?;
        state.serving = Some(id);
        Some((id, work))
    }

    fn wake(&self) {
        // Under the lock, so that a thread about to sleep hears it.
        drop(self.lock());
        self.woken.notify_one();
    }
}

impl Mapper {
    /// Starts the mapper of a device.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has one already or the system gives no thread.
    pub fn start(device: &Device) -> Result<Self, DeviceError> {
        device.own_process()?;
        if !device.claim_mapper() {
            return Err(DeviceError::MapperRunning);
        }
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            woken: Condvar::new(),
            done: Condvar::new(),
            stop: AtomicBool::new(false),
            wanted: AtomicU8::new(QUIET),
            sleeps: AtomicBool::new(false),
        });
        let for_thread = Arc::clone(&shared);
        let started = thread::Builder::new()
            .name("cuvmm-mapper".into())
            .spawn(move || for_thread.run());
        match started {
            Ok(thread) => Ok(Self {
                shared,
                device: device.clone(),
                thread: Some(thread),
            }),
            Err(error) => {
                device.disclaim_mapper();
                Err(DeviceError::Thread(error))
            }
        }
    }

    /// The device it maps for.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Ends the thread, after the chore it is at. Pools that used it go on without it.
    pub fn stop(self) {
        drop(self);
    }

    /// What wakes it.
    pub(crate) fn waker(&self) -> Option<Waker> {
        Some(Waker {
            shared: Arc::clone(&self.shared),
            thread: self.thread.as_ref()?.thread().id(),
        })
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        if self.device.forked().is_some() {
            // The thread did not come along.
            return;
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // Its own thread cannot wait for itself: it ends behind this.
            if thread.thread().id() != thread::current().id() && thread.join().is_err() {
                tracing::error!("the mapper's thread panicked");
            }
        }
        self.device.disclaim_mapper();
    }
}

impl fmt::Debug for Mapper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapper")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// A way to call the mapper.
#[derive(Clone)]
pub(crate) struct Waker {
    shared: Arc<Shared>,
    thread: ThreadId,
}

impl Waker {
    /// Has the mapper look after somebody's chores; returns a number to end that with.
    pub(crate) fn attach(&self, work: Weak<dyn MapperWork>) -> u64 {
        let mut state = self.shared.lock();
        let id = state.next;
        state.next += 1;
        state.attached.push((id, work));
        id
    }

    /// Ends it, and waits until the mapper's thread is out of those chores.
    pub(crate) fn detach(&self, id: u64) {
        let mut state = self.shared.lock();
        state.attached.retain(|(attached, _)| *attached != id);
        if self.thread == thread::current().id() {
            return;
        }
        while state.serving == Some(id) {
            state = self
                .shared
                .done
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// There is something to do. Only the first of several that is so urgent wakes the thread, and
    /// only if it must.
    pub(crate) fn wake(&self, urgency: Urgency) {
        let shared = &self.shared;
        let before = shared.wanted.fetch_max(urgency.as_u8(), Ordering::SeqCst);
        let must = urgency == Urgency::Now || shared.sleeps.load(Ordering::SeqCst);
        if before < urgency.as_u8() && must {
            shared.wake();
        }
    }

    /// Whether nobody will hear it any more.
    pub(crate) fn is_dead(&self) -> bool {
        self.shared.stop.load(Ordering::Relaxed)
    }

    /// The mapper's thread.
    pub(crate) const fn thread(&self) -> ThreadId {
        self.thread
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Waker").field(&self.thread).finish()
    }
}
