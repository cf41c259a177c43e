//! Benchmarks of the operations that call no driver, without a GPU: cached allocations of a pool and
//! of a heap. Those that do are counted by `cargo xtask instructions` and timed by `cuvmm-bench run`.
//!
//! `cargo bench -p cuvmm` runs all of them, `cargo bench -p cuvmm -- NAME` one.
//!
//! They run on the model driver in real time.
#![allow(clippy::unwrap_used)]

mod heap;
mod rig;
mod threads;
mod warm;

use criterion::Criterion;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    warm::bench(&mut criterion);
    heap::bench(&mut criterion);
    threads::bench(&mut criterion);
    criterion.final_summary();
}
