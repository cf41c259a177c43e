//! Making caches, each in the tenant of a tag.

use std::sync::Arc;
use std::time::Duration;

use cuvmm::error::PagedKvError;
use cuvmm::paged::{LayerGroup, Layout};
use cuvmm::{PagedKv, Stream, Tenant};
use serde::Deserialize;

use super::caches::{Cache, repeated};
use crate::error::Error;
use crate::{edge, fork, heaps, live, tags};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    device: i32,
    stream: u64,
    name: String,
    blocks: u32,
    groups: Vec<Group>,
    layout: Option<Arrangement>,
    extent: Option<u64>,
    pinned: Option<Vec<u32>>,
    precommit: Option<u32>,
    /// In seconds.
    timeout: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    layers: u32,
    tokens: u32,
    /// Heads, elements of a head, bytes of an element.
    parts: Vec<[u32; 3]>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
enum Arrangement {
    #[serde(rename = "block-major")]
    Block,
    #[serde(rename = "token-major")]
    Token,
    #[serde(rename = "layer-major")]
    Layer,
}

/// Makes a cache, as `cuvmm_paged_new` describes. Returns its number.
pub(super) fn build(json: &str) -> Result<u64, Error> {
    fork::check()?;
    let request: Request = serde_json::from_str(json)?;
    let wait = request.timeout.map(edge::timeout).transpose()?;
    let of = heaps::of(request.device)?;
    // Other processes give what they do not need only to a request that waits.
    let wait = wait.or_else(|| of.ledger().map(|_| live::NEIGHBOURS));
    let (tag, tenant) = tags::paged::for_cache(of, &request.name)?;
    let kv = of.with_stream(request.stream, |home| {
        let mut kv = None;
        let build = || request.build(&tenant, home, wait).map(|it| kv = Some(it));
        repeated(of, home, wait.is_some(), build)?;
        kv.ok_or(Error::Null)
    })?;
    tags::paged::admit(tag, Arc::new(Cache::new(kv, of, wait.is_some())))
}

impl Request {
    fn build(
        &self,
        tenant: &Tenant,
        home: &Stream,
        wait: Option<Duration>,
    ) -> Result<PagedKv, PagedKvError> {
        let mut builder = PagedKv::builder(tenant, home, self.blocks);
        for Group {
            layers,
            tokens,
            parts,
        } in &self.groups
        {
            let group = LayerGroup::new(*layers, *tokens);
            let add = |group: LayerGroup, &[heads, elements, bytes]: &[u32; 3]| {
                group.part(heads, elements, bytes)
            };
            builder = builder.group(parts.iter().fold(group, add));
        }
        if let Some(layout) = self.layout {
            builder = builder.layout(match layout {
                Arrangement::Block => Layout::BlockMajor,
                Arrangement::Token => Layout::TokenMajor,
                Arrangement::Layer => Layout::LayerMajor,
            });
        }
        if let Some(bytes) = self.extent {
            builder = builder.extent(bytes);
        }
        if let Some(wait) = wait {
            builder = builder.timeout(wait);
        }
        builder
            // Any stream may launch a graph that reads blocks.
            .sleep_after_all_work(true)
            .precommit(self.precommit.unwrap_or(0))
            .pinned(self.pinned.iter().flatten().copied())
            .build()
    }
}
