//! Whose time is measured: ours, or on the model what its calls would have cost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuvmm::driver::model::ModelDriver;
use cuvmm::plan::Clock;

use crate::drivers::Concrete;

/// A clock for what the driver does.
#[derive(Clone, Debug)]
pub(crate) enum Watch {
    /// Time as it passes here.
    Wall(Instant),
    /// The model's own clock, which only its calls move.
    Virtual(Arc<ModelDriver>),
}

/// So long after a release a create is truly cold: the driver has cleared what was released.
pub(crate) const A_WHILE: Duration = Duration::from_millis(500);

/// How long before the end of a wait the thread is awake.
const AWAKE: Duration = Duration::from_millis(20);

/// Said of rows that are on the model's clock altogether.
const VIRTUAL: &str = "virtual time, by the cost table";

/// Said of rows where only the rival is.
const VIRTUAL_FLOOR: &str = "the floor is virtual time, by the cost table; ours is real";

impl Watch {
    pub(crate) fn of(driver: &Concrete) -> Self {
        match driver {
            Concrete::Model(model) => Self::Virtual(Arc::clone(model)),
            Concrete::Cuda(_) | Concrete::Host(_) => Self::Wall(Instant::now()),
        }
    }

    /// How many nanoseconds something takes.
    pub(crate) fn time<T, E>(&self, act: impl FnOnce() -> Result<T, E>) -> Result<(f64, T), E> {
        let begun = self.now();
        let outcome = act()?;
        let took = self.now().saturating_sub(begun);
        Ok((nanos(took), outcome))
    }

    pub(crate) const fn note(&self) -> Option<&'static str> {
        self.virtually(VIRTUAL)
    }

    pub(crate) const fn note_on_floor(&self) -> Option<&'static str> {
        self.virtually(VIRTUAL_FLOOR)
    }

    const fn virtually(&self, note: &'static str) -> Option<&'static str> {
        match self {
            Self::Wall(_) => None,
            Self::Virtual(_) => Some(note),
        }
    }
}

impl Clock for Watch {
    fn now(&self) -> Duration {
        match self {
            Self::Wall(begun) => begun.elapsed(),
            Self::Virtual(model) => model.clock(),
        }
    }

    fn wait(&self, time: Duration) {
        match self {
            Self::Wall(_) => {
                // A core that has slept is slow at first, which is nobody's cost.
                let end = Instant::now() + time;
                std::thread::sleep(time.saturating_sub(AWAKE));
                while Instant::now() < end {
                    std::hint::spin_loop();
                }
            }
            Self::Virtual(model) => model.advance(time),
        }
    }
}

/// How many nanoseconds something takes here, whatever the driver.
pub(crate) fn wall<T, E>(act: impl FnOnce() -> Result<T, E>) -> Result<(f64, T), E> {
    let begun = Instant::now();
    let outcome = act()?;
    Ok((nanos(begun.elapsed()), outcome))
}

pub(crate) fn nanos(time: Duration) -> f64 {
    time.as_nanos() as f64
}

/// A time for people.
pub(crate) fn in_words(nanos: f64) -> String {
    match nanos {
        ns if ns < 1e3 => format!("{ns} ns"),
        ns if ns < 1e6 => format!("{:.2} us", ns / 1e3),
        ns if ns < 1e9 => format!("{:.2} ms", ns / 1e6),
        ns => format!("{:.2} s", ns / 1e9),
    }
}
