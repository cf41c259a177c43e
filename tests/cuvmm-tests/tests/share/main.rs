//! Memory shared between processes. Each test runs alone, because it checks which descriptors are open
//! or forks.

#[path = "../common/mod.rs"]
mod common;
#[path = "../share_support/mod.rs"]
mod share_support;

mod faults;
mod hostile;
mod keeper;
mod keeper_processes;
mod left;
mod mem_pool_faults;
mod mem_pool_hostile;
mod mem_pools;
mod processes;
mod publisher;
mod several;
mod system;
