//! Requests of other programs to a group of which this process is a rank, as the ledgers receive
//! them. Heaps open ledgers before the program joins a group, so the function that answers is set
//! later.

use std::sync::OnceLock;

use cuvmm::ledger::GroupRequest;

use crate::edge;

type Answer = fn(&GroupRequest) -> Result<(), String>;

static ANSWER: OnceLock<Answer> = OnceLock::new();

/// Sets the function that answers, the same for all groups.
pub(crate) fn set(answer: Answer) {
    ANSWER.get_or_init(|| answer);
}

pub(crate) fn answer(request: &GroupRequest) -> Result<(), String> {
    // A thread of the ledger, which has locks while tags move.
    let _locks = edge::without_calling_back();
    let answer = ANSWER.get().ok_or("the process has joined no group")?;
    answer(request)
}
