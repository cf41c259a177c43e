//! Dependencies between crates, read from their manifests.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Deserialize;

use super::Complaint;
use super::plan::{self, Place};

/// The part of `cargo metadata`'s output that is used here.
#[derive(Debug, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) version: String,
    pub(crate) manifest_path: String,
    /// The registries that the package may go to: none if the list is empty, all without a list.
    #[serde(default)]
    publish: Option<Vec<String>>,
    #[serde(default)]
    license: Option<String>,
    #[serde(default)]
    readme: Option<String>,
    /// The tables under `package.metadata`.
    #[serde(default)]
    metadata: serde_json::Value,
    #[serde(default)]
    pub(crate) targets: Vec<Target>,
    #[serde(default)]
    pub(crate) features: BTreeMap<String, Vec<String>>,
    dependencies: Vec<Dependency>,
}

impl Package {
    /// Returns `true` if the package is for a registry.
    pub(crate) fn is_published(&self) -> bool {
        self.publish.as_ref().is_none_or(|to| !to.is_empty())
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct Target {
    pub(crate) kind: Vec<String>,
    pub(crate) src_path: String,
}

impl Target {
    /// Returns `true` if the target is a crate under `src`, and not a test, bench or example.
    pub(crate) fn is_source(&self) -> bool {
        !self.is("test") && !self.is("bench") && !self.is("example") && !self.is("custom-build")
    }

    fn is(&self, kind: &str) -> bool {
        self.kind.iter().any(|ours| ours == kind)
    }
}

#[derive(Debug, Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
}

impl Metadata {
    pub(crate) fn parse(json: &str) -> Result<Self> {
        serde_json::from_str(json).context("what cargo metadata printed is not as expected")
    }
}

/// Returns a complaint for everything that a published package lacks: its licenses as files, its page,
/// and settings for docs.rs.
pub(crate) fn check_packages(metadata: &Metadata) -> Vec<Complaint> {
    let published = metadata.packages.iter().filter(|it| it.is_published());
    let lacking = published.flat_map(|package| {
        let folder = Path::new(&package.manifest_path).with_file_name("");
        let file = |name: &str| folder.join(name).is_file();
        let lacks = [
            (!file("LICENSE-MIT"), "the file LICENSE-MIT"),
            (!file("LICENSE-APACHE"), "the file LICENSE-APACHE"),
            (package.license.is_none(), "a license"),
            (package.readme.is_none(), "a readme"),
            (
                package.metadata["docs"]["rs"]["targets"].is_null(),
                "[package.metadata.docs.rs] with targets",
            ),
        ];
        let lacks = lacks.into_iter().filter(|(lacks, _)| *lacks);
        lacks.map(|(_, what)| {
            let what = format!("{} is published and lacks {what}", package.name);
            Complaint::in_file(&package.manifest_path, what)
        })
    });
    lacking.collect()
}

/// Returns a complaint for every dependency between two crates of this workspace that the plan does
/// not allow.
pub(crate) fn check(metadata: &Metadata) -> Vec<Complaint> {
    let ours: Vec<&str> = metadata
        .packages
        .iter()
        .map(|package| package.name.as_str())
        .collect();
    let mut complaints = Vec::new();
    for package in &metadata.packages {
        let complain = |what: String| Complaint::in_file(&package.manifest_path, what);
        let Some(place) = plan::place(&package.name) else {
            complaints.push(complain(format!(
                "the crate {} has no place in the plan",
                package.name
            )));
            continue;
        };
        for dependency in &package.dependencies {
            let name = dependency.name.as_str();
            if ours.contains(&name) && !may_use(place, name, dependency.kind.as_deref()) {
                let whose = match dependency.kind.as_deref() {
                    Some("dev") => "the tests of ",
                    _ => "",
                };
                complaints.push(complain(format!(
                    "{whose}{} must not use {name}: it may use {:?}",
                    package.name, place.uses
                )));
            }
        }
    }
    complaints
}

fn may_use(place: &Place, name: &str, kind: Option<&str>) -> bool {
    place.uses.contains(&name)
        || place.name == name
        || (kind == Some("dev") && place.tests_use.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Uses<'a> = &'a [(&'a str, Option<&'a str>)];

    fn complaints(packages: &[(&str, Uses<'_>)]) -> Vec<String> {
        let packages = packages
            .iter()
            .map(|(name, dependencies)| Package {
                name: (*name).to_owned(),
                manifest_path: format!("{name}/Cargo.toml"),
                dependencies: dependencies
                    .iter()
                    .map(|(name, kind)| Dependency {
                        name: (*name).to_owned(),
                        kind: kind.map(str::to_owned),
                    })
                    .collect(),
                ..Package::default()
            })
            .collect();
        check(&Metadata { packages })
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn published_packages_have_licenses_a_page_and_settings() {
        let folder = tempfile::tempdir().expect("a folder");
        let manifest = folder.path().join("Cargo.toml");
        let mut package = Package {
            name: "it".to_owned(),
            manifest_path: manifest.to_string_lossy().into(),
            ..Package::default()
        };
        package.publish = Some(Vec::new());
        let lacking = |package: Package| {
            check_packages(&Metadata {
                packages: vec![package],
            })
            .len()
        };
        assert_eq!(lacking(package), 0);
        let package = |readme| Package {
            name: "it".to_owned(),
            manifest_path: manifest.to_string_lossy().into(),
            license: Some("MIT".to_owned()),
            readme,
            metadata: serde_json::json!({"docs": {"rs": {"targets": ["x"]}}}),
            ..Package::default()
        };
        assert_eq!(lacking(package(None)), 3);
        for name in ["LICENSE-MIT", "LICENSE-APACHE"] {
            std::fs::write(folder.path().join(name), "").expect("written");
        }
        assert_eq!(lacking(package(Some("README.md".to_owned()))), 0);
    }

    #[test]
    fn downward_is_right() {
        let none: Uses<'_> = &[];
        let found = complaints(&[
            ("cuvmm-sys", &[("thiserror", None)]),
            ("cuvmm-driver", &[("cuvmm-sys", None)]),
            (
                "cuvmm",
                &[("cuvmm-driver", None), ("conformance", Some("dev"))],
            ),
            ("conformance", none),
        ]);
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn upward_is_wrong() {
        let found = complaints(&[
            ("cuvmm-sys", &[("cuvmm-driver", None)]),
            ("cuvmm-driver", &[]),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("cuvmm-sys must not use cuvmm-driver"));
    }

    #[test]
    fn the_library_does_not_see_the_abi() {
        let found = complaints(&[("cuvmm-sys", &[]), ("cuvmm", &[("cuvmm-sys", None)])]);
        assert_eq!(found.len(), 1, "{found:?}");
    }

    #[test]
    fn what_tests_may_use_the_library_may_not() {
        let found = complaints(&[("conformance", &[]), ("cuvmm", &[("conformance", None)])]);
        assert_eq!(found.len(), 1, "{found:?}");
        let found = complaints(&[("cuvmm-cli", &[]), ("cuvmm", &[("cuvmm-cli", Some("dev"))])]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("the tests of cuvmm"));
    }

    #[test]
    fn a_crate_without_a_place() {
        let found = complaints(&[("cuvmm-shed", &[])]);
        assert_eq!(found.len(), 1, "{found:?}");
    }

    #[test]
    fn as_cargo_prints_it() {
        let metadata = Metadata::parse(
            r#"{"packages": [{"name": "cuvmm", "manifest_path": "Cargo.toml", "dependencies":
                [{"name": "cuvmm-sys", "kind": null}], "targets":
                [{"kind": ["test"], "src_path": "tests/own.rs", "name": "own"},
                 {"kind": ["lib"], "src_path": "src/lib.rs", "name": "cuvmm"}]}], "version": 1}"#,
        )
        .expect("as cargo prints it");
        let [package] = &metadata.packages[..] else {
            panic!("one package");
        };
        assert!(!package.targets[0].is_source());
        assert!(package.targets[1].is_source());
        assert!(Metadata::parse("{}").is_err());
    }
}
