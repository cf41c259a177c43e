//! The settings: environment variables, because an allocator's functions take none, and the JSON of
//! `cuvmm_configure`, which overrides them.

use std::env;
use std::path::PathBuf;
use std::str::FromStr as _;

use bytesize::ByteSize;
use cuvmm::display::Bytes;
use cuvmm::heap::Preset;
use serde::Deserialize;

use crate::error::{DEVICES, Error};

const LIMIT: &str = "CUVMM_TORCH_LIMIT";
const PRESET: &str = "CUVMM_TORCH_PRESET";
const ALIASES: &str = "CUVMM_TORCH_ALIASES";
const STREAM_WAITS: &str = "CUVMM_TORCH_STREAM_WAITS";
const MAPPER: &str = "CUVMM_TORCH_MAPPER";
const RDMA: &str = "CUVMM_TORCH_RDMA";

const TENANT: &str = "torch";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The most bytes of a device's heap. `None` for all memory except what the pool leaves free by
    /// default.
    pub(crate) limit: Option<u64>,
    /// The name of the limit in errors.
    pub(crate) limit_name: &'static str,
    pub(crate) tenant: String,
    /// The directory of the ledger that all processes share.
    pub(crate) ledger: Option<PathBuf>,
    /// The most bytes of all processes of the ledger together. `None` for the ledger's own limit,
    /// or for a new ledger the device's memory.
    pub(crate) ledger_limit: Option<u64>,
    /// The bytes that this process can always have of the ledger.
    pub(crate) guarantee: u64,
    /// Of processes equally far above their guarantees, lower priorities release memory first.
    pub(crate) priority: i32,
    /// `true` if a mapper thread for each device unmaps memory.
    pub(crate) mapper: bool,
    pub(crate) preset: Preset,
    pub(crate) aliases: bool,
    pub(crate) waits: bool,
    /// The devices that have access to each other's memory.
    pub(crate) peers: Vec<u32>,
    pub(crate) rdma: Rdma,
    /// `true` if other processes may get the heap's memory.
    pub(crate) shareable: bool,
}

/// When memory is created so that RDMA devices reach it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Rdma {
    /// Where the device has such memory.
    Auto,
    /// Always. A device without such memory has no heap.
    On,
    #[default]
    Off,
}

impl Settings {
    /// Reads the environment, overridden by what was configured. An empty variable counts as not
    /// set.
    pub(crate) fn read(configured: &Configuration) -> Result<Self, Error> {
        Self::from(configured, |name| {
            let value = env::var_os(name)?;
            (!value.is_empty()).then(|| value.to_string_lossy().into_owned())
        })
    }

    fn from(
        configured: &Configuration,
        variable: impl Fn(&'static str) -> Option<String>,
    ) -> Result<Self, Error> {
        let on_off = |name| {
            choice(
                name,
                variable(name),
                "on or off",
                [("on", true), ("off", false)],
            )
        };
        let presets = [("tight", Choice::Tight), ("fast", Choice::Fast)];
        let rdma = [("auto", Rdma::Auto), ("on", Rdma::On), ("off", Rdma::Off)];
        let environment = Configuration {
            limit: variable(LIMIT).map(limit).transpose()?,
            preset: choice(PRESET, variable(PRESET), "tight or fast", presets)?,
            aliases: on_off(ALIASES)?,
            stream_waits: on_off(STREAM_WAITS)?,
            rdma: choice(RDMA, variable(RDMA), "auto, on or off", rdma)?,
            ..Configuration::default()
        };
        let all = configured.clone().over(environment)?;
        Ok(Self {
            limit: all.limit,
            limit_name: match configured.limit {
                Some(_) => "the setting limit",
                None => "the environment variable CUVMM_TORCH_LIMIT",
            },
            tenant: all.tenant.unwrap_or_else(|| TENANT.to_owned()),
            ledger: all.ledger,
            ledger_limit: all.ledger_limit,
            guarantee: all.guarantee.unwrap_or(0),
            priority: all.priority.unwrap_or(0),
            mapper: on_off(MAPPER)?.unwrap_or(true),
            preset: match all.preset {
                Some(Choice::Fast) => Preset::Fast,
                Some(Choice::Tight) | None => Preset::Tight,
            },
            aliases: all.aliases.unwrap_or(true),
            waits: all.stream_waits.unwrap_or(true),
            peers: all.peers.unwrap_or_default(),
            rdma: all.rdma.unwrap_or_default(),
            shareable: all.shareable.unwrap_or(false),
        })
    }
}

/// Returns what the value of a variable stands for; `None` without a value.
fn choice<T, const N: usize>(
    name: &'static str,
    value: Option<String>,
    expected: &'static str,
    known: [(&str, T); N],
) -> Result<Option<T>, Error> {
    let Some(value) = value else {
        return Ok(None);
    };
    match known.into_iter().find(|&(text, _)| text == value) {
        Some((_, choice)) => Ok(Some(choice)),
        None => Err(Error::Setting {
            name,
            value,
            expected,
        }),
    }
}

/// The settings of a program. The environment decides missing ones.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Configuration {
    limit: Option<u64>,
    preset: Option<Choice>,
    tenant: Option<String>,
    ledger: Option<PathBuf>,
    ledger_limit: Option<u64>,
    guarantee: Option<u64>,
    priority: Option<i32>,
    peers: Option<Vec<u32>>,
    aliases: Option<bool>,
    stream_waits: Option<bool>,
    rdma: Option<Rdma>,
    shareable: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Choice {
    Tight,
    Fast,
}

impl Configuration {
    pub(crate) const fn ledger(&self) -> Option<&PathBuf> {
        self.ledger.as_ref()
    }

    /// Merges these settings over earlier ones.
    ///
    /// # Errors
    /// What a ledger keeps is given without the ledger's directory.
    pub(crate) fn over(self, earlier: Self) -> Result<Self, Error> {
        let merged = Self {
            limit: self.limit.or(earlier.limit),
            preset: self.preset.or(earlier.preset),
            tenant: self.tenant.or(earlier.tenant),
            ledger: self.ledger.or(earlier.ledger),
            ledger_limit: self.ledger_limit.or(earlier.ledger_limit),
            guarantee: self.guarantee.or(earlier.guarantee),
            priority: self.priority.or(earlier.priority),
            peers: self.peers.or(earlier.peers),
            aliases: self.aliases.or(earlier.aliases),
            stream_waits: self.stream_waits.or(earlier.stream_waits),
            rdma: self.rdma.or(earlier.rdma),
            shareable: self.shareable.or(earlier.shareable),
        };
        let size = |bytes| Bytes(bytes).to_string();
        let of_a_ledger = [
            ("ledger_limit", merged.ledger_limit.map(size)),
            ("guarantee", merged.guarantee.map(size)),
            ("priority", merged.priority.map(|it| it.to_string())),
        ];
        let named = of_a_ledger
            .into_iter()
            .find_map(|(name, value)| Some((name, value?)));
        match named.filter(|_| merged.ledger.is_none()) {
            Some((name, value)) => Err(Error::Configured {
                name,
                value,
                expected: "given with `ledger`, the directory of one",
            }),
            None => Ok(merged),
        }
    }

    /// Parses the JSON of a program.
    ///
    /// # Errors
    /// Invalid JSON, an unknown name, or a value that is not allowed.
    pub(crate) fn parse(json: &str) -> Result<Self, Error> {
        let read: Self = serde_json::from_str(json)?;
        let refused = |name, value, expected| {
            Err(Error::Configured {
                name,
                value,
                expected,
            })
        };
        match &read {
            Self { limit: Some(0), .. } => refused("limit", "0".to_owned(), "at least a byte"),
            Self {
                tenant: Some(name), ..
            } if name.is_empty() => refused("tenant", "empty".to_owned(), "a name"),
            Self {
                peers: Some(peers), ..
            } if peers.iter().any(|&peer| peer as usize >= DEVICES) || repeats(peers) => refused(
                "peers",
                format!("{peers:?}"),
                "a list of devices, each of them once",
            ),
            _ => Ok(read),
        }
    }
}

fn repeats(peers: &[u32]) -> bool {
    (1..peers.len()).any(|at| peers[..at].contains(&peers[at]))
}

/// Parses a limit of at least one byte.
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
        configured_with(&Configuration::default(), name, value)
    }

    fn configured_with(
        configured: &Configuration,
        name: &str,
        value: &str,
    ) -> Result<Settings, Error> {
        Settings::from(configured, |asked| {
            (asked == name).then(|| value.to_owned())
        })
    }

    #[test]
    fn nothing_set_is_the_default() {
        let settings = Settings::from(&Configuration::default(), |_| None).expect("the default");
        let expected = Settings {
            limit: None,
            limit_name: "the environment variable CUVMM_TORCH_LIMIT",
            tenant: "torch".to_owned(),
            ledger: None,
            ledger_limit: None,
            guarantee: 0,
            priority: 0,
            mapper: true,
            preset: Preset::Tight,
            aliases: true,
            waits: true,
            peers: Vec::new(),
            rdma: Rdma::Off,
            shareable: false,
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
        assert!(!with(MAPPER, "off").expect("one").mapper);
        for (value, rdma) in [("auto", Rdma::Auto), ("on", Rdma::On), ("off", Rdma::Off)] {
            assert_eq!(with(RDMA, value).expect("one").rdma, rdma);
        }
    }

    #[test]
    fn what_is_configured_goes_before_the_environment() {
        let nothing = Configuration::parse("{}").expect("no settings");
        let environment = with(ALIASES, "off").expect("a setting");
        let unchanged = configured_with(&nothing, ALIASES, "off");
        assert_eq!(unchanged.expect("a setting"), environment);
        let all = r#"{"limit": 4096, "preset": "fast", "tenant": "a", "ledger": "/b",
            "ledger_limit": 1073741824, "guarantee": 2048, "priority": -3, "peers": [1, 0], "aliases": true, "stream_waits": false,
            "rdma": "on", "shareable": true}"#;
        let all = Configuration::parse(all).expect("settings");
        let expected = Settings {
            limit: Some(4096),
            limit_name: "the setting limit",
            tenant: "a".to_owned(),
            ledger: Some("/b".into()),
            ledger_limit: Some(1 << 30),
            guarantee: 2048,
            priority: -3,
            mapper: true,
            preset: Preset::Fast,
            aliases: true,
            waits: false,
            peers: vec![1, 0],
            rdma: Rdma::On,
            shareable: true,
        };
        assert_eq!(configured_with(&all, RDMA, "off").expect("both"), expected);
        let overridden = configured_with(&all, ALIASES, "off");
        assert_eq!(overridden.expect("settings"), expected);
    }

    #[test]
    fn later_settings_go_over_earlier_ones() {
        let parse = |json: &str| Configuration::parse(json).expect("settings");
        let earlier = parse(
            r#"{"limit": 4096, "preset": "fast", "tenant": "a", "ledger": "/b", "peers": [0, 1],
                "aliases": false, "stream_waits": false, "rdma": "off", "shareable": true}"#,
        );
        let nothing = parse("{}").over(earlier.clone());
        assert_eq!(nothing.expect("as before"), earlier);
        let later = r#"{"limit": 8192, "ledger_limit": 1024, "guarantee": 512, "priority": 1,
            "peers": [], "stream_waits": true, "rdma": "auto", "shareable": false}"#;
        let merged = parse(later).over(earlier.clone()).expect("both");
        let expected = Configuration {
            limit: Some(8192),
            ledger_limit: Some(1024),
            guarantee: Some(512),
            priority: Some(1),
            peers: Some(Vec::new()),
            stream_waits: Some(true),
            rdma: Some(Rdma::Auto),
            shareable: Some(false),
            ..earlier
        };
        assert_eq!(merged, expected);
        for name in ["ledger_limit", "guarantee", "priority"] {
            let alone = parse(&format!(r#"{{"{name}": 1024}}"#)).over(Configuration::default());
            let error = alone.expect_err("no directory").to_string();
            assert!(error.contains("must be given with `ledger`"), "{error}");
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn other_settings_are_refused_by_name() {
        for (json, text) in [
            ("", "not understood"),
            ("[]", "not understood"),
            (r#"{"limits": 1}"#, "unknown field `limits`"),
            (r#"{"limit": -1}"#, "-1"),
            (r#"{"limit": 0}"#, "the setting limit is 0"),
            (r#"{"preset": "slow"}"#, "slow"),
            (r#"{"tenant": ""}"#, "the setting tenant is empty"),
            (r#"{"peers": [1, 0, 1]}"#, "the setting peers is [1, 0, 1]"),
            (r#"{"peers": [64]}"#, "the setting peers is [64]"),
            (r#"{"peers": [-1]}"#, "-1"),
            (r#"{"aliases": "on"}"#, "on"),
            (r#"{"rdma": true}"#, "not understood"),
            (r#"{"rdma": "yes"}"#, "yes"),
        ] {
            let error = Configuration::parse(json).expect_err(json).to_string();
            assert!(error.contains(text), "{json}: {error}");
        }
    }

    #[test]
    fn other_values_are_refused_by_name() {
        for (name, values) in [
            (LIMIT, &["0", "-1", "all", "5 parsecs", "0.1"][..]),
            (PRESET, &["Tight", "slow", " fast"]),
            (ALIASES, &["1", "yes", "ON"]),
            (STREAM_WAITS, &["0", "no"]),
            (MAPPER, &["1"]),
            (RDMA, &["Auto", "true"]),
        ] {
            for value in values {
                let error = with(name, value).expect_err(value).to_string();
                assert!(error.contains(name) && error.contains(value), "{error}");
            }
        }
    }
}
