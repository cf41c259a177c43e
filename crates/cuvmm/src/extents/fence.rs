//! Uses, fences and proof: they decide when memory may be unmapped or reused.
//!
//! [`Uses`] names the streams whose work may use memory that is *in use*. It cannot be polled,
//! since more work may be queued at any time. When the use ends, [`Uses::end`] makes a [`Fence`] of
//! it: points in those streams, each a stamp on the clock of its device. A fence is complete or
//! incomplete. It costs no driver call before it is polled. The events recorded then are shared by
//! all fences of the stream ([`Events`](crate::device::Events)) and also cover work that was queued
//! after the stamp: more, never less.
//!
//! A complete fence gives proof ([`Unused`]), and nothing is unmapped without proof.
//!
//! "All work of a device" is the work of the one context that the driver uses for it, the primary
//! context. Work that a program queues in other contexts of the device is not covered, although it
//! can use the same addresses.
//!
//! Keeps I-21 and I-85.

use std::sync::Arc;

use crate::device::{Device, Stamp, Work, WorkState};
use crate::error::CallError;
use crate::own::Stream;

/// The most streams that a use names one by one. Beyond it, all work of their devices is waited
/// for.
const MOST_STREAMS: usize = 64;

/// The streams whose work may use some memory: usually none, so an empty value takes one word.
#[derive(Clone, Debug, Default)]
pub(crate) struct Uses(Option<Box<Named>>);

#[derive(Clone, Debug, Default)]
struct Named {
    streams: Vec<Stream>,
    /// Devices on which work of any stream may use the memory.
    devices: Vec<Device>,
}

impl Uses {
    pub(crate) const fn none() -> Self {
        Self(None)
    }

    /// Notes that work of a stream uses the memory.
    ///
    /// Beyond 64 streams, streams without another owner, on which no more work can be queued, are
    /// replaced by the returned fence. If 64 streams have other owners, all work of the device
    /// counts as using the memory.
    #[must_use]
    pub(crate) fn add(&mut self, stream: &Stream) -> Fence {
        self.0.get_or_insert_default().add(stream)
    }

    pub(crate) fn add_device(&mut self, device: &Device) {
        self.0.get_or_insert_default().add_device(device);
    }

    #[must_use]
    pub(crate) fn add_all(&mut self, other: &Self) -> Fence {
        let mut ended = Fence::complete();
        if let Some(named) = &other.0 {
            for device in &named.devices {
                self.add_device(device);
            }
            for stream in &named.streams {
                ended.merge(self.add(stream));
            }
        }
        ended
    }

    pub(crate) fn known(&self) -> &[Stream] {
        self.0.as_ref().map_or(&[], |named| &named.streams)
    }

    /// The streams, unless work on other streams may use the memory too.
    pub(crate) fn streams(&self) -> Option<&[Stream]> {
        match &self.0 {
            Some(named) => named.devices.is_empty().then_some(&named.streams),
            None => Some(&[]),
        }
    }

    pub(crate) fn end(&self) -> Fence {
        let Some(named) = &self.0 else {
            return Fence::complete();
        };
        let streams = named.streams.iter().cloned().map(Line::Stream);
        let devices = named.devices.iter().cloned().map(Line::Device);
        Fence::at(streams.chain(devices))
    }
}

impl Named {
    fn add(&mut self, stream: &Stream) -> Fence {
        if self.devices.contains(stream.device()) || self.streams.contains(stream) {
            return Fence::complete();
        }
        let mut ended = Vec::new();
        if self.streams.len() >= MOST_STREAMS {
            let streams = std::mem::take(&mut self.streams);
            let (left, gone) = streams.into_iter().partition(|used| !used.is_abandoned());
            (self.streams, ended) = (left, gone);
        }
        if self.streams.len() >= MOST_STREAMS {
            self.add_device(stream.device());
        } else {
            self.streams.push(stream.clone());
        }
        Fence::streams(ended)
    }

    fn add_device(&mut self, device: &Device) {
        if !self.devices.contains(device) {
            self.devices.push(device.clone());
            self.streams.retain(|stream| stream.device() != device);
        }
    }
}

/// Points in streams that must be complete before memory may be unmapped or reused.
#[derive(Clone, Debug)]
pub(crate) struct Fence {
    points: Points,
}

/// Usually one point, or none for a complete fence.
#[derive(Clone, Debug)]
enum Points {
    None,
    One(Point),
    Many(Arc<[Point]>),
}

#[derive(Clone, Debug)]
struct Point {
    line: Line,
    stamp: Stamp,
}

#[derive(Clone, Debug)]
enum Line {
    Stream(Stream),
    Device(Device),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Poll {
    Complete,
    Pending,
    /// The driver cannot record an event behind all work of a device (before CUDA 12.5). Only a
    /// synchronization of the device, begun after the memory was withdrawn, proves completion.
    NeedsSynchronise,
}

/// A pass over many fences in which a stream that is found pending is not polled again.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    device: Device,
    begun: Stamp,
}

impl Round {
    pub(crate) fn begin(device: &Device) -> Self {
        Self {
            begun: device.tick(),
            device: device.clone(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Unused(());

impl Unused {
    /// Proof for memory that the running operation placed at addresses where no work was queued
    /// since.
    pub(crate) const fn never_used() -> Self {
        Self(())
    }

    /// Proof for all memory that only these devices have access to: their work is complete, or
    /// their contexts are lost and run nothing more. Waits (`cuCtxSynchronize`).
    pub(crate) fn after_drain<'a>(
        devices: impl IntoIterator<Item = &'a Device>,
    ) -> Result<Self, CallError> {
        devices.into_iter().try_for_each(Device::drain)?;
        Ok(Self(()))
    }
}

impl Fence {
    pub(crate) const fn complete() -> Self {
        Self {
            points: Points::None,
        }
    }

    pub(crate) fn stream(stream: Stream) -> Self {
        let point = Point::now(Line::Stream(stream));
        Self {
            points: Points::One(point),
        }
    }

    /// A fence over all work queued on these streams now.
    pub(crate) fn streams(streams: Vec<Stream>) -> Self {
        Self::at(streams.into_iter().map(Line::Stream))
    }

    /// A fence over the work queued on streams before stamps of their devices' clocks.
    pub(crate) fn before(points: impl Iterator<Item = (Stream, Stamp)>) -> Self {
        let point = |(stream, stamp)| Point {
            line: Line::Stream(stream),
            stamp,
        };
        Self::of(points.map(point).collect())
    }

    pub(crate) fn device(device: Device) -> Self {
        Self::devices(vec![device])
    }

    /// A fence over all work queued on several devices now.
    pub(crate) fn devices(devices: Vec<Device>) -> Self {
        Self::at(devices.into_iter().map(Line::Device))
    }

    fn at(lines: impl Iterator<Item = Line>) -> Self {
        Self::of(lines.map(Point::now).collect())
    }

    fn of(mut points: Vec<Point>) -> Self {
        let points = match points.len() {
            0 | 1 => points.pop().map_or(Points::None, Points::One),
            _ => Points::Many(points.into()),
        };
        Self { points }
    }

    pub(crate) fn streams_of(&self) -> impl Iterator<Item = &Stream> {
        self.points().iter().filter_map(|point| match &point.line {
            Line::Stream(stream) => Some(stream),
            Line::Device(_) => None,
        })
    }

    fn points(&self) -> &[Point] {
        match &self.points {
            Points::None => &[],
            Points::One(point) => std::slice::from_ref(point),
            Points::Many(points) => points,
        }
    }

    pub(crate) fn merge(&mut self, other: Self) {
        match (&mut self.points, &other.points) {
            (_, Points::None) => {}
            (Points::None, _) => *self = other,
            (Points::One(ours), Points::One(theirs)) if ours.line.is(&theirs.line) => {
                ours.stamp = ours.stamp.max(theirs.stamp);
            }
            (Points::Many(ours), Points::Many(theirs)) if Arc::ptr_eq(ours, theirs) => {}
            _ => {
                let mut points = self.points().to_vec();
                for point in other.points() {
                    match points.iter_mut().find(|known| known.line.is(&point.line)) {
                        Some(known) => known.stamp = known.stamp.max(point.stamp),
                        None => points.push(point.clone()),
                    }
                }
                *self = Self::of(points);
            }
        }
    }

    /// Returns `true` if the fence is known to be complete. Does not poll.
    pub(crate) const fn is_complete(&self) -> bool {
        matches!(self.points, Points::None)
    }

    pub(crate) const fn proof(&self) -> Option<Unused> {
        match self.points {
            Points::None => Some(Unused(())),
            _ => None,
        }
    }

    /// Returns `true` if work queued on `stream` from now on runs after the covered work without an
    /// event.
    pub(crate) fn precedes(&self, stream: &Stream) -> bool {
        let on_it = |point: &Point| matches!(&point.line, Line::Stream(named) if named == stream);
        self.points().iter().all(on_it)
    }

    /// Polls the fence. Records the events that are needed; never waits.
    ///
    /// # Errors
    /// The first error of the driver, if no point is known to be pending. Points after it were
    /// polled too. The fence stays incomplete.
    pub(crate) fn poll(&mut self) -> Result<Poll, CallError> {
        self.poll_with(|_| Stamp::MAX)
    }

    /// Polls the fence, reusing the answers for streams that were polled in this round.
    pub(crate) fn poll_in(&mut self, round: &Round) -> Result<Poll, CallError> {
        self.poll_with(|device| match device.shares_clock(&round.device) {
            true => round.begun,
            false => Stamp::MAX,
        })
    }

    fn poll_with(&mut self, since: impl Fn(&Device) -> Stamp) -> Result<Poll, CallError> {
        let mut answer = Ok(Poll::Complete);
        for point in self.points() {
            match point.poll(since(point.line.device())) {
                Ok(WorkState::Complete) => {}
                Ok(WorkState::Pending) => return Ok(Poll::Pending),
                Ok(WorkState::NeedsSynchronise) => answer = Ok(Poll::NeedsSynchronise),
                Err(error) => answer = answer.and(Err(error)),
            }
        }
        if let Ok(Poll::Complete) = answer {
            *self = Self::complete();
        }
        answer
    }

    /// Polls every point, and drops the streams of complete points.
    pub(crate) fn prune(&mut self) {
        let pending = |point: &&Point| !matches!(point.poll(Stamp::MAX), Ok(WorkState::Complete));
        let left = self.points().iter().filter(pending).cloned().collect();
        *self = Self::of(left);
    }

    /// Limits the number of points. With more than [`MOST_STREAMS`], drops the streams whose points
    /// are complete. If still more are left, the fence covers all work queued on their devices by
    /// now instead.
    pub(crate) fn limit(&mut self) {
        if self.points().len() <= MOST_STREAMS {
            return;
        }
        // A poll of all work of a device would break a capture.
        let left = |point: &&Point| match point.line {
            Line::Stream(_) => !matches!(point.poll(Stamp::MAX), Ok(WorkState::Complete)),
            Line::Device(_) => true,
        };
        let left: Vec<Point> = self.points().iter().filter(left).cloned().collect();
        if left.len() <= MOST_STREAMS {
            *self = Self::of(left);
            return;
        }
        let mut devices: Vec<Device> = Vec::new();
        for point in &left {
            let device = point.line.device();
            if !devices.contains(device) {
                devices.push(device.clone());
            }
        }
        *self = Self::devices(devices);
    }

    /// Waits until the fence is complete: for its streams one by one (`cuStreamSynchronize`), and
    /// for its devices, or the device of a stream for which the driver refuses
    /// (`cuCtxSynchronize`). A stream that captures is not waited for, nor is anything in its
    /// stead.
    ///
    /// # Errors
    /// The first error of the driver, or [`CallError::Capturing`]; the fence stays incomplete.
    pub(crate) fn wait(&mut self) -> Result<Unused, CallError> {
        self.points().iter().try_for_each(Point::wait)?;
        *self = Self::complete();
        Ok(Unused(()))
    }

    /// Orders later work of `stream` behind the covered work, by events and without waiting. The
    /// fence then consists of that stream alone. Returns `false`, with nothing changed, if the
    /// driver cannot.
    pub(crate) fn order_before(&mut self, stream: &Stream) -> Result<bool, CallError> {
        if self.precedes(stream) {
            return Ok(true);
        }
        let ordered = stream.device().relaxed(|| self.make_wait(stream))??;
        if ordered {
            *self = Self::stream(stream.clone());
        }
        Ok(ordered)
    }

    fn make_wait(&self, stream: &Stream) -> Result<bool, CallError> {
        // A capturing stream accepts no event from outside its graph.
        if stream.is_capturing()? {
            return Ok(false);
        }
        for point in self.points() {
            if !point.make_wait(stream)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Point {
    fn now(line: Line) -> Self {
        let stamp = line.device().tick();
        Self { line, stamp }
    }

    /// Returns `true` if the point is known to be complete. On a lost context nothing runs.
    fn is_complete(&self) -> bool {
        let device = self.line.device();
        let on_stream = match &self.line {
            Line::Stream(stream) => stream.events().is_complete(self.stamp),
            Line::Device(_) => false,
        };
        on_stream || device.events().is_complete(self.stamp) || device.lost().is_some()
    }

    fn poll(&self, since: Stamp) -> Result<WorkState, CallError> {
        if self.is_complete() {
            return Ok(WorkState::Complete);
        }
        let device = self.line.device();
        let polled = match &self.line {
            Line::Stream(stream) => {
                let work = Work::Stream(stream.as_raw());
                stream.events().poll(device, work, self.stamp, since)
            }
            Line::Device(device) => {
                let work = Work::Context;
                device.events().poll(device, work, self.stamp, since)
            }
        };
        // The poll itself may have found that the context is lost.
        polled.or_else(|error| match device.lost() {
            Some(_) => Ok(WorkState::Complete),
            None => Err(error),
        })
    }

    fn wait(&self) -> Result<(), CallError> {
        if self.is_complete() {
            return Ok(());
        }
        let Line::Stream(stream) = &self.line else {
            return self.line.device().drain();
        };
        let device = stream.device();
        // All work of the device includes that of the stream. The stream's handle may be dead
        // because another library has reset the context.
        stream
            .settle()
            .or_else(|error| match error.is_of_capture() {
                // Waiting for the context would break every capture on it.
                true => Err(error),
                false => device.drain().map_err(|_| error),
            })
    }

    fn make_wait(&self, waiting: &Stream) -> Result<bool, CallError> {
        let waiter = (waiting.device(), waiting.handle()?);
        match &self.line {
            Line::Stream(stream) if stream == waiting => Ok(true),
            _ if self.is_complete() => Ok(true),
            Line::Stream(stream) => {
                let work = Work::Stream(stream.as_raw());
                let device = stream.device();
                stream.events().make_wait(device, work, self.stamp, waiter)
            }
            Line::Device(device) => {
                let work = Work::Context;
                device.events().make_wait(device, work, self.stamp, waiter)
            }
        }
    }
}

impl Line {
    fn device(&self) -> &Device {
        match self {
            Self::Stream(stream) => stream.device(),
            Self::Device(device) => device,
        }
    }

    /// Returns `true` if stamps of both can be compared and mean the same work.
    fn is(&self, other: &Self) -> bool {
        let same = match (self, other) {
            (Self::Stream(one), Self::Stream(other)) => one == other,
            (Self::Device(one), Self::Device(other)) => one == other,
            _ => false,
        };
        same && self.device().shares_clock(other.device())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use cuvmm_driver::{Call, CudaVersion, Driver};
    use cuvmm_model::model::{ModelDriver, ModelOptions};

    use super::*;
    use crate::extents::rig::{Rig, rig};

    fn is_complete(fence: &mut Fence) -> bool {
        fence.poll().unwrap() == Poll::Complete
    }

    fn stream(rig: &Rig) -> Stream {
        Stream::new(&rig.device).unwrap()
    }

    #[test]
    fn a_use_by_nobody_ends_at_once() {
        assert!(Uses::none().end().is_complete());
        assert!(Uses::none().streams().unwrap().is_empty());
        assert!(Fence::complete().proof().is_some());
    }

    #[test]
    fn the_end_of_a_use_covers_what_was_queued_until_then() {
        let rig = rig();
        let (one, other) = (rig.busy_stream(), rig.busy_stream());
        let mut uses = Uses::none();
        for stream in [&one, &other, &one] {
            assert!(uses.add(stream).is_complete());
        }
        assert_eq!(uses.streams().unwrap(), [one.clone(), other.clone()]);
        let mut fence = uses.end();
        assert!(!fence.is_complete() && fence.proof().is_none());
        rig.finish(&one);
        assert!(!is_complete(&mut fence));
        rig.finish(&other);
        // Work queued later does not matter.
        assert!(is_complete(&mut fence) && fence.is_complete());
        rig.queue(&one);
        assert!(fence.proof().is_some());
        assert!(!is_complete(&mut uses.end()));
    }

    #[test]
    fn a_device_stands_for_all_its_streams() {
        let rig = rig();
        let (used, other) = (rig.busy_stream(), rig.busy_stream());
        let mut uses = Uses::none();
        let _ = uses.add(&used);
        uses.add_device(&rig.device);
        assert!(uses.streams().is_none());
        let _ = uses.add(&used);
        let mut fence = uses.end();
        rig.finish(&used);
        assert!(!is_complete(&mut fence));
        rig.finish(&other);
        assert!(is_complete(&mut fence));
    }

    #[test]
    fn streams_that_nobody_has_any_more_make_room() {
        let rig = rig();
        let mut uses = Uses::none();
        let kept: Vec<Stream> = (0..MOST_STREAMS / 2).map(|_| stream(&rig)).collect();
        for stream in &kept {
            assert!(uses.add(stream).is_complete());
        }
        let late = rig.busy_stream();
        assert!(uses.add(&late).is_complete());
        let raw = late.as_raw();
        drop(late);
        while uses.streams().unwrap().len() < MOST_STREAMS {
            assert!(uses.add(&stream(&rig)).is_complete());
        }
        let last = stream(&rig);
        let mut ended = uses.add(&last);
        assert_eq!(uses.streams().unwrap().len(), kept.len() + 1);
        assert!(!is_complete(&mut ended), "its work is waited for");
        rig.machine.release_stream(cuvmm_driver::Ordinal(0), raw);
        assert!(is_complete(&mut ended));
    }

    // I-85
    #[test]
    fn with_too_many_streams_all_work_of_the_device_counts() {
        let rig = rig();
        let mut uses = Uses::none();
        let kept: Vec<Stream> = (0..=MOST_STREAMS).map(|_| stream(&rig)).collect();
        for stream in &kept {
            assert!(uses.streams().is_some());
            assert!(uses.add(stream).is_complete());
        }
        assert!(uses.streams().is_none());
        let foreign = rig.busy_stream();
        let mut fence = uses.end();
        assert!(!is_complete(&mut fence));
        rig.finish(&foreign);
        assert!(is_complete(&mut fence));
    }

    #[test]
    fn merging_keeps_the_later_point_of_each_stream() {
        let rig = rig();
        let (one, other) = (rig.busy_stream(), rig.busy_stream());
        let early = Fence::stream(one.clone());
        rig.finish(&one);
        rig.queue(&one);
        let late = Fence::stream(one.clone());
        for (first, second) in [(&early, &late), (&late, &early)] {
            let mut merged = first.clone();
            merged.merge(second.clone());
            assert_eq!(merged.points().len(), 1);
            assert_eq!(merged.points()[0].stamp, late.points()[0].stamp);
            assert!(merged.precedes(&one) && !merged.precedes(&other));
        }
        let mut both = early.clone();
        both.merge(Fence::complete());
        assert_eq!(both.points().len(), 1);
        both.merge(Fence::streams(vec![other.clone(), one.clone()]));
        assert_eq!(both.points().len(), 2);
        assert!(!both.precedes(&one));
        rig.finish(&other);
        assert!(!is_complete(&mut both));
        rig.finish(&one);
        assert!(is_complete(&mut both));
        let mut of_none = Fence::complete();
        of_none.merge(late);
        assert!(!of_none.is_complete());
    }

    #[test]
    fn a_round_asks_a_pending_stream_once() {
        let rig = rig();
        let stream = rig.busy_stream();
        let mut fences: Vec<Fence> = (0..4).map(|_| Fence::stream(stream.clone())).collect();
        let round = Round::begin(&rig.device);
        let asked = |rig: &Rig| rig.calls();
        let before = asked(&rig);
        assert_eq!(fences[0].poll_in(&round).unwrap(), Poll::Pending);
        let once = asked(&rig) - before;
        assert!(once > 0);
        for fence in &mut fences {
            assert_eq!(fence.poll_in(&round).unwrap(), Poll::Pending);
        }
        assert_eq!(asked(&rig) - before, once);
        rig.finish(&stream);
        let round = Round::begin(&rig.device);
        for fence in &mut fences {
            assert_eq!(fence.poll_in(&round).unwrap(), Poll::Complete);
        }
    }

    #[test]
    fn pruning_lets_go_of_what_has_passed() {
        let rig = rig();
        let (one, other) = (rig.busy_stream(), rig.busy_stream());
        let mut fence = Fence::streams(vec![one.clone(), other.clone()]);
        fence.prune();
        assert_eq!(fence.points().len(), 2);
        rig.finish(&one);
        fence.prune();
        assert_eq!(fence.points().len(), 1);
        assert!(fence.precedes(&other));
    }

    #[test]
    fn a_fence_of_too_many_streams_lets_complete_ones_go_or_covers_their_devices() {
        let rig = rig();
        let busy: Vec<Stream> = (0..MOST_STREAMS).map(|_| rig.busy_stream()).collect();
        let idle = stream(&rig);
        let mut fence = Fence::streams(busy.clone());
        fence.limit();
        assert_eq!(fence.points().len(), MOST_STREAMS);
        fence.merge(Fence::stream(idle));
        fence.limit();
        assert_eq!(fence.points().len(), MOST_STREAMS, "the idle one has gone");
        let last = rig.busy_stream();
        fence.merge(Fence::stream(last.clone()));
        fence.limit();
        assert!(matches!(
            fence.points(),
            [Point {
                line: Line::Device(_),
                ..
            }]
        ));
        busy.iter().for_each(|stream| rig.finish(stream));
        assert!(!is_complete(&mut fence));
        rig.finish(&last);
        assert!(is_complete(&mut fence));
    }

    #[test]
    fn waiting_is_proof() {
        let rig = rig();
        let stream = rig.busy_stream();
        let ordinal = cuvmm_driver::Ordinal(0);
        rig.machine.hold_until_awaited(ordinal, stream.as_raw());
        let mut fence = Fence::stream(stream.clone());
        fence.wait().unwrap();
        assert!(fence.is_complete());
        let mut fence = Fence::device(rig.device.clone());
        fence.wait().unwrap();
        assert!(fence.is_complete());
    }

    #[test]
    fn a_refused_wait_proves_nothing() {
        let rig = rig();
        let stream = rig.busy_stream();
        let mut fence = Fence::stream(stream.clone());
        rig.fail_from(Call::StreamSynchronize, 1);
        rig.fail_from(Call::CtxSynchronize, 1);
        assert!(fence.wait().is_err());
        assert!(!fence.is_complete());
        let mut fence = Fence::device(rig.device.clone());
        assert!(fence.wait().is_err());
        assert!(!fence.is_complete());
        rig.heal();
        rig.finish(&stream);
    }

    #[test]
    fn a_stream_that_was_ordered_behind_stands_for_what_it_waits_for() {
        let rig = rig();
        let (busy, home) = (rig.busy_stream(), stream(&rig));
        let mut fence = Fence::stream(busy.clone());
        assert!(!fence.precedes(&home));
        assert!(fence.order_before(&home).unwrap());
        assert!(fence.precedes(&home) && !fence.is_complete());
        assert!(!is_complete(&mut fence), "its stream waits");
        rig.finish(&busy);
        assert!(is_complete(&mut fence));
        let mut refused = Fence::stream(rig.busy_stream());
        rig.fail_from(Call::StreamWaitEvent, 1);
        assert!(refused.order_before(&home).is_err());
        assert!(!refused.precedes(&home));
    }

    #[test]
    fn a_stream_waits_for_a_stream_of_another_device() {
        let machine = Arc::new(ModelDriver::new(ModelOptions::new().devices(2)));
        let driver: Arc<dyn Driver> = machine.clone();
        let [one, other] = [0, 1].map(|number| Device::open(driver.clone(), number).unwrap());
        let [home, busy] = [&one, &other].map(|device| Stream::new(device).unwrap());
        let queue = |stream: &Stream| {
            let (device, stream) = (stream.device().ordinal(), stream.as_raw());
            machine.queue_kernel(device, stream, vec![], vec![])
        };
        machine.hold(other.ordinal(), busy.as_raw());
        queue(&busy).unwrap();
        let mut fence = Fence::streams(vec![busy.clone()]);
        fence.merge(Fence::device(other.clone()));
        assert!(fence.order_before(&home).unwrap() && fence.precedes(&home));
        queue(&home).unwrap();
        assert!(!is_complete(&mut fence), "the other device is at work");
        machine.release_stream(other.ordinal(), busy.as_raw());
        assert!(is_complete(&mut fence));
    }

    #[test]
    fn all_work_of_a_device_says_nothing_of_another_device() {
        let machine = Arc::new(ModelDriver::new(ModelOptions::new().devices(2)));
        let driver: Arc<dyn Driver> = machine;
        let [one, other] = [0, 1].map(|number| Device::open(driver.clone(), number).unwrap());
        let [first, second] = [&one, &other].map(|device| Stream::new(device).unwrap());
        let mut uses = Uses::none();
        for stream in [&first, &second] {
            assert!(uses.add(stream).is_complete());
        }
        uses.add_device(&one);
        let named = uses.0.unwrap();
        assert_eq!((named.streams, named.devices), (vec![second], vec![one]));
    }

    #[test]
    fn fences_of_different_streams_are_both_waited_for() {
        let rig = rig();
        let streams = [(); 4].map(|()| rig.busy_stream());
        let [one, other, third, fourth] = streams.clone();
        let mut two = Fence::stream(one.clone());
        two.merge(Fence::stream(other.clone()));
        assert_eq!(two.points().len(), 2);
        let mut all = two.clone();
        all.merge(two.clone());
        assert_eq!(all.points().len(), 2, "it is the same fence");
        all.merge(Fence::streams(vec![third, fourth]));
        assert_eq!(all.points().len(), 4);
        rig.finish(&one);
        assert!(!is_complete(&mut two));
        rig.finish(&other);
        assert!(is_complete(&mut two));
        for stream in &streams[2..] {
            assert!(!is_complete(&mut all));
            rig.finish(stream);
        }
        assert!(is_complete(&mut all));
    }

    #[test]
    fn fences_of_one_device_are_one_point_the_later_one() {
        let rig = rig();
        let early = Fence::device(rig.device.clone());
        let late = Fence::device(rig.device.clone());
        let stamp = late.points()[0].stamp;
        for (first, second) in [(&early, &late), (&late, &early)] {
            let mut merged = first.clone();
            merged.merge(second.clone());
            let [point] = merged.points() else {
                panic!("{merged:?}");
            };
            assert_eq!(point.stamp, stamp);
        }
    }

    #[test]
    fn what_is_known_to_be_complete_is_not_asked_again() {
        let rig = rig();
        let (one, home) = (rig.busy_stream(), stream(&rig));
        let mut first = Fence::stream(one.clone());
        rig.finish(&one);
        let (second, mut third) = (first.clone(), first.clone());
        assert!(is_complete(&mut first));
        let before = rig.calls();
        second.clone().wait().unwrap();
        assert!(is_complete(&mut third));
        assert_eq!(rig.calls(), before, "the stream was polled");
        // Waiting for all work of the device proves that all of its streams are complete.
        let other = rig.busy_stream();
        let mut behind = Fence::stream(other.clone());
        rig.finish(&other);
        Fence::device(rig.device.clone()).wait().unwrap();
        let before = rig.calls();
        behind.clone().wait().unwrap();
        assert!(is_complete(&mut behind.clone()));
        assert_eq!(rig.calls(), before, "the device was waited for");
        assert!(behind.order_before(&home).unwrap());
        let how = "in relaxed mode and back, only whether the stream captures";
        assert_eq!(rig.calls() - before, 3, "{how}");
    }

    #[test]
    fn a_stream_does_not_wait_for_itself() {
        let rig = rig();
        let calls = |with_home: bool| {
            let (busy, home) = (rig.busy_stream(), rig.busy_stream());
            let mut streams = vec![busy.clone()];
            streams.extend(with_home.then(|| home.clone()));
            let mut fence = Fence::streams(streams);
            let before = rig.calls();
            assert!(fence.order_before(&home).unwrap());
            let calls = rig.calls() - before;
            rig.finish(&busy);
            rig.finish(&home);
            calls
        };
        assert_eq!(calls(true), calls(false));
    }

    #[test]
    fn uses_are_added_to_others_with_all_that_they_name() {
        let rig = rig();
        let mut uses = Uses::none();
        let kept: Vec<Stream> = (1..MOST_STREAMS).map(|_| stream(&rig)).collect();
        for stream in &kept {
            assert!(uses.add(stream).is_complete());
        }
        let last = rig.busy_stream();
        assert!(uses.add(&last).is_complete());
        let raw = last.as_raw();
        drop(last);
        let (mut more, another) = (Uses::none(), stream(&rig));
        assert!(more.add(&another).is_complete());
        let mut ended = uses.add_all(&more);
        assert_eq!(uses.streams().unwrap().last(), Some(&another));
        assert!(!is_complete(&mut ended), "work of the dropped stream");
        rig.machine.release_stream(cuvmm_driver::Ordinal(0), raw);
        assert!(is_complete(&mut ended));
        let mut anywhere = Uses::none();
        for _ in 0..2 {
            anywhere.add_device(&rig.device);
        }
        assert!(uses.add_all(&anywhere).is_complete());
        assert!(uses.streams().is_none());
        for uses in [anywhere, uses] {
            assert_eq!(uses.end().points().len(), 1);
        }
    }

    #[test]
    fn a_stream_that_comes_after_it_anyway_is_told_nothing() {
        let rig = rig();
        let home = rig.busy_stream();
        let mut fence = Fence::stream(home.clone());
        let before = rig.calls();
        assert!(fence.order_before(&home).unwrap());
        assert_eq!(rig.calls(), before);
        rig.finish(&home);
    }

    #[test]
    fn a_device_whose_work_cannot_be_marked_is_not_ordered_before_a_stream() {
        let options = ModelOptions::new().version(CudaVersion::new(12, 4));
        let driver: Arc<dyn Driver> = Arc::new(ModelDriver::new(options));
        let device = Device::open(driver, 0).unwrap();
        let home = Stream::new(&device).unwrap();
        let mut fence = Fence::device(device);
        assert!(!fence.order_before(&home).unwrap());
        assert!(!fence.precedes(&home));
        assert_eq!(fence.poll().unwrap(), Poll::NeedsSynchronise);
        fence.wait().unwrap();
        assert!(fence.order_before(&home).unwrap());
    }
}
