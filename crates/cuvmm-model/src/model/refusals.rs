//! The codes of refusals, measured or chosen by the hostile manner, and of calls that fail at
//! random.
//!
//! The documentation of `model` lists the codes that say more than a refusal. All other codes mean
//! that the call was refused and changed nothing; drivers differ in them, and a program must not
//! depend on them.

use super::backing::Backing;
use super::documented::documented;
use super::options::Manner;
use super::state::State;
use cuvmm_driver::{CUresult, Call, DriverError};

const CAPTURES: &[CUresult] = &[
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    CUresult::CUDA_ERROR_CAPTURED_EVENT,
];

/// Returns `true` if the code reports a state that the call met, and not only a refusal.
fn tells_a_state(call: Call, code: CUresult) -> bool {
    match code {
        CUresult::CUDA_ERROR_DEINITIALIZED | CUresult::CUDA_ERROR_NOT_READY => true,
        CUresult::CUDA_ERROR_NOT_SUPPORTED => call == Call::CtxRecordEvent,
        CUresult::CUDA_ERROR_INVALID_VALUE => {
            matches!(call, Call::EventQuery | Call::StreamWaitEvent)
        }
        _ => CAPTURES.contains(&code) || DriverError::new(call, code).is_sticky(),
    }
}

fn says_more(call: Call, code: CUresult) -> bool {
    code == CUresult::CUDA_ERROR_OUT_OF_MEMORY || tells_a_state(call, code)
}

impl<B: Backing> State<B> {
    pub(crate) fn refusal(&mut self, call: Call, code: CUresult) -> CUresult {
        let of_a_loss = || self.devices.iter().any(|device| device.lost == Some(code));
        if self.rules.manner != Manner::Hostile || says_more(call, code) || of_a_loss() {
            return code;
        }
        let mut codes = documented(call).to_vec();
        codes.retain(|&code| !says_more(call, code));
        self.chance.one_of(&codes).unwrap_or(code)
    }

    /// Returns the code of a call that fails at random, before the call has begun.
    pub(crate) fn with_random_failures(&mut self, call: Call) -> Option<CUresult> {
        let spiting = self.spiting.as_mut()?;
        if !spiting.chance.one_in(spiting.spite.one_in(call)) {
            return None;
        }
        let mut codes = documented(call).to_vec();
        codes.retain(|&code| !tells_a_state(call, code));
        let code = spiting.chance.one_of(&codes)?;
        self.with_random_failures += 1;
        Some(code)
    }
}
