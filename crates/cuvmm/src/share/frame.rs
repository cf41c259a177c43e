//! One frame of a channel: a head, a body, and the number of descriptors beside it.
//!
//! This module makes no system call; it only builds heads and parses received bytes.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::wire::VERSION;
use crate::error::ChannelError;

const MAGIC: [u8; 4] = *b"cvmm";

/// The most bytes after a head.
pub(super) const MOST_BODY: usize = 64 << 10;

/// The most descriptors that the system accepts in one message.
pub(super) const MOST_HANDLES: usize = 253;

/// The most bytes of a whole frame.
pub(super) const MOST_FRAME: usize = MOST_BODY + size_of::<Head>();

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 4],
    version: U16,
    kind: U16,
    /// Counts the frames of one direction.
    serial: U32,
    length: U32,
    handles: U16,
    /// Is 1 if the message continues in the next frame.
    more: U16,
}

/// The kind of a message, with its number in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Description = 1,
    /// Handles: descriptors as ancillary data, or fabric handles in the body.
    Handles = 2,
    Verdict = 3,
    Text = 4,
}

impl Kind {
    fn of(number: u16) -> Option<Self> {
        let all = [Self::Description, Self::Handles, Self::Verdict, Self::Text];
        all.into_iter().find(|&kind| kind as u16 == number)
    }
}

#[derive(Debug)]
pub(super) struct Frame<'a> {
    pub(super) kind: Kind,
    pub(super) more: bool,
    pub(super) body: &'a [u8],
}

/// Parses a frame that came with `handles` descriptors and must have the number `serial`.
pub(super) fn read(bytes: &[u8], serial: u32, handles: usize) -> Result<Frame<'_>, ChannelError> {
    let malformed = |what| Err(ChannelError::Malformed(what));
    let Ok((head, body)) = Head::ref_from_prefix(bytes) else {
        return malformed("shorter than its head");
    };
    if head.magic != MAGIC {
        return malformed("not one of this library");
    }
    if head.version.get() != VERSION {
        return malformed("of another version of this library");
    }
    if head.serial.get() != serial {
        return malformed("out of order");
    }
    if head.length.get() as usize != body.len() {
        return malformed("shorter or longer than its head says");
    }
    if usize::from(head.handles.get()) != handles {
        return malformed("without the descriptors that its head announces, or with others");
    }
    let more = match head.more.get() {
        0 => false,
        1 => true,
        _ => return malformed("neither the last of a message nor followed by more"),
    };
    let Some(kind) = Kind::of(head.kind.get()) else {
        return malformed("of an unknown kind");
    };
    if handles > 0 && (kind != Kind::Handles || more) {
        return malformed("with descriptors where none belong");
    }
    Ok(Frame { kind, more, body })
}

pub(super) fn head(
    kind: Kind,
    serial: u32,
    body: usize,
    handles: usize,
    more: bool,
) -> [u8; size_of::<Head>()] {
    let head = Head {
        magic: MAGIC,
        version: VERSION.into(),
        kind: (kind as u16).into(),
        serial: serial.into(),
        // The caller has bounded both far below these maxima.
        length: u32::try_from(body).unwrap_or(u32::MAX).into(),
        handles: u16::try_from(handles).unwrap_or(u16::MAX).into(),
        more: u16::from(more).into(),
    };
    zerocopy::transmute!(head)
}
