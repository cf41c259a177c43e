//! A pool on a model driver with live blocks, and idle memory for each tenant.

use std::iter;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use cuvmm::driver::model::{ModelDriver, ModelOptions};
use cuvmm::ledger::Remote;
use cuvmm::{
    Allocation, Block, Device, DeviceVec, Heap, KvCache, Ledger, Limit, PagedKv, Pool, Region,
    SparseArray, Stream, Tenant,
};

use crate::marks::Marks;

/// The model's granule.
pub(crate) const GRANULE: u64 = 2 << 20;

/// The number of blocks of each tenant that live all the time.
const BLOCKS_EACH: usize = 100;

/// Memory for blocks that a case allocates in addition.
const ROOM: u64 = 64 << 30;

/// The number of blocks that live beside the block in question.
#[derive(Clone, Copy)]
pub(crate) enum Size {
    /// 100 blocks of one tenant.
    Few,
    /// 100,000 blocks of 1,000 tenants.
    Many,
}

impl Size {
    pub(crate) fn named(name: &str) -> Result<Self> {
        match name {
            "few" => Ok(Self::Few),
            "many" => Ok(Self::Many),
            _ => bail!("a crowd is few or many, not {name}"),
        }
    }

    const fn tenants(self) -> usize {
        match self {
            Self::Few => 1,
            Self::Many => 1_000,
        }
    }
}

/// The place of idle blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Idle {
    /// In the stream cache of the stream it was freed on.
    StreamCache,
    /// On the pool's own lists.
    Pool,
}

pub(crate) struct Crowd {
    pub(crate) size: Size,
    pub(crate) growing: Option<Block>,
    pub(crate) tiles: Option<SparseArray<u8>>,
    pub(crate) cache: Option<KvCache>,
    pub(crate) paged: Option<PagedKv>,
    pub(crate) region: Option<Region>,
    pub(crate) vector: Option<DeviceVec<u32>>,
    /// For the case of a heap, with what it has allocated.
    pub(crate) heap: Option<(Heap, Vec<Allocation>)>,
    pub(crate) kept: Vec<Block>,
    /// The number of allocations so far, from which different sizes are derived.
    pub(crate) made: u64,
    pub(crate) pool: Pool,
    /// The ledger that grants the pool's memory, if one does.
    pub(crate) ledger: Option<Ledger>,
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    pub(crate) tenants: Vec<Tenant>,
    next: usize,
    _living: Vec<Block>,
    directory: Option<Directory>,
}

/// A directory of this process for a ledger, removed when it is dropped.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        let name = format!("cuvmm-counted-{}", std::process::id());
        let memory = PathBuf::from("/dev/shm");
        // Not every file system is fit for a ledger.
        let folder = if memory.is_dir() {
            memory
        } else {
            std::env::temp_dir()
        };
        Self(folder.join(name))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // What is left is small, and its name is no other process's.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Crowd {
    /// Creates a crowd with `idle` freed blocks of the tenants whose turn is next.
    pub(crate) fn new(size: Size, place: Idle, idle: usize, in_ledger: bool) -> Result<Self> {
        let all = (size, size.tenants(), BLOCKS_EACH);
        Self::of(all, (place, idle), ROOM, in_ledger)
    }

    /// Creates a crowd of one tenant without blocks, and memory for many.
    pub(crate) fn alone(size: Size) -> Result<Self> {
        Self::of((size, 1, 0), (Idle::Pool, 0), ROOM, false)
    }

    /// Creates a crowd of 100 tenants with 2 blocks each, and 200 freed blocks.
    pub(crate) fn hundred(size: Size) -> Result<Self> {
        Self::of((size, 100, 2), (Idle::Pool, 200), ROOM, false)
    }

    /// Creates a crowd of 100 tenants whose 10,000 freed blocks are all that the pool may have.
    pub(crate) fn full(size: Size) -> Result<Self> {
        Self::of((size, 100, 0), (Idle::Pool, 10_000), 0, false)
    }

    fn of(
        (size, count, each): (Size, usize, usize),
        (place, idle): (Idle, usize),
        room: u64,
        in_ledger: bool,
    ) -> Result<Self> {
        let idle_each = idle.div_ceil(count);
        let bytes = (count * (each + idle_each)) as u64 * GRANULE + room;
        let driver = ModelDriver::new(ModelOptions::new().capacity(bytes));
        let device = Device::open(Arc::new(driver), 0)?;
        let directory = in_ledger.then(Directory::new);
        let ledger = directory
            .as_ref()
            .map(|it| ledger(&device, bytes, it))
            .transpose()?;
        let pool = Pool::builder(&device).limit(Limit::Bytes(bytes));
        let pool = match &ledger {
            Some(ledger) => pool.ledger(ledger).build()?,
            None => pool.build()?,
        };
        let stream = Stream::new(&device)?;
        let register = |number| pool.tenant(format!("tenant {number}")).register();
        let tenants = (0..count).map(register).collect::<Result<Vec<_>, _>>()?;
        let blocks = |each| -> Result<Vec<Block>> {
            let tenants = tenants
                .iter()
                .flat_map(|tenant| iter::repeat_n(tenant, each));
            let allocate = |tenant: &Tenant| Ok(tenant.allocate_on(&stream, GRANULE)?);
            tenants.map(allocate).collect()
        };
        let living = blocks(each)?;
        let freed = blocks(idle_each)?;
        if place == Idle::Pool {
            keep_off_stream_caches(&freed, &stream)?;
        }
        drop(freed);
        Ok(Self {
            size,
            growing: None,
            tiles: None,
            cache: None,
            paged: None,
            region: None,
            vector: None,
            heap: None,
            kept: Vec::new(),
            made: 0,
            pool,
            ledger,
            device,
            stream,
            tenants,
            next: 0,
            _living: living,
            directory,
        })
    }

    /// Allocates for the tenants in turn.
    pub(crate) fn allocate(&mut self, size: u64, capacity: u64) -> Result<Block> {
        self.next += 1;
        if self.next == self.tenants.len() {
            self.next = 0;
        }
        let block = self.tenants[self.next].block(size).capacity(capacity);
        Ok(block.home_stream(&self.stream).try_allocate()?)
    }

    /// Makes the pool itself free blocks, although only their home stream uses them.
    pub(crate) fn keep_off_stream_caches(&self, blocks: &[Block]) -> Result<()> {
        keep_off_stream_caches(blocks, &self.stream)
    }

    /// Runs the work between marks.
    ///
    /// # Errors
    /// Returns an error if the work called the driver: then it was not the path to be counted.
    pub(crate) fn between<T>(
        &mut self,
        marks: &Marks,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let before = self.device.calls();
        let outcome = marks.around(|| work(self))?;
        let calls = self.device.calls().since(&before);
        // The ledger's thread measures foreign memory each second, and asks what is idle. A call of this
        // thread would show in the count, which is compared with that without a ledger.
        ensure!(
            self.directory.is_some() || calls.total() == 0,
            "driver calls where there should be none: {calls:?}"
        );
        Ok(outcome)
    }
}

fn ledger(device: &Device, bytes: u64, directory: &Directory) -> Result<Ledger> {
    let ledger = Ledger::builder(device, &directory.0).limit(bytes);
    Ok(ledger.remote(Remote::Nothing).open()?)
}

fn keep_off_stream_caches(blocks: &[Block], home: &Stream) -> Result<()> {
    for block in blocks {
        block.record_use(home)?;
    }
    Ok(())
}
