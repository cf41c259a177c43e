//! The errors of this crate, one enum for each operation.
//!
//! Methods that candle's own types have too return candle's error around one of these: [`shortage`]
//! extracts the figures of a shortage of memory.

use candle_core::{DType, Error as CandleError, Shape};
use cuvmm::driver::CUresult;
use cuvmm::error::{BlockError, CudarcError, MemoryError};

/// Reason why a GPU could not be opened or wrapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The device is not a CUDA device.
    #[error("the device is not a CUDA device")]
    NotCuda,
    /// No driver, no such GPU, or a GPU that cannot be used; or a stream of another GPU, or the
    /// [per-thread stream](CudarcError::PerThread) of `Device::new_cuda`: use
    /// `Device::new_cuda_with_stream`.
    #[error(transparent)]
    Cudarc(#[from] CudarcError),
    /// candle could not open the device.
    #[error(transparent)]
    Candle(#[from] CandleError),
}

/// Reason why no tensor could be made over memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The memory could not be allocated.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The tensor does not fit in the memory.
    #[error("{bytes} bytes at offset {offset:#x} do not fit in {has} bytes")]
    OutOfRange {
        /// The offset of the tensor in bytes.
        offset: u64,
        /// The size of the tensor in bytes.
        bytes: u64,
        /// The size of the memory in bytes.
        has: u64,
    },
    /// The size of the tensor overflows.
    #[error("the size of a tensor of shape {shape:?} overflows")]
    TooLarge {
        /// The shape of the tensor.
        shape: Shape,
    },
    /// candle has no GPU storage over lent memory for elements of this type.
    #[error("tensors of {dtype:?} cannot use a block's memory")]
    UnsupportedType {
        /// The type of the elements.
        dtype: DType,
    },
    /// The block is asleep: a kernel would fault on it.
    #[error("the block is asleep")]
    Asleep,
    /// The block's memory does not permit this access, for example because forks share it.
    #[error(transparent)]
    Refused(MemoryError),
    /// The block has no home stream, or another than the GPU's.
    #[error("the block's home stream is not the one that candle's device works on")]
    WrongStream,
    /// cudarc could not create the objects that the tensor needs.
    #[error("cudarc returned {0}")]
    Cudarc(CUresult),
    /// candle could not copy or create a tensor.
    #[error(transparent)]
    Candle(#[from] CandleError),
}

/// Reason why a cache could not be extended, forked or truncated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// Memory for tokens, for a fork, or for a cache that stops sharing could not be allocated.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The cache was created without [`with_forks`](crate::Cache::with_forks).
    #[error("the cache was created without forks")]
    MayNotFork,
    /// The rows are not at equal distances, as a tensor's rows must be.
    #[error(
        "row {row} is {distance} bytes after the row before it, the second row is {first} bytes after the first"
    )]
    NotSideBySide {
        /// The index of the row.
        row: usize,
        /// The distance in bytes from the row before; 0 if the row is not after it.
        distance: u64,
        /// The distance in bytes from the first row to the second.
        first: u64,
    },
    /// The cache would exceed its maximum of tokens.
    #[error("cannot append {more} tokens to {held}: the cache holds at most {most}")]
    TooManyTokens {
        /// The number of tokens in the cache.
        held: usize,
        /// The number of tokens to append.
        more: usize,
        /// The most tokens of the cache.
        most: usize,
    },
    /// The cache has fewer tokens than requested.
    #[error("{wanted} tokens requested, the cache has {has}")]
    NotThere {
        /// The number of tokens requested.
        wanted: usize,
        /// The number of tokens in the cache.
        has: usize,
    },
    /// The appended tensor differs from the cache in more than the number of tokens.
    #[error(
        "{got:?} of {got_type:?} cannot be appended to {has:?} of {has_type:?} along dimension {dim}"
    )]
    Differs {
        /// The shape of the appended tensor.
        got: Vec<usize>,
        /// The type of the appended tensor.
        got_type: DType,
        /// The shape of the cache's tokens.
        has: Vec<usize>,
        /// The type of the cache's tokens.
        has_type: DType,
        /// The dimension of tokens.
        dim: usize,
    },
    /// The shape has no such dimension, or no elements for a token.
    #[error("{got:?} has no tokens along dimension {dim}")]
    NoTokens {
        /// The shape.
        got: Vec<usize>,
        /// The dimension of tokens.
        dim: usize,
    },
    /// The cache is asleep: a kernel would fault on it.
    #[error("the cache is asleep")]
    Asleep,
    /// The appended tensor is on another device.
    #[error("the appended tensor is on another device than the cache")]
    WrongDevice,
    /// The rows span more elements than candle's 32-bit kernels can count. Use a smaller maximum of
    /// tokens, a smaller batch, or [`Order::Tokens`](crate::Order::Tokens).
    #[error("the rows span {elements} elements, more than candle's kernels can count")]
    TooWide {
        /// The number of elements from the first one to the end of the last row.
        elements: u64,
    },
    /// No tensor could be made over the memory.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// candle could not copy or narrow a tensor.
    #[error(transparent)]
    Candle(#[from] CandleError),
}

/// Reason why weights could not be placed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// A tensor of this name exists already.
    #[error("there is already a tensor named {name:?}")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The tensor could not be placed.
    #[error("{name}: {source}")]
    Tensor {
        /// The name of the tensor.
        name: String,
        /// The reason.
        source: TensorError,
    },
    /// The memory could not be allocated.
    #[error(transparent)]
    Allocate(#[from] TensorError),
    /// A file could not be read, or candle does not support its contents.
    #[error(transparent)]
    Candle(#[from] CandleError),
}

impl From<MemoryError> for TensorError {
    fn from(refusal: MemoryError) -> Self {
        match refusal {
            MemoryError::Asleep { .. } => Self::Asleep,
            refusal => Self::Refused(refusal),
        }
    }
}

impl From<CacheError> for CandleError {
    fn from(error: CacheError) -> Self {
        match error {
            CacheError::Candle(error) => error,
            error => Self::Cuda(Box::new(error)),
        }
    }
}

impl From<WeightsError> for CandleError {
    fn from(error: WeightsError) -> Self {
        match error {
            WeightsError::Candle(error) => error,
            error => Self::Cuda(Box::new(error)),
        }
    }
}

impl TensorError {
    /// Returns the figures if memory was short.
    #[must_use]
    pub fn shortage(&self) -> Option<&BlockError> {
        match self {
            Self::Block(error) => Some(error).filter(|error| error.is_shortage()),
            Self::Candle(error) => shortage(error),
            _ => None,
        }
    }
}

impl CacheError {
    /// Returns the figures if memory was short.
    #[must_use]
    pub fn shortage(&self) -> Option<&BlockError> {
        let error = match self {
            Self::Block(BlockError::Refused { cause, .. }) => cause,
            Self::Block(error) => error,
            Self::Tensor(error) => return error.shortage(),
            Self::Candle(error) => return shortage(error),
            _ => return None,
        };
        error.is_shortage().then_some(error)
    }
}

impl WeightsError {
    /// Returns the figures if memory was short.
    #[must_use]
    pub fn shortage(&self) -> Option<&BlockError> {
        match self {
            Self::Allocate(error) | Self::Tensor { source: error, .. } => error.shortage(),
            Self::Candle(error) => shortage(error),
            Self::NameTaken { .. } => None,
        }
    }
}

/// Returns the figures if an error of candle reports that a tenant's memory was short.
#[must_use]
pub fn shortage(error: &CandleError) -> Option<&BlockError> {
    match error {
        CandleError::Cuda(error) => {
            let cache = error.downcast_ref::<CacheError>();
            let weights = || error.downcast_ref::<WeightsError>()?.shortage();
            cache.map_or_else(weights, CacheError::shortage)
        }
        CandleError::Context { inner, .. }
        | CandleError::WithPath { inner, .. }
        | CandleError::WithBacktrace { inner, .. } => shortage(inner),
        CandleError::WrappedContext { wrapped, .. } => shortage(wrapped.downcast_ref()?),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::Context as _;
    use cuvmm::driver::host::{HostDriver, HostOptions};
    use cuvmm::{Device, Limit, Pool};

    use super::*;

    /// Figures are found at any depth of candle's errors, and only if memory was short.
    #[test]
    fn shortages_are_found_in_candles_errors() {
        let driver = Arc::new(HostDriver::new(HostOptions::new()));
        let device = Device::open(driver, 0).unwrap();
        let granule = device.granularity();
        let limit = Limit::Bytes(granule);
        let pool = Pool::builder(&device).limit(limit).build().unwrap();
        let tenant = pool.tenant("model").register().unwrap();
        let short = || tenant.block(2 * granule).allocate().unwrap_err();
        let empty = || tenant.block(0).allocate().unwrap_err();
        let mut block = tenant.block(granule).capacity(2 * granule).allocate();
        let block = block.as_mut().unwrap();
        let grown = tenant.grow_all(&mut [(block, 2 * granule)]).unwrap_err();

        let cache = |error: CacheError| CandleError::from(error);
        let weights = |error: TensorError| {
            let name = "a".to_owned();
            let source = TensorError::Candle(cache(CacheError::Tensor(error)));
            CandleError::from(WeightsError::Tensor { name, source })
        };
        let wrapped = Err::<(), _>(cache(short().into())).context("the prompt");
        for error in [
            cache(short().into()),
            cache(grown.into()),
            cache(short().into()),
            cache(TensorError::from(short()).into()),
            weights(short().into()),
            CandleError::from(WeightsError::Allocate(short().into())),
            cache(short().into())
                .context("a step")
                .with_path("file")
                .bt(),
            wrapped.unwrap_err(),
        ] {
            let found = shortage(&error).map(BlockError::is_shortage);
            assert_eq!(found, Some(true), "{error}");
        }
        for error in [
            cache(empty().into()),
            weights(empty().into()),
            cache(CacheError::MayNotFork),
            cache(empty().into()),
            CandleError::from(WeightsError::NameTaken { name: "a".into() }),
            cache(CandleError::Msg("out of memory".into()).into()),
        ] {
            assert!(shortage(&error).is_none(), "{error}");
        }
    }
}
