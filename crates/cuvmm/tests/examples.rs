//! The examples run, and end without an error.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used)]

#[path = "../examples/device_vec.rs"]
mod device_vec;

#[path = "../examples/grow_in_place.rs"]
mod grow_in_place;

#[path = "../examples/share_a_gpu.rs"]
mod share_a_gpu;

#[test]
fn a_vector_never_moves() {
    device_vec::main().unwrap();
}

#[test]
fn a_block_grows_in_place() {
    grow_in_place::main().unwrap();
}

#[test]
fn two_tenants_share_a_device() {
    share_a_gpu::main().unwrap();
}
