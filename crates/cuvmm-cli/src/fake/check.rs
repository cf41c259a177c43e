//! Lets fakecuda check its settings before the program starts.
//!
//! A program that ignores the error of `cuInit` would test nothing, and end as if all were well. So
//! another process of this command loads the library first.

use std::env;
use std::ffi::OsString;
use std::process::{Command, Stdio};

use cuvmm_command::command::usage;

/// The options whose values only the library understands, with their variables.
const OPTIONS: [(&str, &str); 5] = [
    ("--gpu", "FAKECUDA_GPU"),
    ("--cuda", "FAKECUDA_VERSION"),
    ("--latency", "FAKECUDA_LATENCY"),
    ("--fail", "FAKECUDA_FAIL"),
    ("--report", "FAKECUDA_REPORT"),
];

/// Fails with the library's complaint, if a setting of these variables, of the environment or of the
/// file of settings is wrong.
pub(super) fn check(variables: &[(&'static str, OsString)]) -> anyhow::Result<()> {
    let output = Command::new(env::current_exe()?)
        .args(["info", "--driver", "cuda"])
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .env("FAKECUDA_CHECK", "1")
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let complaint = said.split_once("; cuInit fails");
    let complaint = complaint.and_then(|(before, _)| before.split_once("fakecuda: "));
    let Some((_, complaint)) = complaint else {
        return Ok(());
    };
    let option = OPTIONS.iter().find_map(|&(option, variable)| {
        let rest = complaint.strip_prefix(variable)?.strip_prefix('=')?;
        let is_given = variables.iter().any(|&(name, _)| name == variable);
        is_given.then(|| format!("{option} {rest}"))
    });
    Err(usage(option.unwrap_or_else(|| complaint.to_owned())))
}
