//! Faults of calls by the name of their C function: `cuMemCreate:3`, `cuMemMap:2-:INVALID_VALUE`.
//!
//! Faults count the program's calls. A fault of the driver's wrapper (`cuvmm_driver::fault`) would
//! also count one C function's calls for several devices, and would miss functions that need no
//! driver, such as those of contexts.

use cuvmm_driver::CUresult;

use crate::listed::FUNCTIONS;

/// Calls of one function that fail, counted from 1 when the fault is armed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    /// The function's name, as the library exports it or without its `_v2`.
    pub(crate) call: String,
    pub(crate) first: u64,
    pub(crate) last: u64,
    pub(crate) code: CUresult,
}

impl Planned {
    /// Returns `true` if a function's calls are counted. A name without a version stands for every
    /// version.
    pub(crate) fn is_of(&self, function: &str) -> bool {
        function
            .strip_prefix(self.call.as_str())
            .is_some_and(|rest| rest.is_empty() || is_version(rest))
    }
}

fn is_version(rest: &str) -> bool {
    let digits = rest.strip_prefix("_v").unwrap_or("");
    !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit())
}

/// Parses faults separated by commas. Each is `CALL:N` for the nth call, `CALL:N-M` for some, or
/// `CALL:N-` for all from the nth on, and may end in `:CODE`; the default code is `OUT_OF_MEMORY`.
pub(crate) fn parse(text: &str) -> Result<Vec<Planned>, String> {
    let parts = text.split(',').map(str::trim);
    parts.filter(|part| !part.is_empty()).map(one).collect()
}

fn one(text: &str) -> Result<Planned, String> {
    let wrong =
        || format!("{text} must be CALL:N, CALL:N-M or CALL:N-, and may have :CODE after it");
    let mut parts = text.split(':');
    let (call, calls) = (
        parts.next().ok_or_else(wrong)?,
        parts.next().ok_or_else(wrong)?,
    );
    let code = match parts.next() {
        None => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        Some(name) => code(name).ok_or_else(|| format!("{name} is no code of the driver"))?,
    };
    let number = |text: &str| text.parse::<u64>().ok().filter(|number| *number > 0);
    let (first, last) = match calls.split_once('-') {
        None => (calls, Some(calls)),
        Some((first, "")) => (first, None),
        Some((first, last)) => (first, Some(last)),
    };
    let first = number(first).ok_or_else(wrong)?;
    let last = last.map_or(Some(u64::MAX), number).ok_or_else(wrong)?;
    if parts.next().is_some() || last < first {
        return Err(wrong());
    }
    let planned = Planned {
        call: call.to_owned(),
        first,
        last,
        code,
    };
    if !FUNCTIONS
        .iter()
        .any(|function| planned.is_of(function.name))
    {
        return Err(format!("{call} is no function of this library"));
    }
    Ok(planned)
}

/// Returns a code by its name, with or without `CUDA_ERROR_`, or by its number.
fn code(text: &str) -> Option<CUresult> {
    let known = CUresult::KNOWN.iter();
    let named =
        known.filter(|(name, _)| *name == text || name.strip_prefix("CUDA_ERROR_") == Some(text));
    let found = named.map(|(_, code)| *code).next();
    let numbered = || text.parse().ok().map(CUresult);
    found
        .or_else(numbered)
        .filter(|code| *code != CUresult::CUDA_SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read() {
        let found = parse("cuMemCreate:3, cuMemAlloc:2-4:999 ,cuMemMap:1-:INVALID_VALUE").unwrap();
        let said: Vec<_> = found
            .iter()
            .map(|fault| (fault.call.as_str(), fault.first, fault.last, fault.code.0))
            .collect();
        assert_eq!(
            said,
            [
                ("cuMemCreate", 3, 3, 2),
                ("cuMemAlloc", 2, 4, 999),
                ("cuMemMap", 1, u64::MAX, 1)
            ]
        );
        assert!(found[1].is_of("cuMemAlloc_v2") && !found[1].is_of("cuMemAllocAsync"));
        assert!(parse("").unwrap().is_empty());
    }

    #[test]
    fn what_is_no_fault_is_refused() {
        for text in [
            "cuMemCreate",
            "cuMemCreate:0",
            "cuMemCreate:x",
            "cuMemCreate:3-2",
            "cuMemCreate:1:OUT_OF_MEMORY:1",
            "cuMemCreate:1:NO_SUCH_CODE",
            "cuMemCreate:1:SUCCESS",
            "cuMemCreate:1:0",
            "cuNoSuchCall:1",
            ":1",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
