//! Contexts, primary and created.
//!
//! A context is a number of a pointer's type, which is never dereferenced: a primary context's
//! number is made of the device's ordinal, a created context's of the count of contexts made so
//! far. All contexts of a device use the host driver's one context of that device, so an error that
//! loses one loses all.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuvmm_driver::{EventHandle, Ordinal};
use cuvmm_sys::{CUcontext, CUdevice, CUevent, CUresult};

use crate::diagnosis::books::Class;
use crate::edge::{Outcome, code, export, export_also, present, put};
use crate::enabled;
use crate::owned;
use crate::stack::{self, top};
use crate::state::{State, driver, state};

const NONE: CUresult = CUresult::CUDA_ERROR_INVALID_CONTEXT;
const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_NOT_SUPPORTED;

/// The existing flags of a context: scheduling, host mapping, local memory, core dumps, synchronous
/// operations.
const FLAGS: u32 = 0xFF;

const FIRST: usize = 1 << 36;

/// Versions of the interface: of contexts of the first `cuCtxCreate`, and of all others.
const FIRST_VERSION: u32 = 3010;
const VERSION: u32 = 3020;

/// The position of the ordinal in the number of a primary context.
const PRIMARY: u32 = 40;

#[derive(Clone, Copy, Debug)]
struct Made {
    device: Ordinal,
    flags: u32,
    /// The references, which `cuCtxAttach` adds to.
    references: u32,
    id: u64,
    /// The version of the interface that made the context.
    version: u32,
}

#[derive(Debug, Default)]
struct Table {
    made: BTreeMap<usize, Made>,
    /// The number of contexts made so far, primary ones included.
    count: u64,
    /// The numbers of the primary contexts that have been retained.
    ids: BTreeMap<i32, u64>,
    /// Flags of primary contexts, other than the default.
    primary_flags: BTreeMap<i32, u32>,
}

static TABLE: Mutex<Option<Table>> = Mutex::new(None);

/// Calls `act` with the table of created contexts.
fn table<T>(act: impl FnOnce(&mut Table) -> T) -> T {
    let mut table: MutexGuard<'_, Option<Table>> =
        TABLE.lock().unwrap_or_else(PoisonError::into_inner);
    act(table.get_or_insert_default())
}

pub(crate) fn current() -> Outcome<Ordinal> {
    let state = state()?;
    let context = top().ok_or(NONE)?;
    of(state, context).map_err(|_| CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)
}

pub(crate) fn name(device: Ordinal) -> CUcontext {
    std::ptr::without_provenance_mut((device.0 as usize + 1) << PRIMARY)
}

pub(crate) fn of(state: &State, context: CUcontext) -> Outcome<Ordinal> {
    let made = |table: &mut Table| table.made.get(&context.addr()).map(|made| made.device);
    if let Some(device) = table(made) {
        return Ok(device);
    }
    let index = (context.addr() >> PRIMARY).wrapping_sub(1);
    let live = state
        .retained
        .get(index)
        .is_some_and(|count| count.load(Ordering::Acquire) > 0);
    let device = i32::try_from(index).map_err(|_| NONE)?;
    if live && name(Ordinal(device)) == context {
        Ok(Ordinal(device))
    } else {
        Err(NONE)
    }
}

/// Returns the device of a live context, or of a primary context that was live.
fn known(state: &State, context: CUcontext) -> Outcome<Ordinal> {
    let found = of(state, context);
    let primary = |device: &i32| name(Ordinal(*device)) == context;
    let former = table(|table| table.ids.keys().copied().find(primary));
    found.or_else(|none| {
        state.driver.note_use(Class::Context, context.addr() as u64);
        former.map(Ordinal).ok_or(none)
    })
}

/// Returns the context that a call names (null is the current one) and its device.
pub(crate) fn named(context: CUcontext) -> Outcome<(CUcontext, Ordinal)> {
    if context.is_null() {
        let device = current()?;
        return Ok((top().ok_or(NONE)?, device));
    }
    Ok((context, of(state()?, context)?))
}

fn release(device: CUdevice) -> Outcome {
    let state = state()?;
    let device = state.device(device)?;
    let count = state.retained.get(device.0 as usize).ok_or(NONE)?;
    let before = count
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
            count.checked_sub(1)
        })
        .map_err(|_| NONE)?;
    state.driver.note_released(device);
    if before == 1 {
        end(device, name(device));
    }
    Ok(())
}

/// Waits for the functions of the program that the device runs, and destroys a context's objects.
fn end_objects(state: &State, device: Ordinal, context: CUcontext) {
    state.driver.finish_host_work(device);
    owned::end(&state.driver, device, context);
    enabled::forget(context.addr());
}

/// Ends a context. If the device has no other context, resets the host driver's context, so that a
/// lost one works again.
fn end(device: Ordinal, context: CUcontext) {
    let Ok(state) = state() else {
        return;
    };
    end_objects(state, device, context);
    let others = table(|table| table.made.values().any(|made| made.device == device));
    if !others && of(state, name(device)).is_err() {
        state.driver.reset_context(device);
    }
}

fn reset(device: CUdevice) -> Outcome {
    let state = state()?;
    let device = state.device(device)?;
    if let Some(count) = state.retained.get(device.0 as usize) {
        count.store(0, Ordering::Release);
    }
    state.driver.note_reset(device);
    end_objects(state, device, name(device));
    state.driver.reset_context(device);
    Ok(())
}

/// Makes a context and makes it current.
///
/// # Safety
/// The pointer is null or valid for writing.
unsafe fn create(context: *mut CUcontext, version: u32, flags: u32, device: CUdevice) -> Outcome {
    let state = state()?;
    present(context)?;
    let device = state.device(device)?;
    check_flags(flags)?;
    let number = table(|table| {
        table.count += 1;
        let number = FIRST + ((table.count as usize) << 12);
        let made = Made {
            device,
            flags,
            references: 1,
            id: table.count,
            version,
        };
        table.made.insert(number, made);
        number
    });
    let made: CUcontext = std::ptr::without_provenance_mut(number);
    stack::push(made);
    state.driver.note_context(number as u64);
    // SAFETY: as the caller promises.
    unsafe { put(context, made) }
}

pub(crate) fn living() -> Vec<(u64, Ordinal)> {
    table(|table| {
        let made = table.made.iter();
        made.map(|(&number, made)| (number as u64, made.device))
            .collect()
    })
}

/// Refuses flags that do not exist, and two ways of scheduling at once.
fn check_flags(flags: u32) -> Outcome {
    let schedules = (flags & 0x7).count_ones();
    if flags & !FLAGS != 0 || schedules > 1 {
        return Err(INVALID);
    }
    Ok(())
}

/// Destroys a created context, and pops it if it is current.
fn destroy(context: CUcontext) -> Outcome {
    let state = state()?;
    if context.is_null() {
        return Err(INVALID);
    }
    let made = table(|table| table.made.remove(&context.addr())).ok_or(NONE);
    state
        .driver
        .note_context_end(context.addr() as u64, made.is_ok());
    let made = made?;
    if top() == Some(context) {
        stack::pop();
    }
    end(made.device, context);
    Ok(())
}

fn push(context: CUcontext) -> Outcome {
    let state = state()?;
    if context.is_null() {
        return Err(INVALID);
    }
    known(state, context)?;
    stack::push(context);
    Ok(())
}

/// # Safety
/// The pointer is null or valid for writing.
unsafe fn pop(context: *mut CUcontext) -> Outcome {
    state()?;
    let popped = stack::pop().ok_or(NONE)?;
    if context.is_null() {
        return Ok(());
    }
    // SAFETY: as the caller promises.
    unsafe { put(context, popped) }
}

fn set_primary_flags(device: CUdevice, flags: u32) -> Outcome {
    let device = state()?.device(device)?;
    check_flags(flags)?;
    table(|table| table.primary_flags.insert(device.0, flags));
    Ok(())
}

/// Returns the flag of host mapping, which primary contexts always have.
fn map_host(context: CUcontext, device: Ordinal) -> u32 {
    const MAP_HOST: u32 = 8;
    if context == name(device) { MAP_HOST } else { 0 }
}

fn flags_of(context: CUcontext, device: Ordinal) -> u32 {
    table(|table| match table.made.get(&context.addr()) {
        Some(made) => made.flags,
        None => table
            .primary_flags
            .get(&device.0)
            .copied()
            .unwrap_or_default(),
    })
}

export! {
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) {
        let state = state()?;
        present(context)?;
        let device = state.device(device)?;
        if let Some(count) = state.retained.get(device.0 as usize)
            && count.fetch_add(1, Ordering::AcqRel) == 0
        {
            table(|table| {
                table.count += 1;
                table.ids.insert(device.0, table.count);
            });
        }
        state.driver.note_retained(device);
        // SAFETY: C's promise (see `edge`).
        unsafe { put(context, name(device)) }
    }

    fn cuDevicePrimaryCtxRelease(device: CUdevice) {
        release(device)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) {
        release(device)
    }

    fn cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut u32, active: *mut i32) {
        let state = state()?;
        present(flags)?;
        present(active)?;
        let device = state.device(device)?;
        let live = of(state, name(device)).is_ok();
        // SAFETY: C's promise (see `edge`).
        unsafe {
            put(flags, flags_of(name(device), device))?;
            put(active, i32::from(live))
        }
    }

    fn cuCtxPushCurrent_v2(context: CUcontext) {
        push(context)
    }

    fn cuCtxPopCurrent_v2(context: *mut CUcontext) {
        // SAFETY: C's promise (see `edge`).
        unsafe { pop(context) }
    }

    fn cuCtxGetCurrent(context: *mut CUcontext) {
        state()?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(context, top().unwrap_or(std::ptr::null_mut())) }
    }

    fn cuCtxSetCurrent(context: CUcontext) {
        let state = state()?;
        if !context.is_null() {
            known(state, context)?;
        }
        stack::pop();
        if !context.is_null() {
            stack::push(context);
        }
        Ok(())
    }

    fn cuCtxGetDevice(device: *mut CUdevice) {
        let state = state()?;
        let found = known(state, top().ok_or(NONE)?)
            .map_err(|_| CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(device, found.0) }
    }

    fn cuCtxSynchronize() {
        driver()?.context_synchronize(current()?).map_err(code)
    }

    fn cuCtxRecordEvent(context: CUcontext, event: CUevent) {
        let state = state()?;
        let device = of(state, context)?;
        let event = EventHandle(event.addr() as u64);
        // SAFETY: the caller passes an event that it created and has not destroyed.
        unsafe { state.driver.context_record_event(device, event) }.map_err(code)
    }
}

export_also! {
    fn cuCtxCreate(context: *mut CUcontext, flags: u32, device: CUdevice) {
        // SAFETY: C's promise (see `edge`).
        unsafe { create(context, FIRST_VERSION, flags, device) }
    }

    fn cuCtxCreate_v2(context: *mut CUcontext, flags: u32, device: CUdevice) {
        // SAFETY: C's promise (see `edge`).
        unsafe { create(context, VERSION, flags, device) }
    }

    fn cuCtxCreate_v3(
        context: *mut CUcontext,
        affinities: *const u8,
        count: i32,
        flags: u32,
        device: CUdevice,
    ) {
        state()?;
        // A negative number passes for none, as measured.
        if count > 0 {
            // Execution affinity exists under MPS only.
            return Err(match affinities.is_null() {
                true => INVALID,
                false => CUresult::CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY,
            });
        }
        // SAFETY: C's promise (see `edge`).
        unsafe { create(context, VERSION, flags, device) }
    }

    fn cuCtxCreate_v4(
        context: *mut CUcontext,
        parameters: *const [usize; 3],
        flags: u32,
        device: CUdevice,
    ) {
        state()?;
        if !parameters.is_null() {
            // SAFETY: the caller passes the structure: a pointer to affinities, their number, and a
            // pointer to the parameters of graphics interoperation.
            let [affinities, count, graphics] = unsafe { crate::edge::take(parameters) }?;
            if affinities != 0 || count as u32 != 0 || graphics != 0 {
                return Err(UNSUPPORTED);
            }
        }
        // SAFETY: C's promise (see `edge`).
        unsafe { create(context, VERSION, flags, device) }
    }

    fn cuCtxDestroy(context: CUcontext) {
        destroy(context)
    }

    fn cuCtxDestroy_v2(context: CUcontext) {
        destroy(context)
    }

    fn cuCtxPushCurrent(context: CUcontext) {
        push(context)
    }

    fn cuCtxPopCurrent(context: *mut CUcontext) {
        // SAFETY: C's promise (see `edge`).
        unsafe { pop(context) }
    }

    fn cuCtxAttach(context: *mut CUcontext, flags: u32) {
        current()?;
        present(context)?;
        let attached = top().ok_or(NONE)?;
        if flags != 0 {
            return Err(INVALID);
        }
        // References to a primary context are not counted.
        table(|table| {
            if let Some(made) = table.made.get_mut(&attached.addr()) {
                made.references += 1;
            }
        });
        // SAFETY: C's promise (see `edge`).
        unsafe { put(context, attached) }
    }

    fn cuCtxDetach(context: CUcontext) {
        of(state()?, context)?;
        let left = table(|table| {
            let made = table.made.get_mut(&context.addr())?;
            made.references = made.references.saturating_sub(1);
            Some(made.references)
        });
        match left {
            Some(0) => destroy(context),
            _ => Ok(()),
        }
    }

    fn cuCtxGetFlags(flags: *mut u32) {
        let device = current()?;
        present(flags)?;
        let context = top().ok_or(NONE)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(flags, flags_of(context, device) | map_host(context, device)) }
    }

    fn cuCtxSetFlags(flags: u32) {
        let device = current()?;
        check_flags(flags)?;
        let context = top().ok_or(NONE)?;
        table(|table| match table.made.get_mut(&context.addr()) {
            Some(made) => made.flags = flags,
            None => {
                table.primary_flags.insert(device.0, flags);
            }
        });
        Ok(())
    }

    fn cuCtxGetId(context: CUcontext, id: *mut u64) {
        let (context, device) = named(context)?;
        present(id)?;
        let found = table(|table| match table.made.get(&context.addr()) {
            Some(made) => made.id,
            None => table.ids.get(&device.0).copied().unwrap_or_default(),
        });
        // SAFETY: C's promise (see `edge`).
        unsafe { put(id, found) }
    }

    fn cuCtxGetApiVersion(context: CUcontext, version: *mut u32) {
        let (context, _) = named(context)?;
        let found = table(|table| table.made.get(&context.addr()).map(|made| made.version));
        // SAFETY: C's promise (see `edge`).
        unsafe { put(version, found.unwrap_or(VERSION)) }
    }

    fn cuCtxGetDevice_v2(device: *mut CUdevice, context: CUcontext) {
        let (_, found) = named(context)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(device, found.0) }
    }

    fn cuCtxSynchronize_v2(context: CUcontext) {
        let (_, device) = named(context)?;
        driver()?.context_synchronize(device).map_err(code)
    }

    fn cuDevicePrimaryCtxSetFlags(device: CUdevice, flags: u32) {
        let state = state()?;
        if of(state, name(state.device(device)?)).is_ok() {
            return Err(CUresult::CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE);
        }
        set_primary_flags(device, flags)
    }

    fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: u32) {
        set_primary_flags(device, flags)
    }

    fn cuDevicePrimaryCtxReset(device: CUdevice) {
        reset(device)
    }

    fn cuDevicePrimaryCtxReset_v2(device: CUdevice) {
        reset(device)
    }
}
