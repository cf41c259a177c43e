//! The common parts of the charts of all commands: an SVG file with plots on the left and a legend
//! on the right, and their colors.

use std::fmt::Display;
use std::path::Path;

use anyhow::anyhow;
use plotters::prelude::*;

use cuvmm_cli::files;

/// The width of a chart.
const WIDTH: u32 = 1_160;
/// The part of the width that is right of the plots.
const LEGEND: u32 = 160;
pub(crate) const GIB: f64 = (1u64 << 30) as f64;
/// The color of limits.
pub(crate) const LIMIT: RGBColor = RGBColor(190, 30, 45);

/// Colors that can be told apart without color vision. Further ones begin again.
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

/// Returns the color of the series with a number.
pub(crate) fn color(series: usize) -> RGBColor {
    COLORS.get(series % COLORS.len()).copied().unwrap_or(LIMIT)
}

/// Writes a chart to a file.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write(file: &Path, svg: &str) -> anyhow::Result<()> {
    files::write(file, svg)
}

/// Returns the chart that `draw` draws on a white area of this height.
///
/// # Errors
/// Drawing fails.
pub(crate) fn svg(
    height: u32,
    draw: impl FnOnce(&Area<'_>) -> Result<(), String>,
) -> anyhow::Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        root.fill(&WHITE).map_err(|error| failed(&error))?;
        draw(&root).map_err(|error| failed(&error))?;
        root.present().map_err(|error| failed(&error))?;
    }
    Ok(svg)
}

fn failed(error: &dyn Display) -> anyhow::Error {
    anyhow!("the chart cannot be drawn: {error}")
}

/// Returns the area of the plots and that of their legend.
pub(crate) fn parts<'a>(area: &Area<'a>) -> (Area<'a>, Area<'a>) {
    area.split_horizontally(WIDTH - LEGEND)
}

/// The mark in front of a name in a legend.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mark {
    Filled(RGBColor),
    Line(RGBColor),
}

/// Draws the entries of a legend, each below the one before. Names have no control characters,
/// because XML has none.
///
/// # Errors
/// Drawing fails.
pub(crate) fn legend<'a>(area: &Area<'a>, entries: &[(Mark, &str)]) -> Result<(), Failed<'a>> {
    let font = ("sans-serif", 14).into_font();
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
