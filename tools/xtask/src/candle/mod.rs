//! The workspace of `cuvmm-candle` and `cuvmm-serve`, which are not in the main workspace because
//! candle's `cuda` feature requires nvcc.
//!
//! `check` needs no toolkit, because the compiled kernels are not used before they run on a GPU.
//! Nor does `test`, which links with stand-ins for CUDA's libraries and loads them: it is for the
//! tests that need no GPU, and gives the same results on every machine. On a machine with a GPU and
//! a toolkit, `cargo test` in the crate's folder runs everything. `build` uses a real toolkit, from
//! the path or from PyPI, and keeps its files apart, because files built for the stub cannot be
//! used with it.

mod stand_in;
mod toolkit;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::cargo::{self, Message, succeed};
use toolkit::Toolkit;

/// Check, test or build the crates cuvmm-candle and cuvmm-serve.
#[derive(Debug, clap::Args)]
pub(crate) struct Candle {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    /// Check their format, types, lints and documentation. Needs no toolkit.
    Check,
    /// Run their tests as on a machine without a GPU, even if there is one. Needs no toolkit.
    Test,
    /// Find a toolkit, or assemble one from PyPI, and print the shell commands that select it.
    Toolkit,
    /// Build the server, the examples and the GPU tests in release, stripped, for a machine without cargo.
    Build {
        /// The folder to write them to.
        folder: PathBuf,
    },
}

impl Candle {
    pub(crate) fn run(self) -> Result<()> {
        let target = target()?;
        match self.task {
            Task::Check => check(&target),
            Task::Test => test(&target),
            Task::Toolkit => {
                for (name, value) in Toolkit::find(&target)?.environment() {
                    println!("export {name}={value:?}");
                }
                Ok(())
            }
            // Cargo starts this program in the user's folder, and is itself started in the
            // workspace.
            Task::Build { folder } => build(&target, &std::path::absolute(folder)?),
        }
    }
}

fn workspace() -> PathBuf {
    cargo::workspace().join("integrations/candle")
}

/// Returns the folder for its build files.
fn target() -> Result<PathBuf> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let target = target.unwrap_or_else(|| cargo::workspace().join("target"));
    Ok(std::path::absolute(target)?.join("candle"))
}

/// Returns a command that runs cargo in the workspace.
fn command(target: &Path) -> Command {
    let mut command = cargo::command();
    command
        .current_dir(workspace())
        .env("CARGO_TARGET_DIR", target);
    command
}

fn stub(target: &Path) -> PathBuf {
    target.join("stub")
}

/// Returns a command that runs cargo with the stub toolkit. All builds with it share one folder,
/// because `check` and `test` have much in common.
fn without_toolkit(target: &Path, arguments: &[&str]) -> Result<Command> {
    let toolkit = toolkit::stub(&stub(target))?;
    let mut command = command(&target.join("check"));
    command.args(arguments).envs(toolkit.environment());
    Ok(command)
}

fn check(target: &Path) -> Result<()> {
    for arguments in [
        // Not `--all`, which includes the dependencies that are in this repository.
        &["fmt", "--check", "-pcuvmm-candle", "-pcuvmm-serve"][..],
        &[
            "clippy",
            "--locked",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ],
        // The examples enable features of their dependencies, as they do for the lints. Without
        // them all of candle would be checked a second time, for the features that remain.
        &[
            "doc",
            "--locked",
            "--workspace",
            "--no-deps",
            "--lib",
            "--bins",
            "--examples",
        ],
    ] {
        let mut command = without_toolkit(target, arguments)?;
        succeed(command.env("RUSTDOCFLAGS", "-D warnings"))?;
    }
    Ok(())
}

fn test(target: &Path) -> Result<()> {
    let libraries = toolkit::libraries(&stub(target));
    stand_in::to_run(&libraries)?;
    let path = before(libraries, "LD_LIBRARY_PATH");
    // The examples are parts of the tests here, and separate programs in `build`.
    for targets in ["--tests", "--doc"] {
        let mut command = without_toolkit(target, &["test", "--locked", "--workspace", targets])?;
        succeed(command.env("LD_LIBRARY_PATH", &path))?;
    }
    Ok(())
}

fn before(folder: PathBuf, variable: &str) -> OsString {
    let mut folders = folder.into_os_string();
    if let Some(rest) = std::env::var_os(variable).filter(|rest| !rest.is_empty()) {
        folders.push(":");
        folders.push(rest);
    }
    folders
}

fn build(target: &Path, folder: &Path) -> Result<()> {
    let toolkit = Toolkit::find(target)?;
    let target = target.join("build");
    std::fs::create_dir_all(folder)?;
    for arguments in [
        &[
            "build",
            "--locked",
            "--release",
            "--workspace",
            "--bins",
            "--examples",
        ][..],
        &[
            "test",
            "--locked",
            "--release",
            "--workspace",
            "--no-run",
            "--bins",
            "--test",
            "gpu",
        ],
    ] {
        let mut command = command(&target);
        command.args(arguments).envs(toolkit.environment());
        for message in cargo::build(&mut command)? {
            let Some((name, file)) = built(message) else {
                continue;
            };
            let to = folder.join(name);
            std::fs::copy(&file, &to).with_context(|| format!("copying {}", file.display()))?;
            succeed(Command::new("strip").arg(&to))?;
            println!("{:>10}  {}", std::fs::metadata(&to)?.len(), to.display());
        }
    }
    Ok(())
}

/// Returns the name and path of a program, if a message of cargo names one. The tests of a program
/// get a name of their own.
fn built(message: Message) -> Option<(String, PathBuf)> {
    let name = message.target?.name;
    let name = match message.profile.test {
        true => name + "-tests",
        false => name,
    };
    Some((name, message.executable?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_what_cargo_says() {
        let told = |line| built(Message::parse(line).expect("as cargo says it"));
        let line =
            r#"{"reason":"compiler-artifact","executable":"/t/load-1","target":{"name":"load"}}"#;
        assert_eq!(told(line), Some(("load".into(), "/t/load-1".into())));
        let line = r#"{"reason":"compiler-artifact","executable":"/t/gpu-1","profile":{"test":true},"target":{"name":"gpu"}}"#;
        assert_eq!(told(line), Some(("gpu-tests".into(), "/t/gpu-1".into())));
        let line = r#"{"reason":"compiler-artifact","executable":null,"target":{"name":"cuvmm"}}"#;
        assert_eq!(told(line), None);
        assert_eq!(told(r#"{"reason":"build-finished","success":true}"#), None);
        assert!(Message::parse("Finished").is_err());
    }
}
