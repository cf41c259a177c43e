//! nvcc and its libraries: those of the machine, a toolkit assembled from PyPI, or a stub.

use std::ffi::OsString;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::{before, stand_in};
use crate::cargo::succeed;

/// The parts of nvcc. They are of one release, and CUDA's minor version may differ from the
/// driver's.
const WHEELS: &[&str] = &[
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

/// The compute capability that kernels are built for if it is not set and there is no GPU to query:
/// that of H100 and H200.
const CAPABILITY: &str = "90";

/// Answers the queries that build scripts make to nvcc, and creates the files that they request,
/// empty. An empty static library is not an empty file, because not every linker accepts one.
const STUB: &str = r#"#!/bin/sh
file= folder= source=
while [ $# -gt 0 ]; do
    case $1 in
    --version)
        echo 'nvcc: a stand-in that compiles nothing'
        echo 'nothing'
        echo 'nothing'
        echo 'Cuda compilation tools, release 13.0, V13.0.88'
        exit ;;
    --list-gpu-code) echo sm_90; exit ;;
    -o | --output-file) file=$2; shift ;;
    -odir | --output-directory) folder=$2; shift ;;
    *.cu) source=$1 ;;
    esac
    shift
done
case $file in
'') ;;
*.a) echo '!<arch>' >"$file" ;;
*) : >"$file" ;;
esac
[ -z "$folder" ] || : >"$folder/$(basename "${source%.cu}").ptx"
"#;

/// A toolkit, described by the variables that a build uses.
pub(super) struct Toolkit {
    /// The folder of the toolkit, if it is not the default one.
    home: Option<PathBuf>,
}

impl Toolkit {
    /// Returns the toolkit with the nvcc on the path or in `CUDA_HOME`, or installs one from PyPI,
    /// which later calls reuse.
    pub(super) fn find(target: &Path) -> Result<Self> {
        let set = std::env::var_os("CUDA_HOME").is_some_and(|home| !home.is_empty());
        if set || Command::new("nvcc").arg("--version").output().is_ok() {
            return Ok(Self { home: None });
        }
        let folder = target.join("toolkit");
        let home = folder.join("nvidia/cu13");
        // Created last, so that a partial installation is repeated.
        if !libraries(&home).join("stubs").exists() {
            install(&folder, &home)?;
        }
        Ok(Self { home: Some(home) })
    }

    /// Returns the variables that build scripts read.
    pub(super) fn environment(&self) -> Vec<(&'static str, OsString)> {
        let mut variables = Vec::new();
        if let Some(home) = &self.home {
            variables.push(("PATH", before(home.join("bin"), "PATH")));
            variables.push(("NVCC", home.join("bin/nvcc").into_os_string()));
            // Any of them may be set to another toolkit's folder.
            for name in [
                "CUDA_HOME",
                "CUDA_PATH",
                "CUDA_ROOT",
                "CUDA_TOOLKIT_ROOT_DIR",
            ] {
                variables.push((name, home.clone().into_os_string()));
            }
        }
        let asked = Command::new("nvidia-smi").output().is_ok();
        if std::env::var_os("CUDA_COMPUTE_CAP").is_none() && (self.home.is_some() || !asked) {
            variables.push(("CUDA_COMPUTE_CAP", CAPABILITY.into()));
        }
        variables
    }
}

/// Creates a toolkit in a folder whose nvcc does nothing.
///
/// [`stand_in`] creates its libraries where they are needed; the folder for them exists because
/// build scripts look for it.
pub(super) fn stub(home: &Path) -> Result<Toolkit> {
    let bin = home.join("bin");
    std::fs::create_dir_all(&bin)?;
    std::fs::create_dir_all(libraries(home))?;
    let nvcc = bin.join("nvcc");
    std::fs::write(&nvcc, STUB)?;
    std::fs::set_permissions(&nvcc, std::fs::Permissions::from_mode(0o755))?;
    Ok(Toolkit {
        home: Some(home.to_owned()),
    })
}

pub(super) fn libraries(home: &Path) -> PathBuf {
    home.join("lib")
}

fn install(folder: &Path, home: &Path) -> Result<()> {
    eprintln!("there is no nvcc on the path: installing it from PyPI");
    if folder.exists() {
        std::fs::remove_dir_all(folder).context("clearing an earlier toolkit")?;
    }
    succeed(
        Command::new("python3")
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
            ])
            .arg("--target")
            .arg(folder)
            .args(WHEELS),
    )?;
    let lib = libraries(home);
    // The wheel contains the library under its name for loading, and not under that for linking.
    symlink("libcudart.so.13", lib.join("libcudart.so"))?;
    let made = lib.join("stand-ins");
    stand_in::to_link(&made)?;
    std::fs::rename(made, lib.join("stubs")).context("moving the libraries to their place")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stub_answers_and_makes_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path();
        stub(at).expect("written");
        let nvcc = |arguments: &[&str]| {
            let output = Command::new(at.join("bin/nvcc"))
                .args(arguments)
                .current_dir(at)
                .output();
            String::from_utf8(output.expect("it runs").stdout).expect("text")
        };
        let version = nvcc(&["--version"]);
        let release = version
            .lines()
            .nth(3)
            .and_then(|line| line.split(", ").nth(1));
        assert_eq!(release, Some("release 13.0"), "{version}");
        nvcc(&["-O3", "-o", "made.o", "one.cu"]);
        nvcc(&["--ptx", "--output-directory", ".", "src/two.cu"]);
        nvcc(&["--lib", "-o", "libmade.a", "made.o"]);
        let made = |file| std::fs::read_to_string(at.join(file)).expect("it was made");
        assert_eq!((made("made.o"), made("two.ptx")), Default::default());
        assert_eq!(made("libmade.a"), "!<arch>\n");
    }

    #[test]
    fn a_build_is_told_of_this_toolkit_and_of_no_other() {
        let home = PathBuf::from("/a/toolkit");
        let told = Toolkit {
            home: Some(home.clone()),
        };
        let told: std::collections::BTreeMap<_, _> = told.environment().into_iter().collect();
        for name in ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"] {
            assert_eq!(told[name], home, "{name}");
        }
        assert_eq!(told["NVCC"], home.join("bin/nvcc"));
        let first = std::env::split_paths(&told["PATH"]).next();
        assert_eq!(first, Some(home.join("bin")));
    }
}
