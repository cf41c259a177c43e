//! Batches of prefetches and discards of managed memory, and what they refuse.

use super::super::asker::{Asker, GRANULE};
use super::super::library::at;
use super::{Case, case};

const PREFETCH: &str = "cuMemPrefetchBatchAsync";
const DISCARD: &str = "cuMemDiscardBatchAsync";
const BOTH: &str = "cuMemDiscardAndPrefetchBatchAsync";

/// The first device and the host as locations: a kind in the lower half, a number in the upper.
const DEVICE: u64 = 1;
const HOST: u64 = 2;

pub(super) const CASES: &[Case] = &[
    case("batch.prefetch", |a| prefetches(a, PREFETCH)),
    case("batch.discard_and_prefetch", |a| prefetches(a, BOTH)),
    case("batch.discard", |a| {
        let mut of = Batch::new(a);
        of.say(a, "one", DISCARD);
        last_prefetches(a, &of);
        of.say(a, "moved", PREFETCH);
        of.say(a, "after_move", DISCARD);
        last_prefetches(a, &of);
        common(a, DISCARD);
    }),
    case("batch.captured", |a| {
        for (part, name) in [("prefetch", PREFETCH), ("discard", DISCARD), ("both", BOTH)] {
            let mut of = Batch::new(a);
            a.need("cuStreamBeginCapture_v2", &[of.stream, 2]);
            of.say(a, part, name);
            let mut graph = 0u64;
            a.say("cuStreamEndCapture", &[of.stream, at(&mut graph)]);
        }
    }),
];

/// The arguments of a batch, each of which a question may change.
struct Batch {
    addresses: [u64; 3],
    sizes: [u64; 3],
    count: u64,
    places: [u64; 3],
    starts: [u64; 3],
    place_count: u64,
    flags: u64,
    stream: u64,
}

impl Batch {
    /// Prefetches of two ranges to the device and one to the host.
    fn new(a: &mut Asker) -> Self {
        Self {
            addresses: [(); 3].map(|()| a.managed(GRANULE)),
            sizes: [GRANULE; 3],
            count: 3,
            places: [DEVICE, HOST, HOST],
            starts: [0, 2, 3],
            place_count: 2,
            flags: 0,
            stream: a.stream(),
        }
    }

    /// Asks for the batch, and says its code.
    fn say(&mut self, a: &mut Asker, part: &str, name: &str) {
        a.part(part);
        let ranges = [at(&mut self.addresses), at(&mut self.sizes), self.count];
        let places = [at(&mut self.places), at(&mut self.starts), self.place_count];
        let places = if name == DISCARD { &[][..] } else { &places };
        a.say(
            name,
            &[&ranges, places, &[self.flags, self.stream]].concat(),
        );
    }
}

/// Says where the ranges of a batch were last prefetched to.
fn last_prefetches(a: &mut Asker, of: &Batch) {
    for address in of.addresses {
        let mut last = -7i32;
        let arguments = [at(&mut last), 4, 4, address, GRANULE];
        a.need("cuMemRangeGetAttribute", &arguments);
        a.note(last);
    }
}

/// A part of an answer, and how its batch differs from the usual one.
type Change = (&'static str, fn(&mut Batch));

/// Asks for batches that differ from the usual one.
fn changed(a: &mut Asker, name: &str, changes: &[Change]) {
    for (part, change) in changes {
        let mut of = Batch::new(a);
        change(&mut of);
        of.say(a, part, name);
        last_prefetches(a, &of);
    }
}

/// Asks what both kinds of batches may refuse.
fn common(a: &mut Asker, name: &str) {
    let changes: [Change; 7] = [
        ("no_range", |of| of.count = 0),
        ("flags_1", |of| of.flags = 1),
        ("stream_null", |of| of.stream = 0),
        ("stream_legacy", |of| of.stream = 1),
        ("stream_of_thread", |of| of.stream = 2),
        ("size_0", |of| of.sizes[2] = 0),
        ("past_the_end", |of| of.sizes[2] = 2 * GRANULE),
    ];
    changed(a, name, &changes);
    let mut of = Batch::new(a);
    of.addresses[2] = a.alloc(GRANULE);
    of.say(a, "plain_memory", name);
}

fn prefetches(a: &mut Asker, name: &str) {
    let mut of = Batch::new(a);
    of.say(a, "three", name);
    last_prefetches(a, &of);
    common(a, name);
    let changes: [Change; 7] = [
        ("no_place", |of| of.place_count = 0),
        ("more_places", |of| (of.count, of.place_count) = (1, 2)),
        ("begins_at_1", |of| of.starts[0] = 1),
        ("falls", |of| (of.starts, of.place_count) = ([0, 2, 1], 3)),
        ("stays", |of| (of.starts, of.place_count) = ([0, 2, 2], 3)),
        ("starts_past_the_end", |of| of.starts[1] = 3),
        ("device_99", |of| of.places[1] = DEVICE | 99 << 32),
    ];
    changed(a, name, &changes);
}
