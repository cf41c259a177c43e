//! `cuvmm top` and `cuvmm ctl`: the processes that share a GPU through a ledger.
//!
//! `find` locates ledgers, their processes and tenants. `top` shows them, and `ctl` changes them.
//! Both use what the library offers every program: `LedgerView` and `Control`.

pub(crate) mod ctl;
mod find;
pub(crate) mod top;
