//! The plots of a figure: our lines, and the paper's numbers as points of the same color.
//!
//! In: the points of a figure. Out: one SVG document per unit, because each unit has a y axis of its own.

use crate::data_points::DataPoint;
use octokv_bench::plot::{PlotLine, line_plot};

/// Draws the points of a figure: for each unit a number, from 1 on, and an SVG document. Units without a measured point
/// are left out and keep their number.
///
/// A numeric `x` is the position on the axis. A name is drawn at its index within its series, from 1 on. If a figure has
/// points that are for plots alone, only these are drawn.
pub fn plot_figure(title: &str, x_axis_label: &str, points: &[DataPoint]) -> Vec<(usize, String)> {
    let plot_only: Vec<&DataPoint> = points.iter().filter(|point| point.is_plot_only).collect();
    let drawn = if plot_only.is_empty() { points.iter().collect() } else { plot_only };
    let mut units: Vec<&str> = drawn.iter().map(|point| point.unit).collect();
    units.sort_unstable();
    units.dedup();
    let plot = |(number, unit): (usize, &&str)| {
        let lines = lines_of_unit(drawn.iter().copied().filter(|point| point.unit == *unit));
        (!lines.is_empty()).then(|| (number + 1, line_plot(title, x_axis_label, unit, &lines)))
    };
    units.iter().enumerate().filter_map(plot).collect()
}

/// One line per series, in the order of the points. A series of which nothing ran has no line.
fn lines_of_unit<'a>(points: impl Iterator<Item = &'a DataPoint>) -> Vec<PlotLine> {
    let mut series: Vec<(&str, Vec<&DataPoint>)> = Vec::new();
    for point in points {
        match series.iter_mut().find(|(name, _)| *name == point.series) {
            Some((_, points)) => points.push(point),
            None => series.push((&point.series, vec![point])),
        }
    }
    let line = |(name, points): (&str, Vec<&DataPoint>)| {
        let measured: Vec<&DataPoint> = points.into_iter().filter(|point| !point.measured.is_nan()).collect();
        let x = |index: usize| measured[index].x.parse().unwrap_or(index as f64 + 1.0);
        PlotLine {
            name: name.to_owned(),
            points: measured.iter().enumerate().map(|(index, point)| (x(index), point.measured)).collect(),
            reference: (measured.iter().enumerate())
                .filter_map(|(index, point)| Some((x(index), point.paper?)))
                .collect(),
        }
    };
    series.into_iter().map(line).filter(|line| !line.points.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data_points::DataPoints;

    #[test]
    fn a_plot_has_the_papers_points_beside_ours() {
        let mut points = DataPoints::for_figure("Figure 6");
        points.add_with_paper("Put", "1", Some(3.0), 2.0, "MB/s");
        points.add("Put", "7", 4.0, "MB/s");
        points.add_with_paper("Put", "12", Some(6.0), f64::NAN, "MB/s");
        points.add("Get", "named", 4.0, "us");
        let lines = lines_of_unit(points.points.iter().filter(|point| point.unit == "MB/s"));
        assert_eq!((lines.len(), lines[0].name.as_str()), (1, "Put"));
        assert_eq!(lines[0].points, [(1.0, 2.0), (7.0, 4.0)]);
        assert_eq!(lines[0].reference, [(1.0, 3.0)]);
        let plots = plot_figure("Figure 6", "threads", &points.points);
        assert_eq!(plots.iter().map(|plot| plot.0).collect::<Vec<_>>(), [1, 2]);
        assert!(plots[0].1.contains("Put: paper") && !plots[1].1.contains("paper"), "{plots:?}");
    }

    #[test]
    fn plot_only_points_replace_the_others_and_missing_ones_leave_no_plot() {
        let mut points = DataPoints::for_figure("Figure 8");
        points.add("medium", "C(1)", 0.5, "1");
        points.add_plot_only("medium, C(1)", "1", 0.25, "1");
        let plots = plot_figure("Figure 8", "time", &points.points);
        assert!(plots.len() == 1 && plots[0].1.contains("medium, C(1)"));
        let mut missing = DataPoints::for_figure("Figure 4");
        missing.add("Put", "1", f64::NAN, "us");
        assert!(plot_figure("Figure 4", "KiB", &missing.points).is_empty());
    }
}
