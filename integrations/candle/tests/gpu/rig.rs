//! The common set-up of the tests: a GPU, a pool with a limit and a tenant.

use std::io::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};
use cuvmm::{Limit, Pool, Tenant, TenantStats};
use cuvmm_candle::error::OpenError;
use cuvmm_candle::{Gpu, Memory};

pub const G: u64 = 2 << 20;

/// Returns the GPU, or `None` without one, after printing a notice even if the test harness
/// captures output.
pub fn gpu(test: &str) -> Option<(MutexGuard<'static, ()>, Gpu)> {
    // The tests count what a device has, so they run one at a time.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let error = match Gpu::open(0) {
        Ok(gpu) => return Some((turn, gpu)),
        Err(OpenError::Cudarc(error)) => error,
        Err(error) => panic!("{error}"),
    };
    if std::env::var_os("CUVMM_REQUIRE_GPU").is_some_and(|value| value == "1") {
        panic!("CUVMM_REQUIRE_GPU=1, and there is no GPU: {error}");
    }
    let said = writeln!(
        std::io::stderr(),
        "\n*** {test} DID NOT RUN: it needs a GPU. {error} ***"
    );
    drop(said);
    None
}

pub struct Rig {
    _turn: MutexGuard<'static, ()>,
    pub gpu: Gpu,
    pub pool: Pool,
    pub tenant: Tenant,
    pub memory: Memory,
}

/// Returns a tenant of a pool of `granules` granules.
pub fn rig(test: &str, granules: u64) -> Option<Rig> {
    let (turn, gpu) = gpu(test)?;
    assert_eq!(gpu.device().granularity(), G);
    let limit = Limit::Bytes(granules * G);
    let pool = Pool::builder(gpu.device()).limit(limit).build().unwrap();
    let tenant = pool.tenant("model").register().unwrap();
    let memory = Memory::new(&gpu, &tenant);
    Some(Rig {
        _turn: turn,
        gpu,
        pool,
        tenant,
        memory,
    })
}

impl Rig {
    pub fn candle(&self) -> &Device {
        self.gpu.candle()
    }

    pub fn stats(&self) -> TenantStats {
        self.tenant.stats()
    }

    /// Returns distinct numbers on the GPU.
    pub fn numbers(&self, shape: &[usize], dtype: DType, seed: u32) -> Tensor {
        numbers(shape, seed)
            .to_device(self.candle())
            .unwrap()
            .to_dtype(dtype)
            .unwrap()
    }

    /// Checks that no refusal to cudarc and no fault of a kernel is visible.
    pub fn nothing_went_wrong(&self) {
        let theirs = self.candle().as_cuda_device().unwrap().cuda_stream();
        theirs.synchronize().unwrap();
        theirs.context().check_err().unwrap();
        self.gpu.device().synchronize().unwrap();
        assert_eq!(self.gpu.device().drop_failures(), 0);
        let sum = (self.numbers(&[4], DType::F32, 1) + 1.0).unwrap();
        assert_eq!(bits(&sum).len(), 4);
    }
}

/// Returns distinct numbers on the host.
pub fn numbers(shape: &[usize], seed: u32) -> Tensor {
    let count: usize = shape.iter().product();
    let mut state = seed.wrapping_mul(2_654_435_761).max(1);
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / 16_777_216.0 - 0.5
    };
    let numbers: Vec<f32> = (0..count).map(next).collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap()
}

/// Returns the elements of a tensor, whatever its storage spans.
pub fn bits(tensor: &Tensor) -> Vec<u32> {
    let whole = tensor
        .force_contiguous()
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap();
    let flat = whole.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    flat.into_iter().map(f32::to_bits).collect()
}
