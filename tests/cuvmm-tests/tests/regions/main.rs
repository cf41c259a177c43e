//! Owners, regions and what is built on them: containers, managed and registered memory, memory at
//! several places or addresses, and memory that is exported or described to others.
#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../share_support/mod.rs"]
mod share_support;

mod aliases;
mod basics;
mod capture_sweep;
mod captures;
mod channels;
mod compact;
mod container_faults;
mod cuts;
mod ended;
mod export;
mod exported;
mod figures;
mod grid;
mod own;
mod own_work;
mod panics;
mod peers;
mod places;
mod rdma;
mod register;
mod share_wire;
mod shrinks;
mod sparse;
mod tenant;
mod tenant_faults;
mod tenant_random;
mod tenant_unclean;
mod tenant_unshare;
mod unified;
mod vec;
