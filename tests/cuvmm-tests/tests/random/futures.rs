//! Random programs of futures that wait, are dropped midway, and are served beside changes of
//! limits, held streams, and other blocks. The order in which the mapper serves them is not
//! specified, so the checks hold in any order.

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

use crate::common;
use crate::common::books::balanced;
use crate::common::executor::Task;
use crate::common::{D0, G, busy, mapped_pool, until};
use cuvmm::error::BlockError;
use cuvmm::{Block, Limit, Mapper, Stream, Tenant};
use proptest::prelude::*;

const LIMIT: u64 = 12;

#[derive(Clone, Debug)]
enum Step {
    Allocate {
        tenant: usize,
        granules: u64,
        home: bool,
    },
    Grow {
        block: usize,
        by: u64,
    },
    Poll {
        future: usize,
    },
    DropFuture {
        future: usize,
    },
    DropBlock {
        block: usize,
    },
    Shrink {
        block: usize,
    },
    Kernel {
        block: usize,
    },
    LetGo,
    Limit {
        granules: u64,
    },
    Terms {
        tenant: usize,
        guarantee: u64,
        limit: u64,
        priority: i32,
    },
    Beside {
        tenant: usize,
        granules: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0usize..2, 1u64..9, any::<bool>())
            .prop_map(|(tenant, granules, home)| Step::Allocate { tenant, granules, home }),
        3 => (0usize..8, 1u64..6).prop_map(|(block, by)| Step::Grow { block, by }),
        6 => (0usize..8).prop_map(|future| Step::Poll { future }),
        3 => (0usize..8).prop_map(|future| Step::DropFuture { future }),
        5 => (0usize..8).prop_map(|block| Step::DropBlock { block }),
        1 => (0usize..8).prop_map(|block| Step::Shrink { block }),
        2 => (0usize..8).prop_map(|block| Step::Kernel { block }),
        2 => Just(Step::LetGo),
        1 => (4u64..=LIMIT).prop_map(|granules| Step::Limit { granules }),
        1 => (0usize..2, 0u64..3, 3u64..=LIMIT, -1i32..2).prop_map(
            |(tenant, guarantee, limit, priority)| Step::Terms { tenant, guarantee, limit, priority }
        ),
        2 => (0usize..2, 1u64..5).prop_map(|(tenant, granules)| Step::Beside { tenant, granules }),
    ]
}

/// A future's outcome: the block, if any, and the result. A failed growth returns its block.
type Waiting = Task<Pin<Box<dyn Future<Output = (Option<Block>, Result<(), BlockError>)>>>>;

fn allocation(tenant: &Tenant, stream: Option<&Stream>, granules: u64) -> Waiting {
    let block = tenant.block(granules * G).capacity(LIMIT * G);
    let future = match stream {
        Some(stream) => block.home_stream(stream).allocate_async(),
        None => block.allocate_async(),
    };
    Task::new(Box::pin(async move {
        match future.await {
            Ok(block) => (Some(block), Ok(())),
            Err(error) => (None, Err(error)),
        }
    }))
}

fn growth(mut block: Block, size: u64) -> Waiting {
    Task::new(Box::pin(async move {
        let before = block.size();
        let outcome = block.grow_to_async(size).await;
        assert_eq!(block.size(), if outcome.is_ok() { size } else { before });
        (Some(block), outcome)
    }))
}

/// Takes a future's outcome. A refusal is final only if waiting cannot help.
fn take((block, outcome): (Option<Block>, Result<(), BlockError>), blocks: &mut Vec<Block>) {
    blocks.extend(block);
    match outcome {
        Ok(()) | Err(BlockError::OutOfMemory(_) | BlockError::Argument(_)) => {}
        Err(error) => panic!("{error}"),
    }
}

fn at<T>(all: &mut Vec<T>, index: usize) -> Option<T> {
    (index < all.len()).then(|| all.remove(index))
}

fn run(steps: &[Step]) {
    let rig = common::clean(common::model());
    let mapper = Mapper::start(&rig.device).unwrap();
    let pool = mapped_pool(&rig, LIMIT, &mapper);
    let tenants = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
    let stream = Stream::new(&rig.device).unwrap();
    let (mut blocks, mut futures) = (Vec::<Block>::new(), Vec::<Waiting>::new());
    for step in steps {
        match *step {
            Step::Allocate {
                tenant,
                granules,
                home,
            } => {
                futures.push(allocation(
                    &tenants[tenant],
                    home.then_some(&stream),
                    granules,
                ));
            }
            Step::Grow { block, by } => {
                if let Some(block) = at(&mut blocks, block) {
                    let size = block.size() + by * G;
                    futures.push(growth(block, size));
                }
            }
            Step::Poll { future } => {
                if let Some(mut future) = at(&mut futures, future) {
                    match future.poll() {
                        Poll::Ready(outcome) => take(outcome, &mut blocks),
                        Poll::Pending => futures.push(future),
                    }
                }
            }
            Step::DropFuture { future } => drop(at(&mut futures, future)),
            Step::DropBlock { block } => drop(at(&mut blocks, block)),
            Step::Shrink { block } => {
                if let Some(block) = blocks.get_mut(block) {
                    block.shrink_to(G).unwrap();
                }
            }
            Step::Kernel { block } => {
                if let Some(block) = blocks.get(block).filter(|it| it.home_stream().is_some()) {
                    busy(&rig, &stream, block, 1);
                }
            }
            Step::LetGo => rig.machine.release_stream(D0, stream.as_raw()),
            Step::Limit { granules } => drop(pool.set_limit(Limit::Bytes(granules * G))),
            Step::Terms {
                tenant,
                guarantee,
                limit,
                priority,
            } => {
                let tenant = &tenants[tenant];
                drop(tenant.set_limit(limit * G));
                drop(tenant.set_guarantee(guarantee * G));
                tenant.set_priority(priority).unwrap();
            }
            Step::Beside { tenant, granules } => {
                blocks.extend(tenants[tenant].try_allocate(granules * G));
            }
        }
        assert!(pool.stats().committed <= LIMIT * G);
    }
    // After streams, limits and blocks have been released, each waiting future is served or refused
    // for good.
    rig.machine.release_stream(D0, stream.as_raw());
    for tenant in &tenants {
        tenant.set_guarantee(0).unwrap();
        tenant.set_limit(u64::MAX).unwrap();
    }
    pool.set_limit(Limit::Bytes(LIMIT * G)).unwrap();
    blocks.clear();
    // Futures that are polled for the first time now are last in the queue. A block that waits to
    // grow keeps its memory, so two of them can block each other.
    let mut begun = Vec::new();
    for mut future in futures {
        match future.poll() {
            Poll::Ready(outcome) => take(outcome, &mut blocks),
            Poll::Pending => begun.push(future),
        }
        blocks.clear();
    }
    while !begun.is_empty() {
        let mut woken = false;
        until(&pool, "served or stuck", || {
            for index in (0..begun.len()).rev() {
                if let Poll::Ready(outcome) = begun[index].poll() {
                    drop(begun.remove(index));
                    take(outcome, &mut blocks);
                    blocks.clear();
                    woken = true;
                }
            }
            // Each holds some memory and waits for more.
            let stuck = pool.stats().in_use > 0;
            woken || stuck
        });
        if !woken {
            drop(begun.pop());
        }
    }
    let stats = balanced(&rig, &pool);
    assert_eq!(
        (stats.in_use, stats.tenants.iter().map(|it| it.blocks).sum()),
        (0, 0)
    );
    drop((tenants, stream));
    pool.close().unwrap();
}

#[test]
fn programs() {
    crate::programs::run(60, step(), 1..60, run);
}
