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
//! README.md describes the settings and the report, and `include/fakecuda.h` the functions for tests.
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
