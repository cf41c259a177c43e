//! Building an allocation out of several places: a [plan](super::stitch) is carried out.
//!
//! Under the heap's lock the bytes are marked as used and the addresses are taken. Then, without
//! the lock, the pool lends new extents and charges for the mappings, and the driver maps. Under
//! the lock again the new mappings are searched and the oldest mappings retired. On failure
//! everything is as before.
//!
//! Keeps I-36.

use std::ops::Range;

use super::core::{Core, PINNED, State, unmap};
use super::extents::{ExtentId, Taken, work_of};
use super::request::Request;
use super::stitch::{Head, Plan};
use super::tag::{StreamId, Tag};
use crate::error::{BlockError, CallError, MemoryError};
use crate::extents::{Fence, LastWriter, Placed, Unmapped};
use crate::own::{CopyFailed, Physical, Stream};
use crate::pool::{Given, HolderId, Lending, Tenant};

/// The most mappings of an extent that are searched.
const SEARCHED: usize = 2;

/// The error of a failed mapping, and the addresses and sizes of stuck mappings.
type NotMapped = (MemoryError, Vec<(u64, u64)>);

/// A plan for which bytes and addresses were taken.
#[derive(Default)]
pub(super) struct Build {
    at: u64,
    from: u64,
    total: u64,
    /// The bytes of a window that the allocation begins with.
    run: Option<(u64, u64, Vec<Taken>)>,
    /// Extents before and after the new memory, with the used bytes of each.
    before: Vec<(ExtentId, Range<u64>)>,
    after: Option<(ExtentId, Range<u64>)>,
    taken: Vec<Taken>,
    new: Vec<u64>,
    new_used: u64,
    /// Extents, not settled, that go to the driver before the new ones are made.
    pub(super) merged: Vec<ExtentId>,
    /// The streams that the taken bytes name. Each counts as in use, so that it keeps its number.
    named: Vec<StreamId>,
}

struct Piece {
    /// `None` for a new extent.
    id: Option<ExtentId>,
    physical: Physical,
    size: u64,
    last_writer: Option<LastWriter>,
    fresh: bool,
}

impl Build {
    pub(super) fn grown(&self) -> u64 {
        self.new.iter().sum()
    }

    pub(super) fn work(&self) -> Tag {
        let mut work = work_of(&self.taken);
        if let Some((.., taken)) = &self.run {
            work.merge(&work_of(taken));
        }
        work
    }
}

/// A build that waits for memory. A drop, even after a pressure hook's panic, abandons it.
struct Begun<'a> {
    core: &'a Core,
    build: Build,
}

impl Begun<'_> {
    fn into_build(mut self) -> Build {
        std::mem::take(&mut self.build)
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        // An empty build has nothing to give back.
        let build = std::mem::take(&mut self.build);
        self.core.lock().abandon(build, &[]);
    }
}

impl State {
    /// Takes the bytes and addresses of a plan. If there are too few addresses, returns the
    /// adjacent bytes of addresses needed.
    pub(super) fn begin(&mut self, plan: Plan, margin: u64) -> Result<Build, u64> {
        let new_size = plan.grown();
        let Plan {
            head,
            whole,
            tail,
            new,
            new_used,
        } = plan;
        let extent_size = |id| self.large.extent(id).map_or(0, |extent| extent.size);
        let mut before = Vec::with_capacity(whole.len() + 1);
        if let Head::Suffix { id, size } = head {
            before.push((id, extent_size(id) - size..extent_size(id)));
        }
        before.extend(whole.into_iter().map(|id| (id, 0..extent_size(id))));
        let after = tail.map(|(id, used)| (id, 0..used));
        let old = before.iter().chain(&after).map(|&(id, _)| extent_size(id));
        let total = old.sum::<u64>() + new_size;
        let from = match head {
            Head::Run { at, size } => {
                let from = at + size;
                self.gaps.take_at(from, total).then_some(from)
            }
            _ => self.gaps.take(total, margin),
        };
        let from = from.ok_or_else(|| total.saturating_add(2 * margin))?;
        let (at, run) = match head {
            Head::Run { at, size } => (at, Some((at, size, self.large.take_run(at, size)))),
            Head::Suffix { .. } => {
                let skipped = before.first().map_or(0, |(_, range)| range.start);
                (from + skipped, None)
            }
            Head::None => (from, None),
        };
        let parts = before.iter().chain(&after);
        let taken = parts.map(|(id, range)| (*id, self.large.take(*id, range.clone())));
        let mut build = Build {
            named: Vec::new(),
            at,
            from,
            total,
            run,
            taken: taken.collect(),
            before,
            after,
            new,
            new_used,
            merged: Vec::new(),
        };
        build.named = build.work().points().iter().map(|it| it.stream).collect();
        self.keep_streams(&build.named, true);
        Ok(build)
    }

    fn keep_streams(&mut self, named: &[StreamId], more: bool) {
        named.iter().for_each(|&id| self.streams.count(id, more));
    }

    /// Gives back the bytes of a build, and its addresses except for stuck ranges.
    pub(super) fn abandon(&mut self, build: Build, stuck: &[Range<u64>]) {
        self.keep_streams(&build.named, false);
        for id in build.merged {
            self.large.settle(id, true);
        }
        self.large.give_back(build.taken);
        if let Some((at, size, taken)) = build.run {
            self.large.give_run_back(at, size, taken);
        }
        let mut from = build.from;
        for range in stuck {
            self.give_gap(from..range.start);
            from = range.end;
        }
        self.give_gap(from..build.from + build.total);
    }

    fn give_gap(&mut self, range: Range<u64>) {
        if range.start < range.end {
            self.gaps.give(range.start, range.end - range.start);
        }
    }

    /// Adds another mapping of an extent, in which an allocation lies, and stops searching the
    /// oldest mappings. In a heap that `keeps` all mappings the new mapping is not searched:
    /// repeated requests then find the same memory free, and the window made for them.
    fn add_alias(&mut self, id: ExtentId, at: u64, keeps: bool) {
        self.large.add_mapping(id, at, 1);
        let extent = self.large.extent(id);
        let mappings = extent.iter().flat_map(|extent| &extent.mappings);
        let searched = mappings.filter(|mapping| mapping.searched);
        let searched: Vec<u64> = searched.map(|mapping| mapping.at).collect();
        let many = searched.len().saturating_sub(SEARCHED);
        let retired = match keeps {
            true => &[at],
            false => searched.get(..many).unwrap_or_default(),
        };
        for &at in retired {
            self.large.stop_searching(id, at);
            self.retired.push_back((id, at));
        }
    }

    /// Adds the mapped pieces of a build, which are side by side. The first bytes of the new
    /// extents are in use, and the rest is free behind some work.
    fn add_pieces(&mut self, pieces: Vec<Piece>, build: &Build, rest: &Tag, keeps: bool) {
        let mut in_use = build.new_used;
        let mut at = build.from;
        for piece in pieces {
            let size = piece.size;
            match piece.id {
                Some(id) => self.add_alias(id, at, keeps),
                None => {
                    let used = in_use.min(size);
                    in_use -= used;
                    let id = self.large.add_extent(size);
                    if self.physicals.len() <= id {
                        self.physicals.resize_with(id + 1, || None);
                    }
                    if let Some(place) = self.physicals.get_mut(id) {
                        *place = Some(piece.physical);
                    }
                    self.large.add_mapping(id, at, u32::from(used > 0));
                    if used < size {
                        self.large.give(id, used..size, rest.clone());
                    }
                }
            }
            at += size;
        }
    }
}

impl Core {
    /// Carries out a build. Returns the first address of the allocation, and the work that other
    /// streams have to wait for before they use its memory.
    pub(super) fn build(
        &self,
        (tenant, holder): (&Tenant, HolderId),
        build: Build,
        request: Request<'_>,
    ) -> Result<(u64, Tag), BlockError> {
        let old = build.before.len() as u64 + u64::from(build.after.is_some());
        let sizes = build.new.clone();
        let lending = Lending {
            holder,
            sizes: &sizes,
            mappings: old,
            zeroes: false,
            whole: false,
            claims: true,
            place: request.place,
        };
        let mut begun = Begun { core: self, build };
        let merged = std::mem::take(&mut begun.build.merged);
        if !merged.is_empty() {
            self.release_extents((tenant, holder), merged);
        }
        let lent = tenant.lend(lending)?;
        let build = begun.into_build();
        let pieces = self.pieces(&build, lent);
        match self.map(build.from, &pieces) {
            Ok(placed) => {
                let of = (request.stream, request.id);
                self.finish((tenant, holder), build, pieces, placed, of)
            }
            Err((error, stuck)) => {
                let ranges: Vec<Range<u64>> =
                    stuck.iter().map(|(at, size)| *at..at + size).collect();
                let mappings = (pieces.len() - stuck.len()) as u64;
                // From here on the pool may take the extents, so no other handle may be left.
                let given = returned(pieces, mappings);
                self.lock().abandon(build, &ranges);
                tenant.give_up(holder, given);
                Err(tenant.not_placed(error))
            }
        }
    }

    fn pieces(&self, build: &Build, lent: Vec<Unmapped>) -> Vec<Piece> {
        let state = self.lock();
        let old = |&(id, _): &(ExtentId, Range<u64>)| {
            let physical = state.physicals.get(id)?.clone()?;
            Some(Piece {
                id: Some(id),
                size: physical.size(),
                physical,
                last_writer: None,
                fresh: false,
            })
        };
        let new = lent.into_iter().map(|unmapped| Piece {
            id: None,
            size: unmapped.size(),
            last_writer: unmapped.last_writer,
            fresh: unmapped.fresh,
            physical: unmapped.physical,
        });
        let before = build.before.iter().filter_map(old);
        before
            .chain(new)
            .chain(build.after.iter().filter_map(old))
            .collect()
    }

    /// Maps extents side by side, all of them or none. On failure returns the stuck ranges.
    fn map(&self, from: u64, pieces: &[Piece]) -> Result<Vec<Placed>, NotMapped> {
        let part = self.lock().spaces.part(from);
        let Some(part) = part else {
            return Err((CallError::InUse.into(), Vec::new()));
        };
        let mut placed: Vec<(u64, Placed)> = Vec::with_capacity(pieces.len());
        let mut at = from;
        for piece in pieces {
            let unmapped = Unmapped {
                physical: piece.physical.clone(),
                last_writer: piece.last_writer,
                fresh: false,
            };
            match part.place(at, unmapped) {
                Ok(one) => placed.push((at, one)),
                Err(failed) => {
                    // What is dropped is stuck.
                    let mut left = Vec::new();
                    for (at, one) in placed {
                        if let Err((one, error)) = unmap(one, &Fence::complete()) {
                            log!(error, %error, "a roll-back could not unmap: quarantined");
                            left.push((at, one.size()));
                        }
                    }
                    left.extend((failed.stuck > 0).then_some((at, piece.size)));
                    return Err((failed.error, left));
                }
            }
            at += piece.size;
        }
        Ok(placed.into_iter().map(|(_, one)| one).collect())
    }

    /// Adds the mappings of a build, and zeroes memory that another tenant wrote.
    fn finish(
        &self,
        (tenant, holder): (&Tenant, HolderId),
        build: Build,
        pieces: Vec<Piece>,
        placed: Vec<Placed>,
        (stream, id): (&Stream, StreamId),
    ) -> Result<(u64, Tag), BlockError> {
        let stale = self
            .stale(build.from, &pieces)
            .filter(|_| tenant.lending_terms().scrubs);
        // No capture guard begins between the question and the fill.
        let polling = stale.as_ref().and_then(|_| tenant.polling());
        let mut state = self.lock();
        placed.into_iter().for_each(|one| state.spaces.adopt(one));
        let filled = match &stale {
            Some(range) => stream.queue_uncaptured(|| {
                polling.as_ref().ok_or(CallError::Capturing)?;
                let size = range.end - range.start;
                state.spaces.zero(stream, range.start, size)
            }),
            None => Ok(()),
        };
        if let Err(failed) = filled {
            drop((state, polling));
            return Err(self.unscrubbed((tenant, holder), build, pieces, failed));
        }
        let mut tag = match stale {
            Some(_) => state.streams.now(id),
            None => Tag::Ready,
        };
        let stitched = build.run.is_some() || pieces.iter().any(|piece| piece.id.is_some());
        let count = pieces.len() as u64;
        let keeps = self.has(PINNED);
        state.add_pieces(pieces, &build, &tag, keeps);
        state.keep_streams(&build.named, false);
        let held = state.large.held();
        let counts = &mut state.counts;
        counts.stitches += u64::from(stitched);
        counts.mapped += count;
        counts.peak_held = counts.peak_held.max(held);
        tag.merge(&build.work());
        Ok((build.at, tag))
    }

    /// Returns the addresses from the first to the last new extent that another tenant wrote to.
    /// New extents are side by side, so nothing else lies between.
    fn stale(&self, from: u64, pieces: &[Piece]) -> Option<Range<u64>> {
        let mut at = from;
        let mut stale: Option<Range<u64>> = None;
        for piece in pieces {
            let end = at + piece.size;
            if piece
                .last_writer
                .is_some_and(|writer| writer.by != self.writer)
            {
                let start = stale.map_or(at, |range| range.start);
                stale = Some(start..end);
            }
            at = end;
        }
        stale
    }

    /// Undoes a build whose memory could not be zeroed. If the fill may still run, its mappings
    /// stay.
    fn unscrubbed(
        &self,
        (tenant, holder): (&Tenant, HolderId),
        build: Build,
        pieces: Vec<Piece>,
        failed: CopyFailed,
    ) -> BlockError {
        let error = match failed.is_of_capture() {
            true => tenant.refused(build.grown(), true),
            false => failed.error.into(),
        };
        let mut stuck = Vec::new();
        let mut at = build.from;
        for piece in &pieces {
            let placed = self.lock().spaces.remove(at);
            let unmapped = placed.map(|placed| match failed.ended {
                true => unmap(placed, &Fence::complete()),
                false => Err((placed, CallError::InUse)),
            });
            // What is dropped is stuck.
            if let Some(Err((_, error))) = unmapped {
                log!(error, %error, "a roll-back could not unmap: quarantined");
                stuck.push(at..at + piece.size);
            }
            at += piece.size;
        }
        let mappings = (pieces.len() - stuck.len()) as u64;
        // As in `build`.
        let given = returned(pieces, mappings);
        self.lock().abandon(build, &stuck);
        tenant.give_up(holder, given);
        error
    }
}

/// Collects the new extents of a failed build, to be given up.
fn returned(pieces: Vec<Piece>, mappings: u64) -> Given {
    let new = pieces.into_iter().filter(|piece| piece.id.is_none());
    let extents = new.map(|piece| Unmapped {
        physical: piece.physical,
        last_writer: piece.last_writer,
        fresh: piece.fresh,
    });
    Given {
        extents: extents.collect(),
        mappings,
        error: None,
        ..Given::default()
    }
}
