//! Memory of a process that other processes import.
//!
//! Memory stays on the device while a process has imported it, even after its creator has released
//! it or has ended. So each exported block has an *entry*: its owner, its granules, and one bit for
//! each process that has the memory. An importer sets its bit before it imports, and clears the bit
//! when it has unmapped the memory.
//!
//! While the owner has the memory, the memory is part of the owner's charge, and the entry is
//! *open*. The owner [closes](close) the entry before it releases the memory. If no process has named
//! the entry, it is free then. If one has, the owner stays charged until none does, and so does the
//! slot of an owner that has ended: until then the entry is *closed*. Importers are charged nothing,
//! so the memory counts once.
//!
//! An importer first sets its bit and then looks at the entry's word. An owner first closes the entry
//! and then looks at the bits. A sequentially consistent fence is between the two steps of each, so at
//! least one of them sees the other.
//!
//! A closed entry can be named too: a process that has the memory may pass it on, as a
//! [keeper](crate::share::Keeper) does. The word of a closed entry counts these names. An importer sets
//! its bit and then adds to the count. A process that frees the entry reads the word, looks at the
//! bits, and frees the entry only if the word is still the same: it sees either the bit or another
//! word. An entry whose count is full can be named no more, so no word comes twice.
//!
//! Keeps I-117.
//!
//! Words change by compare-and-swap and have sequence numbers. So a process that was stopped in the
//! middle of a change makes the change only if the word is still the same.

use std::sync::atomic::Ordering;

use super::layout::{Export, Layout};
use super::word::{Word, fence};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Free,
    Open,
    Closed,
}

/// The most names that processes give to a closed entry.
const MOST_NAMES: u64 = 0xffff;

/// The word of an entry: the kind in the low byte, the owner's slot in the next one, how often the
/// closed entry was named in the next two, and above them how often the entry was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found(u64);

impl Found {
    const fn new(kind: Kind, owner: usize, taken: u64) -> Self {
        let kind = match kind {
            Kind::Free => 0,
            Kind::Open => 1,
            Kind::Closed => 2,
        };
        Self((taken << 32) | ((owner as u64 & 0xff) << 8) | kind)
    }

    const fn kind(self) -> Kind {
        match self.0 & 0xff {
            1 => Kind::Open,
            2 => Kind::Closed,
            _ => Kind::Free,
        }
    }

    const fn owner(self) -> usize {
        (self.0 >> 8 & 0xff) as usize
    }

    const fn names(self) -> u64 {
        self.0 >> 16 & MOST_NAMES
    }

    const fn taken(self) -> u64 {
        self.0 >> 32
    }

    const fn with(self, kind: Kind) -> Self {
        Self(Self::new(kind, self.owner(), self.taken()).0 | self.names() << 16)
    }

    /// Returns the word of a closed entry with one name more, or `None` if the count is full.
    fn with_name(self) -> Option<Self> {
        (self.names() < MOST_NAMES).then_some(Self(self.0 + (1 << 16)))
    }
}

/// The name of an entry: its place in the table, and how often it was taken. Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ExportId(u64);

impl ExportId {
    const fn new(index: usize, taken: u64) -> Self {
        Self((taken << 16) | (index as u64 + 1))
    }

    /// Reads a name from outside; its use checks whether it names an entry.
    pub(super) const fn of(word: u64) -> Self {
        Self(word)
    }

    pub(super) const fn word(self) -> u64 {
        self.0
    }

    /// Returns the entry and its state, if the entry was not taken again since.
    fn find(self, layout: &Layout) -> Option<(&Export, Found)> {
        let index = (self.0 & 0xffff).checked_sub(1)?;
        let export = layout.exports.get(usize::try_from(index).ok()?)?;
        let found = Found(export.state.load());
        let same = found.taken() == self.0 >> 16 && found.kind() != Kind::Free;
        same.then_some((export, found))
    }
}

impl Export {
    fn is_held(&self) -> bool {
        let bits = |word: &Word| word.load() & u64::from(u32::MAX);
        self.holders.iter().any(|word| bits(word) != 0)
    }

    /// Sets or clears the bit of a slot while `may` allows it. Asks after each read of the word.
    fn mark(&self, slot: usize, set: bool, may: impl Fn() -> bool) {
        let (Some(word), bit) = (self.holders.get(slot / 32), 1 << (slot % 32)) else {
            return;
        };
        loop {
            let found = word.load();
            if (found & bit != 0) == set || !may() {
                return;
            }
            let sequence = (found >> 32).wrapping_add(1) << 32;
            let bits = (found ^ bit) & u64::from(u32::MAX);
            if word.replace(found, sequence | bits) {
                return;
            }
        }
    }

    #[cfg(test)]
    pub(super) fn fill(&self, mut value: impl FnMut() -> u64) {
        let words = [&self.state, &self.granules].into_iter();
        words
            .chain(&self.holders)
            .for_each(|word| word.store(value()));
    }
}

/// Returns `None` if all entries are taken.
pub(super) fn take(layout: &Layout, owner: usize, granules: u64) -> Option<ExportId> {
    layout
        .exports
        .iter()
        .enumerate()
        .find_map(|(index, export)| {
            let found = Found(export.state.load());
            if found.kind() != Kind::Free {
                return None;
            }
            let taken = found.taken().wrapping_add(1) & (u64::MAX >> 32);
            let open = Found::new(Kind::Open, owner, taken);
            // No process can name the entry before this process passes its name on.
            let is_mine = export.state.replace(found.0, open.0);
            is_mine.then(|| {
                export.granules.store(granules);
                ExportId::new(index, taken)
            })
        })
}

/// Returns `true` if a name names an entry, open or closed.
pub(super) fn is_there(layout: &Layout, id: ExportId) -> bool {
    id.find(layout).is_some()
}

/// Returns `true` if a name names an open entry.
pub(super) fn is_open(layout: &Layout, id: ExportId) -> bool {
    id.find(layout)
        .is_some_and(|(_, found)| found.kind() == Kind::Open)
}

/// Adds granules to an entry of the caller; returns `false` if the entry is not open.
pub(super) fn grow(layout: &Layout, id: ExportId, granules: u64) -> bool {
    match id.find(layout) {
        Some((export, found)) if found.kind() == Kind::Open => {
            export.granules.add(granules);
            true
        }
        _ => false,
    }
}

/// Closes an entry before its owner releases the memory. Returns `true` if a process has the
/// memory; otherwise frees the entry. Only the owner calls this.
pub(super) fn close(layout: &Layout, id: ExportId) -> bool {
    let Some((export, found)) = id.find(layout) else {
        return false;
    };
    end(export, found, || true)
}

/// Closes an entry, and frees it if no process has named it. Returns `true` if a process has.
/// Changes nothing if the entry has changed since it was `found`, or `may` refuses.
fn end(export: &Export, found: Found, may: impl Fn() -> bool) -> bool {
    let closed = found.with(Kind::Closed);
    if found.kind() == Kind::Open && !(may() && export.state.replace(found.0, closed.0)) {
        return true;
    }
    fence(Ordering::SeqCst);
    if export.is_held() {
        return true;
    }
    !(may() && export.state.replace(closed.0, closed.with(Kind::Free).0))
}

/// Names an entry for slot `me`, before that process imports the memory. Returns `false` if no process
/// has the memory any more, or the closed entry was named too often.
pub(super) fn name(layout: &Layout, id: ExportId, me: usize) -> bool {
    let Some((export, _)) = id.find(layout) else {
        return false;
    };
    export.mark(me, true, || true);
    fence(Ordering::SeqCst);
    while let Some((_, found)) = id.find(layout) {
        match (found.kind(), found.with_name()) {
            (Kind::Open, _) => return true,
            (_, Some(named)) if export.state.replace(found.0, named.0) => return true,
            (_, Some(_)) => {}
            (_, None) => break,
        }
    }
    export.mark(me, false, || true);
    false
}

/// Removes the name that slot `me` gave to an entry, after that process has unmapped and released
/// the memory.
pub(super) fn remove_name(layout: &Layout, id: ExportId, me: usize) {
    if let Some((export, _)) = id.find(layout) {
        export.mark(me, false, || true);
    }
}

/// Removes all names of a slot, while `may` says that its owner has ended.
pub(super) fn remove_names(layout: &Layout, slot: usize, may: impl Fn() -> bool) {
    for export in &layout.exports {
        export.mark(slot, false, &may);
    }
}

/// Closes all entries of an owner that has ended or leaves, while `may` says so. Returns the
/// granules that other processes have.
pub(super) fn lent(layout: &Layout, owner: usize, may: impl Fn() -> bool) -> u64 {
    let mut lent = 0_u64;
    for export in &layout.exports {
        let found = Found(export.state.load());
        let is_its = found.kind() != Kind::Free && found.owner() == owner;
        if is_its && end(export, found, &may) {
            lent = lent.saturating_add(export.granules.load());
        }
    }
    lent
}

#[cfg(test)]
pub(super) fn named(layout: &Layout) -> u32 {
    let holders = layout.exports.iter().flat_map(|export| &export.holders);
    holders.map(|word| (word.load() as u32).count_ones()).sum()
}

pub(super) struct Shown {
    pub(super) owner: usize,
    pub(super) granules: u64,
    pub(super) is_given_back: bool,
    pub(super) holders: Vec<usize>,
}

pub(super) fn all(layout: &Layout) -> impl Iterator<Item = Shown> {
    layout.exports.iter().filter_map(|export| {
        let found = Found(export.state.load());
        let holders = export.holders.iter().enumerate().flat_map(|(index, word)| {
            let bits = word.load();
            (0..32)
                .filter(move |bit| bits & (1 << bit) != 0)
                .map(move |bit| 32 * index + bit)
        });
        (found.kind() != Kind::Free).then(|| Shown {
            owner: found.owner(),
            granules: export.granules.load(),
            is_given_back: found.kind() == Kind::Closed,
            holders: holders.collect(),
        })
    })
}
