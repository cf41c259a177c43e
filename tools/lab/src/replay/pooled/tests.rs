use std::sync::Arc;
use std::time::Duration;

use cuvmm::driver::Call;
use cuvmm::driver::fault::FaultDriver;
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::driver::model::{Costs, Curve, ModelOptions};

use super::*;
use crate::replay::policy::Policy;
use crate::replay::stamps::Verified;

const LIMIT: u64 = 64 << 20;

fn memory(policy: Policy) -> Pooled {
    let driver = HostDriver::new(HostOptions::new().capacity(2 * LIMIT));
    let device = Device::open(Arc::new(driver), 0).unwrap();
    let division = Division {
        policy,
        models: 2,
        limit: LIMIT,
        guarantee: LIMIT / 4,
    };
    let models = ["a".to_owned(), "b".to_owned()];
    Pooled::new(&device, &models, &division, true, None, None).unwrap()
}

#[test]
fn the_division_holds_and_what_fits_is_what_was_promised() {
    for (policy, most) in [(Policy::Static, 16), (Policy::Elastic, 24)] {
        let mut memory = memory(policy);
        assert_eq!(memory.granule(), 2 << 20);
        assert_eq!(memory.ceiling(0), most);
        let mut block = memory.allocate(0, 0, most - 1, most).unwrap().unwrap();
        assert!(memory.grow(&mut block, most).unwrap());
        assert!(memory.allocate(0, 1, 1, 1).unwrap().is_none());
        assert!(memory.last_refusal().unwrap().contains("out of memory"));
        let other = memory.allocate(1, 2, 32 - most, 32).unwrap().unwrap();
        memory.free(block).unwrap();
        memory.free(other).unwrap();
        let (costs, all) = memory.finish().unwrap();
        assert_eq!(
            all.verified,
            Verified {
                stamps: 64,
                ..Verified::default()
            }
        );
        assert_eq!(costs[0].verified.stamps, 2 * most);
    }
}

#[test]
fn what_is_idle_with_one_model_serves_the_other() {
    let mut memory = memory(Policy::Elastic);
    for round in 0..4 {
        let block = memory
            .allocate(round % 2, round as u64, 24, 24)
            .unwrap()
            .unwrap();
        memory.free(block).unwrap();
    }
    memory.finish().unwrap();
}

#[test]
fn a_damaged_granule_is_a_wrong_stamp() {
    let mut memory = memory(Policy::Elastic);
    let block = memory.allocate(0, 5, 3, 3).unwrap().unwrap();
    block.block.write(2 * memory.granule() - 1, &[0]).unwrap();
    memory.free(block).unwrap();
    let (costs, all) = memory.finish().unwrap();
    assert_eq!((all.verified.stamps, all.verified.wrong), (6, 1));
    assert!(
        all.verified
            .first_wrong
            .unwrap()
            .starts_with("the end of granule 1 of request 5 reads 00")
    );
    assert_eq!(costs[0].verified.wrong, 1);
}

#[test]
fn stamping_costs_no_driver_calls() {
    let calls = |stamped| {
        let mut memory = memory(Policy::Elastic);
        memory.stamped = stamped;
        for request in 0..3 {
            let mut block = memory.allocate(0, request, 4, 9).unwrap().unwrap();
            memory.grow(&mut block, 9).unwrap();
            memory.free(block).unwrap();
        }
        let (costs, all) = memory.finish().unwrap();
        (costs[0].calls, all.calls)
    };
    assert_eq!(calls(true), calls(false));
}

#[test]
fn every_driver_call_counts_once() {
    for policy in [Policy::Static, Policy::Elastic] {
        let driver = HostDriver::new(HostOptions::new().capacity(2 * LIMIT));
        let faults = Arc::new(FaultDriver::new(Arc::new(driver)));
        let device = Device::open(faults.clone(), 0).unwrap();
        let division = Division {
            policy,
            models: 2,
            limit: LIMIT,
            guarantee: LIMIT / 4,
        };
        let models = ["a".to_owned(), "b".to_owned()];
        let mut memory = Pooled::new(&device, &models, &division, false, None, None).unwrap();
        faults.forget();
        for model in 0..2 {
            let mut block = memory.allocate(model, 0, 3, 9).unwrap().unwrap();
            memory.grow(&mut block, 9).unwrap();
            memory.free(block).unwrap();
        }
        let (costs, all) = memory.finish().unwrap();
        let each: u64 = costs.iter().map(|cost| cost.calls).sum();
        let made = faults.calls();
        let creates = made.iter().filter(|&&call| call == Call::MemCreate).count();
        assert!(creates > 0);
        assert_eq!(all.by_call[&Call::MemCreate].0, creates as u64);
        // One call made the stream.
        assert_eq!(all.calls, 1 + made.len() as u64);
        assert!(each <= all.calls);
    }
}

#[test]
fn on_a_model_time_is_what_calls_cost() {
    let mut costs = Costs::free_of_charge();
    costs.create_cold = Curve::flat(100.0);
    costs.map = Curve::flat(7.0);
    let options = ModelOptions::new().costs(costs).capacity(2 * LIMIT);
    let model = Arc::new(ModelDriver::new(options));
    let device = Device::open(model.clone(), 0).unwrap();
    model.advance(Duration::from_secs(9));
    let division = Division {
        policy: Policy::Elastic,
        models: 1,
        limit: LIMIT,
        guarantee: 0,
    };
    let models = ["a".to_owned()];
    let mut memory = Pooled::new(&device, &models, &division, false, Some(model), None).unwrap();
    let block = memory.allocate(0, 0, 4, 4).unwrap().unwrap();
    memory.free(block).unwrap();
    let (costs, all) = memory.finish().unwrap();
    assert_eq!(costs[0].time, Duration::from_micros(107));
    assert_eq!(all.time, Duration::from_micros(107));
    assert_eq!(all.by_call[&Call::MemMap], (1, Duration::from_micros(7)));
}

#[test]
fn memory_left_in_use_is_an_error() {
    let mut memory = memory(Policy::Elastic);
    let block = memory.allocate(0, 0, 1, 1).unwrap();
    assert!(
        memory
            .finish()
            .unwrap_err()
            .to_string()
            .contains("2097152 bytes are still in use")
    );
    drop(block);
}
