//! Refusals, which change nothing.

use crate::common::books::books;
use crate::common::{self, G, limited, model};
use crate::scene::{LAYOUTS, builder, group};
use cuvmm::error::{ArgumentError, BlockError, PagedKvError};
use cuvmm::paged::{LayerGroup, Layout};
use cuvmm::{Hardened, PagedKv, Stream};

fn argument(error: PagedKvError) -> ArgumentError {
    match error {
        PagedKvError::Argument(error) => error,
        other => panic!("{other}"),
    }
}

#[test]
fn a_shape_that_cannot_be_takes_no_addresses() {
    let rig = model();
    let (pool, a, home) = common::scene(&rig, 64);
    let kv = |blocks| PagedKv::builder(&a, &home, blocks);
    let huge = LayerGroup::new(u32::MAX, u32::MAX).part(u32::MAX, 1, 1);
    let far = LayerGroup::new(1 << 16, 1 << 16).part(1, 1, 2);
    let layers = LayerGroup::new(u32::MAX, 1).part(1, 1, 1);
    for (refused, known) in [
        (kv(0).group(group()), "blocks"),
        (kv(1 << 31).group(group()), "blocks"),
        (kv(8), "groups"),
        (kv(8).group(LayerGroup::new(1, 1)), "parts of a layer"),
        (kv(8).group(huge), "parts of all layers"),
        (kv(8).group(layers), "parts of all layers"),
        (kv(8).group(group()).extent(0), "bytes of an extent"),
        (kv(8).group(group()).extent(G / 2), "bytes of an extent"),
        (kv(8).group(group()).extent(3 * G), "bytes of an extent"),
        (kv(8).group(group()).extent(32 * G), "bytes of an extent"),
    ] {
        let refused = refused.build().unwrap_err();
        assert!(refused.to_string().contains(known), "{refused}");
        argument(refused);
    }
    // More addresses than the driver has.
    assert!(
        kv(i32::MAX as u32)
            .group(far)
            .build()
            .unwrap_err()
            .is_out_of_memory()
    );
    let beyond = kv(8).group(group()).pinned([8]).build().unwrap_err();
    let known = ArgumentError::NoSuch {
        what: "block",
        number: 8,
    };
    assert_eq!(argument(beyond), known);
    let other = kv(8)
        .group(group())
        .group(LayerGroup::new(1, 1).part(1, 1, 1));
    let other = other.build().unwrap_err();
    assert!(
        matches!(other, PagedKvError::GroupBytes { group: 1, .. }),
        "{other}"
    );
    // No memory for the pinned blocks.
    let many = kv(200).group(group()).pinned(0..200).build().unwrap_err();
    assert!(many.is_shortage(), "{many}");
    let second = rig.second();
    let elsewhere = Stream::new(&second).unwrap();
    let refused = PagedKv::builder(&a, &elsewhere, 8).group(group()).build();
    assert!(matches!(
        argument(refused.unwrap_err()),
        ArgumentError::WrongDevice(_)
    ));
    let stats = books(&rig, &pool);
    assert_eq!((stats.addresses, stats.committed), (0, 0));

    let (_hardened, tenant) =
        common::with_tenant(limited(&rig, 8).hardened(Hardened::new()).build().unwrap());
    let refused = PagedKv::builder(&tenant, &home, 8).group(group()).build();
    assert!(matches!(
        argument(refused.unwrap_err()),
        ArgumentError::HardenedPool
    ));
}

#[test]
fn a_call_with_one_wrong_number_changes_no_block() {
    let rig = model();
    let (_pool, a, home) = common::scene(&rig, 64);
    for layout in LAYOUTS {
        let kv = builder(&a, &home, 10, layout).pinned([9]).build().unwrap();
        kv.back(&[0, 1, 5]).unwrap();
        kv.reserve(2).unwrap();
        let before = kv.stats().unwrap();
        argument(kv.back(&[2, 10]).unwrap_err());
        argument(kv.release(&[0, 10]).unwrap_err());
        for (numbers, known) in [
            (&[0, 1, 7][..], PagedKvError::NotInUse(7)),
            (&[0, 0, 7], PagedKvError::NotInUse(7)),
            (&[5, 2], PagedKvError::NotInUse(2)),
            (&[1, 9], PagedKvError::Pinned(9)),
        ] {
            assert_eq!(kv.release(numbers), Err(known));
        }
        let refused = argument(kv.reserve(7).unwrap_err());
        assert!(matches!(
            refused,
            ArgumentError::TooLarge {
                value: 7,
                most: 6,
                ..
            }
        ));
        let mut bytes = vec![0; 16];
        assert_eq!(
            kv.read(7, (0, 0, 0), &mut bytes),
            Err(PagedKvError::NotInUse(7))
        );
        for at in [(1, 0, 0), (0, 2, 0), (0, 0, 2), (0, 0, 0)] {
            argument(kv.write(0, at, &bytes).unwrap_err());
        }
        let second = rig.second();
        let elsewhere = Stream::new(&second).unwrap();
        argument(kv.record_use(&elsewhere).unwrap_err());
        assert_eq!(kv.stats().unwrap(), before);
        kv.release(&[0, 1, 5]).unwrap();
    }
}

#[test]
fn after_its_tenant_is_unregistered_a_cache_does_not_grow() {
    let rig = model();
    let (pool, a, home) = common::scene(&rig, 64);
    let kv = builder(&a, &home, 10, Layout::BlockMajor).build().unwrap();
    kv.back(&[0]).unwrap();
    a.clone().unregister();
    let refused = kv.back(&[0, 9]).unwrap_err();
    let unregistered = |cause: &BlockError| matches!(cause, BlockError::Unregistered(_));
    assert!(
        matches!(&refused, PagedKvError::Back { blocks: 2, cause } if unregistered(cause)),
        "{refused}"
    );
    kv.back(&[1]).unwrap();
    kv.release(&[0, 1]).unwrap();
    drop(pool);
    assert_eq!(a.stats().in_use, 0);
}
