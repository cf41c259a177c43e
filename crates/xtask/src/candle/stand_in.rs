//! Libraries of CUDA's to link with and never to run: their names, and every function that cudarc
//! knows of them, doing nothing.
//!
//! What is linked asks for the real ones by these names where it runs.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use super::{command, succeed};

/// cudarc's module, the library, and the name under which it is loaded.
const LIBRARIES: &[(&str, &str, &str)] = &[
    ("driver", "libcuda.so", "libcuda.so.1"),
    ("cublas", "libcublas.so", "libcublas.so.13"),
    ("cublaslt", "libcublasLt.so", "libcublasLt.so.13"),
    ("curand", "libcurand.so", "libcurand.so.10"),
    ("nvrtc", "libnvrtc.so", "libnvrtc.so.13"),
];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
}

/// Makes all of them in a folder, or leaves no folder.
pub(super) fn make(folder: &Path) -> Result<()> {
    let cudarc = cudarc()?;
    let parent = folder.parent().context("the folder lies in one")?;
    let work = tempdir_in(parent)?;
    for &(module, file, name) in LIBRARIES {
        let source = cudarc.join("src").join(module).join("sys/mod.rs");
        let source =
            std::fs::read_to_string(&source).with_context(|| source.display().to_string())?;
        let functions = functions(&source);
        ensure!(
            !functions.is_empty(),
            "cudarc declares no functions of {file} any more"
        );
        let mut text = String::new();
        for function in functions {
            writeln!(text, "int {function}(void) {{ return 0; }}")?;
        }
        let code = work.join("library.c");
        std::fs::write(&code, text)?;
        succeed(
            Command::new("cc")
                .args(["-shared", "-fPIC", "-o"])
                .arg(work.join(file))
                .arg(format!("-Wl,-soname,{name}"))
                .arg(&code),
        )?;
        std::fs::remove_file(code)?;
    }
    std::fs::rename(&work, folder).context("moving the libraries to their place")
}

fn tempdir_in(parent: &Path) -> Result<PathBuf> {
    let work = parent.join(format!("stubs-{}", std::process::id()));
    std::fs::create_dir_all(&work)?;
    Ok(work)
}

/// The folder of cudarc's source, in the version that the crate has.
fn cudarc() -> Result<PathBuf> {
    let output = command(Path::new("."))
        .args(["metadata", "--locked", "--format-version", "1"])
        .output()
        .context("starting cargo")?;
    ensure!(
        output.status.success(),
        "cargo metadata failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: Metadata = serde_json::from_slice(&output.stdout)?;
    let cudarc = metadata
        .packages
        .into_iter()
        .find(|package| package.name == "cudarc");
    let mut path = cudarc.context("the crate has no cudarc")?.manifest_path;
    path.pop();
    Ok(path)
}

/// The names that a file of bindings declares in `extern` blocks.
fn functions(source: &str) -> Vec<&str> {
    let mut found: Vec<&str> = source
        .split("extern \"C\" {")
        .skip(1)
        .filter_map(|block| {
            let (_, rest) = block.split_once("fn ")?;
            rest.split_once('(').map(|(name, _)| name)
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    #[test]
    fn functions_are_found() {
        let source = r#"
            type F = unsafe extern "C" fn(i32) -> i32;
            pub unsafe fn cuInit(flags: u32) -> u32 {
                extern "C" {
                    fn cuInit(flags: u32) -> u32;
                }
                cuInit(flags)
            }
            pub unsafe fn cuCtxCreate_v4(x: u32) { extern "C" { fn cuCtxCreate_v4(x: u32); } }
        "#;
        assert_eq!(super::functions(source), ["cuCtxCreate_v4", "cuInit"]);
        assert!(super::functions("fn nothing() {}").is_empty());
    }
}
