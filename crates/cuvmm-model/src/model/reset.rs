//! The reset of a primary context.

use super::allocation_table::Kind;
use super::backing::Backing;
use super::machine::Machine;
use super::state::State;
use cuvmm_driver::{Call, Ordinal};

impl<B: Backing> Machine<B> {
    /// Resets the device's context, as another part of a program can do by
    /// `cuDevicePrimaryCtxReset`.
    ///
    /// Queued work never runs. Streams, events, captures, executable graphs and device memory
    /// allocated in the context end, and their handles become invalid; in the hostile manner they
    /// soon name new objects. A lost context works again. Reservations, physicals and mappings
    /// stay, and so does pinned and managed memory, because safe code may hold references into it.
    pub fn reset_context(&self, device: Ordinal) {
        self.with(|state| state.reset_context(device));
    }
}

impl<B: Backing> State<B> {
    fn reset_context(&mut self, device: Ordinal) {
        let Ok(index) = self.device(device) else {
            return;
        };
        self.discard_work(device.0);
        // Marks of the ended streams name no work afterwards.
        self.settle_all_pools();
        self.end_captures_of(device.0);
        let mut gone = self.streams.end_all(device.0);
        self.events.retain(|&handle, event| {
            let stays = event.device != device.0;
            gone.extend((!stays).then_some(handle));
            stays
        });
        self.graph_execs.retain(|&handle, (owner, _)| {
            let stays = *owner != device.0;
            gone.extend((!stays).then_some(handle));
            stays
        });
        gone.into_iter()
            .for_each(|handle| self.handles.give_back(handle));

        let allocations = self.allocations.by_address.iter();
        let of_context = allocations.filter(|(_, allocation)| {
            allocation.device == device.0
                && matches!(allocation.kind, Kind::Plain | Kind::Pool | Kind::Opened)
        });
        let addresses: Vec<_> = of_context.map(|(&address, _)| address).collect();
        for address in addresses {
            self.end_allocation(Call::MemFree, address);
        }
        self.empty_pools(index);
        self.devices[index].lost = None;
        self.progress = true;
    }
}
