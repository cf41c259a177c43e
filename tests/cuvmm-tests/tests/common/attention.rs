//! A KV cache of a small model, whose keys and values are read through its strides, as a kernel for
//! attention does.

use cuvmm::driver::DeviceAddress;
use cuvmm::driver::model::Backing;
use cuvmm::kv::{KvTensor, Layout, Part, SequenceId, Shape};
use cuvmm::{KvCache, Pool, Stream, Tenant};

use super::{D0, Rig};

/// 128 KiB per token, 16 KiB per tensor: 16 and 128 tokens per granule.
pub const SMALL: Shape = Shape {
    layers: 4,
    kv_heads: 2,
    head_size: 2048,
    element_bytes: 4,
    max_tokens: 400,
    max_sequences: 6,
};

/// After how many elements the numbers of a row repeat: a prime.
const PERIOD: usize = 127;

pub const LAYOUTS: [Layout; 2] = [Layout::TokenMajor, Layout::LayerMajor];

pub fn build(tenant: &Tenant, stream: &Stream, layout: Layout) -> KvCache {
    let builder = KvCache::builder(tenant, stream, SMALL);
    builder.layout(layout).build().unwrap()
}

/// A tenant of a pool, and its cache on a stream of its own.
pub struct Scene {
    pub pool: Pool,
    pub tenant: Tenant,
    pub stream: Stream,
    pub cache: KvCache,
}

impl Scene {
    pub fn new(
        rig: &Rig<impl Backing>,
        pool: Pool,
        layout: Layout,
        build: impl FnOnce(&Tenant, &Stream, Layout) -> KvCache,
    ) -> Self {
        let tenant = pool.tenant("a").register().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let cache = build(&tenant, &stream, layout);
        Self {
            pool,
            tenant,
            stream,
            cache,
        }
    }
}

/// Concatenates `count` copies of each salt.
pub fn salts(parts: &[(u32, usize)]) -> Vec<u32> {
    let parts = parts.iter();
    parts.flat_map(|&(salt, count)| vec![salt; count]).collect()
}

/// Returns a row of small numbers that is unique to a token, layer and part. The row repeats numbers
/// whose count divides no stride of the cache: copying is quick in a build that is not optimized.
pub fn row(salt: u32, token: u64, layer: u32, part: Part) -> Vec<f32> {
    let part = u32::from(part == Part::Value);
    let seed = (salt * 7919 + token as u32) * 16 + layer * 2 + part;
    let elements = (SMALL.kv_heads * SMALL.head_size) as usize;
    let value = |element: u32| {
        let mixed = (seed ^ element.wrapping_mul(2_654_435_761)).wrapping_mul(2_246_822_519);
        (mixed >> 16) as f32 / 65_536.0 - 0.5
    };
    let numbers: Vec<f32> = (0..PERIOD as u32).map(value).collect();
    let mut row = numbers.repeat(elements.div_ceil(PERIOD));
    row.truncate(elements);
    row
}

/// Writes the rows of a sequence's tokens.
pub fn fill(cache: &mut KvCache, id: SequenceId, salt: u32, tokens: std::ops::Range<u64>) {
    for layer in 0..SMALL.layers {
        for part in [Part::Key, Part::Value] {
            let rows = tokens
                .clone()
                .flat_map(|token| row(salt, token, layer, part));
            let rows: Vec<f32> = rows.collect();
            let bytes = bytemuck::cast_slice(&rows);
            cache
                .write_rows(id, layer, part, tokens.start, bytes)
                .unwrap();
        }
    }
}

/// Reads one head of one token, located through the strides as a kernel does.
fn element(rig: &Rig<impl Backing>, tensor: KvTensor<'_>, token: u64, head: u64) -> Vec<f32> {
    let [token_stride, head_stride, element] = tensor.byte_strides();
    assert_eq!(element, 4);
    assert_eq!(
        tensor.strides().map(|stride| stride * 4),
        tensor.byte_strides()
    );
    let at = token * token_stride + head * head_stride;
    let at = DeviceAddress(tensor.address().0 + at);
    let mut found = vec![0f32; tensor.shape()[2] as usize];
    rig.machine
        .peek(D0, at, bytemuck::cast_slice_mut(&mut found))
        .unwrap();
    found
}

/// Compares keys and values of some heads of a sequence, as a kernel for attention reads them, with
/// what was written. `salts[n]` is the salt that token `n` was written with.
pub fn assert_attends(rig: &Rig<impl Backing>, cache: &KvCache, id: SequenceId, salts: &[u32]) {
    let view = cache.view(id).unwrap();
    assert_eq!((view.id(), view.tokens()), (id, salts.len() as u64));
    if !rig.keeps_bytes() {
        return;
    }
    let size = SMALL.head_size as usize;
    for (layer, head) in [(0, 0), (1, 1), (SMALL.layers - 1, 1)] {
        let from = head as usize * size;
        let tensors = [
            (Part::Key, view.key(layer)),
            (Part::Value, view.value(layer)),
        ];
        for (part, tensor) in tensors {
            let tensor = tensor.unwrap();
            for (token, &salt) in (0..).zip(salts) {
                let found = element(rig, tensor, token, head);
                let written = row(salt, token, layer, part);
                // Bytes, so that not-a-number is compared too, and quickly.
                let (found, written): (&[u8], &[u8]) = (
                    bytemuck::cast_slice(&found),
                    bytemuck::cast_slice(&written[from..from + size]),
                );
                assert!(
                    found == written,
                    "{part:?}, layer {layer}, head {head}, token {token}"
                );
            }
        }
    }
    assert!(view.key(SMALL.layers).is_none());
}
