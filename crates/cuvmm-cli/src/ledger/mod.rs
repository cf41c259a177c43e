//! `cuvmm top`, `cuvmm ctl`, `cuvmm metrics`, `cuvmm record` and `cuvmm demo`: the processes that share a GPU
//! through a ledger.
//!
//! `find` locates ledgers, processes and tenants. `top` shows them, `ctl` changes them, and
//! `metrics` exports them to a monitoring system; `record` writes them over time; all four use the public `LedgerView` and
//! `Control`. `demo` starts two processes with a ledger of their own.

pub(crate) mod ctl;
pub(crate) mod demo;
mod find;
pub(crate) mod metrics;
pub(crate) mod record;
pub(crate) mod top;
