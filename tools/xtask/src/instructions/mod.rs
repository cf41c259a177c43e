//! Counting the instructions of the pool's warm paths, and comparing them with their bounds.
//!
//! Times on a shared machine vary; instruction counts do not. The program `counted` is built like a
//! user's program, and run under a tracer ([`trace`]) that single-steps it from mark to mark.
//! [`bounds`] lists the counted paths and their bounds. Instruction counts do not show the effects
//! of caches, of contended locks and of the driver.

mod bounds;
mod files;
mod program;
mod trace;

use anyhow::{Result, bail, ensure};

use bounds::{CROWDED, PATHS, Path, Setting};
use trace::Stretches;

/// Count the instructions of the pool's warm paths, and fail if one takes more than its bound.
#[derive(Debug, clap::Args)]
pub(crate) struct Instructions {
    /// Fail where one process may not trace another, instead of reporting it.
    #[arg(long)]
    require: bool,
    /// List the files that paths execute instead, from the line tables of the program.
    #[arg(long)]
    files: bool,
    /// Count only paths whose name begins with this.
    path: Option<String>,
}

/// The most often that a path in a ledger is counted until it takes as many instructions as without
/// one. While a path is single-stepped the ledger's thread runs at full speed, and what it looks at
/// meanwhile may send the path through the pool's lock once.
const TRIES: usize = 10;

impl Instructions {
    pub(crate) fn run(self) -> Result<()> {
        if self.files {
            return match files::print(self.path.as_deref())? {
                true => Ok(()),
                false => self.refused(),
            };
        }
        let program = program::build("release")?;
        let counted = |path: &Path, setting: Setting| -> Result<Option<f64>> {
            match trace::trace(&program, &path.arguments(setting), None)? {
                Stretches::Counted(stretches) => path.each(&stretches).map(Some),
                Stretches::Refused(why) => {
                    eprintln!("{why}");
                    Ok(None)
                }
            }
        };
        let wanted = |path: &&Path| {
            let begins = |begin: &String| path.name.starts_with(begin.as_str());
            self.path.as_ref().is_none_or(begins)
        };
        let mut complaints = Vec::new();
        println!("instructions per operation, and bound");
        for path in PATHS.iter().filter(wanted) {
            let Some(few) = counted(path, Setting::Few)? else {
                return self.refused();
            };
            println!("{:<18} {few:>7.1}  at most {}", path.name, path.bound);
            complaints.extend(path.complaint(few));
            if path.in_ledger {
                let (mut without, mut tries) = (few, 1);
                let (within, difference) = loop {
                    let Some(within) = counted(path, Setting::Ledger)? else {
                        return self.refused();
                    };
                    let difference = path.difference(without, within);
                    if difference.is_none() || tries == TRIES {
                        break (within, difference);
                    }
                    let Some(again) = counted(path, Setting::Few)? else {
                        return self.refused();
                    };
                    (without, tries) = (again, tries + 1);
                };
                println!("{:<18} {within:>7.1}  as many", "  in a ledger");
                complaints.extend(path.complaint(within));
                complaints.extend(difference);
            }
            if !path.crowded {
                continue;
            }
            let Some(many) = counted(path, Setting::Crowd)? else {
                return self.refused();
            };
            let ratio = many / few;
            println!(
                "{:<18} {many:>7.1}  {ratio:.2}x, at most {CROWDED}x",
                "  in a crowd"
            );
            if ratio > CROWDED {
                complaints.push(format!("{} takes {ratio:.2}x in a crowd", path.name));
            }
        }
        for complaint in &complaints {
            eprintln!("{complaint}");
        }
        ensure!(
            complaints.is_empty(),
            "{} counts are over their bounds",
            complaints.len()
        );
        Ok(())
    }

    fn refused(&self) -> Result<()> {
        let what = "NO INSTRUCTIONS WERE COUNTED: one process may not trace another here";
        if self.require {
            bail!(what);
        }
        println!("*** {what}");
        Ok(())
    }
}
