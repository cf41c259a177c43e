//! The chart: for each policy the memory of each model over virtual time with the limits, and below
//! it the number of waiting requests.

use std::path::Path;

use plotters::prelude::*;

use super::policy::Policy;
use super::settings::Nanos;
use super::timeline::Timeline;
use crate::chart::{self, Area, Failed, GIB, LIMIT, Mark, color};

#[derive(Clone, Debug)]
pub(crate) struct Panel {
    pub(crate) policy: Policy,
    /// Granules of each model.
    pub(crate) memory: Timeline,
    /// Waiting requests of each model.
    pub(crate) waiting: Timeline,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale<'a> {
    pub(crate) models: &'a [String],
    /// Bytes.
    pub(crate) granule: u64,
    /// Bytes of all models together.
    pub(crate) limit: u64,
    /// The limit of each model under the static policy, in bytes.
    pub(crate) share: u64,
}

const MEMORY: u32 = 320;
const WAITING: u32 = 180;
const NANOS_A_MINUTE: f64 = 60e9;

/// Draws the panels to an SVG file, below a headline.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn draw(
    file: &Path,
    headline: &str,
    scale: &Scale<'_>,
    panels: &[Panel],
) -> anyhow::Result<()> {
    chart::write(file, &svg(headline, scale, panels)?)
}

fn svg(headline: &str, scale: &Scale<'_>, panels: &[Panel]) -> anyhow::Result<String> {
    let height = (MEMORY + WAITING) * panels.len().max(1) as u32;
    chart::svg(height, headline, |root| {
        draw_all(root, scale, panels).map_err(|error| error.to_string())
    })
}

fn draw_all<'a>(root: &Area<'a>, scale: &Scale<'_>, panels: &[Panel]) -> Result<(), Failed<'a>> {
    // All panels have the same scales, so that they can be compared.
    let ends = panels.iter().map(|panel| panel.memory.end());
    let end = ends.max().unwrap_or(0).max(1);
    let longest = panels.iter().flat_map(|panel| {
        let models = 0..scale.models.len();
        models.map(|model| panel.waiting.peak(Some(model)))
    });
    let longest = longest.max().unwrap_or(0).max(1);
    for (area, panel) in root
        .split_evenly((panels.len().max(1), 1))
        .iter()
        .zip(panels)
    {
        let (plots, legend) = chart::parts(area);
        let (memory, waiting) = plots.split_vertically(MEMORY);
        draw_memory(&memory, scale, end, panel)?;
        draw_waiting(&waiting, scale, end, longest, &panel.waiting)?;
        draw_legend(&legend, scale, panel.policy)?;
    }
    Ok(())
}

fn minutes(time: Nanos) -> f64 {
    time as f64 / NANOS_A_MINUTE
}

/// Formats minutes for the axis of a run of this length.
fn minutes_label(end: Nanos) -> impl Fn(&f64) -> String {
    let digits = if minutes(end) > 10.0 { 0 } else { 1 };
    move |minutes| format!("{minutes:.digits$}")
}

/// Draws the memory of each model as an area. Under the static policy each area begins at its
/// model's share, and ends below the model's limit. Under the others the areas are stacked.
fn draw_memory<'a>(
    area: &Area<'a>,
    scale: &Scale<'_>,
    end: Nanos,
    panel: &Panel,
) -> Result<(), Failed<'a>> {
    let gib = |bytes: u64| bytes as f64 / GIB;
    let split = panel.policy == Policy::Static;
    let areas = match split {
        true => "each in its share",
        false => "stacked",
    };
    let title = format!("{}: memory by model, {areas}", panel.policy);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", chart::TITLE))
        .margin(10)
        .x_label_area_size(26)
        .y_label_area_size(66)
        .build_cartesian_2d(0.0..minutes(end), 0.0..gib(scale.limit) * 1.04)?;
    chart
        .configure_mesh()
        .y_desc("GiB")
        .light_line_style(WHITE)
        .label_style(("sans-serif", chart::SMALL))
        .x_labels(12)
        .x_label_formatter(&minutes_label(end))
        .y_labels(6)
        .draw()?;
    let points: Vec<(Nanos, Vec<f64>)> = panel.memory.points().collect();
    let granules = gib(scale.granule);
    for model in (0..scale.models.len()).rev() {
        let base = if split {
            gib(scale.share) * model as f64
        } else {
            0.0
        };
        let height = |held: &[f64]| {
            let first = if split { model } else { 0 };
            let held = held.iter().take(model + 1).skip(first);
            base + held.sum::<f64>() * granules
        };
        let steps = steps(&points, height);
        // The highest sum is drawn first and the others over it.
        chart.draw_series(AreaSeries::new(steps, base, color(model).filled()))?;
    }
    let count = if split { scale.models.len() } else { 1 };
    let limit = if split { scale.share } else { scale.limit };
    for at in 1..=count {
        let height = gib(limit) * at as f64;
        let ends = [(0.0, height), (minutes(end), height)];
        chart.draw_series([PathElement::new(ends, LIMIT.stroke_width(2))])?;
    }
    Ok(())
}

fn draw_waiting<'a>(
    area: &Area<'a>,
    scale: &Scale<'_>,
    end: Nanos,
    longest: u64,
    waiting: &Timeline,
) -> Result<(), Failed<'a>> {
    let mut chart = ChartBuilder::on(area)
        .margin(10)
        .x_label_area_size(44)
        .y_label_area_size(66)
        .build_cartesian_2d(0.0..minutes(end), 0.0..longest as f64 * 1.04)?;
    chart
        .configure_mesh()
        .x_desc("minutes since the first request")
        .y_desc("requests waiting")
        .light_line_style(WHITE)
        .label_style(("sans-serif", chart::SMALL))
        .x_labels(12)
        .x_label_formatter(&minutes_label(end))
        .y_labels(4)
        .y_label_formatter(&|count| format!("{count:.0}"))
        .draw()?;
    let points: Vec<(Nanos, Vec<f64>)> = waiting.points().collect();
    for model in 0..scale.models.len() {
        let height = |queued: &[f64]| queued.get(model).copied().unwrap_or_default();
        chart.draw_series(LineSeries::new(steps(&points, height), color(model)))?;
    }
    Ok(())
}

/// Returns the corners of a line that stays at a height for each point's time.
fn steps(points: &[(Nanos, Vec<f64>)], height: impl Fn(&[f64]) -> f64) -> Vec<(f64, f64)> {
    let mut start = 0;
    let mut steps = Vec::with_capacity(2 * points.len());
    for (end, values) in points {
        steps.push((minutes(start), height(values)));
        steps.push((minutes(*end), height(values)));
        start = *end;
    }
    steps
}

/// Draws the names of models and limits, right of the plots.
fn draw_legend<'a>(area: &Area<'a>, scale: &Scale<'_>, policy: Policy) -> Result<(), Failed<'a>> {
    let names: Vec<_> = scale.models.iter().map(|name| chart::text(name)).collect();
    let names = names.iter().enumerate();
    let mut entries: Vec<_> = names
        .map(|(model, name)| (Mark::Filled(color(model)), name.as_str()))
        .collect();
    let said = match policy {
        Policy::Static => "limit of each model",
        Policy::Elastic => "limit of the pool",
        Policy::Ledger => "limit of the ledger",
    };
    entries.push((Mark::Line(LIMIT), said));
    chart::legend(area, &entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(policy: Policy, memory: &Timeline) -> Panel {
        Panel {
            policy,
            memory: memory.clone(),
            waiting: memory.clone(),
        }
    }

    #[test]
    fn a_chart_has_every_model_and_the_limits_in_every_panel() {
        let mut timeline = Timeline::new(2);
        timeline.change(0, 0, 100);
        timeline.change(30_000_000_000, 1, 200);
        timeline.advance(60_000_000_000);
        let models = ["conv\u{1b}".to_owned(), "code <&>".to_owned()];
        let scale = Scale {
            models: &models,
            granule: 2 << 20,
            limit: 1 << 30,
            share: 512 << 20,
        };
        let panels = [Policy::Static, Policy::Elastic, Policy::Ledger]
            .map(|policy| panel(policy, &timeline));
        let svg = svg("4.27 times", &scale, &panels).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for (text, times) in [
            ("static: memory", 1),
            ("elastic: memory", 1),
            ("ledger: memory", 1),
            ("conv\\u{1b}", 3),
            ("code &lt;&amp;&gt;", 3),
            ("limit of each model", 1),
            ("limit of the pool", 1),
            ("limit of the ledger", 1),
            ("requests waiting", 3),
            ("4.27 times", 1),
        ] {
            assert_eq!(svg.matches(text).count(), times, "{text}");
        }
        let blue = svg.matches("#0072B2").count();
        assert!(
            blue >= 9,
            "an area, a line and a legend in each panel, not {blue}"
        );
        let limits = svg.matches("#BE1E2D").count();
        assert_eq!(
            limits,
            2 + 1 + 1 + 3,
            "two shares, one pool, one ledger, three legends"
        );
    }

    #[test]
    fn an_empty_run_can_be_drawn() {
        let scale = Scale {
            models: &["a".to_owned()],
            granule: 1,
            limit: 1,
            share: 1,
        };
        let panels = [panel(Policy::Elastic, &Timeline::new(1))];
        assert!(
            svg("4.27 times", &scale, &panels)
                .unwrap()
                .contains("</svg>")
        );
    }
}
