//! Polls of slots' fences.

use super::Gate;
use crate::error::CallError;
use crate::extents::Poll;
use crate::own::Stream;
use crate::pool::blocks::slots::Slot;

impl Gate {
    /// Extends a slot's fence to the work queued on its block by now, and polls it.
    pub(in crate::pool) fn poll_work(&self, slot: &mut Slot) -> Result<Poll, CallError> {
        slot.fence_work();
        match self.is_capturing() {
            true => Ok(Poll::Pending),
            false => slot.fence.poll(),
        }
    }

    /// Returns `true` if the work that a slot's fence covers comes before any work queued on `home`
    /// from now on, or can be ordered before it now.
    pub(in crate::pool) fn comes_before(
        &mut self,
        slot: &mut Slot,
        home: Option<&Stream>,
    ) -> Result<bool, CallError> {
        if slot.is_before(home) {
            return Ok(true);
        }
        if self.is_capturing() {
            return Ok(false);
        }
        let ordered = home.map_or(Ok(false), |home| slot.fence.order_before(home))?;
        Ok(ordered || self.poll(&mut slot.fence)?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use cuvmm_driver::{Call, CudaVersion, Driver};
    use cuvmm_model::model::{ModelDriver, ModelOptions};

    use super::*;
    use crate::device::Device;
    use crate::extent_sizes::ExtentSizes;
    use crate::extents::rig::{G, Rig, rig};
    use crate::extents::{Fence, Round};
    use crate::pool::accounts::TenantId;
    use crate::pool::blocks::slots::{Class, SlotId};

    fn capturing() -> Gate {
        Gate {
            guards: 1,
            ..Gate::default()
        }
    }

    fn slot(rig: &Rig, stream: &Stream) -> Slot {
        let id = SlotId {
            tenant: TenantId(0),
            index: 0,
        };
        let class = Class {
            size: G,
            sizes: ExtentSizes::up_to(G),
        };
        let mut slot = Slot::new(id, rig.space(1), class, 0, false);
        slot.fence = Fence::stream(stream.clone());
        slot
    }

    #[test]
    fn while_a_guard_lives_nothing_is_asked_and_what_is_known_is_said() {
        let rig = rig();
        let stream = rig.busy_stream();
        let other = Stream::new(&rig.device).unwrap();
        let mut slot = slot(&rig, &stream);
        rig.finish(&stream);
        let round = Round::begin(&rig.device);
        let before = rig.calls();
        assert!(!capturing().poll(&mut slot.fence).unwrap());
        assert!(!capturing().poll_in(&mut slot.fence, &round));
        assert!(!capturing().comes_before(&mut slot, Some(&other)).unwrap());
        assert!(!capturing().comes_before(&mut slot, None).unwrap());
        assert!(capturing().comes_before(&mut slot, Some(&stream)).unwrap());
        assert!(capturing().poll(&mut Fence::complete()).unwrap());
        assert!(capturing().poll_in(&mut Fence::complete(), &round));
        assert_eq!(rig.calls(), before);
        // The work was complete all the time.
        assert!(Gate::default().poll(&mut slot.fence).unwrap());
        assert!(rig.calls() > before);
    }

    #[test]
    fn work_is_pending_until_it_completes_or_an_event_orders_it() {
        let rig = rig();
        let stream = rig.busy_stream();
        let other = Stream::new(&rig.device).unwrap();
        let (mut slot, mut gate) = (slot(&rig, &stream), Gate::default());
        assert!(!gate.poll(&mut slot.fence).unwrap());
        assert!(!gate.poll_in(&mut slot.fence, &Round::begin(&rig.device)));
        assert!(!gate.comes_before(&mut slot, None).unwrap());
        assert!(gate.comes_before(&mut slot, Some(&other)).unwrap());
        assert!(rig.count(Call::StreamWaitEvent) > 0);
        rig.finish(&stream);
        assert!(gate.comes_before(&mut slot, None).unwrap());
        slot.fence = Fence::stream(stream);
        assert!(gate.poll_in(&mut slot.fence, &Round::begin(&rig.device)));
        assert!(!gate.needs_synchronise);
    }

    #[test]
    fn a_driver_that_fails_is_an_error_alone_and_pending_in_a_round() {
        let rig = rig();
        let stream = rig.busy_stream();
        let (mut slot, mut gate) = (slot(&rig, &stream), Gate::default());
        rig.finish(&stream);
        rig.fail_from(Call::EventQuery, 1);
        rig.fail_from(Call::StreamQuery, 1);
        let failed = gate.poll(&mut slot.fence);
        assert!(failed.is_err(), "{failed:?}");
        assert!(!gate.poll_in(&mut slot.fence, &Round::begin(&rig.device)));
        rig.heal();
        assert!(gate.poll(&mut slot.fence).unwrap());
    }

    #[test]
    fn work_that_only_a_synchronization_proves_complete_is_noted() {
        let options = ModelOptions::new().version(CudaVersion::new(12, 4));
        let driver: Arc<dyn Driver> = Arc::new(ModelDriver::new(options));
        let device = Device::open(driver, 0).unwrap();
        let (mut alone, mut in_round) = (Gate::default(), Gate::default());
        let mut fence = Fence::device(device.clone());
        assert!(!alone.poll(&mut fence).unwrap());
        assert!(alone.needs_synchronise);
        assert!(!in_round.poll_in(&mut fence, &Round::begin(&device)));
        assert!(in_round.needs_synchronise);
        // Other complete work does not change that.
        let stream = Stream::new(&device).unwrap();
        assert!(alone.poll(&mut Fence::stream(stream)).unwrap());
        assert!(alone.needs_synchronise);
    }
}
