//! Fault sweeps: every driver call of an operation fails once. A failure changes nothing, and the
//! operation then succeeds.

use std::fmt::Debug;

use cuvmm::driver::CUresult;
use cuvmm::driver::fault::Fault;
use cuvmm::driver::model::{Nothing, Snapshot};
use cuvmm::own::CloseError;

use super::Rig;

pub const CODES: [CUresult; 2] = [
    CUresult::CUDA_ERROR_UNKNOWN,
    CUresult::CUDA_ERROR_OUT_OF_MEMORY,
];

/// The state compared before and after: the driver's page tables, and figures if there are any.
pub type Picture<P> = (Snapshot, P);

/// Fails call 1, 2, 3, ... of `operate`, each time in a fresh `world`, until the operation
/// completes without a fault. A failure leaves the picture unchanged. Returns the number of calls that
/// failed.
pub fn sweep<W, P: Debug + PartialEq>(
    world: impl Fn(&Rig<Nothing>) -> W,
    operate: impl Fn(&Rig<Nothing>, &mut W) -> Result<(), String>,
    picture: impl Fn(&W) -> P,
) -> u64 {
    sweep_of(world, operate, picture, true)
}

/// Sweeps an operation of which a part may stay after a failure, such as memory of other tenants that
/// was reclaimed: the figures of the picture only have to add up.
pub fn sweep_partly<W, P: Debug + PartialEq>(
    world: impl Fn(&Rig<Nothing>) -> W,
    operate: impl Fn(&Rig<Nothing>, &mut W) -> Result<(), String>,
    picture: impl Fn(&W) -> P,
) -> u64 {
    sweep_of(world, operate, picture, false)
}

/// Sweeps the closing of an owner, beside which something else lives. A refusal hands the owner back, of
/// which a part may be gone.
pub fn sweep_closing<T, W>(
    world: impl Fn(&Rig<Nothing>) -> (T, W),
    close: impl Fn(T) -> Result<(), CloseError<T>>,
) -> u64 {
    let world = |rig: &Rig<Nothing>| {
        let (owner, beside) = world(rig);
        (Some(owner), beside)
    };
    let close = |_: &Rig<Nothing>, (owner, _): &mut (Option<T>, W)| {
        let closed = owner.take().map_or(Ok(()), &close);
        closed.map_err(|failed| {
            let error = failed.reason.to_string();
            *owner = Some(failed.owner);
            error
        })
    };
    sweep_of(world, close, |_| (), false)
}

/// Sweeps an operation, which is `undone` wholly after a failure or in part.
pub fn sweep_of<W, P: Debug + PartialEq>(
    world: impl Fn(&Rig<Nothing>) -> W,
    operate: impl Fn(&Rig<Nothing>, &mut W) -> Result<(), String>,
    picture: impl Fn(&W) -> P,
    undone: bool,
) -> u64 {
    let mut most = 0;
    for code in CODES {
        for k in 1.. {
            assert!(k < 500, "the operation never ends");
            let rig = super::model();
            let mut world = world(&rig);
            let before: Picture<P> = (rig.machine.snapshot(), picture(&world));
            rig.faults.forget();
            rig.faults.arm(Fault::nth(k, code));
            let outcome = operate(&rig, &mut world);
            let (injected, calls) = (rig.faults.injected(), rig.faults.calls());
            rig.faults.disarm();
            if injected == 0 {
                outcome.unwrap();
                drop(world);
                super::nothing_left(rig);
                most = most.max(k - 1);
                break;
            }
            if let Err(error) = outcome {
                let after = (rig.machine.snapshot(), picture(&world));
                if undone {
                    let what = calls.get(k as usize - 1);
                    assert_eq!(
                        after, before,
                        "call {k}, {what:?}, {code}: {error}\n{calls:?}"
                    );
                }
                operate(&rig, &mut world)
                    .unwrap_or_else(|error| panic!("retry after call {k}, {code}: {error}"));
            }
            drop(world);
            let left = super::only_counted_left(&rig);
            let live = rig.machine.live();
            assert!(left <= 1, "call {k}, {code}: left {live:?}");
        }
    }
    most
}

pub fn text<T, E: std::fmt::Display>(outcome: Result<T, E>) -> Result<T, String> {
    outcome.map_err(|error| error.to_string())
}
