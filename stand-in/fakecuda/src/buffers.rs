//! The numbers of buffers, which no other buffer of the process has or will have.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

#[derive(Debug)]
struct Buffers {
    /// The numbers of buffers that were asked for, by the first address.
    known: BTreeMap<u64, u64>,
    last: u64,
}

static BUFFERS: Mutex<Buffers> = Mutex::new(Buffers {
    known: BTreeMap::new(),
    last: 0,
});

pub(crate) fn number(start: u64) -> u64 {
    let mut buffers = BUFFERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&number) = buffers.known.get(&start) {
        return number;
    }
    buffers.last += 1;
    let number = buffers.last;
    buffers.known.insert(start, number);
    number
}

/// Forgets buffers that begin in a range of freed or unmapped memory.
pub(crate) fn forget(start: u64, size: u64) {
    let mut buffers = BUFFERS.lock().unwrap_or_else(PoisonError::into_inner);
    let end = start.saturating_add(size.max(1));
    let gone: Vec<u64> = buffers.known.range(start..end).map(|(&at, _)| at).collect();
    for start in gone {
        buffers.known.remove(&start);
    }
}

#[cfg(test)]
mod tests {
    use super::{forget, number};

    #[test]
    fn a_new_buffer_at_an_old_address_has_another_number() {
        let first = number(1 << 60);
        assert_eq!(number(1 << 60), first);
        assert_ne!(number((1 << 60) + 512), first);
        forget(1 << 60, 1);
        assert_ne!(number(1 << 60), first);
    }
}
