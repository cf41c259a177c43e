//! `cargo xtask windows`: the packages that build for Windows are checked for both of its targets, and
//! programs for `-gnu` run under Wine.
//!
//! Wine shows that the driver's library is loaded and that handles pass, not how a driver of Windows
//! answers: `nvcuda.dll` is a stand-in here, and no GPU is used. `-msvc` is checked and never linked. A
//! part whose tools are missing prints `DID NOT RUN` with the reason.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use cuvmm_sys::{CudaVersion, SYMBOLS};

use crate::cargo;

const GNU: &str = "x86_64-pc-windows-gnu";
const MSVC: &str = "x86_64-pc-windows-msvc";
const COMPILER: &str = "x86_64-w64-mingw32-gcc";

/// The packages for Windows, from the bottom up.
const PACKAGES: [&str; 7] = [
    "cuvmm-sys",
    "cuvmm-driver",
    "cuvmm-model",
    "cuvmm",
    "cuvmm-command",
    "cuvmm-lab",
    "cuvmm-cli",
];

/// The stand-in for the driver's library, without the functions that do nothing.
const NVCUDA: &str = include_str!("windows/nvcuda.c");

/// The system's random numbers, which Rust's standard library takes from `bcryptprimitives.dll`. Wine has
/// that library since version 9.
const RANDOM: &str = "__declspec(dllimport) unsigned char __stdcall SystemFunction036(void *, unsigned long);\n\
    __declspec(dllexport) int __stdcall ProcessPrng(void *to, unsigned long long size) {\n\
    return SystemFunction036(to, (unsigned long)size);\n}\n";

/// Checks what builds for Windows, and runs it under Wine.
#[derive(Debug, clap::Args)]
pub(crate) struct Windows {
    /// Build in this folder [default: $CARGO_TARGET_DIR, or target]
    #[arg(long)]
    target: Option<PathBuf>,
}

impl Windows {
    pub(crate) fn run(self) -> Result<()> {
        let given = self
            .target
            .or_else(|| std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from));
        let target = given.unwrap_or_else(|| cargo::workspace().join("target"));
        let mut linkable = false;
        for triple in [MSVC, GNU] {
            let mut add = Command::new("rustup");
            if let Err(reason) = cargo::output(add.args(["target", "add", triple])) {
                println!("*** DID NOT RUN: {triple} cannot be added: {reason:#}");
                continue;
            }
            check(&target, triple)?;
            linkable = triple == GNU;
        }
        let Some(wine) = wine().filter(|_| linkable && starts(COMPILER)) else {
            println!("*** DID NOT RUN: programs for Windows need {GNU}, {COMPILER} and Wine");
            return Ok(());
        };
        Machine::new(&target, wine)?.run_all()
    }
}

/// Checks types and lints.
fn check(target: &Path, triple: &str) -> Result<()> {
    let mut command = cargo::command();
    command.env("CARGO_TARGET_DIR", target).arg("clippy");
    command.args(["--lib", "--bins", "--target", triple]);
    command.args(PACKAGES.iter().flat_map(|name| ["--package", name]));
    cargo::succeed(command.args(["--", "-D", "warnings"]))
}

fn starts(program: impl AsRef<std::ffi::OsStr>) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

/// Returns Wine's 64-bit loader. Debian keeps it beside the path.
fn wine() -> Option<PathBuf> {
    let names = ["wine64", "/usr/lib/wine/wine64", "wine"];
    names.iter().find(|name| starts(name)).map(PathBuf::from)
}

/// A machine of Wine's, in a folder.
struct Machine {
    target: PathBuf,
    wine: PathBuf,
    folder: PathBuf,
}

impl Machine {
    fn new(target: &Path, wine: PathBuf) -> Result<Self> {
        let machine = Self {
            target: target.to_owned(),
            wine,
            folder: target.join("wine"),
        };
        cargo::output(machine.start(Path::new("wineboot")).arg("-i"))?;
        let random = machine.system().join("bcryptprimitives.dll");
        if !random.exists() {
            machine.library(RANDOM, &random, &["-ladvapi32"])?;
        }
        Ok(machine)
    }

    fn system(&self) -> PathBuf {
        self.folder.join("drive_c/windows/system32")
    }

    /// Compiles a library.
    fn library(&self, text: &str, to: &Path, more: &[&str]) -> Result<()> {
        let source = self.folder.join("library.c");
        fs::write(&source, text).with_context(|| format!("{}", source.display()))?;
        let mut compiler = Command::new(COMPILER);
        compiler.args(["-shared", "-o"]).args([to, &source]);
        cargo::succeed(compiler.args(more))
    }

    /// Returns a command that runs a program.
    fn start(&self, program: &Path) -> Command {
        let mut command = Command::new(&self.wine);
        command
            .env("WINEPREFIX", &self.folder)
            .env("WINEDEBUG", "-all");
        command.env("WINEDLLOVERRIDES", "mscoree,mshtml=");
        command.arg(program);
        command
    }

    /// Builds programs with a command of cargo and returns them.
    fn build(&self, arguments: &[&str]) -> Result<Vec<PathBuf>> {
        let mut command = cargo::command();
        command.env("CARGO_TARGET_DIR", &self.target);
        command.env("CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER", COMPILER);
        command.args(arguments);
        command.args([
            "--target",
            GNU,
            "--message-format",
            "json-render-diagnostics",
        ]);
        let built = cargo::output(&mut command)?;
        let messages = built.lines().map(serde_json::from_str::<cargo::Message>);
        let programs = messages.filter_map(|message| message.ok()?.executable);
        Ok(programs.collect())
    }

    fn run_all(&self) -> Result<()> {
        let installed = self.system().join("nvcuda.dll");
        let _ = fs::remove_file(&installed);
        let command = self.build(&["build", "--package", "cuvmm-cli"])?;
        let command = command.first().context("no command was built")?;
        let beside = command.with_file_name("nvcuda.dll");
        self.library(&stand_in(), &beside, &[])?;
        let info = || cargo::output(self.start(command).arg("info"));
        let said = info()?;
        ensure!(
            said.contains("tried nvcuda.dll"),
            "a library beside the program was loaded:\n{said}"
        );
        fs::rename(&beside, &installed)?;
        let said = info()?;
        ensure!(
            said.contains("cuda   there"),
            "the stand-in was not found:\n{said}"
        );
        let mut replay = self.start(command);
        let said =
            cargo::output(replay.args(["replay", "--driver", "model", "--policy", "elastic"]))?;
        ensure!(said.contains("No stamps"), "no report of a replay:\n{said}");
        println!("{said}");

        let tests = [
            "test",
            "--no-run",
            "--package",
            "cuvmm-model",
            "--package",
            "cuvmm-driver",
            "--package",
            "cuvmm",
        ];
        let more = [
            "--test",
            "model",
            "--test",
            "model_functions",
            "--test",
            "win32_sharing",
            "--test",
            "win32",
        ];
        for program in self.build(&[&tests[..], &more].concat())? {
            cargo::succeed(self.start(&program).env("CUVMM_TEST_NVCUDA", "1"))?;
        }
        let version = cargo::output(Command::new(&self.wine).arg("--version"))?;
        println!("programs for {GNU} ran under {}", version.trim());
        Ok(())
    }
}

/// Returns the stand-in with the functions that it does not define.
fn stand_in() -> String {
    let missing = SYMBOLS.iter().filter(|symbol| {
        let defined = NVCUDA.contains(&format!(" {}(", symbol.name));
        symbol.since <= CudaVersion::OLDEST_SUPPORTED && !defined
    });
    let nothing = |name: &str| format!("API {name}(void) {{ return 0; }}\n");
    let nothing: String = missing.map(|symbol| nothing(symbol.name)).collect();
    format!("{NVCUDA}\n{nothing}")
}
