//! The settings, which are environment variables: the allocator's functions take none.

use std::env;
use std::str::FromStr as _;

use bytesize::ByteSize;
use cuvmm::heap::Preset;

use crate::error::Error;

pub(crate) const LIMIT: &str = "CUVMM_TORCH_LIMIT";
const PRESET: &str = "CUVMM_TORCH_PRESET";
const ALIASES: &str = "CUVMM_TORCH_ALIASES";
const STREAM_WAITS: &str = "CUVMM_TORCH_STREAM_WAITS";

/// How the heaps are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The most bytes that the heap of a device may hold. `None` for all but what the pool leaves
    /// free by default.
    pub(crate) limit: Option<u64>,
    pub(crate) preset: Preset,
    pub(crate) aliases: bool,
    pub(crate) waits: bool,
}

impl Settings {
    /// Reads the environment. A variable that is empty counts as not set.
    pub(crate) fn read() -> Result<Self, Error> {
        Self::from(|name| {
            let value = env::var_os(name)?;
            (!value.is_empty()).then(|| value.to_string_lossy().into_owned())
        })
    }

    fn from(variable: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let choice = |name, expected, read: fn(&str) -> Option<bool>| match variable(name) {
            None => Ok(None),
            Some(value) => match read(&value) {
                Some(choice) => Ok(Some(choice)),
                None => Err(Error::Setting {
                    name,
                    value,
                    expected,
                }),
            },
        };
        let on_off = |value: &str| match value {
            "on" => Some(true),
            "off" => Some(false),
            _ => None,
        };
        let is_fast = choice(PRESET, "tight or fast", |value| match value {
            "tight" => Some(false),
            "fast" => Some(true),
            _ => None,
        })?;
        let preset = match is_fast {
            Some(true) => Preset::Fast,
            Some(false) | None => Preset::Tight,
        };
        Ok(Self {
            limit: variable(LIMIT).map(limit).transpose()?,
            preset,
            aliases: choice(ALIASES, "on or off", on_off)?.unwrap_or(true),
            waits: choice(STREAM_WAITS, "on or off", on_off)?.unwrap_or(true),
        })
    }
}

/// Reads a limit of at least one byte.
fn limit(value: String) -> Result<u64, Error> {
    match ByteSize::from_str(&value) {
        Ok(ByteSize(bytes @ 1..)) => Ok(bytes),
        _ => Err(Error::Setting {
            name: LIMIT,
            value,
            expected: "a size of at least a byte, like 512MiB or 60GiB",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, value: &str) -> Result<Settings, Error> {
        Settings::from(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn nothing_set_is_the_default() {
        let settings = Settings::from(|_| None).expect("the default");
        let expected = Settings {
            limit: None,
            preset: Preset::Tight,
            aliases: true,
            waits: true,
        };
        assert_eq!(settings, expected);
    }

    #[test]
    fn values_are_what_they_say() {
        for (value, bytes) in [
            ("1", 1),
            ("512MiB", 512 << 20),
            ("60 GiB", 60 << 30),
            ("1.5GiB", 3 << 29),
            ("2GB", 2_000_000_000),
        ] {
            let limit = with(LIMIT, value).expect("a size").limit;
            assert_eq!(limit, Some(bytes), "{value}");
        }
        assert_eq!(with(PRESET, "fast").expect("one").preset, Preset::Fast);
        assert_eq!(with(PRESET, "tight").expect("one").preset, Preset::Tight);
        assert!(!with(ALIASES, "off").expect("one").aliases);
        assert!(!with(STREAM_WAITS, "off").expect("one").waits);
        assert!(with(STREAM_WAITS, "on").expect("one").waits);
    }

    #[test]
    fn other_values_are_refused_by_name() {
        for (name, values) in [
            (LIMIT, &["0", "-1", "all", "5 parsecs", "0.1"][..]),
            (PRESET, &["Tight", "slow", " fast"]),
            (ALIASES, &["1", "yes", "ON"]),
            (STREAM_WAITS, &["0", "no"]),
        ] {
            for value in values {
                let error = with(name, value).expect_err(value).to_string();
                assert!(error.contains(name) && error.contains(value), "{error}");
            }
        }
    }
}
