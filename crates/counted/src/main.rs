//! Runs one path of the pool between marks that a tracer sees: `counted CASE CROWD BATCH ROUNDS`.
//!
//! `cargo xtask instructions` starts it and counts. The first pair of marks has nothing between;
//! then there is a pair for each round, with `BATCH` operations between. Nothing is timed or counted
//! here, and no operation between marks may call the driver: then the program fails.

mod cases;
mod containers;
mod crowd;
mod marks;

use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};

use crate::cases::Among;
use crate::crowd::{Crowd, Size};
use crate::marks::Marks;

/// What it ends with where nobody may trace it, as test runners do for what was skipped.
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
            eprintln!("nobody may trace this: {refusal}");
            return Ok(ExitCode::from(REFUSED));
        }
    };
    let idle = if case.together { batch } else { 1 };
    let mut crowd = match case.among {
        Among::Alone => Crowd::alone(size)?,
        Among::Crowd => Crowd::new(size, case.idle, idle)?,
        Among::Hundred => Crowd::hundred(size)?,
    };
    // What happens once only is none of the path's cost.
    for _ in 0..2 {
        (case.round)(&Marks::silent(), &mut crowd, batch)?;
    }
    marks.around(|| ());
    for _ in 0..rounds {
        (case.round)(&marks, &mut crowd, batch)?;
    }
    Ok(ExitCode::SUCCESS)
}
