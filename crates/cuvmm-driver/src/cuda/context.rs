//! The context of each device, and making it current for the length of a call.
//!
//! `unsafe` is allowed here for driver calls (see `answer`), and to say that a context may be
//! used from every thread.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cuvmm_sys::{Api, CUcontext, CUdevice};

use super::CudaDriver;
use super::answer::{ask, outcome};
use crate::{Call, Ordinal, Result};

/// Whatever keeps a context of another library alive while it is used here.
pub type KeepAlive = Arc<dyn Any + Send + Sync>;

/// A context, and why it stays valid.
struct Context {
    raw: CUcontext,
    held: Held,
}

enum Held {
    /// Ours: one reference to the device's primary context, to be given back.
    Primary(CUdevice),
    /// Another library's.
    Borrowed(#[allow(dead_code, reason = "held, not read")] KeepAlive),
}

// SAFETY: the driver lets any thread use any context; the pointer is never followed.
unsafe impl Send for Context {}
// SAFETY: as above; nothing here changes behind a shared reference.
unsafe impl Sync for Context {}

/// The contexts of all devices, each taken when it is first needed.
pub(super) struct Contexts {
    each: Vec<OnceLock<Context>>,
    /// Held while a context is taken, so that two threads do not take it twice.
    taking: Mutex<()>,
    /// The process that opened the driver. A forked child inherits numbers that mean nothing.
    process: u32,
}

impl Contexts {
    pub(super) fn new(devices: usize) -> Self {
        Self {
            each: (0..devices).map(|_| OnceLock::new()).collect(),
            taking: Mutex::new(()),
            process: std::process::id(),
        }
    }

    fn slot(&self, device: Ordinal) -> Option<&OnceLock<Context>> {
        usize::try_from(device.0)
            .ok()
            .and_then(|index| self.each.get(index))
    }

    /// The device's context, taken now if this is its first use.
    pub(super) fn of(&self, driver: &CudaDriver, device: Ordinal) -> Result<CUcontext> {
        let slot = self.slot(device);
        if let Some(context) = slot.and_then(OnceLock::get) {
            return Ok(context.raw);
        }
        let _taking = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = slot.and_then(OnceLock::get) {
            return Ok(context.raw);
        }
        let id = driver.device(Call::PrimaryCtxRetain, device)?;
        let mut raw = ptr::null_mut();
        ask!(driver, PrimaryCtxRetain: cuDevicePrimaryCtxRetain(&mut raw, id))?;
        // There is a slot for each device that the driver counted; an ordinal without one has
        // been refused above.
        if let Some(slot) = slot {
            let held = Held::Primary(id);
            slot.get_or_init(|| Context { raw, held });
        }
        Ok(raw)
    }

    /// Puts another library's context in the place of the device's primary one. Returns whether
    /// there is such a device.
    pub(super) fn borrow(
        &mut self,
        api: &Api,
        device: Ordinal,
        raw: CUcontext,
        keep_alive: KeepAlive,
    ) -> bool {
        let slot = usize::try_from(device.0)
            .ok()
            .and_then(|index| self.each.get_mut(index));
        let Some(slot) = slot else {
            return false;
        };
        let held = Held::Borrowed(keep_alive);
        if let Some(former) = std::mem::replace(slot, OnceLock::from(Context { raw, held })).take()
        {
            give_back(api, &former);
        }
        true
    }

    /// Gives back what was taken. In a forked child, nothing: it has no contexts.
    pub(super) fn give_back(&mut self, api: &Api) {
        if self.process != std::process::id() {
            return;
        }
        for context in self.each.iter_mut().filter_map(OnceLock::take) {
            give_back(api, &context);
        }
    }
}

fn give_back(api: &Api, context: &Context) {
    let Held::Primary(device) = context.held else {
        return;
    };
    let release = api
        .cuDevicePrimaryCtxRelease_v2
        .get()
        .unwrap_or(api.cuDevicePrimaryCtxRelease);
    // SAFETY: the reference was taken in `of` and is given back once, here.
    let code = unsafe { release(device) };
    if let Err(error) = outcome(Call::PrimaryCtxRetain, code)
        && !error.is_deinitialized()
    {
        tracing::error!(device, %code, "the primary context could not be released");
    }
}

impl fmt::Debug for Contexts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = |slot: &OnceLock<Context>| match slot.get() {
            None => "not taken",
            Some(Context {
                held: Held::Primary(_),
                ..
            }) => "primary",
            Some(Context {
                held: Held::Borrowed(_),
                ..
            }) => "borrowed",
        };
        f.debug_list().entries(self.each.iter().map(state)).finish()
    }
}

/// While it lives, a device's context is current on this thread.
#[must_use = "the context is current only while this lives"]
pub(super) struct Current<'a> {
    api: &'a Api,
    pushed: bool,
    /// What is current is a thread's own affair, so this stays on its thread.
    _thread: PhantomData<*const ()>,
}

impl CudaDriver {
    /// Makes the device's context current until the answer is dropped.
    pub(super) fn enter(&self, device: Ordinal) -> Result<Current<'_>> {
        let wanted = self.context(device)?;
        let mut current = ptr::null_mut();
        ask!(self, CtxGetCurrent: cuCtxGetCurrent(&mut current))?;
        let pushed = current != wanted;
        if pushed {
            ask!(self, CtxPushCurrent: cuCtxPushCurrent_v2(wanted))?;
        }
        Ok(Current {
            api: self.api(),
            pushed,
            _thread: PhantomData,
        })
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if !self.pushed {
            return;
        }
        let mut popped = ptr::null_mut();
        // SAFETY: the result goes to a local, and what is popped was pushed in `enter`.
        let code = unsafe { (self.api.cuCtxPopCurrent_v2)(&mut popped) };
        if let Err(error) = outcome(Call::CtxPopCurrent, code)
            && !error.is_deinitialized()
        {
            tracing::error!(%code, "the thread's former context could not be restored");
        }
    }
}
