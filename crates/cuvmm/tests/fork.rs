//! A forked child: every call is an error and every drop does nothing.
#![allow(missing_docs, unsafe_code, clippy::unwrap_used, clippy::panic)]

mod common;

use common::G;
use cuvmm::error::{AllocateError, CreateError, RegisterRangeError, UnifiedError};
use cuvmm::{CallError, Limit, Physical, Pool, Region, Stream, UnifiedBuffer};

#[test]
fn a_forked_child_owns_nothing() {
    let rig = common::model();
    let physical = Physical::new(&rig.device, G).unwrap();
    let mut region = Region::reserve(&rig.device, 4 * G).unwrap();
    region.commit(0..G).unwrap();
    let pool = Pool::builder(&rig.device)
        .limit(Limit::Bytes(8 * G))
        .build()
        .unwrap();
    let tenant = pool.tenant("a").register().unwrap();
    let block = tenant.try_allocate(G).unwrap();
    let lease = block.lease();
    let registered = (region.register(0..G).unwrap(), block.register());
    let mut gone = Region::reserve(&rig.device, G).unwrap();
    gone.commit(0..G).unwrap();
    let left = gone.register(0..G).unwrap();
    drop(gone);
    let stream = Stream::new(&rig.device).unwrap();
    let buffer = UnifiedBuffer::<u32>::zeroed(&rig.device, &stream, 100).unwrap();
    assert_eq!(buffer.host().unwrap().len(), 100);
    let access = buffer.device_read(&stream).unwrap();
    rig.faults.forget();
    // SAFETY: the child only uses what this test made, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = |error: &CallError| matches!(error, CallError::Forked { .. });
        let mut right = matches!(
            Physical::new(&rig.device, G),
            Err(CreateError::Call { cause, .. }) if forked(&cause)
        );
        right &= matches!(tenant.try_allocate(2 * G), Err(error) if match &error {
            AllocateError::Call(cause) => forked(cause),
            AllocateError::Reserve(error) => error.to_string().contains("forked"),
            _ => false,
        });
        // Nothing would have to be waited for; the pages are not the child's all the same.
        right &= matches!(buffer.host(), Err(UnifiedError::Call(cause)) if forked(&cause));
        right &=
            matches!(region.register(0..G), Err(RegisterRangeError::Call(cause)) if forked(&cause));
        drop(access);
        drop((buffer, stream));
        drop((
            left, registered, lease, block, tenant, pool, region, physical,
        ));
        right &= rig.faults.total() == 0 && rig.device.drop_failures() == 0;
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(i32::from(!right)) }
    }
    let mut status = -1;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child's checks");
    assert_eq!(rig.faults.total(), 0);
    drop(access);
    drop((buffer, stream));
    drop((
        left, registered, lease, block, tenant, pool, region, physical,
    ));
    common::nothing_left(rig);
}
