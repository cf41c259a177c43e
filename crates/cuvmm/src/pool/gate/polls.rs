//! Polls of fences of memory that is to be reused or withdrawn.

use super::Gate;
use crate::error::CallError;
use crate::extents::{Fence, Poll};
use crate::own::Stream;

impl Gate {
    /// Polls a fence; the answer can be that only a synchronization shows whether it is complete.
    pub(in crate::pool) fn ask(&self, fence: &mut Fence) -> Result<Poll, CallError> {
        match self.is_capturing() {
            true => Ok(Poll::Pending),
            false => fence.poll(),
        }
    }

    /// Returns `true` if the work that a fence covers comes before any work queued on `home`
    /// from now on, or can be ordered before it now.
    pub(in crate::pool) fn comes_before(
        &mut self,
        fence: &mut Fence,
        home: Option<&Stream>,
    ) -> Result<bool, CallError> {
        if fence.is_complete() || home.is_some_and(|home| fence.precedes(home)) {
            return Ok(true);
        }
        if self.is_capturing() {
            return Ok(false);
        }
        let ordered = home.map_or(Ok(false), |home| fence.order_before(home))?;
        Ok(ordered || self.poll(fence)?)
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
    use crate::extents::Round;
    use crate::extents::rig::rig;

    fn capturing() -> Gate {
        Gate {
            guards: 1,
            ..Gate::default()
        }
    }

    #[test]
    fn while_a_guard_lives_nothing_is_asked_and_what_is_known_is_said() {
        let rig = rig();
        let stream = rig.busy_stream();
        let other = Stream::new(&rig.device).unwrap();
        let mut fence = Fence::stream(stream.clone());
        rig.finish(&stream);
        let round = Round::begin(&rig.device);
        let before = rig.calls();
        assert!(!capturing().poll(&mut fence).unwrap());
        assert!(!capturing().poll_in(&mut fence, &round));
        assert!(!capturing().comes_before(&mut fence, Some(&other)).unwrap());
        assert!(!capturing().comes_before(&mut fence, None).unwrap());
        assert!(capturing().comes_before(&mut fence, Some(&stream)).unwrap());
        assert!(capturing().poll(&mut Fence::complete()).unwrap());
        assert!(capturing().poll_in(&mut Fence::complete(), &round));
        assert_eq!(rig.calls(), before);
        // The work was complete all the time.
        assert!(Gate::default().poll(&mut fence).unwrap());
        assert!(rig.calls() > before);
    }

    #[test]
    fn work_is_pending_until_it_completes_or_an_event_orders_it() {
        let rig = rig();
        let stream = rig.busy_stream();
        let other = Stream::new(&rig.device).unwrap();
        let (mut fence, mut gate) = (Fence::stream(stream.clone()), Gate::default());
        assert!(!gate.poll(&mut fence).unwrap());
        assert!(!gate.poll_in(&mut fence, &Round::begin(&rig.device)));
        assert!(!gate.comes_before(&mut fence, None).unwrap());
        assert!(gate.comes_before(&mut fence, Some(&other)).unwrap());
        assert!(rig.count(Call::StreamWaitEvent) > 0);
        rig.finish(&stream);
        assert!(gate.comes_before(&mut fence, None).unwrap());
        fence = Fence::stream(stream);
        assert!(gate.poll_in(&mut fence, &Round::begin(&rig.device)));
        assert!(!gate.needs_synchronise);
    }

    #[test]
    fn a_driver_that_fails_is_an_error_alone_and_pending_in_a_round() {
        let rig = rig();
        let stream = rig.busy_stream();
        let (mut fence, mut gate) = (Fence::stream(stream.clone()), Gate::default());
        rig.finish(&stream);
        rig.fail_from(Call::EventQuery, 1);
        rig.fail_from(Call::StreamQuery, 1);
        let failed = gate.poll(&mut fence);
        assert!(failed.is_err(), "{failed:?}");
        assert!(!gate.poll_in(&mut fence, &Round::begin(&rig.device)));
        rig.heal();
        assert!(gate.poll(&mut fence).unwrap());
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
