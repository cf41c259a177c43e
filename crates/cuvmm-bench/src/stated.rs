//! Facts that a table of costs and a recording state: the driver's version and the date.

use cuvmm::driver::DriverKind;
use cuvmm_cli::drivers::Opened;

/// Returns the version of the GPU's driver, or of the stand-in.
pub(crate) fn driver_version(opened: &Opened) -> String {
    match opened.driver.kind() {
        DriverKind::Cuda => conformance::driver_version().unwrap_or_else(|| "unknown".to_owned()),
        kind => {
            let own = concat!("cuvmm ", env!("CARGO_PKG_VERSION"));
            format!("{} driver of {own}", kind.name())
        }
    }
}

/// Returns the date in UTC.
pub(crate) fn today() -> String {
    let now = jiff::Timestamp::now();
    now.to_zoned(jiff::tz::TimeZone::UTC).date().to_string()
}
