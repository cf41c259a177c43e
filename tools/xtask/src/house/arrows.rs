//! Uses between the top-level modules of a crate: a module may use only modules below it.
//!
//! The root of the crate may name every module, because it declares them and re-exports their
//! items. A module that uses a name of the root uses the module from which the root took it.

use std::collections::BTreeMap;

use super::Complaint;
use super::mentions::{What, mentions};
use super::plan::Place;
use super::tree::Module;

/// Returns a complaint for every use in one crate's modules that does not point downward.
pub(crate) fn check(place: &Place, modules: &[Module]) -> Vec<Complaint> {
    if place.floors.is_empty() {
        return Vec::new();
    }
    let shown = names_of_the_root(place, modules);
    let mut complaints = Vec::new();
    for module in modules {
        let Some(room) = module.path.first() else {
            continue;
        };
        let Some(level) = place.level(room) else {
            complaints.push(Complaint::in_file(
                &module.file,
                format!(
                    "the module {room} of {} has no place in the plan",
                    place.name
                ),
            ));
            continue;
        };
        for mention in mentions(module) {
            let What::Inside { path, .. } = &mention.what else {
                continue;
            };
            if mention.test {
                continue;
            }
            let Some(first) = path.first() else {
                continue;
            };
            let complain = |what: String| Complaint::at(&module.file, mention.line, what);
            if first == "*" {
                complaints.push(complain(
                    "takes everything from the root of the crate, which hides the modules that it \
                     uses"
                        .to_owned(),
                ));
                continue;
            }
            let shown = shown.get(first).or_else(|| shown.get("*"));
            let target = match (place.level(first), shown) {
                (Some(_), _) => first,
                (None, Some(Some(target))) => target,
                // A name of the root that refers to another crate.
                (None, Some(None)) => continue,
                (None, None) => {
                    complaints.push(complain(format!(
                        "uses crate::{first}, which is in no module"
                    )));
                    continue;
                }
            };
            if target == room {
                continue;
            }
            let fine = place
                .level(target)
                .is_some_and(|below| below < level || (below == level && place.floors[level].open));
            if !fine {
                complaints.push(complain(format!(
                    "{room} uses {target} (crate::{}), which is not below it",
                    path.join("::")
                )));
            }
        }
    }
    complaints
}

/// Returns the names that the root of the crate takes from its modules, each with the module, or
/// with `None` if it comes from another crate.
///
/// A name that is not listed may come from a module that the root takes whole. It is attributed to
/// the highest such module, under `*`.
fn names_of_the_root(place: &Place, modules: &[Module]) -> BTreeMap<String, Option<String>> {
    let mut names = BTreeMap::new();
    for root in modules.iter().filter(|module| module.path.is_empty()) {
        let rooms: Vec<String> = root
            .syntax
            .items
            .iter()
            .filter_map(|item| match item {
                syn::Item::Mod(item) => Some(item.ident.to_string()),
                _ => None,
            })
            .collect();
        for item in &root.syntax.items {
            let syn::Item::Use(item) = item else {
                continue;
            };
            for (path, name) in super::mentions::imports(item) {
                let room = path
                    .iter()
                    .find(|part| !matches!(&***part, "crate" | "self"))
                    .filter(|part| rooms.contains(part));
                let level = |room: &Option<String>| room.as_deref().map(|room| place.level(room));
                let room = room.cloned();
                let higher = names
                    .get(&name)
                    .is_none_or(|known| level(known) < level(&room));
                if higher {
                    names.insert(name, room);
                }
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::house::plan;

    const ROOT: &str = "pub use cuvmm_driver as driver; mod own; mod extents; pub mod pool; \
                        pub use pool::{Block, Pool as Water}; pub use own::Mapping;";

    fn complaints(path: &str, text: &str) -> Vec<String> {
        complaints_with(ROOT, path, text)
    }

    fn complaints_with(root: &str, path: &str, text: &str) -> Vec<String> {
        let module = |path: &str, text: &str| {
            let file = format!("{path}.rs");
            let path = path
                .split("::")
                .filter(|part| !part.is_empty())
                .map(str::to_owned)
                .collect();
            Module::parse(Path::new(&file), path, false, text.to_owned()).expect("Rust")
        };
        let modules = [module("", root), module(path, text)];
        let place = plan::place("cuvmm").expect("planned");
        check(place, &modules)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn downward_is_right() {
        for text in [
            "use crate::own::Mapping;",
            "use crate::Mapping;",
            "use crate::driver::Driver;",
            "use crate::extents::{space::Space, fence};",
            "use super::space::Space;",
            "use std::fmt;",
            "use cuvmm_driver::Driver;",
            "#[cfg(test)] mod tests { use crate::pool::Pool; use super::*; }",
        ] {
            assert_eq!(complaints("extents::fence", text), [""; 0], "{text}");
        }
    }

    #[test]
    fn upward_is_wrong() {
        for text in [
            "use crate::pool::Pool;",
            "use crate::{own::Mapping, pool::Pool};",
            "use super::super::pool::Pool;",
            "use crate::Block;",
            "use crate::Water;",
            "fn f() { crate::pool::drain(); }",
            "fn f(block: &crate::Block) {}",
            "fn f() { debug!(\"{}\", crate::pool::drain()); }",
            "mod inner { use super::super::super::pool::Pool; }",
        ] {
            let found = complaints("extents::fence", text);
            assert_eq!(found.len(), 1, "{text}: {found:?}");
            assert!(found[0].contains("extents uses pool"), "{found:?}");
            assert!(found[0].starts_with("extents::fence.rs:1: "), "{found:?}");
        }
    }

    #[test]
    fn neighbours() {
        let root = "mod vec; mod sparse; mod calls; mod drops; mod error;";
        assert_eq!(
            complaints_with(root, "vec", "use crate::sparse::X;").len(),
            1
        );
        assert_eq!(
            complaints_with(root, "drops", "use crate::calls::X;").len(),
            0
        );
        assert_eq!(
            complaints_with(root, "error", "use crate::calls::X;").len(),
            1
        );
    }

    #[test]
    fn the_root_is_not_taken_whole() {
        let found = complaints("extents", "use crate::*;");
        assert_eq!(found.len(), 1, "{found:?}");
        let found = complaints("extents", "use super::*;");
        assert_eq!(found.len(), 1, "{found:?}");
    }

    #[test]
    fn a_room_that_the_root_shows_whole() {
        let root = "mod own; mod pool; pub use own::*; pub use pool::*;";
        assert_eq!(complaints_with(root, "heap", "use crate::Block;").len(), 0);
        assert_eq!(
            complaints_with(root, "extents", "use crate::Block;").len(),
            1
        );
        let root = "mod own; mod pool; pub use own::*; pub use std::io::*;";
        assert_eq!(
            complaints_with(root, "extents", "use crate::Mapping;").len(),
            0
        );
    }

    #[test]
    fn what_is_in_no_room() {
        assert_eq!(complaints("shed", "").len(), 1);
        assert_eq!(complaints("extents", "use crate::Loose;").len(), 1);
    }
}
