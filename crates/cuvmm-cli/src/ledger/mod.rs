//! `cuvmm top`, `cuvmm ctl`, `cuvmm metrics` and `cuvmm demo`: the processes that share a GPU through a ledger.
//!
//! `demo` starts two of them with a ledger of their own, to be looked at.
//!
//! `find` locates ledgers, their processes and tenants. `top` shows them, `ctl` changes
//! them, and `metrics` gives them to a monitoring system. All use what the library offers every program: `LedgerView` and `Control`.

pub(crate) mod ctl;
pub(crate) mod demo;
mod find;
pub(crate) mod metrics;
pub(crate) mod top;
