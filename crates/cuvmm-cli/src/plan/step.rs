//! The steps of a plan, as written in a file.

use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use cuvmm_command::duration;
use cuvmm_command::size;
use cuvmm_command::terminal::counted;

/// One step: a table of one key. Sizes are rounded up to whole granules, and offsets (`at`) must be
/// whole granules. Devices are numbers among the plan's devices.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Step {
    /// Reserves addresses, to commit and grow in or to map physicals in.
    Reserve {
        name: String,
        size: Size,
        #[serde(default)]
        device: usize,
    },
    Create {
        name: String,
        size: Size,
        #[serde(default)]
        device: usize,
    },
    /// Maps a physical, for the devices in `access`, or for its own.
    Map {
        physical: String,
        #[serde(rename = "in")]
        within: String,
        at: Size,
        #[serde(default)]
        access: Vec<usize>,
    },
    /// Unmaps the mapping that begins at an offset.
    Unmap {
        #[serde(rename = "in")]
        within: String,
        at: Size,
    },
    /// Commits memory to a range, by default after everything requested so far.
    Commit {
        #[serde(rename = "in")]
        within: String,
        at: Option<Size>,
        size: Size,
    },
    /// Grows from the first byte to `to` bytes, requested `by` bytes at a time.
    Grow {
        #[serde(rename = "in")]
        within: String,
        to: Size,
        by: Size,
    },
    /// Decommits a range, and the memory that was precommitted after its end.
    Decommit {
        #[serde(rename = "in")]
        within: String,
        at: Size,
        size: Size,
    },
    /// Reserves a range striped over the devices, for the devices in `access`, or for the first.
    Stripe {
        name: String,
        size: Size,
        unit: Size,
        devices: Vec<usize>,
        #[serde(default)]
        access: Vec<usize>,
    },
    /// Releases the memory or addresses of a name, with all mappings in them.
    Release(String),
    Wait(Span),
}

impl Step {
    /// Returns the name of the object that the step changes.
    pub(super) fn changes(&self) -> Option<&str> {
        match self {
            Self::Reserve { name, .. }
            | Self::Create { name, .. }
            | Self::Stripe { name, .. }
            | Self::Release(name) => Some(name),
            Self::Map { within, .. }
            | Self::Unmap { within, .. }
            | Self::Commit { within, .. }
            | Self::Grow { within, .. }
            | Self::Decommit { within, .. } => Some(within),
            Self::Wait(_) => None,
        }
    }

    pub(super) fn last_device(&self) -> Option<usize> {
        match self {
            Self::Reserve { device, .. } | Self::Create { device, .. } => Some(*device),
            Self::Map { access, .. } => access.iter().max().copied(),
            Self::Stripe {
                devices, access, ..
            } => devices.iter().chain(access).max().copied(),
            _ => None,
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reserve { name, size, .. } => write!(f, "reserve {size} as {name}"),
            Self::Create { name, size, .. } => write!(f, "create {size} as {name}"),
            Self::Map {
                physical,
                within,
                at,
                ..
            } => write!(f, "map {physical} in {within} at {at}"),
            Self::Unmap { within, at } => write!(f, "unmap in {within} at {at}"),
            Self::Commit { within, at, size } => match at {
                Some(at) => write!(f, "commit {size} in {within} at {at}"),
                None => write!(f, "commit {size} in {within}"),
            },
            Self::Grow { within, to, by } => write!(f, "grow {within} to {to} by {by}"),
            Self::Decommit { within, at, size } => {
                write!(f, "decommit {size} in {within} at {at}")
            }
            Self::Stripe {
                name,
                size,
                unit,
                devices,
                ..
            } => write!(
                f,
                "stripe {size} as {name} over {} by {unit}",
                counted(devices.len() as u64, "device")
            ),
            Self::Release(name) => write!(f, "release {name}"),
            Self::Wait(span) => write!(f, "wait {}", span.written),
        }
    }
}

/// Bytes: a number, or words like `2 MiB`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Size(pub(super) u64);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Read;
        impl Visitor<'_> for Read {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, or words like \"2 MiB\"")
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Size, E> {
                let bytes = u64::try_from(number);
                let refused = || E::invalid_value(de::Unexpected::Signed(number), &self);
                Ok(Size(bytes.map_err(|_| refused())?))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                let wrong = |what| E::custom(format!("{text:?}: {what}"));
                Ok(Size(size::bytes(text).map_err(wrong)?))
            }
        }
        from.deserialize_any(Read)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&size::iec(self.0))
    }
}

/// A time like `500 ms`.
#[derive(Debug, PartialEq)]
pub(super) struct Span {
    pub(super) time: Duration,
    pub(super) written: String,
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Read;
        impl Visitor<'_> for Read {
            type Value = Span;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a time like \"500 ms\" or \"2 s\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Span, E> {
                let refused = || E::invalid_value(de::Unexpected::Str(text), &self);
                let time = duration::parse(text).ok_or_else(refused)?;
                if time > duration::LONGEST {
                    return Err(E::custom(format!("{text:?}: a time is at most 10000h")));
                }
                let written = text.to_owned();
                Ok(Span { time, written })
            }
        }
        from.deserialize_str(Read)
    }
}
