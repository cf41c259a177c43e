//! Commit of one tile among many, and a copy across many stripes.

use std::sync::Arc;

use criterion::Criterion;
use cuvmm::driver::model::{ModelDriver, ModelOptions};
use cuvmm::own::Place;
use cuvmm::region::{Layout, Region};
use cuvmm::{Device, SparseArray, Stream};

use super::rig::{GIB, GRANULE, MIB};

pub(crate) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sparse");
    group.sample_size(20);
    let model = ModelOptions::new().capacity(72 * GIB).devices(2);
    let driver = Arc::new(ModelDriver::new(model));
    let device = Device::open(driver.clone(), 0).unwrap();
    let second = Device::open(driver, 1).unwrap();
    let stream = Stream::new(&device).unwrap();
    for tiles in [1_024, 16_384] {
        let per_tile = GRANULE as usize;
        let builder = SparseArray::<u8>::builder(&device, &stream, tiles * per_tile);
        let mut array = builder.tile_bytes(GRANULE).reserve().unwrap();
        array.commit(per_tile..tiles * per_tile).unwrap();
        group.bench_function(
            format!("commit_and_decommit_a_tile_of_{tiles}"),
            |bencher| {
                bencher.iter(|| {
                    array.commit(0..per_tile).unwrap();
                    array.decommit(0..per_tile).unwrap();
                });
            },
        );
    }
    for stripes in [1_024, 8_192] {
        let striped = || {
            let places = [&device, &second].map(Place::from);
            let layout = Layout::round_robin(places, 2 * MIB);
            let builder = Region::builder(&device, stripes * GRANULE).layout(layout);
            let mut region = builder.reserve().unwrap();
            region.commit(0..stripes * GRANULE).unwrap();
            region
        };
        let (mut from, mut to) = (striped(), striped());
        group.bench_function(format!("copy_{stripes}_stripes"), |bencher| {
            bencher.iter(|| {
                let all = 0..stripes * GRANULE;
                to.copy_from(&stream, 0, &from, all).unwrap();
                stream.synchronize().unwrap();
            });
        });
        from.decommit_after(0..stripes * GRANULE, &[]).unwrap();
        to.decommit_after(0..stripes * GRANULE, &[]).unwrap();
    }
    group.finish();
}
