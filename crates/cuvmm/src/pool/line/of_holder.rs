//! A [holder](crate::pool::Holder)'s request in the queue of [futures](super::futures), for a future of
//! the holder.

use std::sync::Arc;
use std::task::{Context, Poll};

use super::futures::Request;
use super::queue::Want;
use super::queued::HolderWant;
use crate::error::BlockError;
use crate::pool::accounts::TenantId;
use crate::pool::core::Core;
use crate::pool::tenant::Tenant;

/// A holder's request, which is withdrawn when this value is dropped.
#[derive(Debug)]
pub(crate) struct HolderRequest {
    core: Arc<Core>,
    tenant: TenantId,
    request: Request,
}

impl HolderRequest {
    pub(crate) fn new(tenant: &Tenant) -> Self {
        Self {
            core: Arc::clone(tenant.core()),
            tenant: tenant.id(),
            request: Request::New,
        }
    }

    /// Returns `true` if the request was neither queued nor ended.
    pub(crate) const fn is_new(&self) -> bool {
        matches!(self.request, Request::New)
    }

    /// Returns `true` if the pool has a mapper that runs.
    pub(crate) fn has_mapper(&self) -> bool {
        self.core.has_mapper()
    }

    pub(crate) const fn has_ended(&self) -> bool {
        matches!(self.request, Request::Ended)
    }

    /// Queues the request. It is refused at once if waiting cannot help.
    pub(crate) fn queue(
        &mut self,
        context: &Context<'_>,
        want: HolderWant,
    ) -> Poll<Result<(), BlockError>> {
        let (core, want) = (&self.core, Want::Holder(want));
        let polled = self.request.queue(core, self.tenant, context, want);
        polled.map_ok(drop)
    }

    /// Polls for the answer to the queued request.
    pub(crate) fn poll(&mut self, context: &Context<'_>) -> Poll<Result<(), BlockError>> {
        self.request.poll_queued(&self.core, context).map_ok(drop)
    }

    /// Ends the request: it is withdrawn, and stays pending.
    pub(crate) fn end(&mut self) {
        self.request.withdraw(&self.core);
    }
}

impl Drop for HolderRequest {
    fn drop(&mut self) {
        self.end();
    }
}
