//! Programs in C over the stand-in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../testing/built.rs"]
mod built;
#[path = "../../testing/programs.rs"]
mod programs;

mod devices;
mod diagnosis;
mod functions;
mod process;
mod settings;
