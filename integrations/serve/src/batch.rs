//! Tokens that are computed together: tokens of a prompt, or one token each of many sequences.

use super::cache::Caches;

/// The number of a prompt's tokens that are computed at a time, which bounds the intermediate
/// results of attention.
pub(crate) const PIECE: usize = 512;

pub(crate) struct Next<'a> {
    pub(crate) token: u32,
    /// The number of tokens before `token`.
    pub(crate) position: usize,
    pub(crate) caches: &'a mut Caches,
}

/// The sequences of the tokens that are computed together.
pub(super) enum Rows<'a, 'b> {
    /// One sequence, after this many of its tokens.
    Prompt(&'a mut Caches, usize),
    /// A different sequence for each token.
    Step(&'a mut [Next<'b>]),
}
