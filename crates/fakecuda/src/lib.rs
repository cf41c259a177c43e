//! A `libcuda.so.1` without a GPU: the C functions of the driver API, answered by the host driver.
//!
//! It exists so that tests go through the whole of the real path (loading, the table of symbols,
//! the conversions to C and back) on a machine without a GPU. The rules are the host driver's;
//! here is only what stands between C and the trait: null pointers, conversions, contexts, and
//! the order of a process's life (nothing but `cuInit` and the version before `cuInit`).
//!
//! Behind a C ABI there is nowhere to keep state but in the process, so one host driver is made at
//! `cuInit` and lives until the end. The environment says what it is like:
//!
//! | variable | means | default |
//! |---|---|---|
//! | `FAKECUDA_DEVICES` | how many devices there are; 0 makes `cuInit` answer `NO_DEVICE` | 1 |
//! | `FAKECUDA_CAPACITY` | bytes of memory of each device | the host driver's |
//! | `FAKECUDA_NAME` | the name of the devices | `fakecuda` |
//!
//! Tests that load it as a driver ask it what is alive and hold its streams back through functions of
//! its own, whose names begin with `fakecuda_`.
//!
//! What the host driver has no call for is simply absent, as in an older driver: kernels, memory
//! pools beyond the default one, 16- and 32-bit fills, multicast.

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
mod ranges;
mod state;
mod streams;
mod watch;
