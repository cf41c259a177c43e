//! The picture: a plot for each ledger or pool, with stacked bands and the limit over time.

use plotters::prelude::*;

use super::series::{Point, Series};
use crate::chart::{self, Area, Failed, GIB, LIMIT, Mark, color};

const PLOT: u32 = 320;
/// The most bands with a color of their own: those with the highest peaks. The others are one band.
const SHOWN: usize = 10;
/// The most points of a band. Of more samples the one with the most memory in each stretch is drawn.
const POINTS: u64 = 1000;
const MIB: f64 = (1u64 << 20) as f64;
const OTHERS: RGBColor = RGBColor(150, 150, 150);

/// Draws all series.
///
/// # Errors
/// Drawing fails.
pub(super) fn svg(all: &[Series]) -> anyhow::Result<String> {
    let height = PLOT * u32::try_from(all.len().max(1)).unwrap_or(1);
    chart::svg(height, "Memory over time", |root| {
        let areas = root.split_evenly((all.len().max(1), 1));
        let mut drawn = areas.iter().zip(all);
        drawn
            .try_for_each(|(area, series)| draw(area, series))
            .map_err(|error| error.to_string())
    })
}

/// The bands that are drawn, from the bottom up: those with a color of their own, by their numbers in the
/// series, and all others as one.
struct Stack {
    own: Vec<usize>,
    /// The number of others.
    others: usize,
}

impl Stack {
    fn of(series: &Series) -> Self {
        let mut own: Vec<usize> = (0..series.bands.len()).collect();
        // Stable: of equal peaks, what appeared first.
        own.sort_by_key(|&band| std::cmp::Reverse(series.peaks.get(band)));
        let others = match own.len() > SHOWN {
            true => own.split_off(SHOWN - 1).len(),
            false => 0,
        };
        own.sort_unstable();
        Self { own, others }
    }

    const fn len(&self) -> usize {
        self.own.len() + if self.others == 0 { 0 } else { 1 }
    }

    fn color(&self, at: usize) -> RGBColor {
        if at < self.own.len() {
            color(at)
        } else {
            OTHERS
        }
    }

    /// Returns the sum of a band and of those below it.
    fn sum(&self, point: &Point, at: usize) -> f64 {
        if at >= self.own.len() {
            return point.total() as f64;
        }
        let own = self.own.iter().take(at + 1);
        own.map(|&band| point.of(band) as f64).sum()
    }
}

fn draw<'a>(area: &Area<'a>, series: &Series) -> Result<(), Failed<'a>> {
    let (plot, legend) = chart::parts(area);
    let top = series.top().max(1) as f64;
    let (unit, name) = if top < 4.0 * GIB {
        (MIB, "MiB")
    } else {
        (GIB, "GiB")
    };
    let end = seconds(series.end.max(1));
    let mut chart = ChartBuilder::on(&plot)
        .caption(chart::text(&series.source), ("sans-serif", chart::TITLE))
        .margin(10)
        .x_label_area_size(44)
        .y_label_area_size(66)
        .build_cartesian_2d(0.0..end, 0.0..top / unit * 1.04)?;
    let digits = if end > 10.0 { 0 } else { 2 };
    chart
        .configure_mesh()
        .x_desc("seconds")
        .y_desc(name)
        .light_line_style(WHITE)
        .label_style(("sans-serif", chart::SMALL))
        .x_labels(12)
        .x_label_formatter(&|seconds| format!("{seconds:.digits$}"))
        .y_labels(6)
        .draw()?;
    let (points, stack) = (thinned(series), Stack::of(series));
    // The highest sum is drawn first and the others over it.
    for at in (0..stack.len()).rev() {
        let line = steps(&points, series.end, |point| stack.sum(point, at) / unit);
        chart.draw_series(AreaSeries::new(line, 0.0, stack.color(at).filled()))?;
    }
    let limit = steps(&points, series.end, |point| point.limit as f64 / unit);
    chart.draw_series([PathElement::new(limit, LIMIT.stroke_width(2))])?;
    draw_legend(&legend, series, &stack)
}

/// Draws the names of bands, the topmost first, and of the limit.
fn draw_legend<'a>(area: &Area<'a>, series: &Series, stack: &Stack) -> Result<(), Failed<'a>> {
    let names = stack.own.iter().filter_map(|&band| series.bands.get(band));
    let mut names: Vec<String> = names.map(|name| chart::text(name)).collect();
    if stack.others > 0 {
        names.push(format!("{} others", stack.others));
    }
    let names = names.iter().enumerate().rev();
    let mut entries: Vec<(Mark, &str)> = vec![(Mark::Line(LIMIT), "limit")];
    entries.extend(names.map(|(at, name)| (Mark::Filled(stack.color(at)), &**name)));
    chart::legend(area, &entries)
}

fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}

/// Returns at most [`POINTS`] points: of those in one stretch of time, the one with the most memory.
fn thinned(series: &Series) -> Vec<&Point> {
    let stretch = series.end / POINTS + 1;
    let mut chosen = Vec::<&Point>::new();
    for point in &series.points {
        match chosen.last_mut() {
            Some(last) if last.time / stretch == point.time / stretch => {
                if point.total() > last.total() {
                    *last = point;
                }
            }
            _ => chosen.push(point),
        }
    }
    chosen
}

/// Returns the corners of a line that stays at a point's height until the next point.
fn steps(points: &[&Point], end: u64, height: impl Fn(&Point) -> f64) -> Vec<(f64, f64)> {
    let ends = points.iter().skip(1).map(|point| point.time).chain([end]);
    let steps = points.iter().zip(ends).flat_map(|(point, end)| {
        let height = height(point);
        [(seconds(point.time), height), (seconds(end), height)]
    });
    steps.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(bands: usize, points: u64) -> Series {
        let peak = |band| (band as u64 + 1) << 20;
        let point = |time| Point {
            time,
            limit: 8 << 30,
            held: (0..bands).map(|band| (band, peak(band))).collect(),
        };
        Series {
            source: "gpu <0>\u{1b}\u{ffff}".to_owned(),
            bands: (0..bands).map(|band| format!("band {band}&")).collect(),
            peaks: (0..bands).map(peak).collect(),
            points: (0..points).map(point).collect(),
            end: points.max(1) - 1,
        }
    }

    #[test]
    fn each_plot_has_its_bands_limits_and_units() {
        let drawn = svg(&[series(2, 3), series(1, 1)]).unwrap();
        assert!(drawn.starts_with("<svg") && drawn.trim_end().ends_with("</svg>"));
        for (text, times) in [
            ("gpu &lt;0&gt;\\u{1b}\\u{ffff}", 2),
            ("band 0&amp;", 2),
            ("band 1&amp;", 1),
            ("GiB", 2),
            ("seconds", 2),
            ("\nlimit\n", 2),
            ("others", 0),
        ] {
            assert_eq!(drawn.matches(text).count(), times, "{text}");
        }
    }

    #[test]
    fn the_smallest_of_many_bands_are_one() {
        let drawn = svg(&[series(14, 2)]).unwrap();
        for (text, times) in [("band 4&amp;", 0), ("band 5&amp;", 1), ("5 others", 1)] {
            assert_eq!(drawn.matches(text).count(), times, "{text}");
        }
    }

    #[test]
    fn a_stretch_shows_its_largest_sample() {
        let mut many = series(1, 100_000);
        many.points[77].held = vec![(0, 5 << 30)];
        let points = thinned(&many);
        assert!(points.len() <= 1000, "{}", points.len());
        assert!(points.iter().any(|point| point.total() == 5 << 30));
        assert!(svg(&[many]).unwrap().len() < 1 << 20);
    }
}
