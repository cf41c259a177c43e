//! Growth futures that are leaked: their requests end with the next use of their blocks.

use std::mem::forget;
use std::task::{Context, Poll, Waker};

use crate::common::executor::{Task, block_on};
use crate::common::{self, G, mapped_pool};
use crate::on_both;
use cuvmm::{Block, Mapper, Stream, Tenant};

/// Polls a growth future of the block once and leaks it.
fn leak_growth(block: &mut Block, size: u64) {
    let mut future = Box::pin(block.grow_to_async(size));
    let polled = future
        .as_mut()
        .poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending());
    forget(future);
}

/// Waits until the mapper has gone through the queue.
fn served(tenant: &Tenant) {
    // No pool can grant it, so it is refused in its turn.
    assert!(block_on(tenant.allocate_async(u64::MAX >> 1)).is_err());
}

/// Checks that no request waits: only then the first poll returns a cached block.
fn none_waits(tenant: &Tenant, stream: &Stream) {
    drop(tenant.allocate_on(stream, G).unwrap());
    let polled = Task::new(tenant.block(G).home_stream(stream).allocate_async()).poll();
    assert!(matches!(polled, Poll::Ready(Ok(_))), "a request waits");
}

on_both! {
    fn two_leaked_growths_of_a_block_do_not_grow_the_next_one_in_its_slot(rig) {
        let (_mapper, _pool, tenant) = common::mapped(rig, 8);
        let stream = Stream::new(&rig.device).unwrap();
        let other = tenant.allocate(7 * G).unwrap();
        let mut block = tenant.block(G).capacity(4 * G).allocate().unwrap();
        leak_growth(&mut block, 3 * G);
        leak_growth(&mut block, 4 * G);
        served(&tenant);
        let address = block.address();
        drop(block);
        let mut next = tenant.block(G).capacity(4 * G).allocate().unwrap();
        assert_eq!(next.address(), address);
        drop(other);
        served(&tenant);
        assert_eq!((next.size(), tenant.stats().in_use), (G, G));
        next.grow_to(2 * G).unwrap();
        assert_eq!(tenant.stats().in_use, 2 * G);
        none_waits(&tenant, &stream);
    }

    fn the_second_growth_of_a_block_withdraws_the_leaked_first(rig) {
        let (_mapper, _pool, tenant) = common::mapped(rig, 8);
        let stream = Stream::new(&rig.device).unwrap();
        let other = tenant.allocate(7 * G).unwrap();
        let mut block = tenant.block(G).capacity(6 * G).allocate().unwrap();
        leak_growth(&mut block, 5 * G);
        let second = Task::waiting(block.grow_to_async(3 * G));
        drop(other);
        second.finish().unwrap();
        served(&tenant);
        assert_eq!((block.size(), tenant.stats().in_use), (3 * G, 3 * G));
        none_waits(&tenant, &stream);
    }

    fn a_block_whose_leaked_growth_was_granted_grows_and_shrinks_from_its_own_size(rig) {
        let mapper = Mapper::start(&rig.device).unwrap();
        for act in 0..4 {
            let pool = mapped_pool(rig, 8, &mapper);
            let tenant = pool.tenant("a").register().unwrap();
            let mut block = tenant.block(2 * G).capacity(8 * G).allocate().unwrap();
            leak_growth(&mut block, 6 * G);
            served(&tenant);
            assert_eq!((block.size(), tenant.stats().in_use), (2 * G, 6 * G));
            let size = match act {
                0 => {
                    block.grow_to(3 * G).unwrap();
                    3 * G
                }
                1 => {
                    block.shrink_to(G).unwrap();
                    G
                }
                2 => {
                    tenant.grow_all(&mut [(&mut block, 4 * G)]).unwrap();
                    4 * G
                }
                _ => {
                    block_on(block.grow_to_async(5 * G)).unwrap();
                    5 * G
                }
            };
            assert_eq!((block.size(), tenant.stats().in_use), (size, size), "{act}");
        }
    }

    fn a_stream_cache_gets_a_block_with_its_own_size_after_a_leaked_growth(rig) {
        let (_mapper, _pool, tenant) = common::mapped(rig, 8);
        let stream = Stream::new(&rig.device).unwrap();
        let allocate = || {
            let block = tenant.block(G).capacity(4 * G).home_stream(&stream);
            block.allocate().unwrap()
        };
        let mut block = allocate();
        leak_growth(&mut block, 3 * G);
        served(&tenant);
        assert_eq!(tenant.stats().in_use, 3 * G);
        drop(block);
        let mut next = allocate();
        assert_eq!((next.size(), tenant.stats().in_use), (G, G));
        next.grow_to(2 * G).unwrap();
        next.grow_to(4 * G).unwrap();
        next.write(3 * G, &[1; 16]).unwrap();
        assert_eq!(tenant.stats().in_use, 4 * G);
    }
}
