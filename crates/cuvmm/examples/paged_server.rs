//! Two models serve requests from paged caches in one pool, busy in turns: each has addresses for its
//! whole cache, and memory under the blocks of its requests. Where memory is short, a request for it
//! stands in line while others are served.
//!
//! Runs on a GPU, or on the host driver where there is none.

mod support;

use std::collections::VecDeque;
use std::error::Error;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};

use cuvmm::paged::{BackFuture, FreeNumbers, LayerGroup};
use cuvmm::pool::Pressure;
use cuvmm::{Device, Limit, Mapper, PagedKv, Pool, Stream, Tenant};

/// Tokens in a block of 128 KiB.
const TOKENS: u32 = 16;

/// The block numbers of a model: four times as many as there is memory for.
const BLOCKS: u32 = 2_048;

/// The numbers that no request uses.
struct Numbers {
    free: FreeNumbers,
    /// The blocks of ended requests, which are kept for their prefixes. They have memory.
    prefixes: VecDeque<u32>,
}

/// The part of a model that its pressure hook has too.
struct Shared {
    kv: OnceLock<PagedKv>,
    numbers: Mutex<Numbers>,
}

impl Shared {
    /// Gives up prefixes whose memory another model needs.
    fn evict(&self, pressure: &Pressure) {
        // A hook waits for no lock: its thread may have it.
        let (Some(kv), Ok(mut numbers)) = (self.kv.get(), self.numbers.try_lock()) else {
            return;
        };
        let Ok(chosen) = kv.emptiest(pressure.bytes, numbers.prefixes.make_contiguous()) else {
            return;
        };
        if kv.release(&chosen.numbers).is_ok() {
            numbers.prefixes.retain(|it| !chosen.numbers.contains(it));
            let _ = numbers.free.give_back_many(&chosen.numbers);
        }
    }
}

struct Model {
    /// The request for memory that stands in line, with its numbers, and numbers that one has got.
    standing: Option<(Vec<u32>, Pin<Box<BackFuture>>)>,
    granted: Vec<u32>,
    shared: Arc<Shared>,
    _tenant: Tenant,
    preempted: u32,
}

/// A request: its tokens, those at its end, and its blocks.
struct Request {
    tokens: u32,
    last: u32,
    blocks: Vec<u32>,
}

impl Model {
    fn new(pool: &Pool, name: &str, stream: &Stream) -> Result<Self, Box<dyn Error>> {
        let shared = Arc::new(Shared {
            kv: OnceLock::new(),
            numbers: Mutex::new(Numbers {
                free: FreeNumbers::new(BLOCKS)?,
                prefixes: VecDeque::new(),
            }),
        });
        // A hook that owned the cache would keep it, and its tenant, for good.
        let of = Arc::downgrade(&shared);
        let tenant = pool.tenant(name).on_pressure(move |it| {
            if let Some(of) = of.upgrade() {
                of.evict(it);
            }
        });
        let tenant = tenant.register()?;
        let group = LayerGroup::new(8, TOKENS).keys_and_values(4, 64, 2);
        let kv = PagedKv::builder(&tenant, stream, BLOCKS).group(group);
        let kv = kv.extent(2 << 20).build()?;
        shared.kv.get_or_init(|| kv);
        Ok(Self {
            standing: None,
            granted: Vec::new(),
            shared,
            _tenant: tenant,
            preempted: 0,
        })
    }

    fn kv(&self) -> Result<&PagedKv, Box<dyn Error>> {
        Ok(self.shared.kv.get().ok_or("the cache is built")?)
    }

    fn numbers(&self) -> std::sync::MutexGuard<'_, Numbers> {
        let numbers = self.shared.numbers.lock();
        numbers.unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the numbers of blocks with memory: free ones, for which nothing is asked of others, or the
    /// oldest prefixes. If there are none, a request stands in line for memory of the other model, and
    /// has its numbers when it is granted.
    fn take(&mut self, count: u32, others_run: bool) -> Result<Option<Vec<u32>>, Box<dyn Error>> {
        self.poll_standing()?;
        let lacking = (count as usize).saturating_sub(self.granted.len());
        let mut numbers = self.numbers();
        let mut found = None;
        if let Some(free) = numbers.free.take_many(lacking as u32) {
            match self.kv()?.try_back(&free) {
                Ok(()) => found = Some(free),
                Err(error) if !error.is_shortage() => return Err(error.into()),
                Err(_) => numbers.free.give_back_many(&free)?,
            }
        }
        if found.is_none() && lacking <= numbers.prefixes.len() {
            found = Some(numbers.prefixes.drain(..lacking).collect());
        }
        drop(numbers);
        if found.is_none() && !others_run {
            return self.wait(count);
        }
        if let Some(found) = &mut found {
            let rest = self.granted.len() - (count as usize - lacking);
            found.extend(self.granted.split_off(rest));
        } else if self.standing.is_none() {
            let free = self.numbers().free.take_many(lacking as u32);
            if let Some(free) = free {
                let request = Box::pin(self.kv()?.back_async(&free));
                self.standing = Some((free, request));
                self.poll_standing()?;
            }
        }
        Ok(found)
    }

    /// Waits for memory, since there is no other request to go on with.
    fn wait(&mut self, count: u32) -> Result<Option<Vec<u32>>, Box<dyn Error>> {
        self.give_granted()?;
        let Some(free) = self.numbers().free.take_many(count) else {
            return Ok(None);
        };
        if self.kv()?.back(&free).is_ok() {
            return Ok(Some(free));
        }
        self.numbers().free.give_back_many(&free)?;
        Ok(None)
    }

    /// Takes what the standing request was granted.
    fn poll_standing(&mut self) -> Result<(), Box<dyn Error>> {
        let Some((numbers, request)) = &mut self.standing else {
            return Ok(());
        };
        // It is polled in each step, so nothing needs to be woken.
        let mut context = Context::from_waker(Waker::noop());
        if let Poll::Ready(backed) = request.as_mut().poll(&mut context) {
            backed?;
            self.granted.append(numbers);
            self.standing = None;
        }
        Ok(())
    }

    /// Takes what the standing request has got by now, or withdraws it.
    fn end_standing(&mut self) -> Result<(), Box<dyn Error>> {
        self.poll_standing()?;
        if let Some((numbers, request)) = self.standing.take() {
            drop(request);
            self.numbers().free.give_back_many(&numbers)?;
        }
        Ok(())
    }

    /// Gives up what no request needs any more.
    fn give_granted(&mut self) -> Result<(), Box<dyn Error>> {
        self.end_standing()?;
        let granted = std::mem::take(&mut self.granted);
        self.release(granted)
    }

    fn release(&self, blocks: Vec<u32>) -> Result<(), Box<dyn Error>> {
        self.kv()?.release(&blocks)?;
        Ok(self.numbers().free.give_back_many(&blocks)?)
    }

    /// Serves requests in the order of their arrival, and returns how many steps that took.
    fn serve(&mut self, mut waiting: VecDeque<Request>) -> Result<u32, Box<dyn Error>> {
        let (mut running, mut steps): (Vec<Request>, u32) = (Vec::new(), 0);
        while !(waiting.is_empty() && running.is_empty()) {
            while let Some(mut request) = waiting.pop_front() {
                let Some(blocks) = self.take(request.tokens / TOKENS + 1, !running.is_empty())?
                else {
                    waiting.push_front(request);
                    break;
                };
                request.blocks = blocks;
                running.push(request);
            }
            let mut at = 0;
            while at < running.len() {
                if running[at].tokens / TOKENS + 1 == running[at].blocks.len() as u32 {
                    at += 1;
                } else if let Some(block) = self.take(1, true)? {
                    running[at].blocks.extend(block);
                } else if let Some(mut youngest) = running.pop() {
                    // Its tokens are computed again later.
                    self.release(std::mem::take(&mut youngest.blocks))?;
                    self.preempted += 1;
                    waiting.push_front(youngest);
                }
            }
            if waiting.is_empty() {
                self.give_granted()?;
            }
            // The kernels of a step still use the blocks of requests that end in it.
            let step = self.kv()?.step();
            let ends = |request: &Request| request.tokens + 1 == request.last;
            let (ended, others): (Vec<Request>, Vec<Request>) = running.into_iter().partition(ends);
            running = others;
            for mut request in ended {
                let rest = request.blocks.split_off(request.blocks.len() / 2);
                self.release(rest)?;
                self.numbers().prefixes.extend(request.blocks);
            }
            running.iter_mut().for_each(|request| request.tokens += 1);
            // The engine would launch its kernels here, with the numbers as a block table.
            drop(step);
            steps += 1;
        }
        Ok(steps)
    }
}

/// Runs the example.
///
/// # Errors
/// Returns any error of the library.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(support::driver()?, 0)?;
    let limit = Limit::Bytes(64 << 20);
    let mapper = Mapper::start(&device)?;
    let pool = Pool::builder(&device)
        .limit(limit)
        .mapper(&mapper)
        .build()?;
    let stream = Stream::new(&device)?;
    let chat = Model::new(&pool, "chat", &stream)?;
    let code = Model::new(&pool, "code", &stream)?;
    let mut models = [("chat", chat), ("code", code)];
    for turn in 0..4 {
        let requests = (0..200_u32).map(|number| {
            let tokens = 1 + number * 97 % 400;
            Request {
                tokens,
                last: tokens + 1 + number * 31 % 100,
                blocks: Vec::new(),
            }
        });
        let (name, busy) = &mut models[turn % 2];
        let steps = busy.serve(requests.collect())?;
        println!("turn {turn}: {name} served 200 requests in {steps} steps");
        for (name, model) in &models {
            let (stats, prefixes) = (model.kv()?.stats()?, model.numbers().prefixes.len());
            assert_eq!(stats.in_use as usize, prefixes);
            println!(
                "  {name}: {} MiB under {prefixes} blocks of prefixes, {} preempted",
                stats.committed >> 20,
                model.preempted
            );
        }
    }
    drop(models);
    Ok(pool.close()?)
}
