//! Start and end of a command: arguments, one line for an error, and the exit code.
//!
//! The exit code is 2 for wrong usage and 1 for failure. An unusable file that the command line
//! names is wrong usage: it cannot be read or written, or holds something else.

use std::error::Error as _;
use std::fmt;
use std::num::{IntErrorKind, ParseIntError};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, ValueEnum};

use crate::terminal;

const FAILURE: u8 = 1;
const USAGE: u8 = 2;

/// An error in the options, or in a file that the command line names: exit code 2.
#[derive(Debug)]
pub struct Usage(String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Makes the error for options that can be parsed and not used.
pub fn usage(what: impl Into<String>) -> anyhow::Error {
    Usage(what.into()).into()
}

/// Returns the command-line word of a value.
pub fn word(value: &impl ValueEnum) -> String {
    let word = value.to_possible_value();
    word.map_or_else(String::new, |word| word.get_name().to_owned())
}

/// Parses the command line of `program`, runs the command and reports its error.
pub fn run<C: Parser>(
    program: &str,
    command: impl FnOnce(C) -> anyhow::Result<ExitCode>,
) -> ExitCode {
    let complain = |what: &str, code| complain(program, what, code);
    let parsed = match C::try_parse() {
        Ok(parsed) => parsed,
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
            ) =>
        {
            return match terminal::print(&error.render().to_string()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => complain(&terminal::chain(&error), FAILURE),
            };
        }
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            // The help of the command whose subcommand is missing.
            terminal::tell_lines(&error.render().to_string());
            return ExitCode::from(USAGE);
        }
        Err(error) => {
            let line = no_number(&error).unwrap_or_else(|| one_line(&without_hidden::<C>(error)));
            return complain(&line, USAGE);
        }
    };
    terminal::log();
    match command(parsed) {
        Ok(code) => code,
        Err(error) => complain(
            &terminal::chain(&error),
            if error.is::<Usage>() { USAGE } else { FAILURE },
        ),
    }
}

fn complain(program: &str, what: &str, code: u8) -> ExitCode {
    let line = what
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    terminal::tell(&format!("{program}: {line}"));
    ExitCode::from(code)
}

/// Removes hidden commands from those that an error suggests for a misspelled word.
fn without_hidden<C: Parser>(mut error: clap::Error) -> clap::Error {
    let kind = ContextKind::SuggestedSubcommand;
    let Some(ContextValue::Strings(names)) = error.get(kind) else {
        return error;
    };
    let all = C::command();
    let is_hidden = |name: &String| {
        let command = all.find_subcommand(name);
        command.is_some_and(clap::Command::is_hide_set)
    };
    let mut shown = names.clone();
    shown.retain(|name| !is_hidden(name));
    match shown.is_empty() {
        true => error.remove(kind),
        false => error.insert(kind, ContextValue::Strings(shown)),
    };
    error
}

/// Returns the message for a value that is no whole number, if that is the error.
fn no_number(error: &clap::Error) -> Option<String> {
    let wrong = error.source()?.downcast_ref::<ParseIntError>()?;
    let expected = match wrong.kind() {
        IntErrorKind::PosOverflow => "a smaller whole number, such as 8",
        IntErrorKind::NegOverflow => "a larger whole number, such as -8",
        IntErrorKind::Zero => "a whole number of at least 1, such as 8",
        _ => "a whole number, such as 8",
    };
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    };
    let value = text(ContextKind::InvalidValue)?;
    let option = text(ContextKind::InvalidArg)?;
    Some(format!(
        "invalid value '{value}' for '{option}': use {expected}"
    ))
}

/// Returns the message of an error of clap and its tips. In the place of clap's usage text it has the
/// command whose help has the usage.
fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let mut parts = text.split("\n\n");
    let what = parts.next().unwrap_or_default();
    let what = what.strip_prefix("error: ").unwrap_or(what);
    let tips = parts
        .map(str::trim)
        .filter(|part| part.starts_with("tip: "));
    let what = tips.fold(what.to_owned(), |text, tip| format!("{text} ({tip})"));
    match usage_of(&text) {
        Some(command) => format!("{what}: see `{command} --help`"),
        None => what,
    }
}

/// Returns the command of clap's usage text, without its options and arguments.
fn usage_of(text: &str) -> Option<String> {
    let usage = text.lines().find_map(|line| line.strip_prefix("Usage: "))?;
    let words = usage.split_whitespace();
    let words: Vec<_> = words
        .take_while(|word| !word.starts_with(['[', '<', '-']))
        .collect();
    Some(words.join(" "))
}
