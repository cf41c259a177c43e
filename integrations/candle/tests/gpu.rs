//! candle over a tenant's memory, on a GPU.
//!
//! Without a GPU, the tests print a notice that they did not run; `CUVMM_REQUIRE_GPU=1` makes that
//! a failure.
#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

#[path = "gpu/caches.rs"]
mod caches;
#[path = "gpu/forks.rs"]
mod forks;
#[path = "gpu/intermediates.rs"]
mod intermediates;
#[path = "gpu/rig.rs"]
mod rig;
#[path = "gpu/share.rs"]
mod share;
#[path = "gpu/sleep.rs"]
mod sleep;
#[path = "gpu/tensors.rs"]
mod tensors;
#[path = "gpu/weights.rs"]
mod weights;

#[path = "../examples/kv_cache.rs"]
mod kv_cache;
#[path = "../examples/load.rs"]
mod load;

#[test]
fn the_examples_run() {
    if rig::gpu("the_examples_run").is_some() {
        kv_cache::main().unwrap();
        load::main().unwrap();
    }
}
