//! A model's weights in one block of a tenant, and a `VarBuilder` over them.
//!
//! Tensors are placed once, packed, and never move. [`files`] reads files; the only computation
//! here is a change of element types.

mod files;

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;

use crate::error::{TensorError, WeightsError};
use crate::memory::{Arena, Memory};
use files::{Buffer, File};

/// A model's weights, packed into one block of a tenant, so that they can sleep.
///
/// The tensors are ordinary tensors and may outlive this value: the block is freed with the last of
/// them. The block's tag is that of the memory, or `weights`.
pub struct Weights {
    // Dropped before the block, which is then free at once unless other tensors exist.
    tensors: HashMap<String, Tensor>,
    arena: Arena,
}

impl Weights {
    /// Allocates a block for weights of `bytes` bytes in all, to be [inserted](Self::insert).
    /// [`Arena::bytes_for`] computes the size.
    ///
    /// # Errors
    /// [`WeightsError::Allocate`] with the figures.
    pub fn new(memory: &Memory, bytes: u64) -> Result<Self, WeightsError> {
        let arena = Arena::tagged(memory, bytes, "weights").map_err(WeightsError::Allocate)?;
        Ok(Self {
            arena,
            tensors: HashMap::new(),
        })
    }

    /// Loads the safetensors files of a model, sequentially through one buffer of 64 MiB. With
    /// `dtype`, all tensors are changed to that type on the GPU; otherwise they keep the file's
    /// types.
    ///
    /// # Errors
    /// [`WeightsError`] if memory is short, a file cannot be read, or two tensors have the same
    /// name.
    pub fn load<P: AsRef<Path>>(
        memory: &Memory,
        paths: &[P],
        dtype: Option<DType>,
    ) -> Result<Self, WeightsError> {
        let files = paths.iter().map(|path| File::open(path.as_ref()));
        let mut files = files.collect::<candle_core::Result<Vec<_>>>()?;
        let all = files.iter().flat_map(File::entries);
        let all = all.map(|entry| (entry.shape.clone(), dtype.unwrap_or(entry.dtype)));
        let bytes = Arena::bytes_for(all).map_err(WeightsError::Allocate)?;
        let mut weights = Self::new(memory, bytes)?;
        let mut buffer = Buffer::new();
        for file in &mut files {
            for index in 0..file.entries().len() {
                let Some(entry) = file.entries().get(index).cloned() else {
                    continue;
                };
                let dtype = dtype.unwrap_or(entry.dtype);
                let empty = |arena: &mut Arena| arena.empty(&entry.shape, dtype);
                let to = weights.place(&entry.name, empty)?;
                file.read(&entry, &to, &mut buffer)?;
                weights.tensors.insert(entry.name, to);
            }
        }
        Ok(weights)
    }

    /// Copies tensors on any device, for example from candle's `VarMap` or from a loader of another
    /// format.
    ///
    /// # Errors
    /// [`WeightsError`] if memory is short, or candle cannot copy a tensor.
    pub fn from_tensors<'a>(
        memory: &Memory,
        tensors: impl IntoIterator<Item = (&'a String, &'a Tensor)>,
    ) -> Result<Self, WeightsError> {
        let tensors: Vec<_> = tensors.into_iter().collect();
        let all = tensors
            .iter()
            .map(|(_, tensor)| (tensor.shape(), tensor.dtype()));
        let bytes = Arena::bytes_for(all).map_err(WeightsError::Allocate)?;
        let mut weights = Self::new(memory, bytes)?;
        for (name, tensor) in tensors {
            weights.insert(name, tensor)?;
        }
        Ok(weights)
    }

    /// Copies a tensor on any device, of any layout. A tensor that is not contiguous on the GPU is
    /// copied through memory of candle, at most 64 MiB at a time.
    ///
    /// # Errors
    /// [`WeightsError`], with nothing changed, if the name is taken, the tensor does not fit, or
    /// candle cannot copy it.
    pub fn insert(&mut self, name: &str, tensor: &Tensor) -> Result<(), WeightsError> {
        let copy = self.place(name, |arena| arena.copy(tensor))?;
        self.tensors.insert(name.to_owned(), copy);
        Ok(())
    }

    /// Makes a tensor in the arena under a name that must not be taken.
    fn place(
        &mut self,
        name: &str,
        make: impl FnOnce(&mut Arena) -> Result<Tensor, TensorError>,
    ) -> Result<Tensor, WeightsError> {
        if self.tensors.contains_key(name) {
            return Err(WeightsError::NameTaken {
                name: name.to_owned(),
            });
        }
        make(&mut self.arena).map_err(|source| WeightsError::Tensor {
            name: name.to_owned(),
            source,
        })
    }

    /// Returns the tensor with a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// Returns all tensors by name.
    #[must_use]
    pub const fn tensors(&self) -> &HashMap<String, Tensor> {
        &self.tensors
    }

    /// Returns the bytes that the tensors take, including the gaps between them.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.arena.used()
    }

    /// Returns a builder from which candle creates a model. A tensor requested in another type is
    /// copied to memory of candle, which does not sleep.
    #[must_use]
    pub fn var_builder(&self, dtype: DType) -> VarBuilder<'static> {
        let device = self.arena.memory().gpu().candle();
        VarBuilder::from_tensors(self.tensors.clone(), dtype, device)
    }
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Weights")
            .field("tensors", &self.tensors.len())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}
