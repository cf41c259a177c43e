//! cudarc on a GPU: the cases that also run over the stand-in, and memory that both libraries
//! allocate and free.

#[path = "cudarc/cases.rs"]
mod cases;
#[path = "../../../crates/cuvmm/examples/cudarc_slices.rs"]
mod cudarc_slices;

use std::io::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaContext;
use cuvmm::cudarc::{Context, Leased, Slice};
use cuvmm::error::CudarcError;

/// Checks for a GPU. Without one, returns `None` and says so on the terminal even if the test
/// harness captures output. `CUVMM_REQUIRE_GPU=1` turns a missing GPU into a failure.
fn gpu(test: &str) -> Option<MutexGuard<'static, ()>> {
    // cudarc's errors belong to the context, which the tests share.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let error = match Context::open(0) {
        Ok(_) => return Some(turn),
        Err(CudarcError::Driver(error)) => error,
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

macro_rules! on_gpu {
    ($($name:ident),+ $(,)?) => {$(
        #[test]
        fn $name() {
            if let Some(_turn) = gpu(stringify!($name)) {
                cases::$name();
            }
        }
    )+};
}

on_gpu!(
    copies_go_in_and_out,
    every_container_lends,
    a_clone_outlives_what_it_was_made_of,
    the_frameworks_own_go_first,
    a_slice_can_be_taken_apart_and_given_back,
    a_block_is_asked_when_the_slice_is_made,
    what_does_not_fit_is_refused_and_handed_back,
    an_error_that_cudarc_kept_is_told,
    a_context_of_another_device_than_it_says_is_refused,
);

#[test]
fn the_example() {
    if let Some(_turn) = gpu("the_example") {
        cudarc_slices::main().unwrap();
    }
}

/// Both libraries copy to and from the blocks on two streams meanwhile.
#[test]
fn blocks_change_hands_under_copies() {
    let Some(_turn) = gpu("blocks_change_hands_under_copies") else {
        return;
    };
    // Keeps the context and its memory, so that the figures before and after can be compared.
    let outer = CudaContext::new(0).unwrap();
    let rig = cases::rig();
    let device = rig.context.device().clone();
    let other = rig.context.as_cudarc().new_stream().unwrap();
    let others = rig.context.stream(&other).unwrap();
    let elements = (8 * rig.g() / 4) as usize;
    let mut copy = rig.theirs.alloc_zeros::<u32>(elements).unwrap();
    rig.theirs.synchronize().unwrap();
    let before = device.memory_info().unwrap();
    let pool = rig.pool();
    let tenant = pool.tenant("a").register().unwrap();
    for round in 1..=100_u32 {
        let block = tenant.allocate_on(&rig.ours, elements as u64 * 4).unwrap();
        let mut slice = Slice::<u32, _>::new(Leased::from(block)).unwrap();
        let known = round % 2 == 0;
        if known {
            slice.record_use(&others).unwrap();
        }
        let pattern = vec![round; elements];
        rig.theirs.memcpy_htod(&pattern, &mut slice).unwrap();
        other.memcpy_dtod(&slice, &mut copy).unwrap();
        drop(slice);
        // The next owner of the memory writes to it at once.
        let next = tenant.allocate_on(&rig.ours, elements as u64 * 4).unwrap();
        let mut next = Slice::<u32, _>::new(Leased::from(next)).unwrap();
        rig.theirs.memset_zeros(&mut next).unwrap();
        drop(next);
        assert_eq!(other.clone_dtoh(&copy).unwrap(), pattern, "round {round}");
    }
    rig.nothing_went_wrong();
    drop(tenant);
    pool.close().unwrap();
    assert!(device.memory_info().unwrap().free >= before.free - (64 << 20));
    drop(copy);
    outer.check_err().unwrap();
}
