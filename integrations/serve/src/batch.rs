//! The tokens that are computed together: those of a prompt, or one of each of many sequences.

use super::cache::Caches;

/// The number of a prompt's tokens that are computed at a time, which bounds the intermediate
/// results of attention.
pub(crate) const PIECE: usize = 512;

/// One sequence's part of a step.
pub(crate) struct Next<'a> {
    /// The token to read.
    pub(crate) token: u32,
    /// The number of tokens before it.
    pub(crate) position: usize,
    pub(crate) caches: &'a mut Caches,
}

/// The sequences to which the tokens belong that are computed together.
pub(super) enum Rows<'a, 'b> {
    /// All belong to one sequence, after this many of its tokens.
    Prompt(&'a mut Caches, usize),
    /// Each belongs to a different sequence.
    Step(&'a mut [Next<'b>]),
}
