//! Warm allocation by many threads in one pool or one heap, each with a stream of its own.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use cuvmm::{Heap, Stream};

use super::rig::{GIB, GRANULE, Rig};

pub(crate) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("threads");
    for threads in [1, 8] {
        let Rig { pool, .. } = Rig::new(GIB);
        let tenant = pool.tenant("tenant").register().unwrap();
        let stream = |_| Stream::new(pool.device()).unwrap();
        let streams: Vec<Stream> = (0..threads).map(stream).collect();
        group.throughput(Throughput::Elements(threads));
        group.bench_function(format!("{threads}"), |bencher| {
            let pair = |stream: &Stream| drop(tenant.allocate_on(stream, GRANULE).unwrap());
            bencher.iter_custom(|times| round(pair, &streams, times));
        });
        let heap = Heap::builder(&tenant).build().unwrap();
        group.bench_function(format!("heap-{threads}"), |bencher| {
            let pair = |stream: &Stream| drop(heap.allocate(GRANULE, 512, stream).unwrap());
            bencher.iter_custom(|times| round(pair, &streams, times));
        });
    }
    group.finish();
}

/// Returns the time from the start of the first thread to the end of the last.
fn round(pair: impl Fn(&Stream) + Sync, streams: &[Stream], times: u64) -> Duration {
    let start = Barrier::new(streams.len());
    let work = |stream: &Stream| {
        start.wait();
        let begun = Instant::now();
        for _ in 0..times {
            pair(stream);
        }
        (begun, Instant::now())
    };
    let spans: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = streams
            .iter()
            .map(|stream| scope.spawn(|| work(stream)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let begun = spans.iter().map(|span| span.0).min().unwrap();
    let ended = spans.iter().map(|span| span.1).max().unwrap();
    ended - begun
}
