//! The files of the project that a path executes: what a reader of that path has to know.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use super::bounds::{PATHS, Setting};
use super::program;
use super::trace::{self, Stretches, Visited};

/// The operations whose files are listed, and the paths that are such operations.
const OPERATIONS: [(&str, &str); 5] = [
    ("cached slot", "allocate-locked"),
    ("cold allocation", "cold"),
    ("growth", "grow"),
    ("heap miss", "heap-miss"),
    ("sleep", "sleep"),
];

/// Prints the files of each operation, or of the paths whose names begin with `wanted`. Returns `false`
/// if the program may not be traced.
pub(super) fn print(wanted: Option<&str>) -> Result<bool> {
    let program = program::build("profiling")?;
    let operation = |name| OPERATIONS.iter().find(|(_, path)| *path == name);
    println!("files executed: those of the library, and those of the drivers");
    for path in PATHS {
        let what = match (wanted, operation(path.name)) {
            (Some(begin), _) if path.name.starts_with(begin) => path.name,
            (None, Some((what, _))) => what,
            _ => continue,
        };
        let mut visited = Visited::new();
        let arguments = path.arguments(Setting::Few);
        if let Stretches::Refused(why) = trace::trace(&program, &arguments, Some(&mut visited))? {
            eprintln!("{why}");
            return Ok(false);
        }
        let files = files(&lines(&program, &visited)?);
        let own = files
            .iter()
            .filter(|file| file.starts_with("crates/cuvmm/"));
        let own = own.count();
        println!("{what:<18} {own:>3} and {}", files.len() - own);
        files.iter().for_each(|file| println!("    {file}"));
    }
    Ok(true)
}

/// Returns what `addr2line` says of instructions: lines with files, those of inlined functions too.
fn lines(program: &Path, visited: &Visited) -> Result<String> {
    let mut child = Command::new("addr2line")
        .arg("--inlines")
        .arg("--exe")
        .arg(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting addr2line, which binutils and LLVM have")?;
    let mut input = child.stdin.take().context("its input is piped")?;
    let offsets: String = visited.iter().map(|at| format!("{at:#x}\n")).collect();
    let writes = std::thread::spawn(move || input.write_all(offsets.as_bytes()));
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "addr2line failed");
    let written = writes.join().ok().context("the writer has ended")?;
    written.context("writing to addr2line")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the files of the project's crates in lines such as `/a/crates/cuvmm/src/pool/state.rs:17`.
fn files(lines: &str) -> BTreeSet<String> {
    let files = lines.lines().filter_map(|line| {
        let (file, _) = line.split_once(':')?;
        let at = file.find("crates/")?;
        let is_ours = at == 0 || !file.contains("/.cargo/");
        file.get(at..).filter(|_| is_ours)
    });
    files.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_paths() {
        for (what, name) in OPERATIONS {
            assert!(PATHS.iter().any(|path| path.name == name), "{what}");
        }
    }

    #[test]
    fn files_of_the_project_are_found_in_lines() {
        let lines = "/home/a/crates/cuvmm/src/pool/state.rs:17\n\
                     crates/cuvmm-driver/src/model/mod.rs:3 (discriminator 2)\n??:0\n\
                     /home/a/tools/counted/src/cases.rs:9\n\
                     /rustc/0123/library/core/src/option.rs:1\n\
                     /home/a/.cargo/registry/src/x/crates/y/src/lib.rs:2\n\
                     /home/a/crates/cuvmm/src/pool/state.rs:18\n";
        let found: Vec<String> = files(lines).into_iter().collect();
        let expected = [
            "crates/cuvmm-driver/src/model/mod.rs",
            "crates/cuvmm/src/pool/state.rs",
        ];
        assert_eq!(found, expected);
    }
}
