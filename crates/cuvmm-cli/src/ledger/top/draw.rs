//! Draws the live picture: a function of the state and the area.

use cuvmm::ledger::TenantReport;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

use super::columns::Column;
use super::keys::named;
use super::look::{Process, Shown};
use super::state::{Row, State};
use super::waits::waits;
use cuvmm_command::page::{Unit, folded};
use cuvmm_command::terminal::{counted, safe};

/// The number of lines around the rows: title, status and keys.
const AROUND: u16 = 3;

/// The greatest width of a bar in columns.
const BAR: u16 = 40;

const KEYS: &str =
    "q quit  ? help  j/k select  Enter details  s sort  r reverse  t trim  z sleep  w wake";

/// The keys for 80 columns. A narrower screen omits the last ones.
const FEWER: [&str; 9] = [
    "q quit",
    "? help",
    "j/k move",
    "Enter open",
    "s sort",
    "t trim",
    "z sleep",
    "w wake",
    "r reverse",
];

/// The help text, for a terminal of 80 columns and 24 lines.
const HELP: &[&str] = &[
    "up, down, k, j   select a process or tenant; also PageUp, PageDown, Home, End",
    "Enter, space     show or hide details and tenants of the selected process",
    "s, S             sort by the next or previous column (v marks it, ^ reversed)",
    "r                reverse the order",
    "t                trim: the process gives idle memory back to the driver",
    "z, w             put the process or tenant to sleep, if you say y; wake it",
    "q, Esc, Ctrl-C   quit",
    "",
    "charged   what the process has of the ledger: its pools' memory, what its",
    "          guarantee keeps, and a little that it has ready",
    "cached    idle memory of its tenants whose work is complete",
    "idle      memory that it could give back without waiting, as it last found",
    "guar.     memory that always stays charged to it",
    "limit     the most that can be charged: the least of its own, pool's, ledger's",
    "prio      the lower give memory first: tenants, and processes equally far above",
    "stalled   seconds in which a request of it waited for memory of others",
    "some%     share of the last 10 seconds in which one waited (decaying average)",
    "full%     share in which all its tenants with memory in use waited at once",
    "growth    change of charged in one second",
    "last 5 min: most charged in each 10 s, newest right; a full block is the limit",
    "In the bar, # is memory in use or kept and = is idle memory.",
];

pub(super) fn draw(state: &State, area: Rect, to: &mut Buffer) {
    if area.is_empty() {
        return;
    }
    let mut pen = Pen { area, to };
    pen.line(0, &title(state), Style::new().add_modifier(Modifier::BOLD));
    let rows = area.height.saturating_sub(AROUND);
    let mut is_cut = false;
    if state.help {
        let help = folded(&HELP.join("\n"), area.width.into());
        is_cut = help.lines().count() > usize::from(rows);
        for (y, line) in (1..=rows).zip(help.lines()) {
            pen.line(y, line, Style::new());
        }
    } else {
        body(state, rows, &mut pen);
    }
    if area.height >= AROUND {
        let (status, style) = status(state);
        pen.line(area.height - 2, &status, style);
        let hint = match state.help {
            true if is_cut => "any key leaves the help; a taller terminal shows more".to_owned(),
            true => "any key leaves the help".to_owned(),
            false => keys(area.width.into()),
        };
        let dim = Style::new().add_modifier(Modifier::DIM);
        pen.line(area.height - 1, &hint, dim);
    }
}

fn keys(width: usize) -> String {
    if KEYS.len() <= width {
        return KEYS.to_owned();
    }
    let mut shown = String::new();
    for key in FEWER {
        let space = if shown.is_empty() { "" } else { "  " };
        if shown.len() + space.len() + key.len() > width {
            break;
        }
        shown += &format!("{space}{key}");
    }
    shown
}

struct Pen<'a> {
    area: Rect,
    to: &'a mut Buffer,
}

impl Pen<'_> {
    fn line(&mut self, y: u16, text: &str, style: Style) {
        self.text(0, y, self.area.width, &safe(text), style);
    }

    /// Writes at most `width` columns.
    fn text(&mut self, x: u16, y: u16, width: u16, text: &str, style: Style) {
        if y >= self.area.height || x >= self.area.width {
            return;
        }
        let width = width.min(self.area.width - x);
        let (x, y) = (self.area.x + x, self.area.y + y);
        self.to.set_stringn(x, y, text, width.into(), style);
    }

    /// Writes a figure right-aligned in its column. A figure that is too long is cut and ends with
    /// `~`.
    fn right(&mut self, x: u16, y: u16, width: u16, text: &str, style: Style) {
        let (room, length) = (usize::from(width), text.chars().count());
        if length > room {
            let cut: String = text.chars().take(room.saturating_sub(1)).collect();
            self.text(x, y, width, &(cut + "~"), style);
            return;
        }
        let left = u16::try_from(room - length).unwrap_or(0);
        self.text(x + left, y, width - left, text, style);
    }

    fn cell(&mut self, column: Column, (x, y): (u16, u16), width: u16, text: &str, style: Style) {
        match column.is_figure() {
            true => self.right(x, y, width, text, style),
            false => self.text(x, y, width, text, style),
        }
    }

    fn style(&mut self, y: u16, style: Style) {
        let line = Rect::new(self.area.x, self.area.y + y, self.area.width, 1);
        self.to.set_style(line.intersection(self.area), style);
    }
}

fn title(state: &State) -> String {
    let ledgers = state.ledgers.as_deref().unwrap_or_default();
    let processes: usize = ledgers.iter().map(|it| it.processes.len()).sum();
    format!(
        "{} in {}, sorted by {}{}",
        match processes {
            1 => "1 process".to_owned(),
            processes => format!("{processes} processes"),
        },
        counted(ledgers.len() as u64, "ledger"),
        state.sort.head(),
        if state.reverse { ", reversed" } else { "" }
    )
}

fn status(state: &State) -> (String, Style) {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    match (&state.asking, &state.trouble) {
        (Some(request), _) => {
            let name = named(request);
            (
                format!("put {name} to sleep? y or n"),
                bold.fg(Color::Yellow),
            )
        }
        (None, Some(trouble)) => (trouble.clone(), bold.fg(Color::Red)),
        (None, None) => (state.said.clone(), bold),
    }
}

/// Draws the visible lines of all ledgers; the selected line is always visible.
fn body(state: &State, height: u16, pen: &mut Pen<'_>) {
    let rows = state.rows();
    if rows.is_empty() {
        let text = match state.ledgers {
            Some(_) => format!("there is no ledger in {}", state.folder),
            None => "looking ...".to_owned(),
        };
        pen.line(1, &text, Style::new());
        return;
    }
    let room = usize::from(height);
    let targets: Vec<_> = rows.iter().map(Row::target).collect();
    let chosen = |at: &usize| state.selected.is_some() && targets.get(*at) == Some(&state.selected);
    let selected = (0..rows.len()).find(chosen);
    // The lines about the first ledger stay visible while the selection fits below them.
    let first = selected.filter(|at| *at >= room);
    let first = first.map_or(0, |at| at - room / 2);
    let first = first.min(rows.len().saturating_sub(room));
    // All ledgers are shown in one unit.
    let limits = state.ledgers.iter().flatten().map(|it| it.limit);
    let unit = Unit::of_bytes(limits);
    for ((y, at), row) in (1..=height).zip(first..).zip(rows.iter().skip(first)) {
        row_at(state, row, unit, y, pen);
        if Some(at) == selected {
            pen.style(y, Style::new().add_modifier(Modifier::REVERSED));
        }
    }
}

fn row_at(state: &State, row: &Row<'_>, unit: Unit, y: u16, pen: &mut Pen<'_>) {
    let plain = Style::new();
    match row {
        Row::Path(ledger) => path(&ledger.path, y, pen),
        Row::Bar(ledger) => bar(ledger, unit, y, pen),
        Row::Head => head(state, y, pen),
        Row::Process(ledger, process) => process_row(state, ledger, process, unit, y, pen),
        Row::Waits(ledger, process) => {
            let text = waits(ledger, process).unwrap_or_default();
            pen.line(y, &format!("    {text}"), plain.fg(Color::Yellow));
        }
        Row::Line(text) => pen.line(y, text, plain),
        Row::Detail(text) => pen.line(y, &format!("    {text}"), plain.add_modifier(Modifier::DIM)),
        Row::TenantHead => tenant_head(y, pen),
        Row::Tenant(.., tenant) => tenant_row(tenant, unit, y, pen),
        Row::Note(text) => pen.line(y, text, plain.fg(Color::Yellow)),
        Row::Blank => {}
    }
}

/// Writes a path, and cuts its beginning if it is too long.
fn path(path: &str, y: u16, pen: &mut Pen<'_>) {
    let (path, room) = (safe(path), usize::from(pen.area.width));
    let style = Style::new().fg(Color::Cyan);
    let length = path.chars().count();
    if length <= room {
        pen.line(y, &path, style);
        return;
    }
    let end = path.chars().skip(length - room.saturating_sub(3));
    pen.line(y, &format!("...{}", end.collect::<String>()), style);
}

fn bar(ledger: &Shown, unit: Unit, y: u16, pen: &mut Pen<'_>) {
    let idle: u64 = ledger.processes.iter().map(|it| it.stats.idle).sum();
    let idle = idle.min(ledger.charged);
    let percent = u128::from(ledger.charged) * 100 / u128::from(ledger.limit.max(1));
    let text = format!(
        " {} of {} {} charged ({percent}%)",
        unit.figure(ledger.charged as f64),
        unit.figure(ledger.limit as f64),
        unit.name
    );
    let around = u16::try_from(text.len() + 2).unwrap_or(u16::MAX);
    let width = pen.area.width.saturating_sub(around).min(BAR);
    // Parts of the bar are rounded up, so small amounts stay visible.
    let part = |bytes: u64| {
        let cells =
            (u128::from(bytes) * u128::from(width)).div_ceil(u128::from(ledger.limit.max(1)));
        usize::try_from(cells)
            .unwrap_or(usize::MAX)
            .min(width.into())
    };
    let (used, all) = (part(ledger.charged - idle), part(ledger.charged));
    let rest = usize::from(width).saturating_sub(used.max(all));
    let filled = "#".repeat(used) + &"=".repeat(all.saturating_sub(used)) + &".".repeat(rest);
    let colour = match percent {
        95.. => Color::Red,
        75.. => Color::Yellow,
        _ => Color::Green,
    };
    pen.line(y, &format!("[{filled}]{text}"), Style::new().fg(colour));
}

fn head(state: &State, y: u16, pen: &mut Pen<'_>) {
    let mut x: u16 = 0;
    for (column, width) in Column::that_fit(pen.area.width) {
        let mut style = Style::new().add_modifier(Modifier::UNDERLINED);
        let mut text = column.head().to_owned();
        if column == state.sort {
            style = style.add_modifier(Modifier::BOLD | Modifier::REVERSED);
            // A name has room for the sign; other columns show it in the space before them.
            if column.is_figure() || column == Column::State {
                pen.text(x.saturating_sub(1), y, 1, sign(state), style);
            } else {
                text += sign(state);
            }
        }
        pen.cell(column, (x, y), width, &text, style);
        x += width + 1;
    }
}

fn sign(state: &State) -> &'static str {
    if state.reverse { "^" } else { "v" }
}

fn process_row(
    state: &State,
    ledger: &Shown,
    process: &Process,
    unit: Unit,
    y: u16,
    pen: &mut Pen<'_>,
) {
    let growth = state.growth(ledger, process);
    let mut x = 0;
    for (column, width) in Column::that_fit(pen.area.width) {
        let mut text = column.cell(process, growth, unit);
        if column == Column::Name {
            let open = state.is_expanded(ledger, process);
            text = format!("{} {text}", if open { '-' } else { '+' });
        }
        let style = match column {
            Column::State if text != "running" => Style::new().fg(Color::Red),
            _ => Style::new(),
        };
        pen.cell(column, (x, y), width, &text, style);
        x += width + 1;
    }
}

type OfTenant = (&'static str, u16, fn(&TenantReport, Unit) -> String);

/// The columns of tenants. A narrow screen omits the last ones.
const TENANT: [OfTenant; 8] = [
    ("in use", 6, |it, unit| unit.figure(it.in_use as f64)),
    ("cached", 6, |it, unit| unit.figure(it.cached as f64)),
    ("asleep", 6, |it, unit| unit.figure(it.asleep as f64)),
    ("limit", 6, |it, unit| unit.figure(it.limit as f64)),
    ("guar.", 6, |it, unit| unit.figure(it.guarantee as f64)),
    ("pending free", 12, |it, unit| {
        unit.figure(it.pending_free as f64)
    }),
    ("precommitted", 12, |it, unit| {
        unit.figure(it.precommitted as f64)
    }),
    ("prio", 4, |it, _| it.priority.to_string()),
];

/// The least width of a tenant's name and the space before it.
const TENANT_NAME: u16 = 14;

fn tenant_columns(width: u16) -> (u16, Vec<OfTenant>) {
    let mut left = width.saturating_sub(TENANT_NAME);
    let fitting = TENANT.into_iter().take_while(|(_, width, _)| {
        let fits = left > *width;
        left = left.saturating_sub(width + 1);
        fits
    });
    let columns: Vec<OfTenant> = fitting.collect();
    let used: u16 = columns.iter().map(|(_, width, _)| width + 1).sum();
    (width.saturating_sub(used), columns)
}

fn tenant_head(y: u16, pen: &mut Pen<'_>) {
    let (name, columns) = tenant_columns(pen.area.width);
    let style = Style::new().add_modifier(Modifier::DIM);
    pen.text(4, y, name.saturating_sub(4), "tenant", style);
    let mut x = name + 1;
    for (head, width, _) in columns {
        pen.right(x, y, width, head, style);
        x += width + 1;
    }
}

fn tenant_row(tenant: &TenantReport, unit: Unit, y: u16, pen: &mut Pen<'_>) {
    let (name, columns) = tenant_columns(pen.area.width);
    let draining = if tenant.draining { " (draining)" } else { "" };
    let text = format!("/{}{draining}", safe(&tenant.name));
    pen.text(4, y, name.saturating_sub(4), &text, Style::new());
    let mut x = name + 1;
    for (_, width, figure) in columns {
        pen.right(x, y, width, &figure(tenant, unit), Style::new());
        x += width + 1;
    }
}

#[cfg(test)]
mod tests;
