//! Driver functions by name: the entries of the table, and functions that may be missing.

use core::fmt;

use crate::CudaVersion;

/// One entry of the table of functions.
#[derive(Clone, Copy, Debug)]
pub struct Symbol {
    /// The name under which libcuda exports the function.
    pub name: &'static str,
    /// The CUDA version whose driver first exported it.
    pub since: CudaVersion,
    /// `true` if loading fails without the function.
    pub required: bool,
    /// The parameters, in order.
    pub parameters: &'static [Parameter],
}

/// A parameter of a driver function. Every function returns a [`CUresult`](crate::CUresult).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The parameter's name.
    pub name: &'static str,
    /// The parameter's type in Rust's spelling: `*mut CUdeviceptr`, `usize`.
    pub rust_type: &'static str,
}

/// A function that this driver does not export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this driver has no {symbol}, which CUDA {since} introduced")]
pub struct MissingSymbol {
    /// The name under which the function was looked for.
    pub symbol: &'static str,
    /// The CUDA version whose driver first exported it.
    pub since: CudaVersion,
}

/// A function that newer drivers have and older ones lack.
#[derive(Clone, Copy)]
pub struct Optional<F> {
    found: Option<F>,
    symbol: MissingSymbol,
}

impl<F: Copy> Optional<F> {
    pub(crate) fn new(found: Option<F>, symbol: MissingSymbol) -> Self {
        Self { found, symbol }
    }

    /// Returns the function.
    ///
    /// # Errors
    ///
    /// Returns [`MissingSymbol`], which names the function and the CUDA version that introduced it.
    pub fn get(&self) -> Result<F, MissingSymbol> {
        self.found.ok_or(self.symbol)
    }

    /// Returns `true` if this driver has the function.
    #[must_use]
    pub fn is_present(&self) -> bool {
        self.found.is_some()
    }
}

impl<F> fmt::Debug for Optional<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.found.is_some() {
            "present"
        } else {
            "missing"
        };
        write!(f, "{}: {state}", self.symbol.symbol)
    }
}
