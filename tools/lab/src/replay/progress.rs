//! The progress bar. It is drawn only on a terminal and on standard error, so it is never part of
//! the output.

use std::io::IsTerminal as _;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::policy::Policy;

pub(crate) fn bar(policy: Policy, requests: usize, wanted: bool) -> ProgressBar {
    if !wanted || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(requests as u64), ProgressDrawTarget::stderr());
    if let Ok(style) =
        ProgressStyle::with_template("{prefix:>7} {wide_bar} {pos}/{len} requests, {eta} left")
    {
        bar.set_style(style);
    }
    bar.set_prefix(policy.name());
    bar
}
