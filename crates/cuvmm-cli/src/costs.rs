//! Tables of what driver calls cost, as the command line names them.

use std::path::Path;

use cuvmm::driver::model::Costs;

use crate::command::usage;
use crate::files;

/// Reads a table that `cuvmm-bench run --save-costs` wrote.
///
/// # Errors
/// Wrong usage: a file that cannot be read or is no table, with its name.
pub fn read(file: &Path) -> anyhow::Result<Costs> {
    let table = files::text(file)?.parse();
    table.map_err(|error| files::wrong(file, error))
}

/// The table in a file, or of a GPU that was measured, or the usual one.
///
/// # Errors
/// As [`read`]; a GPU without a table is wrong usage.
pub fn chosen(file: Option<&Path>, gpu: Option<&str>) -> anyhow::Result<Costs> {
    match (file, gpu) {
        (Some(file), _) => read(file),
        (None, Some(gpu)) => Costs::of_gpu(gpu).ok_or_else(|| {
            let known: Vec<_> = Costs::gpus().collect();
            let known = known.join(", ");
            usage(format!(
                "--gpu: there is no table for {gpu:?}, but for {known}; `cuvmm-bench run --save-costs` makes one"
            ))
        }),
        (None, None) => Ok(Costs::default()),
    }
}

/// Where a table was measured, for people.
pub fn about(costs: &Costs) -> &str {
    match costs.about.as_str() {
        "" => "a table that does not say where it was measured",
        about => about,
    }
}
