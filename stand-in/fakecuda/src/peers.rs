//! Contexts' access to memory of contexts on other devices.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use cuvmm_driver::{Driver, Ordinal, StreamHandle};
use cuvmm_sys::{CUcontext, CUdevice, CUresult};

use crate::attributes::{self, Kind};
use crate::contexts::{self, current};
use crate::edge::{Outcome, code, export_also, present, put};
use crate::enabled::{self, Pair};
use crate::owned::{self, Object};
use crate::stack;
use crate::state::{driver, state};
use crate::streams::context_of;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const NONE: CUresult = CUresult::CUDA_ERROR_INVALID_CONTEXT;

/// Returns the current context and its peer as numbers.
fn pair(peer: CUcontext) -> Outcome<Pair> {
    current()?;
    let own = stack::top().ok_or(NONE)?;
    contexts::of(state()?, peer)?;
    Ok((own.addr(), peer.addr()))
}

/// Refuses to fill another device's plain memory, unless the stream's context has access to the
/// memory's context. A copy needs no such access.
pub(crate) fn check_fill(device: Ordinal, stream: StreamHandle, to: u64) -> Outcome {
    if state()?.retained.len() == 1 {
        return Ok(());
    }
    let Ok(found) = attributes::find(device, to) else {
        // The host driver refuses the address.
        return Ok(());
    };
    if found.kind != Kind::Plain || found.device == device {
        return Ok(());
    }
    let owner = owned::known(Object::Memory(found.start)).map(|known| known.context);
    let pair = (context_of(stream), owner.ok_or(INVALID)?);
    match enabled::is_enabled(pair) {
        true => Ok(()),
        false => Err(INVALID),
    }
}

export_also! {
    fn cuCtxEnablePeerAccess(peer: CUcontext, flags: u32) {
        let pair = pair(peer)?;
        if flags != 0 {
            return Err(INVALID);
        }
        let (device, other) = (current()?, contexts::of(state()?, peer)?);
        let reaches = device != other
            && driver()?.can_access_peer(device, other).map_err(code)?;
        if !reaches {
            return Err(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
        }
        match enabled::enable(pair) {
            true => Ok(()),
            false => Err(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED),
        }
    }

    fn cuCtxDisablePeerAccess(peer: CUcontext) {
        let pair = pair(peer)?;
        match enabled::disable(pair) {
            true => Ok(()),
            false => Err(CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED),
        }
    }

    fn cuDeviceGetP2PAttribute(
        value: *mut i32,
        attribute: u32,
        device: CUdevice,
        peer: CUdevice,
    ) {
        let state = state()?;
        present(value)?;
        let (device, peer) = (state.device(device)?, state.device(peer)?);
        if device == peer {
            return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        let reaches = state.driver.can_access_peer(device, peer).map_err(code)?;
        let found = match attribute {
            // The rank of the link: there is one kind.
            1 => 0,
            // Access, atomic operations, access to arrays.
            2..=4 => i32::from(reaches),
            5 => 0,
            _ => return Err(INVALID),
        };
        // SAFETY: C's promise (see `edge`).
        unsafe { put(value, found) }
    }
}
