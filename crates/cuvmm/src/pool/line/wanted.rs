//! The options of a block that is to be allocated.

use std::sync::Arc;

use crate::growth::Growth;
use crate::own::Stream;

#[derive(Clone, Debug, Default)]
pub(in crate::pool) struct Wanted<'a> {
    pub(crate) size: u64,
    pub(crate) capacity: u64,
    pub(crate) home: Option<&'a Stream>,
    pub(crate) tag: Option<Arc<str>>,
    pub(crate) zeroed: bool,
    pub(crate) grain: ExtentOptions,
    /// `true` if idle memory is used only if nothing of an extent is left over behind the block.
    pub(in crate::pool) exact_extents: bool,
    /// `true` if all work on the block is launched under leases, so that its memory may be replaced
    /// while none lives.
    pub(in crate::pool) movable: bool,
    /// `true` if the extents are to be small in proportion to what lies before them.
    pub(in crate::pool) shrinks: bool,
    /// The distance of blocks side by side is a multiple of this number of bytes.
    pub(crate) stride: u64,
}

impl Wanted<'_> {
    /// Returns `true` if the block may go to a stream cache, which keeps neither option.
    pub(in crate::pool) const fn is_cacheable(&self) -> bool {
        !(self.movable | self.shrinks)
    }
}

/// The growth and largest extent of a block, where they differ from the pool's settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::pool) struct ExtentOptions {
    pub(crate) growth: Option<Growth>,
    /// In bytes.
    pub(crate) largest: Option<u64>,
}

#[derive(Clone, Debug)]
pub(super) struct OwnedOptions {
    wanted: Wanted<'static>,
    home: Option<Stream>,
}

impl OwnedOptions {
    pub(super) fn of(wanted: &Wanted<'_>) -> Self {
        let home = wanted.home.cloned();
        let wanted = Wanted {
            home: None,
            tag: wanted.tag.clone(),
            ..*wanted
        };
        Self { wanted, home }
    }

    pub(super) fn wanted(&self) -> Wanted<'_> {
        Wanted {
            home: self.home.as_ref(),
            ..self.wanted.clone()
        }
    }
}
