//! The accounts of a pool: the charges of tenants against limits and guarantees, the tenants' terms,
//! and the part of the limit that a ledger grants.

mod budget;
mod grants;
mod joined;
mod ledger;
mod limits;
mod passing;

pub(in crate::pool) use budget::{Amount, Budget, Charge, Hooks, TenantId};
pub(in crate::pool) use joined::Joined;
pub use limits::{Limit, LimitChange};
pub(in crate::pool) use passing::Missing;
