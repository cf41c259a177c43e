//! The ledgers of this user, and their processes.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cuvmm::error::GroupError;
use cuvmm::ledger::{Control, FILE_ENDING, ProcessState, ProcessStats};
use cuvmm::share::UserFolder;
use cuvmm::{LedgerError, LedgerView};

use crate::share;
use cuvmm_command::command::usage;
use cuvmm_command::terminal::{safe, shown, tell};

/// Where the ledgers are.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Where {
    /// A ledger's file, or a directory with ledgers [default: `$CUVMM_LEDGER`, else
    /// `$XDG_RUNTIME_DIR/cuvmm`, or `/tmp/cuvmm-UID` where that is not set]
    #[arg(long, global = true, value_name = "PATH")]
    ledger: Option<PathBuf>,
}

#[derive(Debug, Default)]
pub(super) struct Opened {
    pub(super) ledgers: Vec<LedgerView>,
    /// Errors of ledgers that could not be opened.
    pub(super) wrong: Vec<String>,
}

impl Where {
    pub(super) fn at(path: &Path) -> Self {
        Self {
            ledger: Some(path.to_owned()),
        }
    }

    fn given(&self) -> Option<PathBuf> {
        let set = || std::env::var_os("CUVMM_LEDGER").filter(|path| !path.is_empty());
        self.ledger.clone().or_else(|| set().map(PathBuf::from))
    }

    /// Returns the path for a message that something is not there, with the option for another one
    /// if none was given.
    pub(super) fn shown(&self) -> String {
        match self.given() {
            Some(path) => shown(&path),
            None => format!(
                "{} (--ledger names another folder)",
                shown(&share::folder())
            ),
        }
    }

    /// Opens the ledgers, in the order of their names. Prints the errors of the others to standard
    /// error.
    ///
    /// # Errors
    /// A path cannot be read, or no file named as a ledger is one.
    pub(super) fn open(&self) -> anyhow::Result<Vec<LedgerView>> {
        let opened = self.open_again(Vec::new())?;
        opened.wrong.iter().for_each(|wrong| tell(wrong));
        Ok(opened.ledgers)
    }

    /// Opens the ledgers that exist now, and keeps those already open: an open view remembers when
    /// it last saw a sign of life of each process.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
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

    /// Returns the ledger files, in the order of their names.
    fn files(&self) -> anyhow::Result<Vec<PathBuf>> {
        let path = match self.given() {
            Some(path) => path,
            None => match UserFolder::open(share::folder())? {
                Some(folder) => folder.path().to_owned(),
                None => return Ok(Vec::new()),
            },
        };
        if path.is_file() {
            return Ok(vec![path]);
        }
        let entries = match std::fs::read_dir(&path) {
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

    /// Finds the process that `named` means.
    ///
    /// # Errors
    /// No process or several match.
    pub(super) fn process(&self, named: &Named) -> anyhow::Result<Control> {
        let views = self.open()?;
        let mut found = candidates(&views, named);
        let any = !found.is_empty();
        found.retain(|it| it.tenant.is_none());
        match any && found.is_empty() {
            true => Err(usage("memory is trimmed by process, not by tenant")),
            false => self.only(&views, named, found).map(|(control, _)| control),
        }
    }

    /// Finds the processes of a group's ranks, in a ledger in the group's directory.
    ///
    /// # Errors
    /// There is no such group, a rank has no running process, or it uses no ledger there.
    pub(super) fn ranks(&self, group: &str) -> anyhow::Result<Vec<Control>> {
        let given = self.given().unwrap_or_else(share::folder);
        let directory = match given.parent() {
            Some(parent) if given.is_file() => parent,
            _ => &given,
        };
        let ranks = cuvmm::group::ranks(directory, group).map_err(|error| match error {
            GroupError::File(LedgerError::System { errno, .. })
                if errno.kind() == ErrorKind::NotFound =>
            {
                usage(format!(
                    "no group is named {} in {}",
                    safe(group),
                    self.shown()
                ))
            }
            error => error.into(),
        })?;
        let views = self.open()?;
        let ranks = ranks.into_iter().map(|it| {
            let rank = it.rank;
            let Some(pid) = it.pid else {
                anyhow::bail!("rank {rank} of group {group} has not joined");
            };
            if it.has_ended {
                anyhow::bail!("rank {rank} of group {group} (process {pid}) has ended");
            }
            let mut processes = views.iter().flat_map(|view| {
                let processes = view.stats().processes.into_iter();
                processes.map(move |process| (view, process))
            });
            let found = processes.find(|(_, process)| process.pid == pid && runs(process));
            let (view, process) = found.with_context(|| {
                let at = self.shown();
                format!("rank {rank} of group {group} (process {pid}) uses no ledger in {at}")
            })?;
            Ok(view.control(process.slot))
        });
        ranks.collect()
    }

    /// Finds the process, and the tenant if any, that `named` means. The process itself checks that
    /// the tenant exists.
    ///
    /// # Errors
    /// No process or several match.
    pub(super) fn target(&self, named: &Named) -> anyhow::Result<(Control, Option<String>)> {
        let views = self.open()?;
        let found = candidates(&views, named);
        self.only(&views, named, found)
    }

    /// Returns the only candidate, or the error for none or several.
    fn only(
        &self,
        views: &[LedgerView],
        named: &Named,
        found: Vec<Candidate<'_>>,
    ) -> anyhow::Result<(Control, Option<String>)> {
        let name = safe(&named.0);
        match &found[..] {
            [it] => {
                let tenant = it.tenant.clone();
                Ok((it.view.control(it.process.slot), tenant))
            }
            [] => {
                let there = views.iter().flat_map(|view| view.stats().processes);
                let there: Vec<_> = there.filter(runs).map(|it| shown_process(&it)).collect();
                Err(usage(match there.is_empty() {
                    true => format!("no process uses a ledger in {}", self.shown()),
                    false => format!(
                        "{name} is no process and no tenant of one (PROCESS/TENANT); there are {}",
                        there.join(", ")
                    ),
                }))
            }
            several => {
                let several: Vec<_> = several.iter().map(Candidate::shown).collect();
                Err(usage(format!(
                    "{name} may be {}: give one of these, and its ledger with --ledger",
                    several.join(", or ")
                )))
            }
        }
    }
}

struct Candidate<'a> {
    view: &'a LedgerView,
    process: ProcessStats,
    tenant: Option<String>,
    /// `true` if the word names the slot.
    by_slot: bool,
}

impl Candidate<'_> {
    /// Returns the unambiguous word for this candidate, and the ledger's path.
    fn shown(&self) -> String {
        let (name, slot) = (safe(&self.process.name), self.process.slot);
        let tenant = self.tenant.iter().map(|it| format!("/{}", safe(it)));
        let tenant: String = tenant.collect();
        format!("{name}@{slot}{tenant} in {}", shown(self.view.path()))
    }
}

/// Returns all processes and tenants that a word may mean. Candidates named by slot exclude the
/// others.
fn candidates<'a>(views: &'a [LedgerView], named: &Named) -> Vec<Candidate<'a>> {
    let mut found = Vec::new();
    for view in views {
        for process in view.stats().processes.into_iter().filter(runs) {
            for (tenant, by_slot) in named.meanings(&process) {
                found.push(Candidate {
                    view,
                    process: process.clone(),
                    tenant,
                    by_slot,
                });
            }
        }
    }
    if found.iter().any(|it| it.by_slot) {
        found.retain(|it| it.by_slot);
    }
    found
}

/// Returns `true` if the process can answer requests.
const fn runs(process: &ProcessStats) -> bool {
    !matches!(process.state, ProcessState::Lending | ProcessState::Dying)
}

fn is_ledger(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.ends_with(FILE_ENDING)
}

fn shown_process(process: &ProcessStats) -> String {
    format!("{} ({})", safe(&process.name), process.pid)
}

#[derive(Clone, Debug)]
pub(super) struct Named(String);

impl Named {
    /// Parses `PROCESS` or `PROCESS/TENANT`; the process is a name or an id, with or without
    /// `@SLOT`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("a process is named by its name or id, a tenant as PROCESS/TENANT".into()),
            text => Ok(Self(text.to_owned())),
        }
    }

    /// Returns the meanings of the word for a process: `None` for the process itself, or a tenant's
    /// name. Names can contain slashes, so any slash may separate the tenant. The second value is
    /// `true` if the word names the process's slot.
    fn meanings(&self, process: &ProcessStats) -> Vec<(Option<String>, bool)> {
        let word = &*self.0;
        let splits = word.match_indices('/').filter_map(|(at, slash)| {
            let tenant = word.get(at + slash.len()..).filter(|it| !it.is_empty())?;
            Some((word.get(..at)?, Some(tenant.to_owned())))
        });
        let all = std::iter::once((word, None)).chain(splits);
        all.filter_map(|(name, tenant)| Some((tenant, is_named(process, name)?)))
            .collect()
    }
}

/// Returns `None` if the word does not name the process, else whether it names the slot.
fn is_named(process: &ProcessStats, word: &str) -> Option<bool> {
    let is = |name: &str| name == process.name || name == process.pid.to_string();
    let by_slot = word
        .rsplit_once('@')
        .is_some_and(|(name, slot)| slot == process.slot.to_string() && is(name));
    (by_slot || is(word)).then_some(by_slot)
}
