//! The manifest of published memory: which tensor is where.

use std::any::TypeId;
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

/// One tensor in published memory. The library compares its element type with the type of a
/// [view](super::Publication::view), and does not interpret it otherwise.
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

    /// Returns `false` if the elements are known not to be of type `T`. An unsigned number may hold
    /// the bits of any type of its width, and `u8` any bytes. Of other Rust types, and of element
    /// types that safetensors does not name, nothing is known.
    pub(super) fn may_hold<T: 'static>(&self) -> bool {
        let is = |other| TypeId::of::<T>() == other;
        let width = match &*self.dtype {
            "F64" | "I64" | "U64" => 8,
            "F32" | "I32" | "U32" => 4,
            "F16" | "BF16" | "I16" | "U16" => 2,
            "F8_E4M3" | "F8_E5M2" | "I8" | "U8" | "BOOL" => 1,
            _ => return true,
        };
        let signed = [
            (TypeId::of::<f64>(), "F64"),
            (TypeId::of::<f32>(), "F32"),
            (TypeId::of::<i64>(), "I64"),
            (TypeId::of::<i32>(), "I32"),
            (TypeId::of::<i16>(), "I16"),
            (TypeId::of::<i8>(), "I8"),
        ];
        match signed.iter().find(|(number, _)| is(*number)) {
            Some((_, name)) => *name == self.dtype,
            None if [
                TypeId::of::<u16>(),
                TypeId::of::<u32>(),
                TypeId::of::<u64>(),
            ]
            .into_iter()
            .any(is) =>
            {
                size_of::<T>() == width
            }
            None => true,
        }
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
                return Err(DescriptionError::NameTaken(tensor.name.clone()));
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

#[cfg(test)]
mod tests {
    use super::Tensor;

    #[test]
    fn a_type_that_the_manifest_contradicts_is_known() {
        let tensor = |dtype: &str| Tensor {
            name: "weight".to_owned(),
            dtype: dtype.to_owned(),
            shape: vec![4],
            offset: 0,
            size: 16,
        };
        let (f32s, halves, own) = (tensor("F32"), tensor("BF16"), tensor("MXFP4"));
        assert!(f32s.may_hold::<f32>() && f32s.may_hold::<u32>() && f32s.may_hold::<u8>());
        assert!(!f32s.may_hold::<f64>() && !f32s.may_hold::<i32>() && !f32s.may_hold::<u16>());
        assert!(halves.may_hold::<u16>() && !halves.may_hold::<f32>() && !halves.may_hold::<i16>());
        assert!(f32s.may_hold::<[f32; 4]>(), "another Rust type");
        assert!(own.may_hold::<f32>(), "another element type");
    }
}
