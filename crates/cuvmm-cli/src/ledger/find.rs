//! The ledgers of this user, and their processes.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cuvmm::LedgerView;
use cuvmm::ledger::{Control, FILE_ENDING, ProcessStats};

use crate::share::folder;
use cuvmm_cli::command::usage;
use cuvmm_cli::terminal::{safe, shown, tell};

/// Where the ledgers are.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Where {
    /// A ledger's file, or a directory with ledgers [default: `$XDG_RUNTIME_DIR/cuvmm`, or
    /// `/tmp/cuvmm-UID` where that is not set]
    #[arg(long, global = true, value_name = "PATH")]
    ledger: Option<PathBuf>,
}

/// The ledgers that could be opened, in the order of their names.
#[derive(Debug, Default)]
pub(super) struct Opened {
    pub(super) ledgers: Vec<LedgerView>,
    /// Why others could not be.
    pub(super) wrong: Vec<String>,
}

impl Where {
    /// Opens the ledgers, in the order of their names. Says on standard error which could not be
    /// opened.
    ///
    /// # Errors
    /// A path that cannot be read, and no ledger among files that are named as ledgers.
    pub(super) fn open(&self) -> anyhow::Result<Vec<LedgerView>> {
        let opened = self.open_again(Vec::new())?;
        opened.wrong.iter().for_each(|wrong| tell(wrong));
        Ok(opened.ledgers)
    }

    /// Opens the ledgers that are there now, and keeps those that are open already. An open ledger
    /// remembers when it last saw a sign of life of its processes.
    ///
    /// # Errors
    /// A path that cannot be read, and no ledger among files that are named as ledgers.
    pub(super) fn open_again(&self, open: Vec<LedgerView>) -> anyhow::Result<Opened> {
        let mut open: Vec<LedgerView> = open.into_iter().filter(LedgerView::is_in_place).collect();
        let mut opened = Opened::default();
        for file in self.files()? {
            let view = match open.iter().position(|view| view.path() == file) {
                Some(at) => Ok(open.swap_remove(at)),
                None => LedgerView::open(file),
            };
            match view {
                Ok(view) => opened.ledgers.push(view),
                Err(error) => opened.wrong.push(error.to_string()),
            }
        }
        match opened.ledgers.is_empty() && !opened.wrong.is_empty() {
            true => Err(usage(opened.wrong.join("; "))),
            false => Ok(opened),
        }
    }

    /// Returns the files of the ledgers, in the order of their names.
    fn files(&self) -> anyhow::Result<Vec<PathBuf>> {
        let (path, default) = match &self.ledger {
            Some(path) => (path.clone(), false),
            None => (folder::path(), true),
        };
        if path.is_file() {
            return Ok(vec![path]);
        }
        let entries = match std::fs::read_dir(&path) {
            Err(error) if default && error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(usage(format!("{}: {error}", shown(&path)))),
            Ok(entries) => entries,
        };
        let mut files = Vec::new();
        for entry in entries {
            let file = entry.with_context(|| shown(&path))?.path();
            if is_ledger(&file) {
                files.push(file);
            }
        }
        files.sort();
        Ok(files)
    }

    /// Finds the process that a word of the command line names.
    ///
    /// # Errors
    /// No such process, or several.
    pub(super) fn process(&self, named: &Named) -> anyhow::Result<Control> {
        let views = self.open()?;
        let mut found = Vec::new();
        let mut others = Vec::new();
        for view in &views {
            for process in view.stats().processes {
                match named.is(&process) {
                    true => found.push((view, process)),
                    false => others.push(shown_process(&process)),
                }
            }
        }
        let name = safe(&named.process);
        match &found[..] {
            [(view, process)] => Ok(view.control(process.slot)),
            [] if others.is_empty() => Err(usage("no process uses a ledger here")),
            [] => Err(usage(format!(
                "no process is {name}; there are {}",
                others.join(", ")
            ))),
            several => {
                let several = several.iter().map(|(_, process)| shown_process(process));
                let several = several.collect::<Vec<_>>().join(", ");
                Err(usage(format!(
                    "{name} may be {several}: give the process id"
                )))
            }
        }
    }
}

fn is_ledger(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.ends_with(FILE_ENDING)
}

/// Returns a process's name and id.
fn shown_process(process: &ProcessStats) -> String {
    format!("{} ({})", safe(&process.name), process.pid)
}

/// A process and perhaps one of its tenants, as the command line names them.
#[derive(Clone, Debug)]
pub(super) struct Named {
    process: String,
    /// The name of the tenant.
    pub(super) tenant: Option<String>,
}

impl Named {
    /// Parses `PROCESS` or `PROCESS/TENANT`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (process, tenant) = match text.split_once('/') {
            Some((process, tenant)) => (process, Some(tenant)),
            None => (text, None),
        };
        if process.is_empty() || tenant.is_some_and(str::is_empty) {
            return Err("a process is named by its name or id, a tenant as PROCESS/TENANT".into());
        }
        Ok(Self {
            process: process.to_owned(),
            tenant: tenant.map(str::to_owned),
        })
    }

    fn is(&self, process: &ProcessStats) -> bool {
        self.process == process.name || self.process == process.pid.to_string()
    }
}
