//! Batches of prefetches and discards of managed memory, since CUDA 13.0.
//!
//! A batch is one piece of work in its stream. Two arrays give the destinations of its ranges:
//! places, and for each place the number of its first range. As on an H100, these numbers need not
//! ascend, and a refused range leaves the ranges before it moved.
//!
//! `unsafe` exports functions (see `state`), and reads the arrays that C passes.
#![allow(unsafe_code)]

use cuvmm_driver::{DeviceAddress, Location, StreamHandle};
use cuvmm_sys::{CUdeviceptr, CUmemLocation, CUresult, CUstream};

use crate::edge::{Outcome, code, export, export_also, take_all};
use crate::physicals::location;
use crate::state::driver;
use crate::streams::{stream_handle, target};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

struct Ranges {
    addresses: *const CUdeviceptr,
    sizes: *const usize,
    count: usize,
}

impl Ranges {
    /// Queues the batch. A range with a location is moved there, one without is discarded.
    fn queue(
        &self,
        locations: impl Iterator<Item = Option<Location>>,
        flags: u64,
        stream: CUstream,
    ) -> Outcome {
        let (device, stream) = target(Some(stream_handle(stream)))?;
        if self.count == 0 || flags != 0 || stream.0 <= StreamHandle::LEGACY.0 {
            return Err(INVALID);
        }
        // SAFETY: the caller passes arrays of `count` values.
        let (addresses, sizes) = unsafe {
            let addresses = take_all(self.addresses, self.count)?;
            (addresses, take_all(self.sizes, self.count)?)
        };
        let ranges: Vec<_> = (addresses.into_iter().zip(sizes).zip(locations))
            .map(|((address, bytes), to)| (DeviceAddress(address), bytes as u64, to))
            .collect();
        // SAFETY: the caller passes a stream that it created and has not destroyed.
        let queued = unsafe { driver()?.prefetch_all(device, &ranges, stream) };
        queued.map_err(|error| match code(error) {
            CUresult::CUDA_ERROR_INVALID_DEVICE => INVALID,
            code => code,
        })
    }

    /// Queues a batch of prefetches. A range goes to the same place as the range before it, until
    /// its number reaches the next place's.
    fn prefetch(
        &self,
        places: *const CUmemLocation,
        starts: *const usize,
        place_count: usize,
        flags: u64,
        stream: CUstream,
    ) -> Outcome {
        if !(1..=self.count).contains(&place_count) {
            return Err(INVALID);
        }
        // SAFETY: the caller passes arrays of `place_count` values.
        let (places, starts) = unsafe {
            let places = take_all(places, place_count)?;
            (places, take_all(starts, place_count)?)
        };
        let inside = starts.iter().all(|&start| start < self.count);
        if starts.first() != Some(&0) || !inside {
            return Err(INVALID);
        }
        let mut at = 0;
        let locations = (0..self.count).map(|number| {
            while starts.get(at + 1).is_some_and(|&next| next <= number) {
                at += 1;
            }
            places.get(at).copied().map(location)
        });
        self.queue(locations, flags, stream)
    }
}

export! {
    fn cuMemPrefetchBatchAsync + ptsz(
        addresses: *mut CUdeviceptr,
        sizes: *mut usize,
        count: usize,
        places: *mut CUmemLocation,
        starts: *mut usize,
        place_count: usize,
        flags: u64,
        stream: CUstream,
    ) {
        Ranges { addresses, sizes, count }.prefetch(places, starts, place_count, flags, stream)
    }

    fn cuMemDiscardBatchAsync + ptsz(
        addresses: *mut CUdeviceptr,
        sizes: *mut usize,
        count: usize,
        flags: u64,
        stream: CUstream,
    ) {
        Ranges { addresses, sizes, count }.queue(std::iter::repeat(None), flags, stream)
    }
}

export_also! {
    fn cuMemDiscardAndPrefetchBatchAsync + ptsz(
        addresses: *mut CUdeviceptr,
        sizes: *mut usize,
        count: usize,
        places: *mut CUmemLocation,
        starts: *mut usize,
        place_count: usize,
        flags: u64,
        stream: CUstream,
    ) {
        Ranges { addresses, sizes, count }.prefetch(places, starts, place_count, flags, stream)
    }
}
