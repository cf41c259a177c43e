//! Uses between the files of a crate that come from paths and `use` lines.
//!
//! A file that only re-exports a name of another does not use that file; a file that takes the name
//! from there uses the file that defines it. Paths between a module and its children do not count.

use std::collections::{BTreeMap, BTreeSet};

use syn::spanned::Spanned as _;

use super::calls::Arrow;
use super::mentions::{What, imports, mentions};
use super::tree::{Module, is_one_in_the_other};
use super::words::{from_root, words_of_attribute};

/// The maximum number of files through which a name is followed.
const FAR: usize = 8;

/// Returns every path, outside tests and documentation, to an item that another of these modules
/// defines.
pub(crate) fn arrows(modules: &[Module]) -> Vec<Arrow> {
    let names = Names::of(modules);
    let mut arrows = Vec::new();
    for (from, module) in modules.iter().enumerate() {
        if module.test {
            continue;
        }
        let passed = passed_on(module);
        for mention in mentions(module) {
            let (path, import) = match mention.what {
                What::Inside { path, name } => (Some(path), name.is_some()),
                What::Outside(path) => (names.of_child(module, &path), true),
                _ => continue,
            };
            if mention.test || import && passed.contains(&mention.line) {
                continue;
            }
            let Some(path) = path else {
                continue;
            };
            let to = names.file(&path, FAR).filter(|to| {
                let there = &modules[*to];
                !there.test && !is_one_in_the_other(&module.path, &there.path)
            });
            if let Some(to) = to {
                arrows.push(Arrow {
                    from,
                    to,
                    line: mention.line,
                    what: format!("uses crate::{}", path.join("::")),
                });
            }
        }
    }
    arrows
}

/// Returns the lines with a `use` that only re-exports a name or is there for documentation.
fn passed_on(module: &Module) -> BTreeSet<usize> {
    let mut lines = BTreeSet::new();
    for item in &module.syntax.items {
        if let syn::Item::Use(item) = item {
            let documents = item.attrs.iter().any(|attribute| {
                attribute.path().is_ident("cfg") && words_of_attribute(attribute) == ["doc"]
            });
            if documents || !matches!(item.vis, syn::Visibility::Inherited) {
                lines.insert(item.span().start().line);
            }
        }
    }
    lines
}

/// The modules of a crate by their paths, and the names that each takes from another.
struct Names<'a> {
    modules: BTreeMap<&'a [String], usize>,
    taken: BTreeMap<(usize, String), Vec<String>>,
}

impl<'a> Names<'a> {
    fn of(modules: &'a [Module]) -> Self {
        let mut names = Self {
            modules: modules
                .iter()
                .enumerate()
                .map(|(at, module)| (&*module.path, at))
                .collect(),
            taken: BTreeMap::new(),
        };
        for (at, module) in modules.iter().enumerate() {
            for item in &module.syntax.items {
                let syn::Item::Use(item) = item else {
                    continue;
                };
                for (path, name) in imports(item) {
                    let inside = from_root(&module.path, &path);
                    if let Some(path) = inside.or_else(|| names.of_child(module, &path)) {
                        names.taken.insert((at, name), path);
                    }
                }
            }
        }
        names
    }

    /// Returns a path that starts with a module's own child, relative to the crate's root.
    fn of_child(&self, module: &Module, path: &[String]) -> Option<Vec<String>> {
        let mut child = module.path.clone();
        child.push(path.first()?.clone());
        self.modules.get(&*child)?;
        child.extend(path.iter().skip(1).cloned());
        Some(child)
    }

    fn file(&self, path: &[String], far: usize) -> Option<usize> {
        let (at, rest) = (0..=path.len()).rev().find_map(|length| {
            let (start, rest) = path.split_at(length);
            self.modules.get(start).map(|at| (*at, rest))
        })?;
        let Some(name) = rest.first() else {
            return Some(at);
        };
        match self.taken.get(&(at, name.clone())) {
            Some(path) if far > 0 => self.file(path, far - 1),
            _ => Some(at),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const COMMIT: &str = "pub struct Fit;";
    const POOL: &str = "mod commit; pub use commit::Fit; pub struct Pool;";

    /// Returns the pool's files that a file beside the pool, or in it, uses.
    fn uses(path: &str, text: &str) -> Vec<String> {
        let files = [
            ("", "mod pool; pub use pool::Fit;"),
            ("pool", POOL),
            ("pool::commit", COMMIT),
            (path, text),
        ];
        let modules = files.map(|(path, text)| {
            let parts = path.split("::").filter(|part| !part.is_empty());
            let parts = parts.map(str::to_owned).collect();
            Module::parse(Path::new("x.rs"), parts, false, text.to_owned()).expect("Rust")
        });
        arrows(&modules)
            .iter()
            .map(|arrow| modules[arrow.to].path.join("::"))
            .collect()
    }

    #[test]
    fn a_name_is_followed_to_its_file() {
        for text in [
            "use crate::pool::commit::Fit;",
            "use crate::pool::Fit;",
            "use crate::{Fit as Size, Fit};",
            "fn f(fit: crate::Fit) {}",
            "fn f() { x!(crate::pool::Fit) }",
        ] {
            let found = uses("heap", text);
            assert!(!found.is_empty(), "{text}");
            assert!(found.iter().all(|to| to == "pool::commit"), "{found:?}");
        }
        assert_eq!(uses("pool::supply", "use super::Fit;"), ["pool::commit"]);
        assert_eq!(uses("heap", "use crate::pool::Pool;"), ["pool"]);
    }

    #[test]
    fn what_draws_no_arrow() {
        for text in [
            "pub use crate::pool::Fit;",
            "pub(crate) use crate::pool::Fit;",
            "#[cfg(doc)] use crate::pool::Fit;",
            "#[cfg(test)] mod tests { use crate::pool::Fit; }",
            "use std::fmt::Debug;",
        ] {
            assert_eq!(uses("heap", text), [""; 0], "{text}");
        }
        assert_eq!(uses("pool::supply", "use super::Pool;"), [""; 0]);
    }
}
