//! Two drivers for machines without a GPU, which keep the rules of the real one.
//!
//! - [`model`]: the driver's rules and costs without memory, on a virtual clock.
//! - [`host`]: the driver's rules over real host memory.
//!
//! Both are one machine, whose answers are those that real GPUs gave. Streams can be held back, calls
//! can be made to fail, and work may run late.

pub mod host;
pub mod model;
