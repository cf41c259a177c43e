//! Memory of the random work that is in no block: a region and a paged cache in a tenant.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use cuvmm::error::{BlockError, MemoryError, PagedKvError, SleepError};
use cuvmm::paged::{BackFuture, LayerGroup};
use cuvmm::{Contents, Device, HostStore, PagedKv, Region, Stream, Tenant};

use crate::common::G;

/// Granules of the region.
const GRANULES: u64 = 16;

/// Blocks of the cache that are backed at once, and the others, which futures back. Four are in an
/// extent.
const NUMBERS: Range<u32> = 0..24;
const LATER: Range<u32> = 24..40;

/// The bytes of a block of the cache.
const BLOCK: u64 = G / 4;

/// A region and a paged cache, and the words that their granules and blocks begin with.
pub struct Holders {
    requests: Vec<(u32, Pin<Box<BackFuture>>)>,
    cache: Option<(PagedKv, BTreeMap<u32, u64>)>,
    region: Option<(Region, BTreeMap<u64, u64>)>,
    stream: Stream,
}

impl Holders {
    pub fn new(device: &Device) -> Self {
        Self {
            requests: Vec::new(),
            cache: None,
            region: None,
            stream: Stream::new(device).unwrap(),
        }
    }

    /// Drops what is in use.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.cache = None;
        self.region = None;
    }

    /// Does one thing at random.
    pub fn step(
        &mut self,
        tenant: &Tenant,
        store: &HostStore,
        random: &mut fastrand::Rng,
        (stamp, wait): (&mut u64, Duration),
    ) {
        *stamp += 1 << 16;
        match random.u8(..24) {
            0 => drop(self.region.take()),
            1 => self.clear(),
            2..7 => self.commit(tenant, granules(random), *stamp),
            7..10 => self.withdraw(granules(random)),
            10..14 => self.back(tenant, random.u32(NUMBERS), *stamp),
            14..17 => self.release(random.usize(..64)),
            17..20 => self.request(random.u32(LATER)),
            20..22 => self.sleep(store, wait),
            _ => self.wake(wait),
        }
    }

    fn commit(&mut self, tenant: &Tenant, range: Range<u64>, stamp: u64) {
        let stream = &self.stream;
        let (region, words) = self.region.get_or_insert_with(|| {
            let region = tenant.region(GRANULES * G).largest_extent(4 * G);
            (
                region.home_stream(stream).reserve().unwrap(),
                BTreeMap::new(),
            )
        });
        match region.commit(range.start * G..range.end * G) {
            Ok(()) => {
                for granule in range {
                    let word = *words.entry(granule).or_insert(stamp + granule);
                    region
                        .write(stream, granule * G, &word.to_le_bytes())
                        .unwrap();
                }
            }
            Err(MemoryError::Pool(cause)) if is_refused(&cause) => {}
            Err(error) => panic!("{error:?}"),
        }
        for (&granule, &word) in &*words {
            let mut found = [0; 8];
            region.read(stream, granule * G, &mut found).unwrap();
            assert_eq!(
                u64::from_le_bytes(found),
                word,
                "granule {granule} of a region"
            );
        }
    }

    fn withdraw(&mut self, range: Range<u64>) {
        if let Some((region, words)) = &mut self.region {
            let streams = std::slice::from_ref(&self.stream);
            for granule in range {
                if words.remove(&granule).is_some() {
                    let bytes = granule * G..(granule + 1) * G;
                    region.decommit_after(bytes, streams).unwrap();
                }
            }
        }
    }

    fn back(&mut self, tenant: &Tenant, number: u32, stamp: u64) {
        let stream = &self.stream;
        let (cache, words) = self.cache.get_or_insert_with(|| {
            let group = LayerGroup::new(1, 1).part(1, BLOCK as u32, 1);
            let cache = PagedKv::builder(tenant, stream, LATER.end).group(group);
            (cache.extent(G).build().unwrap(), BTreeMap::new())
        });
        if cache.is_asleep() {
            return;
        }
        if let Entry::Vacant(new) = words.entry(number) {
            match cache.try_back(&[number]) {
                Ok(()) => {
                    let mut bytes = vec![0; BLOCK as usize];
                    bytes[..8].copy_from_slice(&stamp.to_le_bytes());
                    cache.write(number, (0, 0, 0), &bytes).unwrap();
                    new.insert(stamp);
                }
                Err(PagedKvError::Back { cause, .. }) if is_refused(&cause) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
        let mut bytes = vec![0; BLOCK as usize];
        for (&number, &word) in &*words {
            cache.read(number, (0, 0, 0), &mut bytes).unwrap();
            assert_eq!(bytes[..8], word.to_le_bytes(), "block {number} of a cache");
        }
    }

    fn release(&mut self, any: usize) {
        if let Some((cache, words)) = &mut self.cache
            && !cache.is_asleep()
            && let Some(&number) = words.keys().nth(any % words.len().max(1))
        {
            words.remove(&number);
            cache.release(&[number]).unwrap();
        }
    }

    /// Polls the futures that back blocks, drops the oldest of many, and makes another.
    fn request(&mut self, number: u32) {
        let Some((cache, _)) = &self.cache else {
            return;
        };
        if self.requests.len() > 2 {
            drop(self.requests.remove(0));
        }
        if !self.requests.iter().any(|&(other, _)| other == number) {
            let request = Box::pin(cache.back_async(&[number]));
            self.requests.push((number, request));
        }
        let mut context = Context::from_waker(Waker::noop());
        self.requests.retain_mut(|(number, request)| {
            match request.as_mut().poll(&mut context) {
                Poll::Pending => return true,
                // The cache may have fallen asleep since.
                Poll::Ready(Ok(())) => match cache.release(&[*number]) {
                    Ok(()) | Err(PagedKvError::Memory(MemoryError::CacheAsleep(_))) => {}
                    Err(error) => panic!("{error:?}"),
                },
                Poll::Ready(Err(PagedKvError::Back { cause, .. }))
                    if is_refused(&cause) || is_asleep(&cause) => {}
                Poll::Ready(Err(error)) => panic!("{error:?}"),
            }
            false
        });
    }

    fn sleep(&self, store: &HostStore, wait: Duration) {
        if let Some((cache, _)) = &self.cache {
            match cache.alone().timeout(wait).sleep(Contents::Keep(store)) {
                Ok(_) | Err(SleepError::StoreFull { .. } | SleepError::CacheBusy { .. }) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
    }

    fn wake(&self, wait: Duration) {
        if let Some((cache, _)) = &self.cache {
            match cache.alone().timeout(wait).wake() {
                Ok(_) => {}
                Err(SleepError::Block { cause, .. }) if is_refused(&cause) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
    }
}

fn granules(random: &mut fastrand::Rng) -> Range<u64> {
    let start = random.u64(..GRANULES);
    start..random.u64(start + 1..=GRANULES)
}

fn is_asleep(error: &BlockError) -> bool {
    matches!(error, BlockError::Memory(MemoryError::CacheAsleep(_)))
}

/// Returns `true` if memory was short, or the tenant is gone.
pub fn is_refused(error: &BlockError) -> bool {
    error.is_shortage() || matches!(error, BlockError::Unregistered { .. })
}
