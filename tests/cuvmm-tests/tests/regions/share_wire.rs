//! The wire format of descriptions of shared memory: reading returns what was written, and
//! everything else is refused.

use crate::common;
use crate::common::{G, MIB, cases};
use crate::share_support::AdviceRecord;
use cuvmm::driver::HandleTypes;
use cuvmm::error::DescriptionError;
use cuvmm::share::{Description, Origin};
use cuvmm::{Access, Offer, Physical};
use proptest::prelude::*;

const UUID: [u8; 16] = *b"0123456789abcdef";

/// Generates extents in order with gaps between them, and places listed in the order of their first
/// extent.
fn told() -> impl Strategy<Value = AdviceRecord> {
    let extents = proptest::collection::vec((0u64..4, 1u64..5, any::<u8>()), 1..20);
    let places = proptest::collection::vec((any::<bool>(), 0..i32::MAX, any::<[u8; 16]>()), 1..5);
    let rest = (0u32..40, any::<bool>(), any::<bool>(), 0u64..4);
    (extents, places, rest, 1u32..100, any::<u16>()).prop_map(
        |(extents, places, (shift, writes, fabric, behind), element_size, elements)| {
            let granularity = 1u64 << shift;
            let mut told = AdviceRecord::of(UUID, granularity, 0);
            told.access = if writes { 3 } else { 1 };
            told.handle_type = if fabric { 8 } else { 1 };
            let listed: Vec<(i32, i32, [u8; 16])> = places
                .into_iter()
                .map(|(device, id, uuid)| {
                    if device {
                        (1, 0, uuid)
                    } else {
                        (3, id, [0; 16])
                    }
                })
                .collect();
            told.places = vec![];
            let (mut at, mut first_run, mut whole) = (0, 0, true);
            for (gap, size, place) in extents {
                let place = listed[usize::from(place) % listed.len()];
                let known = told.places.iter().position(|there| *there == place);
                let index = known.unwrap_or(told.places.len());
                if known.is_none() {
                    told.places.push(place);
                }
                at += gap * granularity;
                whole &= gap == 0;
                told.extents.push((at, size * granularity, index as u32));
                at += size * granularity;
                if whole {
                    first_run = at;
                }
            }
            told.size = at + behind * granularity;
            if u64::from(elements) * u64::from(element_size) <= first_run && elements % 2 == 0 {
                told.elements = elements.into();
                told.element_size = element_size;
            }
            told
        },
    )
}

/// Checks that a description that was read is consistent and has a single encoding.
fn consistent(bytes: &[u8]) -> Result<Description, DescriptionError> {
    let read = Description::from_bytes(bytes)?;
    assert_eq!(read.to_bytes(), bytes, "a description has one form");
    assert!(read.granularity().is_power_of_two());
    let (mut at, mut held) = (0, 0);
    for extent in read.extents() {
        assert!(extent.offset >= at && extent.size > 0);
        assert!((extent.offset | extent.size).is_multiple_of(read.granularity()));
        at = extent.offset.checked_add(extent.size).unwrap();
        held += extent.size;
    }
    assert!(at <= read.size());
    assert_eq!(held, read.held());
    assert_ne!(read.access(), Access::None);
    if let Some((count, size)) = read.elements() {
        assert!(count.checked_mul(size.into()).unwrap() <= held);
    }
    Ok(read)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(512)))]

    #[test]
    fn what_was_written_is_read(told in told()) {
        let read = consistent(&told.bytes()).unwrap();
        prop_assert_eq!(read.size(), told.size);
        prop_assert_eq!(read.granularity(), told.granularity);
        prop_assert_eq!(read.handle_type().bits(), told.handle_type);
        prop_assert_eq!(read.access() == Access::ReadWrite, told.access == 3);
        let elements = (told.element_size > 0).then_some((told.elements, told.element_size));
        prop_assert_eq!(read.elements(), elements);
        prop_assert_eq!(read.extents().len(), told.extents.len());
        for (extent, &(offset, size, place)) in read.extents().iter().zip(&told.extents) {
            prop_assert_eq!((extent.offset, extent.size), (offset, size));
            let origin = match told.places[place as usize] {
                (1, _, uuid) => Origin::Device(uuid),
                (_, node, _) => Origin::HostNuma(node),
            };
            prop_assert_eq!(extent.origin, origin);
        }
    }

    #[test]
    fn a_changed_byte_shows_or_means_something_else(
        told in told(),
        at in any::<prop::sample::Index>(),
        with in 1u8..,
    ) {
        let mut bytes = told.bytes();
        let before = Description::from_bytes(&bytes).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= with;
        if let Ok(read) = consistent(&bytes) {
            prop_assert_ne!(read, before);
        }
    }

    #[test]
    fn cut_or_made_longer_it_is_none(
        told in told(),
        cut in any::<prop::sample::Index>(),
        more in proptest::collection::vec(any::<u8>(), 1..60),
    ) {
        let mut bytes = told.bytes();
        let cut = &bytes[..cut.index(bytes.len())];
        let refused = Description::from_bytes(cut).unwrap_err();
        let short = DescriptionError::Length {
            length: cut.len() as u64,
            wanted: if cut.len() < 72 { 72 } else { bytes.len() as u64 },
        };
        prop_assert_eq!(refused, short);
        let wanted = bytes.len() as u64;
        bytes.extend(more);
        let length = bytes.len() as u64;
        let refused = Description::from_bytes(&bytes).unwrap_err();
        prop_assert_eq!(refused, DescriptionError::Length { length, wanted });
    }

    #[test]
    fn any_bytes_are_read_or_refused(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..400),
        ours in any::<bool>(),
        (places, extents) in (0u32..4, 0u32..12),
    ) {
        if ours && bytes.len() >= 72 {
            bytes[..8].copy_from_slice(b"cuvmm-sh");
            bytes[8..10].copy_from_slice(&3u16.to_le_bytes());
            bytes[44..48].copy_from_slice(&places.to_le_bytes());
            bytes[48..52].copy_from_slice(&extents.to_le_bytes());
            bytes[52..56].fill(0);
            bytes.resize(72 + 24 * (places + extents) as usize, 0);
        }
        drop(consistent(&bytes));
    }
}

#[test]
fn every_byte_of_a_small_one_changed_in_every_way() {
    let mut told = AdviceRecord::of(UUID, MIB, 2);
    told.elements = 5;
    told.element_size = 8;
    let bytes = told.bytes();
    let before = Description::from_bytes(&bytes).unwrap();
    let mut read = 0;
    for at in 0..bytes.len() {
        for with in 1..=u8::MAX {
            let mut changed = bytes.clone();
            changed[at] ^= with;
            if let Ok(other) = consistent(&changed) {
                assert_ne!(other, before, "byte {at}");
                read += 1;
            }
        }
    }
    assert!(read > 16 * 255, "any identity is valid: {read}");
}

#[test]
fn each_refusal() {
    let good = AdviceRecord::of(UUID, MIB, 2);
    assert!(consistent(&good.bytes()).is_ok());
    let refused = |change: &dyn Fn(&mut AdviceRecord)| {
        let mut told = good.clone();
        change(&mut told);
        consistent(&told.bytes()).unwrap_err()
    };
    let field = |what, value| DescriptionError::Field { what, value };
    let extent = |offset, size, within| DescriptionError::Extent {
        offset,
        size,
        within,
        granularity: MIB,
    };
    assert_eq!(
        refused(&|told| told.magic[7] = b'x'),
        field("first bytes", u64::from_le_bytes(*b"cuvmm-sx"))
    );
    assert_eq!(
        refused(&|told| told.version = 2),
        DescriptionError::Version {
            version: 2,
            known: 3
        }
    );
    for access in [0, 2, 4, u16::MAX] {
        assert_eq!(
            refused(&|told| told.access = access),
            field("access", access.into())
        );
    }
    for bits in [0, 2, 4, 9, u32::MAX] {
        assert_eq!(
            refused(&|told| told.handle_type = bits),
            field("handle type", bits.into())
        );
    }
    for granularity in [0, 3, MIB + 1, u64::MAX] {
        assert_eq!(
            refused(&|told| told.granularity = granularity),
            field("granularity", granularity)
        );
    }
    assert_eq!(
        refused(&|told| told.extents.clear()),
        field("number of extents", 0)
    );
    assert_eq!(
        refused(&|told| told.places.clear()),
        field("number of places", 0)
    );
    // Counts this large are refused before their bytes are expected.
    for (at, what, most) in [
        (44, "number of places", 256u32),
        (48, "number of extents", 524_288),
    ] {
        for many in [most + 1, u32::MAX] {
            let mut bytes = good.bytes();
            bytes[at..at + 4].copy_from_slice(&many.to_le_bytes());
            assert_eq!(consistent(&bytes).unwrap_err(), field(what, many.into()));
        }
    }
    for (second, size) in [
        ((MIB, 0, 0), 2 * MIB),
        ((MIB + 1, MIB, 0), 4 * MIB),
        ((MIB, MIB - 1, 0), 2 * MIB),
        ((MIB, 2 * MIB, 0), 2 * MIB),
        ((0, MIB, 0), 2 * MIB),
        ((u64::MAX - MIB + 1, MIB, 0), u64::MAX),
        ((1 << 63, 1 << 63, 0), u64::MAX),
    ] {
        assert_eq!(
            refused(&|told| {
                told.size = size;
                told.extents[1] = second;
            }),
            extent(second.0, second.1, size)
        );
    }
    // A place that is not listed, listed without an extent, listed twice, and listed out of order.
    let node = (3, 1, [0; 16]);
    assert_eq!(
        refused(&|told| told.extents[1].2 = 1),
        field("place of an extent", 1)
    );
    assert_eq!(
        refused(&|told| told.places.push(node)),
        field("place of an extent", 1)
    );
    assert_eq!(
        refused(&|told| {
            told.places.push(told.places[0]);
            told.extents[1].2 = 1;
        }),
        field("place of an extent", 2)
    );
    assert_eq!(
        refused(&|told| {
            told.places.push(node);
            told.extents[0].2 = 1;
        }),
        field("place of an extent", 1)
    );
    for (kind, id, uuid) in [
        (0, 0, UUID),
        (1, 1, UUID),
        (2, 0, [0; 16]),
        (3, -1, [0; 16]),
        (3, 0, UUID),
        (4, 0, [0; 16]),
    ] {
        assert_eq!(
            refused(&|told| told.places[0] = (kind, id, uuid)),
            match kind {
                1 | 3 => field(
                    "number or identity of a place",
                    u64::from(id.unsigned_abs())
                ),
                _ => field("kind of a place", u64::from(kind.unsigned_abs())),
            }
        );
    }
    for (elements, size) in [
        (1, 0),
        (2 * MIB / 4 + 1, 4),
        (u64::MAX, 2),
        (1 << 60, 1 << 31),
    ] {
        assert_eq!(
            refused(&|told| {
                told.elements = elements;
                told.element_size = size;
            }),
            DescriptionError::Field {
                what: "number of elements",
                value: elements
            }
        );
    }
    // Reserved fields must be zero.
    for at in [52, 56, 72 + 24 + 20] {
        let mut bytes = good.bytes();
        bytes[at] = 1;
        let error = consistent(&bytes).unwrap_err();
        match at {
            52 => assert_eq!(error, field("reserved field", 1)),
            56 => assert_eq!(error, field("number of a ledger", 1)),
            _ => assert_eq!(error, field("place of an extent", 0)),
        }
    }
}

#[test]
fn as_many_extents_as_a_device_has_mappings() {
    let most = AdviceRecord::of(UUID, MIB, 524_288).bytes();
    let read = consistent(&most).unwrap();
    assert_eq!(read.held(), 524_288 * MIB);
}

/// The library's own descriptions match this independent encoding.
#[test]
fn an_offer_is_described_as_others_would() {
    let rig = common::clean(common::model());
    let physical = Physical::builder(&rig.device, 2 * G)
        .shareable(HandleTypes::POSIX_FD)
        .create()
        .unwrap();
    let offer = Offer::physical(&physical).unwrap();
    let mut told = AdviceRecord::of(rig.device.uuid(), G, 1);
    told.size = 2 * G;
    told.extents[0].1 = 2 * G;
    assert_eq!(offer.description().to_bytes(), told.bytes());
    told.access = 3;
    assert_eq!(offer.read_write().description().to_bytes(), told.bytes());
}
