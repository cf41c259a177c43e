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

use cuvmm_command::files;
use cuvmm_command::terminal::{chain, shown};

/// The size of the length field before the header.
const LENGTH: u64 = 8;

/// The longest header that the `safetensors` crate reads, in bytes.
const MOST_HEADER: u64 = 100_000_000;

/// The alignment of tensors that a file does not align itself, as of the driver's own allocations.
const ALIGNMENT: u64 = 512;

const CHUNK: u64 = 16 << 20;

/// The number of chunks: one is read while the other is used.
const CHUNKS: usize = 2;

/// The identity, size and modification time of a file, to detect a replacement or a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    place: (u64, u64),
    size: u64,
    changed: (i64, i64),
}

impl Stamp {
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

#[derive(Debug)]
pub(super) struct Weights {
    path: PathBuf,
    file: File,
    stamp: Stamp,
    /// The offset of the first tensor in the file.
    start: u64,
    manifest: Manifest,
    bytes: u64,
    places: Vec<Place>,
    size: u64,
}

/// Bytes of a file, and their offset in the publication. Offsets in the file count from the end of
/// the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    from: u64,
    bytes: u64,
    to: u64,
}

impl Place {
    /// Returns the part of a chunk that belongs here, and its offset in the publication.
    pub(super) fn part<'c>(&self, offset: u64, chunk: &'c [u8]) -> Option<(u64, &'c [u8])> {
        let first = self.from.max(offset);
        let last = (self.from + self.bytes).min(offset + chunk.len() as u64);
        let at = |it: u64| usize::try_from(it.checked_sub(offset)?).ok();
        let part = chunk.get(at(first)?..at(last)?)?;
        (!part.is_empty()).then_some((self.to + (first - self.from), part))
    }
}

impl Weights {
    /// Opens a file and reads its header. Tensors are published at their offsets in the file,
    /// counted from the end of the header. If a tensor is not aligned to its elements there, a
    /// kernel that reads it would fail, and all are published at aligned offsets instead.
    ///
    /// # Errors
    /// Wrong usage: the file cannot be read, is not a regular file, is not a safetensors file, or
    /// is incomplete.
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
        let mut manifest = manifest(&metadata);
        let (places, size) = match is_aligned(&metadata) {
            true => (
                vec![Place {
                    from: 0,
                    bytes,
                    to: 0,
                }],
                bytes,
            ),
            false => align(&mut manifest),
        };
        Ok(Self {
            path: path.to_owned(),
            file,
            stamp,
            start,
            manifest,
            bytes,
            places,
            size,
        })
    }

    pub(super) const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the size of all tensors in bytes.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn places(&self) -> &[Place] {
        &self.places
    }

    /// Returns the size of the publication in bytes, with gaps for alignment.
    pub(super) const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the stamp of the file when it was opened.
    pub(super) const fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// Calls `act` with each chunk and its offset, in order. The next chunk is read concurrently.
    ///
    /// # Errors
    /// The file cannot be read or changes meanwhile, or `act` fails.
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

/// Returns `true` if each tensor lies at a multiple of its elements' size.
fn is_aligned(metadata: &Metadata) -> bool {
    let mut tensors = metadata.tensors().into_values();
    tensors.all(|info| {
        let element = (info.dtype.bitsize() / 8).max(1);
        info.data_offsets.0.is_multiple_of(element)
    })
}

/// Gives all tensors aligned offsets. Returns the places of their bytes, and the total size.
fn align(manifest: &mut Manifest) -> (Vec<Place>, u64) {
    let mut size: u64 = 0;
    let tensors = manifest.tensors.iter_mut();
    let places = tensors.map(|tensor| {
        let to = size.next_multiple_of(ALIGNMENT);
        let from = std::mem::replace(&mut tensor.offset, to);
        size = to + tensor.size;
        Place {
            from,
            bytes: tensor.size,
            to,
        }
    });
    (places.collect(), size)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("it.safetensors");
        let length = (header.len() as u64).to_le_bytes();
        let all = [&length, header.as_bytes(), bytes].concat();
        std::fs::write(&path, all).unwrap();
        (folder, path)
    }

    fn published(weights: &Weights) -> Vec<u8> {
        let mut all = vec![0; weights.size() as usize];
        let copy = |offset, chunk: &[u8]| {
            for (to, part) in weights
                .places()
                .iter()
                .filter_map(|it| it.part(offset, chunk))
            {
                all[to as usize..][..part.len()].copy_from_slice(part);
            }
            Ok(())
        };
        weights.each_chunk(copy).unwrap();
        all
    }

    #[test]
    fn tensors_below_their_alignment_are_moved_and_others_stay() {
        let header = r#"{"mask":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"w":{"dtype":"F32","shape":[2],"data_offsets":[3,11]},"x":{"dtype":"U8","shape":[0],"data_offsets":[11,11]}}"#;
        let bytes: Vec<u8> = (1..=11).collect();
        let (_folder, path) = file(header, &bytes);
        let weights = Weights::open(&path).unwrap();
        let offsets = weights.manifest().tensors.iter().map(|it| it.offset);
        assert_eq!(offsets.collect::<Vec<_>>(), [0, 512, 1024]);
        let all = published(&weights);
        assert_eq!((all.len(), &all[..3]), (1024, &bytes[..3]));
        assert_eq!(all[512..520], bytes[3..]);

        let header = header.replace("F32", "U8").replace("[2]", "[8]");
        let (_folder, path) = file(&header, &bytes);
        let weights = Weights::open(&path).unwrap();
        let offsets = weights.manifest().tensors.iter().map(|it| it.offset);
        assert_eq!(offsets.collect::<Vec<_>>(), [0, 3, 11]);
        assert_eq!(published(&weights), bytes);
    }

    #[test]
    fn a_place_takes_its_part_of_each_chunk() {
        let place = Place {
            from: 3,
            bytes: 4,
            to: 512,
        };
        let part = |offset: u64, bytes: &'static [u8]| place.part(offset, bytes);
        assert_eq!(part(0, b"abc"), None);
        assert_eq!(part(0, b"abcd"), Some((512, &b"d"[..])));
        assert_eq!(part(4, b"abcdefg"), Some((513, &b"abc"[..])));
        assert_eq!(part(7, b"abc"), None);
    }
}
