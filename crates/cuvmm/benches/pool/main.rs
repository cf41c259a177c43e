//! Benchmarks of the pool and of heaps without a GPU.
//!
//! `cargo bench -p cuvmm` runs all of them, `cargo bench -p cuvmm -- NAME` one.
//!
//! They run on the model driver in real time. Operations that call the driver therefore include the
//! model's own bookkeeping, and exclude the time of a GPU's driver, which `cuvmm-bench run` measures.
#![allow(clippy::unwrap_used)]

mod cold;
mod grow;
mod heap;
mod kv;
mod rig;
mod sparse;
mod stats;
mod take_back;
mod threads;
mod warm;

use criterion::Criterion;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    warm::bench(&mut criterion);
    heap::bench(&mut criterion);
    grow::bench(&mut criterion);
    cold::bench(&mut criterion);
    take_back::bench(&mut criterion);
    stats::bench(&mut criterion);
    kv::bench(&mut criterion);
    sparse::bench(&mut criterion);
    threads::bench(&mut criterion);
    criterion.final_summary();
}
