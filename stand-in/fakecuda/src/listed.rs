//! The exported functions of the driver API, with the CUDA version that introduced each.

use cuvmm_sys::CudaVersion;

use crate::symbols::symbols;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Function {
    pub(crate) name: &'static str,
    /// The name by which `cuGetProcAddress` finds the function.
    pub(crate) base: &'static str,
    /// The CUDA version that introduced the function, as the driver numbers versions.
    pub(crate) since: i32,
    /// `own` if the default stream is the thread's own.
    stream: &'static str,
}

macro_rules! rows {
    ($($name:ident $base:ident $since:literal $stream:ident $place:ident)*) => {
        &[$(Function {
            name: stringify!($name),
            base: stringify!($base),
            since: $since,
            stream: stringify!($stream),
        },)*]
    };
}

pub(crate) const FUNCTIONS: &[Function] = symbols!(rows);

impl Function {
    pub(crate) fn is_per_thread(&self) -> bool {
        self.stream == "own"
    }
}

pub(crate) fn is_absent(name: &str, version: CudaVersion) -> bool {
    let found = FUNCTIONS.binary_search_by_key(&name, |function| function.name);
    let function = found.ok().and_then(|index| FUNCTIONS.get(index));
    function.is_some_and(|function| function.since > version.as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_absent_before_their_version() {
        assert!(FUNCTIONS.is_sorted_by_key(|function| function.name));
        let old = CudaVersion::new(11, 3);
        // The driver's own table of a program's calls has none of these.
        for (name, absent) in [
            ("cuMemCreate", false),
            ("cuCtxCreate_v3", true),
            ("cuStreamGetDevice", true),
            ("cuMemcpy", false),
            ("fakecuda_live", false),
        ] {
            assert_eq!(is_absent(name, old), absent, "{name}");
        }
    }
}
