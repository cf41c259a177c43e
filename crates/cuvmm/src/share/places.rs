//! Addresses of this process in an offer.

/// Where the memory of an offer is mapped in this process: for each physical the first address, the
/// offset in the offer and the size, in the order of the addresses.
#[derive(Debug, Default)]
pub(super) struct Places(Vec<(u64, u64, u64)>);

impl Places {
    /// Adds a physical behind those that were added.
    pub(super) fn add(&mut self, at: u64, offset: u64, size: u64) {
        self.0.push((at, offset, size));
    }

    /// Returns the offset of the bytes at an address, which may go on in the physicals behind.
    pub(super) fn offset_of(&self, address: u64, size: u64) -> Option<u64> {
        let behind = self.0.partition_point(|&(at, ..)| at <= address);
        let (at, offset, bytes) = *self.0.get(behind.checked_sub(1)?)?;
        let mut end = at.checked_add(bytes)?;
        let last = address.checked_add(size)?;
        for &(next, _, bytes) in self.0.get(behind..)? {
            if next != end || end >= last {
                break;
            }
            end = next.checked_add(bytes)?;
        }
        (address < end && last <= end).then(|| offset + (address - at))
    }
}
