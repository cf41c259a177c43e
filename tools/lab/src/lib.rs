//! The laboratory of the command `cuvmm`: `cuvmm replay` replays request traces against an elastic pool
//! and a static split, and `cuvmm heap` runs traces of allocations on a heap and on models of PyTorch's
//! allocators.
//!
//! This is not an interface for other programs: the command has it as its feature `lab`, and an operator
//! can install the command without it.

mod chart;
pub mod heap;
pub mod replay;
