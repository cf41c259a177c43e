//! The part of a cache that its owner shares with the pool's mapper.

use std::sync::{Arc, PoisonError, Weak};

use super::state::State;
use crate::deferred::Locked;
use crate::error::CallError;
use crate::own::Stream;
use crate::pool::Tenant;
use crate::region::WorksAhead;
use crate::sync::Mutex;

pub(super) struct Core {
    /// Dropped before the tenant.
    state: Mutex<State>,
    pub(super) tenant: Tenant,
    pub(super) home: Stream,
    /// `true` if sleep waits for all work of each device with access.
    pub(super) sleeps_after_all_work: bool,
}

impl Core {
    pub(super) fn new(
        state: State,
        tenant: &Tenant,
        home: &Stream,
        sleeps_after_all_work: bool,
    ) -> Arc<Self> {
        Arc::new_cyclic(|core: &Weak<Self>| {
            if state.precommits() {
                state.region.set_worker(core.clone());
            }
            Self {
                state: Mutex::new(state),
                tenant: tenant.clone(),
                home: home.clone(),
                sleeps_after_all_work,
            }
        })
    }

    /// Locks the cache, except in a forked child: another thread may have held the lock.
    pub(super) fn lock(&self) -> Result<Locked<'_, State>, CallError> {
        self.tenant.device().own_process()?;
        Ok(Locked::for_calls(&self.state))
    }
}

impl Core {
    /// Locks the cache for work of the mapper, which does not wait for the lock. Returns `None` if it
    /// is taken.
    pub(super) fn try_lock(&self) -> Option<Locked<'_, State>> {
        Locked::try_for_calls(&self.state)
    }
}

impl WorksAhead for Core {
    /// Lets other threads have the lock after each extent that blocks enter together, and waits for
    /// none: one may wait for work of the GPU meanwhile, and capture guards wait for the mapper.
    fn work_ahead(&self) -> bool {
        while !self.tenant.device().is_forked() {
            let Some(mut state) = self.try_lock() else {
                return true;
            };
            if self.tenant.is_capturing() {
                return true;
            }
            match state.map_ahead() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    log!(debug, %error, "no memory was mapped ahead of use");
                    break;
                }
            }
        }
        false
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if !self.tenant.device().is_forked() {
            let home = [self.home.clone()];
            let state = self.state.get_mut();
            state
                .unwrap_or_else(PoisonError::into_inner)
                .region
                .end_after(&home);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::extents::rig::G;
    use crate::paged::rest::Rest;
    use crate::paged::rig::{World, world};
    use crate::paged::{LayerGroup, Layout, PagedKv};

    #[test]
    fn no_memory_is_mapped_ahead_under_a_capture_guard_or_in_sleep_and_the_mapper_is_asked_again() {
        let world = world();
        let kv = world.cache(32, G / 2).precommit(4).build().unwrap();
        kv.back(&[0]).unwrap();
        let precommitted = || kv.stats().unwrap().precommitted;
        let guard = world.pool.capture_guard();
        assert!(kv.core.work_ahead());
        assert_eq!(precommitted(), 0);
        drop(guard);
        kv.core.lock().unwrap().rest = Rest::Moving { charged: true };
        assert!(!kv.core.work_ahead());
        assert_eq!(precommitted(), 0);
        kv.core.lock().unwrap().rest = Rest::Awake;
        assert!(!kv.core.work_ahead());
        // Blocks 1 to 4: the second half of the first granule, and three halves.
        assert_eq!(precommitted(), 2 * G);
        kv.back(&[3]).unwrap();
        assert!(!kv.core.work_ahead());
        // Blocks 1, 2, 4 and 5: two have memory beside those in use.
        assert_eq!(precommitted(), G);
        kv.back(&[1, 2, 4, 5, 6, 7, 8, 9, 10, 11]).unwrap();
        assert!(!kv.core.work_ahead());
        // The tenant has six granules in use, and there are two more.
        assert_eq!(precommitted(), 2 * G);
        kv.back(&[12, 13]).unwrap();
        assert!(!kv.core.work_ahead());
        assert_eq!(precommitted(), G);
    }

    #[test]
    fn the_mapper_does_not_wait_for_a_cache_that_another_thread_has_locked() {
        let world = world();
        let kv = world.cache(8, G).precommit(2).build().unwrap();
        let locked = kv.core.lock().unwrap();
        let (send, sent) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| send.send(kv.core.work_ahead()).unwrap());
            let again = sent.recv_timeout(Duration::from_secs(120));
            drop(locked);
            assert_eq!(again, Ok(true));
        });
        assert_eq!(kv.stats().unwrap().precommitted, 0);
        assert!(!kv.core.work_ahead());
        assert_eq!(kv.stats().unwrap().precommitted, 2 * G);
    }

    #[test]
    fn a_release_of_many_extents_wakes_waiting_requests_once() {
        let World {
            tenant,
            home,
            pool,
            rig,
        } = world();
        let other = pool.tenant("b").register().unwrap();
        rig.queue(&home);
        let group = LayerGroup::new(4, 1).part(1, G as u32, 1);
        let kv = PagedKv::builder(&tenant, &home, 2).group(group);
        let kv = kv.layout(Layout::LayerMajor).build().unwrap();
        kv.back(&[0, 1]).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let block = other.block(8 * G).timeout(Duration::from_secs(120));
                block.allocate().map(drop)
            });
            while !other.is_awaited() {
                thread::yield_now();
            }
            let told = other.told();
            // The work of the home stream keeps the memory from the request.
            kv.release(&[0, 1]).unwrap();
            assert_eq!(other.told(), told + 1);
            rig.finish(&home);
            waiting.join().unwrap().unwrap();
        });
    }
}
