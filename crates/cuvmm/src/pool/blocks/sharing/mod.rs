//! Memory that several blocks map: forks begin it, and unsharing ends it.

mod fork;
mod shared;
mod unshare;

pub(crate) use fork::Prefix;
pub(in crate::pool) use unshare::{Refused, Step};
