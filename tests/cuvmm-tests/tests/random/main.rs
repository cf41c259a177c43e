//! Random programs, compared with small references.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/programs.rs"]
mod programs;

mod futures;
mod heap;
mod holders;
mod kv;
mod mem_pools;
mod pools;
mod sleep;
