//! Tensors in device memory that the host cannot access, through the code for the real driver, over
//! a stand-in for its library.
//!
//! `unsafe` is used to play another library.
#![allow(unsafe_code)]

#[path = "../../../stand-in/fakecuda/testing/built.rs"]
mod built;

use std::sync::Arc;

use cuvmm::dlpack::dlpark::ffi::{DLDevice, DLManagedTensorVersioned};
use cuvmm::dlpack::{Consumer, Imported, Tensor};
use cuvmm::driver::cuda::CudaDriver;
use cuvmm::driver::fault::{Fault, FaultDriver};
use cuvmm::driver::{CUresult, Call, Driver};
use cuvmm::error::{
    ArgumentError, CallError, HandedBack, MemoryError, TensorError, TensorError as Refusal,
};
use cuvmm::{Device, Layout, Place, Region, Stream};
use dlpark::Managed;

struct Rig {
    faults: Arc<FaultDriver>,
    device: Device,
    stream: Stream,
    /// Keeps the library that the driver was loaded from.
    _directory: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let library = built::fakecuda_in(directory.path());
        // SAFETY: the stand-in was just built from this workspace.
        let driver = unsafe { CudaDriver::open_library(&library) }.unwrap();
        let faults = Arc::new(FaultDriver::new(Arc::new(driver)));
        let driver: Arc<dyn Driver> = faults.clone();
        let device = Device::open(driver, 0).unwrap();
        let stream = Stream::new(&device).unwrap();
        Self {
            faults,
            device,
            stream,
            _directory: directory,
        }
    }

    fn g(&self) -> u64 {
        self.device.granularity()
    }

    /// Creates a region of three extents of one granule each, with bytes around their boundaries.
    fn region(&self) -> Arc<Region> {
        let g = self.g();
        let mut region = Region::builder(&self.device, 4 * g)
            .largest_extent(g)
            .reserve()
            .unwrap();
        region.commit(0..3 * g).unwrap();
        region.write(&self.stream, g - 2, &[1, 2, 3, 4]).unwrap();
        Arc::new(region)
    }

    fn import(
        &self,
        tensor: &Tensor,
        region: &Arc<Region>,
        change: impl Fn(&mut DLManagedTensorVersioned),
    ) -> Result<Imported, HandedBack<Managed<DLManagedTensorVersioned>, TensorError>> {
        let tensor = tensor
            .export(Arc::clone(region), &Consumer::Ordered)
            .unwrap();
        // SAFETY: nothing else accesses the descriptor.
        change(unsafe { &mut *tensor.as_ptr() });
        // SAFETY: the import must find the error in the descriptor before it uses any memory.
        unsafe { Imported::new(&self.stream, tensor) }
    }
}

/// A single test, because the stand-in is one library with one state per process.
#[test]
fn memory_of_a_device_is_looked_for_before_it_is_used() {
    let rig = Rig::new();
    let g = rig.g();
    let region = rig.region();
    let all = Tensor::of::<u8>(&[3 * g as usize]);

    // Exported as memory of the device, not of the host.
    let tensor = all.export(
        Arc::clone(&region),
        &Consumer::Stream(Stream::legacy(&rig.device)),
    );
    let tensor = tensor.unwrap();
    let view = tensor.validate().unwrap();
    assert_eq!(view.device(), DLDevice::cuda(0));
    assert_eq!(view.data_ptr().addr() as u64, region.address().0);
    drop(tensor);

    // Imported again: every mapping is looked up.
    rig.faults.forget();
    let mut imported = rig.import(&all, &region, |_| ()).unwrap();
    assert_eq!(rig.faults.count(Call::MemGetAddressRange), 3);
    assert!(!imported.is_on_host());
    let mut bytes = [0; 4];
    imported.read(g - 2, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 3, 4]);
    imported.write(g, &[30]).unwrap();
    region.read(&rig.stream, g - 2, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 30, 4]);
    assert_eq!(imported.view::<u8>().unwrap().len() as u64, 3 * g);
    assert!(matches!(
        imported.read(3 * g - 1, &mut bytes),
        Err(TensorError::Argument(ArgumentError::OutOfRange { .. }))
    ));
    drop(imported);

    // Memory that is not mapped, or not on this device.
    let one_more = |tensor: &mut DLManagedTensorVersioned| tensor.dl_tensor.byte_offset = 1;
    let refused = rig.import(&all, &region, one_more).unwrap_err();
    assert!(
        matches!(refused.reason, Refusal::NotThere { address, .. } if address.0 == region.address().0 + 3 * g),
        "{refused}"
    );
    drop(refused);
    let refused = rig.import(&all, &region, |tensor| {
        tensor.dl_tensor.device = DLDevice::cuda(1)
    });
    assert!(matches!(
        refused.unwrap_err().reason,
        Refusal::WrongDevice { .. }
    ));

    // Host memory in a region belongs to the host, and a tensor has a single location.
    let on_host = Place::HostNuma(0);
    let mut mixed = Region::builder(&rig.device, 2 * g)
        .layout(Layout::shares([
            (Place::from(&rig.device), g),
            (on_host, g),
        ]))
        .largest_extent(g)
        .reserve()
        .unwrap();
    mixed.commit(0..2 * g).unwrap();
    let mixed = Arc::new(mixed);
    let (half, whole) = (g as usize, 2 * g as usize);
    let refused = Tensor::of::<u8>(&[whole]).export(Arc::clone(&mixed), &Consumer::Ordered);
    let refused = refused.err().unwrap();
    assert!(
        matches!(refused.reason, TensorError::Memory(MemoryError::Elsewhere { offset, .. }) if offset == g),
        "{refused}"
    );
    drop(refused);
    for (offset, device) in [(0, DLDevice::cuda(0)), (g, DLDevice::CPU)] {
        let half = Tensor::of::<u8>(&[half]).offset(offset);
        let tensor = half
            .export(Arc::clone(&mixed), &Consumer::Synchronized)
            .unwrap();
        assert_eq!(tensor.validate().unwrap().device(), device);
    }
    // Kernels have no access to host memory of another library.
    let half = Tensor::of::<u8>(&[half]).offset(g);
    let mut imported = rig.import(&half, &mixed, |_| ()).unwrap();
    assert!(imported.is_on_host());
    assert!(matches!(imported.view::<u8>(), Err(TensorError::OnHost)));
    imported.write(0, &[7]).unwrap();
    let mut byte = [0];
    mixed.read(&rig.stream, g, &mut byte).unwrap();
    assert_eq!(byte, [7]);
    // A wrong claim to be device memory is detected.
    let refused = rig.import(&half, &mixed, |tensor| {
        tensor.dl_tensor.device = DLDevice::cuda(0)
    });
    assert!(matches!(
        refused.unwrap_err().reason,
        Refusal::NotThere { .. }
    ));
    drop((imported, mixed));

    // Fail each driver call of an import once: the tensor is returned.
    let mut calls = 0;
    for n in 1.. {
        rig.faults.forget();
        rig.faults.arm(Fault::nth(n, CUresult::CUDA_ERROR_UNKNOWN));
        let outcome = rig.import(&all, &region, |_| ());
        rig.faults.disarm();
        let Err(refused) = outcome else { break };
        assert!(matches!(
            refused.reason,
            Refusal::Memory(MemoryError::Call(CallError::Driver(_)))
        ));
        assert_eq!(Arc::strong_count(&region), 2, "the tensor was returned");
        drop(refused);
        assert_eq!(Arc::strong_count(&region), 1);
        calls = n;
    }
    assert_eq!(calls, 9);
    drop(region);
    assert_eq!(rig.device.drop_failures(), 0);
}
