//! Random calls from eight processes, compared with a reference that is written here and shares no
//! code with the stand-in.
//!
//! `CUVMM_STRESS` sets the number of calls of all processes together, and `CUVMM_SEED` the seed.
//! Each process is this test with its number in the environment.
//!
//! `unsafe` is allowed here to call the C functions of the stand-in with pointers to locals, and with
//! addresses and handles that it returned.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::FromRawFd as _;
use std::ptr::{null_mut, without_provenance_mut};

use cuvmm_sys::{
    Api, CUcontext, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemLocation, CUmemLocationType, CUresult,
};

#[path = "../testing/built.rs"]
mod built;
#[path = "../../../crates/cuvmm-model/testing/own_process.rs"]
mod own_process;

const PROCESSES: u64 = 8;
const USUAL_CALLS: u64 = 400_000;
const GRANULE: u64 = 2 << 20;
/// The bytes at the start of each granule that are written and compared.
const WINDOW: usize = 64;
const MOST: usize = 24;

const OK: CUresult = CUresult::CUDA_SUCCESS;
const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_NOT_SUPPORTED;
const FD: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const DEVICE: CUmemLocation = CUmemLocation {
    kind: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
    id: 0,
};

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn eight_processes_call_at_random() {
    if let Ok(number) = std::env::var("CUVMM_STRESS_PROCESS") {
        let library = std::env::var("CUVMM_STRESS_LIBRARY").unwrap();
        return process(&library, number.parse().unwrap());
    }
    let directory = tempfile::tempdir().unwrap();
    let library = built::fakecuda_in(directory.path());
    let children: Vec<_> = (0..PROCESSES)
        .map(|number| {
            own_process::only("eight_processes_call_at_random")
                .env("CUVMM_STRESS_PROCESS", number.to_string())
                .env("CUVMM_STRESS_LIBRARY", &library)
                .env("FAKECUDA_CAPACITY", (64 * GRANULE).to_string())
                .spawn()
                .unwrap()
        })
        .collect();
    let mut failed = Vec::new();
    for (number, mut child) in children.into_iter().enumerate() {
        if !child.wait().unwrap().success() {
            failed.push(number);
        }
    }
    assert!(failed.is_empty(), "processes {failed:?} found differences");
}

fn setting(name: &str, usual: u64) -> u64 {
    let set = std::env::var(name).ok();
    set.and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// The calls of one process.
fn process(library: &str, number: u64) {
    // SAFETY: the parent has built the library.
    let api = unsafe { Api::load_from(library) }.unwrap();
    let mut context: CUcontext = null_mut();
    // SAFETY: the result is written to a local.
    unsafe {
        assert_eq!((api.cuInit)(0), OK);
        assert_eq!((api.cuDevicePrimaryCtxRetain)(&mut context, 0), OK);
        assert_eq!((api.cuCtxSetCurrent)(context), OK);
    }
    let seed = setting("CUVMM_SEED", 1).wrapping_add(number << 32) | 1;
    let mut caller = Caller {
        api,
        random: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
        calls: 0,
        reservations: BTreeMap::new(),
        handles: BTreeMap::new(),
        imported: BTreeSet::new(),
        mappings: BTreeMap::new(),
        memories: BTreeMap::new(),
        made: 0,
        free: 64,
    };
    let wanted = setting("CUVMM_STRESS", USUAL_CALLS) / PROCESSES;
    while caller.calls < wanted {
        caller.step();
    }
    caller.end();
}

/// The physical memory behind handles and mappings.
#[derive(Debug)]
struct Memory {
    granules: u64,
    references: u64,
    mappings: u64,
    /// The window of each granule.
    bytes: Vec<[u8; WINDOW]>,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    granules: u64,
    memory: u64,
    access: i32,
}

/// A caller with a reference: what there is, by the rules as documented and measured.
struct Caller {
    api: Api,
    random: u64,
    calls: u64,
    /// Granules by start.
    reservations: BTreeMap<u64, u64>,
    /// The memory that each handle names. A retained handle has the same value once more.
    handles: BTreeMap<u64, (u64, u64)>,
    /// The handles that were imported, which cannot be exported.
    imported: BTreeSet<u64>,
    mappings: BTreeMap<u64, Mapping>,
    memories: BTreeMap<u64, Memory>,
    made: u64,
    /// Granules of the device that are free.
    free: u64,
}

impl Caller {
    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % limit.max(1)
    }

    fn pick<T: Copy>(&mut self, from: Vec<T>) -> Option<T> {
        let index = self.below(from.len() as u64) as usize;
        from.get(index).copied()
    }

    #[track_caller]
    fn expect(&mut self, call: &str, got: CUresult, wanted: CUresult) {
        self.calls += 1;
        assert_eq!(got, wanted, "{call}, call {}", self.calls);
    }

    fn step(&mut self) {
        match self.below(20) {
            0 => self.reserve(),
            1 => self.free_reservation(),
            2 | 3 => self.create(),
            4 => self.release(),
            5..=7 => self.map(),
            8 | 9 => self.unmap(),
            10..=12 => self.set_access(),
            13 | 14 => self.write(),
            15 | 16 => self.read(),
            17 => self.retain(),
            18 => self.share(),
            _ => self.memory_info(),
        }
    }

    fn reserve(&mut self) {
        if self.reservations.len() >= MOST {
            return;
        }
        let (granules, mut at) = (self.below(8), 0);
        // SAFETY: the result is written to a local.
        let got = unsafe {
            (self.api.cuMemAddressReserve)(&mut at, (granules * GRANULE) as usize, 0, 0, 0)
        };
        self.expect("reserve", got, if granules == 0 { INVALID } else { OK });
        if granules == 0 {
            return;
        }
        assert_eq!(at % GRANULE, 0);
        let end = at + granules * GRANULE;
        let before = self.reservations.range(..end).next_back();
        assert!(before.is_none_or(|(&start, &size)| start + size * GRANULE <= at));
        self.reservations.insert(at, granules);
    }

    fn free_reservation(&mut self) {
        let all = self.reservations.iter().map(|(&at, &size)| (at, size));
        let Some((at, granules)) = self.pick(all.collect()) else {
            return;
        };
        let asked = if self.below(8) == 0 {
            granules + 1
        } else {
            granules
        };
        let end = at + granules * GRANULE;
        let mapped = self.mappings.range(at..end).next().is_some();
        // SAFETY: the range is one that was reserved, or is refused.
        let got = unsafe { (self.api.cuMemAddressFree)(at, (asked * GRANULE) as usize) };
        let fine = asked == granules && !mapped;
        self.expect("free", got, if fine { OK } else { INVALID });
        if fine {
            self.reservations.remove(&at);
        }
    }

    fn create(&mut self) {
        if self.handles.len() >= MOST {
            return;
        }
        let mut props = CUmemAllocationProp::pinned(DEVICE);
        props.requestedHandleTypes = FD;
        let (granules, mut handle) = (self.below(5), 0);
        let size = (granules * GRANULE) as usize;
        // SAFETY: the pointers are to locals.
        let got = unsafe { (self.api.cuMemCreate)(&mut handle, size, &props, 0) };
        let wanted = match granules {
            0 => INVALID,
            granules if granules > self.free => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            _ => OK,
        };
        self.expect("create", got, wanted);
        if wanted != OK {
            return;
        }
        self.made += 1;
        self.free -= granules;
        assert!(self.handles.insert(handle, (self.made, 1)).is_none());
        let memory = Memory {
            granules,
            references: 1,
            mappings: 0,
            bytes: vec![[0; WINDOW]; granules as usize],
        };
        self.memories.insert(self.made, memory);
    }

    fn release(&mut self) {
        let all = self.handles.keys().copied().collect();
        let Some(handle) = self.pick(all) else { return };
        // SAFETY: the handle was returned and not released as often as it was returned.
        let got = unsafe { (self.api.cuMemRelease)(handle) };
        self.expect("release", got, OK);
        let (memory, count) = self.handles[&handle];
        match count {
            1 => drop(self.handles.remove(&handle)),
            _ => drop(self.handles.insert(handle, (memory, count - 1))),
        }
        self.memories.get_mut(&memory).unwrap().references -= 1;
        self.settle(memory);
    }

    /// Frees memory that nothing names any more.
    fn settle(&mut self, key: u64) {
        let memory = &self.memories[&key];
        if memory.references == 0 && memory.mappings == 0 {
            self.free += memory.granules;
            self.memories.remove(&key);
        }
    }

    fn map(&mut self) {
        let reservations = self.reservations.iter().map(|(&at, &size)| (at, size));
        let reservation = self.pick(reservations.collect());
        let handles = self
            .handles
            .iter()
            .map(|(&handle, &(memory, _))| (handle, memory));
        let handle = self.pick(handles.collect());
        let (Some((at, room)), Some((handle, memory))) = (reservation, handle) else {
            return;
        };
        let granules = self.memories[&memory].granules;
        let place = at + self.below(room) * GRANULE;
        let asked = if self.below(10) == 0 {
            granules + 1
        } else {
            granules
        };
        if place + asked * GRANULE > at + room * GRANULE {
            // The driver lets a mapping run past the end; the reference does not follow it there.
            return;
        }
        let (size, end) = ((asked * GRANULE) as usize, place + asked * GRANULE);
        let below = self.mappings.range(..end).next_back();
        let overlaps = below.is_some_and(|(&start, map)| start + map.granules * GRANULE > place);
        // SAFETY: the handle is live, and nothing uses the range.
        let got = unsafe { (self.api.cuMemMap)(place, size, 0, handle, 0) };
        let wanted = match (asked == granules, overlaps) {
            (false, _) => UNSUPPORTED,
            (true, true) => INVALID,
            (true, false) => OK,
        };
        self.expect("map", got, wanted);
        if wanted == OK {
            let mapping = Mapping {
                granules,
                memory,
                access: 0,
            };
            self.mappings.insert(place, mapping);
            self.memories.get_mut(&memory).unwrap().mappings += 1;
        }
    }

    fn mapping(&mut self) -> Option<(u64, Mapping)> {
        let all = self.mappings.iter().map(|(&at, &mapping)| (at, mapping));
        self.pick(all.collect())
    }

    fn unmap(&mut self) {
        let Some((at, mapping)) = self.mapping() else {
            return;
        };
        let part = mapping.granules > 1 && self.below(6) == 0;
        let granules = if part {
            mapping.granules - 1
        } else {
            mapping.granules
        };
        // SAFETY: nothing uses the range.
        let got = unsafe { (self.api.cuMemUnmap)(at, (granules * GRANULE) as usize) };
        self.expect("unmap", got, if part { INVALID } else { OK });
        if !part {
            self.mappings.remove(&at);
            self.memories.get_mut(&mapping.memory).unwrap().mappings -= 1;
            self.settle(mapping.memory);
        }
    }

    fn set_access(&mut self) {
        let Some((at, mapping)) = self.mapping() else {
            return;
        };
        let flags = [0, 1, 3, 3, 3, 2][self.below(6) as usize];
        let part = mapping.granules > 1 && self.below(8) == 0;
        let granules = if part { 1 } else { mapping.granules };
        let access = CUmemAccessDesc {
            location: DEVICE,
            flags: CUmemAccess_flags(flags),
        };
        // SAFETY: the descriptor is a local, and nothing uses the range.
        let got =
            unsafe { (self.api.cuMemSetAccess)(at, (granules * GRANULE) as usize, &access, 1) };
        let refused = part || flags == 2;
        self.expect("set_access", got, if refused { INVALID } else { OK });
        if !refused {
            self.mappings.get_mut(&at).unwrap().access = flags;
        }
    }

    fn write(&mut self) {
        let Some((at, mapping)) = self.mapping() else {
            return;
        };
        let granule = self.below(mapping.granules);
        let start = self.below(WINDOW as u64 / 2);
        let bytes = [self.below(256) as u8; WINDOW / 2];
        let to = at + granule * GRANULE + start;
        // SAFETY: the source is a local of that size.
        let got = unsafe { (self.api.cuMemcpyHtoD_v2)(to, bytes.as_ptr().cast(), bytes.len()) };
        let fine = mapping.access == 3;
        self.expect("write", got, if fine { OK } else { INVALID });
        if fine {
            let memory = self.memories.get_mut(&mapping.memory).unwrap();
            let window = &mut memory.bytes[granule as usize];
            window[start as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
    }

    fn read(&mut self) {
        let Some((at, mapping)) = self.mapping() else {
            return;
        };
        let granule = self.below(mapping.granules);
        let mut bytes = [0u8; WINDOW];
        let from = at + granule * GRANULE;
        // SAFETY: the destination is a local of that size.
        let got =
            unsafe { (self.api.cuMemcpyDtoH_v2)(bytes.as_mut_ptr().cast(), from, bytes.len()) };
        let fine = mapping.access != 0;
        self.expect("read", got, if fine { OK } else { INVALID });
        if fine {
            assert_eq!(
                bytes,
                self.memories[&mapping.memory].bytes[granule as usize]
            );
        }
    }

    fn retain(&mut self) {
        let Some((at, mapping)) = self.mapping() else {
            return;
        };
        let inside = at + self.below(mapping.granules * GRANULE);
        let retain = self.api.cuMemRetainAllocationHandle.get().unwrap();
        let mut handle = 0;
        // SAFETY: the result is written to a local, and the address is a number.
        let got = unsafe { retain(&mut handle, without_provenance_mut(inside as usize)) };
        self.expect("retain", got, OK);
        let named = self.handles.get(&handle).copied();
        let (memory, count) = named.unwrap_or((mapping.memory, 0));
        assert_eq!(memory, mapping.memory);
        self.handles.insert(handle, (memory, count + 1));
        self.memories.get_mut(&memory).unwrap().references += 1;
    }

    /// Exports a handle and imports it again, which makes another handle of the same memory.
    fn share(&mut self) {
        let all = self
            .handles
            .iter()
            .map(|(&handle, &(memory, _))| (handle, memory));
        let Some((handle, memory)) = self.pick(all.collect()) else {
            return;
        };
        let mut descriptor = -1i32;
        let out = (&raw mut descriptor).cast();
        // SAFETY: the handle is live, and the result is written to a local.
        let got = unsafe { (self.api.cuMemExportToShareableHandle)(out, handle, FD, 0) };
        let refused = self.imported.contains(&handle);
        self.expect("export", got, if refused { INVALID } else { OK });
        if refused {
            return;
        }
        let mut imported = 0;
        let source = without_provenance_mut(descriptor as usize);
        // SAFETY: the descriptor was just exported.
        let got = unsafe { (self.api.cuMemImportFromShareableHandle)(&mut imported, source, FD) };
        self.expect("import", got, OK);
        // SAFETY: the descriptor was just exported, and nothing else owns it.
        drop(unsafe { std::os::fd::OwnedFd::from_raw_fd(descriptor) });
        let count = self.handles.get(&imported).map_or(0, |&(_, count)| count);
        self.handles.insert(imported, (memory, count + 1));
        self.imported.insert(imported);
        self.memories.get_mut(&memory).unwrap().references += 1;
    }

    fn memory_info(&mut self) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the results are written to locals.
        let got = unsafe { (self.api.cuMemGetInfo_v2)(&mut free, &mut total) };
        self.expect("memory_info", got, OK);
        assert_eq!(free as u64, self.free * GRANULE);
    }

    /// Takes everything away and checks that nothing is left.
    fn end(&mut self) {
        while let Some((&at, mapping)) = self.mappings.iter().next() {
            let (size, memory) = ((mapping.granules * GRANULE) as usize, mapping.memory);
            // SAFETY: nothing uses the range.
            let got = unsafe { (self.api.cuMemUnmap)(at, size) };
            self.expect("unmap", got, OK);
            self.mappings.remove(&at);
            self.memories.get_mut(&memory).unwrap().mappings -= 1;
            self.settle(memory);
        }
        while !self.handles.is_empty() {
            self.release();
        }
        for (at, granules) in std::mem::take(&mut self.reservations) {
            // SAFETY: nothing is mapped there.
            let got = unsafe { (self.api.cuMemAddressFree)(at, (granules * GRANULE) as usize) };
            self.expect("free", got, OK);
        }
        assert_eq!(self.free, 64);
        self.memory_info();
    }
}
