//! Compares the driver's binary interface as `cuvmm-sys` assumes it with NVIDIA's headers.
//!
//! The assumptions come from the crate itself ([`cuvmm_sys::abi`] and [`cuvmm_sys::SYMBOLS`]);
//! nothing is repeated here. For each header a C file full of `_Static_assert`s is written and
//! given to the C compiler, which alone decides on sizes, offsets, values and prototypes. The
//! headers come from PyPI, one of each major version of CUDA, or from a folder.
//!
//! A newer header may contain more than the crate knows, with one exception: it must not contain a
//! result code that the crate has no name for.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use cuvmm_sys::abi::{LAYOUTS, constants};
use cuvmm_sys::{CUresult, CudaVersion, SYMBOLS, Symbol};

use crate::cargo::succeed;

/// The packages that contain a `cuda.h`, newest first.
const PACKAGES: &[&str] = &["nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"];

/// Check `cuvmm-sys` against NVIDIA's headers.
#[derive(Debug, clap::Args)]
pub(crate) struct Abi {
    /// A folder that contains cuda.h and cudaTypedefs.h, instead of those from PyPI. The first one
    /// given counts as the newest. May be repeated.
    #[arg(long = "headers", value_name = "FOLDER")]
    headers: Vec<PathBuf>,
}

impl Abi {
    pub(crate) fn run(self) -> Result<()> {
        let work = Path::new("target/abi");
        std::fs::create_dir_all(work).context("making target/abi")?;
        let folders = if self.headers.is_empty() {
            PACKAGES
                .iter()
                .map(|package| fetch(work, package))
                .collect::<Result<Vec<_>>>()?
        } else {
            self.headers
        };
        let mut headers = Vec::new();
        for folder in &folders {
            headers.push(Header::read(folder)?);
        }
        let newest = headers.iter().map(|header| header.version).max();
        let mut failures = 0;
        for header in &headers {
            failures += header.check(work, Some(header.version) == newest)?;
        }
        ensure!(
            failures == 0,
            "{failures} of {} headers disagree with cuvmm-sys",
            headers.len()
        );
        Ok(())
    }
}

/// Downloads a wheel, unpacks it and returns the folder that contains its `cuda.h`.
fn fetch(work: &Path, package: &str) -> Result<PathBuf> {
    let folder = work.join(package);
    if folder.exists() {
        std::fs::remove_dir_all(&folder).context("clearing an earlier download")?;
    }
    std::fs::create_dir_all(&folder)?;
    succeed(
        Command::new("python3")
            .args([
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
            ])
            .args(["--platform", "manylinux2014_x86_64"])
            .args(["--platform", "manylinux_2_17_x86_64"])
            .arg("-d")
            .arg(&folder)
            .arg(package),
    )?;
    let wheel = std::fs::read_dir(&folder)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .with_context(|| format!("pip downloaded no wheel of {package}"))?;
    println!(
        "{package}: {}",
        wheel.file_name().unwrap_or_default().display()
    );
    let unpacked = folder.join("unpacked");
    succeed(
        Command::new("python3")
            .args(["-m", "zipfile", "-e"])
            .arg(&wheel)
            .arg(&unpacked),
    )?;
    find(&unpacked, "cuda.h")?.with_context(|| format!("{package} holds no cuda.h"))
}

/// Returns the folder at or below `folder` that contains a file of this name.
fn find(folder: &Path, name: &str) -> Result<Option<PathBuf>> {
    if folder.join(name).is_file() {
        return Ok(Some(folder.to_owned()));
    }
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir()
            && let Some(found) = find(&path, name)?
        {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// One `cuda.h` with its typedefs.
struct Header {
    folder: PathBuf,
    version: CudaVersion,
    /// Every identifier in the header.
    words: BTreeSet<String>,
}

impl Header {
    fn read(folder: &Path) -> Result<Self> {
        let mut text = String::new();
        for file in ["cuda.h", "cudaTypedefs.h"] {
            let path = folder.join(file);
            let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
            text.push_str(&String::from_utf8_lossy(&bytes));
        }
        let version = text
            .lines()
            .find_map(|line| line.trim().strip_prefix("#define CUDA_VERSION "))
            .and_then(|number| number.trim().parse().ok())
            .map(CudaVersion::from_raw)
            .context("no CUDA_VERSION in cuda.h")?;
        let words = text
            .split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
            .map(str::to_owned)
            .collect();
        Ok(Self {
            folder: folder.to_owned(),
            version,
            words,
        })
    }

    fn has(&self, word: &str) -> bool {
        self.words.contains(word)
    }

    /// Prints the differences, and returns 1 if there are any.
    fn check(&self, work: &Path, newest: bool) -> Result<usize> {
        let mut complaints = Vec::new();
        let program = self.program(newest, &mut complaints)?;
        let file = work.join(format!("check-{}.c", self.version.as_raw()));
        std::fs::write(&file, program.text)?;
        let output = Command::new("cc")
            .args([
                "-std=gnu11",
                "-fsyntax-only",
                "-Wall",
                "-Werror",
                "-fmax-errors=0",
            ])
            .arg("-isystem")
            .arg(&self.folder)
            .arg(&file)
            .output()
            .context("starting the C compiler")?;
        if !output.status.success() {
            complaints.push(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        println!(
            "CUDA {} header: {} facts about types, {} constants, {} functions; \
             newer than this header: {}",
            self.version,
            program.layouts,
            program.constants,
            program.functions,
            if program.younger.is_empty() {
                "none".to_owned()
            } else {
                program.younger.join(", ")
            }
        );
        for complaint in &complaints {
            eprintln!("CUDA {} header DISAGREES: {complaint}", self.version);
        }
        Ok(usize::from(!complaints.is_empty()))
    }

    /// Returns a C file that compiles if and only if the header agrees.
    fn program(&self, newest: bool, complaints: &mut Vec<String>) -> Result<Program> {
        let mut program = Program::default();
        let text = &mut program.text;
        // With this macro the header declares each function under the name that the library
        // exports, and keeps the old versions too.
        text.push_str(
            "#define __CUDA_API_VERSION_INTERNAL\n\
             #include <stddef.h>\n\
             #include <cuda.h>\n\
             #include <cudaTypedefs.h>\n",
        );

        for layout in LAYOUTS {
            let name = layout.name;
            claim(text, &format!("sizeof({name}) == {}", layout.size))?;
            claim(text, &format!("_Alignof({name}) == {}", layout.align))?;
            program.layouts += 2;
            for field in layout.fields {
                let path = field.path;
                claim(
                    text,
                    &format!("offsetof({name}, {path}) == {}", field.offset),
                )?;
                claim(
                    text,
                    &format!("sizeof((({name} *)0)->{path}) == {}", field.size),
                )?;
                program.layouts += 2;
            }
        }

        for constant in constants() {
            if self.has(constant.name) {
                claim(
                    text,
                    &format!("(long long){} == {}", constant.name, constant.value),
                )?;
                program.constants += 1;
            } else if newest {
                complaints.push(format!("it has no {}", constant.name));
            } else {
                program.younger.push(constant.name);
            }
        }
        for word in &self.words {
            if word.starts_with("CUDA_ERROR_") && !is_known_code(word) {
                complaints.push(format!("cuvmm-sys has no name for the result code {word}"));
            }
        }

        for symbol in SYMBOLS {
            if symbol.since > self.version {
                program.younger.push(symbol.name);
                continue;
            }
            let pointer = pointer_type(symbol)?;
            // The exported name is that of the declaration. The plain name with the version that
            // introduced it is NVIDIA's own record of that version.
            let record = format!("PFN_{}_v{}", plain_name(symbol.name), symbol.since.as_raw());
            for (what, name) in [
                (format!("__typeof__(&{})", symbol.name), symbol.name),
                (record.clone(), record.as_str()),
            ] {
                if self.has(name) {
                    claim(
                        text,
                        &format!("__builtin_types_compatible_p({what}, {pointer})"),
                    )?;
                } else {
                    complaints.push(format!("it has no {name}"));
                }
            }
            program.functions += 1;
        }
        Ok(program)
    }
}

/// A C file, and the numbers of its assertions.
#[derive(Default)]
struct Program {
    text: String,
    layouts: usize,
    constants: usize,
    functions: usize,
    younger: Vec<&'static str>,
}

fn claim(text: &mut String, claim: &str) -> Result<()> {
    writeln!(
        text,
        "_Static_assert({claim}, \"cuvmm-sys says: {claim}\");"
    )?;
    Ok(())
}

fn is_known_code(name: &str) -> bool {
    CUresult::KNOWN.iter().any(|(known, _)| *known == name)
}

fn plain_name(symbol: &str) -> &str {
    match symbol.rsplit_once("_v") {
        Some((plain, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => plain,
        _ => symbol,
    }
}

fn pointer_type(symbol: &Symbol) -> Result<String> {
    let parameters = symbol
        .parameters
        .iter()
        .map(|parameter| c_type(parameter.rust_type))
        .collect::<Result<Vec<_>>>()?;
    let parameters = if parameters.is_empty() {
        "void".to_owned()
    } else {
        parameters.join(", ")
    };
    Ok(format!("CUresult (*)({parameters})"))
}

/// Returns a Rust type in C's spelling: `*mut *const c_char` is `const char **`.
fn c_type(rust: &str) -> Result<String> {
    if let Some(pointee) = rust.strip_prefix("*mut ") {
        return Ok(format!("{} *", c_type(pointee)?));
    }
    if let Some(pointee) = rust.strip_prefix("*const ") {
        let pointee = c_type(pointee)?;
        // In C, `const` applies to what precedes it, so it follows a pointer.
        return Ok(if pointee.ends_with('*') {
            format!("{pointee} const *")
        } else {
            format!("const {pointee} *")
        });
    }
    Ok(match rust {
        "usize" => "size_t",
        "f32" => "float",
        "c_char" => "char",
        "c_int" => "int",
        "c_uchar" => "unsigned char",
        "c_uint" => "unsigned int",
        "c_ulonglong" => "unsigned long long",
        "c_ushort" => "unsigned short",
        "c_void" => "void",
        ours if ours.starts_with("CU") || ours.starts_with("cu") => ours,
        other => bail!("no C spelling known for the Rust type {other}"),
    }
    .to_owned())
}

#[cfg(test)]
mod tests {
    use super::{c_type, plain_name};

    #[test]
    fn spelling() {
        let c = |rust| c_type(rust).expect("known");
        assert_eq!(c("usize"), "size_t");
        assert_eq!(c("*mut *const c_char"), "const char * *");
        assert_eq!(c("*const *const c_void"), "const void * const *");
        assert_eq!(c("*const CUmemLocation"), "const CUmemLocation *");
        assert!(c_type("Vec<u8>").is_err());
    }

    #[test]
    fn names() {
        assert_eq!(plain_name("cuMemFree_v2"), "cuMemFree");
        assert_eq!(plain_name("cuMemFree"), "cuMemFree");
    }
}
