//! Requests of other programs to a group of which this process is a rank, as the ledgers receive
//! them. Heaps open ledgers before the program joins a group, so the function that answers is set
//! later.

use std::sync::OnceLock;

use cuvmm::ledger::GroupRequest;

type Answer = fn(&GroupRequest) -> Result<(), String>;

static ANSWER: OnceLock<Answer> = OnceLock::new();

/// Sets the function that answers, the same for all groups.
pub(crate) fn set(answer: Answer) {
    ANSWER.get_or_init(|| answer);
}

pub(crate) fn answer(request: &GroupRequest) -> Result<(), String> {
    let answer = ANSWER.get().ok_or("the process has joined no group")?;
    answer(request)
}
