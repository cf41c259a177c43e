//! Checks the names in the tables of `docs/coming-from.md`. Searching the reference for a name of
//! another library must find an item or a search alias, and a name of this one must be an item.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;

use super::{Complaint, tree};
use crate::cargo;

const PAGE: &str = "docs/coming-from.md";

/// The library whose reference is searched, and the crate below it that it exports as `driver`.
const SOURCES: [&str; 2] = ["crates/cuvmm/src", "crates/cuvmm-driver/src"];

/// The head of the column with names of this library.
const OURS: &str = "cuvmm";

/// The crate of the workspace that has a reference of its own.
const ELSEWHERE: &str = "cuvmm_candle";

/// Words before the name of an item.
const BEFORE: &[&str] = &[
    "pub", "const", "unsafe", "async", "fn", "struct", "enum", "trait", "type", "mod",
];

/// Returns a complaint for each name that leads nowhere.
pub(crate) fn check(root: &Path) -> Result<Vec<Complaint>> {
    let mut names = Names::default();
    for folder in SOURCES {
        for file in tree::rust_files(&root.join(folder))? {
            names.read(&cargo::text(&file)?);
        }
    }
    let page = root.join(PAGE);
    let missing = names.missing(&cargo::text(&page)?);
    let complaint =
        |(line, name)| Complaint::at(&page, line, format!("names `{name}`, which is not found"));
    Ok(missing.into_iter().map(complaint).collect())
}

/// The names in the reference.
#[derive(Default)]
struct Names {
    items: BTreeSet<String>,
    aliases: BTreeSet<String>,
}

impl Names {
    /// Takes in the public items and the search aliases of a source.
    fn read(&mut self, source: &str) {
        for line in source.lines() {
            let variant = line.strip_prefix("    ");
            let variant = variant.filter(|it| it.starts_with(char::is_uppercase));
            let item = line.trim_start();
            let item = item.strip_prefix("pub ").or(variant).unwrap_or_default();
            let name = words(item).find(|word| !BEFORE.contains(word));
            self.items.extend(name.map(str::to_owned));
        }
        for rest in source.split("doc(alias").skip(1) {
            let aliases = rest.split(']').next().unwrap_or_default();
            let quoted = aliases.split('"').skip(1).step_by(2);
            self.aliases.extend(quoted.map(str::to_owned));
        }
    }

    /// Returns the names in the tables of a page that are not found, with their lines.
    fn missing(&self, page: &str) -> Vec<(usize, String)> {
        let (mut missing, mut code, mut ours) = (Vec::new(), false, None);
        for (index, line) in page.lines().enumerate() {
            code ^= line.starts_with("```");
            if code || !line.starts_with('|') {
                ours = None;
                continue;
            }
            let line = line.replace("\\|", "");
            let mut cells = line.split('|').skip(1).map(str::trim);
            let (theirs, here) = (cells.next(), cells.next().unwrap_or_default());
            // The first row of a table is its head.
            if !*ours.get_or_insert(here == OURS) {
                continue;
            }
            let theirs = named(theirs.unwrap_or_default()).into_iter();
            let theirs = theirs.filter(|name| !self.aliases.contains(name));
            let unknown = theirs.chain(named(here));
            let unknown = unknown.filter(|name| !self.items.contains(name));
            missing.extend(unknown.map(|name| (index + 1, name)));
        }
        missing
    }
}

/// The identifiers in the code marks of a cell, without arguments and without beginnings of names.
fn named(cell: &str) -> Vec<String> {
    let marked = cell.split('`').skip(1).step_by(2);
    let whole = marked.filter(|code| !code.ends_with("...") && !code.starts_with(ELSEWHERE));
    let mut names = Vec::new();
    for code in whole {
        let mut depth = 0_usize;
        let outside = code.chars().map(|letter| {
            match letter {
                '(' | '[' | '<' => depth += 1,
                ')' | ']' | '>' => depth = depth.saturating_sub(1),
                _ if depth == 0 => return letter,
                _ => {}
            }
            ' '
        });
        let outside: String = outside.collect();
        names.extend(words(&outside).map(str::to_owned));
    }
    names
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
        .filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::{Names, named};

    #[test]
    fn arguments_and_beginnings_of_names_are_no_names() {
        assert_eq!(
            named("`Buffer::<T>::alloc(n)`, `set_...`, `get(&x)?.y` and `load!`"),
            ["Buffer", "alloc", "get", "y", "load"]
        );
    }

    #[test]
    fn a_name_is_found_as_an_item_or_an_alias_and_ours_as_an_item() {
        let mut names = Names::default();
        names.read(
            "#[doc(alias(\"Area\", \"space\"))]\npub struct Region {\n    pub const fn size() {}\n\
             pub enum Place {\n    Host,\n}\nfn hidden() {}\n",
        );
        let page = "| a | cuvmm | b |\n|---|---|---|\n| `Area::size` | `Region::size` | `c` |\n\
                    | `space`, `hidden()` | `Area`, `Place::Host` | |\n\n| a | b |\n| `c` | `d` |\n";
        assert_eq!(
            names.missing(page),
            [(4, "hidden".to_owned()), (4, "Area".to_owned())]
        );
    }
}
