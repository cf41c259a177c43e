//! What a block is to be.

use std::sync::Arc;

use crate::growth::Growth;
use crate::own::Stream;

/// What a block is to be.
#[derive(Clone, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) size: u64,
    pub(crate) capacity: u64,
    pub(crate) home: Option<&'a Stream>,
    pub(crate) tag: Option<Arc<str>>,
    pub(crate) zeroed: bool,
    pub(crate) grain: Grain,
    /// Idle memory serves only where nothing of an extent is left over behind the block.
    pub(crate) snug: bool,
    /// What the distance of blocks side by side is a multiple of, in bytes.
    pub(crate) stride: u64,
}

/// What a block's memory comes in, where that is another thing than the pool says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Grain {
    pub(crate) growth: Option<Growth>,
    /// The largest extent in bytes.
    pub(crate) largest: Option<u64>,
}

/// What a block is to be, for as long as its future waits.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    wanted: Wanted<'static>,
    home: Option<Stream>,
}

impl Wish {
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
