//! How a request is served: from a free run, from memory that other streams used, from several
//! places, or from new memory.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::build::Build;
use super::cache::StreamCache;
use super::core::{Core, Locked, PINNED, State};
use super::extents::work_of;
use super::request::{Request, is_small, least_chunk};
use super::stitch::{Levels, Plan, Planner, Wanted};
use super::tag::{StreamId, Tag};
use crate::deferred;
use crate::error::{BlockError, CallError};
use crate::own::Physical;
use crate::pool::{HolderId, Tenant, Wait};

/// A heap that keeps all its mappings gets new memory rather than mappings once it uses this number
/// of addresses for each byte.
const KEPT_ADDRESSES: u64 = 16;

#[derive(Clone, Copy)]
struct Growth {
    limit: u64,
    /// The bytes of new memory that the pool has refused for the request, if any.
    refused: Option<u64>,
    /// The bytes that the tenant could get, where extents may be merged and that matters.
    room: Option<u64>,
}

pub(super) type Owner<'a> = (&'a Tenant, HolderId);

enum Step {
    /// The request was served. Other streams have to wait for the work.
    Done(u64, Tag),
    Build(Build),
    /// This number of adjacent bytes of addresses is needed.
    Addresses(u64),
    /// Extents may be merged if the tenant could get more memory.
    Room,
    Refused,
}

impl Core {
    /// Serves a request for `size` bytes, rounded in `request`, that no usable free run fits.
    /// Returns the first address. If memory is short, calls hooks and waits as `wait` says, and
    /// tries again.
    pub(super) fn serve(
        &self,
        owner: Owner<'_>,
        request: Request<'_>,
        size: u64,
        wait: Wait,
    ) -> Result<u64, BlockError> {
        let home = Some(request.stream);
        let served = owner.0.request(request.size, home, wait, |place| {
            self.serve_slowly(owner, Request { place, ..request })
        });
        if served.is_ok() {
            self.lock().counts.made(size, || self.caches.bytes());
        }
        served
    }

    fn serve_slowly(&self, owner: Owner<'_>, request: Request<'_>) -> Result<u64, BlockError> {
        let request = Request {
            captures: request.stream.is_capturing()?,
            ..request
        };
        drop(self.lock_drained());
        if !is_small(request.size, request.alignment) {
            return self.serve_large(owner, request).map(|(at, _)| at);
        }
        if let Some(at) = self.serve_small(owner.0, request, false)? {
            return Ok(at);
        }
        let chunk = self.lock().chunk(request);
        let least = least_chunk(request);
        let served = match self.serve_large(owner, chunk) {
            Err(error) if error.is_out_of_memory() && chunk.size > least.size => {
                self.serve_large(owner, least).map(|it| (it, least.size))
            }
            served => served.map(|it| (it, chunk.size)),
        };
        let ((at, work), size) = match served {
            Err(error) if error.is_out_of_memory() => {
                let behind = self.serve_small(owner.0, request, true)?;
                return behind.ok_or(error);
            }
            served => served?,
        };
        self.lock().add_chunk((at, size), work, request);
        Ok(at)
    }

    /// Serves a small request from the chunks and from free runs; behind other streams' work only
    /// if it `must`, or if the heap holds too much to get a chunk before it waits.
    fn serve_small(
        &self,
        tenant: &Tenant,
        request: Request<'_>,
        must: bool,
    ) -> Result<Option<u64>, BlockError> {
        // Declared first, so that the heap's lock is released before the permission is dropped.
        let polling = request.polling(tenant);
        let may = Growth {
            limit: tenant.lending_terms().most,
            refused: None,
            room: None,
        };
        let mut state = self.lock();
        if let Some(at) = state.fit_in_chunk(request) {
            return Ok(Some(at));
        }
        if polling.is_none() || !state.streams.are_several() {
            return Ok(None);
        }
        state.refresh(true);
        if let Some(at) = state.fit_in_chunk(request) {
            return Ok(Some(at));
        }
        let chunk = state.chunk(request);
        let waits = self.waits && (must || !self.planner(&mut state, chunk, may, true).may_grow());
        let found = match waits {
            true => self.small_behind(&mut state, request)?,
            false => None,
        };
        state.counts.small += found.map_or(0, |_| request.size);
        Ok(found)
    }

    /// Takes a run of a chunk behind other streams' work, and makes the stream wait for that work.
    fn small_behind(
        &self,
        state: &mut Locked<'_>,
        request: Request<'_>,
    ) -> Result<Option<u64>, CallError> {
        let (size, alignment, id) = (request.size, request.alignment, request.id);
        let Some(at) = state.small.find(size, alignment, id, true) else {
            return Ok(None);
        };
        let work = state.small.allocate(at, size);
        match self.order(state, &work, id) {
            Ok(true) => Ok(Some(at)),
            outcome => {
                state.small.free(at, size, work);
                outcome.map(|_| None)
            }
        }
    }

    /// Makes a stream wait for other streams' work. Returns `false` if it cannot.
    fn order(&self, state: &mut Locked<'_>, work: &Tag, id: StreamId) -> Result<bool, CallError> {
        if work.class().serves(id) {
            return Ok(true);
        }
        let ordered = self.waits && state.streams.order(work, id)?;
        state.counts.waits += u64::from(ordered);
        Ok(ordered)
    }

    fn serve_large(
        &self,
        owner: Owner<'_>,
        request: Request<'_>,
    ) -> Result<(u64, Tag), BlockError> {
        if let Some(found) = self.lock().fit(request) {
            return Ok(found);
        }
        let mut reserved = false;
        let served = self.serve_in_steps(owner, request, &mut reserved);
        if reserved && served.is_err() {
            owner.0.return_addresses(owner.1);
        }
        served
    }

    fn serve_in_steps(
        &self,
        owner: Owner<'_>,
        request: Request<'_>,
        reserved: &mut bool,
    ) -> Result<(u64, Tag), BlockError> {
        let (mut refusal, mut refused) = (None, None);
        let mut short = None;
        let mut tidied = false;
        let mut room = None;
        loop {
            let seen = self.reservations.load(Ordering::Acquire);
            let step = self.step(owner.0, request, (refused, room), short.is_none())?;
            let build = match step {
                Step::Done(at, work) => return Ok((at, work)),
                Step::Build(build) => build,
                Step::Room => {
                    room = Some(owner.0.available());
                    continue;
                }
                Step::Addresses(bytes) => {
                    short = self.reserve(owner, bytes, seen).err();
                    *reserved |= short.is_none();
                    continue;
                }
                Step::Refused if !tidied => {
                    // Addresses may be short.
                    tidied = true;
                    self.tidy_now(owner, usize::MAX);
                    continue;
                }
                Step::Refused => {
                    let captures = || request.captures || owner.0.is_capturing();
                    let other = || owner.0.refused(request.size, captures());
                    return Err(refusal.or(short).unwrap_or_else(other));
                }
            };
            // A request merges extents once.
            let grown = build.grown();
            room = room.map(|_| 0);
            match self.build(owner, build, request) {
                Ok(built) => {
                    self.tidy_some(owner);
                    return Ok(built);
                }
                Err(error) if error.is_out_of_memory() && !tidied => {
                    // Mappings may be short.
                    tidied = true;
                    self.tidy_now(owner, usize::MAX);
                }
                // A smaller extent may fit, or free memory suffice.
                Err(error)
                    if grown > 0
                        && error.is_out_of_memory()
                        && refused.is_none_or(|before| grown < before) =>
                {
                    (refusal, refused) = (Some(error), Some(grown));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Finds memory for a request that no usable run fits, the cheapest first: runs whose work has
    /// just completed; a plan with little new memory; runs and plans behind the work of other
    /// streams; new memory.
    ///
    /// With `reserves`, asks for more addresses if there are too few for the best of these.
    fn step(
        &self,
        tenant: &Tenant,
        request: Request<'_>,
        (refused, room): (Option<u64>, Option<u64>),
        reserves: bool,
    ) -> Result<Step, BlockError> {
        // As in `serve_small`.
        let polling = request.polling(tenant);
        let may = Growth {
            limit: tenant.lending_terms().most,
            refused,
            room,
        };
        let mut state = self.lock();
        let several = polling.is_some() && state.streams.are_several();
        if several {
            state.refresh(true);
        }
        if let Some((at, work)) = state.fit(request) {
            return Ok(Step::Done(at, work));
        }
        if self.has(PINNED)
            && let Some((at, work)) = state.fit_retired(request)
        {
            return Ok(Step::Done(at, work));
        }
        let margin = self.device.granule().bytes();
        let begin = |state: &mut State, plan: Option<Plan>| match state.begin(plan?, margin) {
            Ok(build) => Some(Step::Build(build)),
            Err(bytes) => reserves.then_some(Step::Addresses(bytes)),
        };
        let plan = self.planner(&mut state, request, may, true).cheap();
        if polling.is_some()
            && let Some(plan) = &plan
            && let Some(step) = self.merge(&mut state, plan, request, may)
        {
            return Ok(step);
        }
        if let Some(step) = begin(&mut state, plan) {
            return Ok(step);
        }
        if several && self.waits {
            if let Some((at, work)) = self.fit_behind(&mut state, request)? {
                return Ok(Step::Done(at, work));
            }
            let plan = self.planner(&mut state, request, may, false).stitch();
            match begin(&mut state, plan) {
                Some(Step::Build(build)) => {
                    match self.order(&mut state, &build.work(), request.id) {
                        Ok(true) => return Ok(Step::Build(build)),
                        outcome => {
                            state.abandon(build, &[]);
                            outcome?;
                        }
                    }
                }
                Some(step) => return Ok(step),
                None => {}
            }
        }
        let plan = self.planner(&mut state, request, may, true).dear();
        Ok(begin(&mut state, plan).unwrap_or(Step::Refused))
    }

    /// Begins a plan with large extents in place of its small ones, if that gains. Polls the work on
    /// these.
    fn merge(
        &self,
        state: &mut State,
        plan: &Plan,
        request: Request<'_>,
        may: Growth,
    ) -> Option<Step> {
        if !self.policy.merges || self.has(PINNED) || !plan.may_merge() {
            return None;
        }
        let Some(room) = may.room else {
            return Some(Step::Room);
        };
        let planner = self.planner(state, request, may, true);
        // The work is polled only if it decides.
        planner.merged(plan, room, |_| true)?;
        let idle = state.idle_in(plan);
        let planner = self.planner(state, request, may, true);
        let merged = planner.merged(plan, room, |id| idle.contains(&id))?;
        let is_exported = |&id| {
            let physical = state.physicals.get(id).and_then(Option::as_ref);
            physical.is_some_and(Physical::is_exported)
        };
        // Another process may have them, so that their release frees nothing.
        if merged.1.iter().any(is_exported) {
            return None;
        }
        let build = state.begin_merged(merged, self.device.granule().bytes())?;
        Some(Step::Build(build))
    }

    /// Reserves addresses with at least `least` adjacent bytes, unless another thread has reserved
    /// some since `seen` reservations were made.
    fn reserve(
        &self,
        (tenant, holder): Owner<'_>,
        least: u64,
        seen: u64,
    ) -> Result<(), BlockError> {
        self.device.own_process()?;
        // User code that is deferred meanwhile runs without the lock, which it may take.
        let _alone = deferred::Locked::for_calls(&self.reserving);
        if self.reservations.load(Ordering::Acquire) == seen {
            let space = tenant.reserve(holder, least, self.addresses)?;
            let space = space.open_to(self.guests.iter().cloned());
            self.lock().add_space(space);
            self.reservations.fetch_add(1, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Takes a run behind other streams' work, and makes the stream wait for that work.
    fn fit_behind(
        &self,
        state: &mut Locked<'_>,
        request: Request<'_>,
    ) -> Result<Option<(u64, Tag)>, CallError> {
        let (size, alignment, id) = (request.size, request.alignment, request.id);
        let Some(Range { start: at, .. }) = state.large.runs.find(size, alignment, id, true) else {
            return Ok(None);
        };
        let taken = state.large.take_run(at, size);
        let work = work_of(&taken);
        match self.order(state, &work, id) {
            Ok(true) => Ok(Some((at, state.streams.now(id)))),
            outcome => {
                state.large.give_run_back(at, size, taken);
                outcome.map(|_| None)
            }
        }
    }

    fn planner<'s>(
        &'s self,
        state: &'s mut State,
        request: Request<'_>,
        may: Growth,
        own: bool,
    ) -> Planner<'s> {
        state.large.list();
        let used = state.large.held() - state.large.free();
        let levels = Levels {
            held: state.large.held(),
            peak: state.counts.peak_live.max(used + request.size),
            mean: state.counts.mean_large(),
            limit: may.limit,
            refused: may.refused,
            spares_mappings: self.has(PINNED)
                && state.gaps.used() / KEPT_ADDRESSES >= state.large.held(),
        };
        let wanted = Wanted {
            size: request.size,
            anywhere: request.alignment <= super::ALIGNMENT,
            stream: own.then_some(request.id),
        };
        Planner {
            extents: &state.large,
            gaps: &state.gaps,
            granule: self.device.granule(),
            policy: &self.policy,
            levels,
            wanted,
        }
    }
}

impl State {
    /// Serves a request from a free run that the stream can use without waiting, if need be after
    /// freeing the allocations in its stream cache.
    pub(super) fn fit_any(&mut self, request: Request<'_>, cache: &StreamCache) -> Option<u64> {
        if !is_small(request.size, request.alignment) {
            return self.fit_large(request, cache);
        }
        if let Some(at) = self.fit_small(request) {
            return Some(at);
        }
        self.drain_both(cache);
        self.fit_in_chunk(request)
    }

    /// Serves a small request from a chunk, or from a new chunk in a free run, which costs no
    /// driver call.
    fn fit_in_chunk(&mut self, request: Request<'_>) -> Option<u64> {
        if let Some(at) = self.fit_small(request) {
            return Some(at);
        }
        let chunk = self.chunk(request);
        let (at, work) = self.fit(chunk)?;
        self.add_chunk((at, chunk.size), work, request);
        Some(at)
    }

    /// Serves a large request from a run of exactly its size, or from the shortest run that fits
    /// once the allocations in the stream's cache are free.
    fn fit_large(&mut self, request: Request<'_>, cache: &StreamCache) -> Option<u64> {
        let mut run = self.find(request);
        let is_exact = |run: &Range<u64>| run.end - run.start == request.size;
        if cache.bytes() > 0 && !run.as_ref().is_some_and(is_exact) {
            self.drain_both(cache);
            run = self.find(request);
        }
        Some(self.allocate_in(&run?, request).0)
    }

    fn fit_small(&mut self, request: Request<'_>) -> Option<u64> {
        let (size, alignment) = (request.size, request.alignment);
        let at = self.small.find(size, alignment, request.id, false)?;
        self.small.allocate(at, size);
        self.counts.small += size;
        Some(at)
    }

    fn chunk<'a>(&self, request: Request<'a>) -> Request<'a> {
        let least = least_chunk(request);
        Request {
            size: self.chunk_size().max(least.size),
            ..least
        }
    }

    fn add_chunk(&mut self, (at, chunk): (u64, u64), work: Tag, request: Request<'_>) {
        // Memory of other streams is ordered before this stream.
        let work = match work.class().serves(request.id) {
            true => work,
            false => self.streams.now(request.id),
        };
        self.small.add(at, chunk, work);
        self.small.allocate(at, request.size);
        self.counts.small += request.size;
    }

    /// Allocates from the shortest large run that fits and that the stream can use without waiting.
    fn fit(&mut self, request: Request<'_>) -> Option<(u64, Tag)> {
        let run = self.find(request)?;
        Some(self.allocate_in(&run, request))
    }

    /// Allocates from the shortest free range that fits and that the stream can use without
    /// waiting, through mappings searched or not.
    fn fit_retired(&mut self, request: Request<'_>) -> Option<(u64, Tag)> {
        let (size, alignment, id) = (request.size, request.alignment, request.id);
        let at = self.large.find_anywhere(size, alignment, id)?;
        Some((at, self.large.allocate(at, size)))
    }

    fn find(&self, request: Request<'_>) -> Option<Range<u64>> {
        let (size, alignment, id) = (request.size, request.alignment, request.id);
        self.large.runs.find(size, alignment, id, false)
    }

    /// Allocates from a large run. Returns the address, and the work that the bytes wait for.
    fn allocate_in(&mut self, run: &Range<u64>, request: Request<'_>) -> (u64, Tag) {
        let at = match request.alignment <= super::ALIGNMENT {
            true => self.large.choose_end(run, request.size),
            false => run.start,
        };
        (at, self.large.allocate(at, request.size))
    }
}
