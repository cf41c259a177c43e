//! The kinds of work that can be queued on a stream.

use super::costs::Costs;
use super::host_calls::HostCall;
use super::source::Source;
use cuvmm_driver::AccessFlags;

#[derive(Clone, Debug)]
pub(crate) enum Work {
    /// No work: a position in the queue that other work can wait for.
    Marker,
    Fill {
        to: u64,
        byte: u8,
        size: u64,
    },
    Copy {
        to: u64,
        from: u64,
        size: u64,
    },
    ToDevice {
        to: u64,
        from: Source,
        size: u64,
    },
    ToHost {
        to: usize,
        from: u64,
        size: u64,
    },
    /// A kernel launched by a test, which accesses its memory only when it runs.
    Kernel {
        reads: Vec<(u64, u64)>,
        writes: Vec<(u64, u64, u8)>,
    },
    FreeAllocation {
        address: u64,
    },
    /// Prefetches or discards of managed ranges. The bytes stay in place.
    Prefetch,
    Host(HostCall),
    /// The captured work of a graph, without nested graphs.
    Graph(Vec<Work>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
}

impl Use {
    pub(crate) fn allowed(self, right: AccessFlags) -> bool {
        match self {
            Self::Read => right != AccessFlags::NONE,
            Self::Write => right == AccessFlags::READ_WRITE,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Named {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) how: Use,
    pub(crate) of_host: bool,
}

impl Work {
    /// Reads the bytes that must be read at the call, because the work stays queued or is recorded.
    pub(crate) fn keep_source(&mut self) {
        if let Self::ToDevice { from, size, .. } = self {
            from.keep(*size);
        }
    }

    pub(crate) fn has_function(&self) -> bool {
        match self {
            Self::Host(_) => true,
            Self::Graph(nodes) => nodes.iter().any(Self::has_function),
            _ => false,
        }
    }

    /// Splits the work at its first function of the program: the work before it, the function, and
    /// the work after it.
    pub(crate) fn split(self) -> (Self, Option<(HostCall, Self)>) {
        match self {
            Self::Host(call) => (Self::Marker, Some((call, Self::Marker))),
            Self::Graph(mut nodes) => {
                let Some(first) = nodes.iter().position(Self::has_function) else {
                    return (Self::Graph(nodes), None);
                };
                let mut rest = nodes.split_off(first).into_iter();
                let Some(Self::Host(call)) = rest.next() else {
                    return (Self::Graph(nodes), None);
                };
                let rest = match rest.len() {
                    0 => Self::Marker,
                    _ => Self::Graph(rest.collect()),
                };
                (Self::Graph(nodes), Some((call, rest)))
            }
            work => (work, None),
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Marker => "marker",
            Self::Fill { .. } => "fill",
            Self::Copy { .. } => "copy",
            Self::ToDevice { .. } => "copy to the device",
            Self::ToHost { .. } => "copy to the host",
            Self::Kernel { .. } => "kernel",
            Self::FreeAllocation { .. } => "free",
            Self::Prefetch => "prefetch",
            Self::Host(_) => "function of the host",
            Self::Graph(_) => "graph",
        }
    }

    pub(crate) fn each_named(&self, see: &mut impl FnMut(Named)) {
        let mut names = |start, size, how, of_host| {
            see(Named {
                start,
                size,
                how,
                of_host,
            });
        };
        match self {
            &Self::Fill { to, size, .. } => names(to, size, Use::Write, false),
            &Self::Copy { to, from, size } => {
                names(from, size, Use::Read, false);
                names(to, size, Use::Write, false);
            }
            &Self::ToDevice { to, ref from, size } => {
                if let &Source::At(from) = from {
                    names(from as u64, size, Use::Read, true);
                }
                names(to, size, Use::Write, false);
            }
            &Self::ToHost { to, from, size } => {
                names(from, size, Use::Read, false);
                names(to as u64, size, Use::Write, true);
            }
            Self::Kernel { reads, writes } => {
                for &(from, size) in reads {
                    names(from, size, Use::Read, false);
                }
                for &(to, size, _) in writes {
                    names(to, size, Use::Write, false);
                }
            }
            Self::Graph(nodes) => nodes.iter().for_each(|node| node.each_named(see)),
            Self::Marker | Self::FreeAllocation { .. } | Self::Prefetch | Self::Host(_) => {}
        }
    }

    /// Returns how long the work takes, in virtual microseconds. A test's kernel takes none.
    pub(crate) fn takes(&self, costs: &Costs) -> f64 {
        match self {
            &Self::Fill { size, .. } => costs.fill.at(size),
            &Self::Copy { size, .. } => costs.device_copy.at(size),
            Self::ToDevice { size, .. } | Self::ToHost { size, .. } => costs.host_copy.at(*size),
            Self::Graph(nodes) => nodes.iter().map(|node| node.takes(costs)).sum(),
            Self::Marker
            | Self::Kernel { .. }
            | Self::FreeAllocation { .. }
            | Self::Prefetch { .. }
            | Self::Host(_) => 0.0,
        }
    }
}
