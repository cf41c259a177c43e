//! Checks the words of the project: sources, tests, documents and messages.
//!
//! A few words and beginnings of sentences hide the subject of a sentence, or say nothing without
//! the sentence before. They are listed here and are not used. The main types of the library have an
//! example on their own page.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::Complaint;
use crate::cargo;

/// Words that stand for a subject that has a name, or refer to another sentence.
const WORDS: &[&str] = &[
    "whoever",
    "nobody",
    "somebody",
    "anybody",
    "as above",
    "is told of",
    "so many",
];

/// Beginnings of a doc comment that do not say what the item is or does.
const BEGINNINGS: &[&str] = &["The same", "What", "Whether", "As"];

/// Types of `cuvmm` that have an example in their documentation.
const MAIN_TYPES: &[&str] = &[
    "Attachment",
    "Block",
    "Channel",
    "CowBuffer",
    "Device",
    "DeviceVec",
    "HostStore",
    "KvCache",
    "Lease",
    "Mapper",
    "Offer",
    "Pool",
    "Publisher",
    "Region",
    "RingBuffer",
    "SparseArray",
    "SparseGrid",
    "Stream",
    "Subscriber",
    "Tenant",
    "UnifiedBuffer",
];

/// Endings of files that are read.
const TEXT: &[&str] = &["rs", "md", "py", "sh", "toml", "yml"];

/// This file names the words.
const LISTS_THEM: &str = "prose.rs";

/// Checks all text of the workspace, and the examples of the library's main types.
pub(crate) fn check(root: &Path) -> Result<Vec<Complaint>> {
    let (mut complaints, mut documented) = (Vec::new(), Vec::new());
    for file in files(root)? {
        let text = cargo::text(&file)?;
        let lines: Vec<&str> = text.lines().collect();
        let rust = file.extension().is_some_and(|ending| ending == "rs");
        complaints.extend(words(&lines).map(|(line, what)| Complaint::at(&file, line, what)));
        if rust {
            let found = beginnings(&lines);
            complaints.extend(found.map(|(line, what)| Complaint::at(&file, line, what)));
        }
        if file.starts_with(root.join("crates/cuvmm/src")) {
            documented.extend(with_example(&lines));
        }
    }
    let lacking = MAIN_TYPES
        .iter()
        .filter(|name| !documented.iter().any(|it| it == *name));
    complaints.extend(lacking.map(|name| {
        Complaint::in_file(
            "crates/cuvmm/src",
            format!("`{name}` has no example on its page"),
        )
    }));
    Ok(complaints)
}

/// Text files below a folder, build folders and hidden ones left out, but for `.ci` and `.github`.
pub(super) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    for entry in entries {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if kind.is_dir() {
            let hidden = name.starts_with('.') && !matches!(&*name, ".ci" | ".github");
            if !hidden && !matches!(&*name, "target" | "pack" | "corpus" | "artifacts") {
                found.extend(files(&path)?);
            }
        } else if kind.is_file() && name != LISTS_THEM {
            let ending = path.extension().unwrap_or_default().to_string_lossy();
            let script = folder.file_name().is_some_and(|it| it == ".ci") && ending.is_empty();
            if script || TEXT.contains(&&*ending) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Lines in which, or at the end of which, a listed word begins.
fn words<'a>(lines: &'a [&'a str]) -> impl Iterator<Item = (usize, String)> + 'a {
    lines.iter().enumerate().flat_map(move |(index, line)| {
        let this = without_names(bare(line));
        let next = lines.get(index + 1).map_or("", |next| bare(next));
        // A pair of words may be divided between two lines.
        let joined = format!("{this} {}", without_names(next));
        let found = WORDS.iter().filter(move |word| {
            joined
                .match_indices(**word)
                .any(|(at, _)| at < this.len() && is_whole(&joined, at, word.len()))
        });
        found.map(move |word| (index + 1, format!("says \"{word}\": name the subject")))
    })
}

/// The line in lower case, without names in code marks and without search aliases.
fn without_names(line: &str) -> String {
    if line.contains("doc(alias") {
        return String::new();
    }
    let parts = line.split('`').step_by(2);
    parts.collect::<Vec<_>>().join("``").to_lowercase()
}

/// The line without the signs that make it a comment or a heading.
fn bare(line: &str) -> &str {
    let marks = ['/', '!', '#', '*', '-', ' ', '\t'];
    line.trim_start_matches(marks).trim_end_matches([' ', '\\'])
}

/// Whether no letter is directly before or behind.
fn is_whole(text: &str, at: usize, len: usize) -> bool {
    let letter = |found: Option<char>| found.is_some_and(|it| it.is_alphanumeric() || it == '_');
    let (before, behind) = (text.get(..at), text.get(at + len..));
    !letter(before.and_then(|it| it.chars().next_back()))
        && !letter(behind.and_then(|it| it.chars().next()))
}

/// First lines of doc comments that begin as none should.
fn beginnings<'a>(lines: &'a [&'a str]) -> impl Iterator<Item = (usize, String)> + 'a {
    let doc = |line: &str| -> Option<String> {
        let line = line.trim_start();
        let text = line.strip_prefix("///").or(line.strip_prefix("//!"))?;
        (!text.starts_with('/')).then(|| text.trim_start().to_owned())
    };
    let mut inside = false;
    lines.iter().enumerate().filter_map(move |(index, line)| {
        let text = doc(line);
        let first = !std::mem::replace(&mut inside, text.is_some());
        let text = text.filter(|_| first)?;
        let begins = |with: &&&str| {
            text.strip_prefix(**with)
                .is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
        };
        let with = BEGINNINGS.iter().find(begins)?;
        let what = format!("a doc comment begins with \"{with}\": say what the item is or does");
        Some((index + 1, what))
    })
}

/// Public structs whose doc comment has a code block.
fn with_example(lines: &[&str]) -> Vec<String> {
    let (mut names, mut example) = (Vec::new(), false);
    for line in lines {
        let line = line.trim_start();
        match line.strip_prefix("pub struct ") {
            Some(rest) if example => {
                let name = rest.split(|it: char| !it.is_alphanumeric()).next();
                names.extend(name.map(str::to_owned));
                example = false;
            }
            _ if line.starts_with("///") => example |= line.contains("```"),
            _ if line.starts_with("#[") => {}
            _ => example = false,
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::{beginnings, with_example, words};

    #[test]
    fn listed_words_are_found_also_across_lines() {
        let lines = [
            "/// Given to Nobody,",
            "// is told",
            "// of it",
            "nobody_else()",
        ];
        let found: Vec<usize> = words(&lines).map(|(line, _)| line).collect();
        assert_eq!(found, [1, 2]);
    }

    #[test]
    fn only_the_beginning_of_a_doc_comment_counts() {
        let lines = [
            "    /// What it is.",
            "    /// Whether it is.",
            "    fn f() {}",
            "/// Assigns.",
            "// What this does.",
            "//! Whether.",
        ];
        let found: Vec<usize> = beginnings(&lines).map(|(line, _)| line).collect();
        assert_eq!(found, [1, 6]);
    }

    #[test]
    fn an_example_belongs_to_the_struct_below_it() {
        let lines = [
            "/// ```",
            "/// ```",
            "#[derive(Debug)]",
            "pub struct One<T> {",
            "pub struct Two;",
        ];
        assert_eq!(with_example(&lines), ["One"]);
    }
}
