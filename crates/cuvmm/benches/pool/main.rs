//! What the pool costs where no GPU is: `cargo bench -p cuvmm`, or one of them with
//! `cargo bench -p cuvmm -- NAME`.
//!
//! All of it runs on the model driver in real time, so that what calls the driver holds the model's
//! own books as well, and nothing of what a GPU's driver takes. `cuvmm bench` measures that.
#![allow(clippy::unwrap_used)]

mod cold;
mod grow;
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
    grow::bench(&mut criterion);
    cold::bench(&mut criterion);
    take_back::bench(&mut criterion);
    stats::bench(&mut criterion);
    kv::bench(&mut criterion);
    sparse::bench(&mut criterion);
    threads::bench(&mut criterion);
    criterion.final_summary();
}
