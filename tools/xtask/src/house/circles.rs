//! Cycles of files that use each other. Only those that the plan lists are allowed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::Complaint;
use super::calls::{self, Arrow};
use super::plan::Place;
use super::tree::Module;
use super::uses;

/// The file with the list of allowed cycles.
const PLAN: &str = "tools/xtask/src/house/plan.rs";

/// Files of a crate each of which uses every other, directly or indirectly.
#[derive(Debug)]
pub(crate) struct Circle {
    /// The paths of the files under the crate's source.
    files: BTreeSet<String>,
    steps: Vec<Step>,
}

/// One file's use of another in a cycle.
#[derive(Debug)]
struct Step {
    from: String,
    to: String,
    file: PathBuf,
    line: usize,
    what: String,
}

/// Returns the cycles of more than one file in one crate's modules. `elsewhere` are the methods of
/// the crates that it uses.
pub(crate) fn find(place: &Place, modules: &[Module], elsewhere: &BTreeSet<String>) -> Vec<Circle> {
    let mut arrows = calls::arrows(place, modules, elsewhere);
    arrows.extend(uses::arrows(modules));
    let source = modules
        .iter()
        .find(|module| module.path.is_empty())
        .and_then(|root| root.file.parent())
        .unwrap_or(Path::new(""));
    let name = |at: usize| {
        let file = &modules[at].file;
        let file = file.strip_prefix(source).unwrap_or(file);
        file.display().to_string()
    };
    components(modules.len(), &arrows)
        .into_iter()
        .map(|circle| Circle {
            files: circle.iter().map(|at| name(*at)).collect(),
            steps: arrows
                .iter()
                .filter(|arrow| circle.contains(&arrow.from) && circle.contains(&arrow.to))
                .map(|arrow| Step {
                    from: name(arrow.from),
                    to: name(arrow.to),
                    file: modules[arrow.from].file.clone(),
                    line: arrow.line,
                    what: arrow.what.clone(),
                })
                .collect(),
        })
        .collect()
}

/// Returns the strongly connected components with more than one of the nodes `0..points`.
fn components(points: usize, arrows: &[Arrow]) -> Vec<BTreeSet<usize>> {
    let mut next = vec![BTreeSet::new(); points];
    for arrow in arrows {
        next[arrow.from].insert(arrow.to);
    }
    let reached: Vec<BTreeSet<usize>> = (0..points).map(|start| reach(start, &next)).collect();
    let mut found = BTreeSet::new();
    for (at, reached_by_it) in reached.iter().enumerate() {
        let joined: BTreeSet<usize> = reached_by_it
            .iter()
            .copied()
            .filter(|other| reached[*other].contains(&at))
            .collect();
        if joined.len() > 1 {
            found.insert(joined);
        }
    }
    found.into_iter().collect()
}

/// Returns all nodes that can be reached from a node.
fn reach(start: usize, next: &[BTreeSet<usize>]) -> BTreeSet<usize> {
    let mut reached = BTreeSet::new();
    let mut ahead = vec![start];
    while let Some(at) = ahead.pop() {
        for &to in &next[at] {
            if reached.insert(to) {
                ahead.push(to);
            }
        }
    }
    reached
}

/// Returns complaints about the cycles of a crate: cycles that are not allowed, and superfluous
/// entries in the list of allowed ones.
pub(crate) fn check(
    krate: &str,
    circles: &[Circle],
    listed: &[BTreeSet<String>],
) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for circle in circles {
        if !listed.iter().any(|listed| circle.files.is_subset(listed)) {
            complaints.push(complaint(circle, listed));
        }
    }
    for listed in listed {
        let parts = circles
            .iter()
            .filter(|circle| circle.files.is_subset(listed));
        let parts = parts.count();
        if parts > 1 {
            let files = joined(listed);
            let what = format!("{krate}: a cycle is now {parts} and listed as one: {files}");
            complaints.push(Complaint::in_file(PLAN, what));
        }
        for file in listed {
            if !circles.iter().any(|circle| circle.files.contains(file)) {
                let what = format!("{krate}: {file} is listed and in no cycle: remove it");
                complaints.push(Complaint::in_file(PLAN, what));
            }
        }
    }
    complaints
}

/// Describes the files of a cycle that is not allowed, and two of its uses.
fn complaint(circle: &Circle, listed: &[BTreeSet<String>]) -> Complaint {
    let is_new = |file: &&String| !listed.iter().any(|listed| listed.contains(*file));
    let new: BTreeSet<String> = circle.files.iter().filter(is_new).cloned().collect();
    let mut what = format!("a cycle of files: {}", joined(&circle.files));
    if !new.is_empty() && new.len() < circle.files.len() {
        what += &format!(" (new in it: {})", joined(&new));
    }
    let turn = new.first().or_else(|| circle.files.first());
    let out = circle.steps.iter().find(|step| Some(&step.from) == turn);
    let back = circle.steps.iter().find(|step| Some(&step.to) == turn);
    for step in [out, back].into_iter().flatten() {
        let Step { from, to, line, .. } = step;
        what += &format!("; {from}:{line} {} in {to}", step.what);
    }
    match out {
        Some(step) => Complaint::at(&step.file, step.line, what),
        None => Complaint::in_file(PLAN, what),
    }
}

fn joined(files: &BTreeSet<String>) -> String {
    let files: Vec<&str> = files.iter().map(|file| &**file).collect();
    files.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::house::plan;

    const COMMIT: (&str, &str) = (
        "pool::commit",
        "impl State { fn commit(&self) {\nself.gather(); } }",
    );
    const SUPPLY: (&str, &str) = (
        "pool::supply",
        "impl State { fn gather(&self) { self.make_room(); } }",
    );
    const RECLAIM: (&str, &str) = (
        "pool::reclaim",
        "impl State { fn make_room(&self) { self.commit(); } }",
    );

    fn complaints(files: &[(&str, &str)], listed: &[&[&str]]) -> Vec<String> {
        let modules: Vec<Module> = files
            .iter()
            .map(|(path, text)| {
                let file = format!("src/{}.rs", path.replace("::", "/"));
                let path = path.split("::").filter(|part| !part.is_empty());
                let path = path.map(str::to_owned).collect();
                Module::parse(Path::new(&file), path, false, (*text).to_owned()).expect("Rust")
            })
            .collect();
        let listed: Vec<BTreeSet<String>> = listed
            .iter()
            .map(|files| files.iter().map(|file| (*file).to_owned()).collect())
            .collect();
        let place = plan::place("cuvmm").expect("planned");
        let circles = find(place, &modules, &BTreeSet::new());
        check(place.name, &circles, &listed)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn no_circle() {
        assert_eq!(complaints(&[COMMIT, SUPPLY], &[]), [""; 0]);
        let own = "impl State { fn f(&self) { self.g() } fn g(&self) { self.f() } }";
        assert_eq!(complaints(&[("pool::state", own)], &[]), [""; 0]);
    }

    #[test]
    fn two_files() {
        let supply = "impl State { fn gather(&self) { self.commit(); } }";
        let files = [("", ""), COMMIT, ("pool::supply", supply)];
        assert_eq!(
            complaints(&files, &[]),
            [
                "src/pool/commit.rs:2: a cycle of files: pool/commit.rs, pool/supply.rs; \
                 pool/commit.rs:2 calls State::gather in pool/supply.rs; \
                 pool/supply.rs:1 calls State::commit in pool/commit.rs"
            ]
        );
    }

    #[test]
    fn two_files_by_a_call_and_a_path() {
        let supply = "use super::commit::Fit; impl State { fn gather(&self) {} }";
        let found = complaints(&[COMMIT, ("pool::supply", supply)], &[]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("uses crate::pool::commit::Fit"));
    }

    #[test]
    fn three_files() {
        let files = [("", ""), COMMIT, SUPPLY, RECLAIM];
        let found = complaints(&files, &[]);
        assert_eq!(found.len(), 1, "{found:?}");
        let three = "a cycle of files: pool/commit.rs, pool/reclaim.rs, pool/supply.rs; ";
        assert!(found[0].contains(three), "{found:?}");
    }

    #[test]
    fn what_is_listed_is_allowed() {
        let files = [("", ""), COMMIT, SUPPLY, RECLAIM];
        let (commit, supply) = ("pool/commit.rs", "pool/supply.rs");
        let reclaim = "pool/reclaim.rs";
        let found = complaints(&files, &[&[commit, supply, reclaim]]);
        assert_eq!(found, [""; 0]);
        let found = complaints(&files, &[&[commit, supply]]);
        assert_eq!(found.len(), 1, "{found:?}");
        let new = "(new in it: pool/reclaim.rs); pool/reclaim.rs:1 calls State::commit";
        assert!(found[0].contains(new), "{found:?}");
        // All files are listed, but not as one cycle.
        let found = complaints(&files, &[&[commit], &[supply, reclaim]]);
        assert_eq!(found.len(), 1, "{found:?}");
    }

    #[test]
    fn what_is_listed_is_there() {
        let files = [("", ""), COMMIT, SUPPLY, RECLAIM];
        let listed = ["commit", "supply", "reclaim", "gone"].map(|name| format!("pool/{name}.rs"));
        let listed: Vec<&str> = listed.iter().map(|file| &**file).collect();
        let found = complaints(&files, &[&listed]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("pool/gone.rs is listed and in no cycle"));
        assert_eq!(complaints(&files[..3], &[&listed[..3]]).len(), 3);
    }

    #[test]
    fn a_circle_that_fell_apart() {
        let two = |a: &str, b: &str| {
            let text = |a: &str, b: &str| format!("impl S {{ fn {a}(&self) {{ self.{b}() }} }}");
            [text(a, b), text(b, a)]
        };
        let ([a, b], [c, d]) = (two("a", "b"), two("c", "d"));
        let files = [
            ("", ""),
            ("pool::a", &*a),
            ("pool::b", &*b),
            ("pool::c", &*c),
            ("pool::d", &*d),
        ];
        let listed = ["pool/a.rs", "pool/b.rs", "pool/c.rs", "pool/d.rs"];
        assert_eq!(complaints(&files, &[&listed[..2], &listed[2..]]), [""; 0]);
        let found = complaints(&files, &[&listed]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("a cycle is now 2 and listed as one"));
    }
}
