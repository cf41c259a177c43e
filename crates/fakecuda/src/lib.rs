//! A `libcuda.so.1` without a GPU: the C functions of the driver API, implemented by the host
//! driver.
//!
//! With it, tests run the complete real path (loading, the table of symbols, the conversions to C
//! and back) on a machine without a GPU. The rules are the host driver's. This crate adds the layer
//! between C and the trait: null pointers, conversions, contexts, and initialization (before
//! `cuInit`, only `cuInit` and the version work).
//!
//! A C library can keep its state only in the process, so one host driver is created by `cuInit`
//! and lives until the process ends. Environment variables configure it:
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `FAKECUDA_DEVICES` | number of devices; 0 makes `cuInit` return `NO_DEVICE` | 1 |
//! | `FAKECUDA_CAPACITY` | bytes of memory of each device | the host driver's |
//! | `FAKECUDA_NAME` | name of the devices | `fakecuda` |
//!
//! Tests that load the library as a driver count live objects and hold streams back through
//! additional functions, whose names begin with `fakecuda_`.
//!
//! Calls that the host driver does not have are absent, as in an older driver: kernels, 16- and
//! 32-bit fills, multicast.

mod capture;
mod contexts;
mod copies;
mod devices;
mod edge;
mod errors;
mod managed;
mod mappings;
mod physicals;
mod plain;
mod pools;
mod ranges;
mod state;
mod streams;
mod watch;
