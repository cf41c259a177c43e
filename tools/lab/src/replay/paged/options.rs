//! The options of paged caches, and the terms that follow from them.

use std::fmt;

use clap::ValueEnum;
use cuvmm::paged::{DEFAULT_EXTENT, LayerGroup, Layout};

use serde::{Deserialize, Serialize, Serializer};
use serde_json::json;

use super::numbers::Order;
use cuvmm_command::command::usage;
use cuvmm_command::size::{iec, size};

/// Tokens of a block.
const TOKENS: u32 = 16;

/// Layers of each model, which have keys and values.
const LAYERS: u32 = 32;

/// Tensors in layer-major layout.
pub(super) const TENSORS: u64 = 2 * LAYERS as u64;

/// The first and the last part of a block in its layers: group, layer, part.
pub(super) const ENDS: [(usize, u32, usize); 2] = [(0, 0, 0), (0, LAYERS - 1, 1)];

/// How the keys and values of a request lie in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Caches {
    /// One block of memory for each request, which grows in place
    #[default]
    Contiguous,
    /// A paged cache for each model; a block of 16 tokens is contiguous
    Paged,
    /// A paged cache for each model, with a tensor for each layer's keys and for its values
    PagedLayerMajor,
}

/// Options of paged caches.
#[derive(Clone, Debug, Default, clap::Args, Serialize, Deserialize)]
pub(crate) struct Options {
    /// How the keys and values of requests lie in memory
    #[arg(long, value_enum, default_value_t)]
    pub(super) layout: Caches,

    /// Which free block a paged cache's engine takes next [default: lowest]
    #[arg(long, value_enum)]
    pub(super) numbers: Option<Order>,

    /// Bytes of an extent of a paged cache [default: 16MiB, or a granule if layer-major]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) extent: Option<u64>,

    /// Keep the blocks of ended requests for their prefixes, until memory is short or their numbers
    /// are needed
    #[arg(long)]
    pub(super) keep_prefixes: bool,

    /// Memory that each paged cache reserves for blocks to come, under elastic [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) reserve: Option<u64>,
}

/// The terms of the paged caches of a replay.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    pub(super) layout: Layout,
    /// Bytes of an extent.
    pub(super) extent: u64,
    /// Bytes of a block.
    pub(crate) block: u64,
    pub(super) order: Order,
    pub(super) keeps: bool,
    /// Bytes that each cache reserves under elastic.
    pub(super) reserve: u64,
    /// Bytes of a token in one tensor of the layer-major layout.
    row: u32,
}

impl Options {
    /// Returns the terms of paged caches, or `None` if the layout is contiguous.
    ///
    /// # Errors
    /// Options contradict each other, or the memory does not hold a block of each model.
    pub(crate) fn terms(
        &self,
        bytes_per_token: u64,
        granule: u64,
        (share, guarantee): (u64, u64),
    ) -> anyhow::Result<Option<Terms>> {
        let layout = match self.layout {
            Caches::Contiguous => return self.none(),
            Caches::Paged => Layout::BlockMajor,
            Caches::PagedLayerMajor => Layout::LayerMajor,
        };
        let default = match layout {
            Layout::LayerMajor => granule,
            _ => DEFAULT_EXTENT.max(granule),
        };
        let row = u32::try_from(bytes_per_token / TENSORS);
        let row = row.ok().filter(|_| bytes_per_token.is_multiple_of(TENSORS));
        let Some(row) = row.filter(|&row| row > 0) else {
            return Err(usage(format!(
                "--kv-bytes-per-token: {bytes_per_token} bytes are not keys and values of {LAYERS} \
                 layers: a multiple of {TENSORS}, at most 256 GiB"
            )));
        };
        let terms = Terms {
            layout,
            extent: self.extent.unwrap_or(default),
            block: bytes_per_token * u64::from(TOKENS),
            order: self.numbers.unwrap_or_default(),
            keeps: self.keep_prefixes,
            reserve: self.reserve.unwrap_or_default(),
            row,
        };
        if terms.reserve > 0 && terms.order != Order::Lowest {
            return Err(usage(
                "--reserve: needs --numbers lowest, whose blocks it reserves",
            ));
        }
        if !terms.extent.is_power_of_two() || terms.extent < granule {
            let (extent, granule) = (iec(terms.extent), iec(granule));
            return Err(usage(format!(
                "--extent: {extent} is no power of two of at least a granule, {granule}"
            )));
        }
        if terms.blocks_in(share) == 0 {
            let (share, least) = (iec(share), iec(terms.extent_of_all().max(terms.block)));
            return Err(usage(format!(
                "--memory: an even share is {share}, less than the {least} of a first block's extents"
            )));
        }
        if terms.reserve > terms.blocks_in(guarantee) * terms.block {
            let (reserve, guarantee) = (iec(terms.reserve), iec(guarantee));
            return Err(usage(format!(
                "--reserve: {reserve} are more than the guarantee, {guarantee}"
            )));
        }
        Ok(Some(terms))
    }

    /// Refuses options that are for paged caches only.
    fn none(&self) -> anyhow::Result<Option<Terms>> {
        let given = [
            ("--numbers", self.numbers.is_some()),
            ("--extent", self.extent.is_some()),
            ("--keep-prefixes", self.keep_prefixes),
            ("--reserve", self.reserve.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((option, _)) => Err(usage(format!(
                "{option}: only with --layout paged or paged-layer-major"
            ))),
            None => Ok(None),
        }
    }
}

impl fmt::Display for Terms {
    /// Writes the terms in words, for the head of the report.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layout, block, extent) = (self.layout_name(), iec(self.block), iec(self.extent));
        write!(
            f,
            "paged, {layout}: blocks of {TOKENS} tokens, {block}, in extents of {extent}, "
        )?;
        f.write_str(match self.order {
            Order::Lowest => "lowest number first",
            Order::Fifo => "number freed longest ago first",
        })?;
        if self.keeps {
            f.write_str("; blocks of ended requests kept")?;
        }
        if self.reserve > 0 {
            write!(
                f,
                "; {} reserved for each model under elastic",
                iec(self.reserve)
            )?;
        }
        f.write_str("; under static all blocks are backed")
    }
}

impl Serialize for Terms {
    /// Writes the keys of the JSON output.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let numbers = match self.order {
            Order::Lowest => "lowest",
            Order::Fifo => "fifo",
        };
        serializer.collect_map([
            ("layout", json!(self.layout_name())),
            ("block_bytes", json!(self.block)),
            ("extent_bytes", json!(self.extent)),
            ("numbers", json!(numbers)),
            ("keeps_prefixes", json!(self.keeps)),
            ("reserve_bytes", json!(self.reserve)),
        ])
    }
}

impl Terms {
    const fn layout_name(&self) -> &'static str {
        match self.layout {
            Layout::LayerMajor => "layer-major",
            _ => "block-major",
        }
    }

    pub(super) fn group(&self) -> LayerGroup {
        LayerGroup::new(LAYERS, TOKENS).keys_and_values(1, self.row, 1)
    }

    const fn tensors(&self) -> u64 {
        match self.layout {
            Layout::LayerMajor => TENSORS,
            _ => 1,
        }
    }

    /// Returns the bytes of an extent in each tensor.
    const fn extent_of_all(&self) -> u64 {
        self.extent.saturating_mul(self.tensors())
    }

    /// Returns the most blocks, numbered from 0, whose extents have `bytes` bytes together.
    pub(super) const fn blocks_in(&self, bytes: u64) -> u64 {
        let each = bytes / self.extent_of_all() * self.extent;
        each / (self.block / self.tensors())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn options(layout: Caches) -> Options {
        Options {
            layout,
            ..Options::default()
        }
    }

    fn terms(options: &Options) -> anyhow::Result<Option<Terms>> {
        options.terms(131_072, 2 * MIB, (4096 * MIB, 2048 * MIB))
    }

    #[test]
    fn as_many_blocks_fit_as_whole_extents_hold() {
        let paged = terms(&options(Caches::Paged)).unwrap().unwrap();
        assert_eq!((paged.block, paged.extent), (2 * MIB, 16 * MIB));
        assert_eq!(paged.blocks_in(33 * MIB), 16);
        let tensors = terms(&options(Caches::PagedLayerMajor)).unwrap().unwrap();
        assert_eq!(tensors.extent, 2 * MIB);
        assert_eq!(tensors.blocks_in(255 * MIB), 64);
        assert_eq!(tensors.blocks_in(127 * MIB), 0);
    }

    #[test]
    fn what_contradicts_is_refused_by_its_option() {
        let refused = |options: &Options| terms(options).unwrap_err().to_string();
        let mut contiguous = options(Caches::Contiguous);
        assert!(terms(&contiguous).unwrap().is_none());
        contiguous.reserve = Some(0);
        assert!(refused(&contiguous).starts_with("--reserve: only with"));
        let mut paged = options(Caches::Paged);
        paged.reserve = Some(2049 * MIB);
        assert!(refused(&paged).contains("more than the guarantee"));
        paged.numbers = Some(Order::Fifo);
        assert!(refused(&paged).contains("needs --numbers lowest"));
        paged.reserve = None;
        for extent in [MIB, 6 * MIB] {
            paged.extent = Some(extent);
            assert!(refused(&paged).starts_with("--extent: "));
        }
        let paged = options(Caches::Paged);
        let said = |bytes, share| {
            paged
                .terms(bytes, 2 * MIB, (share, 0))
                .unwrap_err()
                .to_string()
        };
        assert!(said(100, 4096 * MIB).starts_with("--kv-bytes-per-token: "));
        assert!(said(131_072, 15 * MIB).starts_with("--memory: "));
    }
}
