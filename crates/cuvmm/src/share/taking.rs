//! A keeper's taking of a publication from its publisher, as a reader that imports nothing.

use std::path::Path;
use std::sync::Arc;

use super::catalogue::{New, Shared};
use super::channel::Channel;
use super::holdings::Holdings;
use super::offer::Offer;
use super::protocol::text_of;
use super::subscriber::Subscriber;
use crate::error::ShareError;

/// Takes the newest version of a name from the publisher at a socket, and keeps it. Returns the
/// version.
///
/// # Errors
/// The publisher has the name in place or does not have it, or does not give it in time, or there is no room. What was kept
/// is kept.
pub(super) fn take(
    shared: &Shared,
    holdings: &Holdings,
    name: &str,
    socket: &Path,
) -> Result<u64, ShareError> {
    let channel = Channel::connect(socket)?.until(Arc::clone(&shared.stop));
    let mut subscriber = Subscriber::from_channel(channel);
    let found = subscriber.fetch(
        name,
        |description| holdings.agree(description),
        |received| &received.runs,
    )?;
    if found.is_in_place {
        return Err(ShareError::InPlace(name.to_owned()));
    }
    let new = New {
        tensors: found.manifest.tensors.len() as u64,
        manifest: text_of(&found.manifest)?,
        offer: Offer::received(found.memory.description, found.memory.handles),
        memory: Box::new(found.memory.counted),
        is_in_place: false,
    };
    let edition = (found.publisher, found.version);
    shared.keep(name, edition, new, Holdings::most())?;
    Ok(found.version)
}
