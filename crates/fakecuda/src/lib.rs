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
//! Kernels and NVIDIA's runtime library are not aimed at: the latter works by private tables, of which
//! `cuGetExportTable` finds none. Every function that `cuda.h` declares is exported. Those that are not implemented (kernels, arrays,
//! textures, multicast and others) answer `NOT_SUPPORTED`. `cuGetProcAddress` finds the functions of
//! the CUDA version that the library reports.

mod anywhere;
mod attributes;
mod buffers;
mod callbacks;
mod capture;
mod contexts;
mod copies;
mod devices;
mod edge;
mod entry;
mod errors;
mod fills;
mod gate;
mod identity;
mod interprocess;
mod listed;
mod managed;
mod mappings;
mod owned;
mod peers;
mod per_thread;
mod physicals;
mod plain;
mod pools;
mod queries;
mod ranges;
mod registered;
mod rest;
mod stack;
mod state;
mod streams;
mod symbols;
mod watch;
