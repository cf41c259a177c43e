//! The selection of rows to measure.

use cuvmm_cli::command::usage;

/// The selected rows: all of them, or those named on the command line.
#[derive(Clone, Debug)]
pub(super) struct Wanted(Vec<String>);

impl Wanted {
    /// Creates a selection from the names on the command line; an empty list selects all rows.
    ///
    /// # Errors
    /// A usage error if no row has one of the names.
    pub(super) fn new(names: &[String], known: &[String]) -> anyhow::Result<Self> {
        match names.iter().find(|name| !known.contains(name)) {
            None => Ok(Self(names.to_vec())),
            Some(name) => Err(usage(format!(
                "--only: there is no row {name:?}; there are {}",
                known.join(", ")
            ))),
        }
    }

    /// Returns `true` if `row` is selected.
    pub(super) fn has(&self, row: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|name| name == row)
    }
}

#[cfg(test)]
mod tests {
    use super::Wanted;

    #[test]
    fn rows_are_selected_by_their_names() {
        let known = ["commit_1GiB", "free"].map(str::to_owned);
        let wanted = |name: &str| Wanted::new(&[name.to_owned()], &known);
        let one = wanted("commit_1GiB").unwrap();
        assert!(one.has("commit_1GiB") && !one.has("free"));
        let all = Wanted::new(&[], &known).unwrap();
        assert!(all.has("free"));
        let error = wanted("commit").unwrap_err();
        assert!(error.is::<cuvmm_cli::command::Usage>(), "{error}");
    }
}
