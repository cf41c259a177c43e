//! A `libcuda.so.1` without a GPU: the host driver under the C functions of the driver API.
//!
//! With it, tests run the complete real path (loading, the table of symbols, the conversions to C
//! and back) on a machine without a GPU. The rules are the host driver's. This crate adds the layer
//! between C and the trait: null pointers, conversions, contexts, and initialization (before
//! `cuInit`, only `cuInit` and the version work).
//!
//! A C library can keep its state only in the process: `cuInit` creates one host driver, which
//! lives until the process ends.
//!
//! # Settings
//! Environment variables configure the library, or a file of TOML or JSON that `FAKECUDA_CONFIG`
//! names, with the same names in lower case without `FAKECUDA_`. A variable wins over the file. A
//! wrong name or value is printed on standard error, and `cuInit` returns `SYSTEM_NOT_READY`.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `FAKECUDA_DEVICES` | number of devices; 0 makes `cuInit` return `NO_DEVICE` | 1 |
//! | `FAKECUDA_CAPACITY` | memory of each device: bytes, or like `80GiB` | the host driver's |
//! | `FAKECUDA_NAME` | name of the devices | `fakecuda` |
//! | `FAKECUDA_GPU` | a GPU whose answers are recorded, for name, memory and attributes: `h200` | none |
//! | `FAKECUDA_VERSION` | CUDA version of the driver, from 10.2. Newer functions are absent | 13.0 |
//! | `FAKECUDA_LATENCY` | time that calls take: that of a measured GPU (`h200`), of a file of costs, or `none` | `none` |
//! | `FAKECUDA_MANNER` | `measured`, `strict` or `hostile`: see [`Manner`](cuvmm_model::model::Manner) | `measured` |
//! | `FAKECUDA_SEED` | the hostile manner's choices | 0 |
//! | `FAKECUDA_WORK` | `at-once`: work runs in the call that submits it; `late`: when a call waits for it, or asks a second time | `at-once` |
//! | `FAKECUDA_FAIL` | calls that fail: `cuMemCreate:3,cuMemMap:2-:INVALID_VALUE` | none |
//! | `FAKECUDA_REPORT` | where the report goes at the end: `-` for standard error, or a file, to which each process appends; `%p` is its number | none |
//! | `FAKECUDA_REPORT_FORMAT` | `text` or `json`, one line for each process | `text` |
//! | `FAKECUDA_LEAKS` | `memory`; `all` with streams, events, graphs and contexts; `none` | `memory` |
//! | `FAKECUDA_UNWRITTEN` | `1` finds reads of bytes that were never written | `0` |
//! | `FAKECUDA_EXIT_CODE` | the status of a program that ended with 0 and has findings | none |
//!
//! A function newer than `FAKECUDA_VERSION` returns `NOT_SUPPORTED`: a loaded library cannot hide
//! symbols.
//!
//! # The report
//! The report names the program's leaks and misuses with their places. It is made when the process
//! ends, or by a function of `include/fakecuda.h`. That header also declares functions for tests:
//! they hold streams back, count live objects and make calls fail.
//!
//! Every function that `cuda.h` declares is exported. Functions that are not implemented (kernels,
//! arrays, textures, multicast and others) answer `NOT_SUPPORTED`. `cuGetProcAddress` finds the
//! functions of the CUDA version that the library reports. NVIDIA's runtime library does not work:
//! it needs private tables, of which `cuGetExportTable` finds none.

mod anywhere;
mod attributes;
mod batches;
mod buffers;
mod callbacks;
mod calls;
mod capture;
mod contexts;
mod copies;
mod descriptors;
mod devices;
mod diagnosis;
mod edge;
mod enabled;
mod ending;
mod entry;
mod errors;
mod fills;
mod gate;
mod identity;
mod interprocess;
mod listed;
mod loaded;
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
mod recorded;
mod registered;
mod rest;
mod settings;
mod stack;
mod state;
mod status;
mod streams;
mod symbols;
mod texts;
mod watch;
mod watched;
