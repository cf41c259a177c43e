//! What can go wrong, one enum for each operation.
//!
//! Methods that candle's own types have too return candle's error, with one of these in it:
//! [`shortage`] finds the figures of memory that was short.

use candle_core::{DType, Error as CandleError, Shape};
use cuvmm::driver::CUresult;
use cuvmm::error::{BlockError, CudarcError, MemoryError};

/// Why a GPU could not be opened or taken up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// It is not a GPU of CUDA's.
    #[error("the device is not one of CUDA's")]
    NotCuda,
    /// There is no driver, no such GPU, or it cannot be used; or the stream is another GPU's, or the
    /// [per-thread one](CudarcError::PerThread), which is what `Device::new_cuda` works on: take
    /// `Device::new_cuda_with_stream`.
    #[error(transparent)]
    Cudarc(#[from] CudarcError),
    /// candle could not open it.
    #[error(transparent)]
    Candle(#[from] CandleError),
}

/// Why no tensor could be made over memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The memory could not be allocated.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The tensor wants bytes that are not there.
    #[error("{bytes} bytes from {offset:#x} on are not within the {has} that there are")]
    OutOfRange {
        /// Where it would begin.
        offset: u64,
        /// What it takes.
        bytes: u64,
        /// What there is.
        has: u64,
    },
    /// More elements than can be counted.
    #[error("a tensor of shape {shape:?} cannot be counted in bytes")]
    TooLarge {
        /// Its shape.
        shape: Shape,
    },
    /// candle keeps elements of this type in no storage of a GPU that could be lent.
    #[error("tensors of {dtype:?} cannot be lent")]
    UnsupportedType {
        /// The type.
        dtype: DType,
    },
    /// The block sleeps: a kernel that touched it would fault.
    #[error("the block is asleep")]
    Asleep,
    /// The block's memory may not be used so: it shares memory with forks, say.
    #[error(transparent)]
    Refused(MemoryError),
    /// The block was allocated on another stream than that of the GPU's, or on none.
    #[error("the block's home stream is not the one that candle's device works on")]
    WrongStream,
    /// cudarc could not make what it needs beside the memory.
    #[error("cudarc answered {0}")]
    Cudarc(CUresult),
    /// candle could not copy or make a tensor.
    #[error(transparent)]
    Candle(#[from] CandleError),
}

/// Why tokens could not be appended to a cache, or taken from it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The memory of tokens, of a fork, or of a cache that no longer shares it, could not be had.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The cache was not made [to fork](crate::Cache::with_forks).
    #[error("the cache was not made to fork")]
    MayNotFork,
    /// Rows do not lie at equal distances, as a tensor's do.
    #[error(
        "row {row} lies {distance} bytes from the one before it, and the second {first} bytes from the first"
    )]
    NotSideBySide {
        /// Which row, from 0.
        row: usize,
        /// Bytes from the one before it; nothing if it does not lie behind it.
        distance: u64,
        /// Bytes from the first to the second.
        first: u64,
    },
    /// There would be more tokens than the cache was made for.
    #[error("{held} tokens and {more} more are over the most there may be, {most}")]
    TooManyTokens {
        /// Tokens there are.
        held: usize,
        /// Tokens to append.
        more: usize,
        /// What the cache was made for.
        most: usize,
    },
    /// There are fewer tokens than are to be kept.
    #[error("{wanted} tokens cannot be kept of {has}")]
    NotThere {
        /// Tokens to keep.
        wanted: usize,
        /// Tokens there are.
        has: usize,
    },
    /// What is appended differs from what is there, in more than the number of tokens.
    #[error(
        "{got:?} of {got_type:?} cannot be appended to {has:?} of {has_type:?} along dimension {dim}"
    )]
    Differs {
        /// Its shape.
        got: Vec<usize>,
        /// Its type.
        got_type: DType,
        /// The shape of what is there.
        has: Vec<usize>,
        /// The type of what is there.
        has_type: DType,
        /// The dimension of tokens.
        dim: usize,
    },
    /// The shape has no such dimension, or nothing in it.
    #[error("{got:?} has no tokens along dimension {dim}")]
    NoTokens {
        /// The shape.
        got: Vec<usize>,
        /// The dimension of tokens.
        dim: usize,
    },
    /// The cache sleeps with its tenant's blocks: a kernel that touched it would fault.
    #[error("the cache is asleep")]
    Asleep,
    /// It lies on another device.
    #[error("what is appended lies on another device than the cache")]
    WrongDevice,
    /// candle's kernels count elements with 32 bits, and a cache this wide would have more between its
    /// first and its last: fewer tokens at most, a smaller batch, or
    /// [`Order::Tokens`](crate::Order::Tokens).
    #[error("the rows span {elements} elements, more than candle's kernels can count")]
    TooWide {
        /// From the first element to the end of the last row.
        elements: u64,
    },
    /// No tensor could be made over the memory.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// candle could not copy or narrow a tensor.
    #[error(transparent)]
    Candle(#[from] CandleError),
}

/// Why weights could not be placed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// There is one of this name.
    #[error("there is a tensor {name:?} already")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The tensor could not be placed.
    #[error("{name}: {source}")]
    Tensor {
        /// Its name.
        name: String,
        /// Why.
        source: TensorError,
    },
    /// The memory could not be allocated.
    #[error(transparent)]
    Allocate(#[from] TensorError),
    /// A file could not be read, or candle knows it not.
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
    /// The figures, if memory was short.
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
    /// The figures, if memory was short.
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
    /// The figures, if memory was short.
    #[must_use]
    pub fn shortage(&self) -> Option<&BlockError> {
        match self {
            Self::Allocate(error) | Self::Tensor { source: error, .. } => error.shortage(),
            Self::Candle(error) => shortage(error),
            Self::NameTaken { .. } => None,
        }
    }
}

/// The figures, where an error of candle's says that a tenant's memory was short.
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

    /// Figures are found however deep an error lies in those of candle's, and none where memory was not
    /// short.
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
