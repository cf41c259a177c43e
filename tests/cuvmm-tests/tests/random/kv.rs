//! Random programs of operations on the caches of two tenants, compared with a small reference
//! model: which byte each token of each sequence holds, which sequences exist, and how much memory
//! each tenant may have.

use std::collections::HashSet;

use crate::common;
use crate::common::books::balanced;
use crate::common::{G, Rig};
use crate::programs::run;
use cuvmm::driver::CUresult;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::Backing;
use cuvmm::error::{ArgumentError, KvCacheError};
use cuvmm::kv::{Layout, Part, SequenceId, Shape};
use cuvmm::{Hardened, KvCache, Limit, Pool, Stream};
use proptest::prelude::*;

/// 256 KiB per token, 64 KiB per tensor: 8 and 32 tokens per granule.
const SHAPE: Shape = Shape {
    layers: 2,
    kv_heads: 1,
    head_size: 64 << 10,
    element_bytes: 1,
    max_tokens: 60,
    max_sequences: 5,
};
const ROW: usize = 64 << 10;
const LIMIT: u64 = 24;

#[derive(Clone, Debug)]
enum Step {
    Create {
        cache: usize,
        tokens: u64,
    },
    Append {
        cache: usize,
        batch: Vec<(usize, u64)>,
    },
    Truncate {
        cache: usize,
        sequence: usize,
        to: u64,
    },
    Free {
        cache: usize,
        sequence: usize,
    },
    Fork {
        cache: usize,
        sequence: usize,
        at: u64,
    },
    /// Writes all rows of one token.
    Write {
        cache: usize,
        sequence: usize,
        token: u64,
    },
    Trim,
    Compact,
    Synchronise,
    /// Makes the `k`th driver call of the next operation fail.
    Fault {
        k: u64,
    },
}

fn step(forks: u32) -> impl Strategy<Value = Step> {
    let batch = proptest::collection::vec((0usize..5, 0u64..20), 1..5);
    prop_oneof![
        5 => (0usize..2, 1u64..64).prop_map(|(cache, tokens)| Step::Create { cache, tokens }),
        8 => (0usize..2, batch).prop_map(|(cache, batch)| Step::Append { cache, batch }),
        3 => (0usize..2, 0usize..5, 0u64..60)
            .prop_map(|(cache, sequence, to)| Step::Truncate { cache, sequence, to }),
        3 => (0usize..2, 0usize..5).prop_map(|(cache, sequence)| Step::Free { cache, sequence }),
        forks => (0usize..2, 0usize..5, 0u64..60)
            .prop_map(|(cache, sequence, at)| Step::Fork { cache, sequence, at }),
        8 => (0usize..2, 0usize..5, 0u64..60)
            .prop_map(|(cache, sequence, token)| Step::Write { cache, sequence, token }),
        1 => Just(Step::Trim),
        1 => Just(Step::Compact),
        1 => Just(Step::Synchronise),
        2 => (1u64..12).prop_map(|k| Step::Fault { k }),
    ]
}

/// The configuration that a program runs on.
#[derive(Clone, Copy)]
struct Kind {
    layout: Layout,
    zeroed: bool,
    /// The weight of forks among the steps of a program.
    forks: u32,
    hardened: bool,
}

const PLAIN: Kind = Kind {
    layout: Layout::TokenMajor,
    zeroed: false,
    forks: 0,
    hardened: false,
};

/// A sequence and its expected contents.
struct Known {
    id: SequenceId,
    /// The byte in each token's rows, or `None` if none was written.
    tokens: Vec<Option<u8>>,
    /// Number of tokens at the start that may no longer be written.
    fixed: usize,
}

struct World<'a, B: Backing> {
    rig: &'a Rig<B>,
    pool: Pool,
    caches: Vec<KvCache>,
    known: Vec<Vec<Known>>,
    /// Every byte that each cache has written, and zero.
    written: [HashSet<u8>; 2],
    next: u8,
    gone: Vec<(usize, SequenceId)>,
    zeroed: bool,
}

impl<'a, B: Backing> World<'a, B> {
    fn new(rig: &'a Rig<B>, kind: Kind) -> Self {
        let limit = Limit::Bytes(LIMIT * G);
        let builder = Pool::builder(&rig.device).limit(limit);
        let pool = match kind.hardened {
            true => builder.hardened(Hardened::new()).build().unwrap(),
            false => builder.build().unwrap(),
        };
        // The bytes that unwritten memory may hold: zero, and the fill of a hardened pool.
        let seen = match kind.hardened {
            true => HashSet::from([0, 0xDF]),
            false => HashSet::from([0]),
        };
        let Kind {
            layout,
            zeroed,
            forks,
            ..
        } = kind;
        let caches = ["one", "two"].map(|name| {
            let tenant = pool.tenant(name).guarantee(4 * G).register().unwrap();
            let stream = Stream::new(&rig.device).unwrap();
            let builder = KvCache::builder(&tenant, &stream, SHAPE).layout(layout);
            builder.zeroed(zeroed).may_fork(forks > 0).build().unwrap()
        });
        Self {
            rig,
            pool,
            caches: caches.into(),
            known: vec![vec![], vec![]],
            written: [seen.clone(), seen],
            next: 0,
            gone: vec![],
            zeroed,
        }
    }

    fn known(&self, cache: usize, sequence: usize) -> Option<usize> {
        let count = self.known[cache].len();
        (count > 0).then(|| sequence % count)
    }

    /// Checks that a refusal is allowed by the figures, or was caused by an injected fault, now or
    /// in an earlier roll-back.
    fn refused(&self, error: &KvCacheError) {
        let stats = self.pool.stats();
        let faulty = self.rig.faults.injected() > 0 || stats.quarantined > 0;
        assert!(faulty || error.is_shortage(), "{error}");
        assert!(faulty || stats.refusals > 0);
    }

    fn run(&mut self, step: &Step) {
        match step {
            &Step::Create { cache, tokens } => {
                let room = self.caches[cache].admission();
                match self.caches[cache].create(tokens) {
                    Ok(id) => {
                        assert!(tokens <= SHAPE.max_tokens && self.known[cache].len() < 5);
                        let unknown = self.zeroed.then_some(0);
                        let tokens = vec![unknown; tokens as usize];
                        self.known[cache].push(Known {
                            id,
                            tokens,
                            fixed: 0,
                        });
                    }
                    Err(KvCacheError::Argument(ArgumentError::TooLarge {
                        what: "sequences",
                        value,
                        most: 5,
                    })) => assert_eq!((value, self.known[cache].len()), (6, 5)),
                    Err(KvCacheError::Argument(ArgumentError::TooLarge { .. })) => {
                        assert!(tokens > SHAPE.max_tokens);
                    }
                    Err(error) => {
                        self.refused(&error);
                        if let (Ok(room), 0) = (room, self.rig.faults.injected()) {
                            assert!(
                                tokens > room.taking_back.sequence,
                                "{tokens}: {room:?} {error}"
                            );
                        }
                    }
                }
            }
            Step::Append { cache, batch } => {
                let batch: Vec<_> = batch
                    .iter()
                    .filter_map(|&(sequence, more)| Some((self.known(*cache, sequence)?, more)))
                    .collect();
                let named = |&(index, more): &(usize, u64)| (self.known[*cache][index].id, more);
                let named: Vec<_> = batch.iter().map(named).collect();
                match self.caches[*cache].append(&named) {
                    Ok(()) => {
                        for (index, more) in batch {
                            let tokens = &mut self.known[*cache][index].tokens;
                            let len = tokens.len() + more as usize;
                            tokens.resize(len, self.zeroed.then_some(0));
                        }
                    }
                    Err(KvCacheError::Tokens { tokens, .. }) => {
                        assert!(tokens > SHAPE.max_tokens);
                    }
                    Err(error) => self.refused(&error),
                }
            }
            &Step::Truncate {
                cache,
                sequence,
                to,
            } => {
                let Some(index) = self.known(cache, sequence) else {
                    return;
                };
                let known = &mut self.known[cache][index];
                match self.caches[cache].truncate(known.id, to) {
                    Ok(()) => {
                        known.tokens.truncate(to as usize);
                        known.fixed = known.fixed.min(to as usize);
                    }
                    Err(KvCacheError::Argument(ArgumentError::Zero { .. })) => {
                        assert_eq!(to, 0);
                    }
                    Err(KvCacheError::BeyondEnd { .. }) => {
                        assert!(to > known.tokens.len() as u64);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            &Step::Free { cache, sequence } => {
                let Some(index) = self.known(cache, sequence) else {
                    return;
                };
                let known = self.known[cache].remove(index);
                self.caches[cache].free(known.id).unwrap();
                self.gone.push((cache, known.id));
            }
            &Step::Fork {
                cache,
                sequence,
                at,
            } => {
                let Some(index) = self.known(cache, sequence) else {
                    return;
                };
                let held = self.known[cache].len();
                let known = &mut self.known[cache][index];
                let at = at as usize;
                match self.caches[cache].fork(known.id, at as u64) {
                    Ok(id) => {
                        assert!(at <= known.tokens.len() && held < 5);
                        known.fixed = known.fixed.max(at);
                        let tokens = known.tokens[..at].to_vec();
                        self.known[cache].push(Known {
                            id,
                            tokens,
                            fixed: at,
                        });
                    }
                    Err(KvCacheError::Argument(ArgumentError::Zero { .. })) => {
                        assert_eq!(at, 0);
                    }
                    Err(KvCacheError::BeyondEnd { .. }) => assert!(at > known.tokens.len()),
                    Err(KvCacheError::Argument(ArgumentError::TooLarge {
                        what: "sequences",
                        value,
                        most: 5,
                    })) => assert_eq!((value, held), (6, 5)),
                    Err(error) => self.refused(&error),
                }
            }
            &Step::Write {
                cache,
                sequence,
                token,
            } => {
                let Some(index) = self.known(cache, sequence) else {
                    return;
                };
                let known = &mut self.known[cache][index];
                let token = token % known.tokens.len() as u64;
                self.next = self.next % 120 + 1;
                // No byte is written by both tenants.
                let byte = self.next + 128 * cache as u8;
                for layer in 0..SHAPE.layers {
                    for part in [Part::Key, Part::Value] {
                        let rows = [byte; ROW];
                        let written =
                            self.caches[cache].write_rows(known.id, layer, part, token, &rows);
                        if token < known.fixed as u64 {
                            assert!(matches!(written, Err(KvCacheError::Fixed { .. })));
                            continue;
                        }
                        if written.is_err() {
                            assert!(self.rig.faults.injected() > 0);
                        }
                    }
                }
                if token < known.fixed as u64 {
                    return;
                }
                self.written[cache].insert(byte);
                let faulty = self.rig.faults.injected() > 0;
                known.tokens[token as usize] = (!faulty).then_some(byte);
            }
            Step::Trim => drop(self.pool.trim(0)),
            Step::Compact => drop(self.pool.compact(|_| true)),
            Step::Synchronise => drop(self.rig.device.synchronize()),
            &Step::Fault { k } => {
                self.rig.faults.disarm();
                self.rig.faults.forget();
                self.rig
                    .faults
                    .arm(Fault::nth(k, CUresult::CUDA_ERROR_UNKNOWN));
                return;
            }
        }
        self.rig.faults.disarm();
        self.rig.faults.forget();
        self.check();
    }

    fn check(&self) {
        let pools = balanced(self.rig, &self.pool);
        assert!(pools.committed + pools.free + pools.quarantined <= LIMIT * G);
        for (index, cache) in self.caches.iter().enumerate() {
            let known = &self.known[index];
            let tokens: u64 = known.iter().map(|known| known.tokens.len() as u64).sum();
            let stats = cache.stats();
            assert_eq!((cache.len(), stats.tokens), (known.len(), tokens));
            let repeated = tokens * cache.bytes_per_token() - stats.live;
            let forked = known.iter().any(|known| known.fixed > 0);
            assert!(repeated == 0 || forked);
            assert_eq!(stats.held, stats.live + stats.padding + stats.precommitted);
            assert_eq!(stats.held + stats.idle, cache.tenant().stats().committed);
            assert_eq!(stats.shared, cache.tenant().stats().shared);
            let once: u64 = known
                .iter()
                .map(|known| cache.memory_of(known.tokens.len() as u64))
                .sum();
            assert!(forked || stats.held - stats.precommitted >= once);
            for known in known {
                let seen: Vec<u8> = self.seen(cache, known);
                for (token, (seen, known)) in seen.iter().zip(&known.tokens).enumerate() {
                    match known {
                        Some(byte) => assert_eq!(seen, byte, "token {token}"),
                        None => assert!(
                            self.written[index].contains(seen),
                            "token {token} holds {seen}, which this cache never wrote"
                        ),
                    }
                }
            }
        }
        for &(cache, id) in &self.gone {
            assert!(self.caches[cache].view(id).is_err(), "{id} was reused");
        }
    }

    /// Returns the byte that fills each token's last row.
    fn seen(&self, cache: &KvCache, known: &Known) -> Vec<u8> {
        if !self.rig.keeps_bytes() {
            let unwritten = |token: &Option<u8>| token.unwrap_or(0);
            return known.tokens.iter().map(unwritten).collect();
        }
        let view = cache.view(known.id).unwrap();
        let tensor = view.value(SHAPE.layers - 1).unwrap();
        (0..view.tokens())
            .map(|token| {
                let at = tensor.address().0 + token * tensor.byte_strides()[0];
                let mut bytes = [0; 2];
                let last = at + ROW as u64 - 2;
                let address = cuvmm::driver::DeviceAddress(last);
                self.rig
                    .machine
                    .peek(common::D0, address, &mut bytes)
                    .unwrap();
                assert_eq!(bytes[0], bytes[1]);
                bytes[0]
            })
            .collect()
    }
}

fn programs<B: Backing>(rig: impl Fn() -> Rig<B>, kind: Kind) {
    run(400, step(kind.forks), 1..40, |steps| {
        let rig = rig();
        let mut world = World::new(&rig, kind);
        for step in steps {
            world.run(step);
        }
        rig.faults.disarm();
        drop(world);
        common::only_counted_left(&rig);
    });
}

#[test]
fn token_major_on_model() {
    programs(common::model, PLAIN);
}

#[test]
fn token_major_on_host() {
    programs(common::host, PLAIN);
}

const LAYER_MAJOR: Kind = Kind {
    layout: Layout::LayerMajor,
    ..PLAIN
};

#[test]
fn layer_major_on_model() {
    programs(common::model, LAYER_MAJOR);
}

#[test]
fn layer_major_on_host() {
    programs(common::host, LAYER_MAJOR);
}

#[test]
fn zeroed_on_host() {
    let zeroed = true;
    programs(common::host, Kind { zeroed, ..PLAIN });
}

#[test]
fn forks_on_model() {
    programs(common::model, Kind { forks: 8, ..PLAIN });
}

#[test]
fn forks_on_host() {
    programs(common::host, Kind { forks: 8, ..PLAIN });
}

#[test]
fn forks_layer_major_on_host() {
    let forks = 8;
    programs(
        common::host,
        Kind {
            forks,
            ..LAYER_MAJOR
        },
    );
}

#[test]
fn forks_zeroed_on_host() {
    let (forks, zeroed) = (8, true);
    programs(
        common::host,
        Kind {
            forks,
            zeroed,
            ..PLAIN
        },
    );
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn forks_hardened_on_host() {
    let (forks, hardened) = (8, true);
    programs(
        common::host,
        Kind {
            forks,
            hardened,
            ..PLAIN
        },
    );
}
