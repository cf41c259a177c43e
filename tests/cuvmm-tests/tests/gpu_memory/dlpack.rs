//! Tensors exchanged between libraries, under kernels: no access is too early, whichever library
//! makes it, and no late work of one finds memory of another.
//!
//! `unsafe` is used to play another library.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use crate::gpu;
use crate::on_each;
use cuvmm::dlpack::dlpark::ffi::DLDevice;
use cuvmm::dlpack::dlpark::versioned::Dlpack;
use cuvmm::dlpack::{Consumer, Imported, Tensor};
use cuvmm::driver::{DeviceAddress, DeviceMemory};
use cuvmm::{Block, Stream};

/// Delay of kernels, so that an access that does not wait for them is too early.
const LATE: Duration = Duration::from_millis(20);

fn words_of(block: &Block) -> Tensor {
    Tensor::of::<u32>(&[block.size() as usize / 4])
}

/// Returns the address and the size of a tensor's elements, as a consumer sees them.
fn at(tensor: &Dlpack) -> (DeviceAddress, u64) {
    let seen = tensor.validate().unwrap();
    let address = DeviceAddress(seen.data_ptr().addr() as u64);
    (address, seen.num_bytes() as u64)
}

fn import(stream: &Stream, tensor: Dlpack) -> Imported {
    // SAFETY: the tensors exported here describe their memory truthfully.
    unsafe { Imported::new(stream, tensor) }.unwrap()
}

on_each! {
    fn a_tensor_names_where_it_lies(stage) {
        let pool = stage.pool(2);
        let tenant = pool.tenant("a").register().unwrap();
        let block = tenant.allocate_on(&stage.stream(), stage.g()).unwrap();
        let tensor = words_of(&block).export(block, &Consumer::Synchronized).unwrap();
        let on_gpu = stage.driver().device_memory() == DeviceMemory::Device;
        let place = if on_gpu { DLDevice::cuda(0) } else { DLDevice::CPU };
        assert_eq!(tensor.validate().unwrap().device(), place);
        drop((tensor, tenant));
        pool.close().unwrap();
    }

    fn the_consumer_sees_what_was_queued(stage) {
        let pool = stage.pool(4);
        let tenant = pool.tenant("a").register().unwrap();
        let [home, other, theirs] = stage.streams();
        for _ in 0..stage.scaled(20, 5) {
            let block = tenant.allocate_on(&home, 2 * stage.g()).unwrap();
            block.record_use(&other).unwrap();
            let stamp = stage.stamp();
            stage.late_fill(&other, &block, stamp, LATE);
            let consumer = Consumer::Stream(theirs.clone());
            let tensor = words_of(&block).export(block, &consumer).unwrap();
            let (address, bytes) = at(&tensor);
            stage.work().check(&theirs, address, bytes, stamp);
            drop(tensor);
        }
        stage.settle();
        drop(tenant);
        pool.close().unwrap();
    }

    fn late_work_of_theirs_finds_no_new_owner(stage) {
        let pool = stage.pool(4);
        let tenant = pool.tenant("a").register().unwrap();
        let other = pool.tenant("b").register().unwrap();
        let [home, theirs] = stage.streams();
        for round in 0..stage.scaled(20, 5) {
            let block = tenant.allocate_on(&home, 4 * stage.g()).unwrap();
            let tensor = if round % 2 == 0 {
                words_of(&block).export(block, &Consumer::Ordered).unwrap()
            } else {
                let lease = block.lease();
                let tensor = words_of(&block).export(lease, &Consumer::Ordered).unwrap();
                drop(block);
                tensor
            };
            let (address, bytes) = at(&tensor);
            stage.work().fill(&theirs, address, bytes, stage.stamp(), LATE);
            drop(tensor);
            // The request takes the whole pool. The next owner is the same tenant, on its home
            // stream or another, or another tenant.
            let mine = stage.stamp();
            let next = gpu::eventually(|| match round % 3 {
                0 => tenant.allocate_on(&home, 4 * stage.g()),
                1 => tenant.allocate_on(&stage.stream(), 4 * stage.g()),
                _ => other.block(4 * stage.g()).home_stream(&home).try_allocate(),
            });
            let stream = next.home_stream().unwrap().clone();
            stage.fill(&stream, &next, mine);
            stage.check(&stream, &next, mine);
            stage.settle();
            stage.check(&stream, &next, mine);
            stage.settle();
            drop(next);
            pool.trim(0).unwrap();
        }
        drop((tenant, other));
        pool.close().unwrap();
    }

    fn a_tensor_goes_back_behind_our_kernels(stage) {
        let pool = stage.pool(4);
        let tenant = pool.tenant("a").register().unwrap();
        let [home, other, producer] = stage.streams();
        let block = Arc::new(tenant.allocate_on(&producer, 4 * stage.g()).unwrap());
        for round in 0..stage.scaled(20, 5) {
            let consumer = Consumer::Stream(home.clone());
            let tensor = words_of(&block).export(Arc::clone(&block), &consumer).unwrap();
            let mut taken = import(&home, tensor);
            taken.record_use(&other).unwrap();
            let stamp = stage.stamp();
            stage.work().fill(&other, taken.address(), taken.size(), stamp, LATE);
            if round % 2 == 0 {
                taken.give_back(&producer).unwrap();
            } else {
                drop(taken);
            }
            assert_eq!(Arc::strong_count(&block), 1);
            stage.check(&producer, &block, stamp);
        }
        let mut taken = import(&home, words_of(&block).export(block, &Consumer::Synchronized).unwrap());
        taken.write(8, &[1, 2, 3, 4]).unwrap();
        let mut bytes = [0; 4];
        taken.read(8, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3, 4]);
        drop((taken, tenant));
        pool.close().unwrap();
    }
}
