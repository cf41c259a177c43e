//! Memory that RDMA devices reach: a device is tried once, and what it refuses is not requested.

use crate::common::{self, D0, G, Rig, limited, model_options, nth_of};
use crate::on_both;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{Backing, ModelDriver};
use cuvmm::driver::{CUresult, Call, DeviceAddress, DeviceAttribute, Driver, PointerAttribute};
use cuvmm::error::{MemoryError, PoolError};
use cuvmm::{Physical, Pool, Region};

/// The calls that try it, in their order, after the attribute was queried.
const TRIES: [Call; 4] = [
    Call::MemCreate,
    Call::MemAddressReserve,
    Call::MemMap,
    Call::MemSetAccess,
];
const UNDOES: [Call; 3] = [Call::MemUnmap, Call::MemAddressFree, Call::MemRelease];

fn reaches(rig: &Rig<impl Backing>, address: DeviceAddress) -> bool {
    let asked = PointerAttribute::IS_GPU_DIRECT_RDMA_CAPABLE;
    rig.machine.pointer_attribute(D0, address, asked).unwrap() == 1
}

/// Returns `true` if the memory of a pool that takes what the device has is for RDMA.
fn auto(rig: &Rig<impl Backing>) -> bool {
    let pool = limited(rig, 4).rdma_if_supported().unwrap();
    let (_pool, tenant) = common::with_tenant(pool.build().unwrap());
    let block = tenant.try_allocate(2 * G).unwrap();
    reaches(rig, block.address())
}

fn required(rig: &Rig<impl Backing>) -> Result<Pool, MemoryError> {
    let built = limited(rig, 4).rdma_capable(true).build();
    built.map_err(|refused| match refused {
        PoolError::Memory(refused) => refused,
        other => panic!("{other}"),
    })
}

on_both! {
    fn a_device_is_tried_once(rig) {
        rig.faults.forget();
        Physical::probe_rdma(&rig.device).unwrap();
        for call in TRIES.into_iter().chain(UNDOES) {
            assert_eq!(rig.faults.count(call), 1, "{call:?}");
        }
        assert_eq!(rig.faults.total(), 8, "one asks for the attribute");
        Physical::probe_rdma(&rig.device).unwrap();
        drop(required(rig).unwrap());
        drop(Region::builder(&rig.device, G).rdma_capable(true).reserve().unwrap());
        assert_eq!(rig.faults.count(Call::MemCreate), 1);
        assert!(auto(rig));
        let (_plain, tenant) = common::with_tenant(limited(rig, 4).build().unwrap());
        assert!(!reaches(rig, tenant.try_allocate(G).unwrap().address()));
    }
}

/// WSL2 answers so when access is set.
#[test]
fn a_device_that_refuses_it_has_ordinary_memory() {
    for call in TRIES.into_iter().chain([Call::DeviceGetAttribute]) {
        let rig = common::clean(common::host());
        let unknown = CUresult::CUDA_ERROR_UNKNOWN;
        rig.faults.arm(nth_of(1, unknown, &[call]));
        assert!(!auto(&rig), "{call:?}");
        rig.faults.disarm();
        rig.faults.forget();
        let refused = required(&rig).map(drop).unwrap_err();
        let wanted = rig.device.location();
        assert!(
            matches!(refused, MemoryError::NoRdma { device, .. } if device == wanted),
            "{call:?}: {refused}"
        );
        let error = refused.call().and_then(|cause| cause.driver()).unwrap();
        assert_eq!((error.call(), error.code()), (call, Some(unknown)));
        assert!(refused.to_string().contains("RDMA"), "{refused}");
        let region = Region::builder(&rig.device, G).rdma_capable(true).reserve();
        assert_eq!(region.map(drop).unwrap_err(), refused);
        assert_eq!(rig.faults.total(), 0, "the device is not tried again");
    }
}

#[test]
fn a_shortage_says_nothing_about_the_device() {
    for call in TRIES {
        let rig = common::clean(common::host());
        let short = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        rig.faults.arm(nth_of(1, short, &[call]));
        assert!(!auto(&rig), "{call:?}");
        rig.faults.arm(nth_of(1, short, &[call]));
        let refused = required(&rig).map(drop).unwrap_err();
        assert!(refused.is_out_of_memory(), "{refused}");
        rig.faults.disarm();
        assert!(auto(&rig), "it is tried again");
        drop(required(&rig).unwrap());
    }
}

#[test]
fn a_granule_that_cannot_be_undone_is_counted() {
    for call in UNDOES {
        let rig = common::host();
        let unknown = CUresult::CUDA_ERROR_UNKNOWN;
        rig.faults.arm(Fault::all(unknown).only(&[call]));
        assert!(Physical::probe_rdma(&rig.device).is_ok(), "{call:?}");
        rig.faults.disarm();
        assert_eq!(rig.device.drop_failures(), 1, "{call:?}");
        assert!(auto(&rig));
    }
}

#[test]
fn a_lost_context_is_an_error() {
    for call in TRIES {
        let rig = common::host();
        let lost = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
        rig.faults.arm(nth_of(1, lost, &[call]));
        let refused = limited(&rig, 4).rdma_if_supported().map(drop).unwrap_err();
        assert!(refused.call().is_some(), "{refused}");
        assert!(rig.device.lost().is_some());
    }
}

#[test]
fn a_device_that_promises_none_is_not_tried() {
    let without = DeviceAttribute::GPU_DIRECT_RDMA_WITH_VMM;
    let rig = common::clean(common::rig(ModelDriver::new(
        model_options().attribute(without, 0),
    )));
    rig.faults.forget();
    assert!(!auto(&rig));
    let created = rig.faults.count(Call::MemCreate);
    let refused = required(&rig).map(drop).unwrap_err();
    assert!(
        matches!(refused, MemoryError::NotSupported { .. }),
        "{refused}"
    );
    assert_eq!(rig.faults.count(Call::MemCreate), created);
    assert_eq!(rig.faults.count(Call::DeviceGetAttribute), 1);
}
