//! Memory given over a channel: described, agreed to, and only then handed over, a few handles at a
//! time, so that neither side has many of them open at once.

use std::os::fd::{AsFd as _, BorrowedFd};

use cuvmm_driver::Exported;

use super::attachment::{Attachment, AttachmentBuilder};
use super::channel::{Channel, Message};
use super::frame::{Kind, MOST_HANDLES};
use super::offer::Offer;
use super::wait::Deadline;
use super::wire::{Description, MOST_DESCRIPTION};
use crate::error::{ArgumentError, ChannelError, ShareError};

/// The most of a reason that is sent or read.
const MOST_REASON: usize = 4096;

/// How many handles are made and sent at a time. A peer takes as many as the system lets through at
/// once; but a publisher with many readers makes them for all at the same time, and a process may
/// have 1024 files open unless it asked for more.
const BATCH: usize = 32;

/// The bytes of a fabric handle.
const FABRIC: usize = 64;

impl Channel {
    /// Gives memory to the peer, which [takes](Self::take) it, and returns when it has it.
    ///
    /// Per extent `cuMemExportToShareableHandle`; not before the peer has agreed.
    ///
    /// # Errors
    /// [`ShareError`]. The peer holds nothing of it then, unless the error is of the channel: a peer
    /// whose last answer was lost may hold it.
    pub fn give(&mut self, offer: &Offer) -> Result<(), ShareError> {
        let deadline = self.deadline();
        self.give_before(offer, &offer.description().to_bytes(), deadline)
    }

    /// Gives memory whose description is there as it travels.
    pub(super) fn give_before(
        &mut self,
        offer: &Offer,
        described: &[u8],
        deadline: Deadline,
    ) -> Result<(), ShareError> {
        let given = self.give_all(offer, described, deadline);
        if matches!(given, Err(ShareError::Channel(_))) {
            self.give_up();
        }
        given
    }

    fn give_all(
        &mut self,
        offer: &Offer,
        described: &[u8],
        deadline: Deadline,
    ) -> Result<(), ShareError> {
        self.send(Kind::Description, &[described], deadline)?;
        self.hear_verdict(deadline)?;
        let all = offer.description().extents().len();
        let mut given = 0;
        while given < all {
            let next = all.min(given + BATCH);
            let batch = match offer.batch(given..next) {
                Ok(batch) => batch,
                Err(error) => return Err(self.withdraw(error, deadline)),
            };
            match packed(batch.handles()) {
                Ok((names, descriptors)) => self.send_handles(&names, &descriptors, deadline)?,
                Err(error) => return Err(self.withdraw(error, deadline)),
            }
            self.hear_verdict(deadline)?;
            given = next;
        }
        Ok(())
    }

    /// Takes memory that the peer [gives](Self::give).
    ///
    /// Its description is checked before a handle is asked for, all handles before any is mapped.
    /// Per extent: `cuMemImportFromShareableHandle`, `cuMemGetAllocationPropertiesFromHandle`,
    /// `cuMemMap`, `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`ShareError`]; nothing of it is held then, and the peer is told why.
    pub fn take(&mut self, how: &AttachmentBuilder<'_>) -> Result<Attachment, ShareError> {
        let deadline = self.deadline();
        self.take_before(how, deadline)
    }

    pub(super) fn take_before(
        &mut self,
        how: &AttachmentBuilder<'_>,
        deadline: Deadline,
    ) -> Result<Attachment, ShareError> {
        let taken = self.take_all(how, deadline);
        if matches!(taken, Err(ShareError::Channel(_))) {
            self.give_up();
        }
        taken
    }

    fn take_all(
        &mut self,
        how: &AttachmentBuilder<'_>,
        deadline: Deadline,
    ) -> Result<Attachment, ShareError> {
        let kinds = [Kind::Description, Kind::Verdict];
        let message = self.receive(&kinds, MOST_DESCRIPTION, deadline)?;
        let message = given_up(message)?;
        let described = Description::from_bytes(&message.body).map_err(ShareError::from);
        let agreed = described.and_then(|description| how.agree(&description));
        let mut arriving = self.answer(agreed, deadline)?;
        loop {
            let kinds = [Kind::Handles, Kind::Verdict];
            let message = self.receive(&kinds, MOST_HANDLES * FABRIC, deadline)?;
            let added = arriving.add(&handles_of(given_up(message)?)?);
            if added.is_err() || arriving.is_complete() {
                let attached = added.and_then(|()| arriving.map());
                return self.answer(attached, deadline);
            }
            self.send_verdict(None, deadline)?;
        }
    }

    /// Tells the peer how something ended, and hands it on.
    fn answer<T>(
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

    /// Tells the peer that it gets nothing after all.
    fn withdraw(&mut self, error: ShareError, deadline: Deadline) -> ShareError {
        self.refuse(&error.to_string(), deadline);
        error
    }

    /// Says no, and why, if that can still be said: what went wrong first is what the caller must
    /// hear of.
    fn refuse(&mut self, reason: &str, deadline: Deadline) {
        if let Err(unsaid) = self.send_verdict(Some(reason), deadline) {
            tracing::debug!(%unsaid, "the peer was not told of a refusal");
        }
    }

    /// Says yes, or no and why.
    pub(super) fn send_verdict(
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
        self.send(Kind::Verdict, &[&body], deadline)
    }

    /// Waits for a yes.
    pub(super) fn hear_verdict(&mut self, deadline: Deadline) -> Result<(), ShareError> {
        let message = self.receive(&[Kind::Verdict], MOST_REASON, deadline)?;
        match verdict(&message)? {
            None => Ok(()),
            Some(reason) => Err(ShareError::Refused { reason }),
        }
    }
}

/// Handles as they travel: fabric handles in a message, descriptors beside it.
fn packed(handles: &[Exported]) -> Result<(Vec<u8>, Vec<BorrowedFd<'_>>), ShareError> {
    let (mut names, mut descriptors) = (vec![], vec![]);
    for handle in handles {
        match handle {
            Exported::Fd(fd) => descriptors.push(fd.as_fd()),
            Exported::Fabric(name) => names.extend_from_slice(name),
            _ => return Err(ArgumentError::HandleType { bits: 0 }.into()),
        }
    }
    Ok((names, descriptors))
}

/// The reason for a no; nothing for a yes.
fn verdict(message: &Message) -> Result<Option<String>, ChannelError> {
    match message.body.split_first() {
        Some((0, [])) => Ok(None),
        Some((1, reason)) => Ok(Some(String::from_utf8_lossy(reason).into_owned())),
        _ => Err(ChannelError::Malformed {
            what: "neither yes nor no",
        }),
    }
}

/// The message, unless it says that the peer gives nothing after all.
fn given_up(message: Message) -> Result<Message, ShareError> {
    if message.kind != Kind::Verdict {
        return Ok(message);
    }
    match verdict(&message)? {
        Some(reason) => Err(ShareError::Refused { reason }),
        None => Err(ShareError::Channel(ChannelError::Malformed {
            what: "a yes to nothing",
        })),
    }
}

/// The handles in a message, or beside it: at least one, and of one kind.
fn handles_of(message: Message) -> Result<Vec<Exported>, ChannelError> {
    let inside = message.body.chunks_exact(FABRIC);
    let whole = inside.remainder().is_empty();
    if !whole || message.body.is_empty() == message.handles.is_empty() {
        return Err(ChannelError::Malformed {
            what: "without handles, or with more than them",
        });
    }
    let fabric = inside.filter_map(|name| Some(Exported::Fabric(*name.first_chunk()?)));
    let fds = message.handles.into_iter().map(Exported::Fd);
    Ok(fds.chain(fabric).collect())
}
