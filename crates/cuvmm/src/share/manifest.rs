//! The manifest of published memory: which tensor is where.

use std::any::TypeId;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::wire::is_within;
use crate::error::DescriptionError;
use crate::size::aligned;

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
    /// The tensor's name.
    pub name: String,
    /// The type of its elements, named as in a safetensors file: `F32`, `BF16`. A type that these files
    /// lack has a name of the publisher's own, which has a lower-case letter.
    pub dtype: String,
    /// The size in each dimension, in elements.
    pub shape: Vec<u64>,
    /// The offset of the first byte in the memory.
    pub offset: u64,
    /// The size in bytes. For a type that safetensors names, it must be that of the elements,
    /// unless the metadata under `cuvmm.strides`, a JSON object, has the tensor's strides.
    pub size: u64,
}

impl Tensor {
    /// Returns the tensor's range of bytes.
    #[must_use]
    pub const fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.size)
    }

    /// Returns `false` if the elements are known not to be of type `T`. An unsigned number may hold
    /// the bits of any type of its width, and `u8` any bytes. Nothing is known of other Rust types,
    /// nor of element types that are no whole bytes or that safetensors does not name.
    pub(super) fn may_hold<T: 'static>(&self) -> bool {
        let is = |other| TypeId::of::<T>() == other;
        let width = match bits(&self.dtype) {
            Some(bits) if bits.is_multiple_of(8) => (bits / 8) as usize,
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

/// Returns the bits of an element of a type that safetensors names.
fn bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "C64" | "F64" | "I64" | "U64" => 64,
        "F32" | "I32" | "U32" => 32,
        "F16" | "BF16" | "I16" | "U16" => 16,
        "F8_E4M3" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "I8" | "U8" | "BOOL" => 8,
        "F6_E2M3" | "F6_E3M2" => 6,
        "F4" => 4,
        _ => return None,
    })
}

/// Returns the bytes of a dense tensor. Fails for a type that safetensors does not name, and for
/// elements that are no whole bytes or overflow 64 bits.
fn dense_size(name: &str, dtype: &str, shape: &[u64]) -> Result<u64, DescriptionError> {
    let bits = bits(dtype).ok_or_else(|| DescriptionError::ElementType {
        name: name.to_owned(),
        dtype: dtype.to_owned(),
    })?;
    let elements = if shape.contains(&0) {
        Some(0)
    } else {
        let mut sizes = shape.iter();
        sizes.try_fold(1_u64, |product, size| product.checked_mul(*size))
    };
    let bits = elements.and_then(|elements| elements.checked_mul(bits));
    match bits {
        Some(bits) if bits.is_multiple_of(8) => Ok(bits / 8),
        _ => Err(DescriptionError::Shape {
            name: name.to_owned(),
            dtype: dtype.to_owned(),
            shape: shape.to_vec(),
        }),
    }
}

/// Adds dense tensors to a [`Manifest`], one behind the other. See [`Manifest::builder`].
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct ManifestBuilder {
    manifest: Manifest,
    /// The end of the last tensor.
    end: u64,
}

impl ManifestBuilder {
    /// The alignment in bytes of tensors that [`tensor`](Self::tensor) places.
    pub const ALIGNMENT: u64 = 256;

    /// Adds a tensor behind the end of the last one, at a multiple of [`ALIGNMENT`](Self::ALIGNMENT).
    ///
    /// # Errors
    /// As [`tensor_at`](Self::tensor_at).
    pub fn tensor(
        self,
        name: impl Into<String>,
        dtype: &str,
        shape: &[u64],
    ) -> Result<Self, DescriptionError> {
        // An overflow is refused with the size of the tensor.
        let offset = aligned(self.end, Self::ALIGNMENT);
        self.tensor_at(name, dtype, shape, offset.unwrap_or(u64::MAX))
    }

    /// Adds a tensor whose first byte is at an offset in the memory. `dtype` is the type of its elements,
    /// named as in a safetensors file: `F32`, `BF16`. Its size follows from type and shape.
    ///
    /// # Errors
    /// [`DescriptionError::ElementType`] for a type that safetensors does not name,
    /// [`DescriptionError::Shape`] for elements that are no whole bytes or overflow 64 bits, and
    /// [`DescriptionError::Tensor`] for a tensor that ends behind 64 bits.
    pub fn tensor_at(
        mut self,
        name: impl Into<String>,
        dtype: &str,
        shape: &[u64],
        offset: u64,
    ) -> Result<Self, DescriptionError> {
        let name = name.into();
        let size = dense_size(&name, dtype, shape)?;
        let Some(end) = offset.checked_add(size) else {
            return Err(DescriptionError::Tensor { name, offset, size });
        };
        self.end = end;
        self.manifest.tensors.push(Tensor {
            name,
            dtype: dtype.to_owned(),
            shape: shape.to_vec(),
            offset,
            size,
        });
        Ok(self)
    }

    /// Adds free-form metadata under a key.
    pub fn metadata(mut self, key: impl Into<String>, text: impl Into<String>) -> Self {
        self.manifest.metadata.insert(key.into(), text.into());
        self
    }

    /// Returns the bytes from the start of the memory to the end of the last added tensor.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.end
    }

    /// Returns the manifest.
    #[must_use]
    pub fn build(self) -> Manifest {
        self.manifest
    }
}

/// The metadata key of the strides of tensors that are not dense, as the Python package writes it:
/// a JSON object with a key for each tensor.
const STRIDES: &str = "cuvmm.strides";

impl Manifest {
    /// Begins a manifest of dense tensors.
    ///
    /// ```
    /// use cuvmm::share::Manifest;
    ///
    /// let manifest = Manifest::builder()
    ///     .tensor("weight", "F32", &[10, 10])?
    ///     .tensor("bias", "BF16", &[10])?
    ///     .metadata("step", "1000");
    /// assert_eq!(manifest.size(), 512 + 20);
    /// let manifest = manifest.build();
    /// assert_eq!(manifest.tensors[0].size, 400);
    /// # Ok::<(), cuvmm::error::DescriptionError>(())
    /// ```
    pub fn builder() -> ManifestBuilder {
        ManifestBuilder::default()
    }

    /// Returns the tensor with a name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Checks that each element type in capital letters is one that safetensors names, and that the
    /// elements of a dense tensor of such a type are all of its bytes. Other names are the
    /// publisher's own, such as NumPy's `complex128`. A reader does not check this, because types
    /// may be added.
    pub(super) fn check_sizes(&self) -> Result<(), DescriptionError> {
        let strides = self.metadata.get(STRIDES);
        let strides = strides.and_then(|text| serde_json::from_str(text).ok());
        let strides: BTreeMap<String, IgnoredAny> = strides.unwrap_or_default();
        let own = |tensor: &&Tensor| tensor.dtype.contains(|it: char| it.is_ascii_lowercase());
        for tensor in self.tensors.iter().filter(|tensor| !own(tensor)) {
            let wanted = dense_size(&tensor.name, &tensor.dtype, &tensor.shape)?;
            if tensor.size != wanted && !strides.contains_key(&tensor.name) {
                return Err(DescriptionError::TensorSize {
                    name: tensor.name.clone(),
                    dtype: tensor.dtype.clone(),
                    shape: tensor.shape.clone(),
                    size: tensor.size,
                    wanted,
                });
            }
        }
        Ok(())
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{Manifest, Tensor};
    use crate::error::DescriptionError;

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
    #[test]
    fn sizes_follow_from_types_and_shapes() {
        let built = Manifest::builder()
            .tensor("a", "F32", &[10, 10])
            .and_then(|it| it.tensor("b", "F4", &[3, 2]))
            .and_then(|it| it.tensor("c", "I64", &[]))
            .and_then(|it| it.tensor("d", "BF16", &[u64::MAX, 4, 0]))
            .and_then(|it| it.tensor_at("e", "F6_E2M3", &[4], 5));
        let built = built.unwrap();
        assert_eq!(built.size(), 8);
        let manifest = built.build();
        let places = manifest.tensors.iter().map(|it| (it.offset, it.size));
        let places: Vec<_> = places.collect();
        assert_eq!(places, [(0, 400), (512, 3), (768, 8), (1024, 0), (5, 3)]);
        manifest.check_sizes().unwrap();
    }

    #[test]
    fn types_that_are_not_named_and_shapes_that_are_no_bytes_are_refused() {
        let add = |dtype: &str, shape: &[u64]| {
            let built = Manifest::builder().tensor("it", dtype, shape);
            built.unwrap_err().to_string()
        };
        assert_eq!(
            add("FLOAT", &[1]),
            "tensor \"it\": the element type \"FLOAT\" is none of safetensors, such as F32 or BF16"
        );
        let shape =
            "tensor \"it\": elements of type F4 in the shape [3] are no whole bytes, or overflow";
        assert_eq!(add("F4", &[3]), format!("{shape} 64 bits"));
        assert!(add("F64", &[u64::MAX, 2]).contains("overflow 64 bits"));
        let built = Manifest::builder().tensor_at("it", "U8", &[2], u64::MAX);
        assert!(matches!(built, Err(DescriptionError::Tensor { .. })));
    }

    #[test]
    fn a_size_that_is_not_that_of_the_elements_is_refused_unless_there_are_strides() {
        let built = Manifest::builder().tensor("it", "F32", &[10, 10]);
        let mut manifest = built.unwrap().build();
        manifest.tensors[0].size = 8;
        assert_eq!(
            manifest.check_sizes().unwrap_err().to_string(),
            "tensor \"it\": 8 B, but 400 B are needed for elements of type F32 in the shape [10, 10]"
        );
        let strides = ("cuvmm.strides".to_owned(), r#"{"it": [0, 1]}"#.to_owned());
        manifest.metadata.extend([strides]);
        manifest.check_sizes().unwrap();
        manifest.tensors[0].dtype = "FLOAT".to_owned();
        assert!(manifest.check_sizes().is_err());
        manifest.tensors[0].dtype = "complex128".to_owned();
        manifest.check_sizes().unwrap();
    }
}
