//! Code that the types must reject does not compile, with the expected compiler errors.
//!
//! The compiler is started for each file with the library that cargo has built for this test. What it
//! says is stored beside the file: the place, the code and the message of each error, the labels, and
//! the notes. If a newer compiler words it differently, run with `CUVMM_OVERWRITE=1`, and check that
//! the error codes are unchanged.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::SystemTime;

use serde_json::Value;

/// Compiles only with a library that has all features, and with the cudarc that it was built with.
const FITS: &str = "
pub fn fits(
    slice: &mut cuvmm::cudarc::Slice<f32, cuvmm::DeviceVec<f32>>,
    _: &cuvmm::dlpack::Tensor,
) -> usize {
    slice.try_slice_mut(0..1).map_or(0, |part| cudarc::driver::DeviceSlice::len(&part))
}
";

/// The libraries that programs are compiled with.
struct Libraries {
    /// The folder of all that cargo has built.
    folder: PathBuf,
    cuvmm: PathBuf,
    cudarc: PathBuf,
}

impl Libraries {
    /// Finds the newest ones that fit. There can be several, built with other features.
    fn find() -> Self {
        let folder = std::env::current_exe().unwrap();
        let folder = folder.parent().unwrap().to_owned();
        let scratch = tempfile::tempdir().unwrap();
        let program = scratch.path().join("fits.rs");
        fs::write(&program, FITS).unwrap();
        for cuvmm in newest(&folder, "libcuvmm-") {
            for cudarc in newest(&folder, "libcudarc-") {
                let found = Self {
                    folder: folder.clone(),
                    cuvmm: cuvmm.clone(),
                    cudarc,
                };
                if found.compile(&program).status.success() {
                    return found;
                }
            }
        }
        panic!("no library in {} has all features", folder.display())
    }

    fn compile(&self, program: &Path) -> Output {
        let scratch = tempfile::tempdir().unwrap();
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let mut command = Command::new(rustc);
        command
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args(["--edition=2024", "--crate-type=lib", "--crate-name=program"])
            .args(["--emit=metadata", "--error-format=json", "--out-dir"])
            .arg(scratch.path())
            .arg("-L")
            .arg(format!("dependency={}", self.folder.display()));
        for (name, file) in [("cuvmm", &self.cuvmm), ("cudarc", &self.cudarc)] {
            command
                .arg("--extern")
                .arg(format!("{name}={}", file.display()));
        }
        command.arg(program).output().unwrap()
    }
}

/// Returns the libraries in a folder whose names begin like this, the newest first.
fn newest(folder: &Path, begin: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap());
    let mut found: Vec<(SystemTime, PathBuf)> = files
        .filter(|file| {
            let name = file.file_name();
            let name = name.to_string_lossy();
            name.starts_with(begin) && name.ends_with(".rlib")
        })
        .map(|file| (file.metadata().unwrap().modified().unwrap(), file.path()))
        .collect();
    found.sort();
    found.into_iter().rev().map(|(_, path)| path).collect()
}

/// Returns what the compiler said, without what a change of the library alone would change: lines of
/// its files, and how many types implement a trait.
fn said(output: &Output) -> String {
    let mut text = String::new();
    for line in String::from_utf8_lossy(&output.stderr).lines() {
        let message: Value = serde_json::from_str(line).unwrap();
        let of_a_place = message["spans"].as_array().is_some_and(|it| !it.is_empty());
        if of_a_place {
            if !text.is_empty() {
                text.push('\n');
            }
            tell(&message, "", &mut text);
        }
    }
    text
}

/// Writes a message and those that belong to it.
fn tell(message: &Value, indent: &str, text: &mut String) {
    let (level, code) = (&message["level"], message["code"]["code"].as_str());
    let code = code.map(|code| format!("[{code}]")).unwrap_or_default();
    let words = words(message["message"].as_str().unwrap());
    writeln!(text, "{indent}{}{code}: {words}", level.as_str().unwrap()).unwrap();
    for span in message["spans"].as_array().unwrap() {
        let file = span["file_name"].as_str().unwrap();
        // Files of the library and of other crates are not the program's.
        let Some(file) = file.strip_prefix("tests/") else {
            continue;
        };
        let sign = if span["is_primary"] == true { '^' } else { '-' };
        let (line, from, to) = (
            &span["line_start"],
            &span["column_start"],
            &span["column_end"],
        );
        let label = span["label"].as_str().unwrap_or_default();
        let told = format!("{indent}  {sign} {file}:{line}:{from}-{to} {label}");
        writeln!(text, "{}", told.trim_end()).unwrap();
    }
    for child in message["children"].as_array().unwrap() {
        tell(child, &format!("{indent}  "), text);
    }
}

/// Returns a message without the number of types that it leaves out.
fn words(message: &str) -> String {
    let lines = message.lines().map(
        |line| match line.trim().split(' ').collect::<Vec<_>>()[..] {
            ["and", _, "others"] => "and others",
            _ => line.trim(),
        },
    );
    lines.collect::<Vec<_>>().join(" | ")
}

#[test]
fn what_the_types_forbid_does_not_compile() {
    let libraries = Libraries::find();
    let overwrite = std::env::var_os("CUVMM_OVERWRITE").is_some();
    let mut wrong = Vec::new();
    let mut programs = 0;
    for folder in ["types", "cudarc", "dlpack"] {
        let place = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests")
            .join(folder);
        for file in fs::read_dir(place).unwrap() {
            let file = file.unwrap().path();
            if file.extension().is_none_or(|it| it != "rs") {
                continue;
            }
            programs += 1;
            let program = Path::new("tests")
                .join(folder)
                .join(file.file_name().unwrap());
            let output = libraries.compile(&program);
            let (said, expected) = (said(&output), file.with_extension("stderr"));
            if overwrite {
                fs::write(&expected, &said).unwrap();
            }
            let wanted = fs::read_to_string(&expected).unwrap_or_default();
            if output.status.success() || said != wanted {
                wrong.push(format!("{}: rustc says\n{said}", program.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(programs > 10, "{programs} programs are there");
}
