//! Managed memory under real kernels: kernels and the host take turns in place, and no access is
//! too early.

use std::time::{Duration, Instant};

use crate::gpu::Stage;
use crate::on_each;
use cuvmm::unified::{PageLocation, Policy};
use cuvmm::{Stream, UnifiedBuffer};

/// 2 MiB of elements, which is enough managed memory to notice an early access.
const LEN: usize = 512 << 10;
/// Duration of a kernel, far longer than a view that does not wait.
const LATE: Duration = Duration::from_millis(20);
const POLICIES: [Policy; 4] = [
    Policy::OnDemand,
    Policy::DeviceFirst,
    Policy::HostFirst,
    Policy::ReadMostly,
];

/// Creates a buffer. Returns `None` if the device does not support concurrent access by the host.
fn buffer(stage: &Stage, home: &Stream) -> Option<UnifiedBuffer<u32>> {
    let buffer = UnifiedBuffer::zeroed(&stage.device, home, LEN).unwrap();
    buffer.is_host_accessible().then_some(buffer)
}

/// Queues a kernel that fills all of a buffer after some time.
fn fill(stage: &Stage, buffer: &mut UnifiedBuffer<u32>, stream: &Stream, after: Duration) -> u32 {
    let stamp = stage.stamp();
    let access = buffer.device_mut(stream).unwrap();
    let bytes = 4 * access.len() as u64;
    stage
        .work()
        .fill(stream, access.address(), bytes, stamp, after);
    u32::from_le_bytes(stage.work().pattern(stamp))
}

fn all_are(numbers: &[u32], number: u32) {
    let wrong = numbers.iter().position(|&found| found != number);
    if let Some(at) = wrong {
        panic!("number {at} is {:#x} instead of {number:#x}", numbers[at]);
    }
}

on_each! {
    fn kernels_and_the_host_take_turns_in_place(stage) {
        let [one, two] = stage.streams();
        let Some(mut buffer) = buffer(stage, &one) else { return };
        for round in 0..stage.scaled(40u32, 10) {
            buffer.set_policy(.., POLICIES[round as usize % 4]).unwrap();
            for (at, number) in buffer.host_mut().unwrap().iter_mut().enumerate() {
                *number = at as u32 * 3 + round;
            }
            let stream = if round % 3 == 0 { &one } else { &two };
            if round % 2 == 0 {
                buffer.prefetch(.., PageLocation::Device(&stage.device), stream).unwrap();
            }
            let access = buffer.device_mut(stream).unwrap();
            let (at, bytes) = (access.address(), 4 * access.len() as u64);
            let added = u32::from(stage.work().increment(stream, at, bytes, LATE / 10));
            drop(access);
            let right = |(at, &number): (usize, &u32)| number == at as u32 * 3 + round + added;
            let view = buffer.host().unwrap();
            assert!(view.iter().enumerate().all(right), "round {round}");
            assert!(buffer.to_vec().unwrap().iter().enumerate().all(right), "round {round}");
        }
        buffer.close().unwrap();
    }

    fn late_kernels_are_waited_for(stage) {
        let [one, two] = stage.streams();
        let Some(mut buffer) = buffer(stage, &one) else { return };
        for _ in 0..stage.scaled(10, 4) {
            let number = fill(stage, &mut buffer, &one, LATE);
            all_are(&buffer.host().unwrap(), number);
            // Another stream is ordered behind it, and the host behind both.
            fill(stage, &mut buffer, &one, LATE);
            let number = fill(stage, &mut buffer, &two, Duration::ZERO);
            all_are(&buffer.host_mut().unwrap(), number);
            fill(stage, &mut buffer, &two, LATE);
            buffer.fill(.., 0x0102_0304).unwrap();
            all_are(&buffer.to_vec().unwrap(), 0x0102_0304);
        }
        buffer.close().unwrap();
    }

    fn the_host_looks_beside_kernels_that_read_or_use_other_memory(stage) {
        let [one, two] = stage.streams();
        let Some(mut shared) = buffer(stage, &one) else { return };
        let Some(mut other) = buffer(stage, &one) else { return };
        let number = fill(stage, &mut shared, &one, Duration::ZERO);
        other.host_mut().unwrap()[7] = 1;
        let gate = stage.work().gate(&two);
        let begun = Instant::now();
        let reading = shared.device_read(&two).unwrap();
        all_are(&shared.host().unwrap(), number);
        drop(reading);
        all_are(&shared.host().unwrap(), number);
        other.host_mut().unwrap()[7] = 8;
        assert!(!two.is_done().unwrap(), "the call waited for a reader, or the gate is slow");
        assert!(begun.elapsed() < Duration::from_secs(2));
        drop(gate);
        shared.host_mut().unwrap()[7] = 8;
        assert!(two.is_done().unwrap());
        shared.close().unwrap();
        other.close().unwrap();
    }

    fn memory_that_is_dropped_under_a_kernel_stays_until_it_is_over(stage) {
        let [one, two] = stage.streams();
        for round in 0..stage.scaled(10, 4) {
            let Some(mut buffer) = buffer(stage, &one) else { return };
            fill(stage, &mut buffer, if round % 2 == 0 { &one } else { &two }, LATE);
            drop(buffer);
        }
        stage.settle();
    }
}
