//! Questions to a driver library in C: the entry points, and the answers at the edges that no call
//! of the trait [`Driver`](cuvmm_driver::Driver) can ask for.
//!
//! Every case runs in a process of its own, because a wrong argument may kill the process, and
//! prints lines of a name and an answer. An answer holds neither addresses nor times. The answers
//! of a GPU are recorded in `answers/*.tsv`, and a stand-in is compared with them.
//!
//! The library is opened by name and may be NVIDIA's or another one. `cuMulticastCreate` is never
//! called, and managed memory is a few MiB.

mod asker;
mod cases;
mod library;
mod runs;
mod table;

use std::path::Path;
use std::process::ExitCode;

use asker::Asker;
use library::Library;
use runs::Runs;
use table::Table;

#[derive(Debug)]
struct Arguments {
    library: String,
    case: Option<String>,
    given: String,
    filter: String,
    jobs: usize,
    record: Option<String>,
    against: Option<String>,
    known: Option<String>,
}

const USAGE: &str = "usage: conformance-c [--library NAME] [--filter TEXT] [--jobs N] \
    [--record FILE] [--against FILE [--known FILE]]\n\
    \n\
    Asks a driver library (libcuda.so.1) every case whose name contains TEXT, prints the answers,\n\
    and writes them to a file, or compares them with those in a file. FILE of --known lists cases\n\
    that may differ, with the reason.";

/// Runs the program: asks one case in this process, or every case in a process of its own.
pub fn run(arguments: impl Iterator<Item = String>) -> ExitCode {
    let arguments = match Arguments::read(arguments) {
        Ok(arguments) => arguments,
        Err(wrong) => {
            eprintln!("{wrong}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let done = match &arguments.case {
        Some(case) => one(&arguments, case),
        None => every(&arguments),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::from(2)
        }
    }
}

impl Arguments {
    fn read(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut read = Self {
            library: "libcuda.so.1".to_owned(),
            case: None,
            given: String::new(),
            filter: String::new(),
            jobs: 4,
            record: None,
            against: None,
            known: None,
        };
        while let Some(word) = words.next() {
            let value = words
                .next()
                .ok_or_else(|| format!("{word} lacks a value"))?;
            match &*word {
                "--library" => read.library = value,
                "--case" => read.case = Some(value),
                "--given" => read.given = value,
                "--filter" => read.filter = value,
                "--jobs" => read.jobs = value.parse().map_err(|_| format!("--jobs {value}"))?,
                "--record" => read.record = Some(value),
                "--against" => read.against = Some(value),
                "--known" => read.known = Some(value),
                _ => return Err(format!("there is no option {word}")),
            }
        }
        Ok(read)
    }
}

fn one(arguments: &Arguments, name: &str) -> Result<bool, String> {
    let case = cases::all().find(|case| case.name == name);
    let case = case.ok_or_else(|| format!("there is no case {name}"))?;
    let library = Library::open(&arguments.library)?;
    let mut asker = Asker::new(library, &arguments.library, case.name, &arguments.given);
    case.run(&mut asker);
    asker.end();
    // Nothing is released: the end of the process does that.
    std::mem::forget(asker);
    std::process::exit(0)
}

/// Asks every case that the filter selects, and prints, records or compares the answers.
fn every(arguments: &Arguments) -> Result<bool, String> {
    let runs = Runs::new(&arguments.library, &arguments.filter);
    let table = runs.run(arguments.jobs)?;
    if let Some(file) = &arguments.record {
        table.write(Path::new(file))?;
        println!("{} answers of {} cases", table.len(), runs.len());
    }
    let Some(file) = &arguments.against else {
        if arguments.record.is_none() {
            print!("{table}");
        }
        return Ok(true);
    };
    let recorded = Table::read(Path::new(file))?;
    let known = match &arguments.known {
        Some(file) => Table::read(Path::new(file))?,
        None => Table::default(),
    };
    let differences = table.differences(&recorded, &known, &arguments.filter);
    for difference in &differences {
        println!("{difference}");
    }
    println!(
        "{} answers of {} cases, {} different",
        table.len(),
        runs.len(),
        differences.len()
    );
    Ok(differences.is_empty())
}
