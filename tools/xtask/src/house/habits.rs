//! Practices that the source must not contain: panics, statics, environment variables, names of
//! backends, rounding, long files, unsafe code without a reason.
//!
//! Test code is exempt from all of them except the last.

use super::Complaint;
use super::mentions::{Mention, What, mentions};
use super::plan::{BACKENDS, EMITS, NAMES_BACKENDS, Place, ROUNDS, THREADS};
use super::tree::Module;

const PANICKING: &[&str] = &["unwrap", "expect", "unwrap_err", "expect_err"];

const PANICS: &[&str] = &["panic", "todo", "unimplemented", "unreachable"];

/// Macros that panic on a caller's error.
const ASSERTS: &[&str] = &["assert", "assert_eq", "assert_ne"];

/// Macros of the crate `tracing` that emit events.
const EVENTS: &[&str] = &["error", "warn", "info", "debug", "trace", "event"];

/// Functions that read or write the environment.
const ENVIRONMENT: &[&str] = &["var", "var_os", "vars", "vars_os", "set_var", "remove_var"];

/// Functions of the standard library that round.
const ROUNDING: &[&str] = &[
    "next_multiple_of",
    "checked_next_multiple_of",
    "next_power_of_two",
    "checked_next_power_of_two",
];

/// Function names that suggest hand-written rounding.
const ROUNDS_BY_NAME: &[&str] = &[
    "round_up",
    "round_down",
    "align_up",
    "align_down",
    "align_to",
];

/// Words in a `cfg` that make the code depend on the GPU.
const GPU: &[&str] = &["cuda", "gpu", "nvidia", "rocm", "hip"];

/// Types with interior mutability, and `mut`.
const CHANGEABLE: &[&str] = &[
    "mut",
    "Cell",
    "RefCell",
    "UnsafeCell",
    "OnceCell",
    "LazyCell",
    "Mutex",
    "RwLock",
    "Once",
    "OnceLock",
    "LazyLock",
    "Condvar",
];

/// The most lines of code in a file of the library, without its tests. Clippy counts the lines of
/// functions.
const MOST_LINES: usize = 450;

/// Returns a complaint for every forbidden practice in one crate's modules.
pub(crate) fn check(place: &Place, modules: &[Module]) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for module in modules {
        complaints.extend(too_long(place, module));
        for mention in mentions(module) {
            let found = match &mention.what {
                What::AllowsUnsafe => unreasoned(module, mention.line),
                _ if mention.test => None,
                _ => judge(place, module, &mention),
            };
            if let Some(what) = found {
                complaints.push(Complaint::at(&module.file, mention.line, what));
            }
        }
    }
    complaints
}

/// Returns the complaint about a file of the library that is too long.
fn too_long(place: &Place, module: &Module) -> Option<Complaint> {
    if place.name != "cuvmm" || module.test {
        return None;
    }
    let lines = module.text.lines();
    let tests = |line: &&str| {
        line.trim_start_matches("#[cfg(test)] ")
            .starts_with("mod tests")
    };
    let before_tests = lines.take_while(|line| !tests(line));
    let code = before_tests.map(str::trim);
    let code = code.filter(|line| !line.is_empty() && !line.starts_with("//"));
    let count = code.count();
    let what = format!("{count} lines of code: at most {MOST_LINES}");
    (count > MOST_LINES).then(|| Complaint::in_file(&module.file, what))
}

/// Returns the complaint about a mention outside tests, if there is one.
fn judge(place: &Place, module: &Module, mention: &Mention) -> Option<String> {
    match &mention.what {
        What::Call(name) if PANICKING.contains(&&**name) => {
            Some(format!(".{name}() panics: return an error"))
        }
        What::Macro(name) if PANICS.contains(&&**name) => {
            Some(format!("{name}! panics: return an error"))
        }
        What::Macro(name) if place.library && !mention.constant && ASSERTS.contains(&&**name) => {
            Some(format!(
                "{name}! panics on a caller's argument: return an error"
            ))
        }
        What::Macro(name)
            if place.name == "cuvmm"
                && EVENTS.contains(&&**name)
                && !is_in(EMITS, place, module) =>
        {
            Some(format!(
                "{name}! may call a subscriber under a lock: use log!"
            ))
        }
        What::Macro(name)
            if place.library && name == "thread_local" && !is_in(THREADS, place, module) =>
        {
            Some("thread_local! is global state".to_owned())
        }
        What::Static { name, words } if place.library => words
            .iter()
            .find(|word| CHANGEABLE.contains(&&***word) || word.starts_with("Atomic"))
            .map(|word| format!("static {name} can change ({word}): no global state")),
        What::Cfg(words) if place.name != "cuvmm-driver" => words
            .iter()
            .find(|word| {
                word.split(|letter: char| !letter.is_alphanumeric())
                    .any(|part| GPU.contains(&part))
            })
            .map(|word| format!("a cfg for a GPU ({word}) outside cuvmm-driver")),
        What::Outside(path) | What::Inside { path, .. } => {
            if !place.reads_environment && reads_environment(path) {
                Some(format!("{}: reads the environment", path.join("::")))
            } else if place.name == "cuvmm" && !is_in(NAMES_BACKENDS, place, module) {
                backend(path)
                    .map(|backend| format!("{}: names the backend {backend}", path.join("::")))
            } else {
                None
            }
        }
        What::Call(name)
            if place.name == "cuvmm"
                && !is_in(ROUNDS, place, module)
                && ROUNDING.contains(&&**name) =>
        {
            Some(format!("{name} rounds: only {ROUNDS} does"))
        }
        What::Function(name)
            if place.name == "cuvmm"
                && !is_in(ROUNDS, place, module)
                && ROUNDS_BY_NAME.contains(&&**name) =>
        {
            Some(format!("fn {name} rounds: only {ROUNDS} does"))
        }
        _ => None,
    }
}

/// Returns `true` if a module is in a top-level module of `cuvmm`.
fn is_in(room: &str, place: &Place, module: &Module) -> bool {
    place.name == "cuvmm" && module.path.first().is_some_and(|first| first == room)
}

fn reads_environment(path: &[String]) -> bool {
    path.windows(2)
        .any(|pair| pair[0] == "env" && (pair[1] == "*" || ENVIRONMENT.contains(&&*pair[1])))
}

fn backend(path: &[String]) -> Option<&str> {
    path.windows(2)
        .find(|pair| {
            matches!(&*pair[0], "cuvmm_driver" | "cuvmm_model" | "driver")
                && BACKENDS.contains(&&*pair[1])
        })
        .map(|pair| &*pair[1])
}

/// Returns a complaint if a file allows unsafe code without a reason in its documentation or, in a
/// test, in a comment directly above the attribute.
fn unreasoned(module: &Module, line: usize) -> Option<String> {
    let says = |text: &str| text.to_lowercase().contains("unsafe");
    let documented = module
        .text
        .lines()
        .take_while(|line| line.starts_with("//") || line.trim().is_empty())
        .any(|line| line.starts_with("//!") && says(line));
    let above = line
        .checked_sub(2)
        .and_then(|above| module.text.lines().nth(above))
        .is_some_and(|above| above.trim_start().starts_with("//"));
    (!(documented || module.test && above)).then(|| {
        "allows unsafe code, and the file's documentation does not say why (it should hold the \
         word `unsafe`)"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::house::plan;

    fn complaints(krate: &str, path: &str, text: &str) -> Vec<String> {
        let parts = path.split("::").map(str::to_owned).collect();
        let module = Module::parse(Path::new("test.rs"), parts, false, text.to_owned());
        check(
            plan::place(krate).expect("planned"),
            &[module.expect("Rust")],
        )
        .iter()
        .map(ToString::to_string)
        .collect()
    }

    #[track_caller]
    fn wrong(krate: &str, path: &str, text: &str, word: &str) {
        let found = complaints(krate, path, text);
        assert!(!found.is_empty(), "{text}");
        assert!(
            found.iter().all(|found| found.contains(word)),
            "{text}: {found:?}"
        );
        let in_tests = format!("#[cfg(test)] mod tests {{ {text} }}");
        // Inner attributes of the file are only at its top.
        if !text.contains("#!") {
            assert_eq!(complaints(krate, path, &in_tests), [""; 0], "{in_tests}");
        }
    }

    #[track_caller]
    fn right(krate: &str, path: &str, text: &str) {
        assert_eq!(complaints(krate, path, text), [""; 0], "{text}");
    }

    #[test]
    fn long_files() {
        let code = |lines| "// A comment.\n\nfn f() {}\n".repeat(lines);
        right("cuvmm", "pool", &code(MOST_LINES));
        right("cuvmm-cli", "replay", &code(MOST_LINES + 1));
        wrong("cuvmm", "pool", &code(MOST_LINES + 1), "451 lines of code");
        let tests = format!("{}mod tests {{\n{}}}\n", code(MOST_LINES), code(9));
        right("cuvmm", "pool", &tests);
    }

    #[test]
    fn panics() {
        for text in [
            "fn f() { x.unwrap(); }",
            "fn f() { x.expect(\"there\"); }",
            "fn f() { x.map(Option::unwrap); }",
            "fn f() { println!(\"{}\", x.unwrap()); }",
            "fn f() { println!(\"{:?}\", x.map(Option::unwrap)); }",
            "fn f() { panic!(\"no\") }",
            "fn f() { std::todo!() }",
            "fn f() { unimplemented!() }",
            "fn f() { match x { _ => unreachable!() } }",
            "macro_rules! m { () => { panic!() } }",
        ] {
            wrong("cuvmm", "pool", text, "panics");
            wrong("cuvmm-cli", "replay", text, "panics");
        }
        right("cuvmm", "pool", "fn f() { x.unwrap_or_default(); }");
        right(
            "cuvmm",
            "pool",
            "/// `x.unwrap()`\nfn f() { y(\"x.unwrap()\"); }",
        );
    }

    #[test]
    fn asserts() {
        wrong("cuvmm", "pool", "fn f() { assert!(x > 0); }", "caller");
        wrong("cuvmm", "pool", "fn f() { assert_eq!(x, 0); }", "caller");
        right("cuvmm", "pool", "fn f() { debug_assert!(x > 0); }");
        right("cuvmm", "pool", "const _: () = assert!(SIZE > 0);");
        right("cuvmm", "pool", "fn f() { const { assert!(SIZE > 0) } }");
        right("xtask", "pack", "fn f() { assert!(x > 0); }");
    }

    #[test]
    fn events() {
        for text in [
            "fn f() { tracing::warn!(%error, \"no\"); }",
            "use tracing::debug; fn f() { debug!(\"no\") }",
            "fn f() { g(|error| tracing::error!(%error, \"no\")); }",
        ] {
            wrong("cuvmm", "pool", text, "log!");
            right("cuvmm", "log", text);
            right("cuvmm-driver", "cuda", text);
        }
        right("cuvmm", "pool", "fn f() { log!(warn, %error, \"no\"); }");
    }

    #[test]
    fn statics() {
        for text in [
            "static N: AtomicU64 = AtomicU64::new(0);",
            "static mut N: u64 = 0;",
            "fn f() { static ONCE: std::sync::OnceLock<u64> = OnceLock::new(); }",
            "static MAP: [Mutex<u8>; 2] = [A, B];",
            "thread_local! { static X: u8 = 0; }",
        ] {
            wrong("cuvmm-driver", "cuda", text, "");
        }
        let threads = "thread_local! { static X: u8 = 0; }";
        wrong("cuvmm", "pool", threads, "global state");
        right("cuvmm", "deferred", threads);
        right("cuvmm", "pool", "static NAMES: &[&str] = &[];");
        right(
            "fakecuda",
            "state",
            "static N: AtomicU64 = AtomicU64::new(0);",
        );
    }

    #[test]
    fn environment() {
        for text in [
            "fn f() { std::env::var(\"X\"); }",
            "use std::env; fn f() { env::var_os(\"X\"); }",
            "use std::env::vars;",
            "use std::{env::{var as v}, fmt};",
            "fn f() { g(format!(\"{:?}\", std::env::var(\"X\"))); }",
        ] {
            wrong("cuvmm", "pool", text, "environment");
            right("cuvmm-cli", "replay", text);
        }
        right("cuvmm", "pool", "fn f() { env!(\"CARGO_PKG_VERSION\"); }");
    }

    #[test]
    fn backends() {
        for text in [
            "use cuvmm_driver::host::HostDriver;",
            "use cuvmm_driver::{Driver, cuda::CudaDriver};",
            "use crate::driver::model;",
            "fn f() { crate::driver::cuda::open(); }",
        ] {
            wrong("cuvmm", "pool", text, "names the backend");
            right("cuvmm", "driver::auto", text);
            right("cuvmm-cli", "drivers", text);
        }
        right("cuvmm", "pool", "use cuvmm_driver::{Driver, Location};");
    }

    #[test]
    fn configuration() {
        for text in [
            "#[cfg(feature = \"cuda\")] fn f() {}",
            "#[cfg(not(has_gpu))] mod x {}",
            "fn f() { if cfg!(feature = \"with-cuda\") {} }",
            "struct S { #[cfg(gpu)] x: u8 }",
        ] {
            wrong("cuvmm", "pool", text, "a cfg for a GPU");
            right("cuvmm-driver", "cuda", text);
        }
        right("cuvmm", "pool", "#[cfg(feature = \"cudarc\")] fn f() {}");
        right("cuvmm", "pool", "#[cfg(target_os = \"linux\")] fn f() {}");
    }

    #[test]
    fn rounding() {
        for text in [
            "fn f() { x.next_multiple_of(y); }",
            "fn f() { u64::checked_next_power_of_two(x); }",
            "fn round_up(x: u64) -> u64 { x }",
        ] {
            wrong("cuvmm", "region::space", text, "rounds");
            right("cuvmm", "size", text);
            right("cuvmm-model", "host", text);
        }
    }

    #[test]
    fn unsafe_code() {
        wrong(
            "cuvmm",
            "own",
            "//! Owners.\n#![allow(unsafe_code)]",
            "say why",
        );
        wrong(
            "cuvmm",
            "own",
            "//! Owners.\n// unsafe\n#![allow(unsafe_code)]",
            "say why",
        );
        wrong(
            "cuvmm",
            "own",
            "#![cfg_attr(x, allow(unsafe_code))]",
            "say why",
        );
        let found = complaints(
            "cuvmm",
            "own",
            "//! Owners.\n#[allow(unsafe_code)] fn f() {}",
        );
        assert_eq!(found.len(), 1, "{found:?}");
        right(
            "cuvmm",
            "own",
            "//! Owners. `unsafe` is allowed here: the trait's calls are.\n#![allow(unsafe_code)]",
        );
        right("cuvmm", "own", "//! Owners.\n#![deny(unsafe_code)]");
    }
}
