//! Heaps under several threads: each allocates on its own stream and hands memory to others, while
//! another tenant takes what is free.

use std::sync::Mutex;

use crate::common;
use crate::common::{D0, G, MIB, Rig};
use cuvmm::driver::host::HostMemory;
use cuvmm::driver::{DeviceAddress, Driver};
use cuvmm::{Allocation, Heap, Stream};

const THREADS: u8 = 4;
const STEPS: usize = 300;

fn fill(rig: &Rig<HostMemory>, stream: &Stream, memory: &Allocation, byte: u8) {
    let (at, size) = (memory.address().0, memory.size());
    let ends = [at, at + size / 2, at + size - 1];
    let writes = ends.map(|at| (DeviceAddress(at), 1, byte)).to_vec();
    rig.kernel(stream, &[], &writes);
}

fn holds(rig: &Rig<HostMemory>, memory: &Allocation, byte: u8) -> bool {
    let (at, size) = (memory.address().0, memory.size());
    [at, at + size / 2, at + size - 1].into_iter().all(|at| {
        let mut seen = [0];
        // SAFETY: the allocation is alive.
        #[allow(unsafe_code)]
        unsafe { rig.machine.copy_to_host(D0, &mut seen, DeviceAddress(at)) }.unwrap();
        seen[0] == byte
    })
}

#[test]
fn threads_share_a_heap_and_a_pool() {
    let rig = common::clean(common::host());
    let pool = common::pool(&rig, 48);
    let [tenant, other] = common::tenants(&pool);
    let heap = Heap::builder(&tenant).build().unwrap();
    // Memory that one thread allocated and another will free.
    let handed: Mutex<Vec<(Allocation, u8)>> = Mutex::new(vec![]);
    std::thread::scope(|scope| {
        for thread in 1..=THREADS {
            let (rig, heap, handed) = (&rig, &heap, &handed);
            scope.spawn(move || {
                let stream = Stream::new(&rig.device).unwrap();
                let mut live: Vec<Allocation> = vec![];
                let mut random = u64::from(thread);
                for step in 0..STEPS {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    let size = match (random >> 33) % 4 {
                        0 => 1 + (random >> 40) % MIB,
                        _ => MIB + (random >> 40) % (6 * G),
                    };
                    if let Ok(memory) = heap.allocate(size, 1, &stream) {
                        fill(rig, &stream, &memory, thread);
                        live.push(memory);
                    }
                    if live.len() > 3 {
                        let memory = live.swap_remove((random >> 50) as usize % live.len());
                        assert!(holds(rig, &memory, thread), "step {step}");
                        match (random >> 20) % 3 {
                            0 => handed.lock().unwrap().push((memory, thread)),
                            _ => drop(memory),
                        }
                    }
                    let theirs = handed.lock().unwrap().pop();
                    if let Some((memory, by)) = theirs {
                        assert!(holds(rig, &memory, by), "step {step}");
                        memory.record_use(&stream).unwrap();
                        fill(rig, &stream, &memory, thread);
                    }
                    if step % 50 == 0 {
                        heap.trim().unwrap();
                    }
                }
            });
        }
        scope.spawn(|| {
            for step in 0..STEPS {
                let block = other.try_allocate((1 + step as u64 % 20) * G);
                drop(block);
                pool.trim(8 * G).unwrap();
                assert!(pool.stats().committed <= 48 * G);
            }
        });
    });
    handed.lock().unwrap().clear();
    heap.trim().unwrap();
    assert_eq!((heap.stats().live, heap.stats().held), (0, 0));
}
