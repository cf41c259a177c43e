//! The files of a crate, found like the compiler finds them: from `mod` to `mod`.
//!
//! A file that no `mod` declares is not part of the crate and is reported.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use syn::spanned::Spanned as _;

use super::Complaint;
use super::words::is_for_tests;
use crate::cargo;

/// One file with its module path.
pub(crate) struct Module {
    pub(crate) file: PathBuf,
    /// The module's path in its crate; empty for the root.
    pub(crate) path: Vec<String>,
    /// `true` if it is compiled for tests only.
    pub(crate) test: bool,
    pub(crate) text: String,
    pub(crate) syntax: syn::File,
}

impl Module {
    pub(crate) fn parse(file: &Path, path: Vec<String>, test: bool, text: String) -> Result<Self> {
        let syntax = syn::parse_file(&text).map_err(|error| {
            let line = error.span().start().line;
            anyhow::anyhow!("{}:{line}: {error}", file.display())
        })?;
        Ok(Self {
            file: file.to_owned(),
            path,
            test,
            text,
            syntax,
        })
    }

    fn read(file: &Path, path: Vec<String>, test: bool) -> Result<Self> {
        Self::parse(file, path, test, cargo::text(file)?)
    }
}

/// Returns `true` if one of two modules, given by their paths, contains or is the other.
///
/// A module declares and re-exports its children, and they use what it shares among them. So paths
/// between them are not a cycle.
pub(crate) fn is_one_in_the_other(one: &[String], other: &[String]) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

pub(crate) fn modules(root: &Path, complaints: &mut Vec<Complaint>) -> Result<Vec<Module>> {
    let mut found = Vec::new();
    let mut ahead = vec![Module::read(root, Vec::new(), false)?];
    while let Some(module) = ahead.pop() {
        let folder = children_of(&module, root);
        let scope = Scope {
            folder,
            path: module.path.clone(),
            test: module.test,
        };
        scope.follow(&module.file, &module.syntax.items, &mut ahead, complaints)?;
        found.push(module);
    }
    found.sort_by(|a, b| a.file.cmp(&b.file));
    Ok(found)
}

fn children_of(module: &Module, root: &Path) -> PathBuf {
    let parent = module.file.parent().unwrap_or(Path::new(""));
    match module.file.file_stem() {
        Some(stem) if module.file != root && stem != "mod" => parent.join(stem),
        _ => parent.to_owned(),
    }
}

struct Scope {
    folder: PathBuf,
    path: Vec<String>,
    test: bool,
}

impl Scope {
    fn follow(
        &self,
        file: &Path,
        items: &[syn::Item],
        ahead: &mut Vec<Module>,
        complaints: &mut Vec<Complaint>,
    ) -> Result<()> {
        for item in items {
            let syn::Item::Mod(child) = item else {
                continue;
            };
            let name = child.ident.to_string();
            let mut path = self.path.clone();
            path.push(name.clone());
            let scope = Scope {
                folder: self.folder.join(&name),
                path,
                test: self.test || is_for_tests(&child.attrs),
            };
            if let Some((_, items)) = &child.content {
                scope.follow(file, items, ahead, complaints)?;
                continue;
            }
            let line = child.span().start().line;
            if child.attrs.iter().any(|a| a.path().is_ident("path")) {
                complaints.push(Complaint::at(
                    file,
                    line,
                    format!(
                        "`mod {name}` has a `path` attribute: a file belongs where its name says"
                    ),
                ));
                continue;
            }
            let places = [
                self.folder.join(format!("{name}.rs")),
                scope.folder.join("mod.rs"),
            ];
            match places.iter().find(|place| place.is_file()) {
                Some(place) => ahead.push(Module::read(place, scope.path, scope.test)?),
                None => complaints.push(Complaint::at(
                    file,
                    line,
                    format!("`mod {name}` has no file"),
                )),
            }
        }
        Ok(())
    }
}

/// Returns a complaint for every Rust file under a folder that is none of these modules.
pub(crate) fn unreached(folder: &Path, reached: &BTreeSet<PathBuf>) -> Result<Vec<Complaint>> {
    let mut complaints = Vec::new();
    for file in rust_files(folder)? {
        if !reached.contains(&file) {
            complaints.push(Complaint::in_file(&file, "no `mod` leads to this file"));
        }
    }
    Ok(complaints)
}

/// Returns every Rust file at or below a folder, which need not exist.
pub(crate) fn rust_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut ahead = vec![folder.to_owned()];
    while let Some(folder) = ahead.pop() {
        if !folder.is_dir() {
            continue;
        }
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                ahead.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, name: &str, text: &str) {
        let file = folder.join(name);
        std::fs::create_dir_all(file.parent().expect("in a folder")).expect("made");
        std::fs::write(file, text).expect("written");
    }

    #[test]
    fn follows_the_declarations() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path();
        write(
            at,
            "lib.rs",
            "mod a;\n#[cfg(test)]\nmod t;\nmod gone;\nmod i { mod j; }",
        );
        write(at, "a/mod.rs", "mod b;");
        write(at, "a/b.rs", "mod c;");
        write(at, "a/b/c.rs", "");
        write(at, "i/j.rs", "");
        write(at, "t.rs", "mod u;");
        write(at, "t/u.rs", "");
        write(at, "forgotten.rs", "");
        let mut complaints = Vec::new();
        let found = modules(&at.join("lib.rs"), &mut complaints).expect("read");
        let paths: Vec<_> = found
            .iter()
            .map(|module| (module.path.join("::"), module.test))
            .collect();
        for path in [
            ("", false),
            ("a", false),
            ("a::b", false),
            ("a::b::c", false),
            ("i::j", false),
            ("t", true),
            ("t::u", true),
        ] {
            assert!(paths.contains(&(path.0.to_owned(), path.1)), "{path:?}");
        }
        assert_eq!(paths.len(), 7, "{paths:?}");
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(complaints[0].to_string().contains("`mod gone` has no file"));
        let reached = found.into_iter().map(|module| module.file).collect();
        let forgotten = unreached(at, &reached).expect("read");
        assert_eq!(forgotten.len(), 1, "{forgotten:?}");
    }

    #[test]
    fn says_where_a_file_cannot_be_read() {
        let text = "fn f() {}\nfn {".to_owned();
        let error = Module::parse(Path::new("lib.rs"), Vec::new(), false, text)
            .err()
            .expect("it is not Rust");
        assert!(error.to_string().starts_with("lib.rs:2:"), "{error}");
    }
}
