//! The definition of a tensor, and the bytes that it spans. This module uses no driver and no
//! memory.

use dlpark::DlpackElement;
use dlpark::ffi::{DLDataType, DLDataTypeCode};

use crate::error::{ArgumentError, TensorError};

/// The most dimensions of a tensor, which is the limit of NumPy and PyTorch.
pub const MOST_DIMENSIONS: usize = 64;

/// A tensor to be made over memory: its elements, its shape, and the offset at which it begins.
///
/// Elements are contiguous in row-major order, unless [strides](Self::strides) are set.
///
/// # Examples
/// ```
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = cuvmm::Device::open(opened.driver, 0)?;
/// # let pool = cuvmm::Pool::builder(&device).limit(cuvmm::Limit::Bytes(64 << 20)).build()?;
/// # let tenant = pool.tenant("model").register()?;
/// # let stream = cuvmm::Stream::new(&device)?;
/// use cuvmm::dlpack::{Consumer, Tensor};
///
/// let block = tenant.allocate_on(&stream, 2 << 20)?;
/// let consumer = Consumer::Stream(stream.clone());
/// let tensor = Tensor::of::<f32>(&[512, 1024]).export(block, &consumer)?;
/// assert_eq!(tensor.validate()?.shape(), [512, 1024]);
///
/// // Give `tensor` to another library. Its deleter, or dropping it here, frees the block.
/// assert_eq!(pool.stats().in_use, 2 << 20);
/// drop(tensor);
/// assert_eq!(pool.stats().in_use, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "nothing is exported before `export`"]
pub struct Tensor {
    element: DLDataType,
    shape: Vec<usize>,
    strides: Option<Vec<usize>>,
    offset: u64,
    read_only: bool,
}

impl Tensor {
    /// Creates a tensor of elements of type `T`, with `shape` elements in each dimension; without
    /// dimensions a single element.
    pub fn of<T: DlpackElement>(shape: &[usize]) -> Self {
        Self::new(T::DTYPE, shape)
    }

    /// Creates a tensor of elements that have no Rust type, such as [`DLDataType::BF16`] or
    /// [`DLDataType::F8E4M3FN`]. Elements of less than a byte are packed, the first one in a byte's
    /// lower bits: `shape` and strides count each. Two lanes of 4 bits are an element of one byte,
    /// as PyTorch's `float4_e2m1fn_x2`.
    pub fn new(element: DLDataType, shape: &[usize]) -> Self {
        Self {
            element,
            shape: shape.to_vec(),
            strides: None,
            offset: 0,
            read_only: false,
        }
    }

    /// Sets the distance in elements between consecutive indices of each dimension. A stride of
    /// zero repeats the same elements.
    pub fn strides(mut self, elements: &[usize]) -> Self {
        self.strides = Some(elements.to_vec());
        self
    }

    /// Sets the offset of the first element in the memory, in bytes. The default is 0.
    pub const fn offset(mut self, bytes: u64) -> Self {
        self.offset = bytes;
        self
    }

    /// Marks the tensor as read-only: a request to the consumer, which nothing enforces. NumPy
    /// respects it, PyTorch ignores it.
    pub const fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    pub(super) const fn element(&self) -> DLDataType {
        self.element
    }

    pub(super) const fn first_byte(&self) -> u64 {
        self.offset
    }

    pub(super) const fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the figures of a descriptor, if the tensor is valid.
    pub(super) fn figures(&self) -> Result<Figures, TensorError> {
        let strides = self.strides.as_deref();
        Figures::of(self.element, &self.shape, strides)
    }
}

/// A shape with a stride for each dimension, and the bytes that it spans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Figures {
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<usize>,
    /// The bytes from the first element to the end of the last; 0 if there is none.
    pub(super) bytes: u64,
}

impl Figures {
    pub(super) fn of(
        element: DLDataType,
        shape: &[usize],
        strides: Option<&[usize]>,
    ) -> Result<Self, TensorError> {
        Self::stored(element, bits_of(element), shape, strides)
    }

    /// Returns the figures of elements that lie `bits` apart.
    pub(super) fn stored(
        element: DLDataType,
        bits: u64,
        shape: &[usize],
        strides: Option<&[usize]>,
    ) -> Result<Self, TensorError> {
        ArgumentError::at_most("dimensions", shape.len() as u64, MOST_DIMENSIONS as u64)?;
        let count = strides.map_or(shape.len(), <[usize]>::len) as u64;
        ArgumentError::at_least("strides", count, shape.len() as u64)?;
        ArgumentError::at_most("strides", count, shape.len() as u64)?;
        ArgumentError::not_zero("bits of an element", element.bits.into())?;
        ArgumentError::not_zero("lanes of an element", element.lanes.into())?;
        if let Some(expected) = bits_of_code(element.code)
            && expected != element.bits
        {
            let found = element;
            return Err(TensorError::ElementBits { found, expected });
        }
        Self::counted(bits, shape, strides).ok_or_else(|| TensorError::TooLarge {
            shape: shape.to_vec(),
            strides: strides.unwrap_or_default().to_vec(),
        })
    }

    fn counted(bits: u64, shape: &[usize], strides: Option<&[usize]>) -> Option<Self> {
        let side_by_side = row_major(shape)?;
        let strides = strides.map_or(side_by_side, <[usize]>::to_vec);
        let bytes = if shape.contains(&0) {
            0
        } else {
            let mut last = 0u64;
            for (&length, &stride) in shape.iter().zip(&strides) {
                let steps = u64::try_from(length).ok()?.checked_sub(1)?;
                last = last.checked_add(steps.checked_mul(u64::try_from(stride).ok()?)?)?;
            }
            last.checked_add(1)?.checked_mul(bits)?.div_ceil(8)
        };
        // DLPack's figures are signed.
        let said = shape.iter().chain(&strides);
        let fit = said.clone().all(|&figure| i64::try_from(figure).is_ok());
        (fit && i64::try_from(bytes).is_ok()).then(|| Self {
            shape: shape.to_vec(),
            strides,
            bytes,
        })
    }

    /// Returns `true` if the elements are contiguous in row-major order. The stride of a dimension
    /// of length one has no meaning: PyTorch writes 1.
    pub(super) fn is_compact(&self) -> bool {
        if self.shape.contains(&0) {
            return true;
        }
        let Some(side_by_side) = row_major(&self.shape) else {
            return false;
        };
        let strides = self.strides.iter().zip(&side_by_side);
        let mut dimensions = self.shape.iter().zip(strides);
        dimensions.all(|(&length, (stride, wanted))| length == 1 || stride == wanted)
    }
}

/// Returns the strides of contiguous elements. Returns `None` if their number overflows, even if a
/// dimension of length zero makes the product zero: other libraries multiply too.
fn row_major(shape: &[usize]) -> Option<Vec<usize>> {
    let mut strides = vec![1; shape.len()];
    let mut stride = 1usize;
    for (place, &length) in strides.iter_mut().zip(shape).rev() {
        *place = stride;
        stride = stride.checked_mul(length.max(1))?;
    }
    i64::try_from(stride).ok().map(|_| strides)
}

/// Returns the bits of an element, all lanes together.
pub(super) fn bits_of(element: DLDataType) -> u64 {
    u64::from(element.bits) * u64::from(element.lanes)
}

/// Returns the bits of a floating-point type whose code has a fixed number of them. DLPack obliges
/// consumers to refuse others.
const fn bits_of_code(code: DLDataTypeCode) -> Option<u8> {
    const F8: (u8, u8) = (
        DLDataTypeCode::FLOAT8_E3M4.0,
        DLDataTypeCode::FLOAT8_E8M0FNU.0,
    );
    match code {
        DLDataTypeCode::FLOAT4_E2M1FN => Some(4),
        DLDataTypeCode::FLOAT6_E2M3FN | DLDataTypeCode::FLOAT6_E3M2FN => Some(6),
        DLDataTypeCode(code) if F8.0 <= code && code <= F8.1 => Some(8),
        _ => None,
    }
}

/// Returns the required alignment of an element in bytes: its size, half of that for a complex
/// number, and 1 if that is not a power of two.
pub(super) fn alignment_of(element: DLDataType) -> u64 {
    let bytes = bits_of(element) / 8;
    if !bytes.is_power_of_two() {
        1
    } else if element.code == DLDataTypeCode::COMPLEX && bytes > 1 {
        bytes / 2
    } else {
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns every element's offset in elements, by enumerating the tensor.
    fn places(shape: &[usize], strides: &[usize]) -> Vec<u64> {
        let mut places = vec![0u64];
        for (&length, &stride) in shape.iter().zip(strides) {
            places = places
                .iter()
                .flat_map(|place| (0..length).map(move |n| place + (n * stride) as u64))
                .collect();
        }
        places
    }

    fn shapes() -> impl Strategy<Value = (Vec<usize>, Option<Vec<usize>>)> {
        prop::collection::vec((0usize..5, 0usize..9), 0..5).prop_flat_map(|dimensions| {
            let (shape, strides): (Vec<_>, Vec<_>) = dimensions.into_iter().unzip();
            any::<bool>().prop_map(move |given| (shape.clone(), given.then(|| strides.clone())))
        })
    }

    proptest! {
        #[test]
        fn the_bytes_are_those_up_to_the_last_element(
            (shape, strides) in shapes(),
            bits in prop::sample::select(vec![1u8, 4, 6, 8, 16, 24, 32, 64]),
            lanes in 1u16..5,
        ) {
            let element = DLDataType::new(DLDataTypeCode::UINT, bits, lanes);
            let figures = Figures::of(element, &shape, strides.as_deref()).unwrap();
            let places = places(&shape, &figures.strides);
            let behind = places.iter().max().map_or(0, |last| (last + 1) * bits_of(element));
            prop_assert_eq!(figures.bytes, behind.div_ceil(8));
            let in_order = (0..places.len() as u64).eq(places.iter().copied());
            prop_assert_eq!(figures.is_compact(), in_order, "{:?}", figures);
            if strides.is_none() {
                prop_assert!(figures.is_compact());
            }
        }

        #[test]
        fn what_cannot_be_counted_is_refused(
            shape in prop::collection::vec(any::<usize>(), 1..6),
            strides in prop::collection::vec(any::<usize>(), 1..6),
        ) {
            let dimensions = shape.len().min(strides.len());
            let (shape, strides) = (&shape[..dimensions], &strides[..dimensions]);
            let figures = Figures::of(DLDataType::F64, shape, Some(strides));
            // Computes the expected result in integers that do not overflow here.
            let last: u128 = shape
                .iter()
                .zip(strides)
                .map(|(&n, &by)| (n.max(1) as u128 - 1).saturating_mul(by as u128))
                .fold(0, u128::saturating_add);
            let all = shape.iter().fold(1u128, |all, &n| all.saturating_mul(n.max(1) as u128));
            let signed = i64::MAX as u128;
            let sayable = shape.iter().chain(strides).all(|&n| n as u128 <= signed);
            let bytes = last.saturating_add(1).saturating_mul(8);
            let small = sayable
                && all <= signed
                && (shape.contains(&0) || bytes <= signed && bytes * 8 <= u64::MAX as u128);
            prop_assert_eq!(figures.is_ok(), small);
        }
    }

    #[test]
    fn a_tensor_without_dimensions_is_one_element() {
        let figures = Figures::of(DLDataType::F64, &[], None).unwrap();
        assert_eq!(figures.bytes, 8);
        assert!(figures.is_compact());
    }

    #[test]
    fn what_makes_no_tensor_is_said() {
        let of = |element, shape: &[usize], strides: Option<&[usize]>| {
            Figures::of(element, shape, strides).unwrap_err()
        };
        assert!(matches!(
            of(DLDataType::U8, &[1; 65], None),
            TensorError::Argument(ArgumentError::TooLarge {
                value: 65,
                most: 64,
                ..
            })
        ));
        assert!(matches!(
            of(DLDataType::U8, &[2, 3], Some(&[3])),
            TensorError::Argument(ArgumentError::TooSmall {
                what: "strides",
                value: 1,
                least: 2
            })
        ));
        assert!(matches!(
            of(DLDataType::new(DLDataTypeCode::INT, 8, 0), &[2], None),
            TensorError::Argument(ArgumentError::Zero { .. })
        ));
        assert!(Figures::of(DLDataType::U8, &[1; 64], None).is_ok());
    }

    #[test]
    fn a_narrow_type_has_the_bits_of_its_code() {
        let of = |code, bits, lanes| Figures::of(DLDataType::new(code, bits, lanes), &[3, 5], None);
        for code in 7..=17 {
            let bits = match code {
                17 => 4,
                15 | 16 => 6,
                _ => 8,
            };
            let code = DLDataTypeCode(code);
            assert_eq!(
                of(code, bits, 1).unwrap().bytes,
                u64::from(bits) * 15 / 8 + u64::from(bits < 8)
            );
            assert_eq!(
                of(code, bits, 2).unwrap().bytes,
                (30 * u64::from(bits)).div_ceil(8)
            );
            for wrong in [1, 3, 4, 6, 8, 16, 255]
                .into_iter()
                .filter(|&it| it != bits)
            {
                let refused = of(code, wrong, 1).unwrap_err();
                let is_right = matches!(
                    refused,
                    TensorError::ElementBits { expected, found }
                        if expected == bits && found.bits == wrong && found.code == code
                );
                assert!(is_right, "{refused}");
            }
        }
        assert_eq!(of(DLDataTypeCode::INT, 3, 1).unwrap().bytes, 6);
        assert_eq!(of(DLDataTypeCode(18), 3, 1).unwrap().bytes, 6);
    }

    #[test]
    fn an_element_is_aligned_to_its_size() {
        let cases = [
            (DLDataType::U8, 1),
            (DLDataType::BF16, 2),
            (DLDataType::F32, 4),
            (DLDataType::C64, 4),
            (DLDataType::C128, 8),
            (DLDataType::F4E2M1FN, 1),
            (DLDataType::F6E2M3FN, 1),
            (DLDataType::new(DLDataTypeCode::FLOAT, 32, 4), 16),
            (DLDataType::new(DLDataTypeCode::FLOAT, 32, 3), 1),
        ];
        for (element, alignment) in cases {
            assert_eq!(alignment_of(element), alignment, "{element:?}");
        }
    }
}
