//! CUDA versions as the driver numbers them: 12020 is CUDA 12.2.

use core::ffi::c_int;
use core::fmt;

/// A version of CUDA as the driver numbers it: 1000 times the major version plus 10 times the minor
/// one.
///
/// Versions are ordered, print as `12.2`, and keep any number that the driver returned.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CudaVersion(c_int);

impl CudaVersion {
    /// The oldest CUDA whose driver has every function that [`crate::Api`] requires.
    pub const OLDEST_SUPPORTED: Self = Self::new(10, 2);

    /// Creates a version from its major and minor numbers.
    #[must_use]
    pub const fn new(major: u16, minor: u8) -> Self {
        Self(major as c_int * 1000 + minor as c_int * 10)
    }

    /// Creates a version from the number that `cuDriverGetVersion` returns.
    #[must_use]
    pub const fn from_raw(raw: c_int) -> Self {
        Self(raw)
    }

    /// Returns the driver's number, 12020 for CUDA 12.2.
    #[must_use]
    pub const fn as_raw(self) -> c_int {
        self.0
    }

    /// Returns the major version, the part before the dot.
    #[must_use]
    pub const fn major(self) -> c_int {
        self.0 / 1000
    }

    /// Returns the minor version, the part after the dot.
    #[must_use]
    pub const fn minor(self) -> c_int {
        self.0 % 1000 / 10
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major(), self.minor())
    }
}

impl fmt::Debug for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaVersion({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::CudaVersion;

    #[test]
    fn parts_order_and_text() {
        let version = CudaVersion::from_raw(12020);
        assert_eq!(version, CudaVersion::new(12, 2));
        assert_eq!((version.major(), version.minor()), (12, 2));
        assert_eq!(version.to_string(), "12.2");
        assert_eq!(CudaVersion::new(9, 2).as_raw(), 9020);
        assert!(CudaVersion::new(9, 2) < CudaVersion::new(10, 0));
        assert!(CudaVersion::new(12, 10) > CudaVersion::new(12, 9));
    }
}
