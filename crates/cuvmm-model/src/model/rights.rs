//! The access to one mapping.

use super::backing::Reach;
use cuvmm_driver::{AccessFlags, Location, Ordinal};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Who {
    Device(i32),
    Host,
}

impl Who {
    pub(crate) fn location(self) -> Location {
        match self {
            Self::Device(device) => Location::device(Ordinal(device)),
            Self::Host => Location::HOST,
        }
    }
}

/// The access to one mapping, ordered by holder; unlisted holders have none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rights(Vec<(Who, AccessFlags)>);

impl Rights {
    pub(crate) fn of(&self, who: Who) -> AccessFlags {
        match self.0.binary_search_by_key(&who, |right| right.0) {
            Ok(at) => self.0[at].1,
            Err(_) => AccessFlags::NONE,
        }
    }

    pub(crate) fn set(&mut self, who: Who, flags: AccessFlags) {
        match (self.0.binary_search_by_key(&who, |right| right.0), flags) {
            (Ok(at), AccessFlags::NONE) => {
                self.0.remove(at);
            }
            (Ok(at), _) => self.0[at].1 = flags,
            (Err(_), AccessFlags::NONE) => {}
            (Err(at), _) => self.0.insert(at, (who, flags)),
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Who, AccessFlags)> {
        self.0.iter().copied()
    }

    /// Returns the host's protection that gives every holder its access.
    pub(crate) fn reach(&self) -> Reach {
        let one = |flags| match flags {
            AccessFlags::READ_WRITE => Reach::Write,
            AccessFlags::READ => Reach::Read,
            _ => Reach::Nothing,
        };
        self.iter()
            .map(|(_, flags)| one(flags))
            .max()
            .unwrap_or_default()
    }
}
