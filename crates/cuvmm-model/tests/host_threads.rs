//! Calls by many threads at once.
//!
//! `unsafe` because the driver's methods are.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model_support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use cuvmm_driver::{Driver, DriverKind, EventFlags, StreamFlags};
use cuvmm_model::model::{Backing, Machine};
use model_support::*;

on_both!(each_in_its_own_range, streams_across_threads);

fn each_in_its_own_range<B: Backing>(d: Machine<B>) {
    thread::scope(|scope| {
        for number in 1..=8_u8 {
            let d = &d;
            scope.spawn(move || {
                for round in 0..60 {
                    let r = range(d, 4, 1 + u64::from(number + round) % 4);
                    let s = d.stream_create(D0, StreamFlags::NON_BLOCKING).unwrap();
                    let e = d.event_create(D0, EventFlags::DISABLE_TIMING).unwrap();
                    let mut bytes = [0; 8];
                    unsafe {
                        d.fill_async(D0, r.at, number, 4096, s).unwrap();
                        d.event_record(D0, e, s).unwrap();
                        d.event_synchronize(D0, e).unwrap();
                        d.copy_to_host(D0, &mut bytes, at(r.at, 4088)).unwrap();
                        d.event_destroy(D0, e).unwrap();
                        d.stream_destroy(D0, s).unwrap();
                    }
                    if d.kind() == DriverKind::Host {
                        assert_eq!(bytes, [number; 8]);
                    }
                    r.end(d);
                }
            });
        }
    });
    assert!(d.live().is_nothing());
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB);
}

fn streams_across_threads<B: Backing>(d: Machine<B>) {
    let r = range(&d, 1, 1);
    let streams: Vec<_> = (0..4)
        .map(|_| d.stream_create(D0, StreamFlags::empty()).unwrap())
        .collect();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let workers: Vec<_> = streams
            .iter()
            .zip(0..)
            .map(|(&s, index)| {
                let (d, place) = (&d, at(r.at, index * 4096));
                scope.spawn(move || {
                    for byte in 0..200 {
                        unsafe {
                            d.fill_async(D0, place, byte, 16, s).unwrap();
                            if byte % 16 == 0 {
                                d.stream_synchronize(D0, s).unwrap();
                                d.fill(D0, place, byte, 16).unwrap();
                            }
                        }
                    }
                    unsafe { d.stream_synchronize(D0, s) }.unwrap();
                })
            })
            .collect();
        let (d, streams, over) = (&d, &streams, &over);
        scope.spawn(move || {
            while !over.load(Ordering::SeqCst) {
                for &s in streams {
                    d.hold(D0, s);
                    thread::yield_now();
                    d.release_stream(D0, s);
                }
            }
        });
        for worker in workers {
            worker.join().unwrap();
        }
        over.store(true, Ordering::SeqCst);
    });
    d.context_synchronize(D0).unwrap();
    assert_eq!(d.live().queued, 0);
    if d.kind() == DriverKind::Host {
        for index in 0..4 {
            assert_eq!(first_byte(&d, at(r.at, index * 4096)), 199);
        }
    }
}
