//! Memory pools: frees in stream order, and what becomes of freed memory.

use cuvmm_driver::{DriverError, MemPoolAttribute, MemPoolHandle, StreamHandle};

use super::mem_pools::{PART, allocated, capped, figures, plain};
use crate::answer::bit;
use crate::{Answer, Answered, Bench, Case, Need, Rule};

const KERNELS: &[Need] = &[Need::Kernels];
const MEMORY: &[Need] = &[Need::Memory];

/// The duration of the kernel: far longer than the calls beside it.
const SPIN_MS: u32 = 200;

pub(super) const KEEPS: &[Case] = &Rule::new("memory-pool-release").cases([
    Case::new(
        "mem_pool_release.threshold",
        "Two of three parts freed, and a threshold of two, after a synchronization.",
        |b| {
            let (pool, stream) = (b.pool(&plain(b))?, b.stream()?);
            b.set_pool_attribute(pool, MemPoolAttribute::RELEASE_THRESHOLD, 2 * PART)?;
            two_of_three_freed(b, pool, stream)?;
            let before = figures(b, pool)?;
            b.synchronize(stream)?;
            Ok(Answer::value(figures(b, pool)?).with("before", before))
        },
    ),
    Case::new(
        "mem_pool_release.event",
        "Freed memory after an event is synchronized.",
        |b| {
            let (pool, stream) = freed(b)?;
            let event = b.event()?;
            b.record(event, stream)?;
            b.synchronize_event(event)?;
            Ok(Answer::value(figures(b, pool)?))
        },
    ),
    Case::new(
        "mem_pool_release.context",
        "Freed memory after the context is synchronized.",
        |b| {
            let (pool, _) = freed(b)?;
            b.driver().context_synchronize(b.device())?;
            Ok(Answer::value(figures(b, pool)?))
        },
    ),
    Case::new(
        "mem_pool_release.query",
        "Freed memory after the stream is found to be done by queries.",
        |b| {
            let (pool, stream) = freed(b)?;
            while !b.stream_is_done(stream)? {
                std::thread::yield_now();
            }
            Ok(Answer::value(figures(b, pool)?))
        },
    ),
    Case::new(
        "mem_pool_release.trim_before_waiting",
        "Trimmed to 0 right after a free.",
        |b| {
            let (pool, _) = freed(b)?;
            let trimmed = b.trim_pool(pool, 0);
            // Whether the driver has seen the free by itself depends on time.
            b.driver().context_synchronize(b.device())?;
            Ok(Answer::code(&trimmed))
        },
    ),
    Case::new(
        "mem_pool_release.trim",
        "A pool with one part in use and two kept, trimmed to two parts, then to 0.",
        |b| {
            let (pool, stream) = (b.pool(&plain(b))?, b.stream()?);
            b.set_pool_attribute(pool, MemPoolAttribute::RELEASE_THRESHOLD, u64::MAX)?;
            two_of_three_freed(b, pool, stream)?;
            b.synchronize(stream)?;
            let kept = figures(b, pool)?;
            b.trim_pool(pool, 2 * PART)?;
            let two = figures(b, pool)?;
            b.trim_pool(pool, 0)?;
            Ok(Answer::value(kept)
                .with("two", two)
                .with("least", figures(b, pool)?))
        },
    ),
    Case::new(
        "mem_pool_release.plain_free",
        "Memory of a pool, freed by `cuMemFree`.",
        |b| {
            let (pool, _, address) = allocated(b)?;
            let freed = b.free(address);
            Ok(Answer::code(&freed).with("figures", figures(b, pool)?))
        },
    ),
]);

pub(super) const ORDER: &[Case] = &Rule::new("memory-pool-order").cases([
    Case::new(
        "mem_pool_order.free_twice",
        "Freed twice on a stream.",
        |b| {
            let (_, stream, address) = allocated(b)?;
            b.free_async(address, stream)?;
            Ok(Answer::code(&b.free_async(address, stream)))
        },
    )
    .isolated(),
    Case::new(
        "mem_pool_order.free_interior",
        "Freed by an address in its middle.",
        |b| {
            let (_, stream, address) = allocated(b)?;
            Ok(Answer::code(&b.free_async(b.at(address, 1), stream)))
        },
    )
    .isolated(),
    Case::new(
        "mem_pool_order.other_stream",
        "Freed on another stream than it was allocated on.",
        |b| {
            let (pool, stream, other) = (b.pool(&plain(b))?, b.stream()?, b.stream()?);
            let address = b.alloc_from(pool, PART, stream)?;
            b.synchronize(stream)?;
            let freed = b.free_async(address, other);
            Ok(Answer::code(&freed).then("sync", &b.synchronize(other)))
        },
    ),
    Case::new(
        "mem_pool_order.value",
        "Filled and read in stream order, behind nothing but the allocation.",
        |b| {
            let (_, stream, address) = allocated(b)?;
            b.fill_async(address, 7, PART, stream)?;
            Ok(Answer::value(format!(
                "{:?}",
                b.read_async(address, stream)?
            )))
        },
    )
    .needing(MEMORY),
    Case::new(
        "mem_pool_order.same_stream",
        "All of a pool freed behind a running kernel, and allocated again on its stream.",
        |b| behind_a_kernel(b, true),
    )
    .needing(KERNELS),
    Case::new(
        "mem_pool_order.internal",
        "All of a pool freed behind a running kernel, and allocated again on another stream.",
        |b| behind_a_kernel(b, false),
    )
    .needing(KERNELS),
    Case::new(
        "mem_pool_order.internal_off",
        "On another stream, where the pool must not insert dependencies.",
        |b| {
            let (pool, stream, other) = full_behind_a_kernel(b)?;
            b.set_pool_attribute(pool, MemPoolAttribute::REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0)?;
            let again = b.alloc_from(pool, 4 * PART, other);
            let running = !b.stream_is_done(stream)?;
            Ok(Answer::code(&again).with("still running", bit(running)))
        },
    )
    .needing(KERNELS),
    Case::new(
        "mem_pool_order.event",
        "On another stream, behind an event, without inserted dependencies.",
        |b| {
            let (pool, stream, other) = full_behind_a_kernel(b)?;
            b.set_pool_attribute(pool, MemPoolAttribute::REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0)?;
            let event = b.event()?;
            b.record(event, stream)?;
            b.wait_event(other, event)?;
            let again = b.alloc_from(pool, 4 * PART, other);
            let running = !b.stream_is_done(stream)?;
            Ok(Answer::code(&again).with("still running", bit(running)))
        },
    )
    .needing(KERNELS),
    Case::new(
        "mem_pool_order.used",
        "The figures while a free waits for a kernel.",
        |b| {
            let (pool, _, _) = full_behind_a_kernel(b)?;
            Ok(Answer::value(figures(b, pool)?))
        },
    )
    .needing(KERNELS),
]);

fn freed(b: &mut Bench) -> Result<(MemPoolHandle, StreamHandle), DriverError> {
    let (pool, stream, address) = allocated(b)?;
    b.free_async(address, stream)?;
    Ok((pool, stream))
}

/// Allocates three parts of a pool and frees two of them.
fn two_of_three_freed(
    b: &mut Bench,
    pool: MemPoolHandle,
    stream: StreamHandle,
) -> Result<(), DriverError> {
    let mut part = || b.alloc_from(pool, PART, stream);
    let (_, second, third) = (part()?, part()?, part()?);
    b.free_async(second, stream)?;
    b.free_async(third, stream)
}

/// Allocates all of a pool and frees it behind a running kernel. Returns the pool, the kernel's
/// stream and another one.
fn full_behind_a_kernel(
    b: &mut Bench,
) -> Result<(MemPoolHandle, StreamHandle, StreamHandle), DriverError> {
    let (pool, stream, other) = (capped(b)?, b.stream()?, b.stream()?);
    let address = b.alloc_from(pool, 4 * PART, stream)?;
    b.synchronize(stream)?;
    let kernels = b.kernels()?;
    // The first launch loads the kernel, which may wait for the device.
    kernels.spin(b.device(), other, 1)?;
    b.synchronize(other)?;
    kernels.spin(b.device(), stream, SPIN_MS)?;
    b.free_async(address, stream)?;
    Ok((pool, stream, other))
}

fn behind_a_kernel(b: &mut Bench, same: bool) -> Answered {
    let (pool, stream, other) = full_behind_a_kernel(b)?;
    let on = if same { stream } else { other };
    let again = b.alloc_from(pool, 4 * PART, on);
    let running = !b.stream_is_done(stream)?;
    let waits = !b.stream_is_done(on)?;
    Ok(Answer::code(&again)
        .with("still running", bit(running))
        .with("waits", bit(waits)))
}
