//! Memory calls outside virtual memory management: plain and stream-ordered allocations.

use super::sizes::MIB;
use crate::{Answer, Case, Rule};

pub(super) const CASES: &[Case] = &Rule::new("plain-memory").cases([
    Case::new(
        "alloc.ok",
        "A MiB of plain memory, allocated and freed.",
        |b| {
            let address = b.alloc(MIB);
            let answer = Answer::code(&address);
            let Ok(address) = address else {
                return Ok(answer);
            };
            Ok(answer.then("free", &b.free(address)))
        },
    ),
    Case::new("alloc.size_0", "No bytes.", |b| {
        Ok(Answer::code(&b.alloc(0)))
    }),
    Case::new("alloc.free_twice", "Freed twice.", |b| {
        let address = b.alloc(MIB)?;
        b.free(address)?;
        Ok(Answer::code(&b.free(address)))
    }),
    Case::new("alloc.unmap", "Unmapped like a mapping.", |b| {
        let address = b.alloc(2 * MIB)?;
        Ok(Answer::code(&b.unmap(address, 2 * MIB)).with("readable", b.reads(address)))
    })
    .isolated(),
    Case::new(
        "alloc_async.ok",
        "Allocated and freed in order on a stream.",
        |b| {
            let stream = b.stream()?;
            let address = b.alloc_async(MIB, stream);
            let answer = Answer::code(&address);
            let Ok(address) = address else {
                return Ok(answer);
            };
            let freed = b.free_async(address, stream);
            Ok(answer
                .then("free", &freed)
                .then("sync", &b.synchronize(stream)))
        },
    ),
]);
