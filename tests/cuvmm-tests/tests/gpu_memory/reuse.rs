//! Memory is never reused early. Blocks are dropped while work still uses them, and allocated again
//! at once on the same stream, another stream, no stream, or by another tenant. Every owner writes
//! a pattern of its own and checks later that each word still has it.

use std::time::Duration;

use crate::gpu::Stage;
use crate::on_each;
use cuvmm::error::BlockError;
use cuvmm::{Block, Event, Pool, Stream, Tenant};

/// Granules of the pool, and of the largest block.
const LIMIT: u64 = 256;
const LARGEST: u64 = 64;

/// A block, its contents, and a stream behind which it can be checked.
struct Held {
    block: Block,
    stamp: u32,
    stream: Stream,
}

/// The operations of one thread on a pool.
struct Churn<'a> {
    stage: &'a Stage,
    dice: fastrand::Rng,
    tenants: &'a [Tenant],
    streams: Vec<Stream>,
    held: Vec<Held>,
    /// Granules that may be held at once.
    most: u64,
    served: u64,
    refused: u64,
}

impl<'a> Churn<'a> {
    fn new(stage: &'a Stage, tenants: &'a [Tenant], seed: u64, streams: usize, most: u64) -> Self {
        Self {
            stage,
            dice: fastrand::Rng::with_seed(seed),
            tenants,
            streams: (0..streams).map(|_| stage.stream()).collect(),
            held: vec![],
            most,
            served: 0,
            refused: 0,
        }
    }

    fn run(&mut self, rounds: u64) {
        for _ in 0..rounds {
            self.round();
        }
        while !self.held.is_empty() {
            self.let_one_go();
        }
    }

    fn round(&mut self) {
        let largest = 1 + self.dice.u64(..LARGEST);
        let granules = 1 + self.dice.u64(..largest);
        let granules = granules.min(self.most);
        while self.granules() + granules > self.most {
            self.let_one_go();
        }
        let size = granules * self.stage.g() - 4 * self.dice.u64(..self.stage.g() / 8);
        let stream = self.a_stream();
        let homeless = self.dice.u8(..8) == 0;
        let zeroed = self.dice.u8(..4) == 0;
        let tenants = self.tenants;
        let tenant = &tenants[self.dice.usize(..tenants.len())];
        let mut builder = tenant.block(size).zeroed(zeroed);
        if !homeless {
            builder = builder.home_stream(&stream);
        }
        // Pending memory is refused at first. Most of the time the thread waits for it.
        let got = match builder.clone().try_allocate() {
            Err(BlockError::OutOfMemory(_)) if self.dice.u8(..4) > 0 => {
                self.refused += 1;
                builder.timeout(Duration::from_millis(200)).allocate()
            }
            got => got,
        };
        match got {
            Ok(block) => self.use_block(block, stream, zeroed),
            Err(BlockError::OutOfMemory(_)) => self.refused += 1,
            Err(error) => panic!("{error}"),
        }
        if self.dice.bool() {
            self.let_one_go();
        }
    }

    fn use_block(&mut self, block: Block, stream: Stream, zeroed: bool) {
        let stage = self.stage;
        self.served += 1;
        if zeroed {
            stage.check(&stream, &block, 0);
        }
        let stamp = stage.stamp();
        let after = self.a_while();
        stage.late_fill(&stream, &block, stamp, after);
        let mut last = stream;
        if self.dice.u8(..3) == 0 {
            // Another stream continues to use it, ordered behind the first.
            let other = self.a_stream();
            let event = Event::new(&stage.device).unwrap();
            event.record(&last).unwrap();
            other.wait(&event).unwrap();
            block.record_use(&other).unwrap();
            stage.check(&other, &block, stamp);
            last = other;
        }
        self.held.push(Held {
            block,
            stamp,
            stream: last,
        });
    }

    /// Checks a block and drops it, with the check and possibly a late write still pending.
    fn let_one_go(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let index = self.dice.usize(..self.held.len());
        let Held {
            block,
            stamp,
            stream,
        } = self.held.swap_remove(index);
        self.stage.check(&stream, &block, stamp);
        if self.dice.bool() {
            let after = self.a_while();
            self.stage
                .late_fill(&stream, &block, self.stage.stamp(), after);
        }
        if self.dice.u8(..4) == 0 {
            let lease = block.lease();
            drop(block);
            self.stage.work().check(&stream, lease.address(), 0, stamp);
        }
    }

    fn granules(&self) -> u64 {
        let g = self.stage.g();
        self.held
            .iter()
            .map(|held| held.block.size().div_ceil(g))
            .sum()
    }

    fn a_stream(&mut self) -> Stream {
        self.streams[self.dice.usize(..self.streams.len())].clone()
    }

    fn a_while(&mut self) -> Duration {
        Duration::from_micros(match self.dice.u8(..4) {
            0 => 0,
            1..=2 => self.dice.u64(1..200),
            _ => self.dice.u64(200..1000),
        })
    }
}

/// Registers tenants with guarantees, limits and priorities of their own.
fn tenants(pool: &Pool, g: u64) -> [Tenant; 3] {
    [
        pool.tenant("a").guarantee(32 * g).register().unwrap(),
        pool.tenant("b").limit(192 * g).register().unwrap(),
        pool.tenant("c").priority(1).register().unwrap(),
    ]
}

on_each! {
    fn thousands_of_rounds_of_free_and_reuse(stage) {
        let pool = stage.pool(LIMIT);
        let tenants = tenants(&pool, stage.g());
        let rounds = stage.scaled(4000, 300);
        let mut churn = Churn::new(stage, &tenants, 7, 4, LIMIT * 3 / 4);
        for _ in 0..rounds / 50 {
            churn.run(50);
            stage.settle();
        }
        println!("{} served, {} refused at first", churn.served, churn.refused);
        assert!(churn.served > rounds * 3 / 4, "{}", churn.served);
        assert!(churn.refused > 0, "no request ever found its memory pending");
        drop(churn);
        drop(tenants);
        pool.close().unwrap();
    }

    fn one_stream_reuses_without_a_driver_call_and_in_order(stage) {
        let pool = stage.pool(8);
        let tenant = pool.tenant("a").register().unwrap();
        let stream = stage.stream();
        drop(tenant.allocate_on(&stream, 8 * stage.g()).unwrap());
        let before = pool.calls();
        for _ in 0..stage.scaled(2000, 100) {
            let block = tenant.block(8 * stage.g()).home_stream(&stream).try_allocate().unwrap();
            let stamp = stage.stamp();
            stage.fill(&stream, &block, stamp);
            stage.check(&stream, &block, stamp);
        }
        assert_eq!(pool.calls().total(), before.total());
        drop(tenant);
        stage.settle();
        pool.close().unwrap();
    }

    fn threads_share_a_pool_under_running_kernels(stage) {
        const THREADS: u64 = 4;
        let pool = stage.pool(LIMIT);
        let tenants = tenants(&pool, stage.g());
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let tenants = &tenants;
                scope.spawn(move || {
                    // Together less than the limit, so that no thread waits for memory that all
                    // threads wait for.
                    let most = LIMIT / THREADS * 3 / 4;
                    let mut churn = Churn::new(stage, tenants, 100 + thread, 2, most);
                    churn.run(stage.scaled(600, 40));
                    assert!(churn.served > 0);
                });
            }
        });
        stage.settle();
        assert_eq!(pool.stats().in_use, 0);
        drop(tenants);
        pool.close().unwrap();
    }

    fn a_copy_that_is_on_its_way_sees_what_was_there(stage) {
        let granules = stage.scaled(256, 16);
        let size = granules * stage.g();
        let pool = stage.pool(granules);
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let [one, two] = stage.streams();
        let copied = stage.pinned(size);
        for round in 0..stage.scaled(12, 6) {
            let block = a.allocate_on(&one, size).unwrap();
            let address = block.address();
            let stamp = stage.stamp();
            stage.fill(&one, &block, stamp);
            one.synchronize().unwrap();
            // On the host a copy takes no time of its own.
            let gate = (!stage.scaled(true, false)).then(|| stage.work().gate(&one));
            copied.copy_from(&one, address);
            drop(block);
            // The same tenant gets the memory at once, behind an event. Another tenant has to wait.
            let (tenant, overwrite) = if round % 2 == 0 { (&a, &two) } else { (&b, &two) };
            let got = tenant.block(size).home_stream(overwrite).try_allocate();
            let running = !one.is_done().unwrap();
            drop(gate);
            let block = match got {
                Ok(block) if round % 2 == 0 => {
                    assert_eq!(block.address(), address, "warm");
                    block
                }
                Ok(block) => {
                    assert!(!running, "given to another tenant under a copy");
                    block
                }
                Err(BlockError::OutOfMemory(shortage)) => {
                    assert_eq!(shortage.pending_free, size);
                    let wait = Duration::from_secs(10);
                    tenant.block(size).home_stream(overwrite).timeout(wait).allocate().unwrap()
                }
                Err(error) => panic!("{error}"),
            };
            let over = stage.stamp();
            stage.fill(overwrite, &block, over);
            stage.check(overwrite, &block, over);
            stage.device.synchronize().unwrap();
            copied.expect(stage.work().pattern(stamp));
        }
        stage.settle();
        drop((a, b));
        pool.close().unwrap();
    }

    fn the_first_stream_writes_late_and_the_next_owner_never_sees_it(stage) {
        let size = 16 * stage.g();
        let pool = stage.pool(16);
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        let [one, two] = stage.streams();
        for round in 0..stage.scaled(30, 10) {
            let block = a.block(size).home_stream(&one).timeout(Duration::from_secs(10));
            let block = block.allocate().unwrap();
            // The kernel touches no memory until its end.
            stage.late_fill(&one, &block, stage.stamp(), Duration::from_millis(10));
            drop(block);
            let (tenant, home) = match round % 4 {
                0 => (&a, Some(&two)),
                1 => (&b, Some(&two)),
                2 => (&a, None),
                _ => (&b, None),
            };
            let mut next = tenant.block(size).timeout(Duration::from_secs(10));
            if let Some(home) = home {
                next = next.home_stream(home);
            }
            let next = next.allocate().unwrap();
            let stamp = stage.stamp();
            stage.fill(&two, &next, stamp);
            stage.check(&two, &next, stamp);
            // Check again once the first kernel has ended for certain.
            one.synchronize().unwrap();
            stage.check(&two, &next, stamp);
            two.synchronize().unwrap();
        }
        stage.settle();
        drop((a, b));
        pool.close().unwrap();
    }
}
