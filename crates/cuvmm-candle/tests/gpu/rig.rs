//! What every test has: a GPU, a pool with a limit and a tenant.

use std::io::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};
use cuvmm::{Limit, Pool, Tenant, TenantStats};
use cuvmm_candle::error::OpenError;
use cuvmm_candle::{Gpu, Memory};

pub const G: u64 = 2 << 20;

/// The GPU, or nothing where there is none, which is then said on the terminal even if the test harness
/// keeps quiet.
pub fn gpu(test: &str) -> Option<(MutexGuard<'static, ()>, Gpu)> {
    // They count what a device has.
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

/// A tenant of a pool of so many granules.
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

    /// Numbers that differ, on the GPU.
    pub fn numbers(&self, shape: &[usize], dtype: DType, seed: u32) -> Tensor {
        numbers(shape, seed)
            .to_device(self.candle())
            .unwrap()
            .to_dtype(dtype)
            .unwrap()
    }

    /// Nothing that was refused to cudarc, or that a kernel did, shows anywhere.
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

/// Numbers that differ, on the host.
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

/// The elements of a tensor as they are, whatever its storage spans.
pub fn bits(tensor: &Tensor) -> Vec<u32> {
    let whole = tensor
        .force_contiguous()
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap();
    let flat = whole.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    flat.into_iter().map(f32::to_bits).collect()
}
