//! Runs the examples, which must end without an error.
#![allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    clippy::unwrap_used,
    clippy::duplicate_mod
)]

use std::time::Duration;

#[path = "../examples/adjacent_blocks.rs"]
mod adjacent_blocks;

#[path = "../examples/async_server.rs"]
mod async_server;

#[path = "../examples/device_vec.rs"]
mod device_vec;

#[cfg(feature = "dlpack")]
#[path = "../examples/dlpack.rs"]
mod dlpack;

#[path = "../examples/export_block.rs"]
mod export_block;

#[path = "../examples/grid.rs"]
mod grid;

#[path = "../examples/grow_in_place.rs"]
mod grow_in_place;

#[path = "../examples/hardened.rs"]
mod hardened;

#[path = "../examples/kept_weights.rs"]
mod kept_weights;

#[path = "../examples/kv_cache.rs"]
mod kv_cache;

#[path = "../examples/block_fork.rs"]
mod block_fork;
#[path = "../examples/kv_fork.rs"]
mod kv_fork;

#[path = "../examples/limits.rs"]
mod limits;

#[path = "../examples/memory_pool.rs"]
mod memory_pool;

#[path = "../examples/numa_spill.rs"]
mod numa_spill;

#[path = "../examples/paged_server.rs"]
mod paged_server;

#[path = "../examples/ring_buffer.rs"]
mod ring_buffer;

#[path = "../examples/plan.rs"]
mod plan;

#[path = "../examples/processes.rs"]
mod processes;

#[path = "../examples/publication.rs"]
mod publication;
#[path = "../examples/publish_in_place.rs"]
mod publish_in_place;

#[path = "../examples/registered.rs"]
mod registered;

#[path = "../examples/share_a_gpu.rs"]
mod share_a_gpu;

#[path = "../examples/share_memory.rs"]
mod share_memory;
#[path = "../examples/share_pool.rs"]
mod share_pool;
#[path = "../examples/sleep_wake.rs"]
mod sleep_wake;

#[path = "../examples/snapshot.rs"]
mod snapshot;

#[path = "../examples/sparse_array.rs"]
mod sparse_array;

#[path = "../examples/striping.rs"]
mod striping;
#[path = "../examples/unified_buffer.rs"]
mod unified_buffer;

#[path = "../examples/support/mod.rs"]
mod support;

#[test]
fn the_variable_of_the_examples_names_a_driver_or_is_refused() {
    use cuvmm::driver::auto::Wanted;
    let wanted = |word: &str| support::wanted(Ok(word.to_owned()));
    assert_eq!(wanted("auto").unwrap(), Wanted::Best);
    assert_eq!(wanted("cuda").unwrap(), Wanted::Cuda);
    assert_eq!(wanted("host").unwrap(), Wanted::Host);
    let unset = support::wanted(Err(std::env::VarError::NotPresent)).unwrap();
    assert_eq!(wanted("").unwrap(), unset);
    let refused = wanted("gpu").unwrap_err();
    let sentence = "CUVMM_DRIVER is \"gpu\", which is no driver: use auto, cuda or host";
    assert_eq!(format!("{refused:?}"), sentence);
}

#[test]
fn rows_of_a_tensor_grow_together() {
    adjacent_blocks::main().unwrap();
}

#[test]
fn requests_wait_for_memory_as_futures() {
    async_server::main().unwrap();
}

#[test]
fn a_vector_never_moves() {
    device_vec::main().unwrap();
}

#[cfg(feature = "dlpack")]
#[test]
fn another_library_holds_our_memory() {
    dlpack::main().unwrap();
}

#[test]
fn what_a_peer_has_is_no_other_blocks() {
    export_block::main().unwrap();
}

#[test]
fn bricks_of_a_grid_have_memory() {
    grid::main().unwrap();
}

#[test]
fn a_block_grows_in_place() {
    grow_in_place::main().unwrap();
}

#[test]
fn sequences_grow_and_never_move() {
    kv_cache::main().unwrap();
}

#[test]
fn versions_share_what_did_not_change() {
    block_fork::main().unwrap();
}

#[test]
fn sequences_share_a_prefix() {
    kv_fork::main().unwrap();
}

#[test]
fn a_pool_makes_room_for_another_program() {
    limits::main().unwrap();
}

#[test]
fn another_library_stays_within_a_tenants_limit() {
    memory_pool::main().unwrap();
}

#[test]
fn a_plan_says_what_it_takes() {
    plan::main().unwrap();
}

#[test]
fn what_does_not_fit_the_device_spills() {
    numa_spill::main().unwrap();
}

#[test]
fn two_servers_take_memory_from_each_others_prefixes() {
    paged_server::main().unwrap();
}

#[test]
fn a_ring_never_wraps() {
    ring_buffer::main().unwrap();
}

#[test]
fn a_late_user_is_caught() {
    hardened::main().unwrap();
}

#[test]
fn what_is_registered_stays() {
    registered::main().unwrap();
}

#[test]
fn two_tenants_share_a_device() {
    share_a_gpu::main().unwrap();
}

#[test]
fn several_processes_read_what_one_publishes() {
    publication::main().unwrap();
}

#[test]
fn a_reader_sees_what_is_written_in_place() {
    publish_in_place::main().unwrap();
}

#[test]
fn a_restarted_server_has_its_weights() {
    kept_weights::main().unwrap();
}

#[test]
fn what_one_process_gives_another_keeps() {
    share_memory::main().unwrap();
}

#[test]
fn batches_of_a_memory_pool_go_to_another_process() {
    share_pool::main().unwrap();
}

#[test]
fn two_models_take_turns() {
    sleep_wake::main().unwrap();
}

#[test]
fn a_snapshot_costs_no_copy() {
    snapshot::main().unwrap();
}

#[test]
fn tiles_of_a_terabyte_have_memory() {
    sparse_array::main().unwrap();
}

#[test]
fn stripes_lie_on_both_devices() {
    striping::main().unwrap();
}

#[test]
fn host_and_device_share_a_buffer() {
    unified_buffer::main().unwrap();
}

#[test]
fn a_process_fills_its_part_of_a_ledger() {
    let directory = tempfile::tempdir().unwrap();
    processes::run(directory.path(), "chat", 1, Duration::ZERO).unwrap();
}
