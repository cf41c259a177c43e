//! A model's weights in one block of a tenant, and a `VarBuilder` over them.
//!
//! They are placed once, packed, and stay where they are. Files are read in [`files`], nothing is
//! computed here but the types of elements.

mod files;

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;

use crate::error::{TensorError, WeightsError};
use crate::memory::{Arena, Memory};
use files::{Buffer, File};

/// A model's weights, packed into one block of a tenant, where they can sleep.
///
/// The tensors are tensors like any other, and outlive this: the block is freed when the last of them has
/// gone. The block bears the memory's tag, or `weights`.
pub struct Weights {
    // Go before the block, so that it is free at once if nobody else has them.
    tensors: HashMap<String, Tensor>,
    arena: Arena,
}

impl Weights {
    /// Allocates a block for weights of so many bytes in all, which are then
    /// [inserted](Self::insert). [`Arena::bytes_for`] says what tensors take.
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

    /// Reads the files of a model in the format of safetensors. They are read from beginning to end
    /// through one buffer of 64 MiB, and what changes its type does so on the GPU.
    ///
    /// With a type all tensors become of that type; without one they are as they lie there.
    ///
    /// # Errors
    /// [`WeightsError`] when memory is short, a file cannot be read, or two tensors have one name.
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

    /// Copies tensors, which may lie anywhere, as candle's `VarMap` or a loader of another format has
    /// them.
    ///
    /// # Errors
    /// [`WeightsError`] when memory is short, or candle cannot copy.
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

    /// Copies a tensor, which may lie anywhere and in any way. What does not lie on the GPU side by side
    /// goes through memory of candle's, at most 64 MiB at a time.
    ///
    /// # Errors
    /// [`WeightsError`] when there is one of this name, no room, or candle cannot copy it; nothing is changed
    /// then.
    pub fn insert(&mut self, name: &str, tensor: &Tensor) -> Result<(), WeightsError> {
        let copy = self.place(name, |arena| arena.copy(tensor))?;
        self.tensors.insert(name.to_owned(), copy);
        Ok(())
    }

    /// A tensor of the arena's for a name that none has.
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

    /// A tensor by its name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// All tensors, by their names.
    #[must_use]
    pub const fn tensors(&self) -> &HashMap<String, Tensor> {
        &self.tensors
    }

    /// Bytes that they take, the gaps between them included.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.arena.used()
    }

    /// What a model of candle's is made from. A model that wants a tensor in another type than it has
    /// here gets a copy in memory of candle's, which does not sleep.
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
