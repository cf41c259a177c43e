//! The context of each device, and making it current for the duration of a call.
//!
//! `unsafe` makes driver calls (see `answer`), and declares that a context may be used
//! from every thread.
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

/// A value that keeps another library's context alive while it is used here.
pub type KeepAlive = Arc<dyn Any + Send + Sync>;

/// A context, and what keeps it valid.
struct Context {
    raw: CUcontext,
    held: Held,
}

enum Held {
    /// One reference to the device's primary context, taken by this driver and released by it.
    Primary(CUdevice),
    /// A context of another library.
    Borrowed(#[allow(dead_code, reason = "held, not read")] KeepAlive),
}

// SAFETY: the driver lets any thread use any context; the pointer is never dereferenced.
unsafe impl Send for Context {}
// SAFETY: the driver lets any thread use any context, and nothing here changes behind a shared
// reference.
unsafe impl Sync for Context {}

/// The contexts of all devices, each retained when it is first needed.
pub(super) struct Contexts {
    each: Vec<OnceLock<Context>>,
    /// Held while a context is retained, so that two threads do not retain it twice.
    taking: Mutex<()>,
    /// The process that opened the driver. In a forked child the inherited handles are invalid.
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

    /// Returns the device's context, which is retained now if this is its first use.
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
        // There is a slot for each device that the driver counted. `driver.device` has returned an
        // error for an ordinal without one.
        if let Some(slot) = slot {
            let held = Held::Primary(id);
            slot.get_or_init(|| Context { raw, held });
        }
        Ok(raw)
    }

    /// Replaces the device's primary context by another library's context.
    ///
    /// Returns `false` if there is no such device.
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

    /// Releases the contexts that were retained. Does nothing in a forked child, which has no
    /// contexts.
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
    // SAFETY: the reference was taken in `of` and is released once, here.
    let code = unsafe { release(device) };
    if let Err(error) = outcome(Call::PrimaryCtxRelease, code)
        && !error.is_deinitialized()
    {
        tracing::error!(device, %error, "the primary context could not be released");
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

/// A guard that keeps a device's context current on its thread.
#[must_use = "the context is current only while this lives"]
pub(super) struct Current<'a> {
    api: &'a Api,
    pushed: bool,
    /// The current context is a property of the thread, so the guard must stay on its thread.
    _thread: PhantomData<*const ()>,
}

impl CudaDriver {
    /// Makes the device's context current until the returned guard is dropped.
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
        // SAFETY: the result is written to a local, and the popped context was pushed in `enter`.
        let code = unsafe { (self.api.cuCtxPopCurrent_v2)(&mut popped) };
        if let Err(error) = outcome(Call::CtxPopCurrent, code)
            && !error.is_deinitialized()
        {
            tracing::error!(%code, "the thread's former context could not be restored");
        }
    }
}
