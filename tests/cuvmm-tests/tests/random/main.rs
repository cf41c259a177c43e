//! Random programs, compared with small references.
#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;

mod futures;
mod heap;
mod holders;
mod kv;
mod mem_pools;
mod pools;
mod sleep;
