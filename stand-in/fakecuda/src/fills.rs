//! Fills with elements of two and four bytes, fills and copies of rectangles.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use cuvmm_driver::{DeviceAddress, Ordinal, StreamHandle};
use cuvmm_sys::{CUdeviceptr, CUresult, CUstream};

use crate::anywhere;
use crate::attributes;
use crate::contexts::current;
use crate::edge::{Outcome, code, export, export_also, take};
use crate::owned;
use crate::peers;
use crate::state::driver;
use crate::streams::{stream_handle, target};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// The bytes of a pattern that are copied from the host; the rest is copied on the device.
const PIECE: usize = 1 << 20;

/// Fills a range with a repeated element, on a stream or in the order of the default stream. The
/// call waits only for the default stream, if the memory is the host's.
pub(crate) fn fill(
    to: CUdeviceptr,
    element: &[u8],
    count: usize,
    stream: Option<StreamHandle>,
) -> Outcome {
    current()?;
    // As recorded, the number of bytes is computed without a check.
    let bytes = count.wrapping_mul(element.len());
    if bytes == 0 {
        return Ok(());
    }
    if !to.is_multiple_of(element.len() as u64) {
        return Err(INVALID);
    }
    let (device, order) = target(stream)?;
    let driver = driver()?;
    if fill_registered(device, to, element, count, order)? {
        return Ok(());
    }
    peers::check_fill(device, order, to)?;
    // This fill checks the whole range, so that a refusal changes nothing.
    let first = element.first().copied().unwrap_or_default();
    // SAFETY: the caller keeps the range until it is filled.
    unsafe {
        let (to, bytes) = (DeviceAddress(to), bytes as u64);
        match stream {
            None => driver.fill(device, to, first, bytes),
            Some(_) => driver.fill_async(device, to, first, bytes, order),
        }
    }
    .map_err(code)?;
    if element.iter().any(|&byte| byte != first) {
        repeat(device, to, element, bytes, order)?;
    }
    if stream.is_none() && attributes::find(device, to)?.is_host() {
        // SAFETY: the default stream lives as long as its context.
        unsafe { driver.stream_synchronize(device, order) }.map_err(code)?;
    }
    Ok(())
}

/// Fills registered memory when the stream's work is done. Returns `false` for other memory.
fn fill_registered(
    device: Ordinal,
    to: CUdeviceptr,
    element: &[u8],
    count: usize,
    order: StreamHandle,
) -> Outcome<bool> {
    let Some((start, known)) = owned::registered(to) else {
        return Ok(false);
    };
    let bytes = count.checked_mul(element.len()).ok_or(INVALID)?;
    let end = to.checked_add(bytes as u64).ok_or(INVALID)?;
    if end > start + known.size {
        return Err(INVALID);
    }
    // SAFETY: the caller of the exported function passes a live stream.
    unsafe { driver()?.stream_synchronize(device, order) }.map_err(code)?;
    let target = std::ptr::with_exposed_provenance_mut::<u8>(to as usize);
    for (index, byte) in element.iter().cycle().take(bytes).enumerate() {
        // SAFETY: the range lies in memory that the program registered and keeps.
        unsafe { target.add(index).write(*byte) };
    }
    Ok(true)
}

/// Writes a pattern over a range that has been checked.
fn repeat(
    device: Ordinal,
    to: CUdeviceptr,
    element: &[u8],
    bytes: usize,
    order: StreamHandle,
) -> Outcome {
    let driver = driver()?;
    let mut done = bytes.min(PIECE);
    let pattern: Box<[u8]> = element.iter().copied().cycle().take(done).collect();
    // SAFETY: the caller keeps the range until it is filled.
    unsafe { driver.copy_now_to_device(device, DeviceAddress(to), &pattern, order) }
        .map_err(code)?;
    while done < bytes {
        let size = done.min(bytes - done);
        let (target, source) = (DeviceAddress(to + done as u64), DeviceAddress(to));
        // SAFETY: the caller keeps the range until it is filled.
        unsafe { driver.copy_on_device_async(device, target, source, size as u64, order) }
            .map_err(code)?;
        done += size;
    }
    Ok(())
}

/// Writes one element in the order of a stream.
fn write_value(stream: CUstream, to: CUdeviceptr, element: &[u8], flags: u32) -> Outcome {
    const NO_BARRIER: u32 = 1;
    if flags & !NO_BARRIER != 0 {
        return Err(INVALID);
    }
    fill(to, element, 1, Some(stream_handle(stream)))
}

/// Checks a condition on a value when the stream has done its work. Waiting for a value that is
/// written later is not supported.
fn wait_value(
    stream: CUstream,
    from: CUdeviceptr,
    (value, width): (u64, usize),
    flags: u32,
) -> Outcome {
    /// The flag of a wait that also flushes writes of other devices.
    const FLUSH: u32 = 1 << 30;
    let (device, stream) = target(Some(stream_handle(stream)))?;
    if !from.is_multiple_of(width as u64) || flags & !FLUSH > 3 {
        return Err(INVALID);
    }
    let mut bytes = [0u8; 8];
    // SAFETY: the stream is live, and the array has eight bytes, of which no more are written.
    unsafe {
        driver()?.stream_synchronize(device, stream).map_err(code)?;
        driver()?.copy_to_host(device, &mut bytes[..width], DeviceAddress(from))
    }
    .map_err(code)?;
    let found = u64::from_le_bytes(bytes);
    let holds = match flags & !FLUSH {
        // The difference, as a signed number of the width, is not negative.
        0 => (found.wrapping_sub(value) << (64 - 8 * width)).cast_signed() >= 0,
        1 => found == value,
        2 => found & value != 0,
        _ => !(found | value) << (64 - 8 * width) != 0,
    };
    if holds {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
    }
}

fn fill_rows(
    to: CUdeviceptr,
    pitch: usize,
    element: &[u8],
    (width, height): (usize, usize),
    stream: Option<StreamHandle>,
) -> Outcome {
    current()?;
    let row = width.checked_mul(element.len()).ok_or(INVALID)?;
    if height > 1 && pitch < row {
        return Err(INVALID);
    }
    if width == 0 {
        return Ok(());
    }
    // The last row is filled first, so that a rectangle past the end of its memory changes nothing.
    for index in (0..height).rev() {
        let start = (pitch as u64).checked_mul(index as u64);
        let row = start.and_then(|start| to.checked_add(start));
        fill(row.ok_or(INVALID)?, element, width, stream)?;
    }
    Ok(())
}

/// One side of a copy of a rectangle, in words of the C structure: the offset in bytes and rows,
/// the kind of memory, the host's and the device's address, the array, the length of a row.
type Side = [usize; 7];

/// The words of the C structure: both sides, the width and the height.
type Rectangle = [usize; 16];

/// Returns the first address of one side, and the distance of its rows.
fn start(side: &[usize], width: usize, height: usize) -> Outcome<(u64, usize)> {
    const HOST: u32 = 1;
    const ARRAY: u32 = 3;
    let &[x, y, kind, host, device, _, pitch] = side else {
        return Err(INVALID);
    };
    let base = match kind as u32 {
        HOST => host,
        ARRAY => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        2 | 4 => device,
        _ => return Err(INVALID),
    };
    let narrow = pitch != 0 && pitch < x.saturating_add(width);
    if narrow || pitch == 0 && height > 1 && kind as u32 != HOST {
        return Err(INVALID);
    }
    let pitch = if pitch == 0 { width } else { pitch };
    let first = y.checked_mul(pitch).and_then(|rows| rows.checked_add(x));
    let first = first.and_then(|offset| base.checked_add(offset));
    Ok((first.ok_or(INVALID)? as u64, pitch))
}

/// Copies a rectangle row by row.
///
/// # Safety
/// The pointer is null or points to the structure.
unsafe fn copy_rows(rectangle: *const Rectangle, stream: Option<StreamHandle>) -> Outcome {
    current()?;
    // SAFETY: the caller passes the structure, or null.
    let words = unsafe { take(rectangle) }?;
    let (sides, [width, height]) = words.split_at(2 * size_of::<Side>() / size_of::<usize>())
    else {
        return Err(INVALID);
    };
    let (from, to) = sides.split_at(sides.len() / 2);
    let (from, from_pitch) = start(from, *width, *height)?;
    let (to, to_pitch) = start(to, *width, *height)?;
    if *width == 0 {
        return Ok(());
    }
    // The last row is copied first, so that a rectangle past the end of its memory changes nothing.
    for row in (0..*height as u64).rev() {
        let at = |first: u64, pitch: usize| {
            let distance = row.checked_mul(pitch as u64);
            let place = distance.and_then(|distance| first.checked_add(distance));
            place.ok_or(INVALID)
        };
        anywhere::copy(at(to, to_pitch)?, at(from, from_pitch)?, *width, stream)?;
    }
    Ok(())
}

/// Defines functions that fill rectangles with elements of a type: one that waits, and one that
/// queues the fill.
macro_rules! fills_rows {
    ($($waits:ident $queues:ident $value:ty;)*) => {
        export_also! {$(
            fn $waits + ptds(to: CUdeviceptr, pitch: usize, value: $value, width: usize, height: usize) {
                fill_rows(to, pitch, &value.to_ne_bytes(), (width, height), None)
            }

            fn $queues + ptsz(
                to: CUdeviceptr,
                pitch: usize,
                value: $value,
                width: usize,
                height: usize,
                stream: CUstream,
            ) {
                let stream = Some(stream_handle(stream));
                fill_rows(to, pitch, &value.to_ne_bytes(), (width, height), stream)
            }
        )*}
    };
}

fills_rows! {
    cuMemsetD2D8_v2 cuMemsetD2D8Async u8;
    cuMemsetD2D16_v2 cuMemsetD2D16Async u16;
    cuMemsetD2D32_v2 cuMemsetD2D32Async u32;
}

export! {
    fn cuMemsetD16_v2 + ptds(to: CUdeviceptr, value: u16, count: usize) {
        fill(to, &value.to_ne_bytes(), count, None)
    }

    fn cuMemsetD32_v2 + ptds(to: CUdeviceptr, value: u32, count: usize) {
        fill(to, &value.to_ne_bytes(), count, None)
    }

    fn cuMemsetD16Async + ptsz(to: CUdeviceptr, value: u16, count: usize, stream: CUstream) {
        fill(to, &value.to_ne_bytes(), count, Some(stream_handle(stream)))
    }

    fn cuMemsetD32Async + ptsz(to: CUdeviceptr, value: u32, count: usize, stream: CUstream) {
        fill(to, &value.to_ne_bytes(), count, Some(stream_handle(stream)))
    }
}

export_also! {
    fn cuMemcpy2D_v2 + ptds(rectangle: *const Rectangle) {
        // SAFETY: the caller passes the structure, or null.
        unsafe { copy_rows(rectangle, None) }
    }

    fn cuMemcpy2DUnaligned_v2 + ptds(rectangle: *const Rectangle) {
        // SAFETY: the caller passes the structure, or null.
        unsafe { copy_rows(rectangle, None) }
    }

    fn cuMemcpy2DAsync_v2 + ptsz(rectangle: *const Rectangle, stream: CUstream) {
        // SAFETY: the caller passes the structure, or null.
        unsafe { copy_rows(rectangle, Some(stream_handle(stream))) }
    }

    fn cuStreamWriteValue32(stream: CUstream, to: CUdeviceptr, value: u32, flags: u32) {
        write_value(stream, to, &value.to_ne_bytes(), flags)
    }

    fn cuStreamWriteValue32_v2(stream: CUstream, to: CUdeviceptr, value: u32, flags: u32) {
        write_value(stream, to, &value.to_ne_bytes(), flags)
    }

    fn cuStreamWriteValue64(stream: CUstream, to: CUdeviceptr, value: u64, flags: u32) {
        write_value(stream, to, &value.to_ne_bytes(), flags)
    }

    fn cuStreamWriteValue64_v2(stream: CUstream, to: CUdeviceptr, value: u64, flags: u32) {
        write_value(stream, to, &value.to_ne_bytes(), flags)
    }

    fn cuStreamWaitValue32(stream: CUstream, from: CUdeviceptr, value: u32, flags: u32) {
        wait_value(stream, from, (u64::from(value), 4), flags)
    }

    fn cuStreamWaitValue32_v2(stream: CUstream, from: CUdeviceptr, value: u32, flags: u32) {
        wait_value(stream, from, (u64::from(value), 4), flags)
    }

    fn cuStreamWaitValue64(stream: CUstream, from: CUdeviceptr, value: u64, flags: u32) {
        wait_value(stream, from, (value, 8), flags)
    }

    fn cuStreamWaitValue64_v2(stream: CUstream, from: CUdeviceptr, value: u64, flags: u32) {
        wait_value(stream, from, (value, 8), flags)
    }
}
