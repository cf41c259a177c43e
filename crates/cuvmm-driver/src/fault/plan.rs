//! Faults: the calls they apply to and their effect on them.

use std::time::Duration;

use crate::{CUresult, Call};

/// A failure or delay of certain calls.
///
/// Calls are counted from 1, from the moment when the fault is armed. Failed calls count too.
#[derive(Clone, Debug)]
pub struct Fault {
    first: u64,
    last: u64,
    /// The calls that are counted; all if empty.
    counted: Vec<Call>,
    /// The calls that the effect applies to; all counted calls if empty.
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

    /// Fails the nth call with this code. With `n` 0, fails no call.
    #[must_use]
    pub fn nth(n: u64, code: CUresult) -> Self {
        Self::between(n, n, Effect::Fail(code))
    }

    /// Fails the nth and all later calls with this code.
    #[must_use]
    pub fn from(n: u64, code: CUresult) -> Self {
        Self::between(n, u64::MAX, Effect::Fail(code))
    }

    /// Fails every call with this code.
    #[must_use]
    pub fn all(code: CUresult) -> Self {
        Self::from(1, code)
    }

    /// Delays the nth call by `delay` in real time.
    #[must_use]
    pub fn delay_nth(n: u64, delay: Duration) -> Self {
        Self::between(n, n, Effect::Delay(delay))
    }

    /// Delays every call by `delay` in real time.
    #[must_use]
    pub fn delay_all(delay: Duration) -> Self {
        Self::between(1, u64::MAX, Effect::Delay(delay))
    }

    /// Counts, and applies to, calls of this kind only.
    ///
    /// `nth(3, code).of(Call::MemMap)` is the third `cuMemMap`. Repeated use adds kinds.
    #[must_use]
    pub fn of(mut self, call: Call) -> Self {
        self.counted.push(call);
        self
    }

    /// Applies to calls of these kinds only; all calls are still counted.
    ///
    /// `from(k + 1, code).only(&[..])` beside `nth(k, code)` fails call k and the calls of these
    /// kinds in its roll-back.
    #[must_use]
    pub fn only(mut self, calls: &[Call]) -> Self {
        self.met.extend_from_slice(calls);
        self
    }
}

/// The effect of a fault on one call.
pub(super) enum Verdict {
    Pass,
    Delay(Duration),
    Fail(CUresult),
}

/// An armed fault with its count of calls.
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
