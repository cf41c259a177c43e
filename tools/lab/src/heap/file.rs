//! Files with traces: lines, or snapshots of PyTorch's recorder, plain or compressed with gzip.

use std::io::{BufRead as _, BufReader, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use super::pickle;
use super::snapshot::Snapshot;
use super::trace::{Trace, parse};
use cuvmm_command::files;

const GZIP: [u8; 2] = [0x1f, 0x8b];

/// The most bytes of a file and of a decompressed snapshot.
const MOST: u64 = 256 << 20;

/// Reads a trace: lines, or the part of a snapshot that `device` chooses.
///
/// # Errors
/// Wrong usage: the file cannot be read or is no trace; the error names the line or the entry.
pub(super) fn read(path: &Path, device: Option<usize>) -> anyhow::Result<Trace> {
    let bytes = files::bytes(path, MOST)?;
    let parsed = match bytes.starts_with(&GZIP) {
        true => contents(MultiGzDecoder::new(&bytes[..]), device),
        false => contents(&bytes[..], device),
    };
    parsed.map_err(|error| files::wrong(path, error))
}

fn contents(input: impl Read, device: Option<usize>) -> Result<Trace, String> {
    let mut input = BufReader::new(input);
    let start = input.fill_buf().map_err(|error| error.to_string())?;
    let read = match start.trim_ascii_start().first() {
        Some(&pickle::FIRST) => Snapshot::from_pickle,
        Some(b'{') => Snapshot::from_json,
        _ if device.is_some() => return Err("--device is for snapshots".to_owned()),
        _ => return parse(input),
    };
    let mut bytes = Vec::new();
    let taken = input.take(MOST + 1).read_to_end(&mut bytes);
    taken.map_err(|error| error.to_string())?;
    if bytes.len() as u64 > MOST {
        return Err("this snapshot has more than 256 MiB, the most that is read".to_owned());
    }
    let snapshot = read(&bytes).map_err(|error| format!("this is no snapshot: {error}"))?;
    snapshot.trace(device)
}
