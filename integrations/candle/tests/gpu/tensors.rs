//! Tensors over blocks: their contents, and the lifetime of the memory.

use candle_core::{CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Tensor};
use cuvmm_candle::error::{OpenError, TensorError};
use cuvmm_candle::{Arena, Gpu, Memory};

use super::rig::{G, Rig, bits, rig};

fn block(rig: &Rig, size: u64) -> cuvmm::Block {
    rig.tenant.allocate_on(rig.gpu.stream(), size).unwrap()
}

fn written(rig: &Rig, numbers: &[f32]) -> cuvmm::Block {
    let block = block(rig, 4 * numbers.len() as u64);
    let bytes: Vec<u8> = numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    block.write(0, &bytes).unwrap();
    block
}

#[test]
fn a_tensor_shows_its_block_and_keeps_it() {
    let Some(rig) = rig("a_tensor_shows_its_block_and_keeps_it", 8) else {
        return;
    };
    let tensor = rig
        .memory
        .tensor(written(&rig, &[1.0, 2.0, 3.0, 4.0]), (2, 2), DType::F32)
        .unwrap();
    assert_eq!(tensor.to_vec2::<f32>().unwrap(), [[1.0, 2.0], [3.0, 4.0]]);
    // Views and clones of all kinds, the last of which is dropped on another thread.
    let row = tensor.get(1).unwrap();
    let clone = tensor.clone();
    drop(tensor);
    assert_eq!(rig.gpu.sweep(), 16);
    assert_eq!(
        clone
            .t()
            .unwrap()
            .contiguous()
            .unwrap()
            .to_vec2::<f32>()
            .unwrap(),
        [[1.0, 3.0], [2.0, 4.0]]
    );
    drop(clone);
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (16, 1));
    std::thread::spawn(move || assert_eq!(row.to_vec1::<f32>().unwrap(), [3.0, 4.0]))
        .join()
        .unwrap();
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));
    assert_eq!(rig.stats().in_use, 0);
    rig.nothing_went_wrong();
}

/// The refusal at the drop of the first tensor is not visible to any other.
#[test]
fn the_end_of_one_tensor_disturbs_no_other() {
    let Some(rig) = rig("the_end_of_one_tensor_disturbs_no_other", 64) else {
        return;
    };
    let kept = rig
        .memory
        .tensor(written(&rig, &[5.0; 8]), 8, DType::F32)
        .unwrap();
    for round in 0..50 {
        let tensor = rig
            .memory
            .tensor(written(&rig, &[1.0, 2.0]), 2, DType::F32)
            .unwrap();
        drop(tensor);
        let sum = (&kept + f64::from(round)).unwrap();
        assert_eq!(sum.to_vec1::<f32>().unwrap(), [5.0 + round as f32; 8]);
        assert_eq!(kept.copy().unwrap().to_vec1::<f32>().unwrap(), [5.0; 8]);
        rig.candle().synchronize().unwrap();
    }
    drop(kept);
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));
    rig.nothing_went_wrong();
}

/// The refusal at a tensor's drop is recorded where candle's copies of it look, and cleared before
/// they do; a copy by `force_contiguous` is not affected.
#[test]
fn a_copy_is_used_after_its_tensor_has_gone() {
    let Some(rig) = rig("a_copy_is_used_after_its_tensor_has_gone", 64) else {
        return;
    };
    let numbers = [1.0f32, 2.0, 3.0, 4.0];
    let lent = || {
        let block = written(&rig, &numbers);
        rig.memory.tensor(block, 4, DType::F32).unwrap()
    };
    let shows = |copy: &Tensor| {
        let again = copy.copy().unwrap();
        assert_eq!(again.to_vec1::<f32>().unwrap(), numbers);
        assert_eq!(copy.to_vec1::<f32>().unwrap(), numbers);
    };
    for _ in 0..20 {
        // With and without operations in between.
        let tensor = lent();
        let copy = tensor.force_contiguous().unwrap();
        drop(tensor);
        shows(&copy);
        assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));

        let tensor = lent();
        let copy = tensor.copy().unwrap();
        drop(tensor);
        // The copy shares the tensor's objects, and so counts as a user of its block.
        assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (16, 1));
        shows(&copy);
        drop(copy);
        assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));

        // A sweep is not needed if the arena is dropped after the tensor.
        let mut arena = Arena::new(&rig.memory, 4096).unwrap();
        let source = Tensor::new(&numbers, rig.candle()).unwrap();
        let tensor = arena.copy(&source).unwrap();
        let copy = tensor.copy().unwrap();
        drop(tensor);
        drop(arena);
        shows(&copy);
        drop(copy);
        assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));

        // Otherwise a copy is refused once, and then never again.
        let tensor = lent();
        let copy = tensor.copy().unwrap();
        drop(tensor);
        if let Err(refused) = copy.copy() {
            let refused = refused.to_string();
            assert!(refused.contains("INVALID_VALUE"), "{refused}");
        }
        shows(&copy);
        drop(copy);
        rig.gpu.sweep();
    }
    rig.nothing_went_wrong();
}

/// Kernels write to tensors, so there are none over memory that forks share.
#[test]
fn what_forks_share_is_no_tensor() {
    let Some(rig) = rig("what_forks_share_is_no_tensor", 16) else {
        return;
    };
    let root = block(&rig, 2 * G);
    let fork = root.fork(2 * G, 2 * G).unwrap();
    let refused = rig.memory.tensor(fork, 4, DType::F32).unwrap_err();
    assert!(matches!(refused, TensorError::Refused(_)), "{refused}");
    // The fork has been freed.
    rig.candle().synchronize().unwrap();
    rig.pool.trim(0).unwrap();
    let tensor = rig.memory.tensor(root, 4, DType::F32).unwrap();
    drop(tensor);
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));
    rig.nothing_went_wrong();
}

/// A kernel that still runs when the last tensor is dropped finds its memory, and the next block on
/// the stream is used after it.
#[test]
fn work_that_is_queued_finds_its_memory() {
    let Some(rig) = rig("work_that_is_queued_finds_its_memory", 64) else {
        return;
    };
    let long = rig.numbers(&[4096, 4096], DType::F32, 3);
    for round in 0..20 {
        let numbers = [round as f32; 1024];
        let tensor = rig
            .memory
            .tensor(written(&rig, &numbers), 1024, DType::F32)
            .unwrap();
        // Some milliseconds of work, then a read of the tensor.
        let mut busy = long.clone();
        for _ in 0..4 {
            busy = busy.matmul(&long).unwrap();
        }
        let zero = (busy.flatten_all().unwrap().narrow(0, 0, 1024).unwrap() * 0.0).unwrap();
        let sum = (&tensor + zero).unwrap();
        drop(tensor);
        let next = block(&rig, 4096);
        assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 1));
        next.write(0, &[0xff; 4096]).unwrap();
        assert_eq!(sum.to_vec1::<f32>().unwrap(), numbers);
    }
    rig.nothing_went_wrong();
}

/// Swaps the slices of two storages.
struct Swap(std::sync::Mutex<Option<CudaStorage>>);

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "swap"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        if let Some(other) = &mut *self.0.lock().unwrap() {
            std::mem::swap(&mut storage.slice, &mut other.slice);
        }
        Ok(())
    }
}

/// A slice that is taken out of its storage keeps the memory.
#[test]
fn a_slice_that_was_swapped_out_keeps_the_memory() {
    let Some(rig) = rig("a_slice_that_was_swapped_out_keeps_the_memory", 8) else {
        return;
    };
    let tensor = rig
        .memory
        .tensor(written(&rig, &[1.0, 2.0]), 2, DType::F32)
        .unwrap();
    let cuda = rig.candle().as_cuda_device().unwrap().clone();
    let theirs = cuda.clone_htod(&[7.0f32, 8.0]).unwrap();
    let swap = Swap(Some(CudaStorage::wrap_cuda_slice(theirs, cuda)).into());
    tensor.inplace_op1(&swap).unwrap();
    assert_eq!(tensor.to_vec1::<f32>().unwrap(), [7.0, 8.0]);
    drop(tensor);
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (8, 1));
    let taken = swap.0.lock().unwrap().take().unwrap();
    let seen = rig
        .candle()
        .as_cuda_device()
        .unwrap()
        .clone_dtoh(taken.as_cuda_slice::<f32>().unwrap());
    assert_eq!(seen.unwrap(), [1.0, 2.0]);
    drop(taken);
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));
    rig.nothing_went_wrong();
}

#[test]
fn what_cannot_be_a_tensor_is_refused() {
    let Some(rig) = rig("what_cannot_be_a_tensor_is_refused", 8) else {
        return;
    };
    let refused = rig
        .memory
        .tensor(block(&rig, 64), 17, DType::F32)
        .unwrap_err();
    assert!(
        matches!(
            refused,
            TensorError::OutOfRange {
                offset: 0,
                bytes: 68,
                has: 64
            }
        ),
        "{refused}"
    );
    let refused = rig
        .memory
        .tensor(block(&rig, 64), 4, DType::F4)
        .unwrap_err();
    assert!(
        matches!(refused, TensorError::UnsupportedType { dtype: DType::F4 }),
        "{refused}"
    );
    let refused = rig
        .memory
        .tensor(block(&rig, 64), (usize::MAX, 2), DType::F32)
        .unwrap_err();
    assert!(matches!(refused, TensorError::TooLarge { .. }), "{refused}");
    for other in [
        rig.tenant.allocate(64).unwrap(),
        rig.tenant
            .allocate_on(&cuvmm::Stream::new(rig.gpu.device()).unwrap(), 64)
            .unwrap(),
    ] {
        let refused = rig.memory.tensor(other, 4, DType::F32).unwrap_err();
        assert!(matches!(refused, TensorError::WrongStream), "{refused}");
    }
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));
    rig.nothing_went_wrong();
}

#[test]
fn an_arena_packs_tensors() {
    let Some(rig) = rig("an_arena_packs_tensors", 8) else {
        return;
    };
    let shapes: [(&[usize], DType); 4] = [
        (&[3], DType::U8),
        (&[5, 7], DType::BF16),
        (&[], DType::F64),
        (&[64], DType::F32),
    ];
    let bytes = Arena::bytes_for(shapes.iter().map(|&(shape, dtype)| (shape, dtype))).unwrap();
    assert_eq!(bytes, 768 + 256);
    let mut arena = Arena::new(&rig.memory.clone().with_tag("mine"), bytes).unwrap();
    assert_eq!(rig.stats().tags.get("mine"), Some(&bytes));
    let first = arena
        .copy(&Tensor::new(&[1u8, 2, 3], &Device::Cpu).unwrap())
        .unwrap();
    let numbers = rig.numbers(&[5, 7], DType::BF16, 9);
    let second = arena
        .copy(&numbers.t().unwrap().contiguous().unwrap().t().unwrap())
        .unwrap();
    let third = arena
        .copy(&Tensor::new(4.5f64, &Device::Cpu).unwrap())
        .unwrap();
    let fourth = arena.empty(64, DType::F32).unwrap();
    let nothing = arena.empty((0, 5), DType::F32).unwrap();
    assert_eq!((nothing.dims(), arena.used()), (&[0, 5][..], bytes));
    drop(nothing);
    assert_eq!((arena.used(), arena.size()), (bytes, bytes));
    let refused = arena.empty(1, DType::U8).unwrap_err();
    assert!(
        matches!(
            refused,
            TensorError::OutOfRange {
                offset: 1024,
                bytes: 1,
                has: 1024
            }
        ),
        "{refused}"
    );
    assert_eq!(first.to_vec1::<u8>().unwrap(), [1, 2, 3]);
    assert_eq!(bits(&second), bits(&numbers));
    assert_eq!(third.to_scalar::<f64>().unwrap(), 4.5);
    // The block stays for each of them.
    drop((arena, first, third));
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (bytes, 1));
    drop(second);
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (bytes, 1));
    drop(fourth);
    assert_eq!((rig.gpu.sweep(), rig.stats().blocks), (0, 0));
    let refused = Arena::new(&rig.memory, 9 * G).unwrap_err();
    assert!(refused.shortage().is_some(), "{refused}");
    rig.nothing_went_wrong();
}

/// Another tenant's need is met by blocks that only wait for a sweep.
#[test]
fn a_pressure_hook_sweeps() {
    let Some(rig) = rig("a_pressure_hook_sweeps", 4) else {
        return;
    };
    let gpu = rig.gpu.clone();
    let elastic = rig
        .pool
        .tenant("elastic")
        .on_pressure(move |_| assert!(gpu.sweep() < 4 * G));
    let memory = Memory::new(&rig.gpu, &elastic.register().unwrap());
    let block = memory
        .tenant()
        .allocate_on(rig.gpu.stream(), 3 * G)
        .unwrap();
    let tensor = memory.tensor(block, 3 * G as usize, DType::U8).unwrap();
    assert!(rig.tenant.allocate(3 * G).is_err());
    drop(tensor);
    rig.gpu.stream().synchronize().unwrap();
    drop(rig.tenant.allocate(3 * G).unwrap());
    rig.nothing_went_wrong();
}

#[test]
fn devices_of_candles_are_taken_up() {
    let Some(rig) = rig("devices_of_candles_are_taken_up", 8) else {
        return;
    };
    let refused = Gpu::new(&Device::Cpu).unwrap_err();
    assert!(matches!(refused, OpenError::NotCuda), "{refused}");
    let refused = Gpu::new(&Device::new_cuda(0).unwrap()).unwrap_err();
    assert!(
        matches!(
            refused,
            OpenError::Cudarc(cuvmm::error::CudarcError::PerThread)
        ),
        "{refused}"
    );
    // Another candle device on the same GPU, with its own stream and the same pool.
    let device = Device::new_cuda_with_stream(0).unwrap();
    let beside = rig.gpu.beside(&device).unwrap();
    assert_ne!(beside.stream(), rig.gpu.stream());
    let block = rig.tenant.allocate_on(beside.stream(), 8).unwrap();
    block.write(0, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    let refused = rig.memory.tensor(
        rig.tenant.allocate_on(beside.stream(), 8).unwrap(),
        8,
        DType::U8,
    );
    assert!(matches!(refused.unwrap_err(), TensorError::WrongStream));
    let tensor = Memory::new(&beside, &rig.tenant)
        .tensor(block, 8, DType::U8)
        .unwrap();
    assert!(tensor.device().same_device(&device));
    assert_eq!(tensor.to_vec1::<u8>().unwrap(), [1, 2, 3, 4, 5, 6, 7, 8]);
    drop(tensor);
    // A device that was created elsewhere can also be wrapped separately.
    let alone = Gpu::new(&device).unwrap();
    assert_eq!(alone.device().uuid(), rig.gpu.device().uuid());
    rig.nothing_went_wrong();
}

/// No code detects its drop, so its memory stays allocated and valid.
#[test]
fn a_tensor_may_outlive_everything() {
    let Some(rig) = rig("a_tensor_may_outlive_everything", 8) else {
        return;
    };
    let tensor = rig
        .memory
        .tensor(written(&rig, &[6.0, 7.0]), 2, DType::F32)
        .unwrap();
    drop(rig);
    assert_eq!(tensor.to_vec1::<f32>().unwrap(), [6.0, 7.0]);
}
