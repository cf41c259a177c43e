//! Events: marks in streams that can be queried and waited for.

use std::collections::BTreeSet;
use std::time::Duration;

use super::answer::{Answer, INVALID_HANDLE, INVALID_VALUE, require};
use super::backing::Backing;
use super::state::State;
use super::stream_table::{Event, Mark};
use super::work::Work;
use cuvmm_driver::{CUresult, EventFlags, EventHandle, Ordinal, StreamHandle};

impl<B: Backing> State<B> {
    pub(crate) fn event_create(
        &mut self,
        device: Ordinal,
        flags: EventFlags,
    ) -> Answer<EventHandle> {
        self.context(device)?;
        let known = EventFlags::BLOCKING_SYNC.bits() | EventFlags::DISABLE_TIMING.bits();
        require(flags.bits() & !known == 0, INVALID_VALUE)?;
        let handle = self.handles.take();
        let event = Event {
            device: device.0,
            recorded: false,
            covers: Vec::new(),
            capture: None,
            nodes: BTreeSet::new(),
            ready: Duration::ZERO,
        };
        self.events.insert(handle, event);
        Ok(EventHandle(handle))
    }

    /// Destroys an event, also in a lost context, where it returns the context's code.
    pub(crate) fn event_destroy(&mut self, device: Ordinal, event: EventHandle) -> Answer {
        self.device(device)?;
        self.event(device, event)?;
        self.events.remove(&event.0);
        self.handles.give_back(event.0);
        self.context(device).map(drop)
    }

    fn event(&mut self, device: Ordinal, event: EventHandle) -> Answer<&mut Event> {
        let event = self.events.get_mut(&event.0).ok_or(INVALID_HANDLE)?;
        require(event.device == device.0, INVALID_HANDLE)?;
        Ok(event)
    }

    pub(crate) fn event_record(
        &mut self,
        device: Ordinal,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Answer {
        self.context(device)?;
        self.event(device, event)?;
        let key = self.stream(device, stream)?;
        let capture = self.streams.get(key).and_then(|stream| stream.capture);
        let mark = self.submit(device, stream, Work::Marker)?;
        let ready = self.streams.ready(key);
        let within = capture.and_then(|id| self.captures.get(&id));
        let nodes = within.and_then(|capture| capture.last.get(&key)).cloned();
        let event = self.event(device, event)?;
        event.ready = ready;
        event.recorded = true;
        event.covers = mark.into_iter().collect();
        event.capture = capture;
        event.nodes = nodes.unwrap_or_default();
        Ok(())
    }

    pub(crate) fn context_record_event(&mut self, device: Ordinal, event: EventHandle) -> Answer {
        self.context(device)?;
        self.event(device, event)?;
        self.refuse_while_capturing(device.0)?;
        let covers = self.streams.unfinished(device.0, false);
        let ready = self.streams.all_ready(device.0);
        let event = self.event(device, event)?;
        event.ready = ready;
        event.recorded = true;
        event.covers = covers;
        event.capture = None;
        Ok(())
    }

    /// Returns the marks that a wait for an event waits for. An event recorded in a running capture
    /// invalidates that capture only; an event of a capture that is over invalidates none.
    pub(crate) fn event_marks(&mut self, device: Ordinal, event: EventHandle) -> Answer<Vec<Mark>> {
        self.context(device)?;
        let found = self.event(device, event)?;
        let (covers, capture) = (found.covers.clone(), found.capture);
        if let Some(id) = capture {
            require(self.is_recording(id), INVALID_VALUE)?;
            self.break_captures(|other, _| other == id);
            return Err(CUresult::CUDA_ERROR_CAPTURED_EVENT);
        }
        self.refuse_in_capture(None)?;
        Ok(covers)
    }

    pub(crate) fn wait_for_event(&mut self, event: EventHandle) -> Answer {
        if let Some(event) = self.events.get(&event.0) {
            self.clock.reach(event.ready);
        }
        Ok(())
    }

    pub(crate) fn event_query(&mut self, device: Ordinal, event: EventHandle) -> Answer<bool> {
        let marks = self.event_marks(device, event)?;
        Ok(self.ask_again(event.0, |state| state.streams.are_done(&marks)))
    }
}
