//! KV caches.

#[path = "../common/mod.rs"]
mod common;

mod admission;
mod basics;
mod forks;
mod layout;
mod sleep;
mod trace;
mod waits;
