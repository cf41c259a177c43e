//! Memory placed ahead of blocks that grow.

mod mapper_calls;
mod pace;
mod precommit;
mod precommit_all;

pub(in crate::pool) use pace::{Pace, Precommit};
