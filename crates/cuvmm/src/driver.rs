//! The CUDA driver behind one trait, and the choice between its implementations.
//!
//! - [`Driver`]: the trait, which the whole library is built on.
//! - [`cuda`]: the real driver, loaded at run time.
//! - `host`: the driver's rules over host memory, for machines without a GPU.
//! - `model`: the driver's rules and costs without memory, on a virtual clock.
//! - [`fault`]: a wrapper around any driver that fails, delays and records calls.
//! - [`auto`]: opens the real driver where there is a GPU, and the host driver elsewhere.
//!
//! `host` and `model` are there with the feature `model`, which is on by default, and `host` on Linux only.
//! They are the crate `cuvmm-model`, the others the crate `cuvmm-driver`.

pub mod auto;

pub use cuvmm_driver::*;
#[cfg(all(feature = "model", target_os = "linux"))]
#[cfg_attr(docsrs, doc(cfg(feature = "model")))]
pub use cuvmm_model::host;
#[cfg(feature = "model")]
#[cfg_attr(docsrs, doc(cfg(feature = "model")))]
pub use cuvmm_model::model;

/// The option that sets the memory of a driver's devices, unless they are GPUs.
pub(crate) const fn memory_option(kind: DriverKind) -> Option<&'static str> {
    match kind {
        DriverKind::Host => Some("HostOptions::capacity"),
        _ => None,
    }
}

/// The name of a pool's limit in an error about the device's memory; on the host driver, with the
/// option that sets that memory.
pub(crate) const fn limit_name(kind: DriverKind) -> &'static str {
    match kind {
        DriverKind::Host => {
            "bytes of a pool's limit on the host driver, whose memory `HostOptions::capacity` sets"
        }
        _ => "bytes of a pool's limit",
    }
}
