//! What a stream can be asked to do.

use super::costs::Costs;
use crate::AccessFlags;

/// One piece of work.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    /// Nothing: a place in the queue that others can wait for.
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
    /// From an address of the host.
    ToDevice {
        to: u64,
        from: usize,
        size: u64,
    },
    /// To an address of the host.
    ToHost {
        to: usize,
        from: u64,
        size: u64,
    },
    /// What a test launches: it touches its memory only when it runs.
    Kernel {
        reads: Vec<(u64, u64)>,
        writes: Vec<(u64, u64, u8)>,
    },
    /// An allocation of a memory pool ends here.
    FreeAllocation {
        address: u64,
    },
    /// A managed range is moved; the bytes stay where they are.
    Prefetch,
    Graph(Vec<Work>),
}

/// What is going to be done to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
}

impl Use {
    /// Whether a right is enough for it.
    pub(crate) fn allowed(self, right: AccessFlags) -> bool {
        match self {
            Self::Read => right != AccessFlags::NONE,
            Self::Write => right == AccessFlags::READ_WRITE,
        }
    }
}

/// A range that a piece of work will use when it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Named {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) how: Use,
    /// The range is the program's end of a copy.
    pub(crate) of_host: bool,
}

impl Work {
    /// What it is called where work is reported.
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
            Self::Graph(_) => "graph",
        }
    }

    /// Shows each range that it will use.
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
            &Self::ToDevice { to, from, size } => {
                names(from as u64, size, Use::Read, true);
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
            Self::Marker | Self::FreeAllocation { .. } | Self::Prefetch => {}
        }
    }

    /// How long it takes, in virtual microseconds. What a test launches takes none.
    pub(crate) fn takes(&self, costs: &Costs) -> f64 {
        match self {
            &Self::Fill { size, .. } => costs.fill.at(size),
            &Self::Copy { size, .. } => costs.device_copy.at(size),
            &Self::ToDevice { size, .. } | &Self::ToHost { size, .. } => costs.host_copy.at(size),
            Self::Graph(nodes) => nodes.iter().map(|node| node.takes(costs)).sum(),
            Self::Marker
            | Self::Kernel { .. }
            | Self::FreeAllocation { .. }
            | Self::Prefetch { .. } => 0.0,
        }
    }
}
