//! Files in the format of safetensors, read piece by piece.
//!
//! They are read and not mapped: a file that somebody cuts short meanwhile is then an error.

use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::{DType, Error, Result, Shape, Tensor};
use safetensors::SafeTensorError;
use safetensors::tensor::Metadata;

/// The longest header that is believed, as safetensors itself has it.
const LONGEST_HEADER: u64 = 100_000_000;

/// What is read at a time, in bytes: whole elements of every type.
const PIECE: usize = 64 << 20;

/// An open file and what its header says.
pub(super) struct File {
    path: PathBuf,
    file: std::fs::File,
    /// Where its tensors begin.
    begin: u64,
    entries: Vec<Entry>,
    piece: Vec<u8>,
}

/// A tensor in a file.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) shape: Shape,
    pub(super) dtype: DType,
    offset: u64,
    bytes: usize,
}

impl File {
    pub(super) fn open(path: &Path) -> Result<Self> {
        Self::read_header(path).map_err(|error| error.with_path(path))
    }

    fn read_header(path: &Path) -> Result<Self> {
        let mut file = std::fs::File::open(path)?;
        let size = file.metadata()?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length)?;
        let length = u64::from_le_bytes(length);
        let begin = length.saturating_add(8);
        if length > LONGEST_HEADER {
            return Err(SafeTensorError::HeaderTooLarge.into());
        }
        if begin > size {
            return Err(SafeTensorError::InvalidHeaderLength.into());
        }
        let mut header = Vec::new();
        (&mut file).take(length).read_to_end(&mut header)?;
        // What it says of offsets, shapes and types is checked as it is read.
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(SafeTensorError::InvalidHeaderDeserialization)?;
        if begin.checked_add(header.data_len() as u64) != Some(size) {
            return Err(SafeTensorError::MetadataIncompleteBuffer.into());
        }
        let mut entries = Vec::new();
        for name in header.offset_keys() {
            let Some(info) = header.info(&name) else {
                continue;
            };
            let (start, end) = info.data_offsets;
            entries.push(Entry {
                shape: Shape::from(info.shape.as_slice()),
                dtype: DType::try_from(info.dtype)?,
                offset: start as u64,
                bytes: end - start,
                name,
            });
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            begin,
            entries,
            piece: Vec::new(),
        })
    }

    /// Its tensors as they lie there.
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Reads a tensor into one of the same shape, of any type.
    pub(super) fn read(&mut self, entry: &Entry, to: &Tensor) -> Result<()> {
        let read = self.read_pieces(entry, to);
        read.map_err(|error| error.with_path(&self.path))
    }

    fn read_pieces(&mut self, entry: &Entry, to: &Tensor) -> Result<()> {
        let to = to.flatten_all()?;
        self.file.seek(SeekFrom::Start(self.begin + entry.offset))?;
        let (mut left, mut done) = (entry.bytes, 0);
        while left > 0 {
            let bytes = left.min(PIECE);
            self.piece.resize(bytes, 0);
            self.file.read_exact(&mut self.piece)?;
            let count = bytes.checked_div(entry.dtype.size_in_bytes());
            let count =
                count.ok_or_else(|| Error::from(io::Error::other("elements of no size")))?;
            let piece = Tensor::from_raw_buffer(&self.piece, entry.dtype, &[count], to.device())?;
            to.slice_set(&piece.to_dtype(to.dtype())?, 0, done)?;
            left -= bytes;
            done += count;
        }
        Ok(())
    }
}
