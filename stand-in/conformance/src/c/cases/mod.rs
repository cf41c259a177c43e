//! The cases, by subject.

mod apart;
mod batches;
mod contexts;
mod copies;
mod counts;
mod devices;
mod edges;
mod entry;
mod functions;
mod graphs;
mod host;
mod ipc;
mod memory;
mod peers;
mod pointers;
mod queued;
mod streams;

use super::asker::Asker;

/// A question to a library, asked in a process of its own.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    ask: fn(&mut Asker),
    begin: Begin,
    pub(crate) kind: Kind,
}

/// The state of the driver in which a case begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begin {
    /// Not initialized.
    Bare,
    /// Initialized, and without a context.
    Initialized,
    /// The first device's primary context is current.
    Entered,
}

impl Case {
    /// Asks the question, after its preparation.
    pub(crate) fn run(&self, asker: &mut Asker) {
        match self.begin {
            Begin::Bare => {}
            Begin::Initialized => asker.need("cuInit", &[0]),
            Begin::Entered => asker.enter(),
        }
        (self.ask)(asker);
    }
}

/// The way in which a case is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Beside others.
    Usual,
    /// While no other case runs, because it reads how much memory is free.
    Alone,
    /// By another case only.
    Helper,
}

const fn case(name: &'static str, ask: fn(&mut Asker)) -> Case {
    Case {
        name,
        ask,
        begin: Begin::Entered,
        kind: Kind::Usual,
    }
}

const fn initialized(name: &'static str, ask: fn(&mut Asker)) -> Case {
    let mut case = case(name, ask);
    case.begin = Begin::Initialized;
    case
}

const fn bare(name: &'static str, ask: fn(&mut Asker)) -> Case {
    let mut case = case(name, ask);
    case.begin = Begin::Bare;
    case
}

const fn alone(name: &'static str, ask: fn(&mut Asker)) -> Case {
    let mut case = case(name, ask);
    case.kind = Kind::Alone;
    case
}

const fn helper(name: &'static str, ask: fn(&mut Asker)) -> Case {
    let mut case = case(name, ask);
    case.kind = Kind::Helper;
    case
}

/// Returns all cases.
pub(crate) fn all() -> impl Iterator<Item = &'static Case> {
    [
        entry::CASES,
        devices::CASES,
        contexts::CASES,
        streams::CASES,
        pointers::CASES,
        memory::CASES,
        host::CASES,
        copies::CASES,
        ipc::CASES,
        peers::CASES,
        apart::CASES,
        batches::CASES,
        functions::CASES,
        graphs::CASES,
        queued::CASES,
        counts::CASES,
        edges::CASES,
    ]
    .into_iter()
    .flatten()
}
