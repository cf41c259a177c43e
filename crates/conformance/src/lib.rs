//! The rules of the driver as functions over any [`Driver`](cuvmm_driver::Driver), and the answers
//! that real GPUs gave.
//!
//! A [`Case`] is one question to a driver. It has a name, says which rule of `docs/semantics.md`
//! it belongs to, and answers with a short text that holds no address and no time, so that two
//! drivers, or the same driver twice, can be compared. [`Suite`] runs cases; [`Recording`] is a
//! GPU's answers as committed data (`answers/*.json`); [`DELIBERATE`] lists where a backend may
//! differ from a GPU, and why.
//!
//! What is not here: expectations. There is one truth, the recording; nothing in the code says
//! what a driver should answer. What cannot be said through the trait (null pointers, calls before
//! `cuInit`) is asked at the C ABI by the tests of `fakecuda`.

mod answer;
mod bench;
mod case;
mod cases;
mod differences;
mod isolate;
mod kernels;
mod machine;
mod ptx;
mod recording;
mod suite;

use answer::{Answer, Answered};
use bench::Bench;

pub use case::{Case, Manner, Need};
pub use cases::{all, find};
pub use differences::{DELIBERATE, Deliberate};
pub use isolate::{Isolate, run_in_own_process};
pub use kernels::KernelToucher;
pub use machine::MachineToucher;
pub use ptx::{NoKernels, PtxToucher};
pub use recording::{Comparison, Difference, Recording, RecordingError, driver_version};
pub use suite::{Leak, Report, Suite};
