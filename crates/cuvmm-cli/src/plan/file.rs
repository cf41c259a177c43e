//! Plans as TOML files. `docs/plan.md` says how they are written.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use anyhow::anyhow;
use bytesize::ByteSize;
use cuvmm::error::PlanError;
use cuvmm::{Plan, Step};
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use toml::Spanned;

use cuvmm_cli::command::usage;
use cuvmm_cli::size;
use cuvmm_cli::terminal::{counted, shown};
use cuvmm_cli::{duration, files};

/// A plan, and where and how each of its steps is written.
#[derive(Debug)]
pub(super) struct File {
    name: String,
    pub(super) plan: Plan,
    lines: Vec<usize>,
    /// For people: what each step does.
    pub(super) does: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    step: Vec<Spanned<Verb>>,
}

/// A step as it is written: a table of one key, the verb.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Verb {
    Reserve(Named),
    Create(Named),
    Map(Map),
    Unmap(Unmap),
    Commit(Commit),
    Grow(Grow),
    Decommit(Decommit),
    Stripe(Stripe),
    Release(String),
    Wait(Span),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    name: String,
    size: Size,
    #[serde(default)]
    device: usize,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Map {
    physical: String,
    #[serde(rename = "in")]
    within: String,
    at: Size,
    #[serde(default)]
    access: Vec<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unmap {
    #[serde(rename = "in")]
    within: String,
    at: Size,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Commit {
    #[serde(rename = "in")]
    within: String,
    at: Option<Size>,
    size: Size,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Grow {
    #[serde(rename = "in")]
    within: String,
    to: Size,
    by: Size,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Decommit {
    #[serde(rename = "in")]
    within: String,
    at: Size,
    size: Size,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stripe {
    name: String,
    size: Size,
    unit: Size,
    devices: Vec<usize>,
    #[serde(default)]
    access: Vec<usize>,
}

/// Bytes: a number, or words like `2 MiB`.
#[derive(Clone, Copy, Debug)]
struct Size(u64);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Read;
        impl Visitor<'_> for Read {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, or words like \"2 MiB\"")
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Size, E> {
                let bytes = u64::try_from(number);
                let refused = || E::invalid_value(de::Unexpected::Signed(number), &self);
                Ok(Size(bytes.map_err(|_| refused())?))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                let wrong = |what| E::custom(format!("{text:?}: {what}"));
                Ok(Size(size::bytes(text).map_err(wrong)?))
            }
        }
        from.deserialize_any(Read)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&ByteSize(self.0).display().iec(), f)
    }
}

/// A time like `500 ms`.
#[derive(Clone, Debug)]
struct Span {
    time: Duration,
    written: String,
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Read;
        impl Visitor<'_> for Read {
            type Value = Span;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a time like \"500 ms\" or \"2 s\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Span, E> {
                let refused = || E::invalid_value(de::Unexpected::Str(text), &self);
                Ok(Span {
                    time: duration::parse(text).ok_or_else(refused)?,
                    written: text.to_owned(),
                })
            }
        }
        from.deserialize_str(Read)
    }
}

impl File {
    /// Reads a plan.
    ///
    /// # Errors
    /// Wrong usage: a file that cannot be read or is no plan, with the line.
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = files::text(path)?;
        Self::parse(shown(path), &text).map_err(|error| usage(error.to_string()))
    }

    fn parse(name: String, text: &str) -> anyhow::Result<Self> {
        let breaks: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
        let line_of = |offset: usize| 1 + breaks.partition_point(|&at| at < offset);
        let written: Written = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| line_of(span.start));
            anyhow!("{name}, line {line}: {}", error.message())
        })?;
        let lines = written.step.iter().map(|step| line_of(step.span().start));
        Ok(Self {
            lines: lines.collect(),
            does: written
                .step
                .iter()
                .map(|step| step.as_ref().to_string())
                .collect(),
            plan: written.step.into_iter().fold(Plan::new(), |plan, step| {
                plan.step(step.into_inner().step())
            }),
            name,
        })
    }

    /// Makes the error for a plan that is wrong, with the line.
    pub(super) fn wrong(&self, error: &PlanError) -> anyhow::Error {
        let line = error
            .step
            .and_then(|step| self.lines.get(step.checked_sub(1)?));
        match line {
            Some(line) => usage(format!("{}, line {line}: {error}", self.name)),
            None => usage(format!("{}: {error}", self.name)),
        }
    }

    /// How many devices the steps name.
    pub(super) fn devices(&self) -> usize {
        let steps = self.plan.steps().iter();
        let most = steps.filter_map(|step| match step {
            Step::Reserve { device, .. } | Step::Create { device, .. } => Some(*device),
            Step::Map { access, .. } => access.iter().max().copied(),
            Step::Stripe {
                devices, access, ..
            } => devices.iter().chain(access).max().copied(),
            _ => None,
        });
        most.max().unwrap_or(0).saturating_add(1)
    }
}

impl Verb {
    fn step(self) -> Step {
        match self {
            Self::Reserve(Named { name, size, device }) => Step::Reserve {
                name,
                size: size.0,
                device,
            },
            Self::Create(Named { name, size, device }) => Step::Create {
                name,
                size: size.0,
                device,
            },
            Self::Map(map) => Step::Map {
                physical: map.physical,
                within: map.within,
                offset: map.at.0,
                access: map.access,
            },
            Self::Unmap(Unmap { within, at }) => Step::Unmap {
                within,
                offset: at.0,
            },
            Self::Commit(Commit { within, at, size }) => Step::Commit {
                within,
                offset: at.map(|at| at.0),
                size: size.0,
            },
            Self::Grow(Grow { within, to, by }) => Step::Grow {
                within,
                to: to.0,
                by: by.0,
            },
            Self::Decommit(Decommit { within, at, size }) => Step::Decommit {
                within,
                offset: at.0,
                size: size.0,
            },
            Self::Stripe(stripe) => Step::Stripe {
                name: stripe.name,
                size: stripe.size.0,
                unit: stripe.unit.0,
                devices: stripe.devices,
                access: stripe.access,
            },
            Self::Release(name) => Step::Release { name },
            Self::Wait(Span { time, .. }) => Step::Wait { time },
        }
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reserve(Named { name, size, .. }) => write!(f, "reserve {size} as {name}"),
            Self::Create(Named { name, size, .. }) => write!(f, "create {size} as {name}"),
            Self::Map(Map {
                physical,
                within,
                at,
                ..
            }) => write!(f, "map {physical} in {within} at {at}"),
            Self::Unmap(Unmap { within, at }) => write!(f, "unmap in {within} at {at}"),
            Self::Commit(Commit {
                within, at, size, ..
            }) => match at {
                Some(at) => write!(f, "commit {size} in {within} at {at}"),
                None => write!(f, "commit {size} in {within}"),
            },
            Self::Grow(Grow { within, to, by }) => write!(f, "grow {within} to {to} by {by}"),
            Self::Decommit(Decommit { within, at, size }) => {
                write!(f, "decommit {size} in {within} at {at}")
            }
            Self::Stripe(Stripe {
                name,
                size,
                unit,
                devices,
                ..
            }) => write!(
                f,
                "stripe {size} as {name} over {} by {unit}",
                counted(devices.len() as u64, "device")
            ),
            Self::Release(name) => write!(f, "release {name}"),
            Self::Wait(Span { written, .. }) => write!(f, "wait {written}"),
        }
    }
}

#[cfg(test)]
mod tests;
