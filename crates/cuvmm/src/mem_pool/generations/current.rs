//! Which pool is the device's current one.

use std::thread;
use std::time::{Duration, Instant};

use cuvmm_driver::MemPoolHandle;

use super::Generations;
use crate::error::{CallError, MemoryError};
use crate::own::CloseRefusal;

/// How long calls of other threads inside of the driver when the current pool changed have to end,
/// before the old pool's figure is read. On an H200 with two threads that allocate all the time,
/// six of six runs exceeded the limit by one to three steps without it, and none of eighteen with
/// 0.2 ms and more.
const INSIDE: Duration = Duration::from_millis(1);

/// Waits for calls of other threads that may have chosen a pool before another one was made current,
/// at `since`. Nothing tells when they have ended.
pub(super) fn let_others_end(since: Instant) {
    thread::sleep(INSIDE.saturating_sub(since.elapsed()));
}

impl Generations {
    /// Makes the newest pool current again where the stand-in is. Asks the driver twice.
    pub(super) fn resume(&mut self) -> Result<(), CallError> {
        self.let_go();
        let (Some(guard), Some(newest)) = (&mut self.guard, &self.newest) else {
            return Ok(());
        };
        if guard.pool().as_raw() == newest.pool.as_raw() {
            return Ok(());
        }
        let pool = &newest.pool;
        guard.switch(pool).or_else(|_| guard.switch(pool))
    }

    /// Returns the pools that may have been current before, those that are kept among them.
    fn past(&self) -> Vec<MemPoolHandle> {
        let past = self.stand_in.iter().chain(&self.older);
        let mut past: Vec<_> = past.map(|generation| generation.pool.as_raw()).collect();
        if let Some(newest) = &self.newest {
            newest.pool.device().add_kept_pools(&mut past);
        }
        past
    }

    /// Makes the newest pool current again where another library has put back one from before an
    /// exchange.
    pub(super) fn claim(&self) -> Result<(), CallError> {
        match &self.guard {
            Some(guard) if self.exchanged => guard.claim(&self.past(), false).map(drop),
            _ => Ok(()),
        }
    }

    /// Makes the newest pool the current one, and counts one more value that keeps it current.
    pub(crate) fn make_current(&mut self) -> Result<(), MemoryError> {
        self.resume()?;
        match (&self.guard, &self.newest) {
            (Some(guard), _) => {
                if !guard.claim(&self.past(), true)? {
                    let device = guard.pool().device().location();
                    return Err(MemoryError::CurrentPool(device));
                }
            }
            (None, Some(newest)) => {
                self.guard = Some(newest.pool.make_current_instead_of_default()?);
            }
            (None, None) => return Err(CallError::InUse.into()),
        }
        self.guards += 1;
        Ok(())
    }

    /// Makes the previous pool current again if no other value keeps the newest one current.
    pub(crate) fn end_current(&mut self) -> Result<(), CallError> {
        if self.guards > 1 {
            self.guards -= 1;
            return Ok(());
        }
        self.close_guard()?;
        self.guards = 0;
        Ok(())
    }

    /// Ends a value that kept the newest pool current. If the driver refuses to make the previous pool
    /// current, the next operation tries again; until then the newest pool is kept current.
    pub(crate) fn forget_current(&mut self) {
        if let Err(error) = self.end_current() {
            self.guards = 0;
            log!(warn, %error, "a memory pool stays the current one for now");
        }
    }

    /// Makes the previous pool current where that was refused before.
    pub(super) fn let_go(&mut self) {
        if self.guards == 0
            && let Err(error) = self.close_guard()
        {
            log!(debug, %error, "a memory pool stays the current one for now");
        }
    }

    /// Makes the previous pool current. For a moment, calls of other threads may still allocate from
    /// the newest one.
    pub(super) fn close_guard(&mut self) -> Result<(), CallError> {
        let Some(guard) = self.guard.take() else {
            return Ok(());
        };
        let Err(refused) = guard.close() else {
            self.left = Some(Instant::now());
            return Ok(());
        };
        self.guard = Some(refused.owner);
        match refused.reason {
            CloseRefusal::Call(error) => Err(error),
            _ => Err(CallError::InUse),
        }
    }

    /// Waits for calls of other threads that began while the newest pool was still current.
    pub(super) fn let_last_calls_end(&mut self) {
        if let Some(since) = self.left.take() {
            let_others_end(since);
        }
    }
}
