//! The maximum numbers of mappings and reservations.
//!
//! Each case runs in a separate process, because other mappings of the process count too.

use cuvmm_driver::{AccessFlags, DeviceAddress};

use crate::{Answer, Answered, Bench, Case, Rule};

pub(super) const CASES: &[Case] = &Rule::new("ceilings").isolated().cases([
    Case::new(
        "limit.aliases_of_one_handle",
        "40,000 mappings of one physical.",
        aliases,
    ),
    Case::new(
        "limit.reservations",
        "100,000 reservations at the same time.",
        |b| {
            let mut count = 0;
            let outcome = loop {
                match b.addresses(1) {
                    Ok(_) => count += 1,
                    Err(error) => break Err(error),
                }
                if count == 100_000 {
                    break Ok(());
                }
            };
            Ok(Answer::value(count).then("outcome", &outcome))
        },
    ),
    Case::new(
        "limit.mappings",
        "Mappings with access, until one is refused.",
        ceiling,
    )
    .slow(),
]);

fn aliases(b: &mut Bench) -> Answered {
    const WANTED: u64 = 40_000;
    let base = b.addresses(WANTED)?;
    let (handle, size) = (b.physical(1)?, b.granule());
    let mut count = 0;
    let mut outcome = Ok(());
    while outcome.is_ok() && count < WANTED {
        outcome = b.map(b.at(base, count), size, 0, handle, 0);
        count += u64::from(outcome.is_ok());
    }
    b.unmap(base, WANTED * size)?;
    Ok(Answer::value(count).then("outcome", &outcome))
}

/// Counts mappings until one is refused. The number is rounded down to whole hundred thousands,
/// because the last few depend on the other mappings of the process.
fn ceiling(b: &mut Bench) -> Answered {
    const WANTED: u64 = 600_000;
    const STEP: u64 = 1_000;
    let base: DeviceAddress = b.addresses(WANTED)?;
    let (handle, size) = (b.physical(1)?, b.granule());
    let mut count = 0;
    let (call, outcome) = 'full: loop {
        for index in count..count + STEP {
            let mapped = b.map(b.at(base, index), size, 0, handle, 0);
            if mapped.is_err() {
                break 'full ("cuMemMap", mapped);
            }
        }
        let opened = b.grant(b.at(base, count), STEP, AccessFlags::READ_WRITE);
        if opened.is_err() {
            break 'full ("cuMemSetAccess", opened);
        }
        count += STEP;
        if count == WANTED {
            break ("none", Ok(()));
        }
    };
    b.unmap(base, WANTED * size)?;
    Ok(
        Answer::value(format!("{} hundred thousand", count / 100_000))
            .with("refused by", call)
            .then("with", &outcome),
    )
}
