//! Notes of calls, and the misuse that they show.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuvmm_driver::{AccessFlags, CUresult, DeviceAddress, DriverError, Ordinal, Result};
use cuvmm_model::host::HostDriver;
use cuvmm_model::model::{Hazard, Unwritten};

use super::Watched;
use crate::diagnosis::books::{Books, Class, Gone};
use crate::diagnosis::findings::{Finding, Findings, What};
use crate::diagnosis::report::size;
use crate::diagnosis::site::Site;

pub(crate) struct Contexts {
    pub(crate) retained: Vec<u32>,
    pub(crate) created: Vec<(u64, Ordinal)>,
}

impl Watched {
    /// Wraps a driver. Nothing is noted until the watch is on.
    pub(crate) fn new(host: HostDriver, on: bool) -> Self {
        Self {
            host,
            on: AtomicBool::new(on),
            books: Mutex::default(),
            findings: Mutex::default(),
        }
    }

    pub(crate) fn watch(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
    }

    fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    pub(super) fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn findings(&self) -> MutexGuard<'_, Findings> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note_made(&self, class: Class, value: u64, size: u64) {
        if self.is_on() {
            let site = Site::here();
            self.books().make(class, value, size, site);
        }
    }

    /// Notes the site of a reference to a device's primary context.
    pub(crate) fn note_retained(&self, device: Ordinal) {
        if self.is_on() {
            let site = Site::here();
            self.books().retain(device.0, site);
        }
    }

    pub(crate) fn note_released(&self, device: Ordinal) {
        if self.is_on() {
            let site = Site::here();
            self.books().unretain(device.0, &site);
        }
    }

    pub(crate) fn note_reset(&self, device: Ordinal) {
        self.books().reset(device.0);
    }

    pub(crate) fn note_context(&self, number: u64) {
        self.note_made(Class::Context, number, 0);
    }

    /// Notes that the program destroyed a context, or that it tried to.
    pub(crate) fn note_context_end(&self, number: u64, ended: bool) {
        if !self.is_on() {
            return;
        }
        if ended {
            self.books().release(Class::Context, number, &Site::here());
        } else {
            self.note_use(Class::Context, number);
        }
    }

    pub(super) fn note_descriptor(&self, fd: i32, what: &'static str) {
        if let Some(identity) = crate::descriptors::identity(fd).filter(|_| self.is_on()) {
            let site = Site::here();
            let descriptor = crate::diagnosis::books::Descriptor {
                fd,
                identity,
                what,
                site,
            };
            self.books().descriptors.push(descriptor);
        }
    }

    /// Notes a use of a handle, which is wrong if it was released and names nothing new.
    pub(crate) fn note_use(&self, class: Class, value: u64) {
        if !self.is_on() {
            return;
        }
        let gone = self.books().released(class, value).cloned();
        if let Some(gone) = gone {
            self.found_after_release(class, value, &gone, Site::here());
        }
    }

    /// Notes the addresses of a call. If it was refused as invalid, memory there may have been
    /// released.
    pub(super) fn note_addresses(&self, error: Option<&DriverError>, at: &[DeviceAddress]) {
        self.note_ranges(
            error,
            &[Class::Memory, Class::Mapping, Class::Reservation],
            at,
        );
    }

    /// Notes the address of a refused mapping. Earlier mappings there are no mistake.
    pub(super) fn note_place(&self, error: &DriverError, at: DeviceAddress) {
        self.note_ranges(Some(error), &[Class::Reservation], &[at]);
    }

    fn note_ranges(&self, error: Option<&DriverError>, classes: &[Class], at: &[DeviceAddress]) {
        if !self.is_on() {
            return;
        }
        self.note_taken();
        let refused = error.and_then(DriverError::code);
        if refused != Some(CUresult::CUDA_ERROR_INVALID_VALUE) {
            return;
        }
        for address in at {
            let found = {
                let books = self.books();
                let found = books.released_at(classes, address.0);
                found.map(|(class, start, gone)| (class, start, gone.clone()))
            };
            if let Some((class, start, gone)) = found {
                self.found_after_release(class, start, &gone, Site::here());
            }
        }
    }

    /// Runs a call that ends an object, or one reference to it.
    pub(super) fn ending(
        &self,
        class: Class,
        value: u64,
        call: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if !self.is_on() {
            return call();
        }
        let site = Site::here();
        // Noted first: when the call returns, another thread may have got the value again.
        let before = {
            let mut books = self.books();
            let before = books.release(class, value, &site);
            match before {
                Some(before) => Ok(before),
                None => Err(books.released(class, value).cloned()),
            }
        };
        let answer = call();
        self.note_taken();
        match (before, &answer) {
            (Ok(before), Err(_)) => self.books().restore(class, value, before),
            (Err(Some(gone)), _) => self.found_after_release(class, value, &gone, site),
            _ => {}
        }
        answer
    }

    pub(super) fn unmapping(
        &self,
        start: u64,
        size: u64,
        call: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if !self.is_on() {
            return call();
        }
        let site = Site::here();
        let ended: Vec<_> = {
            let mut books = self.books();
            let inside = books.within(Class::Mapping, start, size);
            let end = |first| Some((first, books.release(Class::Mapping, first, &site)?));
            inside.into_iter().filter_map(end).collect()
        };
        let answer = call();
        if answer.is_err() {
            let mut books = self.books();
            for (first, before) in ended {
                books.restore(Class::Mapping, first, before);
            }
        }
        answer
    }

    fn found_after_release(&self, class: Class, value: u64, gone: &Gone, site: Arc<Site>) {
        let text = format!(
            "{} {value:#x} was used by {} after it was released",
            class.name(),
            site.call
        );
        self.findings().add(Finding {
            what: What::UsedAfterRelease,
            object: class.name(),
            values: vec![value],
            text,
            sites: vec![
                ("used", site),
                ("released", Arc::clone(&gone.released)),
                ("made", Arc::clone(&gone.made)),
            ],
            times: 1,
            bytes: 0,
        });
    }

    /// Notes the driver's findings in this call: memory taken from queued work, and reads of bytes
    /// that were never written.
    fn note_taken(&self) {
        let hazards = match self.host.hazards() {
            0 => Vec::new(),
            _ => self.host.take_hazards(),
        };
        let unwritten = self.host.take_unwritten();
        if hazards.is_empty() && unwritten.is_empty() {
            return;
        }
        let site = Site::here();
        let mut findings = self.findings();
        for hazard in hazards {
            findings.add(taken(&hazard, Arc::clone(&site)));
        }
        for read in unwritten {
            findings.add(unwritten_read(&read, Arc::clone(&site)));
        }
    }
}

fn taken(hazard: &Hazard, site: Arc<Site>) -> Finding {
    let does = match hazard.needs {
        AccessFlags::READ => "reads",
        _ => "writes",
    };
    let text = format!(
        "{} took away {} at {:#x}, which a {} queued on stream {:#x} of device {} {does}",
        hazard.call,
        size(hazard.size),
        hazard.address.0,
        hazard.work,
        hazard.stream.0,
        hazard.device.0
    );
    Finding {
        what: What::TakenFromWork,
        object: hazard.work,
        values: vec![hazard.address.0],
        text,
        sites: vec![("taken", site)],
        times: 1,
        bytes: hazard.size,
    }
}

fn unwritten_read(read: &Unwritten, site: Arc<Site>) -> Finding {
    let text = format!(
        "{} at {:#x}, of {} read by a {} on device {}",
        size(read.unwritten),
        read.address.0,
        size(read.size),
        read.work,
        read.device.0
    );
    Finding {
        what: What::ReadUnwritten,
        object: read.work,
        values: vec![read.address.0],
        text,
        sites: vec![("read", site)],
        times: 1,
        bytes: read.unwritten,
    }
}
