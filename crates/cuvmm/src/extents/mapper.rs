//! The mapper: one thread for each device that maps memory ahead of use and unmaps it after use.
//!
//! The mapper knows neither pools nor blocks. A [`MapperWork`] is attached, wakes the thread when
//! it has work, and is called on the thread. More threads would gain nothing, since the driver
//! holds a lock while it maps. The mapper is optional.

use std::fmt;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::device::Device;
use crate::error::DeviceError;
use crate::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use crate::sync::thread::{self, JoinHandle, ThreadId};
use crate::sync::{Condvar, Mutex, MutexGuard, TIMES_OUT};

/// Waking a thread costs the waking thread several microseconds. So the mapper's thread polls at
/// this interval while it is woken now and then, and callers that can wait that long need not wake
/// it.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How long after the last waking the thread keeps polling.
const POLL_PERIOD: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Urgency {
    /// Within a millisecond or two.
    Soon,
    Now,
}

/// The value for no pending waking, below any [`Urgency`].
const QUIET: u8 = 0;

impl Urgency {
    const fn as_u8(self) -> u8 {
        match self {
            Self::Soon => 1,
            Self::Now => 2,
        }
    }
}

pub(crate) trait MapperWork: Send + Sync {
    /// Does the pending work until `stop` is set. Returns the time until the next call, unless it
    /// is woken before.
    fn work(&self, stop: &AtomicBool) -> Option<Duration>;

    /// Notes that the thread has ended and makes no more calls.
    fn ended(&self);
}

/// A thread that makes driver calls for the pools of one device: it commits memory ahead of growing
/// blocks, as fast as they grow, and unmaps the memory of freed blocks.
///
/// Give it to [`PoolBuilder::mapper`](crate::pool::PoolBuilder::mapper). The thread ends when the
/// mapper is stopped or dropped; its pools continue without it.
///
/// The thread also calls [pressure hooks](crate::pool::TenantBuilder::on_pressure) for
/// [futures](crate::pool::futures) that wait, and their wakers. While one of these runs, the mapper does
/// nothing for any of its pools. Between two hooks it does all other work that is due.
///
/// ```rust
/// # use cuvmm::driver::auto;
/// # use cuvmm::{Device, Limit, Mapper, Pool};
/// # let device = Device::open(auto::open(auto::OpenOptions::new())?.driver, 0)?;
/// const MIB: u64 = 1 << 20;
/// let mapper = Mapper::start(&device)?; // one for each device
/// let pool = Pool::builder(&device).limit(Limit::Bytes(64 * MIB)).mapper(&mapper).build()?;
/// let tenant = pool.tenant("decoder").register()?;
/// let mut cache = tenant.block(2 * MIB).capacity(32 * MIB).allocate()?;
/// cache.grow_to(16 * MIB)?; // memory committed ahead, where the mapper was in time
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Mapper {
    shared: Arc<Shared>,
    device: Device,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    woken: Condvar,
    /// Notified when the thread has returned from attached work.
    done: Condvar,
    stop: AtomicBool,
    /// The highest urgency that the thread has not seen yet.
    wanted: AtomicU8,
    /// Set while the thread sleeps without polling.
    sleeps: AtomicBool,
}

#[derive(Default)]
struct State {
    attached: Vec<(u64, Weak<dyn MapperWork>)>,
    next: u64,
    serving: Option<u64>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        /// Marks the mapper as ended, even if the thread panics.
        struct Ended<'a>(&'a Shared);

        impl Drop for Ended<'_> {
            fn drop(&mut self) {
                self.0.stop.store(true, Ordering::SeqCst);
                // A panic may have ended the thread within a call.
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

    fn each(&self, mut call: impl FnMut(&dyn MapperWork)) {
        let mut at = 0;
        while let Some((id, work)) = self.begin(at) {
            at = id + 1;
            call(&*work);
            // The thread may be the pool's last owner: the pool is dropped before `detach` learns
            // that the call has ended.
            drop(work);
            self.lock().serving = None;
            self.done.notify_all();
        }
    }

    /// Waits until the mapper is woken, for at most `long`. Polls at intervals while the last
    /// waking, at `woken`, is recent.
    fn sleep(&self, long: Option<Duration>, woken: Instant) {
        let begun = Instant::now();
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            let left = long.map(|long| long.saturating_sub(now.duration_since(begun)));
            let up = TIMES_OUT && now.duration_since(woken) < POLL_PERIOD;
            self.sleeps.store(!up, Ordering::SeqCst);
            // Loaded after `sleeps` was stored: a waker stores `wanted` first, and then loads
            // `sleeps` to decide whether to notify.
            let called = self.wanted.load(Ordering::SeqCst) != QUIET
                || self.stop.load(Ordering::SeqCst)
                || left == Some(Duration::ZERO);
            if called {
                break;
            }
            let most = up.then_some(POLL_INTERVAL);
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

    /// Marks the next attached work with a number of at least `at` as served, and returns it.
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
        // Under the lock, so that a thread about to sleep does not miss the notification.
        drop(self.lock());
        self.woken.notify_one();
    }
}

impl Mapper {
    /// Starts the mapper of a device.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has a mapper already or the system gives no thread.
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
                device.release_mapper();
                Err(DeviceError::Thread(error))
            }
        }
    }

    /// Returns the device that the mapper serves.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Ends the thread after its current work. Pools that used the mapper continue without it.
    pub fn stop(self) {
        drop(self);
    }

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
            // A fork does not copy the thread.
            return;
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // The thread cannot join itself; it ends after this drop.
            if thread.thread().id() != thread::current().id() && thread.join().is_err() {
                log!(error, "the mapper's thread panicked");
            }
        }
        self.device.release_mapper();
    }
}

impl fmt::Debug for Mapper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapper")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

#[derive(Clone)]
pub(crate) struct Waker {
    shared: Arc<Shared>,
    thread: ThreadId,
}

impl Waker {
    /// Attaches work to the mapper. Returns a number for [`detach`](Self::detach).
    pub(crate) fn attach(&self, work: Weak<dyn MapperWork>) -> u64 {
        let mut state = self.shared.lock();
        let id = state.next;
        state.next += 1;
        state.attached.push((id, work));
        id
    }

    /// Detaches work, and waits until the mapper's thread has returned from it.
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

    /// Notes that there is work. Only the first waking of an urgency notifies the thread, and only
    /// if it sleeps without polling or the urgency is [`Now`](Urgency::Now).
    pub(crate) fn wake(&self, urgency: Urgency) {
        let shared = &self.shared;
        let before = shared.wanted.fetch_max(urgency.as_u8(), Ordering::SeqCst);
        let must = urgency == Urgency::Now || shared.sleeps.load(Ordering::SeqCst);
        if before < urgency.as_u8() && must {
            shared.wake();
        }
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.shared.stop.load(Ordering::Relaxed)
    }

    pub(crate) const fn thread(&self) -> ThreadId {
        self.thread
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Waker").field(&self.thread).finish()
    }
}
