//! The cases, by subject.

mod apart;
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
    pub(crate) ask: fn(&mut Asker),
    pub(crate) kind: Kind,
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
        kind: Kind::Usual,
    }
}

const fn alone(name: &'static str, ask: fn(&mut Asker)) -> Case {
    Case {
        name,
        ask,
        kind: Kind::Alone,
    }
}

const fn helper(name: &'static str, ask: fn(&mut Asker)) -> Case {
    Case {
        name,
        ask,
        kind: Kind::Helper,
    }
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
        functions::CASES,
        graphs::CASES,
        queued::CASES,
        counts::CASES,
        edges::CASES,
    ]
    .into_iter()
    .flatten()
}
