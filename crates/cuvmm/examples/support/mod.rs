//! Selects the driver of the examples: a GPU where there is one, else the host driver.
//! `CUVMM_DRIVER=cuda` insists on a GPU, and `CUVMM_DRIVER=host` does without.

use std::env::{self, VarError};
use std::error::Error;
use std::fmt;
use std::sync::Arc;

use cuvmm::driver::Driver;
use cuvmm::driver::auto::{self, OpenOptions, Wanted};
use cuvmm::driver::host::HostOptions;

/// An error that `main` prints as a sentence.
pub(crate) struct Sentence(String);

impl fmt::Debug for Sentence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Sentence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Sentence {}

/// Opens the driver and prints its name. The host driver models two devices.
///
/// # Errors
/// Fails if `CUVMM_DRIVER` is `cuda` and there is no usable GPU, or is no driver's name.
pub(crate) fn driver() -> Result<Arc<dyn Driver>, Box<dyn Error>> {
    let wanted = wanted(env::var("CUVMM_DRIVER"))?;
    let options = OpenOptions::new().wanted(wanted);
    let options = options.host_options(HostOptions::new().devices(2));
    let opened = auto::open(options).map_err(|error| Sentence(error.to_string()))?;
    println!("on {}: {}", opened.kind.name(), opened.reason);
    Ok(opened.driver)
}

/// Returns the driver that the variable names. An empty variable is as good as none.
///
/// # Errors
/// Fails if the variable is no driver's name.
pub(crate) fn wanted(variable: Result<String, VarError>) -> Result<Wanted, Sentence> {
    match variable.as_deref() {
        Ok("auto") => Ok(Wanted::Best),
        Ok("cuda") => Ok(Wanted::Cuda),
        Ok("host") => Ok(Wanted::Host),
        // Tests run the examples alike on every machine.
        Ok("") | Err(VarError::NotPresent) if cfg!(test) => Ok(Wanted::Host),
        Ok("") | Err(VarError::NotPresent) => Ok(Wanted::Best),
        Ok(other) => Err(unknown(other)),
        Err(VarError::NotUnicode(other)) => Err(unknown(&other.to_string_lossy())),
    }
}

fn unknown(word: &str) -> Sentence {
    Sentence(format!(
        "CUVMM_DRIVER is {word:?}, which is no driver: use auto, cuda or host"
    ))
}
