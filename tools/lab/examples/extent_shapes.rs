//! Compares ways to shape the extents of blocks that shrink: the bytes that stay mapped behind the
//! end, and the driver's time.
//!
//! `cargo run --release -p cuvmm-lab --example extent_shapes -- [TRACE...]` prints a table for
//! blocks of 1 GiB, and one for each request trace. Times are those of the model's cost table. The
//! figures decided `BlockBuilder::expect_shrink` (`docs/decisions/04-regions.md`).

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Parser as _;
use cuvmm::driver::model::Costs;
use rand::{RngExt as _, SeedableRng as _};
use rand_pcg::Pcg64;

/// Sizes are in granules of 2 MiB.
const MIB: u64 = 2;
const GIB: u64 = 512;
/// The largest extent.
const LARGEST: u64 = GIB;
/// Granules of an 8B model's KV cache: 16 tokens each.
const TOKENS: u64 = 16;

#[derive(clap::Parser)]
struct Options {
    /// Request traces in the format of the Azure LLM inference traces.
    traces: Vec<PathBuf>,
}

#[derive(Clone, Copy)]
enum Shape {
    /// The fewest extents.
    Fewest,
    /// Equal pieces.
    Pieces(u64),
    /// Equal pieces, as many as a piece has granules.
    Root,
    /// Half of what is left, from the largest to the floor.
    Halves(u64),
    /// At most one nth of what lies before the extent, or the floor.
    Part(u64, u64),
}

const SHAPES: &[Shape] = &[
    Shape::Fewest,
    Shape::Halves(1),
    Shape::Halves(32 / MIB),
    Shape::Pieces(256 / MIB),
    Shape::Pieces(128 / MIB),
    Shape::Pieces(64 / MIB),
    Shape::Pieces(32 / MIB),
    Shape::Root,
    Shape::Part(1, 1),
    Shape::Part(1, 32 / MIB),
    Shape::Part(2, 32 / MIB),
    Shape::Part(4, 1),
    Shape::Part(4, 8 / MIB),
    Shape::Part(4, 16 / MIB),
    Shape::Part(4, 32 / MIB),
    Shape::Part(8, 8 / MIB),
    Shape::Part(8, 16 / MIB),
    Shape::Part(8, 32 / MIB),
    Shape::Part(8, 64 / MIB),
    Shape::Part(16, 32 / MIB),
];

fn power(granules: u64) -> u64 {
    1 << granules.max(1).ilog2()
}

impl Shape {
    /// Returns the size of the extent at an offset, with `left` granules from there to the end of
    /// a block.
    fn next(self, offset: u64, left: u64) -> u64 {
        let most = match self {
            Self::Fewest => LARGEST,
            Self::Pieces(size) => size,
            Self::Root => (offset + left).isqrt(),
            Self::Halves(floor) => (left / 2).max(floor),
            Self::Part(nth, floor) => (offset / nth).max(floor),
        };
        power(most.min(left).min(LARGEST))
    }

    fn name(self) -> String {
        let mib = |granules: u64| granules * MIB;
        match self {
            Self::Fewest => "fewest extents".to_owned(),
            Self::Pieces(size) => format!("{} MiB pieces", mib(size)),
            Self::Root => "root of the size".to_owned(),
            Self::Halves(floor) => format!("halves to {} MiB", mib(floor)),
            Self::Part(nth, floor) => format!("1/{nth}, floor {} MiB", mib(floor)),
        }
    }
}

/// The memory of one block, whose extents are a prefix of its addresses.
struct Memory<'a> {
    shape: Shape,
    costs: &'a Costs,
    extents: Vec<u64>,
    held: u64,
    mapped: u64,
    us: f64,
}

impl<'a> Memory<'a> {
    fn new(shape: Shape, costs: &'a Costs, size: u64) -> Self {
        let mut memory = Self {
            shape,
            costs,
            extents: Vec::new(),
            held: 0,
            mapped: 0,
            us: 0.0,
        };
        memory.grow(size);
        memory
    }

    fn grow(&mut self, to: u64) {
        while self.held < to {
            let size = self.shape.next(self.held, to - self.held);
            let bytes = size << 21;
            let Costs {
                create_cold,
                map,
                set_access_cold,
                ..
            } = self.costs;
            self.us += create_cold.at(bytes) + map.at(bytes) + set_access_cold.at(bytes);
            self.mapped += 1;
            self.extents.push(size);
            self.held += size;
        }
    }

    /// Gives back the extents behind `to` granules. Returns what is stranded.
    fn shrink(&mut self, to: u64) -> u64 {
        while let Some(&size) = self.extents.last()
            && self.held - size >= to
        {
            let bytes = size << 21;
            self.us += self.costs.unmap.at(bytes) + self.costs.release.at(bytes);
            self.held -= size;
            self.extents.pop();
        }
        self.held - to
    }
}

struct Request {
    seconds: f64,
    context: u64,
    generated: u64,
}

fn read(path: &PathBuf) -> anyhow::Result<Vec<Request>> {
    let mut requests = Vec::new();
    for line in csv::Reader::from_path(path)?.records() {
        let line = line?;
        let field = |at: usize| line.get(at).context("a field is missing");
        let clock = field(0)?.rsplit(' ').next().unwrap_or_default();
        let mut parts = clock.split(':').map(str::parse::<f64>);
        let seconds = parts.try_fold(0.0, |sum, part| part.map(|part| sum * 60.0 + part))?;
        requests.push(Request {
            seconds,
            context: field(1)?.parse()?,
            generated: field(2)?.parse()?,
        });
    }
    Ok(requests)
}

/// Prints the cost of a block of 1 GiB, and the MiB that it strands after a shrink: to half, to any
/// part (the mean and the most), to any part below a tenth, and as a part of the bytes kept.
fn block(costs: &Costs) {
    println!("a block of 1 GiB: extents, us to allocate, us to free; MiB stranded after a shrink");
    println!(
        "{:20} {:>7} {:>6} {:>6} | {:>6} {:>8} {:>6} {:>8} {:>7}",
        "", "extents", "us", "free", "half", "any part", "most", "a tenth", "of kept"
    );
    for &shape in SHAPES {
        let mut memory = Memory::new(shape, costs, GIB);
        let (count, us) = (memory.mapped, memory.us);
        memory.shrink(0);
        let free = memory.us - us;
        let after = |part: u64| Memory::new(shape, costs, GIB).shrink(part);
        let mean = |to: u64| (1..=to).map(after).sum::<u64>() as f64 / to as f64 * MIB as f64;
        let relative = |part: u64| after(part) as f64 / part as f64;
        let relative = (1..=GIB).map(relative).sum::<f64>() / GIB as f64;
        println!(
            "{:20} {count:7} {us:6.0} {free:6.0} | {:6} {:8.0} {:6} {:8.0} {:6.0}%",
            shape.name(),
            after(GIB / 2) * MIB,
            mean(GIB),
            (1..=GIB).map(after).max().unwrap_or(0) * MIB,
            mean(GIB / 10),
            100.0 * relative,
        );
    }
}

/// Prints figures of a trace: of a cache of prompts, each a block that is cut to a random part; and
/// of one block with the tokens of all requests that run, which follows the load every 10 seconds.
fn trace(costs: &Costs, requests: &[Request]) {
    println!(
        "{:20} {:>8} {:>6} {:>8} {:>7} | {:>8} {:>8} {:>6}",
        "", "extents", "us", "stranded", "of cut", "maps/min", "ms/min", "idle"
    );
    let load = load(requests);
    for &shape in SHAPES {
        let mut random = Pcg64::seed_from_u64(1);
        let (mut extents, mut us, mut stranded, mut cut) = (0, 0.0, 0, 0);
        for request in requests {
            let size = request.context.div_ceil(TOKENS);
            let mut memory = Memory::new(shape, costs, size);
            (extents, us) = (extents + memory.mapped, us + memory.us);
            let part = random.random_range(1..=size);
            (stranded, cut) = (stranded + memory.shrink(part), cut + size - part);
        }
        let count = requests.len() as f64;
        let mut arena = Memory::new(shape, costs, 1);
        let (mut idle, mut used) = (0, 0);
        for &size in &load {
            // A step of an eighth ahead, as blocks grow.
            if size > arena.held {
                arena.grow(size.max(arena.held + power(size / 8)));
            }
            (idle, used) = (idle + arena.shrink(size), used + size);
        }
        let minutes = load.len() as f64 / 6.0;
        println!(
            "{:20} {:8.1} {:6.0} {:8.1} {:6.1}% | {:8.1} {:8.2} {:5.1}%",
            shape.name(),
            extents as f64 / count,
            us / count,
            stranded as f64 / count * MIB as f64,
            100.0 * stranded as f64 / cut as f64,
            arena.mapped as f64 / minutes,
            arena.us / 1000.0 / minutes,
            100.0 * idle as f64 / used as f64,
        );
    }
}

/// Returns the granules of the tokens of all requests that run, at most, in each 10 seconds. A
/// request reads 8,000 tokens a second and generates 40.
fn load(requests: &[Request]) -> Vec<u64> {
    let first = requests
        .iter()
        .map(|it| it.seconds)
        .fold(f64::MAX, f64::min);
    let last = requests.iter().map(|it| it.seconds).fold(0.0, f64::max);
    let mut load = vec![0; ((last - first) / 10.0) as usize + 1];
    for request in requests {
        let begin = request.seconds - first;
        let runs = request.context as f64 / 8000.0 + request.generated as f64 / 40.0;
        let slots = (begin / 10.0) as usize..=((begin + runs) / 10.0) as usize;
        let size = (request.context + request.generated).div_ceil(TOKENS);
        for slot in slots {
            if let Some(load) = load.get_mut(slot) {
                *load += size;
            }
        }
    }
    load
}

fn main() -> anyhow::Result<()> {
    let costs = Costs::default();
    block(&costs);
    for path in Options::parse().traces {
        let requests = read(&path).with_context(|| path.display().to_string())?;
        println!("\n{}: {} requests", path.display(), requests.len());
        trace(&costs, &requests);
    }
    Ok(())
}
