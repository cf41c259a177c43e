//! What lies where in published memory.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::wire::is_within;
use crate::error::DescriptionError;

/// What published memory holds: tensors by name, and notes. As the header of a safetensors file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The tensors.
    pub tensors: Vec<Tensor>,
    /// Notes of the publisher's own.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
}

/// One tensor in published memory. What its elements are is between publisher and reader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// The type of its elements, as in a safetensors file: `F32`, `BF16`.
    pub dtype: String,
    /// Its extent in each dimension.
    pub shape: Vec<u64>,
    /// Its first byte in the memory.
    pub offset: u64,
    /// How many bytes it has.
    pub size: u64,
}

impl Tensor {
    /// The bytes it lies in.
    #[must_use]
    pub const fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.size)
    }
}

impl Manifest {
    /// The tensor of a name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Checks that every tensor lies in memory that there is, and has a name of its own.
    pub(super) fn check(&self, runs: &[Range<u64>]) -> Result<(), DescriptionError> {
        let mut names = BTreeSet::new();
        for tensor in &self.tensors {
            if !names.insert(&tensor.name) {
                return Err(DescriptionError::NameTaken {
                    name: tensor.name.clone(),
                });
            }
            // One without elements has no bytes, and may be anywhere.
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
