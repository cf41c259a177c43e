//! Snapshots of PyTorch's recorder of allocations.
//!
//! `torch.cuda.memory._dump_snapshot` writes a snapshot as a pickle, and Python's `json` can write
//! the result of `torch.cuda.memory._snapshot`. A snapshot has the recorded entries of each device,
//! and the blocks that existed at its end.
//!
//! Memory allocated before the recorder began, or whose entries were overwritten since, is
//! allocated at the start of the trace. Memory is freed where the allocator could use it again
//! (`free_completed`): at once, or when the work of other streams on it was complete.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::Deserialize;

use super::pickle;
use super::trace::{Operation, Trace};

/// The needed parts of a snapshot.
#[derive(Debug, Deserialize)]
pub(super) struct Snapshot {
    #[serde(default)]
    segments: Vec<Segment>,
    device_traces: Vec<Vec<Entry>>,
}

#[derive(Debug, Deserialize)]
struct Segment {
    #[serde(default)]
    device: u64,
    #[serde(default)]
    address: u64,
    stream: i64,
    #[serde(default)]
    blocks: Vec<Block>,
}

#[derive(Debug, Deserialize)]
struct Block {
    /// Older versions have no addresses in blocks, which are side by side.
    address: Option<u64>,
    size: u64,
    requested_size: Option<u64>,
    state: String,
}

#[derive(Debug, Deserialize)]
struct Entry {
    action: String,
    addr: Option<u64>,
    size: Option<u64>,
    stream: Option<i64>,
}

/// The keys of all these structs.
const KEYS: &[&str] = &[
    "segments",
    "device_traces",
    "device",
    "stream",
    "blocks",
    "address",
    "size",
    "requested_size",
    "state",
    "action",
    "addr",
];

impl Snapshot {
    pub(super) fn from_pickle(bytes: &[u8]) -> Result<Self, String> {
        pickle::read(bytes, KEYS)
    }

    pub(super) fn from_json(bytes: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }

    /// Returns the operations on a device, by default on the only device with any.
    ///
    /// # Errors
    /// There are no operations, several devices of which none was chosen, or entries that
    /// contradict each other.
    pub(super) fn trace(&self, device: Option<usize>) -> Result<Trace, String> {
        let used = self.device_traces.iter().enumerate();
        let used = used.filter(|(_, entries)| !entries.is_empty());
        let used: Vec<usize> = used.map(|(device, _)| device).collect();
        let device = match (device, &used[..]) {
            (Some(device), _) if used.contains(&device) => device,
            (None, &[device]) => device,
            (_, []) => return Err("no allocations were recorded: torch.cuda.memory._record_memory_history() starts the recorder".to_owned()),
            (Some(_), used) => return Err(format!("--device: it has entries of devices {used:?}")),
            (None, used) => {
                return Err(format!("it has entries of devices {used:?}: --device chooses one"));
            }
        };
        let entries = self.device_traces.get(device).map_or(&[][..], |all| all);
        let mut reading = Reading::default();
        for (index, entry) in entries.iter().enumerate() {
            let wrong = |what| format!("entry {index} of device {device}: {what}");
            reading.entry(entry).map_err(wrong)?;
        }
        for segment in &self.segments {
            if segment.device == device as u64 {
                reading.segment(segment);
            }
        }
        reading.end()
    }
}

/// A trace while its entries are read in order.
#[derive(Default)]
struct Reading {
    operations: Vec<Operation>,
    /// The ID of each live address.
    live: HashMap<u64, u64>,
    /// All addresses that entries name.
    named: HashSet<u64>,
    /// Allocations that were live at the start: address to ID, size and stream.
    before: BTreeMap<u64, (u64, u64, u64)>,
    ids: u64,
}

impl Reading {
    fn id(&mut self) -> u64 {
        self.ids += 1;
        self.ids - 1
    }

    fn entry(&mut self, entry: &Entry) -> Result<(), String> {
        let is_free = match entry.action.as_str() {
            "alloc" => false,
            "free_completed" => true,
            _ => return Ok(()),
        };
        let (Some(address), Some(size), Some(stream)) = (entry.addr, entry.size, entry.stream)
        else {
            return Err("addr, size and stream are needed".to_owned());
        };
        if size == 0 {
            return Err("an allocation has at least one byte".to_owned());
        }
        let stream = stream.cast_unsigned();
        let is_known = !self.named.insert(address);
        match (is_free, self.live.remove(&address)) {
            (false, None) => {
                let id = self.id();
                self.live.insert(address, id);
                self.operations
                    .push(Operation::Allocate { id, size, stream });
            }
            (false, Some(_)) => return Err(format!("0x{address:x} is allocated already")),
            (true, Some(id)) => self.operations.push(Operation::Free { id }),
            (true, None) if is_known => return Err(format!("0x{address:x} is not allocated")),
            (true, None) => {
                let id = self.id();
                self.before.insert(address, (id, size, stream));
                self.operations.push(Operation::Free { id });
            }
        }
        Ok(())
    }

    /// Adds the blocks that are live at the end and in no entry.
    fn segment(&mut self, segment: &Segment) {
        let mut end = segment.address;
        for block in &segment.blocks {
            let address = block.address.unwrap_or(end);
            end = address.saturating_add(block.size);
            let size = block.requested_size.unwrap_or(block.size);
            if !block.state.starts_with("active") {
                continue;
            }
            if size > 0 && !self.named.contains(&address) {
                let id = self.id();
                let stream = segment.stream.cast_unsigned();
                self.before.insert(address, (id, size, stream));
            }
        }
    }

    fn end(self) -> Result<Trace, String> {
        let before = self.before.into_values();
        let before = before.map(|(id, size, stream)| Operation::Allocate { id, size, stream });
        let operations: Vec<_> = before.chain(self.operations).collect();
        match operations.is_empty() {
            true => Err("no allocation is in it".to_owned()),
            false => Ok(Trace { operations }),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn snapshot(text: &str) -> Result<Trace, String> {
        Snapshot::from_json(text.as_bytes())?.trace(None)
    }

    fn entries(entries: &[(&str, u64, u64)]) -> String {
        let entry = |&(action, addr, size): &(&str, u64, u64)| {
            format!(r#"{{"action": "{action}", "addr": {addr}, "size": {size}, "stream": 3}}"#)
        };
        let entries: Vec<_> = entries.iter().map(entry).collect();
        format!(r#"{{"device_traces": [[], [{}]]}}"#, entries.join(","))
    }

    #[test]
    fn memory_from_before_is_allocated_first() {
        let trace = snapshot(
            r#"{"segments": [
                {"device": 0, "stream": 9, "blocks": [{"address": 1, "size": 5, "state": "active_allocated"}]},
                {"device": 1, "address": 4096, "stream": 7, "blocks": [
                    {"size": 512, "requested_size": 100, "state": "active_allocated"},
                    {"address": 4608, "size": 512, "state": "inactive"},
                    {"address": 5120, "size": 512, "requested_size": 300, "state": "active_awaiting_free"}]}],
              "device_traces": [[], [
                {"action": "segment_alloc", "addr": 4096, "size": 2097152, "stream": 7, "time_us": 5},
                {"action": "alloc", "addr": 5120, "size": 300, "stream": 7, "frames": [{"line": 1}]},
                {"action": "free_requested", "addr": 5120, "size": 300, "stream": 7},
                {"action": "free_completed", "addr": 8192, "size": 200, "stream": 8},
                {"action": "oom", "device_free": 0, "size": 9, "stream": 7}]]}"#,
        );
        let allocate = |id, size, stream| Operation::Allocate { id, size, stream };
        let expected = [
            allocate(2, 100, 7),
            allocate(1, 200, 8),
            allocate(0, 300, 7),
            Operation::Free { id: 1 },
        ];
        assert_eq!(trace.unwrap().operations, expected);
    }

    #[test]
    fn entries_that_contradict_each_other_are_named() {
        for (given, what) in [
            (
                &[("alloc", 1, 5), ("alloc", 1, 5)][..],
                "entry 1 of device 1: 0x1 is allocated",
            ),
            (
                &[
                    ("alloc", 1, 5),
                    ("free_completed", 1, 5),
                    ("free_completed", 1, 5),
                ],
                "entry 2 of device 1: 0x1 is not allocated",
            ),
            (&[("alloc", 1, 0)], "at least one byte"),
            (&[], "no allocations were recorded"),
            (&[("segment_alloc", 1, 5)], "no allocation is in it"),
        ] {
            let error = snapshot(&entries(given)).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn one_device_is_chosen() {
        let both = r#"{"device_traces": [[{"action": "alloc", "addr": 1, "size": 1, "stream": 0}],
            [{"action": "alloc", "addr": 1, "size": 2, "stream": 0}]]}"#;
        let both = Snapshot::from_json(both.as_bytes()).unwrap();
        assert!(
            both.trace(None)
                .unwrap_err()
                .contains("devices [0, 1]: --device")
        );
        assert!(both.trace(Some(2)).unwrap_err().contains("--device: "));
        let expected = Operation::Allocate {
            id: 0,
            size: 2,
            stream: 0,
        };
        assert_eq!(both.trace(Some(1)).unwrap().operations, [expected]);
    }
}
