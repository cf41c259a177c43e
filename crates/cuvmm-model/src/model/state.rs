//! The state of a machine, behind one lock.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::thread::ThreadId;
use std::time::Duration;

use super::allocation_table::Allocations;
use super::answer::{Answer, INVALID_DEVICE, INVALID_HANDLE, require};
use super::backing::{Backing, PlainName};
use super::chance::Chance;
use super::clock::Clock;
use super::device_state::{Device, Owner, ScheduledUse};
use super::handles::Handles;
use super::hazards::Hazards;
use super::mapping_table::Mappings;
use super::options::{Manner, Rules};
use super::physical_table::Physicals;
use super::pool_table::{Pool, Pools};
use super::registration_table::Registrations;
use super::reservation_table::Reservations;
use super::rights::{Rights, Who};
use super::shadow::Shadow;
use super::slabs::Slabs;
use super::spite::Spiting;
use super::stream_table::{Capture, Due, Event, StreamKey, Streams};
use super::work::Work;
use cuvmm_driver::{AccessFlags, Call, CaptureMode, MemPoolProps, Ordinal, StreamHandle};

#[derive(Debug)]
pub(crate) struct State<B> {
    pub(crate) rules: Rules,
    pub(crate) clock: Clock,
    pub(crate) spent: Vec<Duration>,
    pub(crate) devices: Vec<Device>,
    pub(crate) reservations: Reservations,
    pub(crate) mappings: Mappings,
    pub(crate) physicals: Physicals,
    pub(crate) allocations: Allocations,
    pub(crate) slabs: Slabs,
    pub(crate) registrations: Registrations,
    /// Opened memory of other processes, by name: the address and the number of openings.
    pub(crate) opened: BTreeMap<PlainName, (u64, u64)>,
    pub(crate) pools: Pools,
    pub(crate) streams: Streams,
    pub(crate) events: BTreeMap<u64, Event>,
    pub(crate) captures: BTreeMap<u64, Capture>,
    /// Captures begun so far; the id of the last one.
    pub(crate) captures_begun: u64,
    pub(crate) capture_modes: HashMap<ThreadId, CaptureMode>,
    /// The devices whose access to memory pools counts in a thread's copies: from, to.
    pub(crate) parties: HashMap<ThreadId, (i32, i32)>,
    pub(crate) graphs: BTreeMap<u64, Vec<Work>>,
    pub(crate) graph_execs: BTreeMap<u64, (i32, Vec<Work>)>,
    pub(crate) handles: Handles,
    pub(crate) hazards: Hazards,
    pub(crate) arrivals: Vec<ScheduledUse>,
    pub(crate) chance: Chance,
    pub(crate) spiting: Option<Spiting>,
    pub(crate) with_random_failures: u64,
    /// Work was done or discarded since waiting threads were last woken.
    pub(crate) progress: bool,
    /// Functions of the program that streams have reached and no thread has taken.
    pub(crate) due: VecDeque<Due>,
    pub(crate) host_calls: u64,
    /// Streams that the next waiting thread releases.
    pub(crate) until_awaited: Vec<(Ordinal, StreamHandle)>,
    /// Written bytes, if reads of other bytes are recorded.
    pub(crate) shadow: Option<Shadow>,
    /// Late work runs now, because a call waits for it.
    pub(crate) hurried: bool,
    /// The streams and events queried since late work last ran.
    pub(crate) asked: BTreeSet<u64>,
    pub(crate) backing: B,
}

impl<B: Backing> State<B> {
    pub(crate) fn new(rules: Rules, backing: B) -> Self {
        let devices: Vec<_> = (0..rules.devices).map(|_| Device::default()).collect();
        let mut handles = Handles::new(rules.manner == Manner::Hostile);
        Self {
            streams: Streams::new(rules.devices),
            pools: default_pools(devices.len(), &mut handles),
            handles,
            hazards: Hazards::default(),
            arrivals: Vec::new(),
            chance: Chance::new(rules.seed),
            spiting: rules.spite.map(Spiting::from),
            with_random_failures: 0,
            shadow: rules.shadow.then(Shadow::default),
            hurried: false,
            asked: BTreeSet::new(),
            rules,
            clock: Clock::default(),
            spent: vec![Duration::ZERO; Call::COUNT],
            devices,
            reservations: Reservations::default(),
            mappings: Mappings::default(),
            physicals: Physicals::default(),
            allocations: Allocations::default(),
            slabs: Slabs::default(),
            registrations: Registrations::default(),
            opened: BTreeMap::new(),
            events: BTreeMap::new(),
            captures: BTreeMap::new(),
            captures_begun: 0,
            capture_modes: HashMap::new(),
            parties: HashMap::new(),
            graphs: BTreeMap::new(),
            graph_execs: BTreeMap::new(),
            progress: false,
            due: VecDeque::new(),
            host_calls: 0,
            until_awaited: Vec::new(),
            backing,
        }
    }

    pub(crate) fn spending<T>(&mut self, call: Call, act: impl FnOnce(&mut Self) -> T) -> T {
        let begun = self.clock.now();
        let outcome = act(self);
        let took = self.clock.now().saturating_sub(begun);
        if let Some(spent) = self.spent.get_mut(call as usize) {
            *spent = spent.saturating_add(took);
        }
        outcome
    }

    pub(crate) fn strict(&self) -> bool {
        self.rules.manner != Manner::AsMeasured
    }

    pub(crate) fn aligned(&self, value: u64) -> bool {
        value.is_multiple_of(self.rules.granularity)
    }

    pub(crate) fn device(&self, ordinal: Ordinal) -> Answer<usize> {
        require((0..self.rules.devices).contains(&ordinal.0), INVALID_DEVICE)?;
        usize::try_from(ordinal.0).map_err(|_| INVALID_DEVICE)
    }

    pub(crate) fn context(&self, ordinal: Ordinal) -> Answer<usize> {
        let index = self.device(ordinal)?;
        match self.devices[index].lost {
            Some(code) => Err(code),
            None => Ok(index),
        }
    }

    /// Returns the key of a live stream of this device, of its legacy default stream, or of the
    /// calling thread's default stream, which is made at its first use.
    pub(crate) fn stream(&mut self, device: Ordinal, stream: StreamHandle) -> Answer<StreamKey> {
        let key = match stream {
            StreamHandle::NULL | StreamHandle::LEGACY => StreamKey::legacy(device.0),
            StreamHandle::PER_THREAD => {
                let index = self.device(device)?;
                self.streams
                    .of_thread(device.0, self.devices[index].hold_new)
            }
            StreamHandle(handle) => *self.streams.named.get(&handle).ok_or(INVALID_HANDLE)?,
        };
        let here = key.device == device.0 && self.streams.get(key).is_some();
        require(here, INVALID_HANDLE)?;
        Ok(key)
    }
}

fn default_pools(devices: usize, handles: &mut Handles) -> Pools {
    let mut pools = Pools::new(devices);
    for index in 0..devices {
        let ordinal = Ordinal(index as i32);
        let mut rights = Rights::default();
        rights.set(Who::Device(ordinal.0), AccessFlags::READ_WRITE);
        let owner = Some(Owner::Device(index));
        let props = MemPoolProps::device(ordinal);
        pools.add(Pool::new(handles.take(), props, owner, rights, None));
    }
    pools
}
