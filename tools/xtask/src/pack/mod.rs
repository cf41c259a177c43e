//! Packing the files that a machine with a GPU and without cargo needs: the release commands, the
//! tests that need a GPU, the conformance programs, the recorded answers, the DLPack test for
//! Python, PyTorch's allocator and its comparison, the Python package with its tests and examples, and
//! a script that runs them.
//!
//! A test program needs a GPU if its name begins with `gpu` or if it reads `CUVMM_REQUIRE_GPU`. Such a
//! program starts neither command, because the path that cargo compiles in is that of the machine that
//! built it. The script starts them.

mod built;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::cargo::{self, succeed};
use built::{Built, Place};

/// The test that uses the library's memory in PyTorch and CuPy.
const DLPACK: &str = include_str!("../../../../crates/cuvmm/tests/python/dlpack.py");

/// The maximum size of the pack in bytes.
const MOST: u64 = 96 << 20;

/// Pack the commands and the tests for a machine that has no cargo.
#[derive(Debug, clap::Args)]
pub(crate) struct Pack {
    /// The folder to write. Files that an earlier run wrote there are replaced.
    folder: PathBuf,
}

impl Pack {
    pub(crate) fn run(self) -> Result<()> {
        // Cargo starts this program in the user's folder, and is itself started in the workspace.
        let folder = std::path::absolute(&self.folder)?;
        clear(&folder)?;
        let mut built = Vec::new();
        for arguments in builds()? {
            built.extend(built::build(&arguments)?);
        }
        for Built { place, file, name } in &built {
            let to = match place {
                Place::Program => folder.join("bin"),
                Place::Library => folder.join("lib"),
                Place::Test => folder.join("tests"),
            };
            std::fs::create_dir_all(&to)?;
            copy_stripped(file, &to.join(name))?;
        }
        let answers = folder.join("answers");
        std::fs::create_dir_all(&answers)?;
        for file in files_in(&cargo::workspace().join("stand-in/conformance/answers"))? {
            copy(&file, &answers.join(file.file_name().unwrap_or_default()))?;
        }
        std::fs::write(folder.join("dlpack.py"), DLPACK)?;
        let bench = folder.join("bench");
        std::fs::create_dir_all(&bench)?;
        for file in files_in(&cargo::workspace().join("crates/cuvmm-torch/bench"))? {
            copy(&file, &bench.join(file.file_name().unwrap_or_default()))?;
        }
        python(&folder.join("python"))?;
        let script = folder.join("run.sh");
        std::fs::write(&script, include_str!("run.sh"))?;
        succeed(Command::new("chmod").arg("+x").arg(&script))?;
        let bytes = report(&folder)?;
        ensure!(
            bytes <= MOST,
            "the pack holds {bytes} bytes, more than {MOST}: does every packed test need a GPU?"
        );
        Ok(())
    }
}

/// Builds the wheel of the Python package into a folder, with the tests, examples and comparisons
/// beside it.
fn python(folder: &Path) -> Result<()> {
    let package = cargo::workspace().join("python");
    succeed(
        Command::new("python3")
            .arg("-B")
            .arg(package.join("build.py"))
            .arg("--out")
            .arg(folder),
    )?;
    for part in ["tests", "examples", "bench"] {
        let to = folder.join(part);
        std::fs::create_dir_all(&to)?;
        for file in files_in(&package.join(part))? {
            copy(&file, &to.join(file.file_name().unwrap_or_default()))?;
        }
    }
    Ok(())
}

fn builds() -> Result<Vec<Vec<String>>> {
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    let mut builds: Vec<Vec<String>> = vec![owned(&[
        "build",
        "--package=cuvmm-cli",
        "--package=cuvmm-bench",
        "--package=conformance",
        "--package=fakecuda",
        "--package=cuvmm-torch",
    ])];
    builds.push(owned(&[
        "build",
        "--package=cuvmm",
        "--all-features",
        "--example=dlpack_python",
    ]));
    // Those of `integrations` require nvcc, and are built by `cargo xtask candle build`.
    let mut packages = Vec::new();
    for folder in ["crates", "stand-in", "tests", "tools"] {
        packages.extend(folders_in(&cargo::workspace().join(folder))?);
    }
    for folder in packages {
        let mut tests = Vec::new();
        for program in test_programs(&folder.join("tests"))? {
            if let Some(name) = wants_a_gpu(&program)? {
                tests.push(format!("--test={name}"));
            }
        }
        if !tests.is_empty() {
            let manifest = folder.join("Cargo.toml");
            // Some tests require a feature.
            let mut build: Vec<String> = owned(&["test", "--no-run", "--all-features"]);
            build.push(format!("--manifest-path={}", manifest.display()));
            build.extend(tests);
            builds.push(build);
        }
    }
    Ok(builds)
}

/// Returns the files, and folders with a `main.rs`, that are test programs.
fn test_programs(tests: &Path) -> Result<Vec<PathBuf>> {
    entries(tests, |path| {
        is_rust(path) || path.join("main.rs").is_file()
    })
}

fn is_rust(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|extension| extension == "rs")
}

/// Returns the name of a test program, if it needs a GPU.
fn wants_a_gpu(program: &Path) -> Result<Option<&str>> {
    let Some(name) = program.file_stem().and_then(|name| name.to_str()) else {
        return Ok(None);
    };
    let mut wants = name.starts_with("gpu");
    let files = match program.is_dir() {
        true => entries(program, is_rust)?,
        false => vec![program.to_owned()],
    };
    for file in files {
        wants |= cargo::text(&file)?.contains("CUVMM_REQUIRE_GPU");
    }
    Ok(wants.then_some(name))
}

/// Removes the files that an earlier run wrote, and nothing else.
fn clear(folder: &Path) -> Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    let ours = folder.join("run.sh").is_file();
    let empty = std::fs::read_dir(folder)?.next().is_none();
    ensure!(
        ours || empty,
        "{} holds something that is not a pack",
        folder.display()
    );
    for name in ["bin", "lib", "tests", "answers", "bench", "python"] {
        let part = folder.join(name);
        if part.exists() {
            std::fs::remove_dir_all(&part).with_context(|| part.display().to_string())?;
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::copy(from, to).with_context(|| format!("copying {}", from.display()))?;
    Ok(())
}

fn copy_stripped(from: &Path, to: &Path) -> Result<()> {
    copy(from, to)?;
    // Stripping keeps what a loader needs of a library.
    succeed(Command::new("strip").arg("--strip-unneeded").arg(to))
}

fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    entries(folder, Path::is_file)
}

fn folders_in(folder: &Path) -> Result<Vec<PathBuf>> {
    entries(folder, Path::is_dir)
}

/// Returns the sorted entries of a folder, which need not exist.
fn entries(folder: &Path, wanted: fn(&Path) -> bool) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if folder.is_dir() {
        for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if wanted(&path) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

fn report(folder: &Path) -> Result<u64> {
    let mut total = 0;
    let mut folders = vec![folder.to_owned()];
    folders.extend(folders_in(folder)?);
    for part in &folders {
        for file in files_in(part)? {
            let bytes = std::fs::metadata(&file)?.len();
            total += bytes;
            println!("{bytes:>10}  {}", file.display());
        }
    }
    println!("{total:>10}  in all, of at most {MOST}");
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_says_that_it_wants_a_gpu() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let file = folder.path().join(name);
            std::fs::create_dir_all(file.parent().expect("in a folder")).expect("made");
            std::fs::write(file, text).expect("written");
        };
        write("gpu.rs", "");
        write("gpu.md", "");
        write("gpu_streams/main.rs", "mod one;");
        write("gpu_streams/one.rs", "");
        write("gpu_support/mod.rs", "");
        write("cuda_open.rs", "var_os(\"CUVMM_REQUIRE_GPU\")");
        write("driver/main.rs", "mod open;");
        write("driver/open.rs", "var_os(\"CUVMM_REQUIRE_GPU\")");
        write("pool.rs", "on the host");
        write("pools/main.rs", "on the host");
        let programs = test_programs(folder.path()).expect("read");
        let names: Vec<_> = programs
            .iter()
            .filter_map(|program| wants_a_gpu(program).expect("read"))
            .collect();
        assert_eq!(names, ["cuda_open", "driver", "gpu", "gpu_streams"]);
    }

    #[test]
    fn only_a_pack_is_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path();
        clear(&at.join("new")).expect("not there yet");
        clear(at).expect("empty");
        std::fs::create_dir(at.join("bin")).expect("made");
        std::fs::write(at.join("bin/mine"), "").expect("written");
        assert!(clear(at).is_err());
        assert!(at.join("bin/mine").exists());
        std::fs::write(at.join("run.sh"), "").expect("written");
        clear(at).expect("a pack");
        assert!(!at.join("bin").exists());
    }
}
