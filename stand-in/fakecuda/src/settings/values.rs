//! Settings by name, and the parsing of their texts.

use std::str::FromStr;

use cuvmm_model::model::{Costs, Manner};
use cuvmm_sys::CudaVersion;

use crate::recorded::{self, Gpu};

use super::{Leaks, NEWEST, Settings, Target, Work, faults};

/// Sets one setting. The error describes the expected value.
pub(super) fn set(settings: &mut Settings, name: &str, text: &str) -> Result<(), String> {
    let text = text.trim();
    match name {
        "devices" => settings.devices = number(text, 0, 64)? as u16,
        "capacity" => settings.capacity = Some(size(text)?),
        "name" => settings.name = text.to_owned(),
        "gpu" => {
            let found = gpu(text)?;
            settings.capacity = Some(found.memory);
            settings.name.clone_from(&found.name);
            settings.gpu = Some(found);
        }
        "version" => settings.version = version(text)?,
        "latency" => settings.latency = latency(text)?,
        "manner" => {
            settings.manner = word(
                text,
                &[
                    ("measured", Manner::AsMeasured),
                    ("strict", Manner::Strict),
                    ("hostile", Manner::Hostile),
                ],
            )?;
        }
        "seed" => settings.seed = number(text, 0, u64::MAX)?,
        "work" => {
            settings.work = word(text, &[("at-once", Work::AtOnce), ("late", Work::Late)])?;
        }
        "fail" => settings.fail = faults::parse(text)?,
        "report" => settings.report = Some(target(text)?),
        "report_format" => settings.json = word(text, &[("text", false), ("json", true)])?,
        "leaks" => {
            let words = [
                ("memory", Leaks::Memory),
                ("all", Leaks::All),
                ("none", Leaks::None),
            ];
            settings.leaks = word(text, &words)?;
        }
        "unwritten" => settings.unwritten = word(text, &[("0", false), ("1", true)])?,
        "exit_code" => settings.exit_code = Some(number(text, 1, 255)? as u8),
        _ => return Err("there is no such setting".to_owned()),
    }
    Ok(())
}

fn number(text: &str, least: u64, most: u64) -> Result<u64, String> {
    match u64::from_str(text) {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("it must be a number from {least} to {most}")),
    }
}

fn word<T: Copy>(text: &str, words: &[(&str, T)]) -> Result<T, String> {
    if let Some((_, value)) = words.iter().find(|(word, _)| *word == text) {
        return Ok(*value);
    }
    let names: Vec<_> = words.iter().map(|(word, _)| *word).collect();
    let (last, rest) = names.split_last().ok_or("no value is right")?;
    Err(format!("it must be {} or {last}", rest.join(", ")))
}

/// Parses a size: a number of bytes, or a number with a unit of 1,024 or 1,000.
fn size(text: &str) -> Result<u64, String> {
    let wrong = || "it must be a size in bytes, or like 512MiB or 80GiB".to_owned();
    let end = text.find(|letter: char| !letter.is_ascii_digit());
    let (digits, unit) = text.split_at(end.unwrap_or(text.len()));
    let unit = unit.trim_start().to_ascii_lowercase();
    let unit = unit.strip_suffix('b').unwrap_or(&unit);
    let (letter, base) = match unit.strip_suffix('i') {
        Some(letter) => (letter, 1024_u64),
        None => (unit, 1000),
    };
    let power = match letter {
        "" if base == 1000 => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return Err(wrong()),
    };
    let count = u64::from_str(digits).map_err(|_| wrong())?;
    count.checked_mul(base.pow(power)).ok_or_else(wrong)
}

fn version(text: &str) -> Result<CudaVersion, String> {
    let oldest = CudaVersion::OLDEST_SUPPORTED;
    let parsed = text.split_once('.').and_then(|(major, minor)| {
        let minor = minor.parse().ok().filter(|minor| *minor < 10)?;
        Some(CudaVersion::new(major.parse().ok()?, minor))
    });
    match parsed {
        Some(version) if (oldest..=NEWEST).contains(&version) => Ok(version),
        _ => Err(format!(
            "it must be a CUDA version like 12.2, from {oldest} to {NEWEST}"
        )),
    }
}

fn gpu(text: &str) -> Result<Gpu, String> {
    recorded::find(text).ok_or_else(|| {
        let names = recorded::names().join(", ");
        format!("it must be a GPU whose answers are recorded: {names}")
    })
}

fn latency(text: &str) -> Result<Option<Costs>, String> {
    if text == "none" {
        return Ok(None);
    }
    if let Some(costs) = Costs::of_gpu(text) {
        return Ok(Some(costs));
    }
    let names: Vec<_> = Costs::gpus().collect();
    let read = super::file::text(text).map_err(|error| {
        format!(
            "it must be none, the name of a GPU that was measured ({}), or a readable file of \
             costs: {error}",
            names.join(", ")
        )
    })?;
    read.parse().map(Some).map_err(|error| format!("{error}"))
}

/// Parses the target of the report, and checks that a file can be written.
fn target(text: &str) -> Result<Target, String> {
    if ["-", "stderr"].contains(&text) {
        return Ok(Target::Stderr);
    }
    if text.is_empty() {
        return Err("it must be a file's name, or - for standard error".to_owned());
    }
    // The program may change its folder before it ends.
    let path = std::path::absolute(text).map_err(|error| error.to_string())?;
    let now = super::file_of(&path, std::process::id());
    let mut open = std::fs::OpenOptions::new();
    open.append(true)
        .create(true)
        .open(&now)
        .map_err(|error| format!("the report cannot be written there: {error}"))?;
    Ok(Target::File(path))
}
