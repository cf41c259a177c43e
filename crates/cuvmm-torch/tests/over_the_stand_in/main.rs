//! The shared library over the stand-in for libcuda, each case in a process of its own.
//!
//! `unsafe` is used to call the functions of both libraries, and where a module says so.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;

mod captures;
mod exceptions;
mod figures;
mod giving;
mod graph_tags;
mod groups;
mod history;
mod interface;
mod keeping;
mod kept;
mod library;
mod paged;
mod paged_sleep;
mod peers;
mod sharing;
mod streams;
mod tags;
