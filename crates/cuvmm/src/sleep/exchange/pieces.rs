//! The pieces that an exchange copies: each is saved, and then overwritten where it lies.

use std::ops::Range;

use crate::own::Span;
use crate::pool::{ToSleep, ToWake};
use crate::store::{Contents, Direction, Job, PART, PARTS, Stage};

/// The size of a piece, in bytes: while one is copied in, the next ones are copied out.
const PIECE: u64 = (PART * PARTS) as u64;

/// Memory with contents to be saved, contents to be restored, or both, one after the other.
pub(super) struct Piece {
    /// A block that falls asleep, as an index, and the range of its contents.
    out: Option<(usize, Range<u64>)>,
    /// A block that wakes, as an index, and a range of it.
    into: Option<(usize, Range<u64>)>,
    stage: Stage,
}

impl Piece {
    /// Returns the pieces of blocks that fall asleep and of blocks that wake: first those of memory
    /// that passes from the former to the latter.
    pub(super) fn all(to_sleep: &[ToSleep], to_wake: &[ToWake]) -> Vec<Self> {
        let mut pieces = Vec::new();
        let mut passed: Vec<Vec<Range<u64>>> = to_sleep.iter().map(|_| Vec::new()).collect();
        for (into, one) in to_wake.iter().enumerate() {
            for arrival in one.arrivals() {
                let from = to_sleep.iter().position(|one| one.gives(arrival));
                let contents = from
                    .and_then(|from| to_sleep.get(from))
                    .map_or(0, ToSleep::bytes);
                for step in steps(0..arrival.size) {
                    let at = |offset: u64| offset + step.start..offset + step.end;
                    let here = at(arrival.from_offset);
                    let kept = here.start.min(contents)..here.end.min(contents);
                    pieces.push(Self::new(
                        from.map(|from| (from, kept)),
                        Some((into, at(arrival.offset))),
                    ));
                }
                let range = arrival.from_offset..arrival.from_offset + arrival.size;
                let list = from.and_then(|from| passed.get_mut(from));
                list.into_iter().for_each(|list| list.push(range.clone()));
            }
        }
        for (from, (one, mut passed)) in to_sleep.iter().zip(passed).enumerate() {
            passed.sort_by_key(|range| range.start);
            let outs = gaps(&passed, one.bytes()).flat_map(steps);
            pieces.extend(outs.map(|range| Self::new(Some((from, range)), None)));
        }
        for (into, one) in to_wake.iter().enumerate() {
            let rest = steps(one.arriving()..one.used());
            pieces.extend(rest.map(|range| Self::new(None, Some((into, range)))));
        }
        pieces
    }

    fn new(out: Option<(usize, Range<u64>)>, into: Option<(usize, Range<u64>)>) -> Self {
        let stage = Stage::default();
        Self { out, into, stage }
    }

    fn is_of(&self, from: usize) -> bool {
        self.out.as_ref().is_some_and(|out| out.0 == from)
    }

    /// Returns `true` if the memory of a block may have other contents than its own.
    pub(super) fn has_overwritten(pieces: &[Self], from: usize) -> bool {
        let mut of = pieces.iter().filter(|piece| piece.is_of(from));
        of.any(|piece| piece.stage.is_overwritten())
    }

    /// Returns `true` if the store has all contents of a block.
    pub(super) fn has_saved(pieces: &[Self], from: usize) -> bool {
        let mut of = pieces.iter().filter(|piece| piece.is_of(from));
        of.all(|piece| piece.stage.is_saved())
    }

    /// Notes that the memory has the contents that were saved.
    pub(super) fn restored(&self) {
        self.stage.restored();
    }
}

/// The blocks of an exchange, as jobs need them.
pub(super) struct Ends<'a> {
    out: Vec<(Span<'a>, Contents<'a>)>,
    into: Vec<(Span<'a>, Contents<'a>, u64)>,
}

impl<'a> Ends<'a> {
    /// All blocks have contents, if only empty ones.
    pub(super) fn of(to_sleep: &'a mut [ToSleep], to_wake: &'a mut [ToWake]) -> Self {
        let out = to_sleep.iter_mut().filter_map(ToSleep::contents);
        let out = out.map(|(moving, saved)| (moving.whole_span(), Contents::of(saved)));
        let into = to_wake.iter_mut().filter_map(ToWake::contents);
        let into = into.map(|(moving, saved, _)| {
            let kept = saved.bytes();
            (moving.whole_span(), Contents::of(saved), kept)
        });
        Self {
            out: out.collect(),
            into: into.collect(),
        }
    }

    /// Returns the jobs of the exchange itself.
    pub(super) fn exchange(mut self, pieces: &'a [Piece]) -> Vec<Job<'a>> {
        let jobs = pieces.iter().enumerate().filter_map(|(index, piece)| {
            let job = match self.save(index, piece) {
                Some(save) => match self.fill(index, piece) {
                    Some(fill) => save.then(fill, &piece.stage),
                    None => self.only_save(index, piece, save)?,
                },
                None => self.fill(index, piece)?,
            };
            Some(job)
        });
        jobs.collect()
    }

    /// Returns jobs that save what some blocks have that is not saved.
    pub(super) fn save_rest(
        mut self,
        pieces: &'a [Piece],
        of: impl Fn(usize) -> bool,
    ) -> Vec<Job<'a>> {
        let is_of = |piece: &Piece| piece.out.as_ref().is_some_and(|out| of(out.0));
        let unsaved = |(_, piece): &(usize, &Piece)| !piece.stage.is_saved() && is_of(piece);
        let unsaved = pieces.iter().enumerate().filter(unsaved);
        let jobs = unsaved.filter_map(|(index, piece)| {
            let save = self.save(index, piece)?;
            self.only_save(index, piece, save)
        });
        jobs.collect()
    }

    /// Returns jobs that restore what was saved where it has been overwritten.
    pub(super) fn restore(mut self, pieces: &'a [Piece]) -> Vec<Job<'a>> {
        let overwritten = |(_, piece): &(usize, &Piece)| piece.stage.is_overwritten();
        let overwritten = pieces.iter().enumerate().filter(overwritten);
        let jobs = overwritten.filter_map(|(index, piece)| self.job((index, Direction::In), piece));
        jobs.collect()
    }

    fn save(&mut self, index: usize, piece: &Piece) -> Option<Job<'a>> {
        self.job((index, Direction::Out), piece)
    }

    /// Adds nothing to a job but the note that it has ended.
    fn only_save(&mut self, index: usize, piece: &'a Piece, save: Job<'a>) -> Option<Job<'a>> {
        let (from, range) = piece.out.as_ref()?;
        let (span, contents) = self.out.get_mut(*from)?;
        let nothing = contents.job((index, Direction::In), (*span, 0), range.end..range.end);
        Some(save.then(nothing, &piece.stage))
    }

    /// Returns a job for the contents of a block that falls asleep, where they lie.
    fn job(&mut self, of: (usize, Direction), piece: &Piece) -> Option<Job<'a>> {
        let (from, range) = piece.out.as_ref()?;
        let (own, contents) = self.out.get_mut(*from)?;
        let place = match &piece.into {
            Some((into, at)) => {
                let (span, ..) = self.into.get(*into)?;
                (*span, at.start.wrapping_sub(range.start))
            }
            None => (*own, 0),
        };
        Some(contents.job(of, place, range.clone()))
    }

    /// Returns the job that gives a block that wakes its contents, and clears what has none.
    fn fill(&mut self, index: usize, piece: &Piece) -> Option<Job<'a>> {
        let (into, range) = piece.into.clone()?;
        let (span, contents, kept) = self.into.get_mut(into)?;
        let job = contents.job((index, Direction::In), (*span, 0), range.clone());
        Some(job.clearing(range.start.max(*kept)..range.end))
    }
}

/// Divides a range into pieces.
fn steps(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let Range { mut start, end } = range;
    std::iter::from_fn(move || {
        let from = start;
        start = end.min(from.saturating_add(PIECE));
        (from < end).then_some(from..start)
    })
}

/// Returns the parts of the first `bytes` bytes that no range has. The ranges are in order.
fn gaps(ranges: &[Range<u64>], bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let mut at = 0;
    let ends = ranges.iter().cloned().chain(std::iter::once(bytes..bytes));
    let gaps = ends.map(move |range| {
        let gap = at.min(bytes)..range.start.min(bytes);
        at = range.end;
        gap
    });
    gaps.filter(|gap| gap.start < gap.end)
}
