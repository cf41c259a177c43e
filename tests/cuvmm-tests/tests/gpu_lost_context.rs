//! A kernel that faults loses the context of the whole process, so the test has a process of its
//! own.

mod gpu;

use std::time::Duration;

use cuvmm::error::{BlockError, MemoryError};
use cuvmm::{CallError, Reservation, Stream};
use gpu::Stage;

fn lose_the_context(stage: Stage) {
    let g = stage.g();
    let pool = stage.pool(32);
    let tenant = pool.tenant("a").register().unwrap();
    let stream = stage.stream();
    let builder = tenant.block(4 * g).capacity(16 * g).home_stream(&stream);
    let mut block = builder.allocate().unwrap();
    let stamp = stage.stamp();
    stage.fill(&stream, &block, stamp);
    stream.synchronize().unwrap();
    drop(tenant.allocate_on(&stream, 8 * g).unwrap());
    let lease = block.lease();

    // Addresses without memory.
    let nothing = Reservation::new(&stage.device, g).unwrap();
    stage
        .work()
        .fill(&stream, nothing.address(), g, stamp, Duration::ZERO);
    let error = stream.synchronize().unwrap_err();
    assert!(matches!(error, CallError::Driver(_)), "{error}");
    assert!(stage.device.lost().is_some());

    for refused in [
        tenant.allocate_on(&stream, 8 * g).map(drop),
        tenant.try_allocate(g).map(drop),
        block.try_grow_to(8 * g),
        block.grow_to(16 * g),
    ] {
        let lost = matches!(
            refused,
            Err(BlockError::Memory(MemoryError::Call(
                CallError::ContextLost(_)
            )))
        );
        assert!(lost, "{refused:?}");
    }
    assert!(matches!(
        Stream::new(&stage.device),
        Err(CallError::ContextLost(_))
    ));
    assert!(block.read(0, &mut [0; 4]).is_err());
    drop((block, lease, tenant, stream, nothing));
    pool.close().unwrap();
    assert_eq!(stage.device.drop_failures(), 0);
    drop(stage);
}

#[test]
fn on_host() {
    lose_the_context(Stage::on_host());
}

#[test]
fn on_gpu() {
    if let Some(stage) = Stage::on_gpu("on_gpu") {
        stage.leave_to_a_process_of_its_own("in_a_process_of_its_own");
    }
}

#[test]
#[ignore = "loses the context of its process; `on_gpu` runs it in a process of its own"]
fn in_a_process_of_its_own() {
    if let Some(stage) = Stage::on_gpu("in_a_process_of_its_own") {
        lose_the_context(stage);
        gpu::say_ended();
    }
}
