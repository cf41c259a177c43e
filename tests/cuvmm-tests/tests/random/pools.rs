//! Random programs of operations on a pool, compared with a small reference model. The programs
//! hold streams back, run kernels that write late, inject faults, register and unregister tenants,
//! and let peers write to exported memory after its block is gone.
//!
//! The reference knows which block holds which byte in which granule, how much each tenant uses,
//! and what each tenant is guaranteed. It knows nothing of extents, fences or the driver.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::MetadataExt;

use crate::common;
use crate::common::books::figures;
use crate::common::{D0, G, Rig};
use crate::programs::run;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::host::HostMemory;
use cuvmm::driver::model::{Backing, RandomFailures};
use cuvmm::driver::{CUresult, Exported, HandleTypes};
use cuvmm::error::{ArgumentError, BlockError, MemoryError, PoolError};
use cuvmm::{
    Access, AccessGrant, Block, Device, Extent, Hardened, Lease, Limit, Mapping, Physical, Pool,
    PoolStats, Region, Registration, Reservation, Stream, Tenant, TenantStats,
};
use proptest::prelude::*;

const LIMIT: u64 = 24;
const GUARANTEE: u64 = 6;
const TENANTS: usize = 3;
const STREAMS: usize = 3;
/// The byte that a hardened pool fills memory with. No tenant writes it.
const FILL: u8 = 0xFF;
/// The byte that a peer writes to the memory of a block that is gone. No tenant writes it.
const STAMP: u8 = 0xFA;

#[derive(Clone, Debug)]
enum Step {
    Allocate {
        tenant: usize,
        granules: u64,
        spare: u64,
        stream: usize,
        home: bool,
        zeroed: bool,
    },
    /// Allocates adjacent blocks.
    Adjacent {
        tenant: usize,
        granules: u64,
        count: usize,
        stream: usize,
        zeroed: bool,
    },
    /// Allocates a block of the tenant of another block, at a place beside that block in its row.
    Beside {
        block: usize,
        distance: isize,
        granules: u64,
        stream: usize,
        home: bool,
        zeroed: bool,
    },
    Grow {
        block: usize,
        by: u64,
    },
    Shrink {
        block: usize,
        by: u64,
    },
    Drop {
        block: usize,
    },
    /// Queues a kernel that fills the whole block on the block's home stream.
    Kernel {
        block: usize,
    },
    /// Queues a kernel that fills the block on another stream, which is recorded as a user. The two
    /// streams are not ordered.
    Elsewhere {
        block: usize,
        stream: usize,
    },
    Lease {
        block: usize,
    },
    EndLease {
        lease: usize,
    },
    /// Exports a block to a peer, and keeps the export's lease if `keep` is set.
    Export {
        block: usize,
        keep: bool,
    },
    Hold {
        stream: usize,
    },
    LetGo {
        stream: usize,
    },
    Trim {
        keep: u64,
    },
    Compact {
        steps: u64,
    },
    /// Unregisters a tenant and registers it anew. Its blocks live on.
    Renew {
        tenant: usize,
    },
    Limit {
        granules: u64,
    },
    /// Changes a tenant's guarantee, limit and priority.
    Terms {
        tenant: usize,
        guarantee: u64,
        limit: u64,
        priority: i32,
    },
    /// Makes the `k`th driver call of the next operation fail.
    Fault {
        k: u64,
        memory: bool,
    },
    Check,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..TENANTS, 0u64..9, 0u64..9, 0..STREAMS, any::<bool>(), any::<bool>()).prop_map(
            |(tenant, granules, spare, stream, home, zeroed)| Step::Allocate {
                tenant, granules, spare, stream, home, zeroed
            }
        ),
        2 => (0..TENANTS, 0u64..4, 1usize..4, 0..STREAMS, any::<bool>()).prop_map(
            |(tenant, granules, count, stream, zeroed)| Step::Adjacent {
                tenant, granules, count, stream, zeroed
            }
        ),
        3 => (0usize..8, -2isize..3, 0u64..5, 0..STREAMS, any::<bool>(), any::<bool>()).prop_map(
            |(block, distance, granules, stream, home, zeroed)| Step::Beside {
                block, distance, granules, stream, home, zeroed
            }
        ),
        4 => (0usize..8, 1u64..5).prop_map(|(block, by)| Step::Grow { block, by }),
        3 => (0usize..8, 1u64..5).prop_map(|(block, by)| Step::Shrink { block, by }),
        6 => (0usize..8).prop_map(|block| Step::Drop { block }),
        6 => (0usize..8).prop_map(|block| Step::Kernel { block }),
        3 => (0usize..8, 0..STREAMS).prop_map(|(block, stream)| Step::Elsewhere { block, stream }),
        2 => (0usize..8).prop_map(|block| Step::Lease { block }),
        2 => (0usize..4).prop_map(|lease| Step::EndLease { lease }),
        2 => (0..STREAMS).prop_map(|stream| Step::Hold { stream }),
        3 => (0..STREAMS).prop_map(|stream| Step::LetGo { stream }),
        1 => (0u64..LIMIT).prop_map(|keep| Step::Trim { keep }),
        1 => (1u64..4).prop_map(|steps| Step::Compact { steps }),
        1 => (0..TENANTS).prop_map(|tenant| Step::Renew { tenant }),
        2 => (0..=LIMIT).prop_map(|granules| Step::Limit { granules }),
        2 => (0..TENANTS, 0..=LIMIT, 0..=2 * LIMIT, -1..3i32).prop_map(
            |(tenant, guarantee, limit, priority)| Step::Terms { tenant, guarantee, limit, priority }
        ),
        3 => (1u64..12, any::<bool>()).prop_map(|(k, memory)| Step::Fault { k, memory }),
        2 => Just(Step::Check),
    ]
}

/// Steps with fewer shapes and more held work, so that reuse of exported memory would soon be
/// noticed.
fn sharing_step() -> impl Strategy<Value = Step> {
    let block = || 0usize..3;
    prop_oneof![
        30 => step(),
        5 => (0..2usize, 0u64..4, 0..2usize, any::<bool>()).prop_map(
            |(tenant, granules, stream, zeroed)| Step::Allocate {
                tenant, granules, spare: 4 - granules, stream, home: true, zeroed
            }
        ),
        6 => (block(), any::<bool>()).prop_map(|(block, keep)| Step::Export { block, keep }),
        4 => block().prop_map(|block| Step::Kernel { block }),
        4 => block().prop_map(|block| Step::Drop { block }),
        3 => (0..2usize).prop_map(|stream| Step::Hold { stream }),
        3 => Just(Step::Check),
    ]
}

/// The known content of a granule.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Content {
    Byte(u8),
    /// The granule of a new block. In a hardened pool it holds no tenant's data.
    New,
    /// Zero, or a byte that its own tenant wrote before.
    Own,
}

/// A peer's import of a block.
struct Import {
    extents: Vec<(u64, Mapping)>,
    /// Up to this offset the memory has been the block's ever since the export.
    valid: u64,
    stamped: bool,
}

impl Import {
    fn of(peer: &Device, handles: &[(Extent, Exported)], size: u64) -> Self {
        let extents = handles.iter().map(|(extent, handle)| {
            let physical = Physical::import(peer, handle, extent.size).unwrap();
            let reservation = Reservation::new(peer, extent.size).unwrap();
            let mapping = reservation.map(0, &physical).unwrap();
            let access = [AccessGrant::new(peer, Access::ReadWrite)];
            mapping.set_access(&access).unwrap();
            (extent.offset, mapping)
        });
        Self {
            extents: extents.collect(),
            valid: size,
            stamped: false,
        }
    }

    /// Checks that the peer sees the contents of the block, as far as they are known.
    fn shows(&self, granules: &[Content]) {
        for (start, mapping) in &self.extents {
            for offset in (0..mapping.size()).step_by(G as usize) {
                let at = start + offset;
                let content = granules.get((at / G) as usize);
                if let (Some(Content::Byte(byte)), true) = (content, at < self.valid) {
                    assert_eq!(
                        ends(mapping, offset),
                        [[*byte; 4]; 2],
                        "the block's bytes at {at}"
                    );
                }
            }
        }
    }

    /// Overwrites the import once the block is gone. Later calls check that the peer's bytes are
    /// unchanged.
    fn stamp(&mut self) {
        for (start, mapping) in &self.extents {
            for offset in (0..mapping.size()).step_by(G as usize) {
                if self.stamped {
                    let seen = ends(mapping, offset);
                    assert_eq!(
                        seen,
                        [[STAMP; 4]; 2],
                        "the peer's bytes at {}",
                        start + offset
                    );
                }
                for at in [offset, offset + G - 4] {
                    mapping.write(at, &[STAMP; 4]).unwrap();
                }
            }
        }
        self.stamped = true;
    }
}

/// Reads the first and the last bytes of a granule.
fn ends(mapping: &Mapping, granule: u64) -> [[u8; 4]; 2] {
    [granule, granule + G - 4].map(|at| {
        let mut bytes = [0; 4];
        mapping.read(at, &mut bytes).unwrap();
        bytes
    })
}

struct Known {
    block: Block,
    imports: Vec<Import>,
    tenant: usize,
    stream: usize,
    zeroed: bool,
    /// Another stream may still write to the block.
    elsewhere: bool,
    granules: Vec<Content>,
}

/// The imports of the peers, which keep them to the end.
#[derive(Default)]
struct Peers {
    /// Created when first needed.
    rig: Option<Rig<HostMemory>>,
    /// Imports of blocks that are gone, with the final contents of these blocks.
    gone: Vec<(Import, Vec<Content>)>,
    /// Exported handles on a machine without readable memory.
    handles: Vec<(Extent, Exported)>,
    /// Sizes of the exported memory, by the identity of the physical allocation.
    exported: BTreeMap<(u64, u64), u64>,
}

impl Peers {
    fn device(&mut self) -> &Device {
        &self.rig.get_or_insert_with(common::host).device
    }

    fn count(&mut self, handles: &[(Extent, Exported)]) {
        for (extent, handle) in handles {
            let Exported::Fd(fd) = handle else {
                panic!("no descriptor: {handle:?}");
            };
            let seen = File::from(fd.try_clone().unwrap()).metadata().unwrap();
            self.exported.insert((seen.dev(), seen.ino()), extent.size);
        }
    }
}

struct World<'a, B: Backing> {
    rig: &'a Rig<B>,
    /// The peers, if blocks are exported.
    peers: Option<Peers>,
    known: Vec<Known>,
    leases: Vec<Lease>,
    tenants: Vec<Tenant>,
    streams: Vec<Stream>,
    pool: Pool,
    held: [bool; STREAMS],
    /// Bytes that the pool held from the driver after the last operation.
    had: Cell<u64>,
    written: u8,
    hardened: Option<Hardened>,
    /// The addresses of all blocks so far, if no address may be used twice.
    seen: Option<BTreeSet<u64>>,
}

/// Returns the bytes that a tenant writes: not zero, and not written by any other tenant.
fn bytes_of(tenant: usize) -> std::ops::Range<u8> {
    let first = 1 + tenant as u8 * 80;
    first..first + 80
}

impl<'a, B: Backing> World<'a, B> {
    fn new(
        rig: &'a Rig<B>,
        Kind {
            hardened, peers, ..
        }: Kind,
    ) -> Self {
        let mut builder = common::limited(rig, LIMIT).largest_extent(4 * G);
        if let Some(hardened) = hardened {
            builder = builder.hardened(hardened);
        }
        if peers {
            builder = builder.shareable(HandleTypes::POSIX_FD);
        }
        let pool = builder.build().unwrap();
        let tenants = (0..TENANTS)
            .map(|tenant| Self::register(&pool, tenant))
            .collect();
        let streams = (0..STREAMS)
            .map(|_| Stream::new(&rig.device).unwrap())
            .collect();
        Self {
            rig,
            peers: peers.then(Peers::default),
            known: vec![],
            leases: vec![],
            tenants,
            streams,
            pool,
            held: [false; STREAMS],
            had: Cell::new(0),
            written: 0,
            hardened,
            seen: (hardened == Some(resting_for_ever())).then(BTreeSet::new),
        }
    }

    fn register(pool: &Pool, tenant: usize) -> Tenant {
        let builder = || pool.tenant(["a", "b", "c"][tenant]).priority(tenant as i32);
        match builder().guarantee(GUARANTEE * G).register() {
            Ok(tenant) => tenant,
            // The blocks of a draining tenant may leave too little for the guarantee.
            Err(PoolError::GuaranteeTooLarge { .. }) => builder().register().unwrap(),
            Err(error) => panic!("{error}"),
        }
    }

    /// Returns `true` if all idle memory can be reclaimed: no stream is held back, and no lease is
    /// alive.
    fn at_rest(&self) -> bool {
        self.leases.is_empty() && !self.held.contains(&true)
    }

    fn refused(&self, tenant: usize, more: u64, error: &BlockError, faulted: bool) {
        // A range of addresses needs no memory.
        let usual = more > 0 && matches!(error, BlockError::OutOfMemory(_));
        assert!(usual || faulted, "{error}");
        // The guarantee is always available, unless memory is blocked by pending work, a lease or a
        // failure, or is in an extent that is partly in use.
        let stats = self.pool.stats();
        if !faulted && self.at_rest() && stats.quarantined == 0 && stats.stranded == 0 {
            let mine = stats
                .tenants
                .iter()
                .find(|stats| !stats.draining && stats.name == self.tenants[tenant].name());
            let Some(mine) = mine else { return };
            let used = mine.in_use + mine.padding;
            // A limit that was lowered below the memory in use may leave less than the guarantees.
            let used_by = |tenant: &TenantStats| tenant.in_use + tenant.padding;
            let all = stats.tenants.iter();
            let claimed: u64 = all.map(|it| it.guarantee.max(used_by(it))).sum();
            assert!(
                used + more > mine.guarantee || claimed > stats.limit,
                "refused below its guarantee: {error}"
            );
        }
    }

    fn run(&mut self, step: &Step, faulted: bool) {
        match *step {
            Step::Allocate {
                tenant,
                granules,
                spare,
                stream,
                home,
                zeroed,
            } => {
                let size = granules * G;
                let mut builder = self.tenants[tenant]
                    .block(size)
                    .capacity((size + spare * G).max(G))
                    .zeroed(zeroed);
                if home {
                    builder = builder.home_stream(&self.streams[stream]);
                }
                // Without a home stream a scrub is waited for. The default stream is never held
                // back, so the wait ends.
                match builder.try_allocate() {
                    Ok(block) => self.know(block, tenant, stream, zeroed),
                    Err(error) => self.refused(tenant, size, &error, faulted),
                }
            }
            Step::Adjacent {
                tenant,
                granules,
                count,
                stream,
                zeroed,
            } => {
                let size = granules * G;
                let builder = self.tenants[tenant].block(size).capacity(4 * G);
                let builder = builder.home_stream(&self.streams[stream]).zeroed(zeroed);
                match builder.try_allocate_adjacent(count) {
                    Ok(blocks) => {
                        let at = |index: usize| blocks[index].address().0;
                        let guards = match self.hardened {
                            None => 0,
                            Some(hardened) if hardened == hasty() => 4 * G,
                            Some(_) => 2 * G,
                        };
                        let distances: Vec<u64> = (1..count).map(|i| at(i) - at(i - 1)).collect();
                        assert_eq!(distances, vec![4 * G + guards; count - 1]);
                        for block in blocks {
                            self.know(block, tenant, stream, zeroed);
                        }
                    }
                    Err(error) => self.refused(tenant, count as u64 * size, &error, faulted),
                }
            }
            Step::Beside {
                block,
                distance,
                granules,
                stream,
                home,
                zeroed,
            } => self.fill(
                block,
                distance,
                (granules * G, zeroed),
                (stream, home),
                faulted,
            ),
            Step::Grow { block, by } => {
                let Some(index) = self.index(block) else {
                    return;
                };
                let known = &mut self.known[index];
                let size = (known.block.size() + by * G).min(known.block.capacity());
                let more = size - known.block.size();
                let address = known.block.address();
                match known.block.try_grow_to(size) {
                    Ok(()) => {
                        let fresh = if known.zeroed {
                            Content::Byte(0)
                        } else {
                            Content::Own
                        };
                        known.granules.resize((size / G) as usize, fresh);
                        assert_eq!(known.block.address(), address);
                    }
                    Err(BlockError::Unregistered { .. }) => {}
                    Err(error) => {
                        let tenant = known.tenant;
                        self.refused(tenant, more, &error, faulted);
                    }
                }
            }
            Step::Shrink { block, by } => {
                let Some(index) = self.index(block) else {
                    return;
                };
                let known = &mut self.known[index];
                let size = known.block.size().saturating_sub(by * G);
                known.block.shrink_to(size).unwrap();
                known.granules.truncate((size / G) as usize);
                for import in &mut known.imports {
                    import.valid = import.valid.min(size);
                }
            }
            Step::Drop { block } => {
                if let Some(index) = self.index(block) {
                    let Known {
                        imports, granules, ..
                    } = self.known.remove(index);
                    if let Some(peers) = &mut self.peers {
                        let gone = imports.into_iter().map(|it| (it, granules.clone()));
                        peers.gone.extend(gone);
                    }
                }
            }
            Step::Export { block, keep } => self.export(block, keep, faulted),
            Step::Kernel { block } => {
                let Some(index) = self.index(block) else {
                    return;
                };
                let byte = self.launch(index, self.known[index].stream);
                let known = &mut self.known[index];
                known.granules.fill(match known.elsewhere {
                    true => Content::Own,
                    false => Content::Byte(byte),
                });
            }
            Step::Elsewhere { block, stream } => {
                let Some(index) = self.index(block) else {
                    return;
                };
                self.known[index]
                    .block
                    .record_use(&self.streams[stream])
                    .unwrap();
                self.launch(index, stream);
                self.known[index].elsewhere = true;
                self.known[index].granules.fill(Content::Own);
            }
            Step::Lease { block } => {
                if let Some(index) = self.index(block) {
                    self.leases.push(self.known[index].block.lease());
                }
            }
            Step::EndLease { lease } => {
                if !self.leases.is_empty() {
                    let index = lease % self.leases.len();
                    self.leases.remove(index);
                }
            }
            Step::Hold { stream } => {
                self.held[stream] = true;
                self.rig.machine.hold(D0, self.streams[stream].as_raw());
            }
            Step::LetGo { stream } => {
                self.held[stream] = false;
                self.rig
                    .machine
                    .release_stream(D0, self.streams[stream].as_raw());
            }
            Step::Trim { keep } => match self.pool.trim(keep * G) {
                Ok(_) => {}
                Err(error) => assert!(faulted, "{error}"),
            },
            Step::Compact { steps } => match self.pool.compact(|done| done.steps < steps) {
                Ok(_) => {}
                Err(error) => assert!(faulted, "{error}"),
            },
            Step::Renew { tenant } => {
                let gone = self.tenants[tenant].clone();
                gone.unregister();
                self.tenants[tenant] = Self::register(&self.pool, tenant);
            }
            Step::Limit { granules } => self.set_limit(granules * G, faulted),
            Step::Terms {
                tenant,
                guarantee,
                limit,
                priority,
            } => self.set_terms(tenant, (guarantee * G, limit * G, priority), faulted),
            Step::Fault { .. } => {}
            Step::Check => self.check(),
        }
        self.books();
    }

    fn fill(
        &mut self,
        block: usize,
        distance: isize,
        (size, zeroed): (u64, bool),
        (stream, home): (usize, bool),
        faulted: bool,
    ) {
        let Some(index) = self.index(block) else {
            return;
        };
        let (tenant, neighbor) = (self.known[index].tenant, &self.known[index].block);
        let mut builder = self.tenants[tenant].block(size).capacity(4 * G);
        if home {
            builder = builder.home_stream(&self.streams[stream]);
        }
        match builder
            .zeroed(zeroed)
            .try_allocate_beside(neighbor, distance)
        {
            Ok(filled) => {
                let stride = filled.address().0.abs_diff(neighbor.address().0);
                assert_eq!(stride, 4 * G * distance.unsigned_abs() as u64);
                self.know(filled, tenant, stream, zeroed);
            }
            Err(BlockError::PlaceInUse { .. } | BlockError::WrongTenant { .. }) => {}
            Err(BlockError::Argument(
                ArgumentError::NoSuch { .. } | ArgumentError::TooLarge { .. },
            )) => {}
            Err(BlockError::Memory(MemoryError::Quarantined { .. })) => {
                assert!(self.pool.stats().quarantined > 0);
            }
            Err(error) => self.refused(tenant, size, &error, faulted),
        }
    }

    fn set_limit(&self, bytes: u64, faulted: bool) {
        let before = self.pool.stats();
        let guaranteed: u64 = before.tenants.iter().map(|tenant| tenant.guarantee).sum();
        match self.pool.set_limit(Limit::Bytes(bytes)) {
            Ok(change) => {
                let stats = self.pool.stats();
                let had = stats.committed + stats.free + stats.quarantined;
                assert_eq!((change.limit, stats.limit), (bytes, bytes));
                assert_eq!(change.excess, had.saturating_sub(bytes), "{stats:#?}");
            }
            Err(PoolError::BelowGuarantees { .. }) => {
                assert!(bytes < guaranteed);
                assert_eq!(self.pool.stats().limit, before.limit);
            }
            Err(PoolError::Argument(ArgumentError::TooSmall { .. })) => assert_eq!(bytes, 0),
            Err(error) => assert!(faulted, "{error}"),
        }
    }

    fn set_terms(
        &self,
        tenant: usize,
        (guarantee, limit, priority): (u64, u64, i32),
        faulted: bool,
    ) {
        let tenant = &self.tenants[tenant];
        let before = tenant.stats();
        match tenant.set_limit(limit) {
            Ok(change) => {
                let held = tenant.stats().committed;
                assert_eq!(change.excess, held.saturating_sub(limit));
            }
            Err(PoolError::Argument(ArgumentError::TooSmall { .. })) => {
                assert!(limit < before.guarantee)
            }
            Err(error) => assert!(faulted, "{error}"),
        }
        match tenant.set_guarantee(guarantee) {
            Ok(()) => assert_eq!(tenant.stats().guarantee, guarantee),
            Err(_) => assert_eq!(tenant.stats().guarantee, before.guarantee),
        }
        tenant.set_priority(priority).unwrap();
    }

    fn know(&mut self, block: Block, tenant: usize, stream: usize, zeroed: bool) {
        let fresh = match zeroed {
            true => Content::Byte(0),
            false => Content::New,
        };
        let at = block.address().0;
        let again = self.seen.as_mut().is_some_and(|seen| !seen.insert(at));
        assert!(!again, "{at:#x} was used by another block");
        let granules = vec![fresh; (block.size() / G) as usize];
        self.known.push(Known {
            block,
            imports: vec![],
            tenant,
            stream,
            zeroed,
            elsewhere: false,
            granules,
        });
    }

    fn export(&mut self, block: usize, keep: bool, faulted: bool) {
        let (Some(index), Some(peers)) = (self.index(block), &mut self.peers) else {
            return;
        };
        let known = &mut self.known[index];
        if known.block.size() == 0 {
            assert!(known.block.export(HandleTypes::POSIX_FD).is_err());
            return;
        }
        let before = self.pool.stats().exported;
        let exported = match known.block.export(HandleTypes::POSIX_FD) {
            Ok(exported) => exported,
            Err(error) => {
                assert!(faulted, "{error}");
                // Memory of an earlier export may have been released by this operation.
                assert!(self.pool.stats().exported <= before);
                return;
            }
        };
        let extents: Vec<Extent> = known.block.extents();
        let used = extents.partition_point(|extent| extent.offset < known.block.size());
        let handed = exported.handles().iter().map(|(extent, _)| *extent);
        assert!(handed.eq(extents[..used].iter().copied()));
        let (handles, lease) = exported.into_parts();
        self.leases.extend(keep.then_some(lease));
        peers.count(&handles);
        if self.rig.keeps_bytes() {
            let import = Import::of(peers.device(), &handles, known.block.size());
            known.imports.push(import);
        } else {
            peers.handles.extend(handles);
        }
    }

    /// Queues a kernel that fills a block with one of its tenant's bytes, which it returns.
    fn launch(&mut self, index: usize, stream: usize) -> u8 {
        let known = &self.known[index];
        self.written = (self.written + 1) % 80;
        let byte = bytes_of(known.tenant).start + self.written;
        let writes = vec![(known.block.address(), known.block.size(), byte)];
        let stream = self.streams[stream].as_raw();
        if known.block.size() > 0 {
            let queued = self.rig.machine.queue_kernel(D0, stream, vec![], writes);
            queued.unwrap();
        }
        byte
    }

    fn index(&self, block: usize) -> Option<usize> {
        (!self.known.is_empty()).then(|| block % self.known.len())
    }

    /// Checks that the pool's figures add up, and agree with the reference and with the driver.
    fn books(&self) {
        let stats = figures(&self.pool);
        // While the pool is over a lowered limit, it adds no memory.
        let had = stats.committed + stats.free + stats.quarantined;
        let most = stats.limit.max(self.had.replace(had));
        assert!(had <= most, "{stats:#?}");
        for tenant in stats.tenants.iter().filter(|tenant| !tenant.draining) {
            assert!(tenant.guarantee <= stats.limit, "{tenant:#?}");
        }
        self.physical_books(&stats);
        let in_use: u64 = self.known.iter().map(|known| known.block.size()).sum();
        assert_eq!(stats.in_use, in_use);
        assert_eq!(stats.mappings, self.rig.machine.live().mappings as u64);
        // Addresses that a failure left reserved no longer belong to the pool.
        assert!(stats.addresses <= self.rig.machine.live().reserved_bytes);
        let tenants: u64 = stats.tenants.iter().map(|tenant| tenant.addresses).sum();
        assert!(tenants + stats.resting_addresses <= stats.addresses);
        assert!(
            self.hardened.is_none() || stats.precommitted == 0,
            "{stats:#?}"
        );
        assert!(
            self.rig.device.lost().is_none(),
            "memory was unmapped under a kernel"
        );
    }

    fn physical_books(&self, stats: &PoolStats) {
        let held = stats.committed + stats.free + stats.quarantined;
        let physical = self.rig.machine.live().physical_bytes;
        let Some(peers) = &self.peers else {
            assert_eq!(held, physical, "{stats:#?}");
            return;
        };
        // Memory without a handle in this process is held by the peers alone.
        let handles = self.rig.machine.snapshot().physicals;
        let here: u64 = handles.iter().map(|physical| physical.size).sum();
        assert_eq!(held, here, "{stats:#?}");
        assert!(stats.exported <= stats.committed, "{stats:#?}");
        let exported: u64 = peers.exported.values().sum();
        let counted = stats.exported + (physical - here);
        let quarantined = counted..=counted + stats.quarantined;
        assert!(quarantined.contains(&exported), "{exported}: {stats:#?}");
    }

    /// Runs all pending work, and checks every byte that the reference knows.
    fn check(&mut self) {
        for stream in 0..STREAMS {
            self.run_stream(stream);
        }
        let hardened = self.hardened.is_some();
        if let Some(peers) = &mut self.peers {
            // Check all imports before any is overwritten: a block may have been exported twice.
            let fresh = peers.gone.iter().filter(|(import, _)| !import.stamped);
            fresh.for_each(|(import, granules)| import.shows(granules));
            peers.gone.iter_mut().for_each(|(import, _)| import.stamp());
        }
        for known in &mut self.known {
            known.elsewhere = false;
            known
                .imports
                .iter()
                .for_each(|import| import.shows(&known.granules));
            for (granule, content) in known.granules.iter().enumerate() {
                let mut bytes = [0; 4];
                for offset in [0, G - 4] {
                    known
                        .block
                        .read(granule as u64 * G + offset, &mut bytes)
                        .unwrap();
                    if !self.rig.keeps_bytes() {
                        continue;
                    }
                    let own = bytes_of(known.tenant);
                    for byte in bytes {
                        match content {
                            Content::Byte(expected) => assert_eq!(byte, *expected),
                            Content::New if hardened => {
                                assert!(byte == 0 || byte == FILL, "a byte of an earlier block");
                            }
                            Content::New | Content::Own => {
                                let filled = hardened && byte == FILL;
                                let known = byte == 0 || filled || own.contains(&byte);
                                assert!(known, "a byte of another tenant");
                            }
                        }
                    }
                }
            }
        }
    }

    fn run_stream(&mut self, stream: usize) {
        self.held[stream] = false;
        self.rig
            .machine
            .release_stream(D0, self.streams[stream].as_raw());
    }
}

/// A hardened pool that never reuses an address.
const fn resting_for_ever() -> Hardened {
    let hardened = Hardened::new().fill(Some(FILL));
    hardened.rest_blocks(u64::MAX).rest_addresses(u64::MAX)
}

/// A hardened pool that reuses addresses early.
const fn hasty() -> Hardened {
    Hardened::new().fill(Some(FILL)).rest_blocks(2).guard(2 * G)
}

/// The pool that a program runs on.
#[derive(Clone, Copy)]
struct Kind {
    hardened: Option<Hardened>,
    /// One in this number of driver calls fails at random.
    spite: Option<u64>,
    /// Blocks are exported.
    peers: bool,
}

const PLAIN: Kind = Kind {
    hardened: None,
    spite: None,
    peers: false,
};

fn program(rig: Rig<impl Backing>, steps: &[Step], kind: Kind) {
    let spite = kind.spite;
    let mut world = World::new(&rig, kind);
    let mut next: Option<(u64, bool)> = None;
    for (seed, step) in (0..).zip(steps) {
        if let Step::Fault { k, memory } = *step {
            next = Some((k, memory));
            continue;
        }
        // Two failures in one compaction may lose the memory that it moves (`BlockError::Lost`).
        if spite.is_some() && matches!(step, Step::Compact { .. }) {
            continue;
        }
        let fault = if matches!(step, Step::Check) {
            None
        } else {
            next.take()
        };
        if let Some((k, memory)) = fault {
            // When the driver reports that addresses are exhausted, resting addresses return to it.
            world.seen = world.seen.filter(|_| !memory);
            let code = if memory {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY
            } else {
                CUresult::CUDA_ERROR_UNKNOWN
            };
            rig.faults.arm(Fault::nth(k, code));
        }
        let spite = spite.filter(|_| !matches!(step, Step::Check));
        rig.machine.set_random_failures(
            spite.map(|one_in| RandomFailures::new(seed, one_in).giving_back(4 * one_in)),
        );
        world.run(step, fault.is_some() || spite.is_some());
        rig.machine.set_random_failures(None);
        rig.faults.disarm();
    }
    world.check();
    let World {
        peers,
        known,
        leases,
        tenants,
        streams,
        pool,
        ..
    } = world;
    drop((known, leases, tenants, streams));
    pool.close().unwrap();
    drop(peers);
    common::only_counted_left(&rig);
}

// I-1
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn programs_on_the_model() {
    run(8000, step(), 1..40, |steps| {
        program(common::model(), steps, PLAIN)
    });
}

/// Memory cached behind the first blocks of a row is reclaimed for the last block.
#[test]
fn a_row_has_what_lies_idle_in_its_own_slots() {
    let allocate = |tenant, granules, spare| Step::Allocate {
        tenant,
        granules,
        spare,
        stream: 0,
        home: false,
        zeroed: false,
    };
    let adjacent = |granules, zeroed| Step::Adjacent {
        tenant: 0,
        granules,
        count: 3,
        stream: 0,
        zeroed,
    };
    let steps = [
        allocate(2, 6, 2),
        allocate(0, 5, 0),
        Step::Drop { block: 5 },
        Step::Grow { block: 0, by: 2 },
        allocate(2, 4, 0),
        adjacent(3, true),
        adjacent(2, false),
    ];
    program(common::model(), &steps, PLAIN);
}

/// A change of a limit reports the excess after its end, at which failed calls are retried.
#[test]
fn a_limit_says_what_is_left_after_its_end() {
    let allocate = |tenant, granules| Step::Allocate {
        tenant,
        granules,
        spare: 0,
        stream: 0,
        home: false,
        zeroed: false,
    };
    let steps = [
        allocate(1, 7),
        allocate(2, 2),
        allocate(0, 8),
        Step::Grow { block: 0, by: 1 },
        allocate(1, 3),
        Step::Drop { block: 4 },
        Step::Adjacent {
            tenant: 2,
            granules: 1,
            count: 2,
            stream: 0,
            zeroed: false,
        },
        allocate(0, 1),
        Step::Fault {
            k: 2,
            memory: false,
        },
        Step::Limit { granules: 20 },
    ];
    program(common::model(), &steps, PLAIN);
}

/// Statistics make no driver call, even if an operation left work for the next one.
#[test]
fn a_look_takes_nothing_back() {
    let allocate = |tenant, granules| Step::Allocate {
        tenant,
        granules,
        spare: 0,
        stream: 0,
        home: false,
        zeroed: false,
    };
    let adjacent = Step::Adjacent {
        tenant: 0,
        granules: 2,
        count: 3,
        stream: 0,
        zeroed: false,
    };
    let steps = [
        allocate(2, 1),
        allocate(1, 5),
        allocate(2, 6),
        allocate(0, 3),
        Step::Grow { block: 0, by: 1 },
        adjacent,
        Step::Limit { granules: 18 },
        Step::Fault {
            k: 5,
            memory: false,
        },
        Step::Drop { block: 4 },
    ];
    program(common::model(), &steps, PLAIN);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn programs_on_the_host() {
    run(1200, step(), 1..40, |steps| {
        program(common::host(), steps, PLAIN)
    });
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn programs_in_spite_of_failures() {
    for hardened in [None, Some(hasty())] {
        let spite = Some(6);
        let kind = Kind {
            hardened,
            spite,
            peers: false,
        };
        run(600, step(), 1..40, |steps| {
            program(common::model(), steps, kind)
        });
        run(200, step(), 1..40, |steps| {
            program(common::host(), steps, kind)
        });
        let kind = Kind {
            peers: true,
            ..kind
        };
        run(600, sharing_step(), 1..40, |steps| {
            program(common::model(), steps, kind);
        });
        run(200, sharing_step(), 1..40, |steps| {
            program(common::host(), steps, kind);
        });
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn programs_that_export() {
    for (hardened, cases) in [(None, 750), (Some(hasty()), 250)] {
        let kind = Kind {
            hardened,
            peers: true,
            ..PLAIN
        };
        run(2 * cases, sharing_step(), 1..40, |steps| {
            program(common::model(), steps, kind);
        });
        run(cases, sharing_step(), 1..40, |steps| {
            program(common::host(), steps, kind);
        });
    }
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn programs_in_hardened_pools() {
    for hardened in [resting_for_ever(), hasty()] {
        let kind = Kind {
            hardened: Some(hardened),
            ..PLAIN
        };
        run(1000, step(), 1..40, |steps| {
            program(common::model(), steps, kind)
        });
        run(350, step(), 1..40, |steps| {
            program(common::host(), steps, kind)
        });
    }
}

#[derive(Clone, Debug)]
enum RegionStep {
    Commit {
        from: u64,
        granules: u64,
        fault: Option<u64>,
    },
    Decommit {
        from: u64,
        granules: u64,
        stream: bool,
    },
    Write {
        from: u64,
        granules: u64,
    },
    Reclaim,
    Register {
        from: u64,
        granules: u64,
    },
    EndRegistration {
        which: usize,
    },
    Hold,
    LetGo,
}

fn region_step() -> impl Strategy<Value = RegionStep> {
    let range = || (0u64..24, 1u64..12);
    prop_oneof![
        4 => (range(), prop::option::weighted(0.3, 1u64..12)).prop_map(
            |((from, granules), fault)| RegionStep::Commit { from, granules, fault }
        ),
        4 => (range(), any::<bool>()).prop_map(
            |((from, granules), stream)| RegionStep::Decommit { from, granules, stream }
        ),
        3 => range().prop_map(|(from, granules)| RegionStep::Write { from, granules }),
        2 => Just(RegionStep::Reclaim),
        2 => range().prop_map(|(from, granules)| RegionStep::Register { from, granules }),
        2 => (0usize..4).prop_map(|which| RegionStep::EndRegistration { which }),
        1 => Just(RegionStep::Hold),
        2 => Just(RegionStep::LetGo),
    ]
}

fn region_program(rig: Rig<impl Backing>, steps: &[RegionStep]) {
    const SIZE: u64 = 24;
    let stream = Stream::new(&rig.device).unwrap();
    let mut region = Region::builder(&rig.device, SIZE * G)
        .largest_extent(4 * G)
        .reserve()
        .unwrap();
    // The reference: which granules are committed, and which byte was written to each last.
    let mut committed: Vec<Option<Option<u8>>> = vec![None; SIZE as usize];
    let mut byte = 0u8;
    let mut registrations: Vec<Registration> = vec![];
    for step in steps {
        match *step {
            RegionStep::Commit {
                from,
                granules,
                fault,
            } => {
                let to = (from + granules).min(SIZE);
                if let Some(k) = fault {
                    rig.faults.arm(Fault::nth(k, CUresult::CUDA_ERROR_UNKNOWN));
                }
                let before = rig.machine.snapshot();
                let outcome = region.commit(from * G..to * G);
                let failed = rig.faults.injected() > 0;
                rig.faults.disarm();
                rig.faults.forget();
                match outcome {
                    Ok(()) => {
                        for granule in from..to {
                            committed[granule as usize].get_or_insert(None);
                        }
                    }
                    Err(error) => {
                        assert!(failed, "{error}");
                        assert_eq!(rig.machine.snapshot(), before);
                    }
                }
            }
            RegionStep::Decommit {
                from,
                granules,
                stream: named,
            } => {
                let range = from as usize..(from + granules).min(SIZE) as usize;
                let bytes = range.start as u64 * G..range.end as u64 * G;
                let kept = |one: &Registration| {
                    one.range().start < bytes.end && bytes.start < one.range().end
                };
                let whole = committed[range.clone()].iter().all(Option::is_some)
                    && !registrations.iter().any(kept);
                let outcome = if named {
                    region.decommit_after(bytes, std::slice::from_ref(&stream))
                } else {
                    region.decommit(bytes)
                };
                assert_eq!(outcome.is_ok(), whole);
                if whole {
                    committed[range].fill(None);
                }
            }
            RegionStep::Write { from, granules } => {
                let range = from as usize..(from + granules).min(SIZE) as usize;
                if committed[range.clone()].iter().all(Option::is_some) {
                    byte = byte.wrapping_add(1).max(1);
                    let at = cuvmm::driver::DeviceAddress(region.address().0 + from * G);
                    let size = range.len() as u64 * G;
                    rig.kernel(&stream, &[], &[(at, size, byte)]);
                    committed[range].fill(Some(Some(byte)));
                }
            }
            RegionStep::Reclaim => {
                region.purge().unwrap();
            }
            RegionStep::Register { from, granules } => {
                let to = (from + granules).min(SIZE);
                let whole = (from..to).all(|granule| committed[granule as usize].is_some());
                let outcome = region.register(from * G..to * G);
                assert_eq!(outcome.is_ok(), whole);
                registrations.extend(outcome);
            }
            RegionStep::EndRegistration { which } => {
                if which < registrations.len() {
                    registrations.swap_remove(which).close().unwrap();
                }
            }
            RegionStep::Hold => rig.machine.hold(D0, stream.as_raw()),
            RegionStep::LetGo => rig.machine.release_stream(D0, stream.as_raw()),
        }
        let expected = committed.iter().flatten().count() as u64 * G;
        assert_eq!(region.committed(), expected);
        assert_eq!(region.registrations(), registrations.len() as u64);
        for one in &registrations {
            let now = region.extents();
            assert!(one.extents().iter().all(|extent| now.contains(extent)));
        }
        assert_eq!(region.held(), rig.machine.live().physical_bytes);
        assert!(region.held() >= region.committed() + region.pending_free());
        for (granule, state) in committed.iter().enumerate() {
            let at = granule as u64 * G;
            assert_eq!(region.is_committed(at..at + G), state.is_some());
        }
    }
    rig.machine.release_all_streams(D0);
    for (granule, state) in committed.iter().enumerate() {
        if let (Some(Some(expected)), true) = (state, rig.keeps_bytes()) {
            let mut seen = [0; 8];
            region
                .read(&stream, granule as u64 * G + G - 8, &mut seen)
                .unwrap();
            assert_eq!(seen, [*expected; 8]);
        }
    }
    // Registered extents stay mapped without the region. Nothing else of it is left.
    let mut kept: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
    for extent in registrations.iter().flat_map(Registration::extents) {
        kept.entry(extent.offset).or_insert((extent.size, 0)).1 += 1;
    }
    match region.close() {
        Ok(()) => assert!(registrations.is_empty()),
        Err(refused) => {
            assert!(!registrations.is_empty());
            drop(refused.owner);
        }
    }
    while let Some(one) = registrations.pop() {
        assert_eq!(rig.machine.live().mappings, kept.len());
        let bytes = kept.values().map(|(size, _)| size).sum::<u64>();
        assert_eq!(rig.machine.live().physical_bytes, bytes);
        let writes = |extent: &Extent| (extent.address, extent.size, 9);
        let writes: Vec<_> = one.extents().iter().map(writes).collect();
        rig.kernel(&stream, &[], &writes);
        for extent in one.extents() {
            if let Some((_, times)) = kept.get_mut(&extent.offset) {
                *times -= 1;
            }
        }
        kept.retain(|_, (_, times)| *times > 0);
        drop(one);
    }
    rig.device.synchronize().unwrap();
    drop(stream);
    common::nothing_left(rig);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn region_programs() {
    run(2000, region_step(), 1..30, |steps| {
        region_program(common::model(), steps)
    });
    run(500, region_step(), 1..30, |steps| {
        region_program(common::host(), steps)
    });
}
