//! Stand-ins for CUDA's libraries: their names, and every function that can be linked with.
//!
//! A function returns the code for a stub, as in NVIDIA's own stubs, or the nearest code that its
//! library has. So a program that loads them and opens a GPU gets an error that says why there is
//! none.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use cuvmm_sys::{CUresult, SYMBOLS, Symbol};
use syn::visit::{self, Visit};

use super::command;
use crate::cargo::{self, succeed};
use crate::house::crates::{Metadata, Package};

struct Library {
    /// The names under which it is linked and under which it is loaded.
    file: &'static str,
    name: &'static str,
    /// The package that declares its functions, and the file in it.
    declared: (&'static str, &'static str),
    /// The functions that this project's own loader looks for in addition.
    symbols: &'static [Symbol],
    /// The code that its functions return.
    answer: i32,
}

/// The libraries that a toolkit from PyPI lacks.
const LIBRARIES: &[Library] = &[
    Library {
        file: "libcuda.so",
        name: "libcuda.so.1",
        declared: ("cudarc", "src/driver/sys/mod.rs"),
        symbols: SYMBOLS,
        answer: CUresult::CUDA_ERROR_STUB_LIBRARY.0,
    },
    Library {
        file: "libcublas.so",
        name: "libcublas.so.13",
        declared: ("cudarc", "src/cublas/sys/mod.rs"),
        symbols: &[],
        answer: 1, // CUBLAS_STATUS_NOT_INITIALIZED
    },
    Library {
        file: "libcublasLt.so",
        name: "libcublasLt.so.13",
        declared: ("cudarc", "src/cublaslt/sys/mod.rs"),
        symbols: &[],
        answer: 1, // CUBLAS_STATUS_NOT_INITIALIZED
    },
    Library {
        file: "libcurand.so",
        name: "libcurand.so.10",
        declared: ("cudarc", "src/curand/sys/mod.rs"),
        symbols: &[],
        answer: 203, // CURAND_STATUS_INITIALIZATION_FAILED
    },
    Library {
        file: "libnvrtc.so",
        name: "libnvrtc.so.13",
        declared: ("cudarc", "src/nvrtc/sys/mod.rs"),
        symbols: &[],
        answer: 11, // NVRTC_ERROR_INTERNAL_ERROR
    },
];

/// The runtime library. Only code compiled by nvcc calls it, so with the stub nvcc nothing does.
/// But the functions of that compiled code must exist for linking, and this library, which is
/// linked directly after it, contains them.
const RUNTIME: Library = Library {
    file: "libcudart.so",
    name: "libcudart.so.13",
    declared: ("candle-kernels", "src/ffi.rs"),
    symbols: &[],
    answer: 34, // cudaErrorStubLibrary
};

/// Creates, in a folder, the libraries that a toolkit from PyPI lacks, for linking only.
///
/// They do not have the names under which the real ones are loaded, so a linked program does not
/// load them.
pub(super) fn to_link(folder: &Path) -> Result<()> {
    let packages = packages(folder)?;
    std::fs::create_dir_all(folder)?;
    for library in LIBRARIES {
        make(folder, library, &packages)?;
    }
    Ok(())
}

/// Creates, in a folder, all libraries that candle is linked with, for linking and loading.
pub(super) fn to_run(folder: &Path) -> Result<()> {
    let packages = packages(folder)?;
    std::fs::create_dir_all(folder)?;
    for library in LIBRARIES.iter().chain([&RUNTIME]) {
        make(folder, library, &packages)?;
        let name = folder.join(library.name);
        if !name.is_symlink() {
            symlink(library.file, name).with_context(|| library.name)?;
        }
    }
    Ok(())
}

fn make(folder: &Path, library: &Library, packages: &BTreeMap<String, PathBuf>) -> Result<()> {
    let (package, source) = library.declared;
    let source = packages
        .get(package)
        .with_context(|| format!("the crate has no {package}"))?
        .join(source);
    let mut functions = functions(&cargo::text(&source)?)?;
    ensure!(
        !functions.is_empty(),
        "{package} declares no functions of {} any more",
        library.file
    );
    functions.extend(
        library
            .symbols
            .iter()
            .map(|symbol| (symbol.name.into(), Answer::Code)),
    );
    compile(folder, library, &functions)
}

/// The type of value that a function returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// A code, or a value that is not used.
    Code,
    Text,
}

fn compile(folder: &Path, library: &Library, functions: &BTreeMap<String, Answer>) -> Result<()> {
    let mut text = String::new();
    for (function, answer) in functions {
        match answer {
            Answer::Code => {
                writeln!(
                    text,
                    "int {function}(void) {{ return {}; }}",
                    library.answer
                )?;
            }
            Answer::Text => writeln!(
                text,
                "const char *{function}(void) {{ return \"a stand-in\"; }}"
            )?,
        }
    }
    let code = folder.join("library.c");
    std::fs::write(&code, text).with_context(|| code.display().to_string())?;
    succeed(
        Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .arg(folder.join(library.file))
            .arg(format!("-Wl,-soname,{}", library.name))
            .arg(&code),
    )?;
    Ok(std::fs::remove_file(code)?)
}

/// Returns the folders of the packages that the crate depends on, by name.
fn packages(target: &Path) -> Result<BTreeMap<String, PathBuf>> {
    // Cargo caches information about the compiler in the folder for its files.
    let mut command = command(target);
    command.args(["metadata", "--locked", "--format-version", "1"]);
    let metadata = Metadata::parse(&cargo::output(&mut command)?)?;
    let folder = |package: Package| {
        let manifest = PathBuf::from(package.manifest_path);
        (package.name, manifest.with_file_name(""))
    };
    Ok(metadata.packages.into_iter().map(folder).collect())
}

/// Returns the functions that a file of bindings declares in `extern` blocks.
fn functions(source: &str) -> syn::Result<BTreeMap<String, Answer>> {
    struct Declared(BTreeMap<String, Answer>);

    impl<'ast> Visit<'ast> for Declared {
        fn visit_foreign_item_fn(&mut self, function: &'ast syn::ForeignItemFn) {
            let signature = &function.sig;
            let answer = match &signature.output {
                syn::ReturnType::Type(_, kind) if matches!(**kind, syn::Type::Ptr(_)) => {
                    Answer::Text
                }
                _ => Answer::Code,
            };
            self.0.insert(signature.ident.to_string(), answer);
            visit::visit_foreign_item_fn(self, function);
        }
    }

    let mut declared = Declared(BTreeMap::new());
    declared.visit_file(&syn::parse_file(source)?);
    Ok(declared.0)
}

#[cfg(test)]
mod tests {
    use super::*;

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
            extern "C" {
                // fn of_no_matter();
                pub fn launch(on: *mut c_void, hook: Option<unsafe extern "C" fn(i32)>);
                #[cfg(feature = "more")]
                pub fn nvrtcGetErrorString(code: u32) -> *const c_char;
            }
        "#;
        let found: Vec<_> = functions(source).expect("it is Rust").into_iter().collect();
        let expected = [
            ("cuInit", Answer::Code),
            ("launch", Answer::Code),
            ("nvrtcGetErrorString", Answer::Text),
        ];
        assert_eq!(found, expected.map(|(name, answer)| (name.into(), answer)));
        assert!(functions("fn nothing() {}").expect("Rust").is_empty());
        assert!(functions("int cuInit(int);").is_err());
    }

    /// A program links with a stand-in, loads it under its other name, and gets its code.
    #[test]
    fn a_stand_in_is_linked_with_and_answers() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path();
        let cuda = &LIBRARIES[0];
        let mut functions: BTreeMap<_, _> = cuda
            .symbols
            .iter()
            .map(|symbol| (symbol.name.to_owned(), Answer::Code))
            .collect();
        functions.insert("text".into(), Answer::Text);
        compile(at, cuda, &functions).expect("made");

        let program = r#"
            int cuInit(unsigned), cuDevicePrimaryCtxRelease(int);
            const char *text(void);
            int main(void) {
                return text()[0] == 'a' && cuDevicePrimaryCtxRelease(0) == cuInit(0) ? cuInit(0) : 1;
            }
        "#;
        std::fs::write(at.join("program.c"), program).expect("written");
        let cc = Command::new("cc")
            .current_dir(at)
            .args(["-o", "program", "program.c", "-L.", "-lcuda"])
            .status();
        assert!(cc.expect("it runs").success());
        let run = || {
            let mut program = Command::new(at.join("program"));
            program.env("LD_LIBRARY_PATH", at);
            program.output().expect("it starts").status.code()
        };
        assert_ne!(run(), Some(34), "a stand-in to link with was loaded");
        symlink(cuda.file, at.join(cuda.name)).expect("linked");
        assert_eq!(run(), Some(34));
    }
}
