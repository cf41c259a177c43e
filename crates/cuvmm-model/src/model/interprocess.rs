//! Legacy handles of plain memory for other processes.

use super::advice::Advised;
use super::allocation_table::{Allocation, Kind};
use super::answer::{Answer, INVALID_VALUE, require};
use super::backing::{Backing, PlainName};
use super::state::State;
use cuvmm_driver::{CUresult, Call, DeviceAddress, Ordinal};

/// The first bytes of a handle.
const MARK: [u8; 8] = *b"cuvmmipc";

impl<B: Backing> State<B> {
    /// Returns the legacy handle of plain memory. Mappings have none.
    pub(crate) fn ipc_mem_handle(
        &mut self,
        device: Ordinal,
        address: DeviceAddress,
    ) -> Answer<[u8; 64]> {
        self.context(device)?;
        let found = self.allocations.containing(address.0);
        let (start, allocation) = found.ok_or(INVALID_VALUE)?;
        require(allocation.kind == Kind::Plain, INVALID_VALUE)?;
        let name = match allocation.name {
            Some(name) => name,
            None => {
                let part = allocation.slab.unwrap_or(start);
                let name = self.backing.name(part, start, allocation.size)?;
                if let Some(named) = self.allocations.by_address.get_mut(&start) {
                    named.name = Some(name);
                }
                name
            }
        };
        Ok(write(&name))
    }

    pub(super) fn ipc_open(&mut self, device: Ordinal, handle: &[u8; 64]) -> Answer<DeviceAddress> {
        self.context(device)?;
        let name = read(handle).ok_or(INVALID_VALUE)?;
        let own = name.0[0] == u64::from(std::process::id());
        require(!own, CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        if let Some((address, times)) = self.opened.get_mut(&name) {
            *times += 1;
            return Ok(DeviceAddress(*address));
        }
        let address = self.backing.open(&name)?;
        let allocation = Allocation {
            size: name.0[3],
            kind: Kind::Opened,
            device: device.0,
            advised: Advised::new(address),
            owner: None,
            taken: name.0[3],
            slab: None,
            pool: None,
            memory: None,
            name: None,
            ending: false,
        };
        self.allocations.by_address.insert(address, allocation);
        self.opened.insert(name, (address, 1));
        Ok(DeviceAddress(address))
    }

    pub(super) fn ipc_close(&mut self, device: Ordinal, address: DeviceAddress) -> Answer {
        self.context(device)?;
        let found = self.opened.iter_mut().find(|(_, (at, _))| *at == address.0);
        let (&name, (_, times)) = found.ok_or(INVALID_VALUE)?;
        *times -= 1;
        if *times == 0 {
            self.opened.remove(&name);
            self.end_allocation(Call::MemFree, address.0);
        }
        Ok(())
    }
}

fn write(name: &PlainName) -> [u8; 64] {
    let mut handle = [0; 64];
    handle[..8].copy_from_slice(&MARK);
    for (bytes, word) in handle[8..].chunks_exact_mut(8).zip(name.0) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    handle
}

fn read(handle: &[u8; 64]) -> Option<PlainName> {
    let (mark, rest) = handle.split_first_chunk()?;
    let mut words = [0; 6];
    for (word, bytes) in words.iter_mut().zip(rest.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().ok()?);
    }
    (*mark == MARK).then_some(PlainName(words))
}

#[cfg(test)]
mod tests {
    use super::{PlainName, read, write};

    #[test]
    fn a_handle_holds_a_name() {
        let name = PlainName([1, 2, 3, 4, 5, u64::MAX]);
        assert_eq!(read(&write(&name)), Some(name));
        assert_eq!(read(&[0; 64]), None);
    }
}
