//! The output of `cuvmm share attach`, as text and as JSON.

use std::fmt::Write as _;
use std::path::Path;

use cuvmm::share::{Manifest, Publication};
use serde_json::{Value, json};

use super::publishers::Publisher;
use cuvmm_command::page::Page;
use cuvmm_command::size::iec as size;
use cuvmm_command::terminal::{counted, safe, shown};

const FEW: usize = 10;

#[derive(Debug)]
pub(super) struct Attached<'a> {
    pub(super) publisher: &'a Publisher,
    pub(super) publication: &'a Publication,
    /// Microseconds from before connecting until the memory is mapped.
    pub(super) attach_us: f64,
    /// Microseconds from before connecting until the first byte is read.
    pub(super) first_byte_us: f64,
    /// Free bytes of the device before attaching, by the driver.
    pub(super) free_before: u64,
    /// Free bytes of the device after attaching, by the driver.
    pub(super) free_after: u64,
    /// The file that the bytes were compared with.
    pub(super) verified: Option<&'a Path>,
    pub(super) dump: Option<Dump>,
}

#[derive(Debug)]
pub(super) struct Dump {
    pub(super) tensor: String,
    pub(super) elements: Vec<String>,
}

impl Attached<'_> {
    pub(super) fn object(&self) -> Value {
        let memory = self.publication.memory();
        let dump = self.dump.as_ref();
        json!({
            "name": self.publication.name(),
            "version": self.publication.version(),
            "pid": self.publisher.pid,
            "socket": self.publisher.socket.display().to_string(),
            "attach_us": self.attach_us,
            "first_byte_us": self.first_byte_us,
            "address": memory.address().to_string(),
            "bytes": memory.held(),
            "extents": memory.extents().len(),
            "device": memory.device().name(),
            "device_free_before": self.free_before,
            "device_free_after": self.free_after,
            "manifest": self.publication.manifest(),
            "verified": self.verified.is_some(),
            "dump": dump.map(|dump| json!({"tensor": dump.tensor, "elements": dump.elements})),
        })
    }

    pub(super) fn text(&self, all: bool) -> String {
        let memory = self.publication.memory();
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:?} version {} of process {} at {}",
            self.publication.name(),
            self.publication.version(),
            self.publisher.pid,
            shown(&self.publisher.socket)
        );
        let _ = writeln!(
            text,
            "attached in {:.0} us, first byte after {:.0} us",
            self.attach_us, self.first_byte_us
        );
        let _ = writeln!(
            text,
            "{} in {} at {}, read only",
            size(memory.held()),
            counted(memory.extents().len() as u64, "extent"),
            memory.address()
        );
        let _ = writeln!(
            text,
            "free on {} by its driver: {} before, {} after",
            safe(memory.device().name()),
            size(self.free_before),
            size(self.free_after)
        );
        list(&mut text, self.publication.manifest(), all);
        if let Some(dump) = &self.dump {
            let elements = dump.elements.join(", ");
            let _ = writeln!(text, "{}: {elements}", safe(&dump.tensor));
        }
        if let Some(file) = self.verified {
            let _ = writeln!(text, "verified: all bytes are those of {}", shown(file));
        }
        text
    }
}

fn list(text: &mut String, manifest: &Manifest, all: bool) {
    for (key, note) in &manifest.metadata {
        let _ = writeln!(text, "{}: {}", safe(key), safe(note));
    }
    let tensors = &manifest.tensors;
    let most = if all { tensors.len() } else { FEW };
    let head = ["tensor", "type", "shape", "offset", "bytes"];
    let mut rows = Page::Verbose.table(&head, |column| column >= 3);
    for tensor in tensors.iter().take(most) {
        rows.add_row([
            safe(&tensor.name).into_owned(),
            safe(&tensor.dtype).into_owned(),
            format!("{:?}", tensor.shape),
            tensor.offset.to_string(),
            tensor.size.to_string(),
        ]);
    }
    let _ = writeln!(text, "\n{rows}\n");
    if tensors.len() > most {
        let _ = writeln!(text, "{} more: --all lists them", tensors.len() - most);
    }
}
