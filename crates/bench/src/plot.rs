//! SVG plots: latency distribution, throughput over time, latency by throughput, and lines of any kind.
//! In: results of one workload, one or one per rate. Out: SVG documents as text; the caller writes the files.
//! Layout: title, plot area, and below it the legend, which never covers a curve. Fonts are resolved by the viewer.

use crate::workload_result::WorkloadResult;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;
use std::ops::Range;

const SIZE: (u32, u32) = (900, 540);
const FONT: &str = "sans-serif";
/// Arm of a cross, in pixels.
const CROSS_PIXELS: i32 = 5;
const LEGEND_ROW_PIXELS: u32 = 20;
const LEGEND_MARGIN_PIXELS: u32 = 12;
const LEGEND_LEFT_PIXELS: i32 = 84;
/// The longest name that fits into half of the width.
const LEGEND_COLUMN_CHARS: usize = 46;
/// The longest title that fits at its usual size.
const TITLE_CHARS: usize = 80;
/// Lower bound of latencies in plots: a logarithmic axis has no zero.
const LATENCY_US_MIN: f64 = 0.1;

/// A named line.
pub struct PlotLine {
    /// Name in the legend.
    pub name: String,
    /// Points, in the order in which they are joined.
    pub points: Vec<(f64, f64)>,
    /// Points of a reference, such as a paper, drawn as crosses of the line's color and not joined.
    pub reference: Vec<(f64, f64)>,
}

/// Titles of the axes and the format of the numbers of the x axis.
struct AxisLabels<'a> {
    x: &'a str,
    y: &'a str,
    x_label: &'a dyn Fn(&f64) -> String,
}

/// Plots the latency distribution; one line per rate.
pub fn latency_percentiles(workload: &str, results: &[WorkloadResult]) -> String {
    let line_of = |result: &WorkloadResult| PlotLine {
        name: legend_of(result),
        points: result
            .latency_quantiles
            .iter()
            .map(|quantile| (-(1.0 - quantile.fraction).log10(), quantile.latency_us.max(LATENCY_US_MIN)))
            .collect(),
        reference: Vec::new(),
    };
    let lines: Vec<PlotLine> = results.iter().map(line_of).collect();
    let (x, y) = (0.0..axis_end(&lines, |point| point.0), log_range(&lines));
    let axes =
        AxisLabels { x: "operations that take no longer", y: "latency (us)", x_label: &format_percentile };
    render_svg(&format!("{workload}: latency"), x, y.log_scale(), &axes, &lines)
}

/// Plots throughput over time; one line per rate.
pub fn throughput_over_time(workload: &str, results: &[WorkloadResult]) -> String {
    let line_of = |result: &WorkloadResult| PlotLine {
        name: legend_of(result),
        points: result
            .series
            .iter()
            .map(|point| (point.start_s + result.series_interval_s / 2.0, point.throughput_ops_s))
            .collect(),
        reference: Vec::new(),
    };
    let lines: Vec<PlotLine> = results.iter().map(line_of).collect();
    let (x, y) = (0.0..axis_end(&lines, |point| point.0), 0.0..axis_end(&lines, |point| point.1));
    let axes = AxisLabels { x: "time (s)", y: "operations/s", x_label: &format_number };
    render_svg(&format!("{workload}: throughput"), x, y, &axes, &lines)
}

/// Plots the median and the 99th percentile of the latency by throughput, over the rates.
pub fn latency_by_throughput(workload: &str, results: &[WorkloadResult]) -> String {
    let line = |name: &str, latency_us: fn(&WorkloadResult) -> f64| PlotLine {
        name: name.to_owned(),
        points: results
            .iter()
            .map(|result| (result.throughput_ops_s, latency_us(result).max(LATENCY_US_MIN)))
            .collect(),
        reference: Vec::new(),
    };
    let lines = [line("p50", |result| result.latency_us_p50), line("p99", |result| result.latency_us_p99)];
    let (x, y) = (0.0..axis_end(&lines, |point| point.0), log_range(&lines));
    let axes = AxisLabels { x: "operations/s", y: "latency (us)", x_label: &format_number };
    render_svg(&format!("{workload}: latency against throughput"), x, y.log_scale(), &axes, &lines)
}

/// Plots lines over an x axis from zero on.
pub fn line_plot(title: &str, x: &str, y: &str, lines: &[PlotLine]) -> String {
    let axes = AxisLabels { x, y, x_label: &format_number };
    let least = all_points(lines).map(|point| point.1).fold(0.0, f64::min);
    let (ends, range) = (axis_end(lines, |point| point.0), least * 1.08..axis_end(lines, |point| point.1));
    render_svg(title, 0.0..ends, range, &axes, lines)
}

fn legend_of(result: &WorkloadResult) -> String {
    match result.rate_ops_s {
        None => format!("{} x {} in flight", result.threads, result.depth),
        Some(rate) => format!("rate {rate}/s"),
    }
}

fn all_points(lines: &[PlotLine]) -> impl Iterator<Item = &(f64, f64)> {
    lines.iter().flat_map(|line| line.points.iter().chain(&line.reference))
}

/// End of an axis: 8 % after the last point.
fn axis_end(lines: &[PlotLine], of: fn(&(f64, f64)) -> f64) -> f64 {
    let last = all_points(lines).map(of).fold(0.0, f64::max);
    if last > 0.0 { last * 1.08 } else { 1.0 }
}

/// Range of a logarithmic axis.
fn log_range(lines: &[PlotLine]) -> Range<f64> {
    let points = || all_points(lines).map(|point| point.1);
    let (least, most) = (points().fold(f64::INFINITY, f64::min), points().fold(LATENCY_US_MIN, f64::max));
    least.min(most) / 1.5..most * 1.5
}

fn format_number(x: &f64) -> String {
    format!("{}", (x * 1000.0).round() / 1000.0)
}

/// Formats a percentile, given as the number of nines: 0 is 0 %, 1 is 90 %, 2 is 99 %.
fn format_percentile(x: &f64) -> String {
    let decimals = (x.ceil() as usize).saturating_sub(2);
    format!("{:.decimals$} %", 100.0 * (1.0 - 10f64.powf(-x)))
}

/// Renders a plot with its title element.
fn render_svg<Y>(title: &str, x: Range<f64>, y: Y, axes: &AxisLabels<'_>, lines: &[PlotLine]) -> String
where
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let mut text = String::new();
    // Writing to memory cannot fail, and no font is looked up.
    draw(&mut text, title, x, y, axes, lines).expect("drawing to memory does not fail");
    let escaped = title.replace('&', "&amp;").replace('<', "&lt;");
    let after = text.find("<svg").and_then(|at| Some(at + text[at..].find('>')? + 1));
    text.insert_str(
        after.expect("an SVG document starts with its svg element"),
        &format!("\n<title>{escaped}</title>"),
    );
    text
}

fn draw<Y>(
    text: &mut String,
    title: &str,
    x: Range<f64>,
    y: Y,
    axes: &AxisLabels<'_>,
    lines: &[PlotLine],
) -> Result<(), DrawingAreaErrorKind<std::io::Error>>
where
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let legend = legend_entries(lines);
    let size = (SIZE.0, SIZE.1 + legend_height(&legend));
    let root = SVGBackend::with_string(text, size).into_drawing_area();
    root.fill(&WHITE)?;
    let (plot_area, legend_area) = root.split_vertically(SIZE.1);
    let mut chart = ChartBuilder::on(&plot_area)
        .caption(title, (FONT, title_font_size(title)))
        .margin(14)
        .x_label_area_size(46)
        .y_label_area_size(84)
        .build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc(axes.x)
        .y_desc(axes.y)
        .label_style((FONT, 14))
        .x_label_formatter(axes.x_label)
        .y_label_formatter(&format_number)
        .draw()?;
    for (number, line) in lines.iter().enumerate() {
        let color = line_color(number);
        let points = || line.points.iter().copied();
        chart.draw_series(LineSeries::new(points(), color.stroke_width(2)))?;
        chart.draw_series(points().map(|point| Circle::new(point, 2, color.filled())))?;
        let reference = line.reference.iter().copied();
        chart.draw_series(reference.map(|point| Cross::new(point, CROSS_PIXELS, color.stroke_width(3))))?;
    }
    draw_legend(&legend_area, &legend)?;
    root.present()
}

/// One name of the legend.
struct LegendEntry {
    text: String,
    color: RGBAColor,
    /// Whether it names the reference's crosses and not a line.
    is_reference: bool,
}

fn line_color(number: usize) -> RGBAColor {
    Palette99::pick(number).to_rgba()
}

/// The names of all lines, each followed by that of its reference points if it has any.
fn legend_entries(lines: &[PlotLine]) -> Vec<LegendEntry> {
    let entries = lines.iter().enumerate().flat_map(|(number, line)| {
        let entry = |text, is_reference| LegendEntry { text, color: line_color(number), is_reference };
        let reference = (!line.reference.is_empty()).then(|| entry(format!("{}: paper", line.name), true));
        std::iter::once(entry(line.name.clone(), false)).chain(reference)
    });
    entries.collect()
}

/// Columns of the legend: two, or one if a name is too long for half of the width.
fn legend_columns(entries: &[LegendEntry]) -> usize {
    let longest = entries.iter().map(|entry| entry.text.chars().count()).max().unwrap_or(0);
    if longest <= LEGEND_COLUMN_CHARS { 2 } else { 1 }
}

/// Height of the legend below the plot, in pixels.
fn legend_height(entries: &[LegendEntry]) -> u32 {
    (entries.len().div_ceil(legend_columns(entries)) as u32) * LEGEND_ROW_PIXELS + LEGEND_MARGIN_PIXELS
}

/// Draws the legend into an area of its own below the plot, column by column.
fn draw_legend(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    entries: &[LegendEntry],
) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
    let columns = legend_columns(entries);
    let rows = entries.len().div_ceil(columns).max(1);
    for (number, entry) in entries.iter().enumerate() {
        let x = LEGEND_LEFT_PIXELS + (number / rows) as i32 * (SIZE.0 as i32 / columns as i32);
        let y = (number % rows) as i32 * LEGEND_ROW_PIXELS as i32 + LEGEND_ROW_PIXELS as i32 / 2;
        if entry.is_reference {
            area.draw(&Cross::new((x + 9, y), CROSS_PIXELS, entry.color.stroke_width(3)))?;
        } else {
            area.draw(&PathElement::new([(x, y), (x + 18, y)], entry.color.stroke_width(2)))?;
        }
        area.draw(&Text::new(entry.text.clone(), (x + 26, y - 7), (FONT, 14)))?;
    }
    Ok(())
}

/// A title that is too long for the width is drawn smaller.
fn title_font_size(title: &str) -> u32 {
    if title.chars().count() <= TITLE_CHARS { 22 } else { 15 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::{OpResult, Recorder};
    use crate::{BenchConfig, Workload};
    use octokv_base::Nanos;

    fn result_with_rate(rate: Option<f64>, operations: u64) -> WorkloadResult {
        let mut recorder = Recorder::new(Nanos::ZERO);
        for number in 0..operations {
            let (started, now) =
                (Nanos(number * 1_000_000), Nanos(number * 1_000_000 + 77_000 + number * 900));
            recorder.record_op(OpResult {
                started,
                finished: now,
                found: true,
                value_bytes: 1,
                keys_listed: 0,
                pairs_read: 0,
            });
        }
        WorkloadResult::new(Workload::YcsbA, "kv", &BenchConfig { rate, ..BenchConfig::default() }, recorder)
    }

    #[test]
    fn plots_have_titles_axes_and_a_line_for_each_result() {
        let results = [result_with_rate(Some(500.0), 900), result_with_rate(Some(1000.0), 2000)];
        for (draw, parts) in [
            (
                latency_percentiles as fn(&str, &[WorkloadResult]) -> String,
                ["ycsb-a: latency", "latency (us)", "99 %"],
            ),
            (throughput_over_time, ["ycsb-a: throughput", "operations/s", "time (s)"]),
            (latency_by_throughput, ["ycsb-a: latency against throughput", "p50", "p99"]),
        ] {
            let text = draw("ycsb-a", &results);
            assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"));
            assert!(text.contains(&format!("<title>{}</title>", parts[0])), "{text}");
            parts.iter().for_each(|part| assert!(text.contains(part), "no {part} in {text}"));
            assert_eq!(text.matches("stroke-width=\"2\"").count(), 4, "two lines and their names: {text}");
        }
        assert!(latency_percentiles("ycsb-a", &results).contains("rate 500/s"));
    }

    #[test]
    fn any_lines_are_plotted() {
        let line = PlotLine {
            name: "ours".to_owned(),
            points: vec![(1.0, -2.0), (2.0, 5.0)],
            reference: vec![(1.0, 1.0)],
        };
        let text = line_plot("Figure 6 & 7", "threads", "MB/s", &[line]);
        for part in ["<title>Figure 6 &amp; 7</title>", "threads", "MB/s", "ours", "ours: paper"] {
            assert!(text.contains(part), "no {part} in {text}");
        }
    }

    /// The values of an attribute of the elements with this name, with the text that follows each element.
    fn attributes<'a>(svg: &'a str, element: &str, name: &str) -> Vec<(f64, &'a str)> {
        let (element, start) = (format!("{element} "), format!(" {name}=\""));
        let elements = svg.split('<').filter(|text| text.starts_with(&element));
        let value = |text: &str| text.split_once(&start)?.1.split('"').next()?.parse().ok();
        elements.filter_map(|text| Some((value(text)?, text.split_once('>')?.1.trim()))).collect()
    }

    #[test]
    fn the_legend_is_below_the_plot_area() {
        for count in [1, 2, 9] {
            let line = |number: usize| PlotLine {
                name: format!("legend {number}"),
                points: vec![(0.0, 0.0), (1.0, number as f64)],
                reference: vec![(0.5, 2.0 * number as f64)],
            };
            let svg = line_plot("title", "x", "y", &(0..count).map(line).collect::<Vec<_>>());
            // Curves end at their circles; the axis and its label end the plot area.
            let lowest_point =
                attributes(&svg, "circle", "cy").into_iter().map(|(y, _)| y).fold(0.0, f64::max);
            let height = attributes(&svg, "svg", "height")[0].0;
            let names = |attribute| {
                let all = attributes(&svg, "text", attribute).into_iter();
                all.filter(|(_, text)| text.starts_with("legend ")).map(|(at, _)| at).collect::<Vec<f64>>()
            };
            let (names_y, names_x) = (names("y"), names("x"));
            assert_eq!(names_y.len(), 2 * count, "each line has a name and one for its reference");
            assert!(lowest_point < f64::from(SIZE.1), "{lowest_point}");
            assert!(names_y.iter().all(|&y| y >= f64::from(SIZE.1) && y < height), "{names_y:?} of {height}");
            assert!(names_x.iter().all(|&x| x < f64::from(SIZE.0)), "{names_x:?}");
        }
    }

    #[test]
    fn an_empty_result_is_plotted() {
        for draw in [latency_percentiles, throughput_over_time, latency_by_throughput] {
            assert!(draw("fillseq", &[result_with_rate(None, 0)]).contains("</svg>"));
        }
    }

    #[test]
    fn percentiles_are_labelled_in_percent() {
        let table = [(0.0, "0 %"), (1.0, "90 %"), (2.0, "99 %"), (3.0, "99.9 %"), (4.0, "99.99 %")];
        for (x, want) in table {
            assert_eq!(format_percentile(&x), want);
        }
    }
}
