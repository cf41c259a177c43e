//! The search for NCCL's library.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The path of the library in PyTorch's packages, relative to a folder of Python packages.
const IN_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

/// The name that is passed to the dynamic linker last.
const BY_NAME: &str = "libnccl.so.2";

/// Returns the libraries to try, in order: only `named` if given, else the one that PyTorch would
/// use, then the system's.
pub(super) fn candidates(named: Option<&Path>) -> Vec<PathBuf> {
    match named {
        Some(path) => vec![path.to_owned()],
        None => among(&python_path()),
    }
}

fn among(folders: &str) -> Vec<PathBuf> {
    let folders = folders.lines().filter(|line| !line.is_empty());
    let mut found: Vec<PathBuf> = folders
        .map(|folder| Path::new(folder).join(IN_PACKAGES))
        .filter(|path| path.is_file())
        .collect();
    found.push(BY_NAME.into());
    found
}

/// Returns Python's package folders, one per line; an empty string if there is no Python.
fn python_path() -> String {
    let ask = ["-c", "import sys; print('\\n'.join(sys.path))"];
    let answer = Command::new("python3").args(ask).output();
    answer.map_or_else(
        |_| String::new(),
        |answer| String::from_utf8_lossy(&answer.stdout).into_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_named_one_is_the_only_one() {
        let named = Path::new("/nowhere/libnccl.so");
        assert_eq!(candidates(Some(named)), [named]);
    }

    #[test]
    fn what_lies_beside_pytorch_comes_before_the_systems() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join(IN_PACKAGES);
        std::fs::create_dir_all(library.parent().unwrap()).unwrap();
        std::fs::write(&library, "").unwrap();
        let folders = format!("\n/nowhere\n{}\n", folder.path().display());
        assert_eq!(among(&folders), [library, BY_NAME.into()]);
        assert_eq!(among(""), [PathBuf::from(BY_NAME)]);
    }
}
