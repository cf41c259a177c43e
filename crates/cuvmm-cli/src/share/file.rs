//! Safetensors files: the header as a manifest, the bytes in chunks, and detection of changes.

use std::collections::BTreeMap;
use std::fs::{File, Metadata as Status};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{channel, sync_channel};
use std::thread;

use anyhow::{Context as _, anyhow, ensure};
use cuvmm::share::{Manifest, Tensor};
use safetensors::tensor::Metadata;

use cuvmm_cli::files;
use cuvmm_cli::terminal::{chain, shown};

/// The size of the length field before the header.
const LENGTH: u64 = 8;

/// The longest header that the `safetensors` crate reads, in bytes.
const MOST_HEADER: u64 = 100_000_000;

/// The size of a chunk in bytes.
const CHUNK: u64 = 16 << 20;

/// The number of chunks: one is read while the other is used.
const CHUNKS: usize = 2;

/// The identity, size and modification time of a file, which detect that it was replaced or
/// changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    place: (u64, u64),
    size: u64,
    changed: (i64, i64),
}

impl Stamp {
    /// Returns the stamp of the file at a path.
    ///
    /// # Errors
    /// The error of reading its metadata.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        Ok(Self::new(&std::fs::metadata(path)?))
    }

    fn new(status: &Status) -> Self {
        Self {
            place: (status.dev(), status.ino()),
            size: status.len(),
            changed: (status.mtime(), status.mtime_nsec()),
        }
    }
}

/// The tensors of a file.
#[derive(Debug)]
pub(super) struct Weights {
    path: PathBuf,
    file: File,
    stamp: Stamp,
    /// The offset in the file at which the tensors begin.
    start: u64,
    manifest: Manifest,
    bytes: u64,
}

impl Weights {
    /// Opens a file and reads its header. Offsets in the manifest are relative to the end of the
    /// header, as in the file.
    ///
    /// # Errors
    /// Wrong usage: a file that cannot be read, is not a regular file, is not a safetensors file,
    /// or is incomplete.
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let file = files::regular(path)?;
        Self::read(path, file).map_err(|error| files::wrong(path, chain(&error)))
    }

    fn read(path: &Path, file: File) -> anyhow::Result<Self> {
        let status = file.metadata()?;
        let stamp = Stamp::new(&status);
        ensure!(stamp.size >= LENGTH, "this is no safetensors file");
        let mut length = [0; LENGTH as usize];
        file.read_exact_at(&mut length, 0)?;
        let length = u64::from_le_bytes(length);
        let most = MOST_HEADER.min(stamp.size - LENGTH);
        ensure!(
            length <= most,
            "this is no safetensors file: its header would have {length} bytes"
        );
        let mut header = vec![0; usize::try_from(length)?];
        file.read_exact_at(&mut header, LENGTH)?;
        let metadata: Metadata =
            serde_json::from_slice(&header).context("this is no safetensors file")?;
        let (start, bytes) = (LENGTH + length, metadata.data_len() as u64);
        ensure!(
            stamp.size - start == bytes,
            "the header describes {bytes} bytes, but {} follow it",
            stamp.size - start
        );
        Ok(Self {
            path: path.to_owned(),
            file,
            stamp,
            start,
            manifest: manifest(&metadata),
            bytes,
        })
    }

    /// Returns the manifest: the tensors and their offsets.
    pub(super) const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the size of all tensors in bytes.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the stamp of the file when it was opened.
    pub(super) const fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// Calls `act` with each chunk and its offset, in order. The next chunk is read concurrently.
    ///
    /// # Errors
    /// A file that cannot be read or changes meanwhile, and the first error of `act`.
    pub(super) fn each_chunk(
        &self,
        mut act: impl FnMut(u64, &[u8]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        thread::scope(|scope| {
            // Both ends drop when this closure ends, which also ends the reading thread.
            let (read, chunks) = sync_channel(CHUNKS);
            let (give_back, empty) = channel();
            for _ in 0..CHUNKS {
                give_back.send(vec![])?;
            }
            scope.spawn(move || {
                for (offset, mut chunk) in (0..self.bytes).step_by(CHUNK as usize).zip(empty) {
                    let outcome = self.fill(offset, &mut chunk);
                    let failed = outcome.is_err();
                    if read.send(outcome.map(|()| (offset, chunk))).is_err() || failed {
                        return;
                    }
                }
            });
            for chunk in chunks {
                let (offset, chunk) = chunk.with_context(|| shown(&self.path))?;
                act(offset, &chunk)?;
                // Fails for the last chunks, when the reading thread has ended.
                let _ = give_back.send(chunk);
            }
            let now = Stamp::new(&self.file.metadata()?);
            match now == self.stamp {
                true => Ok(()),
                false => Err(anyhow!("{} changed while it was read", shown(&self.path))),
            }
        })
    }

    fn fill(&self, offset: u64, chunk: &mut Vec<u8>) -> io::Result<()> {
        chunk.resize((self.bytes - offset).min(CHUNK) as usize, 0);
        self.file.read_exact_at(chunk, self.start + offset)
    }
}

fn manifest(metadata: &Metadata) -> Manifest {
    let names = metadata.offset_keys().into_iter();
    let tensors = names.filter_map(|name| {
        let info = metadata.info(&name)?;
        let (start, end) = info.data_offsets;
        Some(Tensor {
            dtype: info.dtype.to_string(),
            shape: info.shape.iter().map(|&extent| extent as u64).collect(),
            offset: start as u64,
            size: (end - start) as u64,
            name,
        })
    });
    let notes = metadata.metadata().iter().flatten();
    Manifest {
        tensors: tensors.collect(),
        metadata: notes
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect::<BTreeMap<_, _>>(),
    }
}
