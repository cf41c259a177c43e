//! The documented rules match the cases: each case is listed under its rule, and every listed case
//! exists.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail as tests do"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use conformance::{DELIBERATE, all, find};

/// Returns the cases that `docs/semantics.md` lists under each rule.
fn book() -> BTreeMap<String, Vec<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/semantics.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut rules = BTreeMap::new();
    let mut rule = String::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("### ") {
            rule = name.to_owned();
        } else if let Some(list) = line.strip_prefix("Cases: ") {
            let cases = list
                .split(", ")
                .map(|case| case.trim_matches('`').to_owned())
                .collect();
            assert!(
                rules.insert(rule.clone(), cases).is_none(),
                "{rule} stands there twice"
            );
        }
    }
    rules
}

#[test]
fn the_book_lists_each_case_under_its_rule() {
    let mut cases: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for case in all() {
        cases
            .entry(case.rule().to_owned())
            .or_default()
            .push(case.name().to_owned());
    }
    let book = book();
    for (rule, cases) in &cases {
        assert_eq!(book.get(rule), Some(cases), "under {rule}");
    }
    assert_eq!(book.len(), cases.len(), "the book has a rule without cases");
}

#[test]
fn names_are_unique_and_made_of_two_parts() {
    let mut seen = BTreeSet::new();
    for case in all() {
        assert!(seen.insert(case.name()), "{} is there twice", case.name());
        assert!(case.name().contains('.'), "{}", case.name());
        assert!(
            case.about().ends_with(['.', '?']),
            "{}: {}",
            case.name(),
            case.about()
        );
    }
}

#[test]
fn differences_are_few_and_of_cases_that_exist() {
    assert!(DELIBERATE.len() <= 10);
    let mut seen = BTreeSet::new();
    for difference in DELIBERATE {
        assert!(find(difference.case).is_some(), "{}", difference.case);
        assert!(
            seen.insert(difference.case),
            "{} is listed twice",
            difference.case
        );
        assert!(!difference.backends.is_empty());
    }
}
