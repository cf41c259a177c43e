//! The shape of a cache, and its geometry in memory.

use crate::error::ArgumentError;
use crate::size::Granularity;

/// The dimensions of a cache: it holds a key and a value for each layer, head and token of each
/// sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// The layers of the model.
    pub layers: u32,
    /// The heads of keys and values in a layer.
    pub kv_heads: u32,
    /// The elements of a head.
    pub head_size: u32,
    /// The bytes of an element, for example 2 for half precision.
    pub element_bytes: u32,
    /// The most tokens of a sequence. It determines addresses, not memory.
    pub max_tokens: u64,
    /// The most sequences that exist at one time.
    pub max_sequences: u32,
}

/// The layout of a sequence in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layout {
    /// All layers of a token are adjacent: `[token, layer, key or value, head, element]` in one
    /// growing range. The tensor of one layer is strided. Takes the least memory: a sequence grows
    /// by one granule at a time.
    #[default]
    TokenMajor,
    /// The keys of each layer and the values of each layer are a contiguous tensor `[token, head,
    /// element]` in a growing range of their own, as most kernels expect. A sequence grows by a
    /// granule for each range, and takes at least that.
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

/// A shape, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub(super) shape: Shape,
    pub(super) layout: Layout,
    /// The bytes of one head's keys or values of one token.
    pub(super) head: u64,
    /// The bytes of all heads' keys or values of one token in one layer.
    pub(super) row: u64,
    /// The bytes of a token in all layers, keys and values.
    pub(super) token: u64,
    pub(super) ranges: usize,
    /// The bytes from one token to the next in a range.
    pub(super) stride: u64,
    granule: Granularity,
    /// Ranges are allocated by bytes instead of granules, so that the pool knows which bytes are in
    /// use.
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
        for (dimension, count) in counts {
            ArgumentError::not_zero(dimension, count)?;
        }
        Self::sized(shape, layout, granule, exact).ok_or(ArgumentError::Overflow {
            what: "bytes of all sequences",
            value: u64::MAX,
        })
    }

    /// Returns `None` if the sizes overflow 64 bits.
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
        // The addresses of all sequences must not overflow.
        let range = granule.class(geometry.size_for(shape.max_tokens)?)?;
        range
            .checked_mul(ranges)?
            .checked_mul(u64::from(shape.max_sequences))?;
        Some(geometry)
    }

    /// Returns the size of each range of a sequence, or `None` on overflow.
    pub(super) fn size_for(&self, tokens: u64) -> Option<u64> {
        let bytes = tokens.checked_mul(self.stride)?;
        match self.exact {
            true => Some(bytes),
            false => self.granule.round_up(bytes),
        }
    }

    /// Returns the bytes of `tokens` tokens in each range of a sequence.
    pub(super) const fn bytes_of(&self, tokens: u64) -> u64 {
        tokens.saturating_mul(self.stride)
    }

    /// Returns the number of tokens that fit in ranges of a size.
    pub(super) const fn tokens_in(&self, size: u64) -> u64 {
        let tokens = size / self.stride;
        let most = self.shape.max_tokens;
        if tokens < most { tokens } else { most }
    }

    pub(super) fn memory_of_range(&self, tokens: u64) -> u64 {
        let bytes = self.bytes_of(tokens);
        self.granule.round_up(bytes).unwrap_or(u64::MAX)
    }

    pub(super) fn memory_of(&self, tokens: u64) -> u64 {
        self.memory_of_range(tokens)
            .saturating_mul(self.ranges as u64)
    }

    /// Returns the tokens that a granule of each range holds, and the bytes of these granules.
    pub(super) const fn grain(&self) -> (u64, u64) {
        let granule = self.granule.bytes();
        (granule / self.stride, granule * self.ranges as u64)
    }

    /// Returns how many tokens before a sequence's end the next granule should be on its way: a
    /// quarter of a granule's tokens.
    pub(super) const fn lead(&self) -> u64 {
        self.grain().0 / 4
    }

    /// Returns the range that holds a layer's keys or values, and the offset of the first token's
    /// in it.
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
        // A row whose size does not divide the granule.
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
        assert!(matches!(refused, Err(ArgumentError::Zero("head_size"))));
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
                assert!(matches!(refused, Err(ArgumentError::Overflow { .. })));
            }
        }
    }
}
