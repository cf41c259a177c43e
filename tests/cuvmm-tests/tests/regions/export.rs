//! Physical memory as handles: which types it can be exported as, what an importer may do, and what
//! keeps it alive.

use crate::common;
use crate::common::{G, nth_of};
use crate::on_both;
use cuvmm::driver::{CUresult, Call, Exported, HandleTypes};
use cuvmm::error::{ArgumentError, MemoryError};
use cuvmm::{Access, AccessGrant, Device, Mapping, Physical, Reservation};

const FD: HandleTypes = HandleTypes::POSIX_FD;

fn shareable(device: &Device, size: u64) -> Physical {
    Physical::builder(device, size)
        .shareable(FD)
        .create()
        .unwrap()
}

fn opened(device: &Device, physical: &Physical) -> Mapping {
    let reservation = Reservation::new(device, physical.size()).unwrap();
    let mapping = reservation.map(0, physical).unwrap();
    mapping
        .set_access(&[AccessGrant::new(device, Access::ReadWrite)])
        .unwrap();
    mapping
}

/// Two drivers that do not know each other, as in two processes.
#[test]
fn what_one_driver_exports_another_sees_and_outlives() {
    let (giver, taker) = (common::clean(common::host()), common::clean(common::host()));
    let physical = shareable(&giver.device, 2 * G);
    let mapping = opened(&giver.device, &physical);
    mapping.write(G, b"from here").unwrap();
    assert!(!physical.is_exported());
    let handle = physical.export(FD).unwrap();
    assert!(physical.is_exported());

    let imported = Physical::import(&taker.device, &handle, 2 * G).unwrap();
    drop(handle);
    assert!(
        !imported.is_exported(),
        "only the exporter must not reuse it"
    );
    let seen = opened(&taker.device, &imported);
    let mut bytes = [0; 9];
    seen.read(G, &mut bytes).unwrap();
    assert_eq!(&bytes, b"from here");
    seen.write(G, b"and there").unwrap();
    mapping.read(G, &mut bytes).unwrap();
    assert_eq!(&bytes, b"and there", "both mappings show the same memory");

    drop((mapping, physical));
    seen.read(G, &mut bytes).unwrap();
    assert_eq!(&bytes, b"and there", "the importer outlives the exporter");
}

on_both! {
    fn only_what_was_made_for_it_is_exported(rig) {
        let plain = Physical::new(&rig.device, G).unwrap();
        assert!(matches!(
            plain.export(FD),
            Err(MemoryError::Export { handle_type: FD, .. })
        ));
        assert!(!plain.is_exported(), "a refusal changes nothing");
        rig.faults.forget();
        let physical = Physical::builder(&rig.device, G).shareable(FD).create().unwrap();
        let made = rig.faults.calls().len();
        let both = FD | HandleTypes::FABRIC;
        for types in [HandleTypes::empty(), both, HandleTypes::WIN32, HandleTypes::WIN32_KMT] {
            let bits = types.bits();
            let expected = MemoryError::Argument(ArgumentError::HandleType(bits));
            assert_eq!(physical.export(types).unwrap_err(), expected);
        }
        assert!(matches!(
            Physical::builder(&rig.device, G).shareable(FD | HandleTypes::WIN32).create(),
            Err(MemoryError::Argument(ArgumentError::HandleType(3)))
        ));
        assert_eq!(rig.faults.calls().len(), made, "no driver call");
        // Imported memory cannot be exported again.
        let handle = physical.export(FD).unwrap();
        let imported = Physical::import(&rig.device, &handle, G).unwrap();
        assert!(matches!(imported.export(FD), Err(MemoryError::Export { .. })));
        drop((plain, physical, handle, imported));
    }

    fn a_wrong_handle_or_size_is_refused_and_leaks_nothing(rig) {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(
            Physical::import(&rig.device, &Exported::Fd(null.into()), G),
            Err(MemoryError::Call(_))
        ));
        assert!(matches!(
            Physical::import(&rig.device, &Exported::Fabric([7; 64]), G),
            Err(MemoryError::Call(_))
        ));
        let physical = shareable(&rig.device, 2 * G);
        let handle = physical.export(FD).unwrap();
        assert!(matches!(
            Physical::import(&rig.device, &handle, 0),
            Err(MemoryError::Argument(ArgumentError::Zero { .. }))
        ));
        assert!(matches!(
            Physical::import(&rig.device, &handle, G + 1),
            Err(MemoryError::Argument(ArgumentError::Misaligned { value, multiple: G, .. })) if value == G + 1
        ));
        // The driver checks the size only when the memory is mapped.
        let imported = Physical::import(&rig.device, &handle, G).unwrap();
        let reservation = Reservation::new(&rig.device, G).unwrap();
        assert!(matches!(reservation.map(0, &imported), Err(MemoryError::Range { .. })));
        assert_eq!(reservation.mapped_bytes(), 0);
        // Memory of another device than claimed.
        assert!(matches!(
            Physical::import(&rig.second(), &handle, 2 * G),
            Err(MemoryError::Elsewhere { .. })
        ));
        drop((reservation, imported, physical, handle));
    }

    fn host_memory_keeps_its_place(rig) {
        let physical = Physical::builder(&rig.device, G).on_host_numa(1).shareable(FD).create();
        let physical = physical.unwrap();
        let handle = physical.export(FD).unwrap();
        let imported = Physical::import(&rig.device, &handle, G).unwrap();
        assert_eq!(imported.location(), physical.location());
        drop((physical, handle, imported));
    }

    fn each_call_failed_once_leaves_nothing(rig) {
        let physical = shareable(&rig.device, G);
        let refused = CUresult::CUDA_ERROR_OPERATING_SYSTEM;
        rig.faults.arm(nth_of(1, refused, &[Call::MemExportToShareableHandle]));
        assert!(matches!(physical.export(FD), Err(MemoryError::Export { handle_type: FD, .. })));
        assert!(!physical.is_exported());
        rig.faults.disarm();
        let handle = physical.export(FD).unwrap();
        for call in [
            Call::MemImportFromShareableHandle,
            Call::MemGetAllocationPropertiesFromHandle,
        ] {
            let before = rig.machine.live();
            rig.faults.arm(nth_of(1, refused, &[call]));
            assert!(matches!(
                Physical::import(&rig.device, &handle, G),
                Err(MemoryError::Call(_))
            ));
            assert_eq!(rig.machine.live(), before, "{call:?}");
            rig.faults.disarm();
        }
        drop((physical, handle));
    }

    fn a_probe_says_why_not(rig) {
        Physical::probe_export(&rig.device, FD).unwrap();
        // As measured on a GPU: the attribute says yes, the call says no.
        assert!(matches!(
            Physical::probe_export(&rig.device, HandleTypes::FABRIC),
            Err(MemoryError::Create { .. })
        ));
        assert!(matches!(
            Physical::probe_export(&rig.device, HandleTypes::WIN32),
            Err(MemoryError::Argument(ArgumentError::HandleType { .. }))
        ));
    }
}
