//! The GPUs whose answers `conformance-c` recorded: name, memory and attributes.
//!
//! Each is a file `edges-GPU-DRIVER.tsv` of `stand-in/conformance/answers`; a new file there adds a
//! GPU.

use std::collections::BTreeMap;

/// The short name of each GPU, with its file.
const FILES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/recorded.rs"));

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub(crate) name: String,
    pub(crate) memory: u64,
    pub(crate) attributes: BTreeMap<i32, i32>,
}

pub(crate) fn names() -> Vec<&'static str> {
    let mut names: Vec<_> = FILES.iter().map(|&(name, _)| name).collect();
    names.dedup();
    names
}

/// Returns a GPU by name: `h200`, also written `nvidia-h200` or `NVIDIA H200`. Of several
/// recordings the last by name is used.
pub(crate) fn find(name: &str) -> Option<Gpu> {
    let wanted = name.to_lowercase().replace([' ', '_'], "-");
    let wanted = wanted.strip_prefix("nvidia-").unwrap_or(&wanted);
    let (_, text) = FILES.iter().rev().find(|(name, _)| *name == wanted)?;
    read(text)
}

/// Reads lines of a question, a tab and an answer.
fn read(text: &str) -> Option<Gpu> {
    let answers: BTreeMap<_, _> = text
        .lines()
        .filter_map(|line| {
            let (question, answer) = line.split_once('\t')?;
            Some((question, answer.strip_prefix("SUCCESS ")?))
        })
        .collect();
    let attributes = answers.iter().filter_map(|(question, answer)| {
        let number = question.strip_prefix("attribute.")?;
        Some((number.parse().ok()?, answer.parse().ok()?))
    });
    Some(Gpu {
        name: (*answers.get("device.identity.name")?).to_owned(),
        memory: answers.get("device.identity.total")?.parse().ok()?,
        attributes: attributes.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gpu_that_answered_has_a_link_here() {
        let answers = concat!(env!("CARGO_MANIFEST_DIR"), "/../conformance/answers");
        let files = std::fs::read_dir(answers).unwrap();
        let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let edges = files.filter(|name| name.starts_with("edges-") && name.ends_with(".tsv"));
        assert_eq!(edges.count(), FILES.len());
    }

    #[test]
    fn every_recording_has_a_name_memory_and_attributes() {
        for name in names() {
            let gpu = find(name).unwrap();
            assert!(
                gpu.name.to_lowercase().contains(name) && gpu.memory > 1 << 30,
                "{name}: {gpu:?}"
            );
            assert!(gpu.attributes.len() > 100, "{name}");
            assert_eq!(find(&format!("NVIDIA {}", name.to_uppercase())), Some(gpu));
        }
        let h200 = find("nvidia-h200").unwrap();
        assert_eq!((h200.memory, h200.attributes[&16]), (150_109_880_320, 132));
        assert_eq!(find("abacus"), None);
    }

    #[test]
    fn a_recording_of_another_gpu_is_read() {
        let text = "# The answers of a GPU.\nattribute.0\tINVALID_VALUE\nattribute.16\tSUCCESS 7\n\
                    device.identity.name\tSUCCESS NVIDIA Abacus\ndevice.identity.total\tSUCCESS 4096\n";
        let gpu = read(text).unwrap();
        assert_eq!((gpu.name.as_str(), gpu.memory), ("NVIDIA Abacus", 4096));
        assert_eq!(gpu.attributes, BTreeMap::from([(16, 7)]));
        assert_eq!(read("attribute.16\tSUCCESS 7\n"), None);
    }
}
