//! Random programs of virtual-memory calls: the model and the host answer alike, the page tables
//! stay alike, and the host's bytes are what a plain array would hold.
//!
//! `unsafe` because the calls are, and on purpose misused.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]

mod model_support;

use std::collections::BTreeMap;

use cuvmm_driver::host::{HostDriver, HostOptions};
use cuvmm_driver::model::{Backing, Machine, Manner, ModelDriver, ModelOptions};
use cuvmm_driver::{
    AccessFlags, CUresult, DeviceAddress, Driver, Location, PhysicalHandle, PhysicalProps,
};
use model_support::*;
use proptest::prelude::*;

/// Granules are small, so that copying all memory after each program is cheap.
const GRANULE: u64 = 64 << 10;
const RANGES: usize = 3;
const PAGES: u64 = 8;

#[derive(Clone, Debug)]
enum Step {
    Reserve(usize),
    Free(usize, u64),
    Create(u64),
    Release(usize),
    Retain(usize, u64),
    Map(usize, u64, usize, u64),
    Unmap(usize, u64, u64),
    Access(usize, u64, u64, i32, bool),
    Fill(usize, u64, u64, u8),
    Copy(usize, u64, usize, u64, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let range = 0..RANGES;
    let page = 0..PAGES + 1;
    let pages = 0..PAGES + 2;
    prop_oneof![
        1 => range.clone().prop_map(Step::Reserve),
        1 => (range.clone(), 7..PAGES + 2).prop_map(|(r, pages)| Step::Free(r, pages)),
        3 => (0..4_u64).prop_map(Step::Create),
        2 => (0..12_usize).prop_map(Step::Release),
        1 => (range.clone(), page.clone()).prop_map(|(r, page)| Step::Retain(r, page)),
        6 => (range.clone(), page.clone(), 0..12_usize, 0..4_u64)
            .prop_map(|(r, page, handle, pages)| Step::Map(r, page, handle, pages)),
        3 => (range.clone(), page.clone(), pages.clone())
            .prop_map(|(r, page, pages)| Step::Unmap(r, page, pages)),
        6 => (range.clone(), page.clone(), pages.clone(), 0..4_i32, any::<bool>())
            .prop_map(|(r, page, pages, flags, first)| Step::Access(r, page, pages, flags, first)),
        4 => (range.clone(), 0..PAGES * GRANULE, 0..3 * GRANULE, any::<u8>())
            .prop_map(|(r, from, size, byte)| Step::Fill(r, from, size, byte)),
        3 => (range.clone(), 0..PAGES * GRANULE, range, 0..PAGES * GRANULE, 0..GRANULE)
            .prop_map(|(to, to_at, from, from_at, size)| Step::Copy(to, to_at, from, from_at, size)),
    ]
}

/// One machine with what the program has been given by it.
struct Run<B> {
    driver: Machine<B>,
    ranges: [Option<DeviceAddress>; RANGES],
    handles: Vec<PhysicalHandle>,
}

impl<B: Backing> Run<B> {
    fn new(driver: Machine<B>) -> Self {
        Self {
            driver,
            ranges: [None; RANGES],
            handles: Vec::new(),
        }
    }

    fn address(&self, range: usize, offset: u64) -> Option<DeviceAddress> {
        self.ranges[range].map(|start| at(start, offset))
    }

    /// Steps that name what is not there are left out, on both machines alike.
    fn take(&mut self, step: &Step) -> Option<CUresult> {
        let d = &self.driver;
        Some(match *step {
            Step::Reserve(range) => {
                if self.ranges[range].is_some() {
                    return None;
                }
                // Far from each other, so that what lies behind a range is alike on both.
                let got = d.reserve(PAGES * GRANULE, 1 << 30, ANYWHERE, 0);
                self.ranges[range] = got.ok();
                code(got)
            }
            Step::Free(range, pages) => {
                let answer =
                    unsafe { d.free_reservation(self.address(range, 0)?, pages * GRANULE) };
                if answer.is_ok() {
                    self.ranges[range] = None;
                }
                code(answer)
            }
            Step::Create(pages) => {
                let props = PhysicalProps::device(if pages == 3 { D1 } else { D0 });
                let got = d.create(pages * GRANULE, &props, 0);
                self.handles.extend(got.ok());
                code(got)
            }
            Step::Release(handle) => code(unsafe { d.release(*self.handles.get(handle)?) }),
            Step::Retain(range, page) => {
                let got = d.retain(self.address(range, page * GRANULE)?);
                self.handles.extend(got.ok());
                code(got)
            }
            Step::Map(range, page, handle, pages) => {
                let handle = *self.handles.get(handle)?;
                let address = self.address(range, page * GRANULE)?;
                code(unsafe { d.map(address, pages * GRANULE, 0, handle, 0) })
            }
            Step::Unmap(range, page, pages) => {
                let address = self.address(range, page * GRANULE)?;
                code(unsafe { d.unmap(address, pages * GRANULE) })
            }
            Step::Access(range, page, pages, flags, first) => {
                let who = if first { D0 } else { D1 };
                let access = [grant(who, AccessFlags(flags))];
                let address = self.address(range, page * GRANULE)?;
                code(unsafe { d.set_access(address, pages * GRANULE, &access) })
            }
            Step::Fill(range, from, size, byte) => {
                code(unsafe { d.fill(D0, self.address(range, from)?, byte, size) })
            }
            Step::Copy(to, to_at, from, from_at, size) => {
                let (to, from) = (self.address(to, to_at)?, self.address(from, from_at)?);
                if to.0.abs_diff(from.0) < size {
                    return None;
                }
                code(unsafe { d.copy_on_device(D0, to, from, size) })
            }
        })
    }

    /// Which range an address lies in, and how far from its start.
    fn place(&self, address: DeviceAddress) -> (usize, u64) {
        let near = |start: DeviceAddress| {
            address
                .offset_from(start)
                .filter(|&offset| offset < 2 * PAGES * GRANULE)
        };
        (0..RANGES)
            .find_map(|range| Some((range, near(self.ranges[range]?)?)))
            .expect("an address of the program")
    }

    /// The page tables with ranges for addresses and numbers for handles.
    fn picture(&self) -> Vec<String> {
        let number = |handle| self.handles.iter().position(|&known| known == handle);
        let snapshot = self.driver.snapshot();
        let mut lines: Vec<String> = snapshot
            .mappings
            .iter()
            .map(|m| {
                format!(
                    "{:?} {} {:?} {:?}",
                    self.place(m.address),
                    m.size,
                    number(m.handle),
                    m.access
                )
            })
            .collect();
        lines.sort();
        lines.extend(snapshot.physicals.iter().map(|p| {
            format!(
                "{:?} {} {} {} {}",
                number(p.handle),
                p.size,
                p.location,
                p.references,
                p.mappings
            )
        }));
        lines.push(format!("{:?} {:?}", snapshot.used, self.driver.live()));
        lines
    }
}

/// The bytes of each physical, as plain arrays, for what the host should hold.
#[derive(Default)]
struct Reference(BTreeMap<PhysicalHandle, Vec<u8>>);

impl Reference {
    /// The physical and offset that a byte lies at.
    fn find(run: &Run<impl Backing>, address: u64) -> (PhysicalHandle, usize) {
        let snapshot = run.driver.snapshot();
        let mapping = snapshot
            .mappings
            .into_iter()
            .find(|m| (m.address.0..m.address.0 + m.size).contains(&address))
            .expect("a copy that succeeded touches only mappings");
        (mapping.handle, (address - mapping.address.0) as usize)
    }

    fn each(run: &Run<impl Backing>, start: u64, size: u64) -> Vec<(PhysicalHandle, usize, usize)> {
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < size {
            let (handle, offset) = Self::find(run, start + done);
            let rest = (GRANULE - (start + done) % GRANULE).min(size - done);
            pieces.push((handle, offset, rest as usize));
            done += rest;
        }
        pieces
    }

    fn follow(&mut self, run: &Run<impl Backing>, step: &Step) {
        match *step {
            Step::Fill(range, from, size, byte) => {
                let Some(start) = run.address(range, from) else {
                    return;
                };
                for (handle, offset, length) in Self::each(run, start.0, size) {
                    self.bytes(handle)[offset..offset + length].fill(byte);
                }
            }
            Step::Copy(to, to_at, from, from_at, size) => {
                let (Some(to), Some(from)) = (run.address(to, to_at), run.address(from, from_at))
                else {
                    return;
                };
                let mut bytes = Vec::new();
                for (handle, offset, length) in Self::each(run, from.0, size) {
                    bytes.extend_from_slice(&self.bytes(handle)[offset..offset + length]);
                }
                let mut rest = &bytes[..];
                for (handle, offset, length) in Self::each(run, to.0, size) {
                    self.bytes(handle)[offset..offset + length].copy_from_slice(&rest[..length]);
                    rest = &rest[length..];
                }
            }
            _ => {}
        }
    }

    fn bytes(&mut self, handle: PhysicalHandle) -> &mut Vec<u8> {
        self.0
            .entry(handle)
            .or_insert_with(|| vec![0; (4 * GRANULE) as usize])
    }

    /// Every byte that the device may read is as expected.
    fn check(&mut self, run: &Run<impl Backing>) {
        for m in run.driver.snapshot().mappings {
            let right = run
                .driver
                .get_access(m.address, Location::device(D0))
                .unwrap();
            if right == AccessFlags::NONE {
                continue;
            }
            let mut bytes = vec![0; m.size as usize];
            run.driver.peek(D0, m.address, &mut bytes).unwrap();
            assert!(
                bytes == self.bytes(m.handle)[..bytes.len()],
                "bytes of {:?}",
                m.handle
            );
        }
    }
}

/// A copy whose source and destination are the same physical has no defined outcome where they
/// overlap.
fn overlaps(run: &Run<impl Backing>, step: &Step) -> bool {
    let Step::Copy(to, to_at, from, from_at, size) = *step else {
        return false;
    };
    let (Some(to), Some(from)) = (run.address(to, to_at), run.address(from, from_at)) else {
        return false;
    };
    let readable = |start: DeviceAddress| {
        run.driver
            .peek(D0, start, &mut vec![0; size as usize])
            .is_ok()
    };
    if size == 0 || !readable(to) || !readable(from) {
        return false;
    }
    let sources: Vec<_> = Reference::each(run, from.0, size);
    let targets = Reference::each(run, to.0, size);
    targets
        .iter()
        .any(|target| sources.iter().any(|source| source.0 == target.0))
}

fn agree(manner: Manner, steps: Vec<Step>) {
    let bytes = 24 * GRANULE;
    let options = ModelOptions::new()
        .devices(2)
        .granularity(GRANULE)
        .mapping_ceiling(6);
    let mut model = Run::new(ModelDriver::new(options.capacity(bytes).manner(manner)));
    let options = HostOptions::new()
        .devices(2)
        .granularity(GRANULE)
        .mapping_ceiling(6);
    let mut host = Run::new(HostDriver::new(options.capacity(bytes).manner(manner)));
    let mut reference = Reference::default();
    for step in steps {
        if overlaps(&host, &step) {
            continue;
        }
        let before = (model.driver.snapshot(), host.driver.snapshot());
        let answers = (model.take(&step), host.take(&step));
        assert_eq!(answers.0, answers.1, "{step:?}");
        if answers.1.is_some_and(|code| code != SUCCESS) {
            let after = (model.driver.snapshot(), host.driver.snapshot());
            assert_eq!(before, after, "{step:?} failed and changed something");
        } else if answers.1.is_some() {
            reference.follow(&host, &step);
        }
        assert_eq!(model.picture(), host.picture(), "after {step:?}");
    }
    reference.check(&host);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn model_and_host_answer_alike(steps in prop::collection::vec(step(), 1..80)) {
        agree(Manner::AsMeasured, steps);
    }

    #[test]
    fn strict_ones_too(steps in prop::collection::vec(step(), 1..60)) {
        agree(Manner::Strict, steps);
    }
}
