//! The exchange of a pool's allocations over a channel: first the description is sent and accepted,
//! then one message follows with the pool's handle and the taker's end of a grant.

use std::os::fd::AsFd as _;

use super::allocation_offer::{AllocationOffer, two};
use super::allocation_wire::{AllocationDescription, MOST_BYTES};
use super::channel::Channel;
use super::exchange::{MOST_REASON, given_up};
use super::frame::Kind;
use super::importer::PoolImporter;
use super::wait::Deadline;
use crate::error::ShareError;
use crate::own::ImportedAllocation;

impl Channel {
    /// Sends allocations to the peer, which must call [`recv_allocations`](Self::recv_allocations),
    /// and returns when the peer has imported them.
    ///
    /// Waits first, without a limit, for the queued work of the allocations' streams. The peer's
    /// time runs meanwhile. Calls `cuMemPoolExportPointer` for each allocation and
    /// `cuMemPoolExportToShareableHandle`.
    ///
    /// # Errors
    /// [`ShareError`]. The peer then has none of the memory, unless the error concerns the channel.
    /// In either case the memory is [held](AllocationOffer::is_held) until the peer has released
    /// it.
    pub fn send_allocations(&mut self, offer: &AllocationOffer) -> Result<(), ShareError> {
        // The wait for the streams may take longer than an exchange.
        let described = offer.describe();
        let deadline = self.deadline();
        self.exchange(|channel| channel.give_allocations(offer, described, deadline))
    }

    fn give_allocations(
        &mut self,
        offer: &AllocationOffer,
        described: Result<AllocationDescription, ShareError>,
        deadline: Deadline,
    ) -> Result<(), ShareError> {
        let described = described.map_err(|error| self.withdraw(error, deadline))?;
        self.send_message(Kind::Description, &[&described.to_bytes()], deadline)?;
        self.receive_verdict(deadline)?;
        let granted = offer.grant(true);
        let (pool, held, grant) = granted.map_err(|error| self.withdraw(error, deadline))?;
        self.send_handles(&[], &[pool.as_fd(), held.as_fd()], deadline)?;
        drop((pool, held));
        let taken = self.receive_verdict(deadline);
        grant.meet();
        taken
    }

    /// Receives allocations from [`send_allocations`](Self::send_allocations) of the peer.
    ///
    /// The description is checked before the handle is requested. Calls
    /// `cuMemPoolImportFromShareableHandle` unless the importer has the pool already, and for each
    /// allocation `cuMemPoolImportPointer` and three times `cuPointerGetAttribute`.
    ///
    /// # Errors
    /// [`ShareError`], also while the importer's stream captures; nothing stays imported, and the
    /// reason is sent to the peer.
    pub fn recv_allocations(
        &mut self,
        importer: &PoolImporter,
    ) -> Result<Vec<ImportedAllocation>, ShareError> {
        let deadline = self.deadline();
        self.exchange(|channel| channel.take_allocations(importer, deadline))
    }

    fn take_allocations(
        &mut self,
        importer: &PoolImporter,
        deadline: Deadline,
    ) -> Result<Vec<ImportedAllocation>, ShareError> {
        let kinds = [Kind::Description, Kind::Verdict];
        let message = given_up(self.receive(&kinds, MOST_BYTES, deadline)?)?;
        let described = AllocationDescription::from_bytes(&message.body).map_err(ShareError::from);
        let agreed = described.and_then(|description| {
            importer.agree(&description)?;
            Ok(description)
        });
        let description = self.answer(agreed, deadline)?;
        let kinds = [Kind::Handles, Kind::Verdict];
        let message = given_up(self.receive(&kinds, MOST_REASON, deadline)?)?;
        let imported = two(&message.body, message.handles)
            .map_err(ShareError::from)
            .and_then(|[pool, held]| importer.import(&description, pool, held, deadline));
        self.answer(imported, deadline)
    }
}
