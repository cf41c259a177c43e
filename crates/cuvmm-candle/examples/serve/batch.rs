//! What is computed together: the tokens of a prompt, or one of each of many sequences.

use super::cache::Caches;

/// Tokens of a prompt that are computed at a time, which bounds what attention has in between.
pub(crate) const PIECE: usize = 512;

/// One sequence's part in a step.
pub(crate) struct Next<'a> {
    /// The token that is read.
    pub(crate) token: u32,
    /// How many there are before it.
    pub(crate) position: usize,
    pub(crate) caches: &'a mut Caches,
}

/// Where the tokens that are computed together belong.
pub(super) enum Rows<'a, 'b> {
    /// All to one sequence, with so many before them.
    Prompt(&'a mut Caches, usize),
    /// Each to another.
    Step(&'a mut [Next<'b>]),
}
