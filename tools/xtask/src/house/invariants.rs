//! Checks the page of invariants: each number stands in a comment of the file that keeps the rule
//! and of the file with its test, and no comment has a number that the page does not have.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::{Complaint, prose};
use crate::cargo;

const PAGE: &str = "docs/invariants.md";

/// The folders that paths of code begin in, and those of tests.
const CODE: &[&str] = &["crates/cuvmm/src", ""];
const TESTS: &[&str] = &["tests/cuvmm-tests/tests", "crates/cuvmm/src", ""];

/// A line of the page.
#[derive(Debug, PartialEq, Eq)]
struct Rule<'a> {
    line: usize,
    number: &'a str,
    code: &'a str,
    test_file: &'a str,
    test: &'a str,
}

/// Checks the page of invariants and the numbers in all sources.
pub(crate) fn check(root: &Path) -> Result<Vec<Complaint>> {
    let page = root.join(PAGE);
    let text = cargo::text(&page)?;
    let mut complaints = Vec::new();
    let mut known = BTreeSet::new();
    for (index, line) in text.lines().enumerate() {
        if !line.starts_with("| I-") {
            continue;
        }
        let complain = |what: String| Complaint::at(&page, index + 1, what);
        let Some(rule) = rule(index + 1, line) else {
            complaints.push(complain("is not `number | rule | file | file test`".into()));
            continue;
        };
        if !known.insert(rule.number) {
            complaints.push(complain(format!("{} is there twice", rule.number)));
        }
        complaints.extend(broken(root, &rule)?.into_iter().map(complain));
    }
    for file in prose::files(root)? {
        if file.extension().is_none_or(|ending| ending != "rs") || file.ends_with(file!()) {
            continue;
        }
        let source = cargo::text(&file)?;
        for (line, number) in numbers(&source) {
            if !known.contains(number) {
                let what = format!("{number} is not in {PAGE}");
                complaints.push(Complaint::at(&file, line, what));
            }
        }
    }
    Ok(complaints)
}

fn rule(line: usize, text: &str) -> Option<Rule<'_>> {
    let cells: Vec<&str> = text.trim_matches('|').split('|').map(str::trim).collect();
    let [number, _, code, test] = cells[..] else {
        return None;
    };
    let marked = |text: &'_ str| text.split('`').count();
    if marked(code) != 3 || marked(test) != 5 {
        return None;
    }
    let mut parts = test.split('`');
    Some(Rule {
        line,
        number,
        code: code.trim_matches('`'),
        test_file: parts.nth(1)?,
        test: parts.nth(1)?,
    })
}

fn broken(root: &Path, rule: &Rule<'_>) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    let number = rule.number;
    let code = candidates(root, CODE, rule.code)?;
    match code.first() {
        None => wrong.push(format!("{number}: there is no file {}", rule.code)),
        Some((_, source)) if !has(source, number) => {
            wrong.push(format!("{number} is in no comment of {}", rule.code));
        }
        Some(_) => {}
    }
    let start = format!("fn {}(", rule.test);
    let tests = candidates(root, TESTS, rule.test_file)?;
    let tests = tests.iter().find(|(_, source)| source.contains(&start));
    match tests {
        None => wrong.push(format!("{number}: {} has no {}", rule.test_file, rule.test)),
        Some((file, source)) => {
            // A file that keeps a rule and tests it names it twice.
            let same = code.first().is_some_and(|(code, _)| code == file);
            let found = numbers(source);
            let count = found.iter().filter(|(_, one)| *one == number).count();
            if count < 1 + usize::from(same) {
                wrong.push(format!("{number} is not at the test in {}", rule.test_file));
            }
        }
    }
    Ok(wrong)
}

/// Returns the files of this name in these folders, with their text.
fn candidates(root: &Path, folders: &[&str], name: &str) -> Result<Vec<(PathBuf, String)>> {
    let files = folders.iter().map(|folder| root.join(folder).join(name));
    files
        .filter(|file| file.is_file())
        .map(|file| cargo::text(&file).map(|text| (file, text)))
        .collect()
}

fn has(source: &str, number: &str) -> bool {
    numbers(source).iter().any(|(_, found)| *found == number)
}

/// Returns the numbers in comments, with their lines.
fn numbers(source: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (index, line) in source.lines().enumerate() {
        let line = line.trim_start();
        if !line.starts_with("//") {
            continue;
        }
        for word in line.split(|one: char| !one.is_ascii_alphanumeric() && one != '-') {
            let digits = word.strip_prefix("I-").unwrap_or_default();
            if !digits.is_empty() && digits.bytes().all(|one| one.is_ascii_digit()) {
                found.push((index + 1, word));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{PAGE, check, numbers};

    #[test]
    fn numbers_are_found_in_comments_only() {
        let source = "//! Keeps I-3, I-14.\nlet text = \"I-5\";\n    // I-6\n// I-x MI-7 I-\n";
        assert_eq!(numbers(source), [(1, "I-3"), (1, "I-14"), (3, "I-6")]);
    }

    #[test]
    fn a_rule_without_its_number_or_test_is_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let file = folder.path().join(name);
            std::fs::create_dir_all(file.parent().expect("in a folder")).expect("made");
            std::fs::write(file, text).expect("written");
        };
        let page =
            "| I-1 | One. | `a.rs` | `b.rs` `one` |\n| I-2 | Two. | `a.rs` | `a.rs` `two` |\n";
        write(PAGE, page);
        write(
            "crates/cuvmm/src/a.rs",
            "//! I-1, I-2\n// I-2\nfn two() {}\n",
        );
        write("tests/cuvmm-tests/tests/b.rs", "// I-1\nfn one() {}\n");
        assert_eq!(check(folder.path()).expect("read"), []);

        write("crates/cuvmm/src/a.rs", "//! I-2, I-9\nfn two() {}\n");
        write("tests/cuvmm-tests/tests/b.rs", "// I-1\nfn other() {}\n");
        let found = check(folder.path()).expect("read");
        let found: Vec<&str> = found.iter().map(|it| it.what.as_str()).collect();
        assert_eq!(
            found,
            [
                "I-1 is in no comment of a.rs",
                "I-1: b.rs has no one",
                "I-2 is not at the test in a.rs",
                "I-9 is not in docs/invariants.md",
            ]
        );
    }
}
