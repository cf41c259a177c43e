//! The state of a server: its requests and its models. This module changes nothing: `server`
//! decides what is computed, and `relief` where memory comes from.

use std::time::{Duration, Instant};

use super::cache::Caches;
use super::figures::Figures;
use super::model::Model;
use super::prefix::Prefix;
use super::schedule::Schedule;
use super::trace::Request;

pub(super) struct Job {
    pub(super) request: Request,
    /// The tokens of the prompt and of the answer so far, without the system prompt.
    pub(super) tokens: Vec<u32>,
    pub(super) caches: Caches,
    /// The number of these tokens that are in the caches, after the system prompt.
    pub(super) done: usize,
    /// The time from arrival to the first token.
    pub(super) first: Option<Duration>,
}

pub(crate) struct Server<'a> {
    pub(super) models: &'a [Model],
    pub(super) prefixes: Vec<Prefix<'a>>,
    pub(super) schedule: Schedule,
    pub(super) jobs: Vec<Job>,
    pub(super) begun: Instant,
    pub(super) busy: Vec<Instant>,
    /// For each group, the number of consecutive rounds in which nothing ran and no waiting request
    /// could begin.
    pub(super) stuck: Vec<u32>,
    pub(super) figures: Figures,
}
