//! Cost tables of driver calls that the command line names.

use std::path::Path;

use cuvmm::driver::model::Costs;

use crate::command::usage;
use crate::files;

/// Reads a cost table that `cuvmm-bench run --save-costs` wrote.
///
/// # Errors
/// Wrong usage: the file cannot be read or is not a cost table; the error names its path.
pub fn read(file: &Path) -> anyhow::Result<Costs> {
    let table = files::text(file)?.parse();
    table.map_err(|error| files::wrong(file, error))
}

/// Returns the cost table in `file`, else of `gpu`, else the default table.
///
/// # Errors
/// Wrong usage: the errors of [`read`], or a GPU without a table.
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

/// Returns the memory in bytes of the measured GPU, or `None` if the table does not say.
///
/// # Errors
/// Wrong usage: the memory exceeds 64 bits.
pub fn memory(costs: &Costs) -> anyhow::Result<Option<u64>> {
    if costs.memory_mib < 1.0 {
        return Ok(None);
    }
    let bytes = (costs.memory_mib as u64).checked_mul(1 << 20);
    let too_much = || {
        usage(format!(
            "the table of costs is of a device with {} MiB, which is more than 16 EiB: --memory says another size",
            costs.memory_mib
        ))
    };
    bytes.map(Some).ok_or_else(too_much)
}

/// Describes where a table was measured, for people.
pub fn about(costs: &Costs) -> &str {
    match costs.about.as_str() {
        "" => "a table that does not say where it was measured",
        about => about,
    }
}
