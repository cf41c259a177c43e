//! Selects the driver of the examples: the host driver, or a GPU with `CUVMM_DRIVER=cuda`.

use std::error::Error;
use std::sync::Arc;

use cuvmm::driver::Driver;
use cuvmm::driver::auto::{self, OpenOptions, Wanted};
use cuvmm::driver::host::HostOptions;

/// Opens the driver and prints its name. The host driver models two devices.
///
/// # Errors
/// Fails if `CUVMM_DRIVER=cuda` is set and there is no usable GPU.
pub(crate) fn driver() -> Result<Arc<dyn Driver>, Box<dyn Error>> {
    let wanted = match std::env::var("CUVMM_DRIVER").as_deref() {
        Ok("cuda") => Wanted::Cuda,
        _ => Wanted::Host,
    };
    let options = OpenOptions::new().wanted(wanted);
    let opened = auto::open(options.host_options(HostOptions::new().devices(2)))?;
    println!("on {}: {}", opened.kind.name(), opened.reason);
    Ok(opened.driver)
}
