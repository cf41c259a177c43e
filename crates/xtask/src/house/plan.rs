//! The plan of the house: which crate may use which, and which room of a crate stands on which.
//!
//! Only data is here. To build a new room is to give it a place in this file.

use std::collections::BTreeSet;

/// A workspace crate and the workspace crates that it may depend on.
pub(crate) struct Place {
    pub(crate) name: &'static str,
    pub(crate) uses: &'static [&'static str],
    /// What its tests may use besides: the crates that exist for testing.
    pub(crate) tests_use: &'static [&'static str],
    /// Whether it may read environment variables. What is never published may.
    pub(crate) reads_environment: bool,
    /// Whether it is a library that others build on: no statics, no `cfg` for a GPU, no asserts.
    pub(crate) library: bool,
    /// Its rooms from the bottom up, where the plan knows them.
    pub(crate) floors: &'static [Floor],
}

/// Rooms on one level.
pub(crate) struct Floor {
    pub(crate) rooms: &'static [&'static str],
    /// Whether they may use one another.
    pub(crate) open: bool,
}

const fn room(rooms: &'static [&'static str]) -> Floor {
    Floor { rooms, open: false }
}

/// From the bottom up.
pub(crate) const CRATES: &[Place] = &[
    Place {
        name: "cuvmm-sys",
        uses: &[],
        tests_use: &[],
        reads_environment: false,
        library: true,
        floors: &[],
    },
    Place {
        name: "cuvmm-driver",
        uses: &["cuvmm-sys"],
        tests_use: &["conformance", "fakecuda"],
        reads_environment: false,
        library: true,
        floors: &[
            Floor {
                rooms: &["call", "error", "types"],
                open: true,
            },
            room(&["driver"]),
            room(&["cuda", "model", "fault"]),
            room(&["host"]),
            room(&["auto"]),
        ],
    },
    Place {
        name: "cuvmm",
        uses: &["cuvmm-driver"],
        tests_use: &["conformance", "fakecuda"],
        reads_environment: false,
        library: true,
        floors: &[
            room(&["sync"]),
            room(&["deferred"]),
            Floor {
                rooms: &["error", "size", "growth"],
                open: true,
            },
            Floor {
                rooms: &["calls", "drops", "fork", "device"],
                open: true,
            },
            room(&["own"]),
            room(&["store"]),
            room(&["region"]),
            room(&["users"]),
            room(&["view"]),
            room(&["elements"]),
            room(&["vec", "sparse", "ring", "cow", "unified"]),
            room(&["pool", "plan"]),
            room(&["heap"]),
            room(&["kv"]),
            room(&["sleep"]),
            room(&["share"]),
            room(&["dlpack", "cudarc"]),
        ],
    },
    Place {
        name: "conformance",
        uses: &["cuvmm-driver"],
        tests_use: &["fakecuda"],
        reads_environment: false,
        library: false,
        floors: &[],
    },
    Place {
        name: "fakecuda",
        uses: &["cuvmm-driver", "cuvmm-sys"],
        tests_use: &["conformance"],
        reads_environment: true,
        library: false,
        floors: &[],
    },
    Place {
        name: "cuvmm-cli",
        uses: &["cuvmm"],
        tests_use: &[],
        reads_environment: true,
        library: false,
        floors: &[],
    },
    Place {
        name: "cuvmm-bench",
        uses: &["cuvmm", "cuvmm-cli", "conformance"],
        tests_use: &[],
        reads_environment: true,
        library: false,
        floors: &[],
    },
    Place {
        name: "cuvmm-candle",
        uses: &["cuvmm"],
        tests_use: &[],
        reads_environment: false,
        library: true,
        floors: &[
            room(&["error", "waiting"]),
            room(&["loan"]),
            room(&["gpu"]),
            room(&["memory"]),
            room(&["kv", "weights"]),
        ],
    },
    Place {
        name: "cuvmm-torch",
        uses: &["cuvmm"],
        tests_use: &["fakecuda"],
        reads_environment: true,
        library: false,
        floors: &[],
    },
    Place {
        name: "counted",
        uses: &["cuvmm"],
        tests_use: &[],
        reads_environment: false,
        library: false,
        floors: &[],
    },
    Place {
        name: "xtask",
        uses: &["cuvmm-sys"],
        tests_use: &[],
        reads_environment: true,
        library: false,
        floors: &[],
    },
];

/// Files of one crate that use each other in a circle, as it stands today.
pub(crate) struct Circle {
    krate: &'static str,
    /// What their paths from the crate's source begin with.
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

/// The circles that are allowed, which are all that are left: none in `cuvmm` and none in the
/// model. A file that is out of
/// its circle goes from here, and none comes here.
pub(crate) const CIRCLES: &[Circle] = &[
    circle("conformance", "bench/", "memory mod"),
    circle("cuvmm-driver", "cuda/", "answer context open"),
];

/// The circles of a crate that are allowed, each with its files from the crate's source.
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

/// How far from the bottom a crate is.
pub(crate) fn height(krate: &str) -> usize {
    let at = CRATES.iter().position(|place| place.name == krate);
    at.unwrap_or(CRATES.len())
}

/// The backends of `cuvmm-driver`, which `cuvmm` never names.
pub(crate) const BACKENDS: &[&str] = &["cuda", "host", "model"];

/// The one file of `cuvmm` that rounds.
pub(crate) const ROUNDS: &str = "size";

/// The one file of `cuvmm` with something of each thread's own: which locked sections it is in. That
/// is a fact of the thread and of no pool, so pools share nothing by it.
pub(crate) const THREADS: &str = "deferred";

pub(crate) fn place(name: &str) -> Option<&'static Place> {
    CRATES.iter().find(|place| place.name == name)
}

impl Place {
    /// The level that a room is on, counted from the bottom.
    pub(crate) fn level(&self, room: &str) -> Option<usize> {
        self.floors
            .iter()
            .position(|floor| floor.rooms.contains(&room))
    }

    /// Whether a room is known not to be usable by another: it stands above it or closed beside it.
    pub(crate) fn stands_above(&self, room: &str, other: &str) -> bool {
        match (self.level(room), self.level(other)) {
            (Some(room_level), Some(level)) => {
                room != other
                    && (room_level > level || room_level == level && !self.floors[level].open)
            }
            _ => false,
        }
    }
}
