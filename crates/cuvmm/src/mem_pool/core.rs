//! The lock of a tenant's memory pool, and what the library's pool may take from it.
//!
//! Driver calls are made under this lock and never under the pool's, which is never taken under
//! this one. Under its own lock the pool asks for the figures of the last section.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::generations::{Generations, View};
use crate::deferred::{self, Checked};
use crate::device::Device;
use crate::error::{BlockError, CallError, MemoryError};
use crate::pool::{Given, Holder, HolderFigures};
use crate::size::Granularity;
use crate::sync::Mutex;

/// The driver's pools of a tenant's memory pool.
pub(super) struct Core {
    pub(super) device: Device,
    pub(super) step: Granularity,
    generations: Mutex<Generations>,
    view: Mutex<View>,
    /// Set when the tenant was unregistered, or the last handle was dropped.
    closed: AtomicBool,
    /// The number of threads that are about to be charged for a larger pool. Meanwhile its own
    /// tenant takes nothing from it: it would be for the growth itself.
    growing: AtomicUsize,
}

/// The lock. Its end updates the view.
pub(super) struct Locked<'a> {
    generations: deferred::Locked<'a, Generations>,
    view: &'a Mutex<View>,
}

impl Checked for Generations {}

impl std::ops::Deref for Locked<'_> {
    type Target = Generations;

    fn deref(&self) -> &Generations {
        &self.generations
    }
}

impl std::ops::DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Generations {
        &mut self.generations
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let view = self.generations.view();
        *self.view.lock().unwrap_or_else(PoisonError::into_inner) = view;
    }
}

/// Keeps the pool from being taken from for its own growth.
pub(super) struct Growing<'a>(&'a AtomicUsize);

impl Drop for Growing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Core {
    pub(super) fn new(device: &Device, step: Granularity, generations: Generations) -> Self {
        Self {
            device: device.clone(),
            step,
            generations: Mutex::new(generations),
            view: Mutex::new(View::default()),
            closed: AtomicBool::new(false),
            growing: AtomicUsize::new(0),
        }
    }

    pub(super) fn lock(&self) -> Locked<'_> {
        Locked {
            generations: deferred::Locked::for_calls(&self.generations),
            view: &self.view,
        }
    }

    pub(super) fn view(&self) -> View {
        *self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    pub(super) fn grow(&self) -> Growing<'_> {
        self.growing.fetch_add(1, Ordering::SeqCst);
        Growing(&self.growing)
    }

    /// Works on the pools with this thread in relaxed capture mode.
    pub(super) fn work<T>(
        &self,
        work: impl FnOnce(&mut Generations, &Device) -> Result<T, MemoryError>,
    ) -> Result<T, MemoryError> {
        let mut generations = self.lock();
        let device = &self.device;
        device.relaxed(|| work(&mut generations, device))?
    }

    /// Returns what the work on the pools has changed for the tenant, with its error.
    pub(super) fn given(&self, error: Option<CallError>) -> Given {
        let mut generations = self.lock();
        Given {
            returned: generations.take_returned(),
            overdrawn: generations.take_overdrawn(),
            error,
            ..Given::default()
        }
    }
}

/// Returns the driver's answer in an error.
fn call_of(error: &MemoryError) -> CallError {
    let error: BlockError = error.clone().into();
    error.call().copied().unwrap_or(CallError::InUse)
}

impl Holder for Core {
    fn figures(&self) -> HolderFigures {
        let view = self.view();
        let (padding, idle) = match self.is_closed() {
            true => (0, view.idle_closed),
            false => (view.padding, view.idle),
        };
        HolderFigures {
            held: view.held,
            in_use: view.in_use,
            padding,
            idle,
            obtained: view.reserved,
            ..HolderFigures::default()
        }
    }

    fn reclaimable(&self, polls: bool) -> Vec<u64> {
        // While a capture guard lives, the driver is asked for nothing.
        if !polls {
            return Vec::new();
        }
        let (step, idle) = (self.step.bytes(), self.figures().idle);
        let steps = usize::try_from(idle / step).unwrap_or(usize::MAX);
        let rest = Some(idle % step).filter(|&rest| rest > 0);
        std::iter::repeat_n(step, steps).chain(rest).collect()
    }

    fn give(&self, wanted: u64, given: &mut Given) {
        if self.device.lost().is_some() {
            self.lock().abandon();
            *given = self.given(None);
            return;
        }
        let closed = self.is_closed();
        let gave = self.work(|generations, device| match closed {
            true => Ok(generations.wind_down()?),
            false => generations.give(device, wanted).map(drop),
        });
        *given = self.given(gave.err().as_ref().map(call_of));
    }

    fn tidy(&self) -> Given {
        if let Err(error) = self.work(|generations, _| Ok(generations.look()?)) {
            log!(debug, %error, "the figures of a memory pool could not be read");
        }
        self.given(None)
    }

    fn is_untidy(&self) -> bool {
        self.view().older > 0
    }

    fn is_growing(&self) -> bool {
        self.growing.load(Ordering::SeqCst) > 0
    }

    fn is_of_driver(&self) -> bool {
        true
    }

    fn refresh(&self) -> Given {
        if let Err(error) = self.work(|generations, _| Ok(generations.refresh()?)) {
            log!(debug, %error, "the figures of a memory pool could not be read");
        }
        self.given(None)
    }

    fn acknowledge(&self, bytes: u64) {
        self.lock().acknowledge(bytes);
    }

    fn obtained(&self) -> u64 {
        self.lock().obtained()
    }

    fn settle(&self) -> Result<(), CallError> {
        self.device.drain()
    }

    fn report_freed(&self, _yes: bool) {}

    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }
}
