//! Work on the host driver. Work that takes time is modeled by holding streams back: a keeper
//! thread lets each go when its time has come.
//!
//! `unsafe` is used for copies to host memory that lives until they are complete, and for fills
//! that stand for kernels.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cuvmm::Stream;
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::driver::{DeviceAddress, Driver as _, MemoryInfo, PointerAttribute};

use super::manner::manner;
use super::{D0, Gate, Rows, Work};

/// Uses small granules, so that the scenarios of a GPU fit into the memory of a build machine.
pub(super) fn options() -> HostOptions {
    HostOptions::new()
        .manner(manner())
        .devices(2)
        .granularity(64 << 10)
        .capacity(256 << 20)
}

/// Streams that are held back, and until when.
#[derive(Default)]
struct Held {
    until: BTreeMap<u64, (Stream, Instant)>,
    over: bool,
}

struct RegistrationOwner {
    held: Mutex<Held>,
    changed: Condvar,
}

impl RegistrationOwner {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, driver: &HostDriver) {
        let mut held = self.lock();
        while !held.over {
            let now = Instant::now();
            let due: Vec<u64> = held
                .until
                .iter()
                .filter(|(_, (_, until))| *until <= now)
                .map(|(&stream, _)| stream)
                .collect();
            for stream in due {
                if let Some((stream, _)) = held.until.remove(&stream) {
                    driver.release_stream(D0, stream.as_raw());
                }
            }
            let next = held.until.values().map(|(_, until)| *until).min();
            let wait = next.map_or(Duration::from_secs(1), |next| next - now.min(next));
            held = self
                .changed
                .wait_timeout(held, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// A pending copy, and the byte that it should bring.
struct Look {
    at: DeviceAddress,
    bytes: Box<[u8]>,
    byte: u8,
}

pub(super) struct HostWork {
    driver: Arc<HostDriver>,
    keeper: Arc<RegistrationOwner>,
    thread: Option<JoinHandle<()>>,
    looks: Mutex<Vec<Look>>,
}

impl HostWork {
    pub(super) fn new(driver: Arc<HostDriver>) -> Self {
        let keeper = Arc::new(RegistrationOwner {
            held: Mutex::default(),
            changed: Condvar::new(),
        });
        let thread = std::thread::spawn({
            let (keeper, driver) = (Arc::clone(&keeper), Arc::clone(&driver));
            move || keeper.keep(&driver)
        });
        Self {
            driver,
            keeper,
            thread: Some(thread),
            looks: Mutex::default(),
        }
    }

    fn hold(&self, stream: &Stream, time: Duration) {
        let mut held = self.keeper.lock();
        let now = Instant::now();
        let (_, until) = held
            .until
            .entry(stream.as_raw().0)
            .or_insert_with(|| (stream.clone(), now));
        *until = now.max(*until) + time;
        self.driver.hold(D0, stream.as_raw());
        drop(held);
        self.keeper.changed.notify_all();
    }
}

fn byte(stamp: u32) -> u8 {
    match stamp {
        0 => 0,
        stamp => (1 + (stamp - 1) % 255) as u8,
    }
}

impl Work for HostWork {
    fn fill(&self, stream: &Stream, at: DeviceAddress, bytes: u64, stamp: u32, after: Duration) {
        if !after.is_zero() {
            self.hold(stream, after);
        }
        let managed = self
            .driver
            .pointer_attribute(D0, at, PointerAttribute::IS_MANAGED);
        if managed == Ok(1) {
            // A kernel of the machine cannot write to managed memory, because programs hold
            // references into it.
            // SAFETY: whether the memory outlives the work, and is not accessed meanwhile, is what
            // the tests check.
            unsafe {
                self.driver
                    .fill_async(D0, at, byte(stamp), bytes, stream.as_raw())
                    .unwrap();
            }
            return;
        }
        let writes = vec![(at, bytes, byte(stamp))];
        self.driver
            .queue_kernel(D0, stream.as_raw(), vec![], writes)
            .unwrap();
    }

    fn increment(&self, _: &Stream, _: DeviceAddress, _: u64, _: Duration) -> bool {
        false
    }

    fn check(&self, stream: &Stream, at: DeviceAddress, bytes: u64, stamp: u32) {
        let byte = byte(stamp);
        let mut seen = vec![!byte; bytes as usize].into_boxed_slice();
        // SAFETY: the bytes are kept, and not read, until all work is complete.
        unsafe {
            self.driver
                .copy_to_host_async(D0, seen.as_mut_ptr(), at, bytes, stream.as_raw())
                .unwrap();
        }
        let look = Look {
            at,
            bytes: seen,
            byte,
        };
        self.looks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(look);
    }

    fn rows(&self, stream: &Stream, rows: &Rows, write: bool) {
        let mut tokens = [0; 8];
        self.driver.peek(D0, rows.tokens, &mut tokens).unwrap();
        let bytes = 4 * rows.words;
        for token in 0..u64::from_le_bytes(tokens) {
            for head in 0..rows.heads {
                let strided = token * rows.token_stride + head * rows.head_stride;
                let strided = DeviceAddress(rows.tensor.0 + strided);
                let dense = DeviceAddress(rows.dense.0 + (token * rows.heads + head) * bytes);
                let (to, from) = match write {
                    true => (strided, dense),
                    false => (dense, strided),
                };
                // SAFETY: whether the memory outlives the work is what the tests check.
                unsafe {
                    self.driver
                        .copy_on_device_async(D0, to, from, bytes, stream.as_raw())
                        .unwrap();
                }
            }
        }
    }

    fn pattern(&self, stamp: u32) -> [u8; 4] {
        [byte(stamp); 4]
    }

    fn gate(&self, stream: &Stream) -> Gate {
        let (driver, stream) = (Arc::clone(&self.driver), stream.clone());
        driver.hold(D0, stream.as_raw());
        // Work that does not run until the gate opens.
        driver
            .queue_kernel(D0, stream.as_raw(), vec![], vec![])
            .unwrap();
        Gate::new(move || driver.release_stream(D0, stream.as_raw()))
    }

    fn noted(&self) -> Option<String> {
        let mut looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *looks).iter().find_map(|look| {
            let wrong = look.bytes.iter().position(|&seen| seen != look.byte)?;
            Some(format!(
                "byte {wrong} of {} from {} holds {:#x} instead of {:#x}",
                look.bytes.len(),
                look.at,
                look.bytes[wrong],
                look.byte
            ))
        })
    }

    fn nothing_left(&self, _: MemoryInfo) {
        // A stream's last work may be complete before the keeper has forgotten the stream.
        while !self.keeper.lock().until.is_empty() {
            std::thread::yield_now();
        }
        let mut live = self.driver.live();
        // Pools that were current are never destroyed. What they hold is in the other figures.
        live.mem_pools = 0;
        assert!(live.is_nothing(), "left behind: {live:?}");
        let taken = self.driver.take_hazards();
        assert!(
            taken.is_empty(),
            "memory was taken away under queued work: {taken:#?}"
        );
    }
}

impl Drop for HostWork {
    fn drop(&mut self) {
        self.keeper.lock().over = true;
        self.keeper.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
        // A failed test may have left pending copies into the buffers.
        self.driver.release_all_streams(D0);
    }
}
