//! Runs one path of the pool between marks that a tracer sees: `counted CASE CROWD BATCH ROUNDS`.
//!
//! `cargo xtask instructions` starts it and counts instructions. There is nothing between the first
//! pair of marks. Then there is one pair for each round, with `BATCH` operations between them.
//! Nothing is timed or counted here. If an operation between marks calls the driver, the program
//! fails.

mod cases;
mod containers;
mod crowd;
mod marks;

use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};

use crate::cases::Among;
use crate::crowd::{Crowd, Size};
use crate::marks::Marks;

/// The exit code where the process may not be traced, which test runners treat as skipped.
const REFUSED: u8 = 77;

fn main() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [case, size, batch, rounds] = arguments.as_slice() else {
        bail!("usage: counted CASE few|many BATCH ROUNDS");
    };
    let case = cases::named(case)?;
    let size = Size::named(size)?;
    let batch: usize = batch.parse().context("BATCH is a number")?;
    let rounds: usize = rounds.parse().context("ROUNDS is a number")?;
    let marks = match Marks::new() {
        Ok(marks) => marks,
        Err(refusal) => {
            eprintln!("this process may not be traced: {refusal}");
            return Ok(ExitCode::from(REFUSED));
        }
    };
    let idle = if case.together { batch } else { 1 };
    ensure!(
        !case.in_ledger || case.among == Among::Crowd,
        "only a crowd can be in a ledger"
    );
    let mut crowd = match case.among {
        Among::Alone => Crowd::alone(size)?,
        Among::Crowd => Crowd::new(size, case.idle, idle, case.in_ledger)?,
        Among::Hundred => Crowd::hundred(size)?,
    };
    // Costs that occur only once are not costs of the path.
    for _ in 0..2 {
        (case.round)(&Marks::silent(), &mut crowd, batch)?;
    }
    marks.around(|| ());
    for _ in 0..rounds {
        (case.round)(&marks, &mut crowd, batch)?;
    }
    Ok(ExitCode::SUCCESS)
}
