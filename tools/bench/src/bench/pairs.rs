//! Alternating measurements of two sides, so that changes over time affect both.

use super::samples::Samples;

/// Measures each side `pairs` times, alternately, after one uncounted run of each.
///
/// # Errors
/// The first error of a side.
pub(super) fn alternate(
    pairs: usize,
    mut ours: impl FnMut() -> anyhow::Result<f64>,
    mut rival: impl FnMut() -> anyhow::Result<f64>,
) -> anyhow::Result<(Samples, Samples)> {
    ours()?;
    rival()?;
    let mut samples = (Samples::with_room(pairs), Samples::with_room(pairs));
    for _ in 0..pairs {
        samples.0.add(ours()?);
        samples.1.add(rival()?);
    }
    Ok(samples)
}

/// Wraps a side so that it runs twice and only the second run is measured: immediately after its
/// own release, regardless of the other side's.
pub(super) fn after_itself(
    mut side: impl FnMut() -> anyhow::Result<f64>,
) -> impl FnMut() -> anyhow::Result<f64> {
    move || {
        side()?;
        side()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::{after_itself, alternate};

    #[test]
    fn sides_take_turns_and_the_first_turn_does_not_count() {
        let log = RefCell::new(String::new());
        let side = |name, step: f64| {
            let (mut next, log) = (0.0, &log);
            move || {
                log.borrow_mut().push(name);
                next += step;
                Ok(next)
            }
        };
        let (ours, rival) = alternate(3, side('a', 1.0), after_itself(side('b', 10.0))).unwrap();
        assert_eq!(*log.borrow(), "abbabbabbabb");
        assert_eq!((ours.count(), rival.count()), (3, 3));
        assert_eq!((ours.median(), ours.max()), (3.0, 4.0));
        assert_eq!((rival.median(), rival.max()), (60.0, 80.0));
    }

    #[test]
    fn an_error_ends_it() {
        let outcome = alternate(3, || Ok(1.0), || anyhow::bail!("no"));
        assert_eq!(outcome.unwrap_err().to_string(), "no");
    }
}
