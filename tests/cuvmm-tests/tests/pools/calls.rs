//! The driver calls of operations whose time is the driver's.

use crate::common::{self, G, limited};
use crate::on_both;
use cuvmm::driver::Call;

/// Calls that cost microseconds or more where memory is mapped and bytes are copied.
const DEAR: [Call; 9] = [
    Call::MemAddressReserve,
    Call::MemAddressFree,
    Call::MemCreate,
    Call::MemRelease,
    Call::MemMap,
    Call::MemUnmap,
    Call::MemSetAccess,
    Call::MemcpyDtoDAsync,
    Call::StreamSynchronize,
];

on_both! {
    // A row of the bench compares a cut with these calls by hand.
    fn a_cut_makes_the_calls_that_it_takes_by_hand(rig) {
        let (pool, tenant, stream) = common::with_stream(rig, limited(rig, 64).largest_extent(16 * G).build().unwrap());
        let mut block = tenant.block(16 * G).home_stream(&stream).allocate().unwrap();
        block.write(8 * G - 8, &[1; 8]).unwrap();
        block.shrink_to(8 * G).unwrap();
        stream.synchronize().unwrap();
        rig.faults.forget();
        let done = tenant.compact(|_| true).unwrap();
        assert_eq!(pool.trim(8 * G).unwrap(), 16 * G);
        assert_eq!((done.given_back, done.copied), (8 * G, 8 * G));
        let calls = rig.faults.calls();
        let dear: Vec<Call> = calls.iter().copied().filter(|call| DEAR.contains(call)).collect();
        assert_eq!(dear, [
            Call::MemCreate,
            // Beside.
            Call::MemAddressReserve,
            Call::MemMap,
            Call::MemSetAccess,
            Call::MemcpyDtoDAsync,
            Call::StreamSynchronize,
            // Beside, and of the old memory.
            Call::MemUnmap,
            Call::MemUnmap,
            // In place.
            Call::MemMap,
            Call::MemSetAccess,
            Call::MemAddressFree,
            Call::MemRelease,
        ]);
        // Whether streams are idle or capture, and the scrubber's stream in a pool's first cut.
        assert!(calls.len() - dear.len() <= 12, "{calls:?}");
    }
}
