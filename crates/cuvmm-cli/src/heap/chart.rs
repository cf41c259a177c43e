//! The chart: memory live and held over the operations of a trace, for the heap and for the models of
//! PyTorch's allocators.

use std::path::Path;

use plotters::prelude::*;

use super::course::Course;
use crate::chart::{self, Area, Failed, GIB, Mark, color};

const HEIGHT: u32 = 420;
const TITLE: &str = "memory live, and held by the heap and by models of PyTorch's allocators";
const LIVE: RGBColor = RGBColor(200, 200, 200);

/// Draws the courses of the heap and of PyTorch's native and expandable allocators to an SVG file, below a headline.
///
/// # Errors
/// The file cannot be written.
pub(super) fn draw(file: &Path, headline: &str, courses: &[Course; 3]) -> anyhow::Result<()> {
    chart::write(file, &svg(headline, courses)?)
}

fn svg(headline: &str, courses: &[Course; 3]) -> anyhow::Result<String> {
    chart::svg(HEIGHT, headline, |root| {
        draw_all(root, courses).map_err(|error| error.to_string())
    })
}

fn draw_all<'a>(root: &Area<'a>, courses: &[Course; 3]) -> Result<(), Failed<'a>> {
    let (plot, legend) = chart::parts(root);
    let [heap, ..] = courses;
    let (operations, every) = heap.scale();
    let points = courses.iter().flat_map(|course| &course.points);
    let most = points.map(|&(live, held)| live.max(held)).max();
    let most = most.unwrap_or(0).max(1) as f64 / GIB;
    let mut chart = ChartBuilder::on(&plot)
        .caption(TITLE, ("sans-serif", chart::TITLE))
        .margin(10)
        .x_label_area_size(44)
        .y_label_area_size(66)
        .build_cartesian_2d(0.0..operations.max(1) as f64, 0.0..most * 1.04)?;
    chart
        .configure_mesh()
        .x_desc("operations")
        .y_desc("GiB")
        .light_line_style(WHITE)
        .label_style(("sans-serif", chart::SMALL))
        .x_labels(12)
        .x_label_formatter(&|count| format!("{count:.0}"))
        .y_labels(6)
        .draw()?;
    let steps = |course: &Course, height: fn(&(u64, u64)) -> u64| {
        let mut steps = Vec::with_capacity(2 * course.points.len());
        for (at, point) in course.points.iter().enumerate() {
            let height = height(point) as f64 / GIB;
            let end = ((at + 1) * every).min(operations);
            steps.extend([((at * every) as f64, height), (end as f64, height)]);
        }
        steps
    };
    let live = steps(heap, |&(live, _)| live);
    chart.draw_series(AreaSeries::new(live, 0.0, LIVE.filled()))?;
    // The heap's line is drawn last, over the others.
    for (series, course) in courses.iter().enumerate().rev() {
        let held = steps(course, |&(_, held)| held);
        chart.draw_series(LineSeries::new(held, color(series).stroke_width(2)))?;
    }
    let names = ["heap", "native (model)", "expandable (model)"];
    let names = names.into_iter().enumerate();
    let mut entries = vec![(Mark::Filled(LIVE), "live")];
    entries.extend(names.map(|(series, name)| (Mark::Line(color(series)), name)));
    chart::legend(&legend, &entries)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_what_is_live_and_three_lines() {
        let course = |held: u64| {
            let mut course = Course::of(3);
            (0..3).for_each(|at| course.note(|| (at << 30, held << 30)));
            course
        };
        let svg = svg("held 1.04", &[course(3), course(4), course(5)]).unwrap();
        assert_eq!(svg.matches("held 1.04").count(), 1);
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for series in 0..3 {
            let RGBColor(red, green, blue) = color(series);
            let color = format!("#{red:02X}{green:02X}{blue:02X}");
            assert_eq!(svg.matches(&color).count(), 2, "a line and a legend");
        }
        assert_eq!(svg.matches("#C8C8C8").count(), 2, "an area and a legend");
    }

    #[test]
    fn an_empty_course_can_be_drawn() {
        let svg = svg("", &[Course::of(0), Course::of(0), Course::of(0)]).unwrap();
        assert!(svg.contains("</svg>"));
    }
}
