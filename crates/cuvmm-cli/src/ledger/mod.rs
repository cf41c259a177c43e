//! `cuvmm top`, `cuvmm ctl` and `cuvmm metrics`: the processes that share a GPU through a ledger.
//!
//! `find` locates ledgers, their processes and tenants. `top` shows them, `ctl` changes
//! them, and `metrics` gives them to a monitoring system. All use what the library offers every program: `LedgerView` and `Control`.

pub(crate) mod ctl;
mod find;
pub(crate) mod metrics;
pub(crate) mod top;
