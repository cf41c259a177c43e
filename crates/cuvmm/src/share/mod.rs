//! Sharing of memory with other processes, without a copy.
//!
//! An [`Offer`] names the memory and keeps it alive. A [`Channel`] carries its description and its
//! handles. An [`Attachment`] is the same memory in the other process, at addresses of that
//! process.
//!
//! ```text
//!   giver                                    taker
//!   Offer::region(&region, range)            Attachment::builder(&device)
//!        │                                        │
//!   channel.send(&offer)  ── description ──▶  checked: sizes, places, access
//!                         ◀── accepted, or refused with a reason ──
//!                         ── handles, in batches ─▶  imported, checked, mapped
//!                         ◀── accepted ──
//! ```
//!
//! A [`Parcel`] holds the description and the handles for use with any other transport.
//!
//! An [`AllocationOffer`] names allocations of the driver's memory pools (`cuMemAllocAsync`), which
//! a [`PoolImporter`] imports.
//!
//! A [`Publisher`] publishes finished memory under a name, and a [`Subscriber`] attaches it: for
//! example, one process loads weights and many processes serve from them. A [`Keeper`] has what is
//! published after its publisher has ended.
//!
//! # Trust
//! The driver does not restrict access to imported memory: every process that holds a handle can
//! write to it. Read-only access is a convention that this library keeps on both sides. Therefore a
//! channel connects only processes of one user unless [other users](Users::and) are added, its
//! socket is private to that user, and exported memory is never reused for another purpose.
//!
//! Messages from a peer are *not* trusted. A malformed, short, misordered or late message is an
//! error; no descriptor stays open and nothing stays mapped.

mod allocation_exchange;
mod allocation_offer;
mod allocation_wire;
mod arriving;
mod attachment;
mod catalogue;
mod channel;
mod dead;
mod exchange;
mod folder;
mod frame;
mod grant;
mod holdings;
mod importer;
mod keeper;
mod listener;
mod lock;
mod log_limit;
mod manifest;
mod offer;
mod offered;
mod parcel;
mod places;
mod protocol;
mod publisher;
mod readers;
mod seal;
mod service;
mod subscriber;
mod system;
mod taking;
mod wait;
mod waker;
mod wire;

pub use crate::peer::{Peer, Users};
pub use allocation_offer::{AllocationOffer, AllocationParcel};
pub use allocation_wire::AllocationDescription;
pub use attachment::{Attachment, AttachmentBuilder};
pub use channel::{Channel, DEFAULT_TIMEOUT};
pub use dead::sweep;
pub use folder::UserFolder;
pub use importer::PoolImporter;
pub use keeper::Keeper;
pub use listener::Listener;
pub use lock::LOCK_ENDING;
pub use manifest::{Manifest, ManifestBuilder, Tensor};
pub use offer::Offer;
pub use offered::Offered;
pub use parcel::Parcel;
pub use protocol::{Keeping, Listing, Listings};
pub use publisher::Publisher;
pub use seal::Publishable;
pub use subscriber::{Publication, Subscriber};
pub use wire::{Description, Origin, SharedExtent};
