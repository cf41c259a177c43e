//! Memory pools of the driver, alone and within a tenant's limit.

#[path = "../common/mod.rs"]
mod common;

mod basics;
mod faults;
mod races;
mod tenants;
