//! Paged KV caches.

#[path = "../common/mod.rs"]
mod common;

mod basics;
mod bytes;
mod engines;
mod faults;
mod precommit;
mod pressure;
mod random;
mod refused;
mod requests;
mod scene;
mod sleep;
mod sleep_faults;
