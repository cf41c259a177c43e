//! Who uses a buffer on which stream, and who waits for whom.
//!
//! A use is noted when it begins. On the device it comes behind the uses that it conflicts with; when
//! it ends, an event marks its stream. A use whose end was never marked (its guard was leaked, or the
//! marking failed) stays noted, and whoever conflicts with it waits for its stream. So nothing that a
//! guard's owner forgets can make the memory look free.
//!
//! No work is queued here and no memory touched.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError};

use cuvmm_driver::{CUresult, Call, DriverError};

use crate::device::Device;
use crate::error::{CallError, ContainerError, MemoryError};
use crate::own::{Event, Stream};
use crate::sync::{Mutex, MutexGuard};

/// What is done to the elements. Readers bear each other, a writer nobody.
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

#[derive(Default)]
struct Books {
    /// Uses begun so far.
    begun: u64,
    /// Uses whose end is not marked, by their number: they go on, or will never end.
    open: BTreeMap<u64, (Kind, Stream)>,
    writer: Option<Mark>,
    /// Those since the writer, one for each stream.
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

    /// All that conflicts has passed. Returns the marks: their streams are users', and are dropped
    /// without the lock.
    fn forget(&mut self, kind: Kind) -> Vec<Mark> {
        let mut gone = match kind {
            Kind::Read => Vec::new(),
            Kind::Write => std::mem::take(&mut self.readers),
        };
        gone.extend(self.writer.take());
        gone
    }

    /// The mark that a use of this kind on this stream moves on, if there is one.
    fn mark_of(&self, kind: Kind, stream: &Stream) -> Option<Mark> {
        let readers = self.readers.iter();
        match kind {
            Kind::Read => readers.clone().find(|mark| mark.stream == *stream),
            Kind::Write => self.writer.iter().find(|mark| mark.stream == *stream),
        }
        .cloned()
    }
}

/// The uses of one buffer. A writer has the buffer alone: only a shared borrow lets two uses go on at
/// once.
#[derive(Default)]
pub(super) struct Uses {
    books: Mutex<Books>,
}

impl Uses {
    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a use: what the stream is given from now on comes behind all that conflicts.
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
            stream.wait(&earlier.event)?;
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

    /// Forgets readers that have passed, so that a buffer which is only read does not keep a mark for
    /// each stream that ever read it.
    fn prune(&self, device: &Device) -> Result<(), CallError> {
        if self.lock().readers.is_empty() {
            return Ok(());
        }
        device.relaxed(|| {
            // Under the lock: a use that ends meanwhile moves its mark first and then looks here
            // whether it is still known.
            let mut books = self.lock();
            let mut failed = Ok(());
            let readers = std::mem::take(&mut books.readers);
            let (gone, left) = readers.into_iter().partition(|mark| {
                let passed = mark.event.is_complete();
                passed.unwrap_or_else(|error| {
                    failed = Err(error);
                    false
                })
            });
            books.readers = left;
            drop(books);
            // Their streams are users': they are dropped without the lock.
            let _gone: Vec<Mark> = gone;
            failed
        })?
    }

    /// Waits for the streams of conflicting uses whose end was never marked. None of them goes on:
    /// the borrows see to that.
    fn settle(&self, kind: Kind) -> Result<(), ContainerError> {
        let open = self.lock().open_against(kind);
        for (number, stream) in open {
            if stream.is_capturing()? {
                return Err(MemoryError::Capturing.into());
            }
            stream.device().relaxed(|| stream.synchronize())??;
            self.lock().open.remove(&number);
        }
        Ok(())
    }

    /// Waits, on the host, until nothing that conflicts uses the memory any more.
    pub(super) fn wait(&self, device: &Device, kind: Kind) -> Result<(), ContainerError> {
        device.usable()?;
        self.settle(kind)?;
        let marks = self.lock().marks_against(kind);
        if !marks.is_empty() {
            device.relaxed(|| marks.iter().try_for_each(|mark| mark.event.synchronize()))??;
            let gone = self.lock().forget(kind);
            drop(gone);
        }
        Ok(())
    }

    /// Waits until nothing can use the memory any more, to free it: all work has passed, or its
    /// context is lost and nothing runs there.
    pub(super) fn drain(&self) -> Result<(), CallError> {
        let (open, marks) = {
            let books = self.lock();
            let open = books.open_against(Kind::Write);
            (open, books.marks_against(Kind::Write))
        };
        for (number, stream) in open {
            over(stream.device(), || {
                if stream.is_capturing()? {
                    // What it was given before cannot be waited for. Asking all the same would be
                    // answered so, and break the capture.
                    let code = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
                    return Err(DriverError::new(Call::StreamSynchronize, code).into());
                }
                stream.device().relaxed(|| stream.synchronize())?
            })?;
            self.lock().open.remove(&number);
        }
        for mark in marks {
            let device = mark.stream.device();
            over(device, || device.relaxed(|| mark.event.synchronize())?)?;
        }
        let gone = self.lock().forget(Kind::Write);
        drop(gone);
        Ok(())
    }
}

/// Whether what was waited for is over. It is when its context is lost, too.
fn over(device: &Device, wait: impl FnOnce() -> Result<(), CallError>) -> Result<(), CallError> {
    wait().or_else(|error| {
        if device.lost().is_some() {
            Ok(())
        } else {
            Err(error)
        }
    })
}

/// A use that goes on. It ends, and is marked, when dropped.
pub(super) struct Use<'a> {
    uses: &'a Uses,
    number: u64,
    kind: Kind,
    mark: Mark,
    passed: bool,
}

impl Use<'_> {
    /// Where it goes on.
    pub(super) const fn stream(&self) -> &Stream {
        &self.mark.stream
    }

    /// Ends it when its stream has been waited for: then it has passed, and so have the uses that
    /// the stream came behind.
    pub(super) fn passed(mut self) {
        let mut books = self.uses.lock();
        let gone = (books.open.remove(&self.number), books.forget(self.kind));
        drop(books);
        drop(gone);
        self.passed = true;
    }

    /// Marks the end. Nothing is marked on a stream that captures by now: the event would become
    /// part of a graph.
    fn mark(&self) -> Result<bool, CallError> {
        if self.mark.stream.is_capturing()? {
            return Ok(false);
        }
        self.mark.event.record(&self.mark.stream)?;
        Ok(true)
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        if self.passed {
            return;
        }
        // What could not be marked stays noted as open.
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
            // It came behind all readers, so its mark stands for them too.
            Kind::Write => {
                gone = books.forget(Kind::Write);
                books.writer = Some(self.mark.clone());
            }
        }
        drop(books);
        // Their streams are users': they are dropped without the lock.
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
