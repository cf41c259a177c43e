//! Files made from the definition of the command line: shell completions and man pages.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_complete::Shell;
use cuvmm_command::terminal::{print, shown};

use super::Cli;

/// Print the completions of a shell
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm completions bash > ~/.local/share/bash-completion/completions/cuvmm
  cuvmm completions zsh > ~/.zfunc/_cuvmm
  cuvmm completions fish > ~/.config/fish/completions/cuvmm.fish")]
pub(crate) struct Completions {
    /// The shell
    shell: Shell,
}

impl Completions {
    /// # Errors
    /// Standard output cannot be written.
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut shown_commands(), "cuvmm", &mut text);
        // The terminal's `print` would escape tabs.
        print(&String::from_utf8(text)?.replace('\t', "        "))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Returns the command line without hidden commands, which completions would offer.
fn shown_commands() -> clap::Command {
    let all = Cli::command();
    let shown = all.get_subcommands().filter(|it| !it.is_hide_set());
    clap::Command::new("cuvmm")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommands(shown.cloned())
}

/// Write the man pages of all commands to a folder
#[derive(Debug, clap::Args)]
pub(crate) struct Man {
    /// The folder
    folder: PathBuf,
}

impl Man {
    /// Writes `cuvmm.1`, and a page for each command beside it.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        clap_mangen::generate_to(Cli::command(), &self.folder)
            .with_context(|| shown(&self.folder))?;
        Ok(ExitCode::SUCCESS)
    }
}
