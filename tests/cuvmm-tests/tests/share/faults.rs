//! Fails every driver call of sending, receiving, publishing and attaching once, on either side. A
//! failure changes nothing, the peer is notified, and a second attempt succeeds.

use std::thread;

use crate::common;
use crate::common::sweep::{sweep, sweep_partly, text};
use crate::common::{G, Rig, shareable_region};
use crate::share_support::leaves_nothing_open;
use cuvmm::driver::model::Nothing;
use cuvmm::error::{MemoryError, ShareError};
use cuvmm::share::{Manifest, Parcel, Publication, Publisher, Subscriber};
use cuvmm::{Attachment, Channel, Offer, Region};

type Model = Rig<Nothing>;

/// Extents of everything that is sent.
const EXTENTS: u64 = 3;

/// More extents than a publisher keeps handles for: it makes handles for each reader.
const MANY: u64 = 65;

fn region(rig: &Model) -> Region {
    shareable_region(rig, EXTENTS)
}

fn offer(region: &Region) -> Offer {
    Offer::region(region, 0..EXTENTS * G).unwrap()
}

/// Sends on one thread and receives on another. The channel stays usable.
fn give(offer: &Offer, taker: &Model) -> (Result<(), ShareError>, Result<Attachment, ShareError>) {
    let (mut one, mut other) = Channel::pair().unwrap();
    let how = Attachment::builder(&taker.device);
    thread::scope(|scope| {
        let given = scope.spawn(|| one.send(offer));
        let taken = other.recv(&how);
        (given.join().unwrap(), taken)
    })
}

#[test]
fn giving() {
    leaves_nothing_open(|| {
        let world = |rig: &Model| {
            let region = region(rig);
            (offer(&region), region, common::model())
        };
        let give = |_: &Model, (offer, _, taker): &mut (Offer, Region, Model)| {
            let (given, taken) = give(offer, taker);
            match (&given, &taken) {
                (Ok(()), Ok(_)) => {}
                (
                    Err(why @ ShareError::Memory(MemoryError::Export { .. })),
                    Err(ShareError::Refused(reason)),
                ) => {
                    assert_eq!(*reason, why.to_string());
                    assert!(taker.machine.live().is_nothing());
                }
                other => panic!("{other:?}"),
            }
            text(given)
        };
        let held = |(_, region, _): &(Offer, Region, Model)| region.committed();
        assert_eq!(sweep(world, give, held), EXTENTS);
    });
}

#[test]
fn taking() {
    leaves_nothing_open(|| {
        let world = |_: &Model| {
            let giver = common::model();
            let region = region(&giver);
            (Vec::new(), offer(&region), region, giver)
        };
        type World = (Vec<Attachment>, Offer, Region, Model);
        let take = |rig: &Model, (attached, offer, _, _): &mut World| {
            let (given, taken) = give(offer, rig);
            match (given, taken) {
                (Ok(()), Ok(taken)) => {
                    attached.push(taken);
                    Ok(())
                }
                (Err(ShareError::Refused(reason)), Err(why @ ShareError::Memory(_))) => {
                    assert_eq!(reason, why.to_string());
                    Err(reason)
                }
                other => panic!("{other:?}"),
            }
        };
        let had = |world: &World| world.0.len();
        let calls = sweep(world, take, had);
        assert_eq!(calls, 1 + 4 * EXTENTS, "addresses; each extent");
    });
}

#[test]
fn by_hand() {
    leaves_nothing_open(|| {
        let world = |rig: &Model| {
            let region = region(rig);
            (Vec::new(), offer(&region), region)
        };
        let pack = |_: &Model, (parcels, offer, _): &mut (Vec<Parcel>, Offer, Region)| {
            parcels.push(text(offer.parcel())?);
            Ok(())
        };
        let packed = |world: &(Vec<Parcel>, Offer, Region)| world.0.len();
        assert_eq!(sweep(world, pack, packed), EXTENTS);
        let world = |_: &Model| {
            let giver = common::model();
            let region = region(&giver);
            (Vec::new(), offer(&region).parcel().unwrap(), region, giver)
        };
        type World = (Vec<Attachment>, Parcel, Region, Model);
        let open = |rig: &Model, (attached, parcel, _, _): &mut World| {
            let how = Attachment::builder(&rig.device);
            attached.push(text(how.open(parcel))?);
            Ok(())
        };
        let had = |world: &World| world.0.len();
        assert_eq!(sweep(world, open, had), 1 + 4 * EXTENTS);
    });
}

#[test]
fn closing() {
    leaves_nothing_open(|| {
        let world = |rig: &Model| {
            let giver = common::model();
            let region = region(&giver);
            let parcel = offer(&region).parcel().unwrap();
            let how = Attachment::builder(&rig.device);
            (Some(how.open(&parcel).unwrap()), region, giver)
        };
        type World = (Option<Attachment>, Region, Model);
        let close = |_: &Model, (attached, _, _): &mut World| {
            if let Err(error) = attached.take().unwrap().close() {
                let said = error.reason.to_string();
                attached.replace(error.owner);
                return Err(said);
            }
            Ok(())
        };
        // Memory that was unmapped before a failure stays unmapped.
        let there = |world: &World| world.1.committed();
        let calls = sweep_partly(world, close, there);
        assert!(calls > 2 * EXTENTS, "{calls}");
    });
}

/// A publisher and the folder of its socket.
struct Shop {
    publisher: Publisher,
    folder: tempfile::TempDir,
}

impl Shop {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let publisher = Publisher::bind(folder.path().join("socket")).unwrap();
        Self { publisher, folder }
    }

    fn of(region: Region) -> Self {
        let shop = Self::new();
        let publisher = &shop.publisher;
        publisher
            .publish("model", Manifest::default(), region)
            .unwrap();
        shop
    }

    fn reader(&self) -> Subscriber {
        Subscriber::connect(self.folder.path().join("socket")).unwrap()
    }
}

#[test]
fn publishing() {
    leaves_nothing_open(|| {
        let world = |rig: &Model| (Shop::new(), Some(region(rig)));
        let publish = |_: &Model, (shop, memory): &mut (Shop, Option<Region>)| {
            let region = memory.take().unwrap();
            let published = shop.publisher.publish("model", Manifest::default(), region);
            if let Err(refused) = published {
                memory.replace(refused.owner);
                return Err(refused.reason.to_string());
            }
            Ok(())
        };
        let listed = |world: &(Shop, Option<Region>)| world.0.publisher.list();
        let calls = sweep(world, publish, listed);
        assert_eq!(calls, EXTENTS + 3 + EXTENTS, "handles, the wait, access");
    });
}

/// The connection stays usable, whichever side failed.
#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn attaching() {
    leaves_nothing_open(|| {
        let world = |_: &Model| {
            let writer = common::model();
            let shop = Shop::of(region(&writer));
            (Vec::new(), shop.reader(), shop, writer)
        };
        type Reading = (Vec<Publication>, Subscriber, Shop, Model);
        let attach = |rig: &Model, (attached, reader, _, _): &mut Reading| {
            let how = Attachment::builder(&rig.device);
            match reader.attach("model", &how) {
                Ok(published) => attached.push(published),
                Err(why @ ShareError::Memory(_)) => return Err(why.to_string()),
                Err(other) => panic!("{other:?}"),
            }
            Ok(())
        };
        let had = |world: &Reading| world.0.len();
        assert_eq!(sweep(world, attach, had), 1 + 4 * EXTENTS);

        let world = |rig: &Model| {
            let reader = common::model();
            let shop = Shop::of(shareable_region(rig, MANY));
            (shop.reader(), shop, reader)
        };
        type Serving = (Subscriber, Shop, Model);
        let serve = |_: &Model, (reader, _, taker): &mut Serving| {
            let attached = reader.attach("model", &Attachment::builder(&taker.device));
            match attached {
                Ok(published) => drop(published),
                Err(ShareError::Refused(reason)) => {
                    assert!(taker.machine.live().is_nothing());
                    return Err(reason);
                }
                Err(other) => panic!("{other:?}"),
            }
            Ok(())
        };
        let listed = |world: &Serving| world.1.publisher.list();
        assert_eq!(sweep(world, serve, listed), MANY);
    });
}
