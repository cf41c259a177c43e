//! Programs in C over the stand-in: compiled by the C compiler, and run with settings.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::built;

/// A folder with the stand-in, and programs that are linked with it.
pub(crate) struct Programs {
    folder: tempfile::TempDir,
}

impl Programs {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        built::fakecuda_in(folder.path());
        Self { folder }
    }

    /// Returns the path of a file in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Compiles a program of `tests/c`, with lines for the report.
    pub(crate) fn compile(&self, name: &str) -> PathBuf {
        self.compile_with(name, &[])
    }

    /// Compiles a program of `tests/c` with more options.
    pub(crate) fn compile_with(&self, name: &str, options: &[&str]) -> PathBuf {
        let here = Path::new(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../stand-in/fakecuda"
        ));
        let program = self.path(name);
        let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
        let output = Command::new(compiler)
            .args([
                "-std=c11",
                "-D_GNU_SOURCE",
                "-g",
                "-O0",
                "-Wall",
                "-Wextra",
                "-Werror",
            ])
            .args(options)
            .arg("-I")
            .arg(here.join("include"))
            .arg("-o")
            .arg(&program)
            .arg(here.join("tests/c").join(format!("{name}.c")))
            .arg("-L")
            .arg(self.folder.path())
            .arg("-l:libcuda.so.1")
            .output()
            .expect("a C compiler can be started");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{name}.c: {said}");
        program
    }

    /// Runs a program over the stand-in, with these settings and no others.
    #[allow(dead_code, reason = "tests of a command run their programs by it")]
    pub(crate) fn run(&self, program: &Path, words: &[&str], settings: &[(&str, &str)]) -> Output {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("FAKECUDA_") {
                command.env_remove(name);
            }
        }
        command
            .args(words)
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env("FAKECUDA_CAPACITY", "64MiB")
            .envs(settings.iter().copied())
            .current_dir(self.folder.path())
            .output()
            .expect("the program can be started")
    }
}

/// Returns what a program wrote on standard error.
pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
