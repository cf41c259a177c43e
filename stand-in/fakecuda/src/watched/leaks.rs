//! The leaks of a report: objects that live when the process ends.

use std::sync::Arc;

use cuvmm_driver::{Location, Ordinal};
use cuvmm_model::model::{Object, ObjectKind};

use super::Watched;
use super::noting::Contexts;
use crate::diagnosis::books::{Books, Class, Descriptor};
use crate::diagnosis::findings::{Finding, Findings, What};
use crate::diagnosis::keepers::{Keepers, Lent};
use crate::diagnosis::report::size;
use crate::diagnosis::site::Site;
use crate::settings::Leaks;

impl Watched {
    /// Returns the findings so far, and the leaks if the process ended now.
    pub(crate) fn found(&self, leaks: Leaks, contexts: &Contexts) -> Findings {
        let keepers = self.keepers();
        let objects = self.host.objects();
        let mut found = Findings::default();
        for finding in &self.findings().kept {
            found.add(finding.clone());
        }
        found.dropped = self.findings().dropped;
        if leaks == Leaks::None {
            return found;
        }
        let books = self.books();
        for object in &objects {
            if counts(object.kind, leaks)
                && let Some(class) = Class::of(object.kind)
                && !books.is_forgiven(class, object.value)
            {
                let site = books.live(class, object.value).map(|made| &made.site);
                if !site.is_some_and(|site| keepers.made(site)) {
                    found.add(leak(object, site.map(Arc::clone)));
                }
            }
        }
        for memory in &keepers.lent {
            if !books.is_forgiven(Class::Memory, memory.address) {
                found.add(lent(memory, &books));
            }
        }
        for descriptor in &books.descriptors {
            let now = crate::descriptors::identity(descriptor.fd);
            if now == Some(descriptor.identity) && !keepers.made(&descriptor.site) {
                found.add(open_descriptor(descriptor));
            }
        }
        if leaks == Leaks::All {
            add_contexts(&mut found, contexts, &books, &keepers);
        }
        found
    }

    fn keepers(&self) -> Keepers {
        let sites = self.books().sites();
        Keepers::among(&sites)
    }

    /// Forgets all findings, and excludes all live objects from later leaks.
    pub(crate) fn forget(&self, contexts: &Contexts) {
        let lent = self.keepers().lent.into_iter();
        let objects = self.host.objects();
        let live = objects
            .iter()
            .filter_map(|object| Some((Class::of(object.kind)?, object.value)));
        let created = contexts.created.iter();
        let created = created.map(|&(number, _)| (Class::Context, number));
        let lent = lent.map(|memory| (Class::Memory, memory.address));
        self.books().forgive(live.chain(created).chain(lent));
        *self.findings() = Findings::default();
        let _ = self.host.take_hazards();
        let _ = self.host.take_unwritten();
    }
}

/// Adds live contexts, without references to primary contexts that libraries keep.
fn add_contexts(found: &mut Findings, contexts: &Contexts, books: &Books, keepers: &Keepers) {
    for &(number, device) in &contexts.created {
        if !books.is_forgiven(Class::Context, number) {
            let made = books.live(Class::Context, number);
            found.add(created(number, device, made.map(|made| &made.site)));
        }
    }
    for (device, &count) in contexts.retained.iter().enumerate() {
        let sites = books.retained(device as i32).iter();
        let (kept, others): (Vec<_>, Vec<_>) = sites.partition(|site| keepers.made(site));
        let count = count.saturating_sub(kept.len() as u32);
        if count > 0 {
            found.add(still_retained(
                device,
                count,
                others.last().copied().cloned(),
            ));
        }
    }
}

fn counts(kind: ObjectKind, leaks: Leaks) -> bool {
    let memory = !matches!(
        kind,
        ObjectKind::Stream | ObjectKind::Event | ObjectKind::Graph | ObjectKind::GraphExec
    );
    match leaks {
        Leaks::None => false,
        Leaks::Memory => memory,
        Leaks::All => true,
    }
}

fn name(kind: ObjectKind) -> &'static str {
    match kind {
        ObjectKind::PoolAllocation => "allocation of a memory pool",
        ObjectKind::Pinned => "pinned allocation",
        ObjectKind::Managed => "managed allocation",
        kind => Class::of(kind).map_or("object", Class::name),
    }
}

fn place(location: Option<Location>) -> String {
    location.map_or_else(String::new, |location| format!(" on {location}"))
}

fn leak(object: &Object, site: Option<Arc<Site>>) -> Finding {
    let kind = name(object.kind);
    let mut text = format!("{kind} {:#x}", object.value);
    if object.size > 0 {
        text.push_str(&format!(", {}", size(object.size)));
    }
    text.push_str(&place(object.location));
    if object.references > 1 {
        text.push_str(&format!(", {} references", object.references));
    }
    if site.is_none() {
        text.push_str(", made where is not known");
    }
    Finding {
        what: What::Leak,
        object: kind,
        values: vec![object.value],
        text,
        sites: site.map(|site| ("made", site)).into_iter().collect(),
        times: 1,
        bytes: object.size,
    }
}

/// Returns the leak of memory that a library's user has, with the site of its mapping.
fn lent(memory: &Lent, books: &Books) -> Finding {
    let below = [(Class::Mapping, "mapped"), (Class::Memory, "made")];
    let site = below.into_iter().find_map(|(class, did)| {
        let made = books.at(class, memory.address)?;
        Some((did, Arc::clone(&made.site)))
    });
    let text = format!(
        "memory of {}, {} at {:#x}{}",
        memory.library,
        size(memory.size),
        memory.address,
        place(Some(Location::device(Ordinal(memory.device))))
    );
    Finding {
        what: What::Leak,
        object: "memory of a library",
        values: vec![memory.address],
        text,
        sites: site.into_iter().collect(),
        times: 1,
        bytes: memory.size,
    }
}

fn open_descriptor(descriptor: &Descriptor) -> Finding {
    Finding {
        what: What::Leak,
        object: descriptor.what,
        values: vec![descriptor.fd as u64],
        text: format!("{} {}, still open", descriptor.what, descriptor.fd),
        sites: vec![("made", Arc::clone(&descriptor.site))],
        times: 1,
        bytes: 0,
    }
}

fn created(number: u64, device: Ordinal, site: Option<&Arc<Site>>) -> Finding {
    Finding {
        what: What::Leak,
        object: Class::Context.name(),
        values: vec![number],
        text: format!("context {number:#x} of device {}", device.0),
        sites: site
            .map(|site| ("made", Arc::clone(site)))
            .into_iter()
            .collect(),
        times: 1,
        bytes: 0,
    }
}

fn still_retained(device: usize, count: u32, last: Option<Arc<Site>>) -> Finding {
    Finding {
        what: What::Leak,
        object: "primary context",
        values: vec![device as u64],
        text: format!("primary context of device {device}, {count} references"),
        sites: last
            .map(|site| ("last retained", site))
            .into_iter()
            .collect(),
        times: 1,
        bytes: 0,
    }
}
