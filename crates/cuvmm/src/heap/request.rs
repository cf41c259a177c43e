//! A request for memory of a heap.

use super::tag::StreamId;
use crate::ledger::InLine;
use crate::own::Stream;
use crate::pool::{Polling, Tenant};

/// The largest size and the largest alignment of a small allocation, in bytes.
const SMALL: (u64, u64) = (1 << 20, 4096);

#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    pub(super) size: u64,
    pub(super) alignment: u64,
    pub(super) stream: &'a Stream,
    pub(super) id: StreamId,
    pub(super) captures: bool,
    /// The place of a waiting request in the line of a ledger.
    pub(super) place: Option<InLine>,
}

impl Request<'_> {
    /// Returns the permission to poll, unless the request belongs to a capture: its memory must not
    /// depend on events.
    pub(super) fn polling<'a>(&self, tenant: &'a Tenant) -> Option<Polling<'a>> {
        match self.captures {
            true => None,
            false => tenant.polling(),
        }
    }
}

pub(super) const fn is_small(size: u64, alignment: u64) -> bool {
    size <= SMALL.0 && alignment <= SMALL.1
}

pub(super) fn least_chunk(request: Request<'_>) -> Request<'_> {
    let granule = request.stream.device().granule();
    let size = granule.round_up(request.size).unwrap_or(request.size);
    Request { size, ..request }
}
