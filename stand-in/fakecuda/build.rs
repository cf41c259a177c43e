//! Names the library as the driver's is named, so that a program that was linked with it looks for
//! `libcuda.so.1`, and lists the GPUs whose answers are recorded.

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

/// The answers that `conformance-c` recorded: a link to the file of each GPU, so that a package has
/// them.
const ANSWERS: &str = "answers";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={ANSWERS}");
    let mut files: Vec<_> = fs::read_dir(ANSWERS)?.collect::<Result<_, _>>()?;
    files.sort_by_key(fs::DirEntry::file_name);
    let mut list = String::from("&[\n");
    for file in files {
        let name = file.file_name().to_string_lossy().into_owned();
        // `edges-h200-580.159.tsv`: the GPU and the version of its driver.
        let recorded = name
            .strip_prefix("edges-")
            .and_then(|name| name.strip_suffix(".tsv")?.split_once('-'));
        if let Some((gpu, _)) = recorded {
            let path = fs::canonicalize(file.path())?;
            writeln!(list, "({gpu:?}, include_str!({path:?})),")?;
        }
    }
    list.push(']');
    fs::write(Path::new(&env::var("OUT_DIR")?).join("recorded.rs"), list)?;
    Ok(())
}
