//! The rules of the layering: which crate may use which, and which module of a crate is above
//! which.
//!
//! This file contains only data. A new top-level module needs an entry here.

use std::collections::BTreeSet;

/// A workspace crate and the workspace crates that it may depend on.
pub(crate) struct Place {
    pub(crate) name: &'static str,
    pub(crate) uses: &'static [&'static str],
    /// The crates for testing that its tests may use in addition.
    pub(crate) tests_use: &'static [&'static str],
    /// `true` if it may read environment variables. Crates that are not published may.
    pub(crate) reads_environment: bool,
    /// `true` if it is a library for other programs: no statics, no `cfg` for a GPU, no asserts.
    pub(crate) library: bool,
    /// Its top-level modules from the bottom up, for crates where the plan lists them.
    pub(crate) floors: &'static [Layer],
}

const fn program(name: &'static str, uses: &'static [&'static str]) -> Place {
    Place {
        name,
        uses,
        tests_use: &[],
        reads_environment: false,
        library: false,
        floors: &[],
    }
}

const fn library(name: &'static str, uses: &'static [&'static str]) -> Place {
    Place {
        library: true,
        ..program(name, uses)
    }
}

impl Place {
    const fn tests_use(self, tests_use: &'static [&'static str]) -> Self {
        Self { tests_use, ..self }
    }

    const fn reads_environment(self) -> Self {
        Self {
            reads_environment: true,
            ..self
        }
    }

    const fn floors(self, floors: &'static [Layer]) -> Self {
        Self { floors, ..self }
    }
}

/// Modules on one level.
pub(crate) struct Layer {
    pub(crate) rooms: &'static [&'static str],
    /// `true` if they may use one another.
    pub(crate) open: bool,
}

const fn room(rooms: &'static [&'static str]) -> Layer {
    Layer { rooms, open: false }
}

const fn open(rooms: &'static [&'static str]) -> Layer {
    Layer { rooms, open: true }
}

const DRIVER: &[Layer] = &[
    open(&["call", "error", "types"]),
    room(&["shareable"]),
    room(&["driver"]),
    room(&["cuda", "fault"]),
];

const MODEL: &[Layer] = &[room(&["model"]), room(&["host"])];

const LIBRARY: &[Layer] = &[
    room(&["driver"]),
    room(&["sync"]),
    room(&["deferred", "descriptors"]),
    room(&["log"]),
    open(&["display", "error", "size", "extent_sizes", "growth"]),
    room(&["wanted"]),
    room(&["elsewhere"]),
    open(&["calls", "drops", "fork", "device"]),
    room(&["own"]),
    room(&["extents"]),
    room(&["store"]),
    room(&["peer", "modes"]),
    room(&["ledger"]),
    room(&["pool"]),
    room(&["region"]),
    room(&["users"]),
    room(&["view"]),
    room(&["elements"]),
    room(&["vec", "sparse", "ring", "cow", "unified"]),
    room(&["heap", "mem_pool"]),
    room(&["kv", "paged"]),
    room(&["sleep"]),
    room(&["group"]),
    room(&["share"]),
    room(&["dlpack", "cudarc"]),
    room(&["recording"]),
];

const CANDLE: &[Layer] = &[
    room(&["error", "waiting"]),
    room(&["loan"]),
    room(&["gpu"]),
    room(&["memory"]),
    room(&["kv", "weights"]),
];

/// The crates, from the bottom up.
pub(crate) const CRATES: &[Place] = &[
    library("cuvmm-sys", &[]),
    library("cuvmm-driver", &["cuvmm-sys"])
        .tests_use(&["conformance", "fakecuda"])
        .floors(DRIVER),
    library("cuvmm-model", &["cuvmm-driver"]).floors(MODEL),
    library("cuvmm", &["cuvmm-driver", "cuvmm-model"])
        .tests_use(&["conformance", "fakecuda"])
        .floors(LIBRARY),
    program("conformance", &["cuvmm-driver", "cuvmm-model"]).tests_use(&["fakecuda"]),
    program("fakecuda", &["cuvmm-driver", "cuvmm-model", "cuvmm-sys"])
        .tests_use(&["conformance"])
        .reads_environment(),
    library("fakecuda-control", &[]).tests_use(&["fakecuda"]),
    program("cuvmm-command", &["cuvmm"]).reads_environment(),
    program("cuvmm-lab", &["cuvmm", "cuvmm-command"]).reads_environment(),
    program("cuvmm-cli", &["cuvmm", "cuvmm-command", "cuvmm-lab"])
        .tests_use(&["fakecuda"])
        .reads_environment(),
    program("cuvmm-bench", &["cuvmm", "cuvmm-command", "conformance"]).reads_environment(),
    library("cuvmm-candle", &["cuvmm"]).floors(CANDLE),
    program("cuvmm-serve", &["cuvmm", "cuvmm-candle"]),
    program("cuvmm-torch", &["cuvmm"])
        .tests_use(&["fakecuda"])
        .reads_environment(),
    program("counted", &["cuvmm"]),
    program("compile-fail", &["cuvmm"]),
    program("cuvmm-tests", &["cuvmm"]),
    program("threads", &["cuvmm"]),
    program("xtask", &["cuvmm-sys"]).reads_environment(),
];

/// Files of one crate that use each other in a cycle at present.
pub(crate) struct Circle {
    krate: &'static str,
    /// The common beginning of their paths under the crate's source.
    folder: &'static str,
    /// The rest of their paths, without `.rs`.
    names: &'static str,
}

const fn circle(krate: &'static str, folder: &'static str, names: &'static str) -> Circle {
    Circle {
        krate,
        folder,
        names,
    }
}

/// The cycles that are allowed: all that are left. There are none in `cuvmm` and none in the model.
///
/// A file that leaves its cycle is removed from this list, and no file is added.
pub(crate) const CIRCLES: &[Circle] = &[
    circle("conformance", "bench/", "memory mod"),
    circle("cuvmm-driver", "cuda/", "answer context open"),
];

/// Returns the allowed cycles of a crate, each with its files under the crate's source.
pub(crate) fn circles(krate: &str) -> Vec<BTreeSet<String>> {
    let of = |circle: &Circle| {
        let names = circle.names.split_whitespace();
        names
            .map(|name| format!("{}{name}.rs", circle.folder))
            .collect()
    };
    let ours = CIRCLES.iter().filter(|circle| circle.krate == krate);
    ours.map(of).collect()
}

/// Returns a crate's position from the bottom.
pub(crate) fn height(krate: &str) -> usize {
    let at = CRATES.iter().position(|place| place.name == krate);
    at.unwrap_or(CRATES.len())
}

/// The implementations of the driver, which `cuvmm` never names.
pub(crate) const BACKENDS: &[&str] = &["cuda", "host", "model"];

/// The only module of `cuvmm` that names them: it chooses one.
pub(crate) const NAMES_BACKENDS: &str = "driver";

/// The only file of `cuvmm` that rounds.
pub(crate) const ROUNDS: &str = "size";

/// The only file of `cuvmm` with thread-local state: the locked sections that the thread is in.
/// That concerns the thread and no pool, so pools share nothing through it.
pub(crate) const THREADS: &str = "deferred";

/// The module that alone emits events, since a subscriber is user code.
pub(crate) const EMITS: &str = "log";

pub(crate) fn place(name: &str) -> Option<&'static Place> {
    CRATES.iter().find(|place| place.name == name)
}

impl Place {
    /// Returns the level that a module is on, counted from the bottom.
    pub(crate) fn level(&self, room: &str) -> Option<usize> {
        self.floors
            .iter()
            .position(|floor| floor.rooms.contains(&room))
    }

    /// Returns `true` if a module may not be used by another: it is above it, or beside it on a
    /// closed level.
    pub(crate) fn is_above(&self, room: &str, other: &str) -> bool {
        match (self.level(room), self.level(other)) {
            (Some(room_level), Some(level)) => {
                room != other
                    && (room_level > level || room_level == level && !self.floors[level].open)
            }
            _ => false,
        }
    }
}
