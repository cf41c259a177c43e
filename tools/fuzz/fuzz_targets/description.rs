//! Descriptions of shared memory read from arbitrary bytes: they are refused, or consistent and
//! written in the one canonical form.

#![no_main]

use cuvmm::Access;
use cuvmm::share::{AllocationDescription, Description};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(read) = AllocationDescription::from_bytes(bytes) {
        assert_eq!(read.to_bytes(), bytes);
        assert_ne!(read.access(), Access::None);
        assert!(read.sizes().all(|size| size > 0));
    }
    let Ok(read) = Description::from_bytes(bytes) else {
        return;
    };
    assert_eq!(read.to_bytes(), bytes);
    assert_ne!(read.access(), Access::None);
    let (mut at, mut held) = (0, 0);
    for extent in read.extents() {
        assert!(extent.offset >= at && extent.size > 0);
        assert!((extent.offset | extent.size).is_multiple_of(read.granularity()));
        at = extent.offset.checked_add(extent.size).expect("within");
        held += extent.size;
    }
    assert!(at <= read.size());
    assert_eq!(held, read.held());
    if let Some((count, size)) = read.elements() {
        assert!(count.checked_mul(size.into()).expect("a size") <= held);
    }
});
