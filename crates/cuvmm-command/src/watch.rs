//! Clocks: real time or, on the model driver, the virtual time that its calls would have taken.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuvmm::driver::model::ModelDriver;

use crate::drivers::Concrete;

/// A clock for the work of a driver.
#[derive(Clone, Debug)]
pub enum Watch {
    /// Real time.
    Wall(Instant),
    /// The clock of the model driver, which only its calls advance.
    Virtual(Arc<ModelDriver>),
}

/// The time after a release until a create is cold: the driver has then cleared the released
/// memory.
pub const A_WHILE: Duration = Duration::from_millis(500);

/// The last part of a wait, during which the thread spins.
const AWAKE: Duration = Duration::from_millis(20);

/// The note of rows in virtual time.
const VIRTUAL: &str = "virtual time, by the cost table";

/// The note of rows whose baseline alone is in virtual time.
const VIRTUAL_BASELINE: &str =
    "the baseline is virtual time, by the cost table; the library's is real";

impl Watch {
    /// Returns the clock for a driver: virtual for the model, real for the others.
    pub fn of(driver: &Concrete) -> Self {
        match driver {
            Concrete::Model(model) => Self::Virtual(Arc::clone(model)),
            _ => Self::Wall(Instant::now()),
        }
    }

    /// Runs `act` and returns the nanoseconds that it took by this clock.
    ///
    /// # Errors
    /// Those of `act`.
    pub fn time<T, E>(&self, act: impl FnOnce() -> Result<T, E>) -> Result<(f64, T), E> {
        let begun = self.now();
        let outcome = act()?;
        let took = self.now().saturating_sub(begun);
        Ok((nanos(took), outcome))
    }

    /// Returns the note of a row measured by this clock, if time is virtual.
    pub const fn note(&self) -> Option<&'static str> {
        self.virtually(VIRTUAL)
    }

    /// Returns the note of a row whose baseline alone is measured by this clock, if time is
    /// virtual.
    pub const fn note_on_baseline(&self) -> Option<&'static str> {
        self.virtually(VIRTUAL_BASELINE)
    }

    /// Returns the time since a fixed instant.
    pub fn now(&self) -> Duration {
        match self {
            Self::Wall(begun) => begun.elapsed(),
            Self::Virtual(model) => model.clock(),
        }
    }

    /// Lets `time` pass.
    pub fn wait(&self, time: Duration) {
        match self {
            Self::Wall(_) => {
                // A core is slow at first after sleeping, which a measurement must not include.
                let end = Instant::now() + time;
                std::thread::sleep(time.saturating_sub(AWAKE));
                while Instant::now() < end {
                    std::hint::spin_loop();
                }
            }
            Self::Virtual(model) => model.advance(time),
        }
    }

    const fn virtually(&self, note: &'static str) -> Option<&'static str> {
        match self {
            Self::Wall(_) => None,
            Self::Virtual(_) => Some(note),
        }
    }
}

/// Runs `act` and returns the nanoseconds of real time that it took, on any driver.
///
/// # Errors
/// Those of `act`.
pub fn wall<T, E>(act: impl FnOnce() -> Result<T, E>) -> Result<(f64, T), E> {
    let begun = Instant::now();
    let outcome = act()?;
    Ok((nanos(begun.elapsed()), outcome))
}

/// Returns the nanoseconds of real time that `act` takes, on any driver.
pub fn wall_of(act: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    act();
    nanos(begun.elapsed())
}

/// Returns a duration in nanoseconds.
pub fn nanos(time: Duration) -> f64 {
    time.as_nanos() as f64
}

/// Formats nanoseconds with a unit from ns to s.
pub fn in_words(nanos: f64) -> String {
    match nanos {
        ns if ns < 1e3 => format!("{ns} ns"),
        ns if ns < 1e6 => format!("{:.2} us", ns / 1e3),
        ns if ns < 1e9 => format!("{:.2} ms", ns / 1e6),
        ns => format!("{:.2} s", ns / 1e9),
    }
}
