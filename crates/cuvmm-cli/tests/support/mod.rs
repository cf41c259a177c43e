//! Parts of tests that run the command beside other programs.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests fail as tests do, and no test uses all of them"
)]

#[path = "../../../cuvmm-model/testing/own_process.rs"]
mod own_process;
pub(crate) mod program;
pub(crate) mod pty;
pub(crate) mod svg;
