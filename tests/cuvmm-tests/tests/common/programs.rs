//! The frame of tests with random programs.

use proptest::collection::{self, SizeRange};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestRunner};

/// Runs random programs: `usual` of them, as [`cases`](crate::common::cases) counts. A failure shows the
/// smallest program found that fails.
pub fn run<S: Strategy>(
    usual: u32,
    step: S,
    steps: impl Into<SizeRange>,
    run: impl Fn(&[S::Value]),
) {
    let config = Config {
        cases: crate::common::cases(usual),
        max_shrink_iters: 4000,
        failure_persistence: None,
        ..Config::default()
    };
    let outcome = TestRunner::new(config).run(&collection::vec(step, steps), |steps| {
        run(&steps);
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}
