//! The manifest of published memory: which tensor is where.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::wire::is_within;
use crate::error::DescriptionError;

/// The contents of published memory: tensors by name, and metadata, like the header of a
/// safetensors file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The tensors.
    pub tensors: Vec<Tensor>,
    /// Free-form metadata of the publisher.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
}

/// One tensor in published memory. The library does not interpret its element type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// The type of its elements, named as in a safetensors file: `F32`, `BF16`.
    pub dtype: String,
    /// Its size in each dimension, in elements.
    pub shape: Vec<u64>,
    /// The offset of its first byte in the memory.
    pub offset: u64,
    /// Its size in bytes.
    pub size: u64,
}

impl Tensor {
    /// Returns the range of bytes that it occupies.
    #[must_use]
    pub const fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.size)
    }
}

impl Manifest {
    /// Returns the tensor with a name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Checks that every tensor is within existing memory and that names are unique.
    pub(super) fn check(&self, runs: &[Range<u64>]) -> Result<(), DescriptionError> {
        let mut names = BTreeSet::new();
        for tensor in &self.tensors {
            if !names.insert(&tensor.name) {
                return Err(DescriptionError::NameTaken {
                    name: tensor.name.clone(),
                });
            }
            // A tensor without elements has no bytes, so any offset is valid.
            if tensor.size > 0 && !is_within(runs, tensor.offset, tensor.size) {
                return Err(DescriptionError::Tensor {
                    name: tensor.name.clone(),
                    offset: tensor.offset,
                    size: tensor.size,
                });
            }
        }
        Ok(())
    }
}
