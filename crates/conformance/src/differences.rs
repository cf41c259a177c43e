//! Where a backend may answer otherwise than a GPU, and why.
//!
//! At most ten, and none of them a rule that the library leans on. A difference that no longer
//! differs is an error in the tests: this list only shrinks, or grows on purpose.

/// One case that a backend may answer otherwise than the recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deliberate {
    /// The case's name.
    pub case: &'static str,
    /// Backends: `model`, `host`, or `fakecuda` for the real backend over the stand-in.
    pub backends: &'static [&'static str],
    /// Whether it shows on some machines and not on others.
    pub by_machine: bool,
    /// Why it may.
    pub why: &'static str,
}

const ALL: &[&str] = &["model", "host", "fakecuda"];
const ON_MEMORY: &[&str] = &["host", "fakecuda"];

const DIES: &str = "the real driver dies; a stand-in that killed its tests would be of no use, so \
                    it answers INVALID_VALUE";

/// All of them.
pub const DELIBERATE: &[Deliberate] = &[
    Deliberate {
        case: "map.released_handle",
        backends: ALL,
        by_machine: false,
        why: DIES,
    },
    Deliberate {
        case: "seam.copy_to_device",
        backends: ALL,
        by_machine: false,
        why: DIES,
    },
    Deliberate {
        case: "seam.copy_to_host",
        backends: ALL,
        by_machine: false,
        why: DIES,
    },
    Deliberate {
        case: "seam.copy_to_device_host_first",
        backends: ALL,
        by_machine: false,
        why: DIES,
    },
    Deliberate {
        case: "managed.page_aligned",
        backends: ALL,
        by_machine: false,
        why: "the stand-ins give each allocation pages of its own; the driver lets small ones share",
    },
    Deliberate {
        case: "export.fd_target",
        backends: ALL,
        by_machine: false,
        why: "a descriptor of the stand-ins is a file of their own and no NVIDIA device",
    },
    Deliberate {
        case: "limit.mappings",
        backends: ON_MEMORY,
        by_machine: true,
        why: "a mapping of the host driver takes one of the system's memory areas, of which a process \
              has 65,530 unless vm.max_map_count says otherwise",
    },
];
