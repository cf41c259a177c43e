//! The shape of a cache: what a block holds, and where in the cache's addresses it lies.

use super::planes::Planes;
use super::view::PagedView;
use crate::error::{ArgumentError, PagedKvError};
use crate::size::Granularity;

/// The arrangement of blocks in the cache's addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layout {
    /// `[block, layer, part, token, head, element]`. A block is contiguous, and so is each part of a
    /// layer in it. For kernels that take the distance between blocks as a stride.
    #[default]
    #[doc(alias("cross-layer", "HND", "NHD"))]
    BlockMajor,
    /// `[token, layer, part, head, element]`, where a block is `tokens` successive tokens. A block is
    /// contiguous, and rows of one layer and part lie at one stride through all blocks.
    TokenMajor,
    /// For each layer and part a tensor `[block, token, head, element]`, contiguous over all blocks.
    /// For kernels that take no strides. A tensor has extents of its own, so memory comes and goes by
    /// an extent for each tensor.
    LayerMajor,
}

/// The most parts of layers in all groups: each has a view, and in layer-major layout extents of its
/// own, of which a device can have about 524,000 mapped.
const MOST_PARTS: u64 = 1 << 16;

/// The rows of one part of a layer, such as its keys: `[head, element]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Rows {
    heads: u32,
    head_size: u32,
    element_bytes: u32,
}

impl Rows {
    fn bytes(self) -> Option<u64> {
        let head = u64::from(self.head_size).checked_mul(self.element_bytes.into())?;
        head.checked_mul(self.heads.into())
    }
}

/// A group of layers whose blocks have one shape. Parts are counted from 0 in the order in which
/// they are added.
///
/// A model with several kinds of layers, such as sliding windows beside full attention, has several
/// groups. They share the block numbers: a block is of one group at a time, so the blocks of all
/// groups have equal bytes.
///
/// ```
/// use cuvmm::paged::LayerGroup;
///
/// let plain = LayerGroup::new(32, 16).keys_and_values(8, 128, 2);
/// let latent = LayerGroup::new(60, 64).part(1, 576, 2); // MLA
/// let scaled = LayerGroup::new(32, 16).keys_and_values(8, 128, 1).part(2, 8, 4); // fp8 with scales
/// # let _ = (plain, latent, scaled);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerGroup {
    layers: u32,
    tokens: u32,
    parts: Vec<Rows>,
}

impl LayerGroup {
    /// Returns a group of `layers` layers, without parts yet, with `tokens` tokens in a block. All
    /// groups of a cache have at most 65,536 parts in all layers.
    #[must_use]
    pub const fn new(layers: u32, tokens: u32) -> Self {
        let parts = Vec::new();
        Self {
            layers,
            tokens,
            parts,
        }
    }

    /// Adds a part to each layer: for each token `heads` heads of `head_size` elements of
    /// `element_bytes` bytes.
    #[must_use]
    pub fn part(mut self, heads: u32, head_size: u32, element_bytes: u32) -> Self {
        self.parts.push(Rows {
            heads,
            head_size,
            element_bytes,
        });
        self
    }

    /// Adds two equal parts to each layer: keys, and values behind them.
    #[must_use]
    pub fn keys_and_values(self, kv_heads: u32, head_size: u32, element_bytes: u32) -> Self {
        let keys = self.part(kv_heads, head_size, element_bytes);
        keys.part(kv_heads, head_size, element_bytes)
    }

    fn check(&self) -> Result<(), ArgumentError> {
        let dimensions = [
            ("layers", u64::from(self.layers)),
            ("tokens of a block", u64::from(self.tokens)),
            ("parts of a layer", self.parts.len() as u64),
        ];
        let rows = self.parts.iter().flat_map(|rows| {
            [
                ("heads", u64::from(rows.heads)),
                ("elements of a head", u64::from(rows.head_size)),
                ("bytes of an element", u64::from(rows.element_bytes)),
            ]
        });
        for (dimension, count) in dimensions.into_iter().chain(rows) {
            ArgumentError::not_zero(dimension, count)?;
        }
        Ok(())
    }

    /// The number of parts of all layers.
    const fn all_parts(&self) -> u64 {
        (self.layers as u64).saturating_mul(self.parts.len() as u64)
    }

    /// The bytes of a block whose tokens have `row` bytes in each layer: `None` on overflow.
    fn block_bytes(&self, row: u64) -> Option<u64> {
        let token = row.checked_mul(self.layers.into())?;
        token.checked_mul(self.tokens.into())
    }

    /// The bytes of a block in each tensor of the layer-major layout.
    fn tensors(&self) -> Option<Vec<u64>> {
        let tokens = |rows: &Rows| rows.bytes()?.checked_mul(self.tokens.into());
        let layer: Option<Vec<u64>> = self.parts.iter().map(tokens).collect();
        Some(layer?.repeat(self.layers as usize))
    }
}

/// The bytes of a token's rows in one layer of a group.
#[derive(Clone, Debug)]
struct LayerRows {
    /// For each part, the bytes of the rows of the parts before it.
    before: Vec<u64>,
    all: u64,
}

impl LayerRows {
    /// `None` on overflow.
    fn of(group: &LayerGroup) -> Option<Self> {
        let (mut before, mut all) = (Vec::with_capacity(group.parts.len()), 0_u64);
        for rows in &group.parts {
            before.push(all);
            all = all.checked_add(rows.bytes()?)?;
        }
        Some(Self { before, all })
    }
}

/// A tensor over all blocks: of whole blocks, or of one layer's part.
#[derive(Clone, Copy, Debug)]
struct Tensor {
    base: u64,
    /// The bytes of a block in it.
    stride: u64,
    /// Its bytes, in whole granules.
    length: u64,
}

/// A shape, in bytes.
#[derive(Clone, Debug)]
pub(super) struct Geometry {
    pub(super) blocks: u32,
    pub(super) layout: Layout,
    groups: Vec<LayerGroup>,
    /// The rows of each group.
    rows: Vec<LayerRows>,
    tensors: Vec<Tensor>,
    /// The bytes of a block in all tensors.
    pub(super) block_bytes: u64,
    /// The bytes of addresses.
    pub(super) size: u64,
}

impl Geometry {
    /// Checks a shape, and lays its tensors out, each from an `extent` of its own on.
    pub(super) fn new(
        blocks: u32,
        layout: Layout,
        groups: Vec<LayerGroup>,
        granule: Granularity,
        extent: u64,
    ) -> Result<Self, PagedKvError> {
        ArgumentError::not_zero("groups", groups.len() as u64)?;
        groups.iter().try_for_each(LayerGroup::check)?;
        // Before anything is done for each of them.
        let parts = groups.iter().map(LayerGroup::all_parts);
        let parts = parts.fold(0, u64::saturating_add);
        ArgumentError::at_most("parts of all layers", parts, MOST_PARTS)?;
        let overflow = || ArgumentError::Overflow {
            what: "bytes of all blocks",
            value: u64::MAX,
        };
        let rows: Option<Vec<LayerRows>> = groups.iter().map(LayerRows::of).collect();
        let rows = rows.ok_or_else(overflow)?;
        let blocks_of = groups.iter().zip(&rows);
        let blocks_of: Option<Vec<u64>> = blocks_of
            .map(|(group, rows)| group.block_bytes(rows.all))
            .collect();
        let blocks_of = blocks_of.ok_or_else(overflow)?;
        let block_bytes = blocks_of.first().copied().unwrap_or_default();
        let differs = |&(_, &bytes): &(usize, &u64)| bytes != block_bytes;
        if let Some((group, &bytes)) = blocks_of.iter().enumerate().find(differs) {
            return Err(PagedKvError::GroupBytes {
                group,
                bytes,
                first: block_bytes,
            });
        }
        let mut geometry = Self {
            blocks,
            layout,
            groups,
            rows,
            tensors: Vec::new(),
            block_bytes,
            size: 0,
        };
        block_bytes
            .checked_mul(blocks.into())
            .ok_or_else(overflow)?;
        let strides = geometry.strides()?;
        geometry
            .lay_out(&strides, granule, extent)
            .ok_or_else(overflow)?;
        geometry.check_alignment()?;
        Ok(geometry)
    }

    /// The bytes of a block in each tensor.
    fn strides(&self) -> Result<Vec<u64>, PagedKvError> {
        if self.layout != Layout::LayerMajor {
            return Ok(vec![self.block_bytes]);
        }
        let mut tensors = self
            .groups
            .iter()
            .map(|it| it.tensors().unwrap_or_default());
        let first = tensors.next().unwrap_or_default();
        match tensors.position(|tensors| tensors != first) {
            Some(at) => Err(PagedKvError::GroupTensors { group: at + 1 }),
            None => Ok(first),
        }
    }

    fn lay_out(&mut self, strides: &[u64], granule: Granularity, extent: u64) -> Option<()> {
        let extent = Granularity::new(extent)?;
        for &stride in strides {
            let bytes = stride.checked_mul(self.blocks.into())?;
            self.tensors.push(Tensor {
                base: self.size,
                stride,
                length: granule.round_up(bytes)?,
            });
            self.size = self.size.checked_add(extent.round_up(bytes)?)?;
        }
        Some(())
    }

    /// Checks that every element of every view lies at a multiple of its size.
    fn check_alignment(&self) -> Result<(), PagedKvError> {
        for (index, group) in self.groups.iter().enumerate() {
            for layer in 0..group.layers {
                for part in 0..group.parts.len() {
                    let Some(place) = self.place(index, layer, part) else {
                        continue;
                    };
                    let element = place.element_bytes;
                    let what = "bytes to a part of a layer";
                    ArgumentError::aligned(what, place.offset, element)?;
                    let [block, token, ..] = place.strides;
                    ArgumentError::aligned("bytes from one block to the next", block, element)?;
                    ArgumentError::aligned("bytes from one token to the next", token, element)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the counts of blocks that touch each extent.
    pub(super) fn planes(&self, extent: u64) -> Planes {
        let tensors = self.tensors.iter();
        Planes::new(extent, tensors.map(|it| (it.base, it.stride, it.length)))
    }

    /// Returns the place of a layer's part; `None` if there is none.
    pub(super) fn place(&self, group: usize, layer: u32, part: usize) -> Option<Place> {
        let rows = self.rows.get(group)?;
        let group = self.groups.get(group).filter(|it| layer < it.layers)?;
        let (of_part, &before) = (group.parts.get(part)?, rows.before.get(part)?);
        let (row, all) = (of_part.bytes()?, rows.all);
        let tokens = u64::from(group.tokens);
        let layers_before = u64::from(layer) * all;
        let (offset, block, token) = match self.layout {
            Layout::BlockMajor => (tokens * (layers_before + before), self.block_bytes, row),
            Layout::TokenMajor => {
                let token = all * u64::from(group.layers);
                (layers_before + before, self.block_bytes, token)
            }
            Layout::LayerMajor => {
                let index = layer as usize * group.parts.len() + part;
                let tensor = self.tensors.get(index)?;
                (tensor.base, tensor.stride, row)
            }
        };
        let element_bytes = u64::from(of_part.element_bytes);
        Some(Place {
            offset,
            shape: [
                self.blocks.into(),
                tokens,
                of_part.heads.into(),
                of_part.head_size.into(),
            ],
            element_bytes,
            strides: [
                block,
                token,
                u64::from(of_part.head_size) * element_bytes,
                element_bytes,
            ],
        })
    }
}

/// The place of a layer's part in the cache's addresses: `[block, token, head, element]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) offset: u64,
    pub(super) shape: [u64; 4],
    pub(super) element_bytes: u64,
    /// In bytes.
    pub(super) strides: [u64; 4],
}

impl Place {
    /// The bytes of a token's row.
    pub(super) const fn row(&self) -> u64 {
        let [_, _, heads, _] = self.shape;
        let [_, _, head, _] = self.strides;
        heads * head
    }

    pub(super) fn view(self, base: cuvmm_driver::DeviceAddress) -> PagedView {
        PagedView {
            address: base + self.offset,
            shape: self.shape,
            element_bytes: self.element_bytes,
            strides: self.strides,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    const G: u64 = 2 << 20;
    const ALL: [Layout; 3] = [Layout::BlockMajor, Layout::TokenMajor, Layout::LayerMajor];

    fn geometry(
        blocks: u32,
        layout: Layout,
        groups: &[LayerGroup],
    ) -> Result<Geometry, PagedKvError> {
        let granule = Granularity::new(G).unwrap();
        Geometry::new(blocks, layout, groups.to_vec(), granule, 2 * G)
    }

    fn llama() -> LayerGroup {
        LayerGroup::new(32, 16).keys_and_values(8, 128, 2)
    }

    #[test]
    fn a_block_of_a_known_model() {
        for layout in ALL {
            let known = geometry(1_000, layout, &[llama()]).unwrap();
            assert_eq!(known.block_bytes, 2 << 20);
            let place = known.place(0, 3, 1).unwrap();
            assert_eq!(place.shape, [1_000, 16, 8, 128]);
            let (offset, strides) = match layout {
                Layout::BlockMajor => (7 * (32 << 10), [G, 2_048, 256, 2]),
                Layout::TokenMajor => (7 * 2_048, [G, 64 * 2_048, 256, 2]),
                // 1,000 blocks of 32 KiB are 31.25 MiB: eight extents.
                Layout::LayerMajor => (7 * 8 * 2 * G, [32 << 10, 2_048, 256, 2]),
            };
            assert_eq!((place.offset, place.strides), (offset, strides));
            assert!(known.place(0, 32, 0).is_none());
            assert!(known.place(0, 0, 2).is_none());
            assert!(known.place(1, 0, 0).is_none());
        }
    }

    #[test]
    fn every_byte_of_a_block_belongs_to_one_part() {
        let scaled = LayerGroup::new(3, 4).keys_and_values(2, 8, 1).part(2, 1, 4);
        for layout in ALL {
            let known = geometry(5, layout, std::slice::from_ref(&scaled)).unwrap();
            let mut rows = Vec::new();
            for layer in 0..3 {
                for part in 0..3 {
                    let place = known.place(0, layer, part).unwrap();
                    let [block, token, ..] = place.strides;
                    for at in (0..5).flat_map(|it| (0..4).map(move |token| (it, token))) {
                        let start = place.offset + at.0 * block + at.1 * token;
                        rows.push(start..start + place.row());
                    }
                }
            }
            rows.sort_by_key(|row| row.start);
            assert!(rows.iter().zip(&rows[1..]).all(|(a, b)| a.end <= b.start));
            let bytes: u64 = rows.iter().map(|row| row.end - row.start).sum();
            assert_eq!(bytes, 5 * known.block_bytes);
            assert!(rows.last().unwrap().end <= known.size);
        }
    }

    #[test]
    fn groups_share_numbers_if_their_blocks_have_equal_bytes() {
        let window = LayerGroup::new(16, 32).keys_and_values(8, 128, 2);
        for layout in [Layout::BlockMajor, Layout::TokenMajor] {
            let known = geometry(10, layout, &[llama(), window.clone()]).unwrap();
            let place = known.place(1, 15, 1).unwrap();
            assert_eq!(place.shape, [10, 32, 8, 128]);
            assert_eq!(place.strides[0], known.block_bytes);
        }
        let refused = geometry(10, Layout::LayerMajor, &[llama(), window]);
        assert!(matches!(
            refused,
            Err(PagedKvError::GroupTensors { group: 1 })
        ));
        let small = LayerGroup::new(32, 8).keys_and_values(8, 128, 2);
        for layout in ALL {
            let refused = geometry(10, layout, &[llama(), small.clone()]);
            let bytes = (1 << 20, 2 << 20);
            assert!(
                matches!(refused, Err(PagedKvError::GroupBytes { group: 1, bytes: one, first })
                    if (one, first) == bytes)
            );
        }
    }

    #[test]
    fn what_cannot_be_is_named() {
        let argument = |groups: &[LayerGroup]| match geometry(10, Layout::BlockMajor, groups) {
            Err(PagedKvError::Argument(error)) => error,
            other => panic!("{other:?}"),
        };
        let zero = |group: LayerGroup| match argument(&[group]) {
            ArgumentError::Zero(what) => what,
            other => panic!("{other:?}"),
        };
        assert_eq!(argument(&[]), ArgumentError::Zero("groups"));
        assert_eq!(zero(LayerGroup::new(0, 16).part(1, 1, 1)), "layers");
        assert_eq!(
            zero(LayerGroup::new(1, 0).part(1, 1, 1)),
            "tokens of a block"
        );
        assert_eq!(zero(LayerGroup::new(1, 1)), "parts of a layer");
        assert_eq!(zero(LayerGroup::new(1, 1).part(0, 1, 1)), "heads");
        assert_eq!(
            zero(LayerGroup::new(1, 1).part(1, 0, 1)),
            "elements of a head"
        );
        assert_eq!(
            zero(LayerGroup::new(1, 1).part(1, 1, 0)),
            "bytes of an element"
        );
        let huge = [
            LayerGroup::new(1, 1).part(u32::MAX, u32::MAX, u32::MAX),
            LayerGroup::new(1, u32::MAX).part(u32::MAX, u32::MAX, 1),
        ];
        for group in huge {
            for layout in ALL {
                let refused = geometry(i32::MAX as u32, layout, std::slice::from_ref(&group));
                let overflow =
                    |error: &ArgumentError| matches!(error, ArgumentError::Overflow { .. });
                assert!(
                    matches!(&refused, Err(PagedKvError::Argument(error)) if overflow(error)),
                    "{refused:?}"
                );
            }
        }
        // Refused before any of them is looked at.
        let many = LayerGroup::new(u32::MAX, 1).part(1, 1, 1);
        let half = LayerGroup::new(1 << 15, 1).keys_and_values(1, 1, 1);
        for (groups, value) in [
            (vec![many], u64::from(u32::MAX)),
            (vec![half.clone(), half.clone()], 1 << 17),
        ] {
            let what = "parts of all layers";
            let most = 1 << 16;
            let known = ArgumentError::TooLarge { what, value, most };
            assert_eq!(argument(&groups), known);
        }
        geometry(1, Layout::BlockMajor, &[half]).unwrap();
        // As many parts in one layer, no two of them equal.
        let parts = (1..=1 << 16).fold(LayerGroup::new(1, 1), |it, head| it.part(1, head, 1));
        for layout in ALL {
            let known = geometry(1, layout, std::slice::from_ref(&parts)).unwrap();
            assert_eq!(known.block_bytes, (1 << 15) * ((1 << 16) + 1));
            known.planes(2 * G);
        }
        // Scales of four bytes behind rows of three.
        let odd = LayerGroup::new(1, 1).part(1, 3, 1).part(1, 1, 4);
        assert!(matches!(argument(&[odd]), ArgumentError::Misaligned { .. }));
    }
}
