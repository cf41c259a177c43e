//! A plan on the GPU makes the calls that the model predicts, holds what it predicts, and leaks
//! nothing. Its times are printed beside the predicted ones; the bench measures how close they are.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::time::Duration;

use crate::on_each;
use cuvmm::driver::model::{ModelDriver, ModelOptions};
use cuvmm::plan::{Clock, WallClock};
use cuvmm::{Device, Plan, Step};

struct Ticks(Arc<ModelDriver>);

impl Clock for Ticks {
    fn now(&self) -> Duration {
        self.0.clock()
    }

    fn wait(&self, time: Duration) {
        self.0.advance(time);
    }
}

on_each! {
    fn a_plan_does_what_the_model_expects(stage) {
        let g = stage.g();
        let plan = Plan::new()
            .reserve("region", 4096 * g)
            .commit("region", 17 * g - 5)
            .grow("region", 100 * g, g)
            .step(Step::Decommit {
                within: "region".to_owned(),
                offset: 32 * g,
                size: 68 * g,
            })
            .reserve("separate", 8 * g)
            .create("memory", 3 * g)
            .map("memory", "separate", 0)
            .map("memory", "separate", 4 * g)
            .step(Step::Unmap {
                within: "separate".to_owned(),
                offset: 0,
            })
            .stripe("striped", 7 * g, 2 * g, &[0])
            .wait(Duration::from_millis(10))
            .release("region")
            .reserve("region", 64 * g)
            .commit("region", 33 * g);
        let model = Arc::new(ModelDriver::new(ModelOptions::new().granularity(g)));
        let like = Device::open(model.clone(), 0).unwrap();
        let expected = plan.run(&[like], &Ticks(model)).unwrap();
        let devices = [stage.device.clone()];
        let measured = plan.run(&devices, &WallClock::new()).unwrap();
        assert!(measured.is_done(), "{:?}", measured.failure);
        assert!(measured.ending.refusal.is_none());
        for (measured, expected) in measured.steps.iter().zip(&expected.steps) {
            println!(
                "step {}: {:?}, expected {:?}",
                measured.step, measured.time, expected.time
            );
            assert_eq!(measured.calls, expected.calls, "step {}", measured.step);
            assert_eq!(measured.in_use, expected.in_use, "step {}", measured.step);
        }
        assert_eq!(measured.peak, expected.peak);
        assert_eq!(measured.ending.calls, expected.ending.calls);
        assert_eq!(stage.device.drop_failures(), 0);

        // More memory than there is: the step fails at once and takes nothing.
        let much = 2 * stage.device.total_memory();
        let plan = Plan::new().create("a little", g).create("much", much);
        let refused = plan.run(&devices, &WallClock::new()).unwrap();
        let failure = refused.failure.expect("the plan succeeded");
        assert_eq!(failure.reached.step, 2);
        assert_eq!(failure.reached.in_use.memory(), g);
    }
}
