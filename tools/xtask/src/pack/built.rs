//! The files that cargo built, read from its messages.

use std::path::PathBuf;

use anyhow::Result;

use crate::cargo::{self, Message, Target};

/// A file that cargo built and that belongs in the pack.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Built {
    pub(super) place: Place,
    pub(super) file: PathBuf,
    pub(super) name: String,
}

/// The part of the pack that the file belongs in.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    Program,
    Library,
    Test,
}

pub(super) fn build(arguments: &[String]) -> Result<Vec<Built>> {
    println!("cargo {}", arguments.join(" "));
    let messages = cargo::build(cargo::command().args(arguments).arg("--release"))?;
    let tests = arguments.iter().any(|argument| argument == "test");
    let built = messages.into_iter();
    Ok(built.filter_map(|message| read(message, tests)).collect())
}

/// Returns the file that a message of cargo reports, if it belongs in the pack.
///
/// A build of tests also builds the programs that they start; these are not returned a second time.
fn read(message: Message, tests: bool) -> Option<Built> {
    let target = message
        .target
        .filter(|_| message.reason == "compiler-artifact")?;
    let is = |kind: &str| target.kind.iter().any(|ours| ours == kind);
    match message.executable {
        Some(file) if tests && is("test") => {
            let package = package_name(message.package_id.as_deref().unwrap_or_default());
            let name = format!("{package}-{}", target.name);
            Some(Built {
                place: Place::Test,
                file,
                name,
            })
        }
        Some(file) if !tests && is("bin") => Some(Built {
            place: Place::Program,
            file,
            name: target.name,
        }),
        None if !tests => {
            let name = library(&target)?.to_owned();
            let mut files = message.filenames.into_iter();
            let file = files.find(|file| file.extension().is_some_and(|it| it == "so"))?;
            Some(Built {
                place: Place::Library,
                file,
                name,
            })
        }
        _ => None,
    }
}

/// Returns the name of a library in the pack, if it belongs there.
fn library(target: &Target) -> Option<&'static str> {
    let is = |kind: &str| target.kind.iter().any(|ours| ours == kind);
    match &*target.name {
        "fakecuda" if is("cdylib") => Some("libcuda.so.1"),
        "cuvmm_torch" if is("cdylib") => Some("libcuvmm_torch.so"),
        "dlpack_python" if is("example") => Some("libdlpack_python.so"),
        _ => None,
    }
}

/// Returns the package's name in an id such as `path+file:///there/crates/cuvmm#0.1.0`.
fn package_name(id: &str) -> &str {
    let (folder, rest) = id.split_once('#').unwrap_or((id, ""));
    match rest.split_once('@') {
        Some((name, _)) => name,
        None => folder.rsplit('/').next().unwrap_or(folder),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(kind: &str, name: &str, executable: &str, tests: bool) -> Option<(Place, String)> {
        let line = format!(
            r#"{{"reason":"compiler-artifact","package_id":"path+file:///x/crates/cuvmm#0.1.0",
            "target":{{"kind":["{kind}"],"name":"{name}"}},"executable":{executable},
            "filenames":["/t/lib{name}.so","/t/lib{name}.d"]}}"#
        );
        let built = read(Message::parse(&line).expect("as cargo says it"), tests)?;
        Some((built.place, built.name))
    }

    #[test]
    fn what_belongs_into_the_pack() {
        let program = told("bin", "cuvmm", "\"/t/cuvmm\"", false);
        assert_eq!(program, Some((Place::Program, "cuvmm".into())));
        let library = told("cdylib", "fakecuda", "null", false);
        assert_eq!(library, Some((Place::Library, "libcuda.so.1".into())));
        let library = told("cdylib", "cuvmm_torch", "null", false);
        assert_eq!(library, Some((Place::Library, "libcuvmm_torch.so".into())));
        let library = told("example", "dlpack_python", "null", false);
        assert_eq!(
            library,
            Some((Place::Library, "libdlpack_python.so".into()))
        );
        let test = told("test", "gpu", "\"/t/gpu-1\"", true);
        assert_eq!(test, Some((Place::Test, "cuvmm-gpu".into())));
    }

    #[test]
    fn what_does_not() {
        assert_eq!(told("bin", "cuvmm", "\"/t/cuvmm\"", true), None);
        assert_eq!(told("lib", "cuvmm", "null", false), None);
        let done = Message::parse(r#"{"reason":"build-finished","success":true}"#);
        assert_eq!(read(done.expect("as cargo says it"), false), None);
    }

    #[test]
    fn names_of_packages() {
        assert_eq!(package_name("path+file:///x/crates/cuvmm#0.1.0"), "cuvmm");
        assert_eq!(
            package_name("path+file:///x/main#cuvmm-cli@0.1.0"),
            "cuvmm-cli"
        );
    }
}
