//! Exported blocks of the process, and imported blocks of other processes.
//!
//! An offer of several blocks or allocations has an entry, so that its memory can be named until the
//! offer ends, whatever other offers of a part of the memory do. Offers of exactly the same memory share
//! the entry.
//!
//! Keeps I-113.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Member;
use crate::ledger::exports::{self, ExportId};

/// Exported memory that the process has released and other processes still have, and the entries in
/// which they have it. Entries of ended offers whose memory is not released are here with 0 bytes.
#[derive(Debug, Default)]
pub(super) struct Lent(Vec<(Vec<ExportId>, u64)>);

impl Lent {
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|&(_, bytes)| bytes).sum()
    }

    fn add(&mut self, ids: Vec<ExportId>, bytes: u64) {
        match self.0.iter_mut().find(|(known, _)| *known == ids) {
            Some((_, lent)) => *lent = lent.saturating_add(bytes),
            None => self.0.push((ids, bytes)),
        }
    }
}

/// The offers with one entry.
#[derive(Debug)]
pub(super) struct Open {
    count: usize,
    bytes: u64,
}

/// The entries of offers of the process that have not ended.
pub(super) type Offers = BTreeMap<ExportId, Open>;

/// With the number of imports of each.
pub(super) type Named = Vec<(ExportId, usize)>;

impl Member {
    /// Counts exported memory of a pool as part of the `known` block, which is open, or as a new block
    /// if there is none. Returns the block's name, or `None` if the ledger has no
    /// entry left.
    pub(crate) fn export(&self, known: Option<u64>, bytes: u64) -> Option<u64> {
        let layout = self.file.layout();
        let granules = self.granules(bytes);
        match known.map(ExportId::of) {
            Some(id) if exports::grow(layout, id, granules) => Some(id.word()),
            _ => exports::take(layout, self.index, granules).map(ExportId::word),
        }
    }

    /// Counts exported memory as an offer of several blocks or allocations. All of it has the names
    /// `known`: if one is that of an offer of as many bytes that has not ended, it is the same memory,
    /// and needs no further entry. Returns `None` if the ledger has no entry left.
    pub(crate) fn open_offer(self: &Arc<Self>, known: &[u64], bytes: u64) -> Option<OpenOffer> {
        let mut account = self.account();
        let offers = &mut account.offers;
        let same = known.iter().map(|&name| ExportId::of(name));
        let mut same = same.filter(|id| offers.get(id).is_some_and(|open| open.bytes == bytes));
        let id = match same.next() {
            Some(id) => id,
            None => exports::take(self.file.layout(), self.index, self.granules(bytes))?,
        };
        offers.entry(id).or_insert(Open { count: 0, bytes }).count += 1;
        let member = Arc::clone(self);
        Some(OpenOffer { member, id })
    }

    /// Returns `true` if a name is that of a block or offer whose memory was not released.
    pub(crate) fn is_open(&self, name: u64) -> bool {
        exports::is_open(self.file.layout(), ExportId::of(name))
    }

    /// Returns `true` if a name names an entry.
    pub(crate) fn has_entry(&self, name: u64) -> bool {
        exports::is_there(self.file.layout(), ExportId::of(name))
    }

    /// Counts released memory that has these names in the ledger. Returns `true` if other processes
    /// have the memory: it is then no longer granted to the pool, and stays charged while they have
    /// it.
    pub(crate) fn lend(&self, names: &[u64], bytes: u64) -> bool {
        if names.is_empty() || self.own_process().is_err() {
            return false;
        }
        let mut account = self.account();
        let layout = self.file.layout();
        let ids = names.iter().map(|&name| ExportId::of(name));
        let held: Vec<ExportId> = ids.filter(|&id| exports::close(layout, id)).collect();
        let is_held = !held.is_empty();
        if is_held {
            account.used = account.used.saturating_sub(bytes);
            account.lent.add(held, bytes);
        }
        is_held
    }

    /// Refunds lent memory that no other process has any more.
    pub(in crate::ledger) fn settle_lent(&self) {
        let mut account = self.account();
        if account.lent.0.is_empty() {
            return;
        }
        let before = account.lent.bytes();
        let layout = self.file.layout();
        let is_held = |ids: &[ExportId]| ids.iter().any(|&id| exports::close(layout, id));
        account.lent.0.retain(|(ids, _)| is_held(ids));
        let returned = before - account.lent.bytes();
        account.obtained = account.obtained.saturating_sub(returned);
        self.slot().obtained.publish(account.obtained);
        self.refund(&account, 0);
    }

    /// Names a block before this process imports it from a process of the same ledger. Returns
    /// `None` if the exporting process has released the block.
    pub(crate) fn name(self: &Arc<Self>, block: u64) -> Option<NamedExport> {
        self.own_process().ok()?;
        let mut named = self.named();
        let id = ExportId::of(block);
        match named.iter_mut().find(|(known, _)| *known == id) {
            Some((_, times)) => *times += 1,
            None => {
                if !exports::name(self.file.layout(), id, self.index) {
                    return None;
                }
                named.push((id, 1));
            }
        }
        let member = Arc::clone(self);
        Some(NamedExport { member, id })
    }

    pub(crate) fn ledger_number(&self) -> u64 {
        self.file.number()
    }
}

/// A use of the entry of an offer of several blocks or allocations. Other processes can name the memory until
/// this value is dropped.
#[derive(Debug)]
pub(crate) struct OpenOffer {
    member: Arc<Member>,
    id: ExportId,
}

impl OpenOffer {
    /// Returns the number of the ledger, and the name in it.
    pub(crate) fn name(&self) -> (u64, u64) {
        (self.member.ledger_number(), self.id.word())
    }
}

impl Drop for OpenOffer {
    fn drop(&mut self) {
        let member = &self.member;
        if member.own_process().is_err() {
            return;
        }
        let mut account = member.account();
        let Some(open) = account.offers.get_mut(&self.id) else {
            return;
        };
        open.count -= 1;
        if open.count > 0 {
            return;
        }
        account.offers.remove(&self.id);
        if exports::close(member.file.layout(), self.id) {
            // It is asked again until no process has the memory.
            account.lent.add(vec![self.id], 0);
        }
    }
}

/// A block of another process that this process has named. The block counts as used here until this
/// value is dropped, after the memory was released.
#[derive(Debug)]
pub(crate) struct NamedExport {
    member: Arc<Member>,
    id: ExportId,
}

impl Drop for NamedExport {
    fn drop(&mut self) {
        let member = &self.member;
        if member.own_process().is_err() {
            return;
        }
        let mut named = member.named();
        let Some(at) = named.iter().position(|(id, _)| *id == self.id) else {
            return;
        };
        named[at].1 -= 1;
        if named[at].1 == 0 {
            named.swap_remove(at);
            let layout = member.file.layout();
            exports::remove_name(layout, self.id, member.index);
            // The owner may refund the memory.
            layout.header.wanted.ring();
        }
    }
}
