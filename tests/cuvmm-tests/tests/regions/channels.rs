//! Memory sent over a channel and published under a name, between two drivers that do not know each
//! other, as in two processes.

use std::thread;
use std::time::Duration;

use crate::common;
use crate::common::{G, MIB};
use cuvmm::driver::{Call, HandleTypes};
use cuvmm::error::{ArgumentError, DescriptionError, MemoryError, ShareError};
use cuvmm::share::{Manifest, Publisher, Subscriber, Tensor};
use cuvmm::{Access, Attachment, Channel, Device, DeviceVec, Limit, Offer, Pool, Region, Stream};

const FD: HandleTypes = HandleTypes::POSIX_FD;

fn region(device: &Device, granules: u64) -> Region {
    Region::builder(device, granules * G)
        .shareable(FD)
        .reserve()
        .unwrap()
}

/// Sends on one thread and receives on another.
fn give(
    offer: &Offer,
    how: &cuvmm::share::AttachmentBuilder<'_>,
) -> (Result<(), ShareError>, Result<Attachment, ShareError>) {
    let (mut one, mut other) = Channel::pair().unwrap();
    thread::scope(|scope| {
        let given = scope.spawn(move || one.send(offer));
        let taken = other.recv(how);
        (given.join().unwrap(), taken)
    })
}

#[test]
fn a_region_with_holes_is_seen_as_it_is() {
    let (giver, taker) = (common::clean(common::host()), common::clean(common::host()));
    let stream = Stream::legacy(&giver.device);
    let mut mine = region(&giver.device, 16);
    mine.commit(G..4 * G).unwrap();
    mine.commit(8 * G..9 * G).unwrap();
    mine.write(&stream, 3 * G, b"third").unwrap();
    mine.write(&stream, 9 * G - 3, b"end").unwrap();
    let extents = mine.extents();

    let offer = Offer::region(&mine, 0..16 * G).unwrap();
    let how = Attachment::builder(&taker.device);
    let (given, taken) = give(&offer, &how);
    given.unwrap();
    let theirs = taken.unwrap();
    drop((offer, mine));

    let stream = Stream::legacy(&taker.device);
    assert_eq!(
        (theirs.size(), theirs.held(), theirs.access()),
        (16 * G, 4 * G, Access::Read)
    );
    assert_eq!(theirs.runs(), [G..4 * G, 8 * G..9 * G]);
    let places = |extents: &[cuvmm::Extent]| -> Vec<(u64, u64)> {
        extents
            .iter()
            .map(|extent| (extent.offset, extent.size))
            .collect()
    };
    assert_eq!(places(&theirs.extents()), places(&extents));
    let mut bytes = [0; 5];
    theirs.read(&stream, 3 * G, &mut bytes).unwrap();
    assert_eq!(&bytes, b"third", "the memory outlives its giver");
    theirs.read(&stream, 9 * G - 3, &mut bytes[..3]).unwrap();
    assert_eq!(&bytes[..3], b"end");
    assert!(matches!(
        theirs.read(&stream, 4 * G - 2, &mut bytes),
        Err(MemoryError::NotCommitted { .. })
    ));
    assert!(matches!(
        theirs.read(&stream, 16 * G - 2, &mut bytes),
        Err(MemoryError::Argument(ArgumentError::OutOfRange { .. }))
    ));
    assert!(matches!(
        theirs.write(&stream, G, b"x"),
        Err(MemoryError::ReadOnly { .. })
    ));
    assert_eq!(theirs.view_of::<u64>(G..2 * G).unwrap().len() as u64, G / 8);
    assert!(matches!(
        theirs.view_of::<u64>(0..8),
        Err(ShareError::Memory(MemoryError::NotCommitted { .. }))
    ));
    assert!(matches!(
        theirs.view_of::<u64>(G + 4..G + 12),
        Err(ShareError::Argument(ArgumentError::Misaligned { .. }))
    ));
    theirs.close().unwrap();
}

#[test]
fn a_vector_arrives_with_its_elements_and_may_be_written_where_that_was_given() {
    let (giver, taker) = (common::clean(common::host()), common::clean(common::host()));
    let stream = Stream::new(&giver.device).unwrap();
    let mut mine: DeviceVec<u32> =
        DeviceVec::from_region(region(&giver.device, 2), &stream).unwrap();
    assert_eq!(mine.max_len() as u64, 2 * G / 4);
    assert!(matches!(
        Offer::vec(&mine),
        Err(ShareError::Memory(MemoryError::NotCommitted { .. }))
    ));
    mine.extend_from_slice(&[3, 1, 4, 1, 5]).unwrap();
    let reading = Offer::vec(&mine).unwrap();
    let wants_more = Attachment::builder(&taker.device).read_write();
    let (given, taken) = give(&reading, &wants_more);
    assert!(matches!(given, Err(ShareError::Refused(reason)) if reason.contains("read-only")));
    assert!(matches!(
        taken,
        Err(ShareError::Memory(MemoryError::ReadOnly { .. }))
    ));
    let (given, taken) = give(&reading.read_write(), &wants_more);
    given.unwrap();
    let mut theirs = taken.unwrap();
    assert_eq!(theirs.view::<u32>().unwrap().len(), 5);
    assert!(matches!(
        theirs.view::<u64>(),
        Err(ShareError::ElementSize {
            wanted: 8,
            given: Some(4)
        })
    ));
    assert_eq!(
        theirs.view_mut_of::<u32>(0..20).unwrap().address(),
        theirs.address()
    );
    let there = Stream::legacy(&taker.device);
    theirs.write(&there, 4, &9u32.to_ne_bytes()).unwrap();
    assert_eq!(mine.to_vec().unwrap(), [3, 9, 4, 1, 5]);
}

#[test]
fn a_block_is_nobody_elses_once_it_was_offered() {
    let (giver, taker) = (common::clean(common::host()), common::clean(common::host()));
    let pool = Pool::builder(&giver.device)
        .limit(Limit::Bytes(16 * G))
        .shareable(FD)
        .build()
        .unwrap();
    let tenant = pool.tenant("weights").register().unwrap();
    let stream = Stream::new(&giver.device).unwrap();
    let block = tenant.allocate_on(&stream, 3 * G).unwrap();
    block.write(2 * G, b"mine").unwrap();
    let offer = Offer::block(&block).unwrap();
    assert_eq!(pool.stats().exported, 3 * G);
    let (given, taken) = give(&offer, &Attachment::builder(&taker.device).read_write());
    assert!(given.is_err() && taken.is_err(), "offered read-only");
    let (given, taken) = give(
        &offer.read_write(),
        &Attachment::builder(&taker.device).read_write(),
    );
    given.unwrap();
    let theirs = taken.unwrap();
    drop(block);
    let there = Stream::legacy(&taker.device);
    theirs.write(&there, 2 * G, b"late").unwrap();
    let next = tenant
        .block(3 * G)
        .home_stream(&stream)
        .zeroed(false)
        .allocate()
        .unwrap();
    let mut bytes = [1; 4];
    next.read(2 * G, &mut bytes).unwrap();
    assert_ne!(&bytes, b"late", "the memory was reused by the next block");
    assert_eq!(pool.stats().exported, 0, "exported memory was released");
    theirs.read(&there, 2 * G, &mut bytes).unwrap();
    assert_eq!(&bytes, b"late");
    drop((theirs, next, tenant));
    pool.close().unwrap();
}

// I-61
/// A fork must not share memory that another process can write, nor the reverse.
#[test]
fn what_is_offered_is_not_forked_and_what_is_forked_is_not_offered() {
    let rig = common::clean(common::host());
    let mut mine = region(&rig.device, 4);
    mine.commit(0..4 * G).unwrap();
    let offer = Offer::region(&mine, 0..4 * G).unwrap();
    assert!(
        mine.fork(&[]).is_err(),
        "not sent yet, but it may be at any time"
    );
    drop(offer);
    let mut other = region(&rig.device, 4);
    other.commit(0..4 * G).unwrap();
    let _fork = other.fork(&[]).unwrap();
    assert!(matches!(
        Offer::region(&other, 0..4 * G),
        Err(ShareError::Memory(MemoryError::ReadOnly(bytes))) if bytes == (0..4 * G)
    ));
}

/// Pending memory is still mapped, but its owner has given it up.
#[test]
fn what_was_withdrawn_is_not_offered_with_the_rest() {
    let rig = common::clean(common::host());
    let mut mine = region(&rig.device, 8);
    mine.commit(0..4 * G).unwrap();
    mine.commit(4 * G..8 * G).unwrap();
    mine.decommit(0..4 * G).unwrap();
    assert_eq!(mine.pending_free(), 4 * G);
    let offer = Offer::region(&mine, 0..8 * G).unwrap();
    let offered: Vec<u64> = offer
        .description()
        .extents()
        .iter()
        .map(|it| it.offset)
        .collect();
    assert_eq!((offered, offer.description().held()), (vec![4 * G], 4 * G));
    assert!(matches!(
        Offer::region(&mine, 0..4 * G),
        Err(ShareError::Memory(MemoryError::NotCommitted(bytes))) if bytes == (0..4 * G)
    ));
    assert!(matches!(
        Offer::region(&mine, 4 * G..9 * G),
        Err(ShareError::Argument(ArgumentError::OutOfRange { .. }))
    ));
}

/// Making a handle can take the driver half a millisecond, so a reused offer keeps its handles.
#[test]
fn an_offer_of_few_extents_makes_their_handles_once() {
    let (giver, taker) = (common::clean(common::host()), common::clean(common::host()));
    let mut mine = region(&giver.device, 4);
    mine.commit(0..4 * G).unwrap();
    let offer = Offer::region(&mine, 0..4 * G).unwrap();
    giver.faults.forget();
    let how = Attachment::builder(&taker.device);
    let attached: Vec<Attachment> = (0..3).map(|_| give(&offer, &how).1.unwrap()).collect();
    let extents = mine.extents().len() as u64;
    assert_eq!(
        giver.faults.count(Call::MemExportToShareableHandle),
        extents
    );
    let mut first = attached.into_iter();
    drop((offer, mine, first.next()));
    for left in first {
        let stream = Stream::legacy(&taker.device);
        left.read(&stream, 4 * G - 1, &mut [0]).unwrap();
    }
}

#[test]
fn editions_are_whole_and_readers_hear_of_newer_ones() {
    let (writer, reader) = (common::clean(common::host()), common::clean(common::host()));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("models");
    let publisher = Publisher::bind(&path).unwrap();
    let published = |text: &[u8]| {
        let mut region = region(&writer.device, 2);
        region.commit(0..2 * G).unwrap();
        region
            .write(&Stream::legacy(&writer.device), MIB, text)
            .unwrap();
        region
    };
    let manifest = |size| Manifest {
        tensors: vec![Tensor {
            name: "weight".to_owned(),
            dtype: "U8".to_owned(),
            shape: vec![size],
            offset: MIB,
            size,
        }],
        ..Manifest::default()
    };
    let mut subscriber = Subscriber::connect(&path).unwrap();
    assert_eq!(subscriber.list().unwrap().publications, []);
    let how = Attachment::builder(&reader.device);
    assert!(matches!(
        subscriber.attach("llama", &how),
        Err(ShareError::NotFound { .. })
    ));

    let refused = publisher
        .publish("llama", manifest(4 * G), published(b"first"))
        .unwrap_err();
    assert!(matches!(
        refused.reason,
        ShareError::Description(DescriptionError::Tensor { .. })
    ));
    let version = publisher
        .publish("llama", manifest(5), refused.owner)
        .unwrap();
    assert_eq!(version, 1);
    let first = subscriber.attach("llama", &how).unwrap();
    let bytes = |publication: &cuvmm::share::Publication| {
        let tensor = publication.manifest().tensor("weight").unwrap();
        let mut bytes = vec![0; tensor.size as usize];
        let stream = Stream::legacy(&reader.device);
        publication
            .memory()
            .read(&stream, tensor.offset, &mut bytes)
            .unwrap();
        bytes
    };
    assert_eq!((first.version(), bytes(&first)), (1, b"first".to_vec()));
    assert_eq!(first.view::<u8>("weight").unwrap().len(), 5);
    let other = first.view::<i8>("weight").unwrap_err();
    assert!(
        matches!(other, ShareError::ElementType { wanted: "i8", .. }),
        "{other}"
    );
    let listed = &subscriber.list().unwrap().publications[0];
    assert_eq!((listed.held, listed.version, listed.tensors), (2 * G, 1, 1));
    let soon = Duration::from_millis(20);
    assert_eq!(subscriber.wait_for_newer(&first, soon).unwrap(), None);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| subscriber.wait_for_newer(&first, Duration::from_secs(20)));
        thread::sleep(soon);
        publisher
            .publish("llama", manifest(6), published(b"second"))
            .unwrap();
        assert_eq!(waiting.join().unwrap().unwrap(), Some(2));
    });
    let second = subscriber.attach("llama", &how).unwrap();
    assert_eq!((second.version(), bytes(&second)), (2, b"second".to_vec()));
    assert_eq!(bytes(&first), b"first", "the first version is unchanged");
    drop(publisher);
    assert!(subscriber.list().is_err());
    assert!(Subscriber::connect(&path).is_err());
    assert_eq!(bytes(&second), b"second", "readers outlive the publisher");
    drop((first, second));
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        0,
        "no file is left"
    );
}
