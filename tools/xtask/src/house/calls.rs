//! Uses between the files of a crate that come from calls of inherent methods.
//!
//! A method call has no path: `self.gather()` does not say in which of a type's files `gather` is
//! defined. That is inferred from names alone, because types are not known here. A call that may
//! refer to several files is ignored, so some uses are not found.

use std::collections::{BTreeMap, BTreeSet};

use super::methods::{Call, How, Methods, read};
use super::plan::Place;
use super::tree::{Module, is_one_in_the_other};

/// One file's use of another, both given by their indices among the modules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arrow {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) line: usize,
    pub(crate) what: String,
}

/// Methods of the standard library, and `dim` of candle. A call of one of these by name alone is
/// not attributed to a method of this workspace with the same name.
const STANDARD: &str = "\
    add all and append as_bytes as_mut as_mut_ptr as_ptr as_ref as_slice as_str borrow borrow_mut \
    checked_add checked_sub clear clone cloned cmp code collect contains contains_key copied \
    count create default deref dim drain drop elapsed end entries entry eq err expect extend fill \
    filter find finish first flags flush fmt fold for_each from get get_mut hash index insert \
    into into_inner into_iter into_string is_empty is_null is_some iter iter_mut join keys last \
    len load lock map map_err max merge min name new next ok open or parse partition path peek \
    pop position push range read recv remove repeat replace reserve resize retain rev send set \
    size skip sort split start store sum swap take then thread to_bytes to_owned to_string \
    truncate try_into unwrap values wait windows with write write_all written zip";

/// Returns every call, outside tests, of an inherent method that another of one crate's modules
/// defines.
///
/// `elsewhere` are the methods of the crates that it uses. A call that would point upward between
/// top-level modules refers to another item of the same name, because a module cannot hold values
/// of the types above it.
pub(crate) fn arrows(
    place: &Place,
    modules: &[Module],
    elsewhere: &BTreeSet<String>,
) -> Vec<Arrow> {
    let files: Vec<Methods> = modules.iter().map(read).collect();
    let index = Index::of(&files, elsewhere);
    let mut arrows = Vec::new();
    for (from, file) in files.iter().enumerate() {
        for call in &file.calls {
            let Some((to, typed)) = index.called(from, call) else {
                continue;
            };
            let (here, there) = (&modules[from].path, &modules[to].path);
            let up = match (here.first(), there.first()) {
                (Some(here), Some(there)) => place.is_above(there, here),
                _ => false,
            };
            if up || call.how == How::Path && is_one_in_the_other(here, there) {
                continue;
            }
            let what = match &call.of {
                Some(of) if typed => format!("calls {of}::{}", call.name),
                _ => format!("calls .{}()", call.name),
            };
            arrows.push(Arrow {
                from,
                to,
                line: call.line,
                what,
            });
        }
    }
    arrows
}

/// Returns the methods that one crate's modules make available to other crates.
pub(crate) fn shown(modules: &[Module]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in modules.iter().map(read) {
        let public = file
            .functions
            .into_iter()
            .filter(|function| function.method && function.public);
        names.extend(public.map(|function| function.name));
        names.extend(file.shared);
    }
    names
}

/// The files in which the inherent methods of a crate are defined.
#[derive(Default)]
struct Index<'a> {
    /// The files that define a function, by the name of its type and its own name.
    of_types: BTreeMap<(&'a str, &'a str), BTreeSet<usize>>,
    /// The files that define a method (which takes `self`), by name.
    by_name: BTreeMap<&'a str, BTreeSet<usize>>,
    /// Names that are also used elsewhere: in a trait, a macro, another crate.
    shared: BTreeSet<&'a str>,
}

impl<'a> Index<'a> {
    fn of(files: &'a [Methods], elsewhere: &'a BTreeSet<String>) -> Self {
        let mut index = Self::default();
        index.shared.extend(STANDARD.split_whitespace());
        index.shared.extend(elsewhere.iter().map(|name| &**name));
        for (at, file) in files.iter().enumerate() {
            for function in &file.functions {
                let key = (&*function.of, &*function.name);
                index.of_types.entry(key).or_default().insert(at);
                if function.method {
                    index.by_name.entry(key.1).or_default().insert(at);
                }
            }
            index.shared.extend(file.shared.iter().map(|name| &**name));
        }
        index
    }

    /// Returns the other file that a call refers to, if it is unambiguous, and whether the type
    /// determines it.
    fn called(&self, from: usize, call: &Call) -> Option<(usize, bool)> {
        let of = call.of.as_deref();
        let known = of.and_then(|of| self.of_types.get(&(of, &*call.name)));
        let files = match known {
            Some(files) => files,
            None if call.how != How::Dot || self.shared.contains(&*call.name) => return None,
            None => self.by_name.get(&*call.name)?,
        };
        if files.contains(&from) || files.len() != 1 {
            return None;
        }
        files.first().map(|file| (*file, known.is_some()))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::house::plan;

    const RECLAIM: &str = "impl State { fn gather(&mut self) {} pub fn begin() -> Self { S } }";

    /// Returns the uses between files, given with their module paths, as `a -> b: what`.
    fn arrows_in(krate: &str, files: &[(&str, &str)]) -> Vec<String> {
        let modules: Vec<Module> = files
            .iter()
            .map(|(path, text)| {
                let parts = path.split("::").map(str::to_owned).collect();
                let text = (*text).to_owned();
                Module::parse(Path::new("test.rs"), parts, false, text).expect("Rust")
            })
            .collect();
        let place = plan::place(krate).expect("planned");
        arrows(place, &modules, &BTreeSet::from(["submit".to_owned()]))
            .iter()
            .map(|arrow| {
                let path = |at: usize| modules[at].path.join("::");
                format!("{} -> {}: {}", path(arrow.from), path(arrow.to), arrow.what)
            })
            .collect()
    }

    /// Returns the calls that a file makes to `RECLAIM` and to another file beside it.
    fn calls(text: &str, other: &str) -> Vec<String> {
        let files = [
            ("pool::commit", text),
            ("pool::reclaim", RECLAIM),
            ("pool::other", other),
        ];
        arrows_in("cuvmm", &files)
    }

    #[test]
    fn a_call_across_files() {
        for text in [
            "fn f(state: &mut State) { state.gather(); }",
            "impl State { fn f(&mut self) { self.gather(); } }",
            "impl Drop for State { fn drop(&mut self) { self.gather() } }",
            "impl Locked<'_> { fn f(&mut self) { self.state.gather(); } }",
            "fn f(state: &mut State) { debug_assert!(state.gather()); }",
            "impl State { fn f(&mut self) { debug_assert!(x(self.gather())); } }",
            "fn f() { x.map(State::gather); }",
            "fn f() { let state = super::state::State::begin(); }",
            "impl State { fn f() { Self::begin(); } }",
            "impl State { fn f() { print!(Self::begin()); } }",
        ] {
            let found = calls(text, "");
            assert_eq!(found.len(), 1, "{text}: {found:?}");
            assert!(
                found[0].starts_with("pool::commit -> pool::reclaim: calls "),
                "{found:?}"
            );
        }
    }

    #[test]
    fn a_call_of_self_goes_to_its_type() {
        let other = "impl Space { fn gather(&self) {} fn begin() {} }";
        let found = calls("impl State { fn f(&mut self) { self.gather(); } }", other);
        assert_eq!(
            found,
            ["pool::commit -> pool::reclaim: calls State::gather"]
        );
        let found = calls("impl Space { fn f() { Self::begin(); } }", other);
        assert_eq!(found, ["pool::commit -> pool::other: calls Space::begin"]);
        let own = "impl State { fn gather(&self) {} fn f(&self) { self.gather(); } }";
        assert_eq!(calls(own, other), [""; 0]);
    }

    #[test]
    fn what_several_may_answer() {
        let text = "fn f(x: &X) { x.gather(); }";
        for other in [
            "impl Space { fn gather(&self) {} }",
            "trait Gather { fn gather(&self); }",
            "impl Gather for Space { fn gather(&self) {} }",
            "gathers! { fn gather(&self); }",
        ] {
            assert_eq!(calls(text, other), [""; 0], "{other}");
        }
        for text in [
            // The name is one of the standard library's, or of another crate's.
            "fn f(x: &X) { x.insert(y); x.submit(); }",
            // It is a function without `self`, which a method call does not refer to.
            "fn f(x: &X) { x.all_of(); }",
            // The type is another one.
            "fn f() { Space::gather(); Space::all_of(); }",
            // A field, not a call.
            "fn f(x: &X) { x.gather; (x.gather)(); }",
        ] {
            let other = "impl X { fn insert(&self) {} fn submit(&self) {} fn all_of() {} }";
            assert_eq!(calls(text, other), [""; 0], "{text}");
        }
    }

    #[test]
    fn traits_and_tests_do_not_count() {
        for text in [
            "#[cfg(test)] mod tests { fn f(x: &X) { x.gather(); } }",
            "#[test] fn f(x: &X) { x.gather(); }",
            "impl X { #[cfg(test)] fn f(&self) { self.gather(); } }",
        ] {
            assert_eq!(calls(text, ""), [""; 0], "{text}");
        }
        let text = "fn f(x: &X) { x.arrange(); }";
        for other in [
            "#[cfg(test)] mod tests { impl X { fn arrange(&self) {} } }",
            "impl Arrange for X { fn arrange(&self) {} }",
        ] {
            assert_eq!(calls(text, other), [""; 0], "{other}");
        }
    }

    #[test]
    fn no_call_goes_up() {
        let up = [
            ("extents::fence", "fn f(x: &X) { x.gather(); }"),
            ("pool::reclaim", RECLAIM),
        ];
        assert_eq!(arrows_in("cuvmm", &up), [""; 0]);
        let down = [
            ("heap", "fn f(x: &X) { x.gather(); }"),
            ("pool::reclaim", RECLAIM),
        ];
        assert_eq!(arrows_in("cuvmm", &down).len(), 1);
    }

    #[test]
    fn a_module_and_what_is_in_it() {
        let call = |text| arrows_in("cuvmm", &[("pool", text), ("pool::reclaim", RECLAIM)]).len();
        assert_eq!(call("fn f() { State::begin(); }"), 0);
        assert_eq!(call("fn f(state: &State) { state.gather(); }"), 1);
    }

    #[test]
    fn what_a_crate_shows() {
        let text = "impl X { pub fn a(&self) {} fn b(&self) {} pub fn c() {} } trait T { fn d(); }";
        let module = Module::parse(Path::new("x.rs"), Vec::new(), false, text.to_owned());
        let names = shown(&[module.expect("Rust")]);
        assert_eq!(names, BTreeSet::from(["a".to_owned(), "d".to_owned()]));
    }
}
