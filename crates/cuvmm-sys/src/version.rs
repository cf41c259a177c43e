//! CUDA versions as the driver counts them: 12020 is CUDA 12.2.

use core::ffi::c_int;
use core::fmt;

/// A version of CUDA, in the driver's own count: a thousand to the major version and ten to the
/// minor one.
///
/// It orders as versions do, prints as `12.2`, and keeps whatever number the driver gave.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CudaVersion(c_int);

impl CudaVersion {
    /// The oldest CUDA whose driver has every function that [`crate::Api`] requires.
    pub const OLDEST_SUPPORTED: Self = Self::new(10, 2);

    /// The version with these two parts.
    #[must_use]
    pub const fn new(major: u16, minor: u8) -> Self {
        Self(major as c_int * 1000 + minor as c_int * 10)
    }

    /// The version that the driver counts as `raw`, as `cuDriverGetVersion` returns it.
    #[must_use]
    pub const fn from_raw(raw: c_int) -> Self {
        Self(raw)
    }

    /// The driver's count, 12020 for CUDA 12.2.
    #[must_use]
    pub const fn as_raw(self) -> c_int {
        self.0
    }

    /// The part before the dot.
    #[must_use]
    pub const fn major(self) -> c_int {
        self.0 / 1000
    }

    /// The part after the dot.
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
