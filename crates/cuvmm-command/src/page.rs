//! Text for people: tables and lines of at most [`WIDTH`] columns, or the terminal's, and units for
//! columns of figures.

use std::io::{IsTerminal as _, stdout};

use comfy_table::{CellAlignment, ContentArrangement, Table, TableStyle, presets};
use ratatui::crossterm::terminal::size;

/// The most columns of a line of default output.
pub const WIDTH: usize = 100;

/// The fewest columns for which output is laid out.
const LEAST: usize = 40;

/// The form of the text that a command prints for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// Lines of at most [`WIDTH`] columns, without details.
    Narrow,
    /// All details, in lines of any length.
    Verbose,
}

impl Page {
    /// Returns the form for the option `--verbose`.
    pub const fn verbose(verbose: bool) -> Self {
        if verbose { Self::Verbose } else { Self::Narrow }
    }

    /// Returns `true` if details are shown.
    pub const fn is_verbose(self) -> bool {
        matches!(self, Self::Verbose)
    }

    /// Makes a table in Markdown. Columns for which `figures` is true are aligned to the right.
    pub fn table(self, head: &[&str], figures: impl Fn(usize) -> bool) -> Table {
        let mut table = self.bare(presets::ASCII_MARKDOWN, WIDTH);
        table.set_header(head);
        for (index, column) in table.column_iter_mut().enumerate() {
            if figures(index) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }

    /// Makes a table without a header and without lines.
    pub fn list(self) -> Table {
        self.bare(presets::NOTHING, columns())
    }

    fn bare(self, style: TableStyle, width: usize) -> Table {
        let mut table = Table::new();
        table.load_style(style);
        if self == Self::Narrow {
            table
                .set_content_arrangement(ContentArrangement::Dynamic)
                .set_width(width as u16);
        }
        table
    }

    /// Folds long lines at spaces. A table that is too wide for the terminal loses columns at its
    /// right, which are named below it.
    pub fn fold(self, text: &str) -> String {
        match self {
            Self::Verbose => text.to_owned(),
            Self::Narrow => folded(text, columns()),
        }
    }
}

/// Returns the columns of the terminal, or [`WIDTH`] elsewhere.
fn columns() -> usize {
    let terminal = stdout().is_terminal().then(size);
    let columns = terminal.and_then(Result::ok).map(|(columns, _)| columns);
    columns.map_or(WIDTH, |columns| usize::from(columns).clamp(LEAST, WIDTH))
}

/// Folds lines and narrows tables for a page of this width.
pub fn folded(text: &str, width: usize) -> String {
    let mut page = String::with_capacity(text.len());
    let lines: Vec<&str> = text.lines().collect();
    for part in lines.chunk_by(|one, next| is_row(one) == is_row(next)) {
        if part.first().is_some_and(|line| is_row(line)) {
            narrow(&mut page, part, width);
            continue;
        }
        for line in part {
            fold(&mut page, line, width);
            page.push('\n');
        }
    }
    page
}

fn is_row(line: &str) -> bool {
    line.starts_with('|')
}

/// Adds a table without the columns that do not fit, and a line that names these.
fn narrow(folded: &mut String, rows: &[&str], width: usize) {
    // The line below the head shows where rows have their bars.
    let line = rows.iter().find(|row| row.starts_with("|-"));
    let bars = line.map_or("", |line| line).chars().enumerate();
    let bars: Vec<usize> = bars
        .filter(|(_, it)| *it == '|')
        .map(|(at, _)| at)
        .collect();
    let fits = bars.iter().filter(|at| **at < width).max();
    let (Some(&end), Some(&last)) = (fits, bars.last()) else {
        rows.iter().for_each(|row| *folded += &format!("{row}\n"));
        return;
    };
    for row in rows {
        folded.extend(row.chars().take(end + 1));
        folded.push('\n');
    }
    if end < last {
        let head = rows.first().map_or("", |row| row);
        let rest: String = head.chars().skip(end + 1).collect();
        let names: Vec<&str> = rest
            .split('|')
            .map(str::trim)
            .filter(|it| !it.is_empty())
            .collect();
        fold(
            folded,
            &format!("not shown for want of columns: {}", names.join(", ")),
            width,
        );
        folded.push('\n');
    }
}

/// Adds a line, with a break and an indentation for each part that does not fit.
fn fold(folded: &mut String, line: &str, width: usize) {
    let indent = line.len() - line.trim_start().len() + 2;
    let mut rest = line;
    let mut room = width;
    while rest.chars().count() > room {
        let end = rest
            .char_indices()
            .nth(room)
            .map_or(rest.len(), |(at, _)| at);
        let start = rest.len() - rest.trim_start().len();
        let head = rest.get(..end).unwrap_or(rest);
        let followed = rest.get(end..).is_some_and(|next| next.starts_with(' '));
        let at = match head.rfind(' ').filter(|&at| at > start) {
            _ if followed => end,
            Some(at) => at,
            None => end,
        };
        let (part, next) = rest.split_at(at);
        folded.push_str(part.trim_end());
        folded.push('\n');
        folded.push_str(&" ".repeat(indent));
        rest = next.trim_start();
        room = width - indent.min(width / 2);
    }
    folded.push_str(rest);
}

/// The unit of a column of sizes or times, chosen by the largest figure.
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    /// The name for the head of the column.
    pub name: &'static str,
    factor: f64,
}

const SIZES: [Unit; 4] = [
    unit("GiB", 1_073_741_824.0),
    unit("MiB", 1_048_576.0),
    unit("KiB", 1_024.0),
    unit("B", 1.0),
];

const TIMES: [Unit; 4] = [
    unit("s", 1e9),
    unit("ms", 1e6),
    unit("us", 1e3),
    unit("ns", 1.0),
];

const fn unit(name: &'static str, factor: f64) -> Unit {
    Unit { name, factor }
}

impl Unit {
    /// Returns the largest binary unit that the largest of these sizes reaches.
    pub fn of_bytes(bytes: impl IntoIterator<Item = u64>) -> Self {
        let largest = bytes.into_iter().max().unwrap_or_default();
        largest_in(SIZES, largest as f64, 1.0)
    }

    /// Returns the largest unit of which the median of these times has ten.
    pub fn of_nanos(nanos: impl IntoIterator<Item = f64>) -> Self {
        let mut nanos: Vec<f64> = nanos.into_iter().filter(|&ns| ns > 0.0).collect();
        nanos.sort_unstable_by(f64::total_cmp);
        let median = nanos.get(nanos.len() / 2).copied().unwrap_or_default();
        largest_in(TIMES, median, 10.0)
    }

    /// Formats bytes or nanoseconds as a figure in this unit, without the unit's name.
    pub fn figure(self, value: f64) -> String {
        let value = value / self.factor;
        match value {
            0.0 => "0".to_owned(),
            value if self.factor == 1.0 && value.fract() == 0.0 => format!("{value:.0}"),
            value if value.abs() < 0.1 => format!("{value:.3}"),
            value if value.abs() < 100.0 => format!("{value:.2}"),
            value => format!("{value:.0}"),
        }
    }

    /// Returns the head of a column of figures in this unit.
    pub fn head(self, what: &str) -> String {
        format!("{what} {}", self.name)
    }
}

fn largest_in(units: [Unit; 4], value: f64, least: f64) -> Unit {
    let [.., smallest] = units;
    let mut units = units.into_iter();
    let found = units.find(|unit| value >= least * unit.factor);
    found.unwrap_or(smallest)
}

#[cfg(test)]
mod tests {
    use super::{Page, Unit, WIDTH, folded};

    #[test]
    fn a_table_loses_columns_that_do_not_fit_and_names_them() {
        let mut table = Page::Narrow.table(&["process", "pid", "charged", "state"], |_| false);
        table.add_row(["chat", "17", "0.81 of all of it", "running"]);
        let text = format!("above\n{table}\nbelow\n");
        assert_eq!(folded(&text, WIDTH), text);
        let narrow = folded(&text, 40);
        let lines: Vec<&str> = narrow.lines().collect();
        assert!(
            lines.iter().all(|line| line.chars().count() <= 40),
            "{narrow}"
        );
        let [above, head, line, row, names, below] = lines[..] else {
            panic!("{narrow}");
        };
        assert_eq!((above, below), ("above", "below"));
        assert!(head.starts_with("| process | pid | charged ") && head.ends_with('|'));
        assert!(row.ends_with("it |") && line.ends_with("-|"), "{narrow}");
        assert_eq!(names, "not shown for want of columns: state");
    }

    #[test]
    fn a_long_line_is_folded_at_spaces_and_a_short_one_stays() {
        let short = "a line\n";
        assert_eq!(Page::Narrow.fold(short), short);
        let long = format!("  {}\n", "words and more ".repeat(20).trim_end());
        let folded = Page::Narrow.fold(&long);
        assert!(folded.lines().count() > 2, "{folded}");
        assert!(folded.lines().all(|line| line.chars().count() <= WIDTH));
        assert!(folded.lines().all(|line| line == line.trim_end()));
        assert!(folded.lines().skip(1).all(|line| line.starts_with("    w")
            || line.starts_with("    a")
            || line.starts_with("    m")));
        let words = |text: &str| {
            text.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(words(&folded), words(&long));
        assert_eq!(Page::Verbose.fold(&long), long);
    }

    #[test]
    fn a_word_that_is_too_long_is_cut() {
        let word = "ü".repeat(350);
        let folded = Page::Narrow.fold(&word);
        assert!(folded.lines().all(|line| line.chars().count() <= WIDTH));
        assert_eq!(folded.matches('ü').count(), 350);
    }

    #[test]
    fn a_table_fits_unless_it_is_verbose() {
        let row = ["one".to_owned(), "word ".repeat(50)];
        for (page, fits) in [(Page::Narrow, true), (Page::Verbose, false)] {
            let mut table = page.table(&["a", "b"], |_| false);
            table.add_row(row.clone());
            let text = table.to_string();
            let widest = text.lines().map(|line| line.chars().count()).max();
            assert_eq!(widest <= Some(WIDTH), fits, "{text}");
        }
    }

    #[test]
    fn a_column_has_one_unit() {
        let gib = Unit::of_bytes([0, 3 << 30, 5 << 20]);
        assert_eq!(gib.name, "GiB");
        assert_eq!(gib.figure((3_u64 << 30) as f64), "3.00");
        assert_eq!(gib.figure((512 << 20) as f64), "0.50");
        assert_eq!(Unit::of_bytes([]).name, "B");
        let us = Unit::of_nanos([0.0, 20e3, 30e3, 4e6]);
        assert_eq!((us.name, us.figure(20e3)), ("us", "20.00".to_owned()));
        assert_eq!(us.figure(4e6), "4000");
        assert_eq!(us.figure(20.0), "0.020");
    }
}
