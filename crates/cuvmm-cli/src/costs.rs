//! Cost tables of driver calls that the command line names.

use std::path::Path;

use cuvmm::driver::model::Costs;

use crate::command::usage;
use crate::files;

/// Reads a cost table that `cuvmm-bench run --save-costs` wrote.
///
/// # Errors
/// Wrong usage: a file that cannot be read or is not a cost table, with its path.
pub fn read(file: &Path) -> anyhow::Result<Costs> {
    let table = files::text(file)?.parse();
    table.map_err(|error| files::wrong(file, error))
}

/// Returns the cost table in `file`, or else the table of `gpu`, or else the default table.
///
/// # Errors
/// Wrong usage: the errors of [`read`], and a GPU without a table.
pub fn chosen(file: Option<&Path>, gpu: Option<&str>) -> anyhow::Result<Costs> {
    match (file, gpu) {
        (Some(file), _) => read(file),
        (None, Some(gpu)) => Costs::of_gpu(gpu).ok_or_else(|| {
            let known: Vec<_> = Costs::gpus().collect();
            let known = known.join(", ");
            usage(format!(
                "--gpu: there is no table for {gpu:?}, only for {known}; `cuvmm-bench run --save-costs` makes one"
            ))
        }),
        (None, None) => Ok(Costs::default()),
    }
}

/// Returns a description of where a table was measured, for people.
pub fn about(costs: &Costs) -> &str {
    match costs.about.as_str() {
        "" => "a table that does not say where it was measured",
        about => about,
    }
}
