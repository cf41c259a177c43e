//! The exchange of memory over a channel: first the description is sent and accepted, then the
//! handles follow in small batches, so that neither side has many of them open at once.

use std::os::fd::{AsFd as _, BorrowedFd};

use cuvmm_driver::Exported;

use super::arriving::Arriving;
use super::attachment::{Attachment, AttachmentBuilder};
use super::channel::{Channel, Message};
use super::frame::{Kind, MOST_HANDLES};
use super::offer::Offer;
use super::wait::Deadline;
use super::wire::{Description, MOST_DESCRIPTION};
use crate::error::{ArgumentError, ChannelError, ShareError};

/// The longest reason of a refusal, in bytes.
pub(super) const MOST_REASON: usize = 4096;

/// The handles made and sent at a time. The system lets more through in one message; but a
/// publisher with many readers makes handles for all of them at once, and a process may have only
/// 1,024 files open by default.
const BATCH: usize = 32;

/// In bytes.
const FABRIC: usize = 64;

impl Channel {
    /// Sends memory to the peer, which must call [`recv`](Self::recv), and returns when the peer
    /// has mapped it.
    ///
    /// Calls `cuMemExportToShareableHandle` for each extent, after the peer has accepted the
    /// description.
    ///
    /// # Errors
    /// [`ShareError`]. The peer then holds no part of the memory, unless its last answer was lost
    /// with the channel: then it may hold all of it.
    #[doc(alias("send_sync", "cuIpcGetMemHandle"))]
    #[doc(alias = "give")]
    pub fn send(&mut self, offer: &Offer) -> Result<(), ShareError> {
        let deadline = self.deadline();
        self.send_until(offer, &offer.description().to_bytes(), deadline)
    }

    pub(super) fn send_until(
        &mut self,
        offer: &Offer,
        described: &[u8],
        deadline: Deadline,
    ) -> Result<(), ShareError> {
        self.exchange(|channel| channel.give_all(offer, described, deadline))
    }

    fn give_all(
        &mut self,
        offer: &Offer,
        described: &[u8],
        deadline: Deadline,
    ) -> Result<(), ShareError> {
        self.send_message(Kind::Description, &[described], deadline)?;
        self.receive_verdict(deadline)?;
        let all = offer.description().extents().len();
        let mut given = 0;
        while given < all {
            let next = all.min(given + BATCH);
            let batch = offer.batch(given..next);
            let batch = batch.map_err(|error| self.withdraw(error, deadline))?;
            let packed = packed(batch.handles());
            let (names, descriptors) = packed.map_err(|error| self.withdraw(error, deadline))?;
            self.send_handles(&names, &descriptors, deadline)?;
            self.receive_verdict(deadline)?;
            given = next;
        }
        Ok(())
    }

    /// Receives memory from [`send`](Self::send) of the peer.
    ///
    /// The description is checked before a handle is requested, and all handles before any is
    /// mapped. For each extent, this calls `cuMemImportFromShareableHandle`,
    /// `cuMemGetAllocationPropertiesFromHandle`, `cuMemMap` and `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`ShareError`]; nothing stays imported or mapped, and the reason is sent to the peer.
    #[doc(alias("recv_sync", "cuIpcOpenMemHandle"))]
    #[doc(alias = "take")]
    pub fn recv(&mut self, how: &AttachmentBuilder<'_>) -> Result<Attachment, ShareError> {
        let deadline = self.deadline();
        self.receive_as(|description| how.agree(description), deadline)
    }

    /// Receives memory from [`send`](Self::send) of the peer. `agree` checks the description before a
    /// handle is requested.
    pub(super) fn receive_as<A: Arriving>(
        &mut self,
        agree: impl FnOnce(&Description) -> Result<A, ShareError>,
        deadline: Deadline,
    ) -> Result<A::Whole, ShareError> {
        self.exchange(|channel| channel.take_all(agree, deadline))
    }

    fn take_all<A: Arriving>(
        &mut self,
        agree: impl FnOnce(&Description) -> Result<A, ShareError>,
        deadline: Deadline,
    ) -> Result<A::Whole, ShareError> {
        let kinds = [Kind::Description, Kind::Verdict];
        let message = self.receive(&kinds, MOST_DESCRIPTION, deadline)?;
        let message = given_up(message)?;
        let described = Description::from_bytes(&message.body).map_err(ShareError::from);
        let agreed = described.and_then(|description| agree(&description));
        let mut arriving = self.answer(agreed, deadline)?;
        loop {
            let kinds = [Kind::Handles, Kind::Verdict];
            let message = self.receive(&kinds, MOST_HANDLES * FABRIC, deadline)?;
            let added = arriving.add(handles_of(given_up(message)?)?);
            if added.is_err() || arriving.is_complete() {
                let whole = match added.and_then(|()| arriving.finish()) {
                    Ok(whole) => whole,
                    Err(error) => return self.answer(Err(error), deadline),
                };
                if let Err(error) = self.send_verdict(None, deadline) {
                    A::discard(whole);
                    return Err(error.into());
                }
                return Ok(whole);
            }
            self.send_verdict(None, deadline)?;
        }
    }

    /// Makes an exchange. An error of the channel in it leaves the channel in an unknown state.
    pub(super) fn exchange<T>(
        &mut self,
        exchange: impl FnOnce(&mut Self) -> Result<T, ShareError>,
    ) -> Result<T, ShareError> {
        let done = exchange(self);
        if matches!(done, Err(ShareError::Channel(_))) {
            self.give_up();
        }
        done
    }

    /// Sends the outcome of a step to the peer, and returns it.
    pub(super) fn answer<T>(
        &mut self,
        outcome: Result<T, ShareError>,
        deadline: Deadline,
    ) -> Result<T, ShareError> {
        match outcome {
            Ok(value) => {
                self.send_verdict(None, deadline)?;
                Ok(value)
            }
            Err(error) => {
                self.refuse(&error.to_string(), deadline);
                Err(error)
            }
        }
    }

    /// Tells the peer that the memory does not come, and returns the error.
    pub(super) fn withdraw(&mut self, error: ShareError, deadline: Deadline) -> ShareError {
        self.refuse(&error.to_string(), deadline);
        error
    }

    /// Sends a refusal with its reason. A failure to send it breaks the channel, where the peer
    /// waits, and is logged: the caller reports the first error.
    fn refuse(&mut self, reason: &str, deadline: Deadline) {
        if let Err(unsaid) = self.send_verdict(Some(reason), deadline) {
            self.give_up();
            log!(debug, %unsaid, "a refusal could not be sent to the peer");
        }
    }

    fn send_verdict(
        &mut self,
        reason: Option<&str>,
        deadline: Deadline,
    ) -> Result<(), ChannelError> {
        let body = match reason {
            None => vec![0],
            Some(reason) => {
                let mut body = vec![1];
                body.extend(reason.bytes().take(MOST_REASON - 1));
                body
            }
        };
        self.send_message(Kind::Verdict, &[&body], deadline)
    }

    pub(super) fn receive_verdict(&mut self, deadline: Deadline) -> Result<(), ShareError> {
        let message = self.receive(&[Kind::Verdict], MOST_REASON, deadline)?;
        match verdict(&message)? {
            None => Ok(()),
            Some(reason) => Err(ShareError::Refused(reason)),
        }
    }
}

/// Splits handles for sending: fabric handles in the body, descriptors as ancillary data.
fn packed(handles: &[Exported]) -> Result<(Vec<u8>, Vec<BorrowedFd<'_>>), ShareError> {
    let (mut names, mut descriptors) = (vec![], vec![]);
    for handle in handles {
        match handle {
            Exported::Fd(fd) => descriptors.push(fd.as_fd()),
            Exported::Fabric(name) => names.extend_from_slice(name),
            _ => return Err(ArgumentError::HandleType(0).into()),
        }
    }
    Ok((names, descriptors))
}

fn verdict(message: &Message) -> Result<Option<String>, ChannelError> {
    match message.body.split_first() {
        Some((0, [])) => Ok(None),
        Some((1, reason)) => Ok(Some(String::from_utf8_lossy(reason).into_owned())),
        _ => Err(ChannelError::Malformed(
            "neither an acceptance nor a refusal",
        )),
    }
}

/// Returns the message, unless the peer has withdrawn the memory.
pub(super) fn given_up(message: Message) -> Result<Message, ShareError> {
    if message.kind != Kind::Verdict {
        return Ok(message);
    }
    match verdict(&message)? {
        Some(reason) => Err(ShareError::Refused(reason)),
        None => Err(ShareError::Channel(ChannelError::Malformed(
            "an acceptance of nothing",
        ))),
    }
}

/// Returns the handles of a message, in its body or ancillary data: at least one, and all of one
/// type.
fn handles_of(message: Message) -> Result<Vec<Exported>, ChannelError> {
    let inside = message.body.chunks_exact(FABRIC);
    let whole = inside.remainder().is_empty();
    if !whole || message.body.is_empty() == message.handles.is_empty() {
        return Err(ChannelError::Malformed(
            "without handles, or with more than them",
        ));
    }
    let fabric = inside.filter_map(|name| Some(Exported::Fabric(*name.first_chunk()?)));
    let fds = message.handles.into_iter().map(Exported::Fd);
    Ok(fds.chain(fabric).collect())
}
