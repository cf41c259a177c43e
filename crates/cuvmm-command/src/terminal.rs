//! Output to standard output and standard error, safe for terminals.
//!
//! Names come from files, from other processes and from the command line. A name must not control
//! the terminal that shows it: move the cursor, change colors or titles, begin a line, or reorder
//! the text around it. Characters with such effects are written as escapes. All output passes
//! through this module. A name within a line must pass through [`safe`] first, because a line break
//! in the name cannot later be distinguished from the command's own line breaks.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, ErrorKind, IsTerminal as _, Write as _};
use std::path::Path;

use anyhow::Context as _;
use serde::Serialize;
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::debug_fn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt;

/// Returns `true` if a terminal interprets a character instead of showing it: controls (C0, DEL and
/// C1), line and paragraph separators, and marks that change the direction of text.
pub fn acts(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{206f}'
        )
}

/// Returns a text as one line in which characters that control a terminal are escapes such as `\n`
/// and `\u{1b}`.
pub fn safe(text: &str) -> Cow<'_, str> {
    escaped(text, acts, |character, to| {
        to.extend(character.escape_default());
    })
}

/// Returns a path as one line, escaped by [`safe`].
pub fn shown(path: &Path) -> String {
    safe(&path.to_string_lossy()).into_owned()
}

/// Returns the messages of an error and its causes as one text. A cause is omitted if the text
/// before already ends with it: some messages of the library include their cause.
pub fn chain(error: &anyhow::Error) -> String {
    let mut causes = error.chain().map(ToString::to_string);
    let mut text = causes.next().unwrap_or_default();
    for cause in causes {
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Returns a count with its noun, in the singular or the plural.
pub fn counted(count: u64, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    }
}

fn escaped(
    text: &str,
    acts: impl Fn(char) -> bool,
    escape: impl Fn(char, &mut String),
) -> Cow<'_, str> {
    if !text.contains(&acts) {
        return Cow::Borrowed(text);
    }
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        match acts(character) {
            true => escape(character, &mut line),
            false => line.push(character),
        }
    }
    Cow::Owned(line)
}

/// Prints lines to standard output. A closed pipe is no error, so that `head` works.
///
/// # Errors
/// Any other error of writing.
pub fn print(text: &str) -> anyhow::Result<()> {
    let text = escaped(
        text,
        |character| character != '\n' && acts(character),
        |character, to| to.extend(character.escape_default()),
    );
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.context("cannot write to standard output"),
    }
}

/// Prints lines to standard error.
pub fn tell_lines(text: &str) {
    text.lines().for_each(tell);
}

/// Prints one line to standard error.
pub fn tell(line: &str) {
    // An error of standard error itself cannot be reported.
    let _ = writeln!(io::stderr(), "{}", safe(line));
}

/// Returns a value as one line of JSON, with characters that control a terminal as JSON escapes.
///
/// # Errors
/// The value cannot be serialized.
pub fn json_line(value: &impl Serialize) -> serde_json::Result<String> {
    Ok(only_shown(&serde_json::to_string(value)?) + "\n")
}

/// Returns a value as indented JSON, with characters that control a terminal as JSON escapes.
///
/// # Errors
/// The value cannot be serialized.
pub fn json(value: &impl Serialize) -> serde_json::Result<String> {
    Ok(only_shown(&serde_json::to_string_pretty(value)?) + "\n")
}

/// Escapes characters in JSON text that control a terminal. JSON itself escapes only C0 controls;
/// all others can occur only in strings, where an escape is equivalent. The remaining line breaks
/// are the formatting's.
fn only_shown(json: &str) -> String {
    escaped(
        json,
        |character| character != '\n' && acts(character),
        |character, to| {
            for unit in character.encode_utf16(&mut [0; 2]) {
                // Writing to a string cannot fail.
                let _ = write!(to, "\\u{unit:04x}");
            }
        },
    )
    .into_owned()
}

/// Sends logs to standard error, filtered by `RUST_LOG`. They are colored on a terminal unless
/// `NO_COLOR` is set.
pub fn log() {
    let filter = filter(&std::env::var("RUST_LOG").unwrap_or_default());
    let plain = std::env::var_os("NO_COLOR").is_some_and(|set| !set.is_empty());
    let coloured = !plain && io::stderr().is_terminal();
    // Fails only if a subscriber is set already, and nothing else in the command sets one.
    let _ = subscriber(filter, coloured, io::stderr).try_init();
}

/// Returns the filter for a list such as `warn,cuvmm=debug`: levels, and targets with a level each.
/// Parts that cannot be parsed are ignored. Without a level for all targets, warnings are shown.
fn filter(list: &str) -> Targets {
    let parts = list
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty());
    let parts = parts.filter_map(|part| part.parse::<Targets>().ok());
    let default = Targets::new().with_default(LevelFilter::WARN);
    parts.fold(default, |filter, part| match part.default_level() {
        Some(level) => filter.with_default(level),
        None => filter.with_targets(&part),
    })
}

/// Creates a subscriber that writes one line for each event, with characters that control a
/// terminal as escapes.
fn subscriber<W>(filter: Targets, coloured: bool, to: W) -> impl SubscriberInitExt
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let fields = debug_fn(|to, field, value| {
        let value = format!("{value:?}");
        match field.name() {
            "message" => write!(to, "{}", safe(&value)),
            name => write!(to, "{name}={}", safe(&value)),
        }
    });
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(coloured)
        .fmt_fields(fields.delimited(" "))
        .with_writer(to);
    tracing_subscriber::registry().with(lines).with(filter)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use anyhow::anyhow;
    use tracing_subscriber::util::SubscriberInitExt as _;

    use super::{acts, chain, filter, json, safe, subscriber};

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn logged(coloured: bool) -> String {
        let (lines, filter) = (Lines::default(), filter("warn"));
        let to = lines.clone();
        let logs = subscriber(filter, coloured, move || to.clone()).set_default();
        let error = "\u{1b}]0;title\u{7}\n2026 ERROR all is lost";
        tracing::warn!(%error, name = "\u{9b}2J", "a reader \u{202e}was let go");
        drop(logs);
        String::from_utf8(lines.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn a_log_is_one_line_and_has_colours_where_they_are_wanted_alone() {
        let plain = logged(false);
        assert!(
            !plain.contains(|character| character != '\n' && acts(character)),
            "{plain:?}"
        );
        assert_eq!(plain.lines().count(), 1, "{plain}");
        let shown = "a reader \\u{202e}was let go error=\\u{1b}]0;title\\u{7}\\n2026 ERROR";
        assert!(plain.contains(" WARN ") && plain.contains(shown), "{plain}");
        let coloured = logged(true);
        assert!(coloured.contains("\u{1b}[33m WARN"), "{coloured:?}");
        assert!(
            !coloured.contains("\u{1b}]0") && coloured.contains(shown),
            "{coloured:?}"
        );
    }

    #[test]
    fn a_filter_has_levels_for_all_targets_and_for_some() {
        use tracing::Level;

        let shows =
            |list: &str, target: &str, level: Level| filter(list).would_enable(target, &level);
        for list in ["", "nonsense=nonsense,", "cuvmm=debug"] {
            assert!(shows(list, "other", Level::WARN), "{list}");
            assert!(!shows(list, "other", Level::INFO), "{list}");
        }
        assert!(shows("cuvmm=debug", "cuvmm::pool", Level::DEBUG));
        assert!(shows("info, cuvmm=trace", "other", Level::INFO));
        assert!(shows("info, cuvmm=trace", "cuvmm", Level::TRACE));
        assert!(!shows("error", "other", Level::WARN));
        assert!(!shows("off", "other", Level::ERROR));
    }

    #[test]
    fn what_acts_on_a_terminal_is_shown_as_an_escape() {
        for (text, line) in [
            ("llama-70b", "llama-70b"),
            ("größe 模型 🦙", "größe 模型 🦙"),
            ("a\u{1b}[2Jb", "a\\u{1b}[2Jb"),
            ("a\nb\r\tc\0", "a\\nb\\r\\tc\\u{0}"),
            (
                "\u{7f}\u{80}\u{9b}31m\u{9f}",
                "\\u{7f}\\u{80}\\u{9b}31m\\u{9f}",
            ),
            ("\u{202e}gpj\u{202c}", "\\u{202e}gpj\\u{202c}"),
            (
                "\u{2066}\u{2069}\u{200f}\u{61c}",
                "\\u{2066}\\u{2069}\\u{200f}\\u{61c}",
            ),
            ("\u{2028}\u{2029}", "\\u{2028}\\u{2029}"),
        ] {
            assert_eq!(safe(text), line);
            assert_eq!(safe(line), line, "an escape stays as it is");
        }
        let every = (0..=u32::from(char::MAX)).filter_map(char::from_u32);
        for character in every.filter(|character| character.is_control()) {
            assert!(acts(character), "{character:?}");
        }
    }

    #[test]
    fn a_cause_is_told_once() {
        let error = anyhow!("no such file").context("open: no such file");
        assert_eq!(chain(&error), "open: no such file");
        assert_eq!(chain(&error.context("/a")), "/a: open: no such file");
        assert_eq!(chain(&anyhow!("why").context("what")), "what: why");
    }

    #[test]
    fn json_means_the_same_and_acts_on_no_terminal() {
        let names = [
            "\u{1b}]0;x\u{7}",
            "\u{9b}2J",
            "\u{202e}\u{2028}",
            "a\nb",
            "\u{7f}",
        ];
        let text = json(&names).unwrap();
        assert!(
            !text.contains(|character| character != '\n' && acts(character)),
            "{text:?}"
        );
        assert_eq!(text.lines().count(), names.len() + 2);
        let back: Vec<String> = serde_json::from_str(&text).unwrap();
        assert_eq!(back, names);
    }
}
