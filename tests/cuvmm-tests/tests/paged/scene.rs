//! A cache to test, and the bytes in it.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::common::{G, Rig, copy};
use cuvmm::driver::DeviceAddress;
use cuvmm::driver::model::Backing;
use cuvmm::paged::{LayerGroup, Layout, PagedKvBuilder};
use cuvmm::{PagedKv, Stream, Tenant};

pub(crate) const LAYOUTS: [Layout; 3] =
    [Layout::BlockMajor, Layout::TokenMajor, Layout::LayerMajor];

pub(crate) const LAYERS: u32 = 2;
const TOKENS: u64 = 2;
/// The bytes of a row: an eighth of a block.
const ROW: u64 = 3 * G / 32;

/// Blocks of three quarters of a granule, of which every third but one ends within a granule. In
/// layer-major layout they are in four tensors.
pub(crate) fn group() -> LayerGroup {
    LayerGroup::new(LAYERS, TOKENS as u32).keys_and_values(3, (ROW / 12) as u32, 4)
}

pub(crate) fn builder<'a>(
    tenant: &'a Tenant,
    home: &'a Stream,
    blocks: u32,
    layout: Layout,
) -> PagedKvBuilder<'a> {
    let builder = PagedKv::builder(tenant, home, blocks).group(group());
    builder.layout(layout).extent(2 * G)
}

/// The places of a block's rows.
pub(crate) fn rows(kv: &PagedKv, number: u32) -> Vec<DeviceAddress> {
    let mut rows = Vec::new();
    for layer in 0..LAYERS {
        for part in 0..2 {
            let view = kv.view(0, layer, part).unwrap();
            let block = view.block(number).unwrap();
            let token = view.byte_strides()[1];
            rows.extend((0..TOKENS).map(|at| block + at * token));
        }
    }
    rows
}

/// Queues a kernel on a stream that writes a byte to both ends of each row of a block.
pub(crate) fn stamp(rig: &Rig<impl Backing>, stream: &Stream, kv: &PagedKv, number: u32, byte: u8) {
    let ends = |row: DeviceAddress| [(row, 4, byte), (row + (ROW - 4), 4, byte)];
    let writes: Vec<_> = rows(kv, number).into_iter().flat_map(ends).collect();
    rig.kernel(stream, &[], &writes);
}

/// The bytes at both ends of each row of a block.
pub(crate) fn stamps(rig: &Rig<impl Backing>, kv: &PagedKv, number: u32) -> Vec<u8> {
    let ends = |row: DeviceAddress| [row, row + (ROW - 4)];
    let read = |at: DeviceAddress| copy(rig, at.0).unwrap()[0];
    let rows = rows(kv, number).into_iter();
    rows.flat_map(ends).map(read).collect()
}

/// The bytes of all extents that some blocks touch, counted from the views.
pub(crate) fn extents_under(kv: &PagedKv, blocks: &BTreeSet<u32>) -> u64 {
    let first = kv.view(0, 0, 0).unwrap();
    let tensors = match kv.layout() {
        Layout::LayerMajor => (0..LAYERS)
            .flat_map(|layer| (0..2).map(move |part| (layer, part)))
            .map(|(layer, part)| kv.view(0, layer, part).unwrap())
            .map(|view| (view.address(), view.byte_strides()[0]))
            .collect(),
        _ => vec![(first.address(), kv.block_bytes())],
    };
    let extent = kv.extent();
    let mut under = BTreeSet::new();
    for (base, stride) in tensors {
        let end = (u64::from(kv.blocks()) * stride).next_multiple_of(G);
        for &number in blocks {
            let Range { start, end: last } =
                u64::from(number) * stride..(u64::from(number) + 1) * stride;
            for at in start / extent..=(last - 1) / extent {
                let bytes = extent.min(end - at * extent);
                under.insert((base.0 + at * extent, bytes));
            }
        }
    }
    under.iter().map(|(_, bytes)| bytes).sum()
}
