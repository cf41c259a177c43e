//! Finds the library fakecuda, and makes the folder in which a loader finds the library.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use cuvmm_command::command::usage;

/// The name that a loader looks for.
const NAME: &str = "libcuda.so.1";

const BUILT: &str = "libfakecuda.so";

/// A function in the library's table of names that no real driver exports.
const MARK: &[u8] = b"fakecuda_live";

/// Returns a folder that has the library under the name of [`NAME`].
pub(super) fn folder(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let library = find(given)?;
    let bytes = fs::read(&library)
        .map_err(|error| usage(format!("cannot read {}: {error}", library.display())))?;
    if !bytes.windows(MARK.len()).any(|window| window == MARK) {
        let message = "is not fakecuda, but another library";
        return Err(usage(format!("{} {message}", library.display())));
    }
    let library = std::path::absolute(&library)?;
    let beside = library.parent().unwrap_or(Path::new("/"));
    if library.file_name() == Some(NAME.as_ref()) {
        return Ok(beside.to_owned());
    }
    let folder = beside.join("fakecuda");
    link(&library, &folder).map_err(|error| {
        usage(format!(
            "cannot link {} as {NAME} in {}: {error}; copy it under that name and give the copy to \
             --library",
            library.display(),
            folder.display()
        ))
    })?;
    Ok(folder)
}

fn find(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let named = env::var_os("FAKECUDA_LIBRARY").map(PathBuf::from);
    if let Some(path) = given.map(Path::to_owned).or(named) {
        // A folder with the library in it is accepted too.
        return Ok(if path.is_dir() { path.join(NAME) } else { path });
    }
    let command = env::current_exe()?;
    let beside = command.parent().unwrap_or(Path::new("/"));
    let places = [
        beside.join(BUILT),
        beside.join("../lib/fakecuda").join(NAME),
    ];
    places.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        usage(format!(
            "there is no {BUILT} beside this command and no ../lib/fakecuda/{NAME}: name the library \
             with --library or FAKECUDA_LIBRARY (`cargo build -p fakecuda` in a clone makes it)"
        ))
    })
}

fn link(library: &Path, folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let place = folder.join(NAME);
    if fs::read_link(&place).is_ok_and(|target| target == library) {
        return Ok(());
    }
    // Another process may make the same link at this moment.
    let own = folder.join(format!("{NAME}.{}", std::process::id()));
    symlink(library, &own)?;
    fs::rename(&own, &place)
}

pub(super) fn path_with(folder: &Path) -> OsString {
    let mut path = folder.as_os_str().to_owned();
    if let Some(rest) = env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
        path.push(":");
        path.push(rest);
    }
    path
}
