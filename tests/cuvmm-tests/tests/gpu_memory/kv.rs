//! A KV cache used by kernels that find its rows by address and strides: while sequences grow, from
//! a graph that was captured before they grew, and in memory that another sequence has just freed.
//!
//! `unsafe` is used to capture and launch graphs. Streams and graphs belong to the tests, and the
//! sequence that a graph reads lives until its launches are complete.
#![allow(unsafe_code)]

use std::time::Duration;

use crate::gpu::{D0, Rows, Stage};
use crate::on_each;
use cuvmm::driver::{Call, CaptureMode, DeviceAddress};
use cuvmm::kv::{KvTensor, Layout, Part, SequenceId, SequenceView, Shape};
use cuvmm::{Block, KvCache, Stream, Tenant};

/// A row takes 2 KiB and a token 16 KiB.
const SHAPE: Shape = Shape {
    layers: 4,
    kv_heads: 8,
    head_size: 128,
    element_bytes: 2,
    max_tokens: 16_384,
    max_sequences: 8,
};

const ROW: u64 = 8 * 128 * 2;

const LAYOUTS: [Layout; 2] = [Layout::TokenMajor, Layout::LayerMajor];

/// Delay of kernels, so that an access that does not wait for them is too early.
const LATE: Duration = Duration::from_millis(10);

fn build(tenant: &Tenant, stream: &Stream, layout: Layout) -> KvCache {
    let builder = KvCache::builder(tenant, stream, SHAPE);
    builder.layout(layout).build().unwrap()
}

/// Returns all keys and values of a model, by layer.
fn parts() -> impl Iterator<Item = (u32, Part)> {
    (0..SHAPE.layers).flat_map(|layer| [Part::Key, Part::Value].map(|part| (layer, part)))
}

/// Returns rows of tokens in which every word is unique.
fn rows(salt: u64, (layer, part): (u32, Part), tokens: std::ops::Range<u64>) -> Vec<u8> {
    let tensor = u64::from(layer) * 2 + u64::from(part == Part::Value);
    let words = tokens.flat_map(|token| {
        let first = ((salt * 64 + tensor) << 20 | token) * (ROW / 4);
        (0..ROW / 4)
            .map(move |word| ((first + word).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32)
    });
    words.flat_map(u32::to_le_bytes).collect()
}

/// A dense buffer for rows beside the cache, which the host can read and write.
struct Desk<'a> {
    stage: &'a Stage,
    stream: &'a Stream,
    dense: Block,
    tokens: Block,
}

impl<'a> Desk<'a> {
    fn new(stage: &'a Stage, tenant: &Tenant, stream: &'a Stream, most: u64) -> Self {
        let of = |bytes| tenant.allocate_on(stream, bytes).unwrap();
        Self {
            stage,
            stream,
            dense: of(most * ROW),
            tokens: of(8),
        }
    }

    /// Returns what a kernel needs to access a tensor's tokens from `first` on.
    fn rows(&self, tensor: KvTensor<'_>, first: u64) -> Rows {
        let [_, heads, elements] = tensor.shape();
        let [token_stride, head_stride, element] = tensor.byte_strides();
        Rows {
            tensor: DeviceAddress(tensor.address().0 + first * token_stride),
            dense: self.dense.address(),
            tokens: self.tokens.address(),
            heads,
            words: elements * element / 4,
            token_stride,
            head_stride,
        }
    }

    fn tell(&self, tokens: u64) {
        self.tokens.write(0, &tokens.to_le_bytes()).unwrap();
    }

    /// Writes rows to a tensor with a kernel.
    fn put(&self, tensor: KvTensor<'_>, first: u64, bytes: &[u8]) {
        self.dense.write(0, bytes).unwrap();
        self.tell(bytes.len() as u64 / ROW);
        let rows = self.rows(tensor, first);
        self.stage.work().rows(self.stream, &rows, true);
    }

    /// Reads all rows of a tensor with a kernel.
    fn get(&self, tensor: KvTensor<'_>) -> Vec<u8> {
        let [tokens, ..] = tensor.shape();
        self.tell(tokens);
        let rows = self.rows(tensor, 0);
        self.stage.work().rows(self.stream, &rows, false);
        self.seen(tokens)
    }

    fn seen(&self, tokens: u64) -> Vec<u8> {
        let mut seen = vec![0; (tokens * ROW) as usize];
        self.dense.read(0, &mut seen).unwrap();
        seen
    }

    /// Writes a sequence's rows from `first` on with kernels.
    fn fill(&self, view: SequenceView<'_>, salt: u64, first: u64) {
        for (layer, part) in parts() {
            let tensor = view.tensor(layer, part).unwrap();
            self.put(
                tensor,
                first,
                &rows(salt, (layer, part), first..view.tokens()),
            );
        }
    }
}

fn same(seen: &[u8], expected: &[u8], what: impl std::fmt::Display) {
    assert_eq!(seen.len(), expected.len(), "{what}");
    let wrong = seen
        .iter()
        .zip(expected)
        .position(|(seen, expected)| seen != expected);
    if let Some(at) = wrong {
        let (token, byte) = (at as u64 / ROW, at as u64 % ROW);
        panic!("{what}: token {token} differs from byte {byte} on");
    }
}

/// Returns the address ranges of a sequence.
fn ranges(view: SequenceView<'_>, layout: Layout) -> Vec<(DeviceAddress, u64)> {
    let tensors = parts().map(|(layer, part)| view.tensor(layer, part).unwrap());
    let range = |tensor: KvTensor<'_>| (tensor.address(), view.tokens() * tensor.byte_strides()[0]);
    let count = match layout {
        Layout::TokenMajor => 1,
        _ => usize::MAX,
    };
    let mut ranges: Vec<_> = tensors.take(count).map(range).collect();
    ranges.sort_unstable();
    ranges
}

on_each! {
    fn kernels_read_and_write_by_strides_while_sequences_grow(stage) {
        for layout in LAYOUTS {
            let pool = stage.pool(256);
            let tenant = pool.tenant("a").register().unwrap();
            let stream = stage.stream();
            let mut cache = build(&tenant, &stream, layout);
            let grain = cache.tokens_per_granule();
            let desk = Desk::new(stage, &tenant, &stream, 8 * grain);
            let ids = [1, grain, grain + 1].map(|tokens| cache.create(tokens).unwrap());
            let address = |cache: &KvCache, id| {
                let view = cache.view(id).unwrap();
                view.value(SHAPE.layers - 1).unwrap().address()
            };
            let begun = ids.map(|id| address(&cache, id));
            for (salt, id) in (0..).zip(ids) {
                desk.fill(cache.view(id).unwrap(), salt, 0);
            }
            for _ in 0..6 {
                let step = [(ids[0], grain / 2 + 1), (ids[1], 1), (ids[2], grain / 3)];
                cache.append(&step).unwrap();
                for (salt, (id, more)) in (0..).zip(step) {
                    let view = cache.view(id).unwrap();
                    desk.fill(view, salt, view.tokens() - more);
                }
            }
            assert_eq!(ids.map(|id| address(&cache, id)), begun);
            for (salt, id) in (0..).zip(ids) {
                let view = cache.view(id).unwrap();
                for (layer, part) in parts() {
                    let what = format!("{layout:?}, {id}, layer {layer}, {part:?}");
                    let expected = rows(salt, (layer, part), 0..view.tokens());
                    same(&desk.get(view.tensor(layer, part).unwrap()), &expected, &what);
                    let mut seen = vec![0; expected.len()];
                    cache.read_rows(id, layer, part, 0, &mut seen).unwrap();
                    same(&seen, &expected, format!("{what}, copied"));
                }
            }
            drop((cache, desk, tenant));
            stage.settle();
            pool.close().unwrap();
        }
    }

    fn a_graph_captured_before_a_sequence_grows_reads_it_afterwards(stage) {
        for layout in LAYOUTS {
            let pool = stage.pool(256);
            let tenant = pool.tenant("a").register().unwrap();
            let stream = stage.stream();
            let mut cache = build(&tenant, &stream, layout);
            let grain = cache.tokens_per_granule();
            let desk = Desk::new(stage, &tenant, &stream, 8 * grain);
            let (layer, part) = (2, Part::Value);
            let before = grain - 1;
            let id = cache.create(before).unwrap();
            desk.fill(cache.view(id).unwrap(), 1, 0);
            desk.tell(before);
            let guard = pool.capture_guard();
            let driver = stage.driver();
            // SAFETY: stream and graphs are alive, and each graph is destroyed once.
            let graph = unsafe {
                driver.capture_begin(D0, stream.as_raw(), CaptureMode::GLOBAL).unwrap();
                let tensor = cache.view(id).unwrap().tensor(layer, part).unwrap();
                stage.work().rows(&stream, &desk.rows(tensor, 0), false);
                let graph = driver.capture_end(D0, stream.as_raw()).unwrap();
                let ready = driver.graph_instantiate(D0, graph).unwrap();
                driver.graph_destroy(D0, graph).unwrap();
                ready
            };
            drop(guard);
            // Grow by more than two granules, while another sequence grows beside it.
            let other: SequenceId = cache.create(grain / 2 + 1).unwrap();
            desk.fill(cache.view(other).unwrap(), 2, 0);
            for more in [2, grain, grain] {
                cache.append(&[(id, more), (other, more)]).unwrap();
                for (salt, id) in [(1, id), (2, other)] {
                    let view = cache.view(id).unwrap();
                    desk.fill(view, salt, view.tokens() - more);
                }
                let after = cache.view(id).unwrap().tokens();
                desk.tell(after);
                // SAFETY: the sequence and the buffer that the graph uses are alive.
                unsafe { driver.graph_launch(D0, graph, stream.as_raw()) }.unwrap();
                // A kernel reads the number of tokens when it runs; work of the host driver got it
                // when queued.
                let tokens = stage.scaled(after, before);
                let expected = rows(1, (layer, part), 0..tokens);
                same(&desk.seen(tokens), &expected, format!("{layout:?}, {after} tokens"));
            }
            stage.settle();
            // SAFETY: the launches are complete, and the graph is destroyed once.
            unsafe { driver.graph_exec_destroy(D0, graph) }.unwrap();
            drop((cache, desk, tenant));
            stage.settle();
            pool.close().unwrap();
        }
    }

    fn a_freed_sequence_is_taken_over_behind_the_work_on_it(stage) {
        for layout in LAYOUTS {
            let pool = stage.pool(64);
            let tenant = pool.tenant("a").register().unwrap();
            let [home, other] = stage.streams();
            let mut cache = build(&tenant, &home, layout);
            let tokens = cache.tokens_per_granule() * 2;
            let fill = |stream: &Stream, ranges: &[(DeviceAddress, u64)], stamp, after| {
                for &(at, bytes) in ranges {
                    stage.work().fill(stream, at, bytes, stamp, after);
                }
            };
            let check = |ranges: &[(DeviceAddress, u64)], stamp| {
                for &(at, bytes) in ranges {
                    stage.work().check(&home, at, bytes, stamp);
                }
            };
            // On the home stream the next sequence is ordered behind the last, and no thread waits.
            let first = cache.create(tokens).unwrap();
            let had = ranges(cache.view(first).unwrap(), layout);
            let calls = pool.calls();
            fill(&home, &had, stage.stamp(), LATE);
            cache.free(first).unwrap();
            let second = cache.create(tokens).unwrap();
            let made = pool.calls().since(&calls);
            // The thread that holds work back may just be destroying a stream of the last round,
            // and the events behind its work.
            let others = made.count(Call::StreamDestroy) + made.count(Call::EventDestroy);
            assert_eq!(made.total(), others, "{layout:?}: {made:?}");
            assert_eq!(ranges(cache.view(second).unwrap(), layout), had);
            let stamp = stage.stamp();
            fill(&home, &had, stamp, Duration::ZERO);
            check(&had, stamp);
            stage.settle();
            // A recorded stream is waited for.
            cache.record_use(second, &other).unwrap();
            fill(&other, &had, stage.stamp(), LATE);
            cache.free(second).unwrap();
            let third = cache.create(tokens).unwrap();
            let has = ranges(cache.view(third).unwrap(), layout);
            let stamp = stage.stamp();
            fill(&home, &has, stamp, Duration::ZERO);
            check(&has, stamp);
            stage.settle();
            check(&has, stamp);
            stage.settle();
            drop((cache, tenant));
            stage.settle();
            pool.close().unwrap();
        }
    }
}
