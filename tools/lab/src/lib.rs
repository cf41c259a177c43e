//! The laboratory of the command `cuvmm`: `cuvmm replay` replays request traces against an elastic
//! pool and a static split, `cuvmm heap` runs traces of allocations on a heap and on models of
//! PyTorch's allocators, and `cuvmm picture` draws recordings of memory over time.
//!
//! This is not an interface for other programs: it is the feature `lab` of the command, which an
//! operator can leave out.

// Without ledgers there is no replay in processes, which has much of the replay to itself.
#![cfg_attr(not(target_os = "linux"), allow(dead_code))]

mod chart;
pub mod heap;
pub mod picture;
pub mod replay;
