//! The documented rules are those of the cases.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::path::Path;

use conformance::{DELIBERATE, all, find};

#[test]
fn the_book_has_the_rule_of_each_case_and_no_other() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/semantics.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (text, _) = text.split_once("\n## At the C ABI only\n").unwrap();
    let book: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("### "))
        .collect();
    let rules: BTreeSet<&str> = book.iter().copied().collect();
    assert_eq!(rules.len(), book.len(), "a rule stands there twice");
    let of_cases: BTreeSet<&str> = all().map(|case| case.rule()).collect();
    assert_eq!(rules, of_cases);
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
