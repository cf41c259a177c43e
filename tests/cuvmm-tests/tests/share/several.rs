//! Tests I-114. Offers of several blocks and allocations of heaps, published in place.

use std::sync::Arc;

use crate::common;
use crate::common::{G, Rig, pool, shareable};
use crate::share_support::leaves_nothing_open;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::host::HostMemory;
use cuvmm::driver::{CUresult, Call, DeviceAddress};
use cuvmm::error::{DescriptionError, MemoryError, ShareError, SleepError};
use cuvmm::share::{Keeper, Manifest, Offered, Publisher, Subscriber, Tensor};
use cuvmm::{Access, Allocation, Attachment, Contents, Heap, Offer, Stream, Tenant};

type Host = Rig<HostMemory>;

/// Fills bytes at an address, and waits for that.
fn fill(rig: &Host, at: DeviceAddress, size: u64, byte: u8) {
    let stream = Stream::legacy(&rig.device);
    rig.kernel(&stream, &[], &[(at, size, byte)]);
    stream.synchronize().unwrap();
}

fn byte(rig: &Host, memory: &Attachment, offset: u64) -> u8 {
    let mut bytes = [0];
    memory
        .read(&Stream::legacy(&rig.device), offset, &mut bytes)
        .unwrap();
    bytes[0]
}

fn allocate(heap: &Heap, size: u64, stream: &Stream) -> Arc<Allocation> {
    Arc::new(heap.allocate(size, 512, stream).unwrap())
}

fn tensor(name: &str, offset: u64, size: u64) -> Manifest {
    let tensors = vec![Tensor {
        name: name.to_owned(),
        dtype: "U8".to_owned(),
        shape: vec![size],
        offset,
        size,
    }];
    Manifest {
        tensors,
        ..Manifest::default()
    }
}

/// Waits until the pool has given back what it can, and the tenant has these exported bytes.
fn exports(tenant: &Tenant, pool: &cuvmm::Pool, bytes: u64) {
    common::until(pool, "the memory is given back", || {
        pool.trim(0).unwrap();
        tenant.stats().exported == bytes
    });
}

#[test]
fn blocks_are_published_in_place_and_kept_while_they_are() {
    leaves_nothing_open(|| {
        let (rig, reader) = (common::clean(common::host()), common::clean(common::host()));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let pool = shareable(&rig, 32).build().unwrap();
        let tenant = pool.tenant("weights").register().unwrap();
        let blocks = [3, 1, 2].map(|granules| tenant.try_allocate(granules * G).unwrap());
        for (block, byte) in blocks.iter().zip([1, 2, 3]) {
            fill(&rig, block.address(), block.size(), byte);
        }
        let all = blocks.each_ref().map(Offered::Block);
        let offer = Offer::several(&[all.as_slice(), &all[..1]].concat()).unwrap();
        assert_eq!(offer.description().access(), Access::Read);
        assert_eq!(offer.description().held(), 6 * G, "a block is offered once");
        let offsets = blocks.each_ref().map(|block| {
            let offset = offer.offset_of(block.address(), block.size()).unwrap();
            assert_eq!(
                offer.offset_of(DeviceAddress(block.address().0 + 7), 9),
                Some(offset + 7)
            );
            offset
        });
        let [first, ..] = &blocks;
        assert_eq!(
            offer.offset_of(DeviceAddress(first.address().0 - 1), 1),
            None
        );
        assert_eq!(offer.offset_of(first.address(), u64::MAX), None);

        let publisher = Publisher::bind(&path).unwrap();
        let wrong = publisher.publish_in_place("model", &tensor("t", 5 * G + 1, G), offer);
        let is_outside = |error: &ShareError| {
            matches!(
                error,
                ShareError::Description(DescriptionError::Tensor { .. })
            )
        };
        assert!(wrong.is_err_and(|error| is_outside(&error)));
        assert!(publisher.list().is_empty());
        // The driver makes no handle.
        let offer = Offer::several(&all).unwrap();
        let fault = Fault::all(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        rig.faults.arm(fault.of(Call::MemExportToShareableHandle));
        let refused = publisher.publish_in_place("model", &Manifest::default(), offer);
        rig.faults.disarm();
        assert!(refused.is_err_and(|error| error.is_out_of_memory()));
        assert!(publisher.list().is_empty());
        let offer = Offer::several(&all).unwrap();
        let manifest = tensor("second", offsets[1], G);
        assert_eq!(
            publisher
                .publish_in_place("model", &manifest, offer)
                .unwrap(),
            1
        );
        // No keeper would know when the memory is used further.
        let keeper = Keeper::bind(folder.path().join("keeper"), None).unwrap();
        let refused = publisher.keep("model", keeper.path());
        assert!(matches!(refused, Err(ShareError::InPlace(name)) if name == "model"));
        let taken = keeper.take("model", publisher.path());
        assert!(matches!(taken, Err(ShareError::InPlace(name)) if name == "model"));
        assert!(keeper.list().is_empty());
        drop(keeper);
        // The owner may go on writing, and its readers see that.
        let mut subscriber = Subscriber::connect(&path).unwrap();
        let how = Attachment::builder(&reader.device);
        let model = subscriber.attach("model", &how).unwrap();
        let second = model.manifest().tensor("second").unwrap().offset;
        let seen = || offsets.map(|offset| byte(&reader, model.memory(), offset));
        assert_eq!((seen(), second), ([1, 2, 3], offsets[1]));
        fill(&rig, blocks[1].address(), G, 9);
        assert_eq!(seen(), [1, 9, 3]);

        // The memory stays where it is although its blocks are dropped.
        drop(blocks);
        exports(&tenant, &pool, 6 * G);
        let again = subscriber.attach("model", &how).unwrap();
        assert_eq!(byte(&reader, again.memory(), offsets[1]), 9);
        assert!(publisher.withdraw("model"));
        exports(&tenant, &pool, 0);
        assert_eq!(seen(), [1, 9, 3], "a reader keeps the memory");
    });
}

#[test]
fn allocations_of_a_heap_are_offered_extent_by_extent() {
    leaves_nothing_open(|| {
        let rig = common::clean(common::host());
        let pool = shareable(&rig, 64).build().unwrap();
        let tenant = pool.tenant("torch").register().unwrap();
        let heap = Heap::builder(&tenant).build().unwrap();
        let stream = Stream::new(&rig.device).unwrap();
        let block = tenant.try_allocate(G).unwrap();
        let large = allocate(&heap, 9 * G, &stream);
        let small = [0; 2].map(|_| allocate(&heap, 512, &stream));
        fill(&rig, block.address(), G, 1);
        fill(&rig, large.address(), 9 * G, 2);
        fill(&rig, small[0].address(), 512, 3);
        fill(&rig, small[1].address(), 512, 4);
        let both = small.each_ref().map(Offered::Allocation);
        let all = [
            Offered::Block(&block),
            Offered::Allocation(&large),
            both[0],
            both[1],
        ];
        let offer = Offer::several(&all).unwrap().read_write();
        // Small allocations share an extent, which is offered once.
        let held = offer.description().held();
        let less = Offer::several(&all[..3]).unwrap().description().held();
        assert_eq!(held, less);
        let parcel = offer.parcel().unwrap();
        let how = Attachment::builder(&rig.device).read_write();
        let attached = how.open(&parcel).unwrap();
        let place = |at: DeviceAddress, size| offer.offset_of(at, size).unwrap();
        let big = place(large.address(), 9 * G);
        let ends = [big, big + 9 * G - 1, place(block.address(), G)];
        assert_eq!(ends.map(|at| byte(&rig, &attached, at)), [2, 2, 1]);
        let little = small.each_ref().map(|it| place(it.address(), 512));
        assert_eq!(little.map(|at| byte(&rig, &attached, at)), [3, 4]);
        assert_eq!(little[1].abs_diff(little[0]), 512);

        // The heap's exported memory stays where it is, and no other tenant gets it.
        let store = cuvmm::HostStore::builder(&rig.device)
            .pinned(16 * G)
            .build()
            .unwrap();
        let slept = heap.alone().sleep(Contents::Keep(&store));
        assert!(
            matches!(slept, Err(SleepError::Exported { .. })),
            "{slept:?}"
        );
        let addresses = small.each_ref().map(|it| it.address());
        drop(small);
        drop(allocate(&heap, 512, &stream));
        let other = allocate(&heap, 512, &stream);
        assert!(
            !addresses.contains(&other.address()),
            "the offer keeps both"
        );
        drop((offer, other, large));
        stream.synchronize().unwrap();
        drop(block);
        heap.trim().unwrap();
        exports(&tenant, &pool, 0);
        let stats = pool.stats();
        assert_eq!((stats.free, stats.quarantined), (0, 0));
    });
}

#[test]
fn what_cannot_be_offered_together_counts_as_not_exported() {
    leaves_nothing_open(|| {
        let rig = common::clean(common::host());
        let (good, other) = (shareable(&rig, 8).build().unwrap(), pool(&rig, 8));
        let tenants = [&good, &other].map(|pool| pool.tenant("t").register().unwrap());
        let [block, own] = tenants.each_ref().map(|it| it.try_allocate(G).unwrap());
        let wrong = Offer::several(&[Offered::Block(&block), Offered::Block(&own)]);
        let is_own = |error: &ShareError| {
            matches!(error, ShareError::Memory(MemoryError::NotShareable { .. }))
        };
        assert!(wrong.is_err_and(|error| is_own(&error)));
        assert!(Offer::several(&[]).is_err());
        assert_eq!(tenants.each_ref().map(|it| it.stats().exported), [0, 0]);
        drop((block, own));
    });
}
