//! Random programs of virtual-memory calls: model and host driver return the same results, their
//! page tables stay the same, and the host's bytes are those that a plain array would hold.
//!
//! `unsafe` because the driver's methods are, and deliberately misused.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

use crate::model_support::*;
use cuvmm_driver::{
    AccessFlags, CUresult, DeviceAddress, Driver, Location, PhysicalHandle, PhysicalProps,
};
use cuvmm_model::model::{Backing, Machine, Manner, ModelDriver, ModelOptions};
use proptest::prelude::*;

/// Granules are small, so that copying all memory after each program is cheap.
const GRANULE: u64 = 64 << 10;
const RANGES: usize = 3;
const PAGES: u64 = 8;

/// A place that a step names: pages of a range, or (usually) the nth mapping and a number of
/// mappings after it, so that most programs succeed in part.
#[derive(Clone, Debug)]
enum Where {
    Pages(usize, u64, u64),
    Mappings(usize, usize),
}

#[derive(Clone, Debug)]
enum Step {
    Reserve(usize),
    Free(usize, u64),
    Create(u64),
    Release(usize),
    Retain(usize, u64),
    /// A range, a page, a handle, and a size that may differ from the handle's.
    Map(usize, u64, usize, Option<u64>),
    Unmap(Where),
    Access(Where, i32, bool),
    /// A place, an offset into it, the bytes by which the fill is shorter, and the byte.
    Fill(Where, u64, u64, u8),
    Copy(Where, Where, u64, u64),
}

fn places() -> impl Strategy<Value = Where> {
    prop_oneof![
        1 => (0..RANGES, 0..PAGES + 1, 0..PAGES + 2)
            .prop_map(|(range, page, pages)| Where::Pages(range, page, pages)),
        3 => (0..16_usize, 0..3_usize).prop_map(|(nth, more)| Where::Mappings(nth, more)),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let range = 0..RANGES;
    let page = 0..PAGES + 1;
    let flags = prop_oneof![1 => 0..4_i32, 3 => Just(3)];
    let size = prop_oneof![8 => Just(None), 1 => (0..4_u64).prop_map(Some)];
    prop_oneof![
        1 => range.clone().prop_map(Step::Reserve),
        1 => (range.clone(), 7..PAGES + 2).prop_map(|(r, pages)| Step::Free(r, pages)),
        3 => (0..4_u64).prop_map(Step::Create),
        2 => (0..16_usize).prop_map(Step::Release),
        1 => (range.clone(), page.clone()).prop_map(|(r, page)| Step::Retain(r, page)),
        8 => (range, page, 0..16_usize, size)
            .prop_map(|(r, page, handle, pages)| Step::Map(r, page, handle, pages)),
        3 => places().prop_map(Step::Unmap),
        8 => (places(), flags, prop::bool::weighted(0.8))
            .prop_map(|(place, flags, first)| Step::Access(place, flags, first)),
        5 => (places(), 0..GRANULE, 0..2 * GRANULE, any::<u8>())
            .prop_map(|(place, from, less, byte)| Step::Fill(place, from, less, byte)),
        4 => (places(), places(), 0..GRANULE, 0..2 * GRANULE)
            .prop_map(|(to, from, into, size)| Step::Copy(to, from, into, size)),
    ]
}

/// Generates programs, which begin with a few objects to work on.
fn program(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let start = [
        Step::Reserve(0),
        Step::Reserve(1),
        Step::Create(1),
        Step::Create(2),
        Step::Create(1),
        Step::Map(0, 0, 0, None),
        Step::Map(0, 1, 1, None),
    ];
    prop::collection::vec(step(), 1..length)
        .prop_map(move |steps| start.iter().cloned().chain(steps).collect())
}

/// A machine with the ranges and handles that it has returned to the program.
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

    fn handle(&self, nth: usize) -> Option<PhysicalHandle> {
        self.handles.get(nth % self.handles.len().max(1)).copied()
    }

    /// Returns the start and size of a place. Mappings are counted in the order of ranges and not
    /// of addresses, which differ between machines.
    fn find(&self, place: &Where) -> Option<(DeviceAddress, u64)> {
        match *place {
            Where::Pages(range, page, pages) => {
                Some((self.address(range, page * GRANULE)?, pages * GRANULE))
            }
            Where::Mappings(nth, more) => {
                let mut mappings = self.driver.snapshot().mappings;
                mappings.sort_by_key(|m| self.place(m.address));
                let first = nth % mappings.len().max(1);
                let start = mappings.get(first)?.address;
                let behind = &mappings[(first + more).min(mappings.len() - 1)];
                let end = behind.address.0 + behind.size;
                let size = end
                    .checked_sub(start.0)
                    .filter(|&size| size < 2 * PAGES * GRANULE);
                Some((start, size.unwrap_or(GRANULE)))
            }
        }
    }

    /// Returns the start and size of a fill, or both starts and the size of a copy.
    fn touched(&self, step: &Step) -> Option<(DeviceAddress, Option<DeviceAddress>, u64)> {
        match step {
            Step::Fill(place, into, less, _) => {
                let (start, size) = self.find(place)?;
                Some((at(start, *into), None, size.saturating_sub(*less)))
            }
            Step::Copy(to, from, into, size) => {
                let (to, from) = (self.find(to)?.0, self.find(from)?.0);
                Some((at(to, *into), Some(from), *size))
            }
            _ => None,
        }
    }

    /// Runs a step. Steps that name an object that does not exist are skipped, on both machines
    /// alike.
    fn take(&mut self, step: &Step) -> Option<CUresult> {
        let d = &self.driver;
        Some(match step {
            &Step::Reserve(range) => {
                if self.ranges[range].is_some() {
                    return None;
                }
                // Far apart, so that the addresses behind a range are free on both machines.
                let got = d.reserve(PAGES * GRANULE, 1 << 30, ANYWHERE, 0);
                self.ranges[range] = got.ok();
                code(got)
            }
            &Step::Free(range, pages) => {
                let start = self.address(range, 0)?;
                let answer = unsafe { d.free_reservation(start, pages * GRANULE) };
                if answer.is_ok() {
                    self.ranges[range] = None;
                }
                code(answer)
            }
            &Step::Create(pages) => {
                let props = PhysicalProps::device(if pages == 3 { D1 } else { D0 });
                let got = d.create(pages * GRANULE, &props, 0);
                self.handles.extend(got.ok());
                code(got)
            }
            &Step::Release(handle) => code(unsafe { d.release(self.handle(handle)?) }),
            &Step::Retain(range, page) => {
                let got = d.retain(self.address(range, page * GRANULE)?);
                self.handles.extend(got.ok());
                code(got)
            }
            &Step::Map(range, page, handle, pages) => {
                let handle = self.handle(handle)?;
                let address = self.address(range, page * GRANULE)?;
                let known = d
                    .snapshot()
                    .physicals
                    .into_iter()
                    .find(|p| p.handle == handle);
                let size = known.map_or(GRANULE, |p| p.size);
                let size = pages.map_or(size, |pages| pages * GRANULE);
                code(unsafe { d.map(address, size, 0, handle, 0) })
            }
            Step::Unmap(place) => {
                let (start, size) = self.find(place)?;
                code(unsafe { d.unmap(start, size) })
            }
            &Step::Access(ref place, flags, first) => {
                let access = [grant(if first { D0 } else { D1 }, AccessFlags(flags))];
                let (start, size) = self.find(place)?;
                code(unsafe { d.set_access(start, size, &access) })
            }
            &Step::Fill(.., byte) => {
                let (start, _, size) = self.touched(step)?;
                code(unsafe { d.fill(D0, start, byte, size) })
            }
            Step::Copy(..) => {
                let (to, from, size) = self.touched(step)?;
                code(unsafe { d.copy_on_device(D0, to, from?, size) })
            }
        })
    }

    /// Returns the range that contains an address, and the offset from its start.
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

    /// Describes the page tables, with ranges instead of addresses and numbers instead of handles.
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

/// The bytes of each physical as plain arrays, for comparison with the host driver.
#[derive(Default)]
struct Reference(BTreeMap<PhysicalHandle, Vec<u8>>);

impl Reference {
    /// Returns the physical and offset of a byte.
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
        if let (Step::Create(_), Some(&handle)) = (step, run.handles.last()) {
            // The handle value may have named another physical before.
            self.bytes(handle).fill(0);
        }
        match (step, run.touched(step)) {
            (&Step::Fill(.., byte), Some((start, _, size))) => {
                for (handle, offset, length) in Self::each(run, start.0, size) {
                    self.bytes(handle)[offset..offset + length].fill(byte);
                }
            }
            (Step::Copy(..), Some((to, Some(from), size))) => {
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

    /// Checks every byte that the device may read.
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

/// Returns `true` for a copy within one physical whose source and destination overlap; its result
/// is undefined.
fn overlaps(run: &Run<impl Backing>, step: &Step) -> bool {
    let Some((to, Some(from), size)) = run.touched(step) else {
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
    let bytes = 12 * GRANULE;
    let options = ModelOptions::new()
        .devices(2)
        .granularity(GRANULE)
        .mapping_ceiling(4);
    let mut model = Run::new(ModelDriver::new(options.capacity(bytes).manner(manner)));
    let options = HostOptions::new()
        .devices(2)
        .granularity(GRANULE)
        .mapping_ceiling(4);
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
            reference.check(&host);
        }
        assert_eq!(model.picture(), host.picture(), "after {step:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    #[ignore = "slow: `.ci/run` runs it"]
    fn model_and_host_answer_alike(steps in program(80)) {
        agree(Manner::AsMeasured, steps);
    }

    #[test]
    #[ignore = "slow: `.ci/run` runs it"]
    fn strict_ones_too(steps in program(60)) {
        agree(Manner::Strict, steps);
    }

    #[test]
    #[ignore = "slow: `.ci/run` runs it"]
    fn hostile_ones_too(steps in program(60)) {
        agree(Manner::Hostile, steps);
    }
}
