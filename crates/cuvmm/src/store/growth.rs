//! New memory of a store, prepared piece by piece.
//!
//! Threads near the device touch the pieces, which takes most of the time. The calling thread pins
//! one piece after the other meanwhile, and its caller can use those that are ready: several
//! threads would pin no faster, and launches of other threads wait for each call.

use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::vec;

use cuvmm_driver::Location;

use super::available::available;
use super::near;
use super::{PART, whole};
use crate::device::Device;
use crate::error::{CallError, MemoryError};
use crate::own::{HostPart, Piece};

/// The size of a piece: pinning one makes launches of other threads wait for about 2 ms.
const PIECE: usize = 64 << 20;

/// The most threads that touch memory. More are no faster, and delay launches.
const MOST_THREADS: usize = 8;

/// Pieces that have no memory yet. Their parts get their bytes when it is [finished](Self::finish).
#[must_use]
pub(crate) struct Growth {
    device: Device,
    pieces: Vec<Piece>,
    pins: bool,
    grown: Grown,
}

/// Pieces that are finished. They are freed when their parts are no longer in use, unless they are
/// [kept](Self::keep).
#[derive(Default)]
#[must_use]
pub(crate) struct Grown(Vec<Piece>);

impl Grown {
    pub(crate) fn keep(self) {
        self.0.into_iter().for_each(Piece::keep);
    }
}

impl Growth {
    /// Maps addresses for `bytes`, more than zero, in whole parts. Without `pins` the memory stays
    /// pageable. Fails if the system has too little memory.
    pub(super) fn new(
        device: &Device,
        bytes: u64,
        pins: bool,
    ) -> Result<(Self, Vec<HostPart>), MemoryError> {
        let size = whole(bytes)?;
        if let Some(available) = available().filter(|&available| available < bytes) {
            let wanted = bytes;
            return Err(MemoryError::HostOutOfMemory { wanted, available });
        }
        let (mut pieces, mut parts) = (Vec::new(), Vec::new());
        for at in (0..size).step_by(PIECE) {
            let piece = Piece::new(device, PIECE.min(size - at), PART);
            let (piece, new) = piece.ok_or_else(|| out_of_memory(bytes))?;
            pieces.push(piece);
            parts.extend(new);
        }
        let mut growth = Self::of(device, Grown::default());
        (growth.pieces, growth.pins) = (pieces, pins);
        Ok((growth, parts))
    }

    /// Allocates `bytes`, more than zero, in whole parts, pinned by the driver (`cuMemHostAlloc`).
    /// The parts have their bytes.
    pub(super) fn allocated(
        device: &Device,
        bytes: u64,
    ) -> Result<(Self, Vec<HostPart>), MemoryError> {
        let piece = Piece::allocated(device, whole(bytes)?, PART);
        let (piece, parts) = piece.map_err(|cause| refused(bytes, cause))?;
        Ok((Self::of(device, Grown(vec![piece])), parts))
    }

    /// Returns a growth by nothing.
    pub(super) fn nothing(device: &Device) -> Self {
        Self::of(device, Grown::default())
    }

    fn of(device: &Device, grown: Grown) -> Self {
        Self {
            device: device.clone(),
            pieces: Vec::new(),
            pins: true,
            grown,
        }
    }

    /// Puts memory behind all pieces, and pins them (`cuMemHostRegister`). Calls `ready` after each.
    ///
    /// # Errors
    /// The error of `ready`; [`MemoryError::HostOutOfMemory`] before the system or a control group
    /// would have too little memory; or the driver's refusal. No piece is kept, and those that
    /// are not ready have no bytes.
    pub(crate) fn finish<E: From<MemoryError>>(
        self,
        mut ready: impl FnMut() -> Result<(), E>,
    ) -> Result<Grown, E> {
        let Self {
            device,
            pieces,
            pins,
            mut grown,
        } = self;
        if pieces.is_empty() {
            return Ok(grown);
        }
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.min(MOST_THREADS).min(pieces.len());
        let untouched = &Untouched::new(pieces);
        let processors = &near::processors(&device);
        thread::scope(|scope| {
            let (send, touched) = mpsc::channel();
            // The other threads end when this one does, by an error or a panic.
            let _closes = Closes(untouched);
            let started = (0..threads).filter(|_| {
                let send = send.clone();
                let touch = move || {
                    processors.iter().for_each(near::move_to);
                    untouched.touch_all(&send);
                };
                let named = thread::Builder::new().name("cuvmm-touch".into());
                named.spawn_scoped(scope, touch).is_ok()
            });
            if started.count() == 0 {
                untouched.touch_all(&send);
            }
            drop(send);
            for piece in touched {
                let mut piece = piece?;
                let size = piece.size() as u64;
                match pins {
                    true => piece.register().map_err(|cause| refused(size, cause))?,
                    false => piece.finish(),
                }
                grown.0.push(piece);
                ready()?;
            }
            Ok(grown)
        })
    }
}

fn refused(size: u64, cause: CallError) -> MemoryError {
    MemoryError::Create {
        size,
        location: Location::HOST,
        cause,
    }
}

/// Returns the error for memory that the system does not have.
pub(super) fn out_of_memory(wanted: u64) -> MemoryError {
    MemoryError::HostOutOfMemory {
        wanted,
        available: available().unwrap_or(0),
    }
}

/// Pieces to be touched, for several threads.
struct Untouched(Mutex<Left>);

struct Left {
    pieces: vec::IntoIter<Piece>,
    /// The bytes of the pieces that have not been touched, including those that are being touched.
    bytes: u64,
}

impl Untouched {
    fn new(pieces: Vec<Piece>) -> Self {
        let bytes = pieces.iter().map(|piece| piece.size() as u64).sum();
        let pieces = pieces.into_iter();
        Self(Mutex::new(Left { pieces, bytes }))
    }

    fn lock(&self) -> MutexGuard<'_, Left> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Touches pieces and sends them, until none is left.
    fn touch_all(&self, send: &mpsc::Sender<Result<Piece, MemoryError>>) {
        while let Some(next) = self.next() {
            let touched = next.map(|mut piece| {
                piece.touch();
                self.lock().bytes -= piece.size() as u64;
                piece
            });
            // Without a receiver the operation has failed already.
            if send.send(touched).is_err() {
                return;
            }
        }
    }

    /// Takes a piece, if the system has enough memory for all that have not been touched.
    fn next(&self) -> Option<Result<Piece, MemoryError>> {
        let mut left = self.lock();
        let piece = left.pieces.next()?;
        let (wanted, available) = (left.bytes, available());
        match available.filter(|&available| available < wanted) {
            None => Some(Ok(piece)),
            Some(available) => {
                left.pieces = Vec::new().into_iter();
                Some(Err(MemoryError::HostOutOfMemory { wanted, available }))
            }
        }
    }
}

/// Leaves no piece to be touched when dropped.
struct Closes<'a>(&'a Untouched);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.lock().pieces = Vec::new().into_iter();
    }
}
