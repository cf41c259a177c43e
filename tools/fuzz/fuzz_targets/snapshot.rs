//! The reader of PyTorch's snapshots on arbitrary bytes, as a pickle and as JSON: it returns a trace in
//! which each allocation is freed at most once, later, or one line.

#![no_main]

use std::collections::HashSet;

use libfuzzer_sys::fuzz_target;

#[allow(dead_code)]
#[path = "../../lab/src/heap/pickle.rs"]
mod pickle;
#[path = "../../lab/src/heap/snapshot.rs"]
mod snapshot;
#[allow(dead_code)]
#[path = "../../lab/src/heap/trace.rs"]
mod trace;

use snapshot::Snapshot;
use trace::Operation;

fuzz_target!(|bytes: &[u8]| {
    for read in [Snapshot::from_pickle, Snapshot::from_json] {
        match read(bytes).and_then(|snapshot| snapshot.trace(None)) {
            Ok(trace) => {
                let (mut seen, mut live) = (HashSet::new(), HashSet::new());
                for operation in trace.operations {
                    match operation {
                        Operation::Allocate { id, size, .. } => {
                            assert!(size > 0 && seen.insert(id) && live.insert(id));
                        }
                        Operation::Free { id } => assert!(live.remove(&id)),
                    }
                }
            }
            Err(error) => assert!(!error.is_empty()),
        }
    }
});
