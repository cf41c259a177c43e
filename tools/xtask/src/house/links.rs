//! Checks that the links of documents lead somewhere: to a file of the repository and, if they name
//! a heading, to one that the document has.
//!
//! Only links into this repository are checked, relative ones and those to its page. Nothing is
//! fetched.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::{Complaint, prose};
use crate::cargo;

/// The address of the repository's files, used where a relative link would not work.
const PAGE: &str = "https://github.com/cuvmm/cuvmm/blob/main/";

/// The address of their bytes, used for pictures.
const BYTES: &str = "https://github.com/cuvmm/cuvmm/raw/main/";

/// Checks the links of all documents, and those to the repository's page in all other text.
pub(crate) fn check(root: &Path) -> Result<Vec<Complaint>> {
    let root = root.canonicalize().context("the folder to check")?;
    let mut complaints = Vec::new();
    let mut headings = BTreeMap::new();
    for file in prose::files(&root)? {
        let text = cargo::text(&file)?;
        for (line, link) in links(&text) {
            let path = match link.strip_prefix(PAGE).or(link.strip_prefix(BYTES)) {
                Some(path) => root.join(path),
                None if !is_markdown(&file) || link.contains("://") => continue,
                None if link.starts_with('#') => PathBuf::from(format!("{}{link}", file.display())),
                None => file.with_file_name("").join(&link),
            };
            if let Some(what) = broken(&root, &path, &mut headings)? {
                complaints.push(Complaint::at(
                    &file,
                    line,
                    format!("links to {link}: {what}"),
                ));
            }
        }
    }
    Ok(complaints)
}

fn is_markdown(file: &Path) -> bool {
    file.extension().is_some_and(|ending| ending == "md")
}

/// Returns why a path with an optional heading leads nowhere.
fn broken(
    root: &Path,
    link: &Path,
    headings: &mut BTreeMap<PathBuf, BTreeSet<String>>,
) -> Result<Option<&'static str>> {
    let link = link.to_string_lossy();
    let (path, heading) = link.split_once('#').unwrap_or((&link, ""));
    let found = Path::new(path).canonicalize().ok();
    let Some(file) = found.filter(|found| found.starts_with(root)) else {
        return Ok(Some("the repository has no such file"));
    };
    if heading.is_empty() || !is_markdown(&file) {
        return Ok(None);
    }
    let of_file = match headings.entry(file) {
        std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
        std::collections::btree_map::Entry::Vacant(new) => {
            let text = cargo::text(new.key())?;
            new.insert(anchors(&text))
        }
    };
    let missing = !of_file.contains(heading);
    Ok(missing.then_some("the document has no such heading"))
}

/// The lines of a text outside fenced code, with their numbers.
fn prose_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        (!code && !fence).then_some((index + 1, line))
    })
}

/// The targets of links in the form `[text](target)`, with their lines.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose_lines(text) {
        // Without the contents of code marks.
        let line: String = line.split('`').step_by(2).collect();
        for rest in line.split("](").skip(1) {
            let target = rest.split([')', ' ']).next().unwrap_or_default();
            found.push((number, target.to_owned()));
        }
    }
    found
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in prose_lines(text) {
        let heading = line.trim_start_matches('#');
        let level = line.len() - heading.len();
        if !(1..=6).contains(&level) || !heading.starts_with(' ') {
            continue;
        }
        let first = slug(heading.trim());
        let again = (1..).map(|number| format!("{first}-{number}"));
        let mut all = std::iter::once(first.clone()).chain(again);
        anchors.extend(all.find(|anchor| !anchors.contains(anchor)));
    }
    anchors
}

/// The anchor of a heading: lower case, hyphens for spaces, and no other punctuation. Of a link in
/// it only the text counts.
fn slug(heading: &str) -> String {
    let mut parts = heading.split("](");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        text.push_str(part.split_once(')').map_or("", |(_, rest)| rest));
    }
    let text = text.to_lowercase().replace(' ', "-");
    let stays = |it: &char| it.is_alphanumeric() || matches!(it, '-' | '_');
    text.chars().filter(stays).collect()
}

#[cfg(test)]
mod tests {
    use super::{BYTES, PAGE, anchors, check};

    #[test]
    fn anchors_are_made_as_on_github() {
        let text = "# The pool's `core`\n```\n# code\n```\n## 2 and 4 x H200, [x](y.md)!\n\
                    ##no heading\n## A_b\n## A_b\n";
        let found: Vec<String> = anchors(text).into_iter().collect();
        assert_eq!(
            found,
            ["2-and-4-x-h200-x", "a_b", "a_b-1", "the-pools-core"]
        );
    }

    #[test]
    fn links_that_lead_nowhere_are_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let file = folder.path().join(name);
            std::fs::create_dir_all(file.parent().expect("in a folder")).expect("made");
            std::fs::write(file, text).expect("written");
        };
        let good = format!(
            "# Top\n[a](docs/b.md#there), [t](#top \"title\"), [`c`]({PAGE}docs/b.md#there)\n\
             [x](https://example.org/#any) `[not](a-link)`\n```\n[not](a-link)\n```\n"
        );
        write("a.md", &good);
        write(
            "docs/b.md",
            "## There\n[up](../a.md#top) [line](../c.rs#L3)\n",
        );
        write(
            "c.rs",
            &format!("//! [b]({PAGE}docs/b.md)\nlet x = f[0](y);\n"),
        );
        assert_eq!(check(folder.path()).expect("read"), []);

        write(
            "a.md",
            &format!("\n[a](docs/none.md) [h](#top)\n[out](../out.md) ![p]({BYTES}c.svg)\n"),
        );
        write("c.rs", &format!("//! [b]({PAGE}docs/b.md#nowhere)\n"));
        let found = check(folder.path()).expect("read");
        let lines: Vec<(String, usize)> = found
            .iter()
            .map(|it| {
                (
                    it.file
                        .file_name()
                        .map_or(String::new(), |it| it.to_string_lossy().into()),
                    it.line,
                )
            })
            .collect();
        let at = |file: &str, line| (file.to_owned(), line);
        assert_eq!(
            lines,
            [
                at("a.md", 2),
                at("a.md", 2),
                at("a.md", 3),
                at("a.md", 3),
                at("c.rs", 1),
                at("b.md", 2)
            ]
        );
        assert!(
            found[0].what.ends_with("no such file") && found[1].what.ends_with("no such heading")
        );
    }
}
