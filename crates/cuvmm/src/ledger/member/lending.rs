//! Exported blocks of the process, and imported blocks of other processes.

use std::sync::Arc;

use super::Member;
use crate::ledger::exports::{self, ExportId};

/// Exported blocks that the process has released and other processes still have.
#[derive(Debug, Default)]
pub(super) struct Lent(Vec<(ExportId, u64)>);

impl Lent {
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

/// With the number of imports of each.
pub(super) type Named = Vec<(ExportId, usize)>;

impl Member {
    /// Counts exported memory of a pool as part of the `known` block, or as a new block if there is
    /// none or its memory was released. Returns the block's name, or `None` if the ledger has no
    /// entry left.
    pub(crate) fn export(&self, known: Option<u64>, bytes: u64) -> Option<u64> {
        let layout = self.file.layout();
        let granules = self.granules(bytes);
        match known.map(ExportId::of) {
            Some(id) if exports::grow(layout, id, granules) => Some(id.word()),
            _ => exports::take(layout, self.index, granules).map(ExportId::word),
        }
    }

    /// Counts released memory of an exported block. Returns `true` if other processes have the
    /// memory: it is then no longer granted to the pool, and stays charged while they have it.
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
