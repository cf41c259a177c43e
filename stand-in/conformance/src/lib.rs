//! The rules of the driver as functions over any [`Driver`](cuvmm_driver::Driver), and the recorded
//! answers of real GPUs.
//!
//! A [`Case`] tests one behavior of a driver. It has a name, belongs to a rule of
//! `docs/semantics.md`, and returns a short text without addresses and times, so that two drivers,
//! or two runs, can be compared. [`Suite`] runs cases. [`Recording`] is a GPU's answers as
//! committed data (`answers/*.json`). [`DELIBERATE`] lists where a backend may differ from a GPU,
//! and why.
//!
//! The code contains no expectations: the recordings are the only reference. Calls that cannot be
//! made through the trait (null pointers, calls before `cuInit`, functions that the trait lacks) are
//! asked in C: see [`c`].

mod answer;
mod bench;
pub mod c;
mod case;
mod cases;
mod differences;
mod isolate;
mod machine;
mod ptx;
mod ptx_comparing;
mod recording;
mod suite;

use answer::{Answer, Answered};
use bench::Bench;

use case::Rule;
pub use case::{Case, Manner, Need};
pub use cases::{all, find};
pub use differences::{DELIBERATE, Deliberate};
pub use isolate::{Isolate, run_in_own_process};
pub use machine::MachineToucher;
pub use ptx::{KernelToucher, NoKernels, PtxToucher};
pub use recording::{Comparison, Difference, Recording, RecordingError, driver_version};
pub use suite::{Leak, Report, Suite};
