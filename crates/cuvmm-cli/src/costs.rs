//! Tables of what driver calls cost, as the command line names them.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use cuvmm::driver::model::Costs;

use crate::usage;

/// Reads a table that `cuvmm bench --save-costs` wrote.
///
/// # Errors
/// A file that cannot be read or is no table, with its name.
pub(crate) fn read(file: &Path) -> anyhow::Result<Costs> {
    let named = || file.display().to_string();
    let text = fs::read_to_string(file).with_context(named)?;
    text.parse().with_context(named)
}

/// The table in a file, or of a GPU that was measured, or the usual one.
///
/// # Errors
/// As [`read`]; a GPU without a table is wrong usage.
pub(crate) fn chosen(file: Option<&Path>, gpu: Option<&str>) -> anyhow::Result<Costs> {
    match (file, gpu) {
        (Some(file), _) => read(file),
        (None, Some(gpu)) => Costs::of_gpu(gpu).ok_or_else(|| {
            let known: Vec<_> = Costs::gpus().collect();
            let known = known.join(", ");
            usage(format!(
                "--gpu: there is no table for {gpu:?}, but for {known}; `cuvmm bench --save-costs` makes one"
            ))
        }),
        (None, None) => Ok(Costs::default()),
    }
}

/// Where a table was measured, for people.
pub(crate) fn about(costs: &Costs) -> &str {
    match costs.about.as_str() {
        "" => "a table that does not say where it was measured",
        about => about,
    }
}
