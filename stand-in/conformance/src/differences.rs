//! The cases in which a backend may answer differently from a GPU, with reasons.
//!
//! There are at most ten, and the library depends on none of these rules. A listed case without a
//! difference is an error in the tests, so the list only shrinks, or grows on purpose.

/// A case that a backend may answer differently from the recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deliberate {
    /// The case's name.
    pub case: &'static str,
    /// The backends: `model`, `host`, or `fakecuda` for the real backend over the stand-in.
    pub backends: &'static [&'static str],
    /// `true` if the difference appears on some machines only.
    pub by_machine: bool,
    /// The reason for the difference.
    pub why: &'static str,
}

const ALL: &[&str] = &["model", "host", "fakecuda"];
const ON_MEMORY: &[&str] = &["host", "fakecuda"];

const DIES: &str = "the real driver crashes; a stand-in that crashed its tests would be of no \
                    use, so it returns INVALID_VALUE";

/// All deliberate differences.
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
        why: "the stand-ins give each allocation separate pages; the driver lets small ones share",
    },
    Deliberate {
        case: "export.fd_target",
        backends: ALL,
        by_machine: false,
        why: "a descriptor of the stand-ins is an ordinary file and not an NVIDIA device",
    },
    Deliberate {
        case: "mem_pool.fabric",
        backends: ALL,
        by_machine: true,
        why: "whether fabric handles are permitted depends on the machine's IMEX channels; the \
              stand-ins permit none unless an option says so",
    },
    Deliberate {
        case: "mem_pool_parts.host_numa_posix_fd",
        backends: &["model"],
        by_machine: false,
        why: "the model has no memory that two processes could access",
    },
    Deliberate {
        case: "limit.mappings",
        backends: ON_MEMORY,
        by_machine: true,
        why: "a mapping of the host driver takes one of the system's memory areas, of which a process \
              has 65,530 unless vm.max_map_count says otherwise",
    },
];
