//! Everything of a release but the upload: versions, the changelog, the packages of all crates, and the
//! wheels with their metadata.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::cargo;
use crate::house;

/// The manifest of the crate that is a workspace of its own.
const CANDLE: &str = "integrations/candle/Cargo.toml";

/// The programs that build a wheel: of the package `cuvmm`, and of `fakecuda`.
const WHEELS: [&str; 2] = ["python/build.py", "stand-in/fakecuda/python/build.py"];

/// Do everything of a release but the upload.
///
/// Needs a registry to resolve dependencies, Python with `venv`, and PyPI for `twine`.
#[derive(Debug, clap::Args)]
pub(crate) struct Release {
    /// Upload nothing. A release is uploaded by hand, after this.
    #[arg(long, required = true)]
    dry_run: bool,

    /// Package and do not build from the packages, which takes minutes.
    #[arg(long)]
    no_verify: bool,

    /// Take files that are not committed.
    #[arg(long)]
    allow_dirty: bool,
}

impl Release {
    pub(crate) fn run(self) -> Result<()> {
        debug_assert!(self.dry_run);
        let root = cargo::workspace();
        let version = versions()?;
        changelog(
            &std::fs::read_to_string(root.join("CHANGELOG.md"))?,
            &version,
        )?;
        // It resolves crates of the workspace that no registry has yet. Cargo keeps what it unpacked by
        // the folder and the version, and in one folder builds the packages of the first run again.
        let folder = tempfile::tempdir_in(root.join("target"))?;
        let mut publish = self.packaging(&["publish", "--workspace", "--dry-run"]);
        done(publish.arg("--target-dir").arg(folder.path()))?;
        // Its package cannot be resolved before `cuvmm` is in the registry, so only its files are listed.
        let list = ["package", "--list", "--manifest-path", CANDLE];
        done(cargo::command().args(list).args(self.dirty()))?;
        let wheels = wheels(&root.join("target/release-wheels"))?;
        println!(
            "version {version} can be uploaded: {} wheels in {}",
            wheels.len(),
            root.join("target/release-wheels").display()
        );
        Ok(())
    }

    fn packaging(&self, arguments: &[&str]) -> Command {
        let mut command = cargo::command();
        command.args(arguments).args(self.dirty());
        if self.no_verify {
            command.arg("--no-verify");
        }
        command
    }

    fn dirty(&self) -> &[&str] {
        if self.allow_dirty {
            &["--allow-dirty"]
        } else {
            &[]
        }
    }
}

/// Returns the version of all published packages.
fn versions() -> Result<String> {
    let mut found: Option<(String, String)> = None;
    for manifest in ["Cargo.toml", CANDLE] {
        let metadata = house::metadata(Path::new(manifest))?;
        for package in metadata.packages.iter().filter(|it| it.is_published()) {
            let (first, version) =
                found.get_or_insert_with(|| (package.name.clone(), package.version.clone()));
            ensure!(
                *version == package.version,
                "{} has version {}, and {first} has {version}",
                package.name,
                package.version
            );
        }
    }
    found
        .map(|(_, version)| version)
        .context("no package is published")
}

/// Checks that the changelog has entries for a version, or unreleased ones that are to be moved there.
fn changelog(text: &str, version: &str) -> Result<()> {
    let sections = text.split("\n## [").skip(1);
    let mut entries = sections.filter_map(|section| {
        let (name, rest) = section.split_once(']')?;
        rest.contains("\n- ").then_some(name)
    });
    ensure!(
        entries.any(|name| name == version || name == "Unreleased"),
        "CHANGELOG.md has no entries for {version}, and none that are unreleased"
    );
    Ok(())
}

/// Builds the wheels in a folder, and checks their metadata as PyPI does.
fn wheels(folder: &Path) -> Result<Vec<PathBuf>> {
    if folder.exists() {
        std::fs::remove_dir_all(folder)?;
    }
    for build in WHEELS {
        done(python("python3").arg(build).arg("--out").arg(folder))?;
    }
    let env = cargo::workspace().join("target/release-env");
    done(python("python3").args(["-m", "venv"]).arg(&env))?;
    let own = env.join("bin/python");
    let install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "twine",
    ];
    done(python(&own).args(install))?;
    let files = std::fs::read_dir(folder)?.map(|file| Ok(file?.path()));
    let files = files.collect::<Result<Vec<PathBuf>>>()?;
    let is_wheel = |file: &PathBuf| file.extension().is_some_and(|kind| kind == "whl");
    let wheels: Vec<PathBuf> = files.into_iter().filter(is_wheel).collect();
    ensure!(
        wheels.len() == WHEELS.len(),
        "{} wheels were built",
        wheels.len()
    );
    done(
        python(&own)
            .args(["-m", "twine", "check", "--strict"])
            .args(&wheels),
    )?;
    Ok(wheels)
}

fn python(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(cargo::workspace());
    command
}

fn done(mut command: impl std::borrow::BorrowMut<Command>) -> Result<()> {
    let command = command.borrow_mut();
    println!("{command:?}");
    cargo::succeed(command)
}

#[cfg(test)]
mod tests {
    use super::{changelog, versions};

    #[test]
    fn published_packages_have_one_version() {
        assert!(!versions().unwrap().is_empty());
    }

    #[test]
    fn a_version_without_entries_is_refused() {
        let begun = "# Changelog\n\n## [Unreleased]\n\n### Added\n- A thing.\n";
        changelog(begun, "0.1.0").unwrap();
        let released = "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-01-01\n- A thing.\n";
        changelog(released, "0.1.0").unwrap();
        assert!(changelog(released, "0.2.0").is_err());
        assert!(changelog("# Changelog\n- no version\n", "0.1.0").is_err());
    }
}
