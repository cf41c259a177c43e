//! The selection of rows to measure.

use cuvmm_command::command::usage;

/// The selected rows; an empty list selects all.
#[derive(Clone, Debug)]
pub(super) struct Wanted(Vec<String>);

impl Wanted {
    /// Creates a selection from the names on the command line.
    ///
    /// # Errors
    /// Wrong usage: no row has one of the names.
    pub(super) fn new(names: &[String], known: &[String]) -> anyhow::Result<Self> {
        match names.iter().find(|name| !known.contains(name)) {
            None => Ok(Self(names.to_vec())),
            Some(name) => Err(usage(format!(
                "--only: there is no row {name:?}; there are {}",
                known.join(", ")
            ))),
        }
    }

    /// Returns `true` if `row` is selected, by its own name or by the name of the row that it
    /// compares with another baseline (`_vs_`).
    pub(super) fn has(&self, row: &str) -> bool {
        let names = |name: &String| {
            let rest = row.strip_prefix(name.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("_vs_"))
        };
        self.0.is_empty() || self.0.iter().any(names)
    }
}

#[cfg(test)]
mod tests {
    use super::Wanted;

    #[test]
    fn a_row_comes_with_its_comparisons() {
        let known = ["commit_1GiB", "commit_1GiB_vs_pages", "free"].map(str::to_owned);
        let wanted = |name: &str| Wanted::new(&[name.to_owned()], &known);
        let one = wanted("commit_1GiB").unwrap();
        assert!(one.has("commit_1GiB") && one.has("commit_1GiB_vs_pages"));
        assert!(!one.has("commit_1GiB2") && !one.has("free"));
        let pages = wanted("commit_1GiB_vs_pages").unwrap();
        assert!(pages.has("commit_1GiB_vs_pages") && !pages.has("commit_1GiB"));
        let all = Wanted::new(&[], &known).unwrap();
        assert!(all.has("free"));
        let error = wanted("commit").unwrap_err();
        assert!(error.is::<cuvmm_command::command::Usage>(), "{error}");
    }
}
