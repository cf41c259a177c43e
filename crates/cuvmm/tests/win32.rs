//! The library on Windows, on the model: Win32 handles of physicals and blocks, and what needs no handles.
#![cfg(windows)]
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use cuvmm::driver::HandleTypes;
use cuvmm::driver::auto::{self, OpenError, OpenOptions, Wanted};
use cuvmm::driver::model::{ModelDriver, ModelOptions};
use cuvmm::own::ImportedPool;
use cuvmm::{Contents, Device, Heap, HostStore, Limit, MemPool, Physical, Pool, Region, Stream};

const G: u64 = 2 << 20;

fn model() -> (Arc<ModelDriver>, Device) {
    let driver = Arc::new(ModelDriver::new(ModelOptions::new().capacity(1 << 30)));
    let device = Device::open(driver.clone(), 0).unwrap();
    (driver, device)
}

#[test]
fn a_physical_passes_through_a_win32_handle() {
    let (driver, device) = model();
    let physical = Physical::builder(&device, 3 * G);
    let physical = physical.shareable(HandleTypes::WIN32).create().unwrap();
    let exported = physical.export(HandleTypes::WIN32).unwrap();
    assert!(physical.is_exported());
    let imported = Physical::import(&device, &exported, 3 * G).unwrap();
    drop((physical, exported));
    assert_eq!(driver.live().physical_bytes, 3 * G);
    drop((imported, device));
    assert!(driver.live().is_nothing());
}

#[test]
fn handle_types_without_an_owner_are_refused_by_name_before_any_call() {
    let (driver, device) = model();
    let before = device.calls();
    for (types, reason) in [
        (
            HandleTypes::WIN32_KMT,
            "nothing closes a handle of type WIN32_KMT",
        ),
        (
            HandleTypes::POSIX_FD,
            "handle type POSIX_FD exists only on Linux",
        ),
    ] {
        let physical = Physical::builder(&device, G).shareable(types).create();
        let pool = MemPool::builder(&device).shareable(types).create();
        let said = [
            physical.unwrap_err().to_string(),
            pool.unwrap_err().to_string(),
        ];
        for said in said {
            assert!(
                said.contains(reason) && said.contains("NT handle (WIN32)"),
                "{said}"
            );
        }
    }
    assert_eq!(device.calls(), before);
    assert_eq!(driver.live().physicals, 0);
}

#[test]
fn blocks_and_memory_pools_are_exported_as_win32_handles() {
    let (driver, device) = model();
    let pool = Pool::builder(&device).limit(Limit::Bytes(32 * G));
    let pool = pool.shareable(HandleTypes::WIN32).build().unwrap();
    let tenant = pool.tenant("model").register().unwrap();
    let block = tenant.allocate(4 * G).unwrap();
    let exported = block.export(HandleTypes::WIN32).unwrap();
    for (extent, handle) in exported.handles() {
        Physical::import(&device, handle, extent.size).unwrap();
    }
    drop((exported, block, tenant));
    pool.close().unwrap();

    let pool = MemPool::builder(&device)
        .shareable(HandleTypes::WIN32)
        .create();
    let pool = pool.unwrap();
    let handle = pool.export(HandleTypes::WIN32).unwrap();
    ImportedPool::import(&device, &handle).unwrap();
    drop((pool, handle, device));
    assert!(driver.live().is_nothing());
}

#[test]
fn pools_heaps_regions_and_sleep_to_the_host_work() {
    let (driver, device) = model();
    let mut region = Region::builder(&device, 8 * G).reserve().unwrap();
    region.commit(0..2 * G).unwrap();
    let pool = Pool::builder(&device)
        .limit(Limit::Bytes(32 * G))
        .build()
        .unwrap();
    let tenant = pool.tenant("model").register().unwrap();
    let block = tenant.allocate(4 * G).unwrap();
    let store = HostStore::builder(&device)
        .pinned(2 * G)
        .ordinary(4 * G)
        .build()
        .unwrap();
    let blocks = || tenant.blocks().timeout(Duration::from_secs(10));
    blocks().sleep(Contents::Keep(&store)).unwrap();
    assert!(block.is_asleep());
    blocks().wake().unwrap();
    assert!(!block.is_asleep());
    let stream = Stream::new(&device).unwrap();
    let heap = Heap::builder(&tenant).build().unwrap();
    drop(heap.allocate(1000, 256, &stream).unwrap());
    drop((heap, stream, block, store, region, tenant));
    pool.close().unwrap();
    drop(device);
    assert!(driver.live().is_nothing());
}

#[test]
fn the_host_driver_is_refused_with_the_reason() {
    let error = auto::open(OpenOptions::new().wanted(Wanted::Host)).unwrap_err();
    assert!(matches!(error, OpenError::NoHostDriver { .. }), "{error:?}");
    assert!(error.to_string().contains("on Linux"), "{error}");
}
