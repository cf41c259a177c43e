//! The chart: memory by model over virtual time, one panel per policy, with the limit.

use std::path::Path;

use anyhow::anyhow;
use plotters::prelude::*;

use super::policy::Policy;
use super::settings::Nanos;
use super::timeline::Timeline;
use cuvmm_cli::files;
use cuvmm_cli::terminal::safe;

/// One panel: a policy and what it did.
type Panel = (Policy, Timeline);

const WIDTH: u32 = 1_000;
const PANEL: u32 = 320;
const GIB: f64 = (1u64 << 30) as f64;
const NANOS_A_MINUTE: f64 = 60e9;
const LIMIT: RGBColor = RGBColor(190, 30, 45);

/// Told apart without colour vision; further models begin again.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
];

/// Draws the panels to an SVG file.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn draw(
    file: &Path,
    models: &[String],
    granule: u64,
    limit: u64,
    panels: &[Panel],
) -> anyhow::Result<()> {
    files::write(file, &svg(models, granule, limit, panels)?)
}

fn svg(models: &[String], granule: u64, limit: u64, panels: &[Panel]) -> anyhow::Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, PANEL * panels.len().max(1) as u32))
            .into_drawing_area();
        let failed = |error: &dyn std::fmt::Display| anyhow!("the chart cannot be drawn: {error}");
        root.fill(&WHITE).map_err(|error| failed(&error))?;
        // The same scales in every panel, so that they can be held against each other.
        let end = panels
            .iter()
            .map(|(_, timeline)| timeline.end())
            .max()
            .unwrap_or(0)
            .max(1);
        for (area, panel) in root
            .split_evenly((panels.len().max(1), 1))
            .iter()
            .zip(panels)
        {
            draw_panel(area, models, granule, limit, end, panel).map_err(|error| failed(&error))?;
        }
        root.present().map_err(|error| failed(&error))?;
    }
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Failed<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

fn draw_panel<'a>(
    area: &Area<'a>,
    models: &[String],
    granule: u64,
    limit: u64,
    end: Nanos,
    (policy, timeline): &Panel,
) -> Result<(), Failed<'a>> {
    let minutes = |time: Nanos| time as f64 / NANOS_A_MINUTE;
    let limit = limit as f64 / GIB;
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{}: memory by model", policy), ("sans-serif", 18))
        .margin(10)
        .x_label_area_size(36)
        .y_label_area_size(52)
        .build_cartesian_2d(0.0..minutes(end), 0.0..limit * 1.12)?;
    chart
        .configure_mesh()
        .x_desc("minutes since the first request")
        .y_desc("GiB")
        .light_line_style(WHITE)
        .x_labels(12)
        .x_label_formatter(&|minutes| {
            format!("{minutes:.*}", if end > 600_000_000_000 { 0 } else { 1 })
        })
        .y_labels(6)
        .draw()?;

    let points: Vec<(Nanos, Vec<f64>)> = timeline.points().collect();
    // Stacked from the bottom: the highest sum is drawn first and the others over it.
    for model in (0..models.len()).rev() {
        let colour = COLOURS[model % COLOURS.len()];
        let height = |held: &[f64]| held[..=model].iter().sum::<f64>() * granule as f64 / GIB;
        let mut start = 0;
        let mut steps = Vec::with_capacity(2 * points.len());
        for (end, held) in &points {
            steps.push((minutes(start), height(held)));
            steps.push((minutes(*end), height(held)));
            start = *end;
        }
        chart
            .draw_series(AreaSeries::new(steps, 0.0, colour.filled()))?
            // A control character is none of XML's.
            .label(safe(&models[model]))
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.filled()));
    }
    chart
        .draw_series([PathElement::new(
            [(0.0, limit), (minutes(end), limit)],
            LIMIT.stroke_width(2),
        )])?
        .label("limit")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 14, y)], LIMIT.stroke_width(2)));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.3))
        .draw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_every_model_and_the_limit_in_every_panel() {
        let mut timeline = Timeline::new(2);
        timeline.change(0, 0, 100);
        timeline.change(30_000_000_000, 1, 200);
        timeline.advance(60_000_000_000);
        let models = ["conv\u{1b}".to_owned(), "code <&>".to_owned()];
        let panels = [Policy::Static, Policy::Elastic].map(|policy| (policy, timeline.clone()));
        let svg = svg(&models, 2 << 20, 1 << 30, &panels).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for (text, times) in [
            ("static: memory", 1),
            ("elastic: memory", 1),
            ("conv\\u{1b}", 2),
            ("code &lt;&amp;&gt;", 2),
            ("limit", 2),
        ] {
            assert_eq!(svg.matches(text).count(), times, "{text}");
        }
        let blue = svg.matches("#0072B2").count();
        assert!(blue >= 4, "an area and a legend in each panel, not {blue}");
    }

    #[test]
    fn an_empty_run_can_be_drawn() {
        let timeline = Timeline::new(1);
        assert!(
            svg(&["a".to_owned()], 1, 1, &[(Policy::Elastic, timeline)])
                .unwrap()
                .contains("</svg>")
        );
    }
}
