//! The lists of features in documents, compared with the manifest.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;

use super::Complaint;
use super::crates::Metadata;
use crate::cargo;

/// The crate whose features are listed.
const LISTED: &str = "cuvmm";

/// A file with a list, the text before the list and behind it, and what stands before and behind each
/// name.
const LISTS: &[(&str, [&str; 2], [&str; 2])] = &[
    ("README.md", ["# features:", "\n"], [" \"", "\""]),
    (
        "crates/cuvmm/src/lib.rs",
        ["//! # Features\n", "//! # Platforms"],
        ["//! - `", "`:"],
    ),
];

/// Returns a complaint for each list that lacks a feature, or has one that the crate does not have.
pub(crate) fn check(root: &Path, metadata: &Metadata) -> Result<Vec<Complaint>> {
    let mut packages = metadata.packages.iter();
    let Some(package) = packages.find(|package| package.name == LISTED) else {
        return Ok(Vec::new());
    };
    let features = package.features.keys().map(String::as_str);
    let features: BTreeSet<&str> = features.filter(|name| *name != "default").collect();
    let mut complaints = Vec::new();
    for &(file, list, name) in LISTS {
        let path = root.join(file);
        let text = cargo::text(&path)?;
        let found = listed(&text, list, name);
        if found.as_ref() != Some(&features) {
            let what = format!("lists the features {found:?}, and {LISTED} has {features:?}");
            complaints.push(Complaint::in_file(path, what));
        }
    }
    Ok(complaints)
}

/// Returns the names in a list. Returns `None` if there is no such list.
fn listed<'a>(
    text: &'a str,
    [before, behind]: [&str; 2],
    [opens, closes]: [&str; 2],
) -> Option<BTreeSet<&'a str>> {
    let (_, list) = text.split_once(before)?;
    let (list, _) = list.split_once(behind)?;
    let items = list.split(opens).skip(1);
    let names = items.map(|item| item.split_once(closes).map_or("", |(name, _)| name));
    Some(names.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_where_there_is_a_list() {
        let (list, name) = (["one of:", "\n"], [" \"", "\""]);
        let found = listed("a\none of: \"x\", \"y\"\n", list, name);
        assert_eq!(found, Some(BTreeSet::from(["x", "y"])));
        assert_eq!(listed("none of: \"x\"", list, name), None);
        assert_eq!(listed("one of:\n", list, name), Some(BTreeSet::new()));
        let broken = listed("one of: \"x\n", list, name);
        assert_eq!(broken, Some(BTreeSet::from([""])));
    }
}
