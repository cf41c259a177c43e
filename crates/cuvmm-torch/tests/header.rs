//! The C header has the library's functions with their types, and a program in C that uses it runs
//! over the stand-in for libcuda.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../stand-in/fakecuda/testing/built.rs"]
mod built;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Types of Rust and C. Functions with others are for PyTorch and Python alone.
const TYPES: [(&str, &str); 20] = [
    ("c_int", "int "),
    ("c_double", "double "),
    ("f64", "double "),
    ("isize", "ssize_t "),
    ("usize", "size_t "),
    ("u32", "uint32_t "),
    ("u64", "uint64_t "),
    ("*const c_char", "const char *"),
    ("*mut c_char", "char *"),
    ("*const c_void", "const void *"),
    ("*mut c_void", "void *"),
    ("*const c_int", "const int *"),
    ("*mut c_int", "int *"),
    ("*mut usize", "size_t *"),
    ("*mut u32", "uint32_t *"),
    ("*mut u64", "uint64_t *"),
    ("*mut [u64; 2]", "uint64_t *"),
    ("Option<Collector>", "cuvmm_collector "),
    ("Option<Observer>", "cuvmm_observer "),
    ("Option<OnPressure>", "cuvmm_on_pressure "),
];

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the texts of all Rust files in a folder.
fn sources(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let texts = entries.flat_map(|path| match path.is_dir() {
        true => sources(&path),
        false => vec![fs::read_to_string(path).unwrap()],
    });
    texts.collect()
}

/// Returns a type in C, or `None` for one that C programs have no use for.
fn in_c(rust: &str) -> Option<&'static str> {
    let rust = rust.trim().trim_start_matches("collecting::");
    let found = TYPES.iter().find(|(name, _)| {
        let within = name.strip_prefix("Option<");
        *name == rust || within.and_then(|it| it.strip_suffix('>')) == Some(rust)
    });
    found.map(|(_, c)| *c)
}

/// Returns the declaration in C of a function that begins with its name.
fn declaration(function: &str) -> Option<String> {
    let (name, rest) = function.split_once('(')?;
    let (signature, _) = rest.split_once('{')?;
    let (arguments, result) = signature.rsplit_once(')')?;
    let result = match result.trim().strip_prefix("->") {
        Some(result) => in_c(result)?,
        None => "void ",
    };
    let arguments = arguments.split(',').filter(|it| !it.trim().is_empty());
    let arguments: Option<Vec<String>> = arguments
        .map(|argument| {
            let (name, rust) = argument.split_once(':')?;
            let name = name.trim().trim_start_matches('_');
            Some(format!("{}{name}", in_c(rust)?))
        })
        .collect();
    let arguments = arguments?.join(", ");
    let arguments = if arguments.is_empty() {
        "void"
    } else {
        &arguments
    };
    Some(format!("{result}{name}({arguments})"))
}

#[test]
fn the_header_declares_the_functions_for_c() {
    let mut exported = BTreeSet::new();
    for text in sources(&folder().join("src")) {
        for after in text.split("#[unsafe(no_mangle)]").skip(1) {
            let (_, function) = after.split_once(" fn ").unwrap();
            exported.extend(declaration(function));
        }
    }
    let header = fs::read_to_string(folder().join("include/cuvmm.h")).unwrap();
    let lines = header
        .lines()
        .filter(|line| !line.starts_with(['/', '#', '}']));
    let text: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
    let text = text.join(" ").replace("extern \"C\" { ", "");
    let declared = text.split(';').map(str::trim);
    let declared = declared.filter(|it| !it.is_empty() && !it.starts_with("typedef "));
    let declared: BTreeSet<String> = declared.map(str::to_owned).collect();
    let missing: Vec<_> = exported.difference(&declared).collect();
    let wrong: Vec<_> = declared.difference(&exported).collect();
    assert!(
        missing.is_empty() && wrong.is_empty(),
        "the header lacks {missing:#?} and has {wrong:#?}"
    );
    assert!(exported.len() > 90, "{exported:?}");
}

/// Compiles the example into a folder; `None`, after saying so, where there is no compiler.
fn compiled(to: &Path, libraries: &Path) -> Option<PathBuf> {
    let program = to.join("sleep");
    let mut compiler = Command::new("gcc");
    compiler.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"]);
    compiler.arg(folder().join("include"));
    compiler
        .arg(folder().join("examples/sleep.c"))
        .arg("-o")
        .arg(&program);
    compiler.arg("-L").arg(libraries).arg("-lcuvmm_torch");
    match compiler.output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{said}");
            Some(program)
        }
        Err(error) => {
            println!("the example in C was not tried: gcc cannot be started: {error}");
            None
        }
    }
}

#[test]
fn the_example_in_c_runs() {
    let own = std::env::current_exe().unwrap();
    let libraries = own.parent().unwrap();
    let to = tempfile::tempdir().unwrap();
    let Some(program) = compiled(to.path(), libraries) else {
        return;
    };
    built::fakecuda_in(to.path());
    let path = std::env::join_paths([to.path(), libraries]).unwrap();
    let output = Command::new(program)
        .env("LD_LIBRARY_PATH", path)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{text}"
    );
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[..2], ["asleep: 64 of 64 MiB are free", "awake: 1.5"]);
    let refused = "refused: out of memory: tenant \"torch\" needs 64 MiB more, 32 MiB available ";
    assert!(lines[2].starts_with(refused), "{text}");
}
