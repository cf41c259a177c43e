//! Which calls a fault meets, and what it does to them.

use std::time::Duration;

use crate::{CUresult, Call};

/// What is to go wrong, and when. Calls are counted from 1, from the moment that the fault is
/// armed; failed calls count like others.
#[derive(Clone, Debug)]
pub struct Fault {
    first: u64,
    last: u64,
    /// Calls that are counted; all when empty.
    counted: Vec<Call>,
    /// Calls that are met; all that are counted when empty.
    met: Vec<Call>,
    effect: Effect,
}

#[derive(Clone, Copy, Debug)]
enum Effect {
    Fail(CUresult),
    Delay(Duration),
}

impl Fault {
    fn between(first: u64, last: u64, effect: Effect) -> Self {
        Self {
            first,
            last,
            counted: Vec::new(),
            met: Vec::new(),
            effect,
        }
    }

    /// The nth call fails with this code. The 0th never comes.
    #[must_use]
    pub fn nth(n: u64, code: CUresult) -> Self {
        Self::between(n, n, Effect::Fail(code))
    }

    /// The nth call and all later ones fail with this code.
    #[must_use]
    pub fn from(n: u64, code: CUresult) -> Self {
        Self::between(n, u64::MAX, Effect::Fail(code))
    }

    /// Every call fails with this code.
    #[must_use]
    pub fn all(code: CUresult) -> Self {
        Self::from(1, code)
    }

    /// The nth call takes this much longer in real time.
    #[must_use]
    pub fn delay_nth(n: u64, delay: Duration) -> Self {
        Self::between(n, n, Effect::Delay(delay))
    }

    /// Every call takes this much longer in real time.
    #[must_use]
    pub fn delay_all(delay: Duration) -> Self {
        Self::between(1, u64::MAX, Effect::Delay(delay))
    }

    /// Calls of this kind only are counted and met: `nth(3, code).of(Call::MemMap)` is the third
    /// `cuMemMap`. Said several times, calls of any of these kinds.
    #[must_use]
    pub fn of(mut self, call: Call) -> Self {
        self.counted.push(call);
        self
    }

    /// Calls of these kinds only are met, though all are counted: `from(k + 1, code).only(&[..])`
    /// beside `nth(k, code)` fails call k and what its roll-back calls of these kinds.
    #[must_use]
    pub fn only(mut self, calls: &[Call]) -> Self {
        self.met.extend_from_slice(calls);
        self
    }
}

/// What a fault does to one call.
pub(super) enum Verdict {
    Pass,
    Delay(Duration),
    Fail(CUresult),
}

/// A fault with its count.
#[derive(Debug)]
pub(super) struct Armed {
    fault: Fault,
    seen: u64,
}

impl Armed {
    pub(super) fn new(fault: Fault) -> Self {
        Self { fault, seen: 0 }
    }

    pub(super) fn judge(&mut self, call: Call) -> Verdict {
        let fault = &self.fault;
        let among = |calls: &[Call]| calls.is_empty() || calls.contains(&call);
        if !among(&fault.counted) {
            return Verdict::Pass;
        }
        self.seen += 1;
        if !(fault.first..=fault.last).contains(&self.seen) || !among(&fault.met) {
            return Verdict::Pass;
        }
        match fault.effect {
            Effect::Fail(code) => Verdict::Fail(code),
            Effect::Delay(delay) => Verdict::Delay(delay),
        }
    }
}
