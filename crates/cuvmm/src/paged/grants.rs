//! The memory that [requests](super::requests) are granted.
//!
//! What a request was granted counts as uses of the extents of all its blocks, as blocks do that a step
//! has released: so the extents stay, whatever other calls back and release. The blocks themselves are
//! not in use until the request is taken, which needs no memory then.
//!
//! Keeps I-122.

use std::ops::Range;

use super::requests::Requested;
use super::state::{State, Use};
use crate::error::BlockError;
use crate::ledger::InLine;
use crate::own::Stream;

/// The uses of extents that a request obtains. Unless it is kept, its end takes them back, also after a
/// panic of the driver.
struct Obtained<'a> {
    state: &'a mut State,
    numbers: &'a [u32],
    keeps: bool,
}

impl Obtained<'_> {
    /// Counts a use of each block. Returns the ranges of extents that had none.
    fn enter(&mut self) -> Vec<Range<u64>> {
        let mut entered = Vec::new();
        for &number in self.numbers {
            self.state.planes.enter(number, &mut entered);
        }
        entered
    }
}

impl Drop for Obtained<'_> {
    fn drop(&mut self) {
        if !self.keeps {
            for &number in self.numbers {
                self.state.planes.leave(number, &mut Vec::new());
            }
        }
    }
}

impl State {
    /// Makes one attempt to get the memory of a request's blocks. Gets none for a request that has it, or
    /// was withdrawn.
    pub(super) fn grant(&mut self, request: u64, place: Option<InLine>) -> Result<(), BlockError> {
        let open = self.requests.get(request);
        let Some(Requested { numbers, .. }) = open.filter(|it| !it.has_memory) else {
            return Ok(());
        };
        self.check_awake()?;
        let mut obtained = Obtained {
            state: self,
            numbers: &numbers,
            keeps: false,
        };
        let entered = obtained.enter();
        if !entered.is_empty() {
            obtained.state.region.attempt_all(&entered, place)?;
        }
        obtained.keeps = true;
        drop(obtained);
        self.requests.has_got_memory(request);
        if !entered.is_empty() {
            self.region.call_worker();
        }
        Ok(())
    }

    /// Puts the blocks of a granted request in use, and ends it.
    pub(super) fn take(&mut self, request: u64, home: &Stream) -> Result<(), BlockError> {
        let open = self.requests.get(request);
        // All extents have uses, so this needs no memory.
        let taken = open.map_or(Ok(()), |it| self.attempt(&it.numbers, Use::Backed, None));
        self.end_request(request, home);
        taken
    }

    /// Ends a request, and withdraws the memory that it has and no block in use touches.
    pub(super) fn end_request(&mut self, request: u64, home: &Stream) {
        if let Some(ended) = self.requests.remove(request)
            && ended.has_memory
        {
            self.leave(&ended.numbers, home);
        }
    }
}
