//! Detection of forked children, of which there are none.

/// The process that created this value.
#[derive(Debug)]
pub(crate) struct OpeningProcess {
    id: u32,
}

impl OpeningProcess {
    pub(crate) fn new() -> Self {
        Self {
            id: std::process::id(),
        }
    }

    pub(crate) const fn id(&self) -> u32 {
        self.id
    }

    /// Returns `true`: no other process has this value.
    pub(crate) const fn is_here(&self) -> bool {
        true
    }
}
