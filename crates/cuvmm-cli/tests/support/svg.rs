//! A terminal's screen as a picture.

use std::fmt::Write as _;

/// The size of a cell and of the margin, in the units of the picture.
const WIDTH: f32 = 8.4;
const HEIGHT: f32 = 18.0;
const MARGIN: f32 = 12.0;

/// The look of cells, which are drawn together if it is the same.
#[derive(Clone, PartialEq)]
struct Look {
    colour: &'static str,
    ground: Option<&'static str>,
    bold: bool,
    underline: bool,
}

/// Returns the screen as SVG, with the characters as text.
pub(crate) fn picture(screen: &vt100::Screen) -> String {
    let (rows, columns) = screen.size();
    let width = f32::from(columns) * WIDTH + 2.0 * MARGIN;
    let height = f32::from(rows) * HEIGHT + 2.0 * MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         font-family=\"ui-monospace, SFMono-Regular, Menlo, Consolas, monospace\" font-size=\"14\">\n\
         <desc>{}</desc>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#16181d\"/>\n",
        escaped(screen.contents().trim_end())
    );
    for row in 0..rows {
        let mut runs: Vec<(u16, Look, String)> = Vec::new();
        for column in 0..columns {
            let cell = screen.cell(row, column).unwrap();
            let text = match cell.contents() {
                "" => " ",
                text => text,
            };
            match runs.last_mut() {
                Some((_, look, run)) if *look == look_of(cell) => run.push_str(text),
                _ => runs.push((column, look_of(cell), text.to_owned())),
            }
        }
        for (column, look, text) in runs {
            draw(&mut svg, row, column, &look, &text);
        }
    }
    svg + "</svg>\n"
}

fn look_of(cell: &vt100::Cell) -> Look {
    let colour = match cell.fgcolor() {
        vt100::Color::Idx(1 | 9) => "#f47067",
        vt100::Color::Idx(2 | 10) => "#57ab5a",
        vt100::Color::Idx(3 | 11) => "#daaa3f",
        vt100::Color::Idx(6 | 14) => "#39c5cf",
        _ if cell.dim() => "#8b949e",
        _ => "#d7dae0",
    };
    let inverse = cell.inverse();
    Look {
        colour: if inverse { "#16181d" } else { colour },
        ground: inverse.then_some(colour),
        bold: cell.bold(),
        underline: cell.underline(),
    }
}

fn draw(svg: &mut String, row: u16, column: u16, look: &Look, text: &str) {
    let cells = text.chars().count() as f32;
    let (x, y) = (
        MARGIN + f32::from(column) * WIDTH,
        MARGIN + f32::from(row) * HEIGHT,
    );
    if let Some(ground) = look.ground {
        let width = cells * WIDTH;
        writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{HEIGHT}\" fill=\"{ground}\"/>"
        )
        .unwrap();
    }
    if look.underline {
        let (end, under) = (x + cells * WIDTH, y + HEIGHT - 2.0);
        writeln!(
            svg,
            "<path d=\"M{x:.1} {under:.1}H{end:.1}\" stroke=\"{}\"/>",
            look.colour
        )
        .unwrap();
    }
    // A word in a place of its own stays there, whatever the font's width.
    let words = text.split(' ').scan(0, |at, word| {
        let begins = *at;
        *at += word.chars().count() + 1;
        Some((begins, word))
    });
    for (begins, word) in words.filter(|(_, word)| !word.is_empty()) {
        let (x, length) = (
            x + begins as f32 * WIDTH,
            word.chars().count() as f32 * WIDTH,
        );
        let word = escaped(word);
        let bold = if look.bold {
            " font-weight=\"bold\""
        } else {
            ""
        };
        writeln!(
            svg,
            "<text x=\"{x:.1}\" y=\"{:.1}\" textLength=\"{length:.1}\" fill=\"{}\"{bold}>{word}</text>",
            y + HEIGHT - 5.0,
            look.colour
        )
        .unwrap();
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
