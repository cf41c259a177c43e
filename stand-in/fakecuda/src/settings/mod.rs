//! The settings from the environment and the file `FAKECUDA_CONFIG`, read once.
//!
//! A setting has one name: `capacity` in the file is `FAKECUDA_CAPACITY` in the environment, which
//! wins. A wrong name or value is printed once on standard error with its place, and `cuInit`
//! returns `SYSTEM_NOT_READY`: a test with other settings than it asked for would be worth nothing.

mod faults;
mod file;
mod values;

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cuvmm_model::model::{Costs, Manner};
use cuvmm_sys::CudaVersion;

use crate::recorded::Gpu;

pub(crate) use faults::{Planned, parse as parse_faults};

const NEWEST: CudaVersion = CudaVersion::new(13, 0);

/// Variables with this prefix that are not settings: they tell a command that starts programs where
/// the library is, and the library in a process of such a command that it has only to
/// [check the settings](Settings::checked).
const OTHERS: &[&str] = &["LIBRARY", "CHECK"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Stderr,
    /// A file, to which each process appends. `%p` in its name is the process's number.
    File(PathBuf),
}

/// Returns the file of a process's report.
pub(crate) fn file_of(path: &Path, pid: u32) -> PathBuf {
    let name = path.to_string_lossy();
    name.replace("%p", &pid.to_string()).into()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) enum Leaks {
    /// Objects that hold memory or addresses.
    #[default]
    Memory,
    /// Also streams, events, graphs and contexts.
    All,
    None,
}

/// The time at which a stream's work runs if nothing waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) enum Work {
    /// In the call that submits it.
    #[default]
    AtOnce,
    /// When a call waits for it, or asks a second time if it is done.
    Late,
}

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) devices: u16,
    pub(crate) capacity: Option<u64>,
    pub(crate) name: String,
    /// The recorded GPU that the devices take their attributes from, if any.
    pub(crate) gpu: Option<Gpu>,
    pub(crate) version: CudaVersion,
    /// The costs that calls take in real time; `None` for no time.
    pub(crate) latency: Option<Costs>,
    pub(crate) manner: Manner,
    pub(crate) seed: u64,
    pub(crate) work: Work,
    pub(crate) fail: Vec<Planned>,
    pub(crate) report: Option<Target>,
    pub(crate) json: bool,
    pub(crate) leaks: Leaks,
    pub(crate) unwritten: bool,
    pub(crate) exit_code: Option<u8>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            devices: 1,
            capacity: None,
            name: "fakecuda".to_owned(),
            gpu: None,
            version: NEWEST,
            latency: None,
            manner: Manner::AsMeasured,
            seed: 0,
            work: Work::AtOnce,
            fail: Vec::new(),
            report: None,
            json: false,
            leaks: Leaks::Memory,
            unwritten: false,
            exit_code: None,
        }
    }
}

impl Settings {
    /// Returns settings for a process that only had to read them: `cuInit` finds no device, and nothing
    /// is reported. Removes the file that was made for this process's report.
    fn checked(self) -> Self {
        if let Some(Target::File(path)) = &self.report {
            let own = file_of(path, std::process::id());
            if own != *path {
                let _ = std::fs::remove_file(own);
            }
        }
        Self {
            devices: 0,
            report: None,
            exit_code: None,
            ..self
        }
    }
}

struct Entry {
    text: String,
    place: String,
}

pub(crate) fn get() -> Result<&'static Settings, &'static str> {
    static SETTINGS: OnceLock<Result<Settings, String>> = OnceLock::new();
    let settings = SETTINGS.get_or_init(|| {
        let found = read(env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok()?;
            let name = name.strip_prefix("FAKECUDA_")?.to_owned();
            Some((name, value.to_string_lossy().into_owned()))
        }));
        if let Err(message) = &found {
            // Nothing better can be done if standard error is closed.
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("fakecuda: {message}; cuInit fails\n"),
            );
        }
        let is_check = env::var_os("FAKECUDA_CHECK").is_some();
        found.map(|settings| {
            if is_check {
                settings.checked()
            } else {
                settings
            }
        })
    });
    settings.as_ref().map_err(String::as_str)
}

/// Reads the settings from variables, named without their prefix, and from the file that they name.
fn read(variables: impl Iterator<Item = (String, String)>) -> Result<Settings, String> {
    let mut entries = BTreeMap::new();
    let mut file = None;
    for (name, text) in variables {
        if name == "CONFIG" {
            file = Some(text);
        } else if !OTHERS.contains(&name.as_str()) {
            let place = format!("FAKECUDA_{name}");
            entries.insert(name.to_lowercase(), Entry { text, place });
        }
    }
    if file.as_deref() == Some("") {
        return Err("FAKECUDA_CONFIG names no file".to_owned());
    }
    if let Some(path) = file {
        let mut found = BTreeMap::new();
        for (name, text) in file::read(&path).map_err(|what| format!("{path}: {what}"))? {
            let place = format!("{path}: {name}");
            if found
                .insert(
                    name,
                    Entry {
                        text,
                        place: place.clone(),
                    },
                )
                .is_some()
            {
                return Err(format!("{place}: it is set twice"));
            }
        }
        for (name, entry) in found {
            entries.entry(name).or_insert(entry);
        }
    }
    let mut settings = Settings::default();
    // The GPU comes first, because its name and memory are defaults that other settings replace.
    if let Some(entry) = entries.remove("gpu") {
        values::set(&mut settings, "gpu", &entry.text)
            .map_err(|what| format!("{}={}: {what}", entry.place, entry.text))?;
    }
    for (name, Entry { text, place }) in &entries {
        values::set(&mut settings, name, text).map_err(|what| format!("{place}={text}: {what}"))?;
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(entries: &[(&str, &str)]) -> Result<Settings, String> {
        let pair = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        read(entries.iter().map(pair))
    }

    #[test]
    fn values_are_read_and_a_gpu_gives_defaults() {
        let found = settings(&[
            ("DEVICES", "2"),
            ("CAPACITY", "80GiB"),
            ("GPU", "h200"),
            ("VERSION", "12.2"),
            ("MANNER", "hostile"),
            ("SEED", "7"),
            ("WORK", "late"),
            ("FAIL", "cuMemCreate:3,cuMemMap:1-:INVALID_VALUE"),
            ("REPORT", "-"),
            ("REPORT_FORMAT", "json"),
            ("LEAKS", "all"),
            ("UNWRITTEN", "1"),
            ("EXIT_CODE", "9"),
            ("LIBRARY", "/anything"),
        ])
        .unwrap();
        assert_eq!((found.devices, found.capacity), (2, Some(80 << 30)));
        assert_eq!(found.name, "NVIDIA H200");
        assert_eq!(found.version, CudaVersion::new(12, 2));
        assert_eq!((found.manner, found.seed), (Manner::Hostile, 7));
        assert_eq!((found.work, found.leaks), (Work::Late, Leaks::All));
        assert_eq!(found.fail.len(), 2);
        assert_eq!(found.report, Some(Target::Stderr));
        assert!(found.json && found.unwritten);
        assert_eq!(found.exit_code, Some(9));
        let h200 = settings(&[("GPU", "NVIDIA H200")]).unwrap();
        assert_eq!(h200.capacity, Some(150_109_880_320));
        let h100 = settings(&[("GPU", "h100")]).unwrap();
        assert_eq!(h100.capacity, Some(85_017_493_504));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        for (name, value, said) in [
            (
                "DEVICES",
                "two",
                "FAKECUDA_DEVICES=two: it must be a number from 0 to 64",
            ),
            ("DEVICES", "65", "FAKECUDA_DEVICES=65: it must be"),
            (
                "CAPACITY",
                "80 GB of it",
                "a size in bytes, or like 512MiB or 80GiB",
            ),
            ("CAPACITY", "99999999999EiB", "a size in bytes"),
            (
                "VERSION",
                "12",
                "a CUDA version like 12.2, from 10.2 to 13.0",
            ),
            (
                "VERSION",
                "13.1",
                "a CUDA version like 12.2, from 10.2 to 13.0",
            ),
            ("MANNER", "bad", "measured, strict or hostile"),
            ("WORK", "soon", "at-once or late"),
            (
                "GPU",
                "abacus",
                "a GPU whose answers are recorded: h100, h200",
            ),
            (
                "LATENCY",
                "/no/such/file",
                "none, the name of a GPU that was measured",
            ),
            ("LEAKS", "some", "memory, all or none"),
            ("UNWRITTEN", "maybe", "0 or 1"),
            ("EXIT_CODE", "256", "a number from 1 to 255"),
            ("FAIL", "cuMemCreate", "CALL:N"),
            ("DEVICE", "1", "FAKECUDA_DEVICE=1: there is no such setting"),
            ("CONFIG", "/no/such/file.toml", "/no/such/file.toml: "),
            ("CONFIG", "", "FAKECUDA_CONFIG names no file"),
            ("CONFIG", "/dev/zero", "neither .toml nor .json"),
            ("LATENCY", "/dev/zero", "it has more than 1 MiB"),
        ] {
            let message = settings(&[(name, value)]).unwrap_err();
            assert!(message.contains(said), "{message}");
        }
    }

    #[test]
    fn the_readme_lists_every_setting() {
        let readme = include_str!("../../README.md");
        let source = include_str!("values.rs");
        let (_, arms) = source.split_once("match name {").unwrap();
        let (arms, _) = arms.split_once("_ => return Err").unwrap();
        let names = arms.lines().filter_map(|line| {
            let arm = line.trim_start().strip_prefix('"')?;
            Some(arm.split_once("\" =>")?.0.to_uppercase())
        });
        let names: Vec<_> = names.collect();
        assert_eq!(names.len(), 15, "{names:?}");
        for name in names
            .into_iter()
            .chain(["CONFIG".to_owned(), "LIBRARY".to_owned()])
        {
            let row = format!("| `FAKECUDA_{name}` |");
            assert!(readme.contains(&row), "{row}");
        }
    }

    #[test]
    fn a_file_holds_the_same_settings_and_the_environment_wins() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let toml = write(
            "a.toml",
            "devices = 3\ncapacity = \"1GiB\"\nfail = [\"cuMemMap:2\", \"cuMemCreate:1\"]\nunwritten = true\n",
        );
        let found = settings(&[("CONFIG", &toml), ("CAPACITY", "2GiB")]).unwrap();
        assert_eq!((found.devices, found.capacity), (3, Some(2 << 30)));
        assert_eq!(found.fail.len(), 2);
        assert!(found.unwritten);
        let json = write("a.json", r#"{"devices": 4, "capacity": 1073741824}"#);
        let found = settings(&[("CONFIG", &json)]).unwrap();
        assert_eq!((found.devices, found.capacity), (4, Some(1 << 30)));
        for (text, said) in [
            ("devices = 'x'", "devices=x: it must be a number"),
            ("device = 1", "device=1: there is no such setting"),
            ("devices = ", "devices = "),
            (
                "devices = {a = 1}",
                "devices is neither text, a number, a truth value nor a list",
            ),
        ] {
            let path = write("b.toml", text);
            let message = settings(&[("CONFIG", &path)]).unwrap_err();
            assert!(
                message.starts_with(&path) && message.contains(said),
                "{message}"
            );
        }
        for (name, text) in [
            ("d.json", r#"{"devices": 1, "devices": 2}"#),
            ("d.toml", "devices = 1\ndevices = 2\n"),
        ] {
            let path = write(name, text);
            let message = settings(&[("CONFIG", &path)]).unwrap_err();
            assert!(message.contains("devices"), "{message}");
        }
        let other = write("c.yaml", "devices: 1");
        let message = settings(&[("CONFIG", &other)]).unwrap_err();
        assert!(message.contains("neither .toml nor .json"), "{message}");
    }
}
