//! `cuvmm share list`: lists publications and their publishers.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use serde_json::{Value, json};

use super::publishers::{Found, find};
use cuvmm::share::Keeping;
use cuvmm_command::page::{Page, Unit};
use cuvmm_command::terminal::{json as as_json, print, safe, shown};

/// List what this user's processes publish
///
/// Looks in `$XDG_RUNTIME_DIR/cuvmm`, or `/tmp/cuvmm-UID` where that is not set. Asks at most 1,024
/// publishers, shows at most 4,096 publications, and says what it leaves out. What dead publishers
/// have left there is removed. Exit code 1 when a publisher does not answer.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cuvmm share list
  cuvmm share list --json")]
pub(super) struct Args {
    /// Only the publisher at this socket
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Print one JSON object; sizes are in bytes
    #[arg(long)]
    json: bool,

    /// Print extents and tensors too, in lines of any length
    #[arg(short, long)]
    verbose: bool,
}

impl Args {
    /// # Errors
    /// The folder cannot be read, or a publisher does not answer.
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let found = find(self.socket.as_deref())?;
        let text = match self.json {
            true => as_json(&object(&found))?,
            false => text(&found, Page::verbose(self.verbose)),
        };
        print(&text)?;
        if found.silent.is_empty() {
            return Ok(ExitCode::SUCCESS);
        }
        let silent = found.silent.iter();
        let silent: Vec<_> = silent
            .map(|(socket, why)| format!("{}: {why}", shown(socket)))
            .collect();
        bail!("no answer from {}", silent.join(", "))
    }
}

fn object(found: &Found) -> Value {
    let publishers = found.publishers.iter().map(|publisher| {
        let publications = publisher.publications.iter().map(|one| {
            json!({
                "name": one.name,
                "version": one.version,
                "bytes": one.held,
                "extents": one.extents,
                "tensors": one.tensors,
                "keeping": one.keeping,
            })
        });
        json!({
            "pid": publisher.pid,
            "socket": publisher.socket.display().to_string(),
            "publications": publications.collect::<Vec<_>>(),
            "omitted": publisher.omitted,
        })
    });
    let swept = found.swept.iter();
    let silent = found.silent.iter();
    json!({
        "publishers": publishers.collect::<Vec<_>>(),
        "sockets_not_asked": found.unasked,
        "swept": swept.map(|socket| socket.display().to_string()).collect::<Vec<_>>(),
        "silent": silent
            .map(|(socket, why)| json!({"socket": socket.display().to_string(), "error": why}))
            .collect::<Vec<_>>(),
    })
}

fn text(found: &Found, page: Page) -> String {
    let all = || found.publishers.iter().flat_map(|one| &one.publications);
    let unit = Unit::of_bytes(all().map(|one| one.held));
    let size = unit.head("size");
    let mut head = vec!["name", "version", &size, "process", "socket"];
    if page.is_verbose() {
        head.extend(["extents", "tensors"]);
    }
    let mut rows = page.table(&head, |column| !matches!(column, 0 | 4));
    for publisher in &found.publishers {
        for one in &publisher.publications {
            let mut cells = vec![
                safe(&one.name).into_owned(),
                one.version.to_string(),
                unit.figure(one.held as f64),
                match one.keeping {
                    Keeping::Kept => format!("{} keeps it", publisher.pid),
                    _ => publisher.pid.to_string(),
                },
                shown(&publisher.socket),
            ];
            if page.is_verbose() {
                cells.extend([one.extents.to_string(), one.tensors.to_string()]);
            }
            rows.add_row(cells);
        }
    }
    let mut text = match rows.row_count() {
        0 => "nothing is published\n".to_owned(),
        _ => format!("{rows}\n"),
    };
    for publisher in found.publishers.iter().filter(|one| one.omitted > 0) {
        text += &format!(
            "process {}: {} more left out\n",
            publisher.pid, publisher.omitted
        );
    }
    if found.unasked > 0 {
        text += &format!("{} more sockets were not asked\n", found.unasked);
    }
    for socket in &found.swept {
        text += &format!("removed {}: its publisher is dead\n", shown(socket));
    }
    page.fold(&text)
}
