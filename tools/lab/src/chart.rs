//! Common parts of all charts: an SVG file with plots on the left and a legend on the right, and
//! their colors.

use std::fmt::Display;
use std::path::Path;

use anyhow::anyhow;
use plotters::prelude::*;

use cuvmm_command::files;
use cuvmm_command::terminal::safe;

const WIDTH: u32 = 1_160;
/// The part of the width right of the plots.
const LEGEND: u32 = 190;
/// The height of the headline above the plots.
const HEADLINE: u32 = 52;
/// Font sizes: of the headline, of the title of a plot, and of everything else.
const LARGE: i32 = 26;
pub(crate) const TITLE: i32 = 20;
pub(crate) const SMALL: i32 = 16;
pub(crate) const GIB: f64 = (1u64 << 30) as f64;
/// The color of limits.
pub(crate) const LIMIT: RGBColor = RGBColor(190, 30, 45);

/// Colors that can be distinguished without color vision. Further series begin again.
const COLORS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
];

pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
pub(crate) type Failed<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

pub(crate) fn color(series: usize) -> RGBColor {
    COLORS.get(series % COLORS.len()).copied().unwrap_or(LIMIT)
}

/// Checks that a chart can be written to a file, before work that takes minutes.
///
/// # Errors
/// Wrong usage: the name ends like another kind of picture's, or the file cannot be opened for
/// writing.
pub(crate) fn writable(file: &Path) -> anyhow::Result<()> {
    match file.extension() {
        Some(kind) if !kind.eq_ignore_ascii_case("svg") => Err(files::wrong(
            file,
            "charts are SVG: give the file a name that ends with .svg",
        )),
        _ => files::writable(file),
    }
}

pub(crate) fn write(file: &Path, svg: &str) -> anyhow::Result<()> {
    files::write(file, svg)
}

/// Returns the chart that `draw` draws on a white area of this height, below a headline.
///
/// # Errors
/// Drawing fails.
pub(crate) fn svg(
    height: u32,
    headline: &str,
    draw: impl FnOnce(&Area<'_>) -> Result<(), String>,
) -> anyhow::Result<String> {
    let mut svg = String::new();
    {
        let root =
            SVGBackend::with_string(&mut svg, (WIDTH, height + HEADLINE)).into_drawing_area();
        root.fill(&WHITE).map_err(|error| failed(&error))?;
        let (top, plots) = root.split_vertically(HEADLINE);
        let headline = Text::new(headline, (16, 16), ("sans-serif", LARGE).into_font());
        top.draw(&headline).map_err(|error| failed(&error))?;
        draw(&plots).map_err(|error| failed(&error))?;
        root.present().map_err(|error| failed(&error))?;
    }
    Ok(svg)
}

fn failed(error: &dyn Display) -> anyhow::Error {
    anyhow!("the chart cannot be drawn: {error}")
}

/// Returns the area of the plots and the area of their legend.
pub(crate) fn parts<'a>(area: &Area<'a>) -> (Area<'a>, Area<'a>) {
    area.split_horizontally(WIDTH - LEGEND)
}

/// The mark in front of a name in a legend.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mark {
    Filled(RGBColor),
    Line(RGBColor),
}

/// Returns a name as XML can have it: without control characters and without the two that are no
/// characters, which are escapes.
pub(crate) fn text(name: &str) -> String {
    let shown = safe(name).replace('\u{fffe}', "\\u{fffe}");
    shown.replace('\u{ffff}', "\\u{ffff}")
}

/// Draws the entries of a legend, one below the other. Names come from [`text`].
///
/// # Errors
/// Drawing fails.
pub(crate) fn legend<'a>(area: &Area<'a>, entries: &[(Mark, &str)]) -> Result<(), Failed<'a>> {
    let font = ("sans-serif", SMALL).into_font();
    for (at, &(mark, name)) in entries.iter().enumerate() {
        let y = 50 + 22 * at as i32;
        match mark {
            Mark::Filled(color) => {
                let corners = [(4, y - 5), (18, y + 5)];
                area.draw(&Rectangle::new(corners, color.filled()))?;
            }
            Mark::Line(color) => {
                area.draw(&PathElement::new([(4, y), (18, y)], color.stroke_width(2)))?;
            }
        }
        area.draw(&Text::new(name.to_owned(), (24, y - 7), font.clone()))?;
    }
    Ok(())
}
