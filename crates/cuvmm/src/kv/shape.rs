//! What a cache is to hold, and how it lies in memory.

use crate::error::ArgumentError;
use crate::size::Granularity;

/// What a cache holds: a key and a value for each layer, head and token of each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Layers of the model.
    pub layers: u32,
    /// Heads of keys and values in a layer.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_size: u32,
    /// Bytes of an element: 2 for half precision.
    pub element_bytes: u32,
    /// The most tokens of a sequence. Takes addresses, not memory.
    pub max_tokens: u64,
    /// The most sequences at a time.
    pub max_sequences: u32,
}

/// How a sequence lies in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layout {
    /// All layers of a token lie side by side: `[token, layer, key or value, head, element]` in one
    /// range that grows. What a kernel sees of a layer is strided. It takes the least memory: a
    /// sequence grows by a granule at a time.
    #[default]
    TokenMajor,
    /// Each layer's keys and each layer's values are a contiguous tensor `[token, head, element]`,
    /// in a range of its own that grows: what most kernels expect. A sequence grows by a granule
    /// for each of them, and takes at least that.
    LayerMajor,
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The keys.
    Key,
    /// The values.
    Value,
}

/// A shape in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub(super) shape: Shape,
    pub(super) layout: Layout,
    /// Bytes of one head's keys or values of one token.
    pub(super) head: u64,
    /// Of all heads.
    pub(super) row: u64,
    /// Of all layers, keys and values.
    pub(super) token: u64,
    /// Ranges of a sequence.
    pub(super) ranges: usize,
    /// From one token to the next in a range.
    pub(super) stride: u64,
    granule: Granularity,
    /// Ranges are asked for by bytes and not by granules: then the pool knows what is written.
    exact: bool,
}

impl Geometry {
    pub(super) fn new(
        shape: Shape,
        layout: Layout,
        granule: Granularity,
        exact: bool,
    ) -> Result<Self, ArgumentError> {
        let counts = [
            ("layers", u64::from(shape.layers)),
            ("kv_heads", u64::from(shape.kv_heads)),
            ("head_size", u64::from(shape.head_size)),
            ("element_bytes", u64::from(shape.element_bytes)),
            ("max_tokens", shape.max_tokens),
            ("max_sequences", u64::from(shape.max_sequences)),
        ];
        if let Some(&(dimension, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return Err(ArgumentError::Zero { what: dimension });
        }
        Self::sized(shape, layout, granule, exact).ok_or(ArgumentError::Uncountable {
            what: "bytes of all sequences",
            value: u64::MAX,
        })
    }

    /// Nothing where 64 bits do not suffice.
    fn sized(shape: Shape, layout: Layout, granule: Granularity, exact: bool) -> Option<Self> {
        let head = u64::from(shape.head_size).checked_mul(u64::from(shape.element_bytes))?;
        let row = head.checked_mul(u64::from(shape.kv_heads))?;
        let tensors = u64::from(shape.layers) * 2;
        let token = row.checked_mul(tensors)?;
        let (ranges, stride) = match layout {
            Layout::TokenMajor => (1, token),
            Layout::LayerMajor => (tensors, row),
        };
        let geometry = Self {
            shape,
            layout,
            head,
            row,
            token,
            ranges: usize::try_from(ranges).ok()?,
            stride,
            granule,
            exact,
        };
        // All addresses of all sequences can be counted.
        let range = granule.class(geometry.size_for(shape.max_tokens)?)?;
        range
            .checked_mul(ranges)?
            .checked_mul(u64::from(shape.max_sequences))?;
        Some(geometry)
    }

    /// How large each range of a sequence is to be; nothing if that cannot be counted.
    pub(super) fn size_for(&self, tokens: u64) -> Option<u64> {
        let bytes = tokens.checked_mul(self.stride)?;
        match self.exact {
            true => Some(bytes),
            false => self.granule.round_up(bytes),
        }
    }

    /// Bytes of so many tokens in each range of a sequence.
    pub(super) const fn bytes_of(&self, tokens: u64) -> u64 {
        tokens.saturating_mul(self.stride)
    }

    /// Tokens that ranges of a size have room for.
    pub(super) const fn tokens_in(&self, size: u64) -> u64 {
        let tokens = size / self.stride;
        let most = self.shape.max_tokens;
        if tokens < most { tokens } else { most }
    }

    /// Memory of each range of a sequence.
    pub(super) fn memory_of_range(&self, tokens: u64) -> u64 {
        let bytes = self.bytes_of(tokens);
        self.granule.round_up(bytes).unwrap_or(u64::MAX)
    }

    /// Memory of a sequence.
    pub(super) fn memory_of(&self, tokens: u64) -> u64 {
        self.memory_of_range(tokens)
            .saturating_mul(self.ranges as u64)
    }

    /// The tokens that a granule of each range holds, and the bytes of these granules.
    pub(super) const fn grain(&self) -> (u64, u64) {
        let granule = self.granule.bytes();
        (granule / self.stride, granule * self.ranges as u64)
    }

    /// So many tokens before its end a sequence's next granule should be on its way: a quarter of
    /// what a granule holds.
    pub(super) const fn lead(&self) -> u64 {
        self.grain().0 / 4
    }

    /// Which range a layer's keys or values are in, and where there the first token's are.
    pub(super) fn place(&self, layer: u32, part: Part) -> Option<(usize, u64)> {
        if layer >= self.shape.layers {
            return None;
        }
        let tensor = u64::from(layer) * 2 + u64::from(part == Part::Value);
        match self.layout {
            Layout::TokenMajor => Some((0, tensor * self.row)),
            Layout::LayerMajor => Some((usize::try_from(tensor).ok()?, 0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA_8B: Shape = Shape {
        layers: 32,
        kv_heads: 8,
        head_size: 128,
        element_bytes: 2,
        max_tokens: 8192,
        max_sequences: 256,
    };

    fn geometry(shape: Shape, layout: Layout) -> Result<Geometry, ArgumentError> {
        let granule = Granularity::new(2 << 20).unwrap();
        Geometry::new(shape, layout, granule, false)
    }

    #[test]
    fn a_granule_in_tokens() {
        let token_major = geometry(LLAMA_8B, Layout::TokenMajor).unwrap();
        assert_eq!(token_major.token, 128 << 10);
        assert_eq!(token_major.grain(), (16, 2 << 20));
        assert_eq!(token_major.memory_of(17), 4 << 20);
        let layer_major = geometry(LLAMA_8B, Layout::LayerMajor).unwrap();
        assert_eq!(layer_major.grain(), (1024, 128 << 20));
        assert_eq!(layer_major.memory_of(1), 128 << 20);
        assert_eq!(layer_major.memory_of(1025), 256 << 20);
        // A row that does not divide the granule.
        let odd = Shape {
            layers: 5,
            ..LLAMA_8B
        };
        let odd = geometry(odd, Layout::TokenMajor).unwrap();
        assert_eq!(odd.grain(), (102, 2 << 20));
        assert_eq!(
            (odd.size_for(103), odd.tokens_in(4 << 20)),
            (Some(4 << 20), 204)
        );
        assert_eq!(odd.tokens_in(u64::MAX), 8192, "no more than a sequence has");
    }

    #[test]
    fn every_row_has_a_place_of_its_own() {
        for layout in [Layout::TokenMajor, Layout::LayerMajor] {
            let geometry = geometry(LLAMA_8B, layout).unwrap();
            let places = (0..32)
                .flat_map(|layer| [Part::Key, Part::Value].map(|part| geometry.place(layer, part)))
                .map(Option::unwrap);
            let mut places: Vec<(usize, u64)> = places.collect();
            assert!(geometry.place(32, Part::Key).is_none());
            places.dedup();
            assert_eq!(places.len(), 64);
            let end = places.last().unwrap().1 + geometry.row;
            assert_eq!(end, geometry.stride, "and they fill a token");
        }
    }

    #[test]
    fn what_cannot_be_is_named() {
        let none = Shape {
            head_size: 0,
            ..LLAMA_8B
        };
        let refused = geometry(none, Layout::TokenMajor);
        assert!(matches!(
            refused,
            Err(ArgumentError::Zero { what: "head_size" })
        ));
        for huge in [
            Shape {
                head_size: u32::MAX,
                element_bytes: u32::MAX,
                ..LLAMA_8B
            },
            Shape {
                max_tokens: u64::MAX / 2,
                ..LLAMA_8B
            },
            Shape {
                max_tokens: 1 << 40,
                max_sequences: u32::MAX,
                ..LLAMA_8B
            },
        ] {
            for layout in [Layout::TokenMajor, Layout::LayerMajor] {
                let refused = geometry(huge, layout);
                assert!(matches!(refused, Err(ArgumentError::Uncountable { .. })));
            }
        }
    }
}
