//! Which code a refusal carries: the measured one, or in the hostile manner any other that says
//! no more than "no"; and which one a call that fails out of the blue.
//!
//! # Codes that say more
//! A program may act on them, so the hostile manner neither replaces them nor puts them in the
//! place of others:
//! - `OUT_OF_MEMORY`: bytes, mappings or addresses are used up, and giving some back helps.
//! - Those after which the context is lost ([`DriverError::is_sticky`]), and whatever code a
//!   context was lost with.
//! - `DEINITIALIZED`: the process ends and the driver has gone, so nobody need be told.
//! - `STREAM_CAPTURE_*` and `CAPTURED_EVENT`: the call disturbs a capture, and may be made later.
//! - `NOT_READY`: not yet. The trait answers it as a `false`, never as an error.
//! - `NOT_SUPPORTED` by `cuCtxRecordEvent`: the driver cannot do that, and something else is
//!   to be done instead. A symbol that is missing says the same, and is no code at all.
//!
//! All other codes say that the call was refused and changed nothing. Which of them it is differs
//! between drivers, and nobody may build on it.

use super::backing::Backing;
use super::documented::documented;
use super::options::Manner;
use super::state::State;
use crate::{CUresult, Call, DriverError};

/// The codes around captures.
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

/// Whether the code says of a state of the world that the call met, beside "no".
fn tells_a_state(call: Call, code: CUresult) -> bool {
    match code {
        CUresult::CUDA_ERROR_DEINITIALIZED | CUresult::CUDA_ERROR_NOT_READY => true,
        CUresult::CUDA_ERROR_NOT_SUPPORTED => call == Call::CtxRecordEvent,
        _ => CAPTURES.contains(&code) || DriverError::new(call, code).is_sticky(),
    }
}

/// Whether a program may act on the code.
fn says_more(call: Call, code: CUresult) -> bool {
    code == CUresult::CUDA_ERROR_OUT_OF_MEMORY || tells_a_state(call, code)
}

impl<B: Backing> State<B> {
    /// The code that a refusal is answered with.
    pub(crate) fn refusal(&mut self, call: Call, code: CUresult) -> CUresult {
        let of_a_loss = || self.devices.iter().any(|device| device.lost == Some(code));
        if self.rules.manner != Manner::Hostile || says_more(call, code) || of_a_loss() {
            return code;
        }
        let mut codes = documented(call).to_vec();
        codes.retain(|&code| !says_more(call, code));
        self.chance.one_of(&codes).unwrap_or(code)
    }

    /// The code that a call fails with before it has begun, if it is to fail.
    pub(crate) fn spited(&mut self, call: Call) -> Option<CUresult> {
        let spiting = self.spiting.as_mut()?;
        if !spiting.chance.one_in(spiting.spite.one_in(call)) {
            return None;
        }
        let mut codes = documented(call).to_vec();
        codes.retain(|&code| !tells_a_state(call, code));
        let code = spiting.chance.one_of(&codes)?;
        self.spited += 1;
        Some(code)
    }
}
