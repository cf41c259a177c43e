//! Stamps at both ends of every granule, which detect wrong mappings.
//!
//! The first eight bytes of a granule hold its request and its index in the request's block. The
//! last eight bytes hold the bitwise complement. Zero, the content of fresh memory, is never a
//! valid stamp. The last bytes of a granule and the first bytes of the next are adjacent, so a
//! block of n granules needs n + 1 copies, not 2n.

use serde::{Deserialize, Serialize};

/// Memory that can be written and read by offset.
pub(crate) trait Bytes {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> anyhow::Result<()>;

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> anyhow::Result<()>;
}

const STAMP: usize = 8;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Verified {
    /// Stamps read, right or wrong.
    pub(crate) stamps: u64,
    /// Stamps that differ from the written ones.
    pub(crate) wrong: u64,
    pub(crate) first_wrong: Option<String>,
}

impl Verified {
    pub(crate) fn add(&mut self, other: Self) {
        self.stamps += other.stamps;
        self.wrong += other.wrong;
        self.first_wrong = self.first_wrong.take().or(other.first_wrong);
    }

    /// Checks a part of a granule that was [filled](filled) with a stamp. It counts as one stamp.
    pub(crate) fn check_filled(&mut self, request: u64, granule: u64, stamp: u64, found: &[u8]) {
        let right = stamp.to_le_bytes();
        let mut words = found.chunks(STAMP);
        let wrong = words.find(|word| !right.starts_with(word));
        self.check(request, granule, "a part", stamp, wrong.unwrap_or(&right));
    }

    fn check(&mut self, request: u64, granule: u64, end: &str, expected: u64, found: &[u8]) {
        self.stamps += 1;
        if found != expected.to_le_bytes() {
            self.wrong += 1;
            self.first_wrong.get_or_insert_with(|| {
                let found = found.iter().rev().map(|byte| format!("{byte:02x}")).collect::<String>();
                format!("{end} of granule {granule} of request {request} reads {found}, not {expected:016x}")
            });
        }
    }
}

/// Returns the first and the last stamp of a granule. Stamps distinguish up to 2^40 requests, and
/// up to 2^24 granules of a block.
pub(crate) fn stamps(request: u64, granule: u64) -> (u64, u64) {
    let first = (request + 1) << 24 | (granule & 0xff_ffff);
    (first, !first)
}

/// Returns `bytes` bytes that repeat a stamp.
pub(crate) fn filled(stamp: u64, bytes: usize) -> Vec<u8> {
    let stamp = stamp.to_le_bytes();
    stamp.iter().copied().cycle().take(bytes).collect()
}

/// Writes the stamps of the granules `from..to` of a block. `size` is the size of a granule in
/// bytes.
pub(crate) fn write(
    bytes: &mut impl Bytes,
    size: u64,
    request: u64,
    from: u64,
    to: u64,
) -> anyhow::Result<()> {
    if from >= to {
        return Ok(());
    }
    bytes.write(from * size, &stamps(request, from).0.to_le_bytes())?;
    for granule in from + 1..to {
        let mut pair = [0; 2 * STAMP];
        pair[..STAMP].copy_from_slice(&stamps(request, granule - 1).1.to_le_bytes());
        pair[STAMP..].copy_from_slice(&stamps(request, granule).0.to_le_bytes());
        bytes.write(granule * size - STAMP as u64, &pair)?;
    }
    bytes.write(
        to * size - STAMP as u64,
        &stamps(request, to - 1).1.to_le_bytes(),
    )
}

/// Reads and checks every stamp of a block of `count` granules of `size` bytes each.
pub(crate) fn verify(
    bytes: &mut impl Bytes,
    size: u64,
    request: u64,
    count: u64,
) -> anyhow::Result<Verified> {
    let mut verified = Verified::default();
    if count == 0 {
        return Ok(verified);
    }
    let mut pair = [0; 2 * STAMP];
    bytes.read(0, &mut pair[STAMP..])?;
    for granule in 0..count {
        let (first, last) = stamps(request, granule);
        verified.check(request, granule, "the start", first, &pair[STAMP..]);
        let end = (granule + 1) * size - STAMP as u64;
        let more = granule + 1 < count;
        bytes.read(end, if more { &mut pair } else { &mut pair[..STAMP] })?;
        verified.check(request, granule, "the end", last, &pair[..STAMP]);
    }
    Ok(verified)
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Bytes for Vec<u8> {
        fn write(&mut self, offset: u64, bytes: &[u8]) -> anyhow::Result<()> {
            let offset = usize::try_from(offset)?;
            self[offset..offset + bytes.len()].copy_from_slice(bytes);
            Ok(())
        }

        fn read(&mut self, offset: u64, bytes: &mut [u8]) -> anyhow::Result<()> {
            let offset = usize::try_from(offset)?;
            bytes.copy_from_slice(&self[offset..offset + bytes.len()]);
            Ok(())
        }
    }

    const SIZE: u64 = 64;

    fn stamped() -> Vec<u8> {
        let mut memory = vec![0; 5 * SIZE as usize];
        write(&mut memory, SIZE, 7, 0, 3).unwrap();
        write(&mut memory, SIZE, 7, 3, 4).unwrap();
        write(&mut memory, SIZE, 7, 4, 5).unwrap();
        memory
    }

    #[test]
    fn what_was_stamped_verifies_two_stamps_a_granule() {
        let verified = verify(&mut stamped(), SIZE, 7, 5).unwrap();
        assert_eq!(
            verified,
            Verified {
                stamps: 10,
                wrong: 0,
                first_wrong: None
            }
        );
        assert_eq!(
            verify(&mut Vec::new(), SIZE, 7, 0).unwrap(),
            Verified::default()
        );
    }

    #[test]
    fn a_part_that_was_filled_is_right_to_its_last_byte() {
        let (stamp, _) = stamps(7, 1);
        let mut part = filled(stamp, 20);
        let mut verified = Verified::default();
        verified.check_filled(7, 1, stamp, &part);
        assert_eq!((verified.stamps, verified.wrong), (1, 0));
        part[19] ^= 1;
        verified.check_filled(7, 1, stamp, &part);
        assert_eq!((verified.stamps, verified.wrong), (2, 1));
        let named = verified.first_wrong.unwrap();
        assert!(
            named.starts_with("a part of granule 1 of request 7 reads 09000001, not"),
            "{named}"
        );
    }

    #[test]
    fn fresh_memory_is_all_wrong() {
        let verified = verify(&mut vec![0; 2 * SIZE as usize], SIZE, 0, 2).unwrap();
        assert_eq!((verified.stamps, verified.wrong), (4, 4));
    }

    #[test]
    fn another_requests_stamps_are_wrong() {
        assert_eq!(verify(&mut stamped(), SIZE, 8, 5).unwrap().wrong, 10);
    }

    #[test]
    fn two_granules_swapped_are_four_wrong_stamps_and_the_first_is_named() {
        let mut memory = stamped();
        let (one, two) = memory.split_at_mut(2 * SIZE as usize);
        one[SIZE as usize..].swap_with_slice(&mut two[..SIZE as usize]);
        let verified = verify(&mut memory, SIZE, 7, 5).unwrap();
        assert_eq!(verified.wrong, 4);
        let named = verified.first_wrong.unwrap();
        assert_eq!(
            named,
            "the start of granule 1 of request 7 reads 0000000008000002, not 0000000008000001"
        );
    }

    #[test]
    fn each_single_damaged_stamp_is_found() {
        for granule in 0..5 {
            for at in [
                granule * SIZE,
                granule * SIZE + 7,
                (granule + 1) * SIZE - 8,
                (granule + 1) * SIZE - 1,
            ] {
                let mut memory = stamped();
                memory[at as usize] ^= 1;
                assert_eq!(
                    verify(&mut memory, SIZE, 7, 5).unwrap().wrong,
                    1,
                    "byte {at}"
                );
            }
        }
    }
}
