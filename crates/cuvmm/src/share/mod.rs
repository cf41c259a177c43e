//! Memory passed to other processes without a copy.
//!
//! An [`Offer`] says what is given, and keeps it; a [`Channel`] carries it, described and as handles;
//! an [`Attachment`] is what the other side has: the same memory, at addresses of its own.
//!
//! ```text
//!   giver                                    taker
//!   Offer::region(&region, range)            Attachment::builder(&device)
//!        │                                        │
//!   channel.give(&offer)  ── description ──▶  checked: sizes, places, rights
//!                         ◀── yes, or why not ──
//!                         ── handles, some at a time ─▶  imported, checked, mapped
//!                         ◀── yes ──
//! ```
//!
//! Over any other transport a [`Parcel`] does the same by hand.
//!
//! A [`Publisher`] gives finished memory under a name to whoever attaches it, by [`Subscriber`]: weights
//! that one process loads and many serve from.
//!
//! # Trust
//! The driver enforces no right on memory that another process imported: whoever has a handle can
//! write. Reading only is a promise of this library on both sides. So a channel is for processes of
//! one user unless it is told [otherwise](Users::and), its socket is private to that user, and memory
//! that was exported once is never handed to anybody else, in this process or another.
//!
//! What a peer *sends* is not trusted: a message that is wrong, short, out of order or too late is an
//! error on this side, with no descriptor left open and nothing mapped.

mod attachment;
mod catalogue;
mod channel;
mod dead;
mod exchange;
mod frame;
mod listener;
mod lock;
mod log_limit;
mod manifest;
mod offer;
mod parcel;
mod peer;
mod protocol;
mod publisher;
mod readers;
mod seal;
mod subscriber;
mod system;
mod wait;
mod waker;
mod wire;

pub use attachment::{Attachment, AttachmentBuilder};
pub use channel::{Channel, DEFAULT_TIMEOUT};
pub use dead::sweep;
pub use listener::Listener;
pub use lock::LOCK_ENDING;
pub use manifest::{Manifest, Tensor};
pub use offer::Offer;
pub use parcel::Parcel;
pub use peer::{Peer, Users};
pub use protocol::{Listing, Listings};
pub use publisher::Publisher;
pub use seal::Publishable;
pub use subscriber::{Publication, Subscriber};
pub use wire::{Description, Origin, SharedExtent};
