//! The library on the host driver and on a GPU, in one process and one context. Tests on the GPU run one
//! after another.

#[path = "../common/executor.rs"]
#[allow(dead_code)]
mod executor;
#[path = "../gpu/mod.rs"]
mod gpu;

mod block_fork;
mod capture;
mod containers;
mod dlpack;
mod exported;
mod futures;
mod hardened;
mod heap;
mod kv;
mod kv_fork;
mod mem_pool;
mod memory_pool;
mod parts;
mod pending_free;
mod places;
mod proof;
mod register;
mod reuse;
mod sleep;
mod unified;
