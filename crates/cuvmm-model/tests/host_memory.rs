//! The host driver's memory: its bytes, its use of system resources, and what is left of it.
//!
//! The tests run one at a time, because they examine the resources of the whole process. `unsafe`
//! because the driver's methods are, and to access memory by address.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model_support;

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuvmm_driver::{
    AccessDesc, AccessFlags, DeviceAddress, DeviceMemory, Driver, Exported, HandleTypes,
    ImportSource, Location, PhysicalProps, StreamFlags,
};
use cuvmm_model::host::{HostDriver, HostOptions};
use model_support::*;

static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns the number of the process's memory areas that map this driver's files.
fn placed() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.contains("/memfd:cuvmm"))
        .count()
}

/// Returns the bytes that the system holds for the memory files of this driver's descriptors.
fn held_by_system() -> u64 {
    let mut bytes = 0;
    let mut seen = Vec::new();
    for entry in fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        if !target.to_string_lossy().starts_with("/memfd:cuvmm") {
            continue;
        }
        let stat = rustix::fs::stat(entry.path()).unwrap();
        if !seen.contains(&stat.st_ino) {
            seen.push(stat.st_ino);
            bytes += stat.st_blocks as u64 * 512;
        }
    }
    bytes
}

unsafe fn byte_at(address: DeviceAddress) -> u8 {
    unsafe { std::ptr::with_exposed_provenance::<u8>(address.0 as usize).read_volatile() }
}

#[test]
fn the_bytes_are_at_their_addresses() {
    let _alone = alone();
    let d = host(HostOptions::new());
    assert_eq!(d.device_memory(), DeviceMemory::Host);
    let r = range(&d, 3, 3);
    unsafe {
        let pattern: Vec<u8> = (0..2 * PAGE).map(|index| (index % 251) as u8).collect();
        d.copy_to_device(D0, at(r.at, 100), &pattern).unwrap();
        for index in [0, 1, PAGE - 101, PAGE - 100, 2 * PAGE - 1] {
            assert_eq!(byte_at(at(r.at, 100 + index)), (index % 251) as u8);
        }
        let mut back = vec![0; pattern.len()];
        d.copy_to_host(D0, &mut back, at(r.at, 100)).unwrap();
        assert_eq!(back, pattern);
        // Source and destination consist of pieces with different boundaries.
        let other = range(&d, 2, 2);
        d.copy_on_device(D0, at(other.at, 5), at(r.at, PAGE - 7), PAGE)
            .unwrap();
        let mut moved = vec![0; PAGE as usize];
        d.copy_to_host(D0, &mut moved, at(other.at, 5)).unwrap();
        assert!(moved == pattern[(PAGE - 107) as usize..][..PAGE as usize]);
        // The device reads the bytes that the host writes.
        std::ptr::with_exposed_provenance_mut::<u8>(r.at.0 as usize).write(77);
        assert_eq!(first_byte(&d, r.at), 77);
        r.end(&d);
        other.end(&d);
    }
    assert!(d.live().is_nothing());
}

#[test]
fn two_mappings_of_one_physical_show_the_same() {
    let _alone = alone();
    let d = host(HostOptions::new());
    let r = range(&d, 4, 1);
    unsafe {
        d.map(r.page(2), PAGE, 0, r.handles[0], 0).unwrap();
        d.set_access(r.page(2), PAGE, &[ro(D0)]).unwrap();
        d.fill(D0, at(r.at, 10), 4, 10).unwrap();
        assert_eq!(byte_at(at(r.page(2), 19)), 4);
        assert_eq!(
            code(d.fill(D0, r.page(2), 4, 1)),
            INVALID_VALUE,
            "its own right"
        );
        d.unmap(r.at, PAGE).unwrap();
        assert_eq!(byte_at(at(r.page(2), 19)), 4);
    }
}

/// Returns the protection of the memory area that contains an address.
fn protection(address: DeviceAddress) -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let from = u64::from_str_radix(from, 16).unwrap();
        (from..u64::from_str_radix(to, 16).unwrap()).contains(&address.0)
    });
    line.map_or_else(String::new, |line| {
        line.split(' ').nth(1).unwrap().to_owned()
    })
}

#[test]
fn the_system_protects_as_far_as_anybody_was_granted() {
    let _alone = alone();
    let d = host(HostOptions::new());
    let r = range(&d, 2, 1);
    let steps = [
        (vec![none(D0)], "---s"),
        (vec![ro(D0)], "r--s"),
        (vec![rw(D1)], "rw-s"),
        (vec![none(D1)], "r--s"),
        (vec![none(D0)], "---s"),
        (vec![rw(D0), ro(D1)], "rw-s"),
    ];
    for (access, expected) in steps {
        unsafe { d.set_access(r.at, PAGE, &access) }.unwrap();
        assert_eq!(protection(r.at), expected, "{access:?}");
    }
    unsafe { d.unmap(r.at, PAGE) }.unwrap();
    assert_eq!(protection(r.at), "---p");
    let on_host = d
        .create(PAGE, &PhysicalProps::at(Location::HOST), 0)
        .unwrap();
    let for_host = AccessDesc {
        location: Location::HOST,
        flags: AccessFlags::READ,
    };
    unsafe {
        d.map(r.at, PAGE, 0, on_host, 0).unwrap();
        d.set_access(r.at, PAGE, &[for_host]).unwrap();
        assert_eq!(protection(r.at), "r--s");
        assert_eq!(
            code(d.fill(D0, r.at, 1, 1)),
            INVALID_VALUE,
            "the host's right is not the device's"
        );
    }
}

#[test]
fn a_mapping_past_the_end_touches_nothing_of_others() {
    let _alone = alone();
    let d = host(HostOptions::new());
    // So large that its addresses are returned to the system, which can then assign those behind
    // the reservation to other mappings.
    let large = 1 << 40;
    let _another = d.reserve(PAGE, 0, ANYWHERE, 0).unwrap();
    let whole = d.reserve(large, 0, ANYWHERE, 0).unwrap();
    unsafe {
        d.free_reservation(whole, large).unwrap();
        assert_eq!(d.reserve(PAGE, 0, whole, 0), Ok(whole));
        // Memory outside the driver, directly behind the reservation.
        let behind = at(whole, PAGE);
        let theirs = rustix::mm::mmap_anonymous(
            std::ptr::with_exposed_provenance_mut(behind.0 as usize),
            PAGE as usize,
            rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
            rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::FIXED_NOREPLACE,
        )
        .unwrap()
        .cast::<u8>();
        theirs.write(99);
        let handle = d.create(2 * PAGE, &PhysicalProps::device(D0), 0).unwrap();
        d.map(whole, 2 * PAGE, 0, handle, 0).unwrap();
        d.set_access(whole, 2 * PAGE, &[rw(D0)]).unwrap();
        d.fill(D0, whole, 5, 2 * PAGE).unwrap();
        assert_eq!((byte_at(whole), theirs.read()), (5, 99));
        assert_eq!(first_byte(&d, behind), 5, "the device sees its own");
        d.unmap(whole, 2 * PAGE).unwrap();
        assert_eq!((protection(behind), theirs.read()), ("rw-p".to_owned(), 99));
        rustix::mm::munmap(theirs.cast(), PAGE as usize).unwrap();
    }
}

#[test]
fn a_mapping_past_the_end_does_not_reach_the_next_reservation() {
    let _alone = alone();
    let d = host(HostOptions::new());
    let mut places: Vec<_> = (0..3)
        .map(|_| d.reserve(PAGE, 0, ANYWHERE, 0).unwrap())
        .collect();
    places.sort_by_key(|place| place.0);
    let apart = |pair: &[DeviceAddress]| pair[1].0 - pair[0].0 >= 2 * PAGE;
    assert!(places.windows(2).all(apart), "{places:?}");
    for place in places {
        for outside in [DeviceAddress(place.0 - PAGE), at(place, PAGE)] {
            assert_eq!(protection(outside), "---p");
        }
        unsafe { d.free_reservation(place, PAGE) }.unwrap();
    }
}

#[test]
fn memory_is_taken_when_written_and_given_back_at_release() {
    let _alone = alone();
    let d = host(HostOptions::new());
    let nothing = held_by_system();
    let size = 64 * MIB;
    let va = d.reserve(size, 0, ANYWHERE, 0).unwrap();
    unsafe {
        for round in 0..3 {
            let handle = d.create(size, &PhysicalProps::device(D0), 0).unwrap();
            d.map(va, size, 0, handle, 0).unwrap();
            d.set_access(va, size, &[rw(D0)]).unwrap();
            let mut bytes = vec![1; size as usize];
            d.copy_to_host(D0, &mut bytes, va).unwrap();
            assert!(
                bytes.iter().all(|&byte| byte == 0),
                "fresh memory reads zero, round {round}"
            );
            assert_eq!(held_by_system(), nothing, "reading takes nothing");
            d.fill(D0, va, 0xaa, size).unwrap();
            assert_eq!(held_by_system(), nothing + size);
            d.fill(D0, va, 0, size / 2).unwrap();
            assert_eq!(
                held_by_system(),
                nothing + size / 2,
                "zeroed pages go back at once"
            );
            d.fill(D0, at(va, size / 2 + 1), 0, 4096).unwrap();
            assert_eq!(first_byte(&d, at(va, size / 2)), 0xaa);
            assert_eq!(first_byte(&d, at(va, size / 2 + 4096)), 0);
            assert_eq!(first_byte(&d, at(va, size / 2 + 4097)), 0xaa);
            d.release(handle).unwrap();
            assert_eq!(held_by_system(), nothing + size / 2, "the mapping keeps it");
            d.unmap(va, size).unwrap();
            assert_eq!(held_by_system(), nothing, "given back");
        }
    }
}

#[test]
fn a_hundred_thousand_physicals_need_no_descriptors() {
    let _alone = alone();
    let d = HostDriver::new(HostOptions::new().capacity(1 << 40));
    let before = descriptors();
    let props = PhysicalProps::device(D0);
    let handles: Vec<_> = (0..100_000)
        .map(|_| d.create(PAGE, &props, 0).unwrap())
        .collect();
    assert!(descriptors() <= before + 1, "one file for all");
    assert_eq!(d.live().physicals, 100_000);
    // Every second one, then the others: the offsets in the file are scattered and merged again.
    for parity in 0..2 {
        for &handle in handles.iter().skip(parity).step_by(2) {
            unsafe { d.release(handle) }.unwrap();
        }
    }
    assert!(d.live().is_nothing());
    let whole = d.create(1 << 39, &props, 0).unwrap();
    unsafe { d.release(whole) }.unwrap();
}

#[test]
fn terabytes_of_addresses_cost_nothing() {
    let _alone = alone();
    let d = host(HostOptions::new());
    let before = fs::read_to_string("/proc/self/statm").unwrap();
    let resident = |text: &str| text.split(' ').nth(1).unwrap().parse::<u64>().unwrap();
    let ranges: Vec<_> = (0..8)
        .map(|_| d.reserve(1 << 40, 0, ANYWHERE, 0).unwrap())
        .collect();
    let after = fs::read_to_string("/proc/self/statm").unwrap();
    assert!(
        resident(&after) < resident(&before) + 256,
        "pages in memory"
    );
    // A page in the middle of a terabyte works.
    let handle = page(&d);
    let middle = at(ranges[3], 1 << 39);
    unsafe {
        d.map(middle, PAGE, 0, handle, 0).unwrap();
        d.set_access(middle, PAGE, &[rw(D0)]).unwrap();
        d.fill(D0, middle, 1, PAGE).unwrap();
        assert_eq!(byte_at(at(middle, PAGE - 1)), 1);
    }
    assert_eq!(code(d.reserve(1 << 47, 0, ANYWHERE, 0)), OUT_OF_MEMORY);
}

#[test]
fn nearly_all_of_the_address_space_can_be_reserved() {
    let _alone = alone();
    let d = host(HostOptions::new());
    let step = 1 << 40;
    let mut reserved = Vec::new();
    while let Ok(address) = d.reserve(step, 0, ANYWHERE, 0) {
        reserved.push(address);
    }
    let tib = reserved.len();
    assert!((100..128).contains(&tib), "{tib} TiB");
    assert_eq!(d.live().reservations, tib, "what failed left nothing");
    for address in reserved {
        unsafe { d.free_reservation(address, step) }.unwrap();
    }
}

#[test]
fn dropping_a_driver_leaves_nothing() {
    let _alone = alone();
    let files = descriptors();
    let mut addresses = Vec::new();
    {
        let d = host(HostOptions::new());
        let r = range(&d, 64, 64);
        unsafe { d.fill(D0, r.at, 1, 64 * PAGE) }.unwrap();
        let handle_types = HandleTypes::POSIX_FD;
        let props = PhysicalProps {
            handle_types,
            ..PhysicalProps::device(D0)
        };
        for _ in 0..20 {
            let handle = d.create(PAGE, &props, 0).unwrap();
            drop(unsafe { d.export(handle, handle_types, 0) }.unwrap());
        }
        let s = d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap();
        d.hold(D0, s);
        unsafe { d.fill_async(D0, r.at, 1, PAGE, s) }.unwrap();
        let pinned = d.host_alloc(D0, PAGE, 0).unwrap();
        addresses.push(r.page(63));
        addresses.push(d.reserve(PAGE, 0, ANYWHERE, 0).unwrap());
        addresses.push(d.managed_alloc(D0, PAGE, 1).unwrap());
        addresses.push(DeviceAddress(pinned.expose_provenance() as u64));
        assert!(
            addresses
                .iter()
                .all(|&address| !protection(address).is_empty())
        );
        assert!(descriptors() > files + 20 && placed() >= 64);
    }
    assert_eq!((descriptors(), placed()), (files, 0));
    for address in addresses {
        assert_eq!(protection(address), "", "nothing is mapped at {address}");
    }
}

#[test]
fn two_drivers_side_by_side() {
    let _alone = alone();
    let one = host(HostOptions::new());
    let two = HostDriver::new(HostOptions::new().capacity(8 * PAGE).granularity(64 << 10));
    let (a, b) = (
        range(&one, 2, 2),
        two.reserve(PAGE, 0, ANYWHERE, 0).unwrap(),
    );
    assert_eq!(
        two.allocation_granularity(
            &PhysicalProps::device(D0),
            cuvmm_driver::GranularityKind::MINIMUM
        ),
        Ok(64 << 10)
    );
    let small = two.create(64 << 10, &PhysicalProps::device(D0), 0).unwrap();
    unsafe {
        two.map(b, 64 << 10, 0, small, 0).unwrap();
        two.set_access(b, 64 << 10, &[rw(D0)]).unwrap();
        one.fill(D0, a.at, 1, PAGE).unwrap();
        two.fill(D0, b, 2, 64 << 10).unwrap();
        assert_eq!((byte_at(a.at), byte_at(b)), (1, 2));
        assert_eq!(
            code(two.fill(D0, a.at, 3, 1)),
            INVALID_VALUE,
            "not its address"
        );
        assert_eq!(code(two.unmap(a.at, PAGE)), INVALID_VALUE);
        drop(one);
        assert_eq!(byte_at(b), 2);
    }
    assert_eq!(two.memory_info(D0).unwrap().free, 8 * PAGE - (64 << 10));
}

#[test]
fn another_drivers_memory_is_foreign_but_the_same() {
    let _alone = alone();
    let giver = host(HostOptions::new());
    let taker = host(HostOptions::new());
    let handle_types = HandleTypes::POSIX_FD;
    let props = PhysicalProps {
        handle_types,
        ..PhysicalProps::device(D1)
    };
    let given = giver.create(2 * PAGE, &props, 0).unwrap();
    let Exported::Fd(fd) = unsafe { giver.export(given, handle_types, 0) }.unwrap() else {
        panic!("a descriptor")
    };
    unsafe {
        let source = ImportSource::Fd(fd.as_fd().as_raw_fd());
        let taken = taker.import(source, handle_types).unwrap();
        drop(fd);
        assert_eq!(
            taker.physical_props(taken),
            Ok(PhysicalProps::device(D1)),
            "its location came along"
        );
        assert_eq!(
            taker.memory_info(D1).unwrap().free,
            4 * GIB,
            "the importer is not charged"
        );
        let va = taker.reserve(2 * PAGE, 0, ANYWHERE, 0).unwrap();
        assert_eq!(
            code(taker.map(va, PAGE, 0, taken, 0)),
            NOT_SUPPORTED,
            "its size came along"
        );
        taker.map(va, 2 * PAGE, 0, taken, 0).unwrap();
        taker.set_access(va, 2 * PAGE, &[rw(D1)]).unwrap();
        taker.fill(D1, va, 17, 2 * PAGE).unwrap();

        let mine = giver.reserve(2 * PAGE, 0, ANYWHERE, 0).unwrap();
        giver.map(mine, 2 * PAGE, 0, given, 0).unwrap();
        giver.set_access(mine, 2 * PAGE, &[ro(D1)]).unwrap();
        assert_eq!(
            byte_at(at(mine, PAGE)),
            17,
            "the giver sees the taker's write"
        );
        giver.unmap(mine, 2 * PAGE).unwrap();
        giver.release(given).unwrap();
        assert_eq!(
            giver.memory_info(D1).unwrap().free,
            4 * GIB - 2 * PAGE,
            "still in use elsewhere"
        );
        taker.release(taken).unwrap();
        assert_eq!(
            giver.memory_info(D1).unwrap().free,
            4 * GIB - 2 * PAGE,
            "mapped elsewhere"
        );
        assert_eq!(byte_at(va), 17, "and alive");
        taker.unmap(va, 2 * PAGE).unwrap();
        assert_eq!(giver.memory_info(D1).unwrap().free, 4 * GIB);
    }
}

#[test]
fn the_default_is_one_modest_device() {
    let _alone = alone();
    let d = HostDriver::default();
    assert_eq!(d.device_count(), Ok(1));
    assert_eq!(d.device_name(D0), Ok("host memory".to_owned()));
    assert_eq!(d.device_uuid(D0), HostDriver::default().device_uuid(D0));
    let total = d.total_memory(D0).unwrap();
    assert!(total >= PAGE && total.is_multiple_of(PAGE), "{total}");
    let two = HostDriver::new(HostOptions::new().devices(2));
    assert!(
        two.total_memory(D1).unwrap() <= total / 2 + PAGE * 64,
        "shared out"
    );
}
