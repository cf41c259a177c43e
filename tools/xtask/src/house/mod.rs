//! Checks the layering of the project: which crates and modules may use which, and which practices
//! the source must not contain.
//!
//! The rules are in [`plan`]. [`crates`] reads the manifests, [`tree`] and [`mentions`] read the
//! source, and [`arrows`] and [`habits`] check it. [`circles`] finds the files of a crate that use
//! each other, by their [`calls`] of [`methods`] and their [`uses`] of paths. [`prose`] checks the
//! words, [`links`] the links of documents, and [`names`] the names of other libraries. Violations
//! are reported and not fixed.

mod arrows;
mod calls;
mod circles;
pub(crate) mod crates;
mod features;
mod habits;
mod invariants;
mod links;
mod mentions;
mod methods;
mod names;
mod plan;
mod prose;
mod tree;
mod uses;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::cargo;
use crates::{Metadata, Package};
use plan::Place;
use tree::Module;

/// Check that no use between crates or modules points upward, that there is no new cycle of files,
/// and that no file contains a forbidden practice.
#[derive(Debug, clap::Args)]
pub(crate) struct House {}

impl House {
    pub(crate) fn run(self) -> Result<()> {
        let Inspection {
            files, complaints, ..
        } = inspect()?;
        for complaint in &complaints {
            eprintln!("{complaint}");
        }
        ensure!(
            complaints.is_empty(),
            "{} complaints in {files} files",
            complaints.len()
        );
        println!("{files} files checked, no violations");
        Ok(())
    }
}

/// A violation and its place.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Complaint {
    file: PathBuf,
    /// The line; 0 for the file as a whole.
    line: usize,
    what: String,
}

impl Complaint {
    fn at(file: &Path, line: usize, what: impl Into<String>) -> Self {
        Self {
            file: file.to_owned(),
            line,
            what: what.into(),
        }
    }

    fn in_file(file: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::at(file.as_ref(), 0, what)
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        if self.line > 0 {
            write!(f, "{}:", self.line)?;
        }
        write!(f, " {}", self.what)
    }
}

/// The files read and the complaints found so far.
#[derive(Default)]
struct Inspection {
    files: usize,
    complaints: Vec<Complaint>,
    /// The methods that the crates read so far make available, including those of the crates below
    /// them.
    shown: BTreeMap<&'static str, BTreeSet<String>>,
}

/// The project's workspaces besides the main one.
const OUTSIDE: &[&str] = &["integrations/candle/Cargo.toml"];

pub(crate) fn metadata(manifest: &Path) -> Result<Metadata> {
    let mut command = cargo::command();
    command.args(["metadata", "--no-deps", "--format-version=1"]);
    let said = cargo::output(command.arg("--manifest-path").arg(manifest))?;
    Metadata::parse(&said)
}

fn inspect() -> Result<Inspection> {
    let root = cargo::workspace();
    let mut metadata = metadata(&root.join("Cargo.toml"))?;
    for manifest in OUTSIDE {
        metadata
            .packages
            .extend(self::metadata(&root.join(manifest))?.packages);
    }
    // From the bottom up, so that the methods of a crate's dependencies are known when it is read.
    metadata
        .packages
        .sort_by_key(|package| plan::height(&package.name));
    let mut inspection = Inspection {
        complaints: crates::check(&metadata),
        ..Inspection::default()
    };
    for package in &metadata.packages {
        inspection.read(package)?;
    }
    inspection.complaints.extend(prose::check(root)?);
    inspection.complaints.extend(links::check(root)?);
    inspection.complaints.extend(names::check(root)?);
    inspection.complaints.extend(invariants::check(root)?);
    inspection
        .complaints
        .extend(features::check(root, &metadata)?);
    let complaints = &mut inspection.complaints;
    complaints.extend(crates::check_packages(&metadata));
    for complaint in &mut *complaints {
        if let Ok(short) = complaint.file.strip_prefix(root) {
            complaint.file = short.to_owned();
        }
    }
    complaints.sort();
    complaints.dedup();
    Ok(inspection)
}

impl Inspection {
    fn read(&mut self, package: &Package) -> Result<()> {
        let Some(place) = plan::place(&package.name) else {
            // The check of the manifests has reported this.
            return Ok(());
        };
        let manifest = Path::new(&package.manifest_path);
        let text = cargo::text(manifest)?;
        let mut sources = package.targets.iter().filter(|target| target.is_source());
        // A package of tests alone has lints of its own.
        if sources.next().is_some() && !text.contains("[lints]\nworkspace = true") {
            let what = "does not take the workspace's lints";
            self.complaints.push(Complaint::in_file(manifest, what));
        }
        let elsewhere = self.shown_by(place.uses);
        let (mut reached, mut circles) = (BTreeSet::new(), Vec::new());
        let mut shown = elsewhere.clone();
        for target in package.targets.iter().filter(|target| target.is_source()) {
            let modules = tree::modules(Path::new(&target.src_path), &mut self.complaints)?;
            self.files += modules.len();
            self.complaints.extend(arrows::check(place, &modules));
            circles.extend(circles::find(place, &modules, &elsewhere));
            shown.extend(calls::shown(&modules));
            self.complaints.extend(habits::check(place, &modules));
            reached.extend(modules.into_iter().map(|module| module.file));
        }
        self.shown.insert(place.name, shown);
        let listed = plan::circles(place.name);
        self.complaints
            .extend(circles::check(place.name, &circles, &listed));
        let folder = manifest.parent().context("a manifest lies in a folder")?;
        self.complaints
            .extend(tree::unreached(&folder.join("src"), &reached)?);
        for name in ["tests", "benches", "examples"] {
            for file in tree::rust_files(&folder.join(name))? {
                self.read_test(place, &file)?;
            }
        }
        Ok(())
    }

    /// Returns the methods that any of these crates makes available.
    fn shown_by(&self, crates: &[&str]) -> BTreeSet<String> {
        crates
            .iter()
            .filter_map(|name| self.shown.get(name))
            .flatten()
            .cloned()
            .collect()
    }

    fn read_test(&mut self, place: &Place, file: &Path) -> Result<()> {
        // A compile-fail test need not be valid Rust.
        if file
            .components()
            .any(|part| part.as_os_str() == "compile-fail")
        {
            return Ok(());
        }
        let text = cargo::text(file)?;
        if text.trim().is_empty() {
            self.complaints.push(Complaint::in_file(file, "is empty"));
        }
        let module = Module::parse(file, Vec::new(), true, text)?;
        self.complaints.extend(habits::check(place, &[module]));
        self.files += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn layering_holds() {
        let inspection = super::inspect().expect("the workspace can be read");
        let complaints: Vec<String> = inspection
            .complaints
            .iter()
            .map(ToString::to_string)
            .collect();
        assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
        assert!(inspection.files > 100, "{} files", inspection.files);
    }
}
