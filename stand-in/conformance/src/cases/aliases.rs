//! One physical at two addresses: what is written at one is read at the other.
//!
//! Each case writes a new value many times, and finds out if a word, or byte, that was read at the
//! other address was not the last value written. CUDA promises coherence of aliases between
//! grids of which one begins after the other has ended.

use cuvmm_driver::{CaptureMode, DeviceAddress, DriverError, StreamHandle};

use crate::answer::bit;
use crate::ptx_comparing::{Load, Words};
use crate::{Answer, Answered, Bench, Case, Need, PtxToucher, Rule};

const COMPARING: &[Need] = &[Need::Kernels, Need::ComparingKernels];
const PROGRAMMATIC: &[Need] = &[
    Need::Kernels,
    Need::ComparingKernels,
    Need::ProgrammaticLaunch,
];

/// How often a value is written by a copy, and by a kernel.
const COPIES: u8 = 20;
const KERNELS: u32 = 200;

const RULE: Rule = Rule::new("alias-coherence");

pub(super) const COPIED: &[Case] = &RULE.needing(&[Need::Memory]).cases([
    Case::new(
        "alias.copies_in_stream_order",
        "A fill at one address, then a copy from the other, on one stream.",
        |b| {
            let (windows, stream) = (Windows::open(b)?, b.stream()?);
            windows.copies(b, |b, windows, byte| {
                b.fill_async(windows.one, byte, windows.size, stream)?;
                b.copy_async(windows.apart, windows.other, windows.size, stream)?;
                b.synchronize(stream)
            })
        },
    ),
    Case::new(
        "alias.copies_by_event",
        "A fill at one address, then a copy from the other on a stream that waits for it.",
        |b| {
            let windows = Windows::open(b)?;
            let (first, second, event) = (b.stream()?, b.stream()?, b.event()?);
            windows.copies(b, |b, windows, byte| {
                b.fill_async(windows.one, byte, windows.size, first)?;
                b.record(event, first)?;
                b.wait_event(second, event)?;
                b.copy_async(windows.apart, windows.other, windows.size, second)?;
                b.synchronize(second)
            })
        },
    ),
    Case::new(
        "alias.copy_then_host",
        "A copy on the device to one address, then a copy to the host from the other.",
        |b| {
            let windows = Windows::open(b)?;
            windows.rounds(b, |b, windows, byte, seen| {
                b.fill(windows.apart, byte, windows.size)?;
                b.copy(windows.one, windows.apart, windows.size)?;
                b.read_into(windows.other, seen)
            })
        },
    ),
    Case::new(
        "alias.host_then_host",
        "A copy from the host to one address, then a copy to the host from the other.",
        |b| {
            let windows = Windows::open(b)?;
            windows.rounds(b, |b, windows, byte, seen| {
                b.write(windows.one, &vec![byte; seen.len()])?;
                b.read_into(windows.other, seen)
            })
        },
    ),
    Case::new(
        "alias.copies_in_a_graph",
        "A graph that copies to one address, and then from the other.",
        copies_in_a_graph,
    ),
]);

pub(super) const BY_KERNELS: &[Case] = &RULE.needing(COMPARING).cases([
    Case::new(
        "alias.kernels_cached",
        "A kernel writes at one address, and kernels before and after it read at the other, cached.",
        |b| kernels(b, Load::Cached),
    ),
    Case::new(
        "alias.kernels_noncoherent",
        "A kernel writes at one address, and kernels before and after it read at the other as \
         read-only data.",
        |b| kernels(b, Load::NonCoherent),
    ),
    Case::new(
        "alias.kernels_by_event",
        "A kernel writes at one address, and a kernel of a stream that waits for it reads at the other.",
        kernels_by_event,
    ),
    Case::new(
        "alias.kernel_then_copy",
        "A kernel writes at one address, then a copy to the host from the other.",
        |b| {
            let (windows, stream) = (Windows::open(b)?, b.stream()?);
            with_kernels(b, |b, kernels| {
                windows.rounds(b, |b, windows, byte, seen| {
                    let words = windows.words(windows.one);
                    let value = u32::from_ne_bytes([byte; 4]);
                    kernels.write(b.device(), stream, words, value)?;
                    b.synchronize(stream)?;
                    b.read_into(windows.other, seen)
                })
            })
        },
    ),
    Case::new(
        "alias.copy_then_kernel",
        "A fill at one address, and kernels before and after it read at the other.",
        copy_then_kernel,
    ),
    Case::new(
        "alias.kernels_in_a_graph",
        "A graph of kernels that write at one address and read at the other in turn.",
        |b| graph(b, false),
    ),
]);

pub(super) const BY_PROGRAMMATIC: &[Case] = &RULE.needing(PROGRAMMATIC).cases([
    Case::new(
        "alias.programmatic",
        "A kernel that starts before the writing one has ended, and waits for it before it reads.",
        |b| programmatic(b, false, false),
    ),
    Case::new(
        "alias.programmatic_early_reads",
        "A kernel that reads before the writing one has ended, waits for it, and reads again.",
        |b| programmatic(b, true, false),
    ),
    Case::new(
        "alias.programmatic_same_address",
        "The same without an alias: it reads at the address that is written.",
        |b| programmatic(b, true, true),
    ),
    Case::new(
        "alias.programmatic_in_a_graph",
        "A graph with programmatic edges, whose kernels read before and after they wait.",
        |b| graph(b, true),
    ),
]);

/// One physical at two addresses, other memory, and a report of two counters.
struct Windows {
    one: DeviceAddress,
    other: DeviceAddress,
    apart: DeviceAddress,
    report: DeviceAddress,
    size: u64,
}

impl Windows {
    fn open(b: &mut Bench) -> Result<Self, DriverError> {
        let size = b.granule();
        let (one, handle) = b.open(1)?;
        let other = b.addresses(1)?;
        b.map(other, size, 0, handle, 0)?;
        b.grant(other, 1, cuvmm_driver::AccessFlags::READ_WRITE)?;
        let (apart, report) = (b.alloc(size)?, b.alloc(16)?);
        b.fill(one, 0, size)?;
        b.fill(report, 0, 16)?;
        b.synchronize(StreamHandle::NULL)?;
        Ok(Self {
            one,
            other,
            apart,
            report,
            size,
        })
    }

    const fn words(&self, at: DeviceAddress) -> Words {
        Words {
            at,
            count: self.size / 4,
        }
    }

    /// Counts the bytes that differ after each round, in which `act` writes a byte and reads all.
    fn rounds(
        &self,
        b: &mut Bench,
        mut act: impl FnMut(&mut Bench, &Self, u8, &mut [u8]) -> Result<(), DriverError>,
    ) -> Answered {
        let mut seen = vec![0; usize::try_from(self.size).unwrap_or(0)];
        let mut stale = 0;
        for byte in 1..=COPIES {
            seen.fill(0);
            act(b, self, byte, &mut seen)?;
            stale += seen.iter().filter(|&&it| it != byte).count();
        }
        Ok(answer(stale > 0, COPIES))
    }

    /// Counts the bytes that differ in the other memory after each round.
    fn copies(
        &self,
        b: &mut Bench,
        mut act: impl FnMut(&mut Bench, &Self, u8) -> Result<(), DriverError>,
    ) -> Answered {
        self.rounds(b, |b, windows, byte, seen| {
            act(b, windows, byte)?;
            b.read_into(windows.apart, seen)
        })
    }

    /// Waits for all work, and returns the two counters of the report.
    fn counted(&self, b: &Bench) -> Result<[u64; 2], DriverError> {
        b.driver().context_synchronize(b.device())?;
        let mut bytes = [0; 16];
        b.read_into(self.report, &mut bytes)?;
        let mut counted = [0; 2];
        for (count, bytes) in counted.iter_mut().zip(bytes.chunks_exact(8)) {
            *count = bytes.try_into().map_or(u64::MAX, u64::from_ne_bytes);
        }
        Ok(counted)
    }

    fn answer(&self, b: &Bench) -> Answered {
        let [stale, _] = self.counted(b)?;
        Ok(answer(stale > 0, KERNELS))
    }
}

/// Returns the answer of a case that wrote `rounds` times. Numbers of stale words differ from run to
/// run.
fn answer(stale: bool, rounds: impl std::fmt::Display) -> Answer {
    Answer::value(format!("stale {}", bit(stale))).with("rounds", rounds)
}

fn with_kernels(b: &mut Bench, act: impl FnOnce(&mut Bench, &PtxToucher) -> Answered) -> Answered {
    let kernels = b.kernels()?;
    match kernels.comparing() {
        Some(kernels) => act(b, kernels),
        None => Ok(Answer::value("no kernels")),
    }
}

fn copies_in_a_graph(b: &mut Bench) -> Answered {
    let (windows, stream) = (Windows::open(b)?, b.stream()?);
    let from = b.alloc(windows.size)?;
    b.capture_begin(stream, CaptureMode::RELAXED)?;
    b.copy_async(windows.one, from, windows.size, stream)?;
    b.copy_async(windows.apart, windows.other, windows.size, stream)?;
    let graph = b.capture_end(stream)?;
    let exec = b.instantiate(graph)?;
    windows.copies(b, |b, windows, byte| {
        b.fill_async(from, byte, windows.size, stream)?;
        b.launch(exec, stream)?;
        b.synchronize(stream)
    })
}

fn kernels(b: &mut Bench, load: Load) -> Answered {
    let (windows, stream) = (Windows::open(b)?, b.stream()?);
    with_kernels(b, |b, kernels| {
        let (device, report) = (b.device(), windows.report);
        let (one, other) = (windows.words(windows.one), windows.words(windows.other));
        for value in 1..=KERNELS {
            kernels.compare(device, stream, (other, load), value - 1, report)?;
            kernels.write(device, stream, one, value)?;
            kernels.compare(device, stream, (other, load), value, report)?;
        }
        windows.answer(b)
    })
}

fn kernels_by_event(b: &mut Bench) -> Answered {
    let windows = Windows::open(b)?;
    let (first, second) = (b.stream()?, b.stream()?);
    let (written, read) = (b.event()?, b.event()?);
    with_kernels(b, |b, kernels| {
        let (device, report) = (b.device(), windows.report);
        let (one, other) = (windows.words(windows.one), windows.words(windows.other));
        for value in 1..=KERNELS {
            kernels.write(device, first, one, value)?;
            b.record(written, first)?;
            b.wait_event(second, written)?;
            kernels.compare(device, second, (other, Load::Cached), value, report)?;
            b.record(read, second)?;
            b.wait_event(first, read)?;
        }
        windows.answer(b)
    })
}

fn copy_then_kernel(b: &mut Bench) -> Answered {
    let (windows, stream) = (Windows::open(b)?, b.stream()?);
    with_kernels(b, |b, kernels| {
        let (device, report) = (b.device(), windows.report);
        let other = windows.words(windows.other);
        let mut last = 0;
        for round in 1..=KERNELS {
            let byte = (round % 251) as u8 + 1;
            let value = u32::from_ne_bytes([byte; 4]);
            kernels.compare(device, stream, (other, Load::Cached), last, report)?;
            b.fill_async(windows.one, byte, windows.size, stream)?;
            kernels.compare(device, stream, (other, Load::Cached), value, report)?;
            last = value;
        }
        windows.answer(b)
    })
}

/// Writes at one address by a kernel that lets the next one start at once, which reads there or at
/// the other address.
fn programmatic(b: &mut Bench, reads_early: bool, at_one: bool) -> Answered {
    let (windows, stream) = (Windows::open(b)?, b.stream()?);
    with_kernels(b, |b, kernels| {
        let (device, report) = (b.device(), windows.report);
        let one = windows.words(windows.one);
        let read = windows.words(if at_one { windows.one } else { windows.other });
        for value in 1..=KERNELS {
            kernels.write_late(device, stream, one, value)?;
            kernels.compare_early(device, stream, (read, reads_early), value, report)?;
        }
        let [stale, early] = windows.counted(b)?;
        Ok(answer(stale > 0, KERNELS).with("read before the write", bit(early > 0)))
    })
}

/// Launches a graph that writes two values in turn and reads each. With `programmatic` its kernels
/// start before those ahead of them have ended.
fn graph(b: &mut Bench, programmatic: bool) -> Answered {
    let (windows, stream) = (Windows::open(b)?, b.stream()?);
    with_kernels(b, |b, kernels| {
        let (device, report) = (b.device(), windows.report);
        let (one, other) = (windows.words(windows.one), windows.words(windows.other));
        let pass = |value| match programmatic {
            true => {
                kernels.write_late(device, stream, one, value)?;
                kernels.compare_early(device, stream, (other, true), value, report)
            }
            false => {
                kernels.write(device, stream, one, value)?;
                kernels.compare(device, stream, (other, Load::Cached), value, report)
            }
        };
        // The first use of a kernel may load it, which a capture does not permit.
        pass(0)?;
        b.synchronize(stream)?;
        b.capture_begin(stream, CaptureMode::RELAXED)?;
        pass(1)?;
        pass(2)?;
        let graph = b.capture_end(stream)?;
        let exec = b.instantiate(graph)?;
        for _ in 0..KERNELS / 2 {
            b.launch(exec, stream)?;
        }
        let [stale, early] = windows.counted(b)?;
        let answer = answer(stale > 0, KERNELS);
        Ok(match programmatic {
            true => answer.with("read before the write", bit(early > 0)),
            false => answer,
        })
    })
}
