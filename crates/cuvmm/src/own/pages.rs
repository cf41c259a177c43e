//! Pages of the process's memory, from the system.
//!
//! Huge pages are asked for: they are touched, and registered with a driver, several times as fast.
//! A forked child does not inherit the pages, which devices may be writing, and a core dump leaves
//! them out.
//!
//! `unsafe` is used to map and unmap memory.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The alignment of the pages, which is the size of a huge page on x86-64.
pub(super) const ALIGNMENT: usize = 2 << 20;

/// A mapping of zeroed memory, which the system backs as it is touched.
#[derive(Debug)]
pub(super) struct Pages {
    /// The first byte of the mapping, which begins up to one alignment before the pages.
    start: NonNull<u8>,
    base: NonNull<u8>,
    size: usize,
}

impl Pages {
    /// Maps `size` bytes, more than zero. Returns `None` if the system has too few addresses.
    pub(super) fn new(size: usize) -> Option<Self> {
        let whole = size.checked_add(ALIGNMENT)?;
        let (both, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        );
        // SAFETY: a new mapping, placed by the kernel.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), whole, both, flags) };
        let start = NonNull::new(start.ok()?.cast::<u8>())?;
        let before = start.as_ptr().align_offset(ALIGNMENT);
        // SAFETY: less than one alignment, by which the mapping is larger than the pages.
        let base = unsafe { start.add(before) };
        let pages = Self { start, base, size };
        // A kernel without huge pages has ordinary ones.
        let _ = pages.advise(Advice::LinuxHugepage);
        // A child would otherwise share the pages until one of both writes, which moves the
        // process's page away from the one that the device knows.
        pages.advise(Advice::LinuxDontFork).ok()?;
        let _ = pages.advise(Advice::LinuxDontDump);
        Some(pages)
    }

    fn advise(&self, advice: Advice) -> rustix::io::Result<()> {
        // The whole mapping: otherwise it is three areas, of which a process has about 65000.
        // SAFETY: the range is the mapping, and none of the advices changes its contents.
        unsafe { madvise(self.start.as_ptr().cast(), self.size + ALIGNMENT, advice) }
    }

    pub(super) const fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping, to which no reference is left.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.size + ALIGNMENT) };
        if let Err(error) = unmapped {
            log!(warn, %error, bytes = self.size, "host memory could not be unmapped");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    /// Returns the area that contains an address, and the kernel's flags of it.
    fn area(address: usize) -> (Range<usize>, Vec<String>) {
        let areas = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut area = 0..0;
        for line in areas.lines() {
            let range = line
                .split(' ')
                .next()
                .and_then(|range| range.split_once('-'));
            let number = |text| usize::from_str_radix(text, 16).ok();
            if let Some((Some(from), Some(to))) = range.map(|(a, b)| (number(a), number(b))) {
                area = from..to;
            }
            let inside = area.contains(&address);
            if let (true, Some(flags)) = (inside, line.strip_prefix("VmFlags:")) {
                let flags = flags.split_whitespace().map(str::to_owned).collect();
                return (area, flags);
            }
        }
        panic!("{address:#x} is not mapped");
    }

    #[test]
    fn pages_are_huge_if_possible_and_no_childs() {
        let pages = Pages::new(3 * ALIGNMENT).unwrap();
        let base = pages.base().as_ptr().addr();
        assert!(base.is_multiple_of(ALIGNMENT));
        for at in [base, base + 3 * ALIGNMENT - 1] {
            let (area, flags) = area(at);
            let start = pages.start.as_ptr().addr();
            let end = start + 4 * ALIGNMENT;
            assert!(
                area.start <= start && area.end >= end,
                "one area: {area:x?}"
            );
            // Not inherited, and not dumped.
            for wanted in ["rd", "wr", "dc", "dd"] {
                assert!(flags.iter().any(|it| it == wanted), "{wanted}: {flags:?}");
            }
        }
        assert!(Pages::new(usize::MAX).is_none());
        assert!(Pages::new(1 << 62).is_none());
    }
}
