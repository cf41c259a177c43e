//! Exported blocks of the process, and blocks of other processes that it imports.

use std::sync::Arc;

use super::Member;
use crate::ledger::exports::{self, ExportId};

/// The exported blocks that the process has given back and other processes still have.
#[derive(Debug, Default)]
pub(super) struct Lent(Vec<(ExportId, u64)>);

impl Lent {
    /// Returns the bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|&(_, bytes)| bytes).sum()
    }

    fn add(&mut self, id: ExportId, bytes: u64) {
        match self.0.iter_mut().find(|(known, _)| *known == id) {
            Some((_, lent)) => *lent = lent.saturating_add(bytes),
            None => self.0.push((id, bytes)),
        }
    }
}

/// The blocks of other processes that this one has imported, and how often each.
pub(super) type Named = Vec<(ExportId, usize)>;

impl Member {
    /// Counts exported memory of a pool as one block: the one named, or a new one if there is none
    /// or its memory was given back. Returns the block's name, or `None` if the ledger has no room
    /// for another one.
    pub(crate) fn export(&self, known: Option<u64>, bytes: u64) -> Option<u64> {
        let layout = self.file.layout();
        let granules = self.granules(bytes);
        match known.map(ExportId::of) {
            Some(id) if exports::grow(layout, id, granules) => Some(id.word()),
            _ => exports::take(layout, self.index, granules).map(ExportId::word),
        }
    }

    /// Counts released memory of an exported block. Returns `true` if other processes have it: it
    /// is no longer granted to the pool then, and stays charged until they do not.
    pub(crate) fn lend(&self, block: u64, bytes: u64) -> bool {
        if self.own_process().is_err() {
            return false;
        }
        let mut account = self.account();
        let id = ExportId::of(block);
        let is_held = exports::close(self.file.layout(), id);
        if is_held {
            account.used = account.used.saturating_sub(bytes);
            account.lent.add(id, bytes);
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
        account.lent.0.retain(|&(id, _)| exports::close(layout, id));
        let returned = before - account.lent.bytes();
        account.obtained = account.obtained.saturating_sub(returned);
        self.slot().obtained.publish(account.obtained);
        self.refund(&account, 0);
    }

    /// Names a block that this process is about to import from a process of the same ledger.
    /// Returns `None` if that process has given it back.
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

    /// Returns the number that names the ledger's file, to tell it from other ledgers.
    pub(crate) fn ledger_number(&self) -> u64 {
        self.file.number()
    }
}

/// A block of another process that this one has named. The block counts as used here until this is
/// dropped, which must be after its memory was released.
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
