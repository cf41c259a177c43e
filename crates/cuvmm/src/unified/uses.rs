//! The uses of a buffer by streams, and the order between them.
//!
//! A use is recorded when it begins, and ordered on the device behind the uses that it conflicts
//! with. When it ends, an event is recorded on its stream. A use whose end was not marked (its
//! guard was leaked, or the marking failed) stays recorded as open, and a conflicting use waits for
//! its stream. So memory never counts as free because the owner of a guard forgot it.
//!
//! This module queues no work and accesses no memory.
//!
//! Keeps I-68.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError};

use crate::device::Device;
use crate::error::{CallError, ContainerError, MemoryError};
use crate::own::{Event, Stream};
use crate::sync::{Mutex, MutexGuard};

/// The kind of a use. Reads are compatible with each other; a write conflicts with every use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
}

impl Kind {
    const fn conflicts_with(self, other: Self) -> bool {
        !matches!((self, other), (Self::Read, Self::Read))
    }
}

/// The last use on a stream, and the event behind it.
#[derive(Clone)]
struct Mark {
    stream: Stream,
    event: Arc<Event>,
}

impl Mark {
    /// Makes later work of a stream wait for the use.
    fn order_before(&self, stream: &Stream) -> Result<(), CallError> {
        match stream.wait(&self.event) {
            Err(error) if self.stream.device().relaxed(|| self.is_void())? => {
                log!(debug, %error, "an event was captured: its stream is waited for");
                self.stream.settle()
            }
            waited => waited,
        }
    }

    /// Waits for the use. The thread is in relaxed capture mode.
    fn wait(&self) -> Result<(), CallError> {
        match self.event.synchronize() {
            Err(_) if self.is_void() => self.stream.settle(),
            waited => waited,
        }
    }

    /// Returns `true` if the driver does not answer about the event, because it was recorded in a capture
    /// that began and ended between the two questions of [`Use::mark`]. The thread is in relaxed capture
    /// mode.
    fn is_void(&self) -> bool {
        self.event
            .is_complete()
            .is_err_and(|error| error.is_of_ended_capture())
    }
}

#[derive(Default)]
struct Books {
    /// The number of uses begun so far.
    begun: u64,
    /// Uses whose end is not marked, by number: they are running, or were leaked.
    open: BTreeMap<u64, (Kind, Stream)>,
    writer: Option<Mark>,
    /// The readers since the last writer, one for each stream.
    readers: Vec<Mark>,
}

impl Books {
    fn open_against(&self, kind: Kind) -> Vec<(u64, Stream)> {
        let conflicting = |(_, (other, _)): &(&u64, &(Kind, Stream))| kind.conflicts_with(*other);
        self.open
            .iter()
            .filter(conflicting)
            .map(|(&number, (_, stream))| (number, stream.clone()))
            .collect()
    }

    fn marks_against(&self, kind: Kind) -> Vec<Mark> {
        let readers: &[Mark] = match kind {
            Kind::Read => &[],
            Kind::Write => &self.readers,
        };
        self.writer.iter().chain(readers).cloned().collect()
    }

    /// Forgets all conflicting uses, which are complete. Returns the marks: their streams belong to
    /// the user, and are dropped without the lock.
    fn forget(&mut self, kind: Kind) -> Vec<Mark> {
        let mut gone = match kind {
            Kind::Read => Vec::new(),
            Kind::Write => std::mem::take(&mut self.readers),
        };
        gone.extend(self.writer.take());
        gone
    }

    /// Forgets the marks that have an event. Returns them as `forget` does.
    fn forget_event(&mut self, event: &Arc<Event>) -> Vec<Mark> {
        let with_it = |mark: &Mark| Arc::ptr_eq(&mark.event, event);
        let readers = std::mem::take(&mut self.readers);
        let (mut gone, left): (Vec<_>, _) = readers.into_iter().partition(with_it);
        self.readers = left;
        gone.extend(self.writer.take_if(|mark| with_it(mark)));
        gone
    }

    /// The mark that a use of this kind on this stream updates, if any.
    fn mark_of(&self, kind: Kind, stream: &Stream) -> Option<Mark> {
        let readers = self.readers.iter();
        match kind {
            Kind::Read => readers.clone().find(|mark| mark.stream == *stream),
            Kind::Write => self.writer.iter().find(|mark| mark.stream == *stream),
        }
        .cloned()
    }
}

/// The uses of one buffer. A writer is exclusive: only shared borrows allow two uses at once.
#[derive(Default)]
pub(super) struct Uses {
    books: Mutex<Books>,
}

impl Uses {
    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a use: work queued on the stream from now on is ordered behind all conflicting uses.
    pub(super) fn begin(&self, stream: &Stream, kind: Kind) -> Result<Use<'_>, ContainerError> {
        if stream.is_capturing()? {
            return Err(MemoryError::Capturing.into());
        }
        self.settle(kind)?;
        let (marks, known) = {
            let books = self.lock();
            (books.marks_against(kind), books.mark_of(kind, stream))
        };
        let mark = match known {
            Some(mark) => mark,
            None => {
                self.prune(stream.device())?;
                Mark {
                    stream: stream.clone(),
                    event: Arc::new(Event::new(stream.device())?),
                }
            }
        };
        for earlier in marks.iter().filter(|earlier| earlier.stream != *stream) {
            earlier.order_before(stream)?;
        }
        let mut books = self.lock();
        books.begun += 1;
        let number = books.begun;
        books.open.insert(number, (kind, stream.clone()));
        drop(books);
        Ok(Use {
            uses: self,
            number,
            kind,
            mark,
            passed: false,
        })
    }

    /// Forgets readers that are complete, so that a buffer that is only read does not keep a mark
    /// for each stream that ever read it.
    fn prune(&self, device: &Device) -> Result<(), CallError> {
        if self.lock().readers.is_empty() {
            return Ok(());
        }
        device.relaxed(|| {
            // Under the lock: a use that ends meanwhile records its event first, and then checks
            // here whether its mark is still known.
            let mut books = self.lock();
            let readers = std::mem::take(&mut books.readers);
            // An event about which the driver does not answer stays until its stream is waited for.
            let is_complete = |mark: &Mark| mark.event.is_complete() == Ok(true);
            let (gone, left) = readers.into_iter().partition(is_complete);
            books.readers = left;
            drop(books);
            // Their streams belong to the user, and are dropped without the lock.
            let _gone: Vec<Mark> = gone;
        })
    }

    /// Waits for the streams of conflicting uses whose end was not marked. The borrows ensure that
    /// none of them is still running.
    fn settle(&self, kind: Kind) -> Result<(), ContainerError> {
        let open = self.lock().open_against(kind);
        for (number, stream) in open {
            stream.settle().map_err(|error| match error {
                CallError::Capturing => MemoryError::Capturing,
                error => error.into(),
            })?;
            self.lock().open.remove(&number);
        }
        Ok(())
    }

    /// Waits, on the host, until no conflicting use of the memory is running.
    pub(super) fn wait(&self, device: &Device, kind: Kind) -> Result<(), ContainerError> {
        device.usable()?;
        self.settle(kind)?;
        let marks = self.lock().marks_against(kind);
        if !marks.is_empty() {
            device.relaxed(|| marks.iter().try_for_each(Mark::wait))??;
            let gone = self.lock().forget(kind);
            drop(gone);
        }
        Ok(())
    }

    /// Waits until nothing can use the memory any more, to free it: all work is complete, or its
    /// context is lost and runs nothing.
    pub(super) fn drain(&self) -> Result<(), CallError> {
        let (open, marks) = {
            let books = self.lock();
            let open = books.open_against(Kind::Write);
            (open, books.marks_against(Kind::Write))
        };
        for (number, stream) in open {
            over(stream.device(), || stream.settle())?;
            self.lock().open.remove(&number);
        }
        for mark in marks {
            let device = mark.stream.device();
            over(device, || device.relaxed(|| mark.wait())?)?;
        }
        let gone = self.lock().forget(Kind::Write);
        drop(gone);
        Ok(())
    }
}

/// Treats a failed wait as complete if the context is lost.
fn over(device: &Device, wait: impl FnOnce() -> Result<(), CallError>) -> Result<(), CallError> {
    wait().or_else(|error| {
        if device.lost().is_some() {
            Ok(())
        } else {
            Err(error)
        }
    })
}

/// A use in progress. Dropping it ends it and marks the end.
pub(super) struct Use<'a> {
    uses: &'a Uses,
    number: u64,
    kind: Kind,
    mark: Mark,
    passed: bool,
}

impl Use<'_> {
    pub(super) const fn stream(&self) -> &Stream {
        &self.mark.stream
    }

    /// Ends the use after its stream has been waited for: it is complete, and so are the uses that
    /// the stream was ordered behind.
    pub(super) fn passed(mut self) {
        let mut books = self.uses.lock();
        let gone = (books.open.remove(&self.number), books.forget(self.kind));
        drop(books);
        drop(gone);
        self.passed = true;
    }

    /// Marks the end. Returns `false` if the stream captures by now: the event would become part of a
    /// graph.
    fn mark(&self) -> Result<bool, CallError> {
        if self.mark.stream.is_capturing()? {
            return Ok(false);
        }
        let marked = self.mark.event.record_uncaptured(&self.mark.stream);
        if marked != Ok(true) {
            // An earlier mark of the stream may have been lost with it. The open use stands for both.
            let gone = self.uses.lock().forget_event(&self.mark.event);
            drop(gone);
        }
        marked
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        if self.passed {
            return;
        }
        // A use whose end could not be marked stays open.
        let Ok(true) = self.mark() else { return };
        let mut books = self.uses.lock();
        let open = books.open.remove(&self.number);
        let mut gone = Vec::new();
        match self.kind {
            Kind::Read => {
                if books.mark_of(Kind::Read, &self.mark.stream).is_none() {
                    books.readers.push(self.mark.clone());
                }
            }
            // It was ordered behind all readers, so its mark covers them too.
            Kind::Write => {
                gone = books.forget(Kind::Write);
                books.writer = Some(self.mark.clone());
            }
        }
        drop(books);
        // Their streams belong to the user, and are dropped without the lock.
        drop((open, gone));
    }
}

impl fmt::Debug for Use<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Use")
            .field("kind", &self.kind)
            .field("stream", &self.mark.stream)
            .finish_non_exhaustive()
    }
}
