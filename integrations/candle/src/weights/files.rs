//! Files in the safetensors format, read piece by piece. They are not mapped, so that truncating a
//! file meanwhile causes an error and not a fault.

use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::{DType, Error, Result, Shape, Tensor};
use safetensors::SafeTensorError;
use safetensors::tensor::Metadata;

/// The longest accepted header, as in safetensors itself.
const LONGEST_HEADER: u64 = 100_000_000;

/// The bytes read at a time: a whole number of elements of every type.
const PIECE: usize = 64 << 20;

pub(super) struct File {
    path: PathBuf,
    file: std::fs::File,
    /// The offset of its first tensor.
    begin: u64,
    entries: Vec<Entry>,
}

/// The buffer for pieces of files: one for all files of a model.
pub(super) struct Buffer {
    /// The most bytes read at a time.
    most: usize,
    piece: Vec<u8>,
}

impl Buffer {
    pub(super) const fn new() -> Self {
        Self::of(PIECE)
    }

    const fn of(most: usize) -> Self {
        let piece = Vec::new();
        Self { most, piece }
    }
}

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
        // Deserialization checks offsets, shapes and types.
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
        })
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(super) fn read(&mut self, entry: &Entry, to: &Tensor, buffer: &mut Buffer) -> Result<()> {
        let read = self.read_pieces(entry, to, buffer);
        read.map_err(|error| error.with_path(&self.path))
    }

    fn read_pieces(&mut self, entry: &Entry, to: &Tensor, buffer: &mut Buffer) -> Result<()> {
        let Buffer { most, piece } = buffer;
        let to = to.flatten_all()?;
        self.file.seek(SeekFrom::Start(self.begin + entry.offset))?;
        let (mut left, mut done) = (entry.bytes, 0);
        while left > 0 {
            let bytes = left.min(*most);
            piece.resize(bytes, 0);
            self.file.read_exact(piece)?;
            let count = bytes.checked_div(entry.dtype.size_in_bytes());
            let count =
                count.ok_or_else(|| Error::from(io::Error::other("elements of no size")))?;
            let read = Tensor::from_raw_buffer(piece, entry.dtype, &[count], to.device())?;
            to.slice_set(&read.to_dtype(to.dtype())?, 0, done)?;
            left -= bytes;
            done += count;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use candle_core::Device;

    use super::*;

    #[test]
    fn what_was_saved_is_read_as_it_was_or_as_another_type() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let large = Tensor::arange(0f32, 1000., &Device::Cpu).unwrap();
        let odd = Tensor::new(&[1u8, 2, 3], &Device::Cpu).unwrap();
        let empty = Tensor::zeros((0, 5), DType::BF16, &Device::Cpu).unwrap();
        let saved = HashMap::from([("large", large), ("odd", odd), ("empty", empty)]);
        candle_core::safetensors::save(&saved, &path).unwrap();
        let mut file = File::open(&path).unwrap();
        let mut buffer = Buffer::of(1024);
        let entries = file.entries().to_vec();
        assert_eq!(entries.len(), 3);
        for entry in entries {
            let expected = &saved[entry.name.as_str()];
            assert_eq!(
                (&entry.shape, entry.dtype),
                (expected.shape(), expected.dtype())
            );
            for dtype in [entry.dtype, DType::F64] {
                let to = Tensor::ones(&entry.shape, dtype, &Device::Cpu).unwrap();
                file.read(&entry, &to, &mut buffer).unwrap();
                let flat = |tensor: &Tensor| {
                    let tensor = tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
                    tensor.to_vec1::<f64>().unwrap()
                };
                assert!(flat(&to) == flat(expected), "{} as {dtype:?}", entry.name);
            }
        }
    }

    #[test]
    fn all_files_are_read_through_one_buffer() {
        let folder = tempfile::tempdir().unwrap();
        let mut buffer = Buffer::of(1024);
        let mut places = std::collections::HashSet::new();
        for number in 0..5u32 {
            let path = folder.path().join(format!("{number}.safetensors"));
            let one = Tensor::full(number as f32, 1000, &Device::Cpu).unwrap();
            candle_core::safetensors::save(&HashMap::from([("one", one)]), &path).unwrap();
            let mut file = File::open(&path).unwrap();
            let entry = file.entries()[0].clone();
            let to = Tensor::zeros(1000, DType::F32, &Device::Cpu).unwrap();
            file.read(&entry, &to, &mut buffer).unwrap();
            assert!(to.to_vec1::<f32>().unwrap() == [number as f32; 1000]);
            places.insert((buffer.piece.as_ptr(), buffer.piece.capacity()));
        }
        assert_eq!(places.len(), 1, "the buffer was made once");
        assert!(places.iter().all(|&(_, capacity)| capacity <= 1024));
    }

    #[test]
    fn a_file_that_is_wrong_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broken.safetensors");
        let with_header = |header: &str, data: usize| {
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.bytes());
            bytes.resize(bytes.len() + data, 0);
            bytes
        };
        let one = |dtype: &str, shape: &str, offsets: &str| {
            let entry = format!(r#""dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}"#);
            with_header(&format!(r#"{{"a":{{{entry}}}}}"#), 8)
        };
        let good = one("F32", "[2]", "[0,8]");
        std::fs::write(&path, &good).unwrap();
        assert_eq!(File::open(&path).unwrap().entries().len(), 1);
        for (wrong, bytes) in [
            ("nothing", Vec::new()),
            ("no length", good[..7].to_vec()),
            ("half a header", good[..40].to_vec()),
            ("too little", good[..good.len() - 1].to_vec()),
            ("too much", [&good[..], &[0]].concat()),
            (
                "an endless header",
                [&u64::MAX.to_le_bytes(), &good[8..]].concat(),
            ),
            ("no JSON", with_header("no header", 8)),
            ("no map", with_header("[]", 8)),
            ("another shape", one("F32", "[3]", "[0,8]")),
            (
                "a shape beyond all",
                one("F32", "[18446744073709551615,2]", "[0,8]"),
            ),
            ("offsets beyond the end", one("F32", "[2]", "[8,16]")),
            ("offsets that go back", one("F32", "[2]", "[8,0]")),
            ("an unknown type", one("F31", "[2]", "[0,8]")),
            ("a type that candle has not", one("BOOL", "[8]", "[0,8]")),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let refused = File::open(&path).err().expect(wrong).to_string();
            assert!(refused.contains("broken.safetensors"), "{wrong}: {refused}");
        }
        // The file is truncated while it is read.
        std::fs::write(&path, &good).unwrap();
        let mut file = File::open(&path).unwrap();
        std::fs::write(&path, &good[..good.len() - 4]).unwrap();
        let entry = file.entries()[0].clone();
        let to = Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
        let refused = file
            .read(&entry, &to, &mut Buffer::new())
            .unwrap_err()
            .to_string();
        assert!(refused.contains("broken.safetensors"), "{refused}");
        let absent = File::open(&folder.path().join("absent")).err().unwrap();
        assert!(absent.to_string().contains("absent"), "{absent}");
    }
}
