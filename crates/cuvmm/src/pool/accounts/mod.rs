//! The accounts of a pool: the charges of tenants against limits and guarantees, the tenants' terms,
//! and the part of the limit that a ledger grants.

mod budget;
mod grants;
mod joined;
mod ledger;
mod limits;
mod passing;
mod terms;

pub(in crate::pool) use budget::{Amount, Budget, Charge, TenantId};
pub(in crate::pool) use joined::Joined;
pub use limits::{Limit, LimitChange};
pub(in crate::pool) use passing::Missing;
pub(in crate::pool) use terms::{Hooks, Tenants};
