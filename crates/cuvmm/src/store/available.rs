//! The host memory that the process can still take.
//!
//! A process that touches more memory than the system, or a control group that it is in, has is
//! killed. So a store asks before it touches any. On systems other than Linux it cannot ask.

use std::fs;
use std::path::{Path, PathBuf};

/// The part of a limit that is left to others: one in this many bytes.
const RESERVE_PART: u64 = 64;

/// The least bytes that are left to others.
const LEAST_RESERVE: u64 = 64 << 20;

/// The names of a control group's files, which each hold a number of bytes, and of the two counts
/// of cached file contents in `memory.stat`.
struct Names {
    limit: &'static str,
    used: &'static str,
    cached: [&'static str; 2],
}

const V1: Names = Names {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_inactive_file", "total_active_file"],
};

const V2: Names = Names {
    limit: "memory.max",
    used: "memory.current",
    cached: ["inactive_file", "active_file"],
};

/// Returns the bytes that the process can still touch, or `None` if nothing says so: the least of
/// what the system has available and what each control group of the process, and each group above
/// it, has left. Cached file contents count as left, because the system drops them for memory that
/// is touched. A part is left to others.
pub(super) fn available() -> Option<u64> {
    under(Path::new("/"))
}

/// Returns what [`available`] does, from the system's files under a folder.
fn under(root: &Path) -> Option<u64> {
    let system = of_system(&root.join("proc/meminfo"));
    let groups = groups(root).into_iter().flatten();
    groups.chain(system).min()
}

fn less_reserve(left: u64, limit: u64) -> u64 {
    left.saturating_sub(LEAST_RESERVE.max(limit / RESERVE_PART))
}

fn of_system(meminfo: &Path) -> Option<u64> {
    let text = fs::read_to_string(meminfo).ok()?;
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib.saturating_mul(1024))
    };
    Some(less_reserve(bytes("MemAvailable:")?, bytes("MemTotal:")?))
}

/// Returns what the process's control groups have left, from each to the topmost that is visible.
fn groups(root: &Path) -> Option<Vec<u64>> {
    let own = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
    let mut left = Vec::new();
    for line in own.lines() {
        // The number of the hierarchy, its controllers, and the path of the group in it.
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let (names, kind) = match controllers {
            "" => (&V2, "cgroup2"),
            some if some.split(',').any(|it| it == "memory") => (&V1, "cgroup"),
            _ => continue,
        };
        let Some((top, group)) = mounts.lines().find_map(|line| mounted(line, kind, path)) else {
            continue;
        };
        let top = root.join(top.strip_prefix("/").unwrap_or(&top));
        let groups = group.ancestors().map(|group| top.join(group));
        left.extend(groups.filter_map(|group| left_in(&group, names)));
    }
    Some(left)
}

/// Returns where a line of `mountinfo` mounts a hierarchy with the memory controller, and the path
/// of a group below that.
fn mounted(line: &str, kind: &str, path: &str) -> Option<(PathBuf, PathBuf)> {
    let (mount, system) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (part, place) = (mount.next()?, mount.next()?);
    let mut system = system.split(' ');
    let (found, options) = (system.next()?, system.nth(1)?);
    let has_memory = kind == "cgroup2" || options.split(',').any(|it| it == "memory");
    if found != kind || !has_memory {
        return None;
    }
    // A group outside of the mounted part is not visible. Its visible ancestor is the mounted one.
    let below = Path::new(path).strip_prefix(part).unwrap_or(Path::new(""));
    let is_below = below
        .components()
        .all(|it| matches!(it, std::path::Component::Normal(_)));
    let below = if is_below { below } else { Path::new("") };
    Some((place.into(), below.to_owned()))
}

fn left_in(group: &Path, names: &Names) -> Option<u64> {
    let text = |name: &str| fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
    // "max" is no limit.
    let (limit, used) = (number(names.limit)?, number(names.used)?);
    let stat = text("memory.stat").unwrap_or_default();
    let cached = stat.lines().filter_map(|line| {
        let (name, bytes) = line.split_once(' ')?;
        let bytes = bytes.parse::<u64>().ok()?;
        names.cached.contains(&name).then_some(bytes)
    });
    let used = used.saturating_sub(cached.sum::<u64>());
    Some(less_reserve(limit.saturating_sub(used), limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn files(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let file = root.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) = (
        "proc/meminfo",
        "MemTotal:       67108864 kB\nMemFree:  1 kB\nMemAvailable:   33554432 kB\n",
    );
    const MOUNTS: &str = "24 1 0:5 / /proc rw - proc proc rw\n\
        30 24 0:26 /pod /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n\
        31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
        32 24 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

    #[test]
    fn the_system_leaves_a_part_to_others() {
        let root = files(&[MEMINFO]);
        assert_eq!(under(root.path()), Some(32 * GIB - GIB));
        let root = files(&[("proc/meminfo", "MemTotal: 1024 kB\nMemAvailable: 1024 kB\n")]);
        assert_eq!(under(root.path()), Some(0));
    }

    #[test]
    fn without_figures_nothing_is_said() {
        for meminfo in [
            "",
            "MemTotal: 1 kB\n",
            "MemAvailable: 1 GB\nMemTotal: 1 kB\n",
        ] {
            let root = files(&[("proc/meminfo", meminfo), ("proc/self/cgroup", "0::/a\n")]);
            assert_eq!(under(root.path()), None, "{meminfo}");
        }
        assert_eq!(under(Path::new("/nowhere/at/all")), None);
    }

    #[test]
    fn the_tightest_group_counts_with_its_cached_files() {
        let root = files(&[
            MEMINFO,
            ("proc/self/cgroup", "4:cpu:/x\n0::/pod/box\n"),
            ("proc/self/mountinfo", MOUNTS),
            // The mounted part is /pod. Its group `box` has no limit, so the pod's counts.
            ("sys/fs/cgroup/box/memory.max", "max\n"),
            ("sys/fs/cgroup/box/memory.current", "5\n"),
            ("sys/fs/cgroup/memory.max", "8589934592\n"),
            ("sys/fs/cgroup/memory.current", "6442450944\n"),
            (
                "sys/fs/cgroup/memory.stat",
                "anon 7\ninactive_file 1073741824\nactive_file 536870912\nfile_dirty 3\n",
            ),
        ]);
        let left = 2 * GIB + GIB + GIB / 2 - 8 * GIB / RESERVE_PART;
        assert_eq!(under(root.path()), Some(left));
        // The inner group's own limit is tighter.
        fs::write(
            root.path().join("sys/fs/cgroup/box/memory.max"),
            "268435461",
        )
        .unwrap();
        assert_eq!(under(root.path()), Some(256 * MIB - LEAST_RESERVE));
    }

    #[test]
    fn groups_of_the_first_version_count_too() {
        let root = files(&[
            MEMINFO,
            ("proc/self/cgroup", "7:cpu,memory:/a/b\n0::/\n"),
            ("proc/self/mountinfo", MOUNTS),
            (
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes",
                "4294967296\n",
            ),
            (
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes",
                "4294967296\n",
            ),
            (
                "sys/fs/cgroup/memory/a/memory.stat",
                "inactive_file 9\ntotal_inactive_file 134217728\n",
            ),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "99\n"),
        ]);
        assert_eq!(under(root.path()), Some(128 * MIB - LEAST_RESERVE));
    }

    #[test]
    fn a_group_that_is_not_visible_counts_as_the_mounted_one() {
        for path in ["/elsewhere/box", "/../other", "/pod/../.."] {
            let root = files(&[
                MEMINFO,
                ("proc/self/cgroup", &format!("0::{path}\n")),
                ("proc/self/mountinfo", MOUNTS),
                ("sys/fs/cgroup/memory.max", "1073741824\n"),
                ("sys/fs/cgroup/memory.current", "0\n"),
            ]);
            assert_eq!(under(root.path()), Some(GIB - LEAST_RESERVE), "{path}");
        }
    }
}
