//! Plots as SVG: lines over bytes, both axes logarithmic, and over time; dots of what was expected over what came to be; ranges of
//! cases side by side; squares of figures.

use std::fmt::Write as _;

/// A curve: a name and its points.
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Points, x growing.
    pub points: Vec<(f64, f64)>,
    /// Drawn above the others, wider.
    pub bold: bool,
}

/// Three figures of a case: where most are, where nearly all are, and the worst.
#[derive(Clone, Copy)]
pub struct Range {
    /// Drawn as a dot.
    pub low: f64,
    /// Drawn as a bar.
    pub mark: f64,
    /// The end of the line.
    pub high: f64,
}

/// A case and a range for each of several kinds.
pub struct Ranges {
    /// Its name.
    pub name: String,
    /// In the order of the kinds; none where nothing was measured.
    pub ranges: Vec<Option<Range>>,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;
const COLOURS: [&str; 8] = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f"];

/// Bytes as people write them.
pub fn bytes(v: f64) -> String {
    match v {
        v if v >= f64::from(1 << 30) => format!("{} GiB", v / f64::from(1 << 30)),
        v if v >= f64::from(1 << 20) => format!("{} MiB", v / f64::from(1 << 20)),
        v if v >= 1024.0 => format!("{} KiB", v / 1024.0),
        v => format!("{v} B"),
    }
}

/// A plot of `series` over bytes, both axes logarithmic: powers of 16 on x, of 10 on y.
pub fn over_bytes(title: &str, y_name: &str, series: &[Series]) -> String {
    let points = || series.iter().flat_map(|s| &s.points).filter(|p| p.0 > 0.0 && p.1 > 0.0);
    let bounds = |get: fn(&(f64, f64)) -> f64| {
        let (min, max) = points().map(get).fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(v), b.max(v)));
        (min.log2(), if max > min { max.log2() } else { min.log2() + 1.0 })
    };
    let ((x0, x1), (y0, y1)) = (bounds(|p| p.0), bounds(|p| p.1));
    let x = |v: f64| across((v.log2() - x0) / (x1 - x0));
    let y = |v: f64| up((v.log2() - y0) / (y1 - y0));
    let mut axes = String::new();
    for i in (0..31).filter(|i| f64::from(*i) >= x0 && f64::from(*i) <= x1 + 1e-9 && i % 4 == 0) {
        axes.push_str(&upright(x(f64::from(i).exp2()), &bytes(f64::from(i).exp2())));
    }
    for v in (-6..12).map(|i| 10f64.powi(i)).filter(|v| (y0..=y1).contains(&v.log2())) {
        axes.push_str(&level(y(v), &v.to_string()));
    }
    draw((title, y_name), series, &axes, x, y)
}

/// Dots: what was predicted (y) over what came to be (x), in `unit`, both axes logarithmic and alike, with lines where both are the
/// same and where they are a quarter apart.
pub fn predicted_over_measured(title: &str, unit: &str, series: &[Series]) -> String {
    let values = || series.iter().flat_map(|s| &s.points).flat_map(|p| [p.0, p.1]).filter(|v| *v > 0.0);
    let (min, max) = values().fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(v), b.max(v)));
    if min > max {
        return draw((title, "nothing was measured"), &[], "", |_| 0.0, |_| 0.0);
    }
    // Whole powers of two around them.
    let (low, high) = (min.log2().floor(), max.log2().floor() + 1.0);
    let part = |v: f64| ((v.log2() - low) / (high - low)).clamp(0.0, 1.0);
    let mut axes = String::new();
    for v in (-6..12).map(|i| 10f64.powi(i)).filter(|v| (low..=high).contains(&v.log2())) {
        axes.push_str(&upright(across(part(v)), &format!("{v} {unit}")));
        axes.push_str(&level(up(part(v)), &v.to_string()));
    }
    let (first, last) = (low.exp2(), high.exp2());
    for (factor, dash) in [(1.0, ""), (0.75, " stroke-dasharray='4 4'"), (1.25, " stroke-dasharray='4 4'")] {
        // As far as both ends are in the picture.
        let (from, to) = (first.max(first / factor), last.min(last / factor));
        let _ = writeln!(
            axes,
            "<line x1='{:.1}' y1='{:.1}' x2='{:.1}' y2='{:.1}' stroke='#888'{dash}/>",
            across(part(from)),
            up(part(from * factor)),
            across(part(to)),
            up(part(to * factor))
        );
    }
    for (i, s) in series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        for p in s.points.iter().filter(|p| p.0 > 0.0 && p.1 > 0.0) {
            let (x, y) = (across(part(p.0)), up(part(p.1)));
            let _ = writeln!(axes, "<circle cx='{x:.1}' cy='{y:.1}' r='2.2' fill='{colour}' fill-opacity='0.45'/>");
        }
    }
    // The legend; dots are no lines.
    let names: Vec<Series> =
        series.iter().map(|s| Series { name: s.name.clone(), points: Vec::new(), bold: false }).collect();
    draw((title, &format!("predicted, {unit}")), &names, &axes, |_| 0.0, |_| 0.0)
}

/// Ranges of cases side by side, those of `kinds` in different colours; y is logarithmic.
pub fn ranges(title: &str, y_name: &str, kinds: &[&str], cases: &[Ranges]) -> String {
    const APART: f64 = 9.0;
    const LABELS: f64 = 190.0;
    let values = || cases.iter().flat_map(|c| &c.ranges).flatten().flat_map(|r| [r.low, r.high]).filter(|v| *v > 0.0);
    let (min, max) = values().fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(v), b.max(v)));
    let (low, high) =
        if min > max { (0.0, 1.0) } else { (min.log10().floor(), max.log10().ceil().max(min.log10().floor() + 1.0)) };
    let wide = APART * (kinds.len() as f64 + 1.5);
    let (right, bottom) = (LEFT + wide * cases.len() as f64, HEIGHT - BOTTOM);
    let y = |v: f64| bottom - (v.log10() - low) / (high - low) * (bottom - TOP);
    let mut body = String::new();
    for v in (low as i32..=high as i32).map(|i| 10f64.powi(i)) {
        let at = y(v);
        let _ = writeln!(
            body,
            "<line x1='{LEFT}' y1='{at:.1}' x2='{right:.1}' y2='{at:.1}' {GRID}/>\n\
             <text x='{}' y='{:.1}' text-anchor='end'>{v}</text>",
            LEFT - 6.0,
            at + 4.0
        );
    }
    for (i, case) in cases.iter().enumerate() {
        let begin = LEFT + wide * i as f64;
        let (x, under) = (begin + wide / 2.0, bottom + 12.0);
        let _ = writeln!(
            body,
            "<text x='{x:.1}' y='{under}' transform='rotate(-60 {x:.1} {under})' text-anchor='end'>{}</text>",
            escape(&case.name)
        );
        for (k, range) in case.ranges.iter().enumerate() {
            let Some(r) = range.filter(|r| r.low > 0.0 && r.high > 0.0) else { continue };
            let (x, colour) = (begin + APART * (k as f64 + 1.0), COLOURS[k % COLOURS.len()]);
            let (from, mark, to) = (y(r.low), y(r.mark), y(r.high));
            let _ = writeln!(
                body,
                "<line x1='{x:.1}' y1='{from:.1}' x2='{x:.1}' y2='{to:.1}' stroke='{colour}'/>\n\
                 <rect x='{:.1}' y='{:.1}' width='7' height='2' fill='{colour}'/>\n\
                 <circle cx='{x:.1}' cy='{from:.1}' r='2.5' fill='{colour}'/>",
                x - 3.5,
                mark - 1.0
            );
        }
    }
    for (k, name) in kinds.iter().enumerate() {
        let (at, colour) = (TOP + 14.0 + 18.0 * k as f64, COLOURS[k % COLOURS.len()]);
        let _ = writeln!(
            body,
            "<rect x='{:.1}' y='{}' width='12' height='12' fill='{colour}'/>\n<text x='{:.1}' y='{}'>{}</text>",
            right + 12.0,
            at - 10.0,
            right + 30.0,
            at,
            escape(name)
        );
    }
    picture((right + RIGHT, HEIGHT + LABELS - BOTTOM), title, y_name, &body)
}

/// A square of figures, the larger the redder: `of` a row's name and a column's.
pub fn matrix(title: &str, names: &[&str], of: impl Fn(&str, &str) -> Option<f64>) -> String {
    const CELL: (f64, f64) = (52.0, 24.0);
    const LABELS: f64 = 150.0;
    let (left, top) = (LABELS, TOP + LABELS);
    let mut body = String::new();
    for (i, name) in names.iter().enumerate() {
        let (x, y) = (left + CELL.0 * (i as f64 + 0.5), top + CELL.1 * (i as f64 + 0.7));
        let _ = writeln!(
            body,
            "<text x='{}' y='{y:.1}' text-anchor='end'>{1}</text>\n\
             <text x='{x:.1}' y='{2}' transform='rotate(-60 {x:.1} {2})'>{1}</text>",
            left - 6.0,
            escape(name),
            top - 8.0
        );
    }
    for (r, row) in names.iter().enumerate() {
        for (c, column) in names.iter().enumerate() {
            let Some(v) = of(row, column) else { continue };
            // White is no slower than alone; red is four times as slow and more.
            let part = ((v.max(1.0).log2() / 2.0).clamp(0.0, 1.0) * 200.0) as u32;
            let (x, y) = (left + CELL.0 * c as f64, top + CELL.1 * r as f64);
            let _ = writeln!(
                body,
                "<rect x='{x:.1}' y='{y:.1}' width='{}' height='{}' fill='rgb(255,{2},{2})' stroke='#ccc'/>\n\
                 <text x='{3:.1}' y='{4:.1}' text-anchor='middle'>{v:.2}</text>",
                CELL.0,
                CELL.1,
                255 - part,
                x + CELL.0 / 2.0,
                y + CELL.1 * 0.7
            );
        }
    }
    let size = (left + CELL.0 * names.len() as f64 + 120.0, top + CELL.1 * names.len() as f64 + 20.0);
    picture((size.0.max(WIDTH), size.1), title, "", &body)
}

/// A plot of `series` over seconds, both axes from 0.
pub fn over_time(title: &str, y_name: &str, series: &[Series]) -> String {
    let largest =
        |get: fn(&(f64, f64)) -> f64| series.iter().flat_map(|s| &s.points).map(get).fold(f64::MIN_POSITIVE, f64::max);
    let (x1, y1) = (largest(|p| p.0), largest(|p| p.1));
    let (x, y) = (|v: f64| across(v / x1), |v: f64| up(v / y1));
    // Five or so lines at round numbers.
    let step = |most: f64| {
        let power = 10f64.powf((most / 5.0).log10().floor());
        [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| most / s <= 6.0).unwrap_or(most)
    };
    let steps = |most: f64| (0..8).map(move |i| f64::from(i) * step(most)).filter(move |v| *v <= most);
    let label = |v: f64| format!("{}", (v * 1e6).round() / 1e6);
    let mut axes: String = steps(x1).map(|v| upright(x(v), &format!("{} s", label(v)))).collect();
    axes.extend(steps(y1).map(|v| level(y(v), &label(v))));
    draw((title, y_name), series, &axes, x, y)
}

const GRID: &str = "stroke='#ddd' stroke-width='1'";

/// Where a part of the plot's width is.
fn across(part: f64) -> f64 {
    LEFT + part * (WIDTH - LEFT - RIGHT)
}

/// The same of its height.
fn up(part: f64) -> f64 {
    HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)
}

/// A line of the grid from top to bottom, with its label.
fn upright(at: f64, label: &str) -> String {
    let bottom = HEIGHT - BOTTOM;
    format!(
        "<line x1='{at:.1}' y1='{TOP}' x2='{at:.1}' y2='{bottom}' {GRID}/>\n\
         <text x='{at:.1}' y='{}' text-anchor='middle'>{label}</text>\n",
        bottom + 18.0
    )
}

/// One from left to right.
fn level(at: f64, label: &str) -> String {
    let right = WIDTH - RIGHT;
    format!(
        "<line x1='{LEFT}' y1='{at:.1}' x2='{right}' y2='{at:.1}' {GRID}/>\n\
         <text x='{}' y='{:.1}' text-anchor='end'>{label}</text>\n",
        LEFT - 6.0,
        at + 4.0
    )
}

/// The curves over their axes, with a legend.
fn draw(
    (title, y_name): (&str, &str),
    series: &[Series],
    axes: &str,
    x: impl Fn(f64) -> f64,
    y: impl Fn(f64) -> f64,
) -> String {
    let mut body = axes.to_owned();
    for (i, s) in series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let path: Vec<String> = s.points.iter().map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1))).collect();
        let (width, dash) = if s.bold { (3.0, " stroke-dasharray='7 4'") } else { (1.5, "") };
        let _ = writeln!(
            body,
            "<polyline points='{}' fill='none' stroke='{colour}' stroke-width='{width}'{dash}/>",
            path.join(" ")
        );
        let (at, from) = (TOP + 14.0 + 18.0 * i as f64, WIDTH - RIGHT + 12.0);
        let end = from + 18.0;
        let _ = writeln!(
            body,
            "<line x1='{from}' y1='{at}' x2='{end}' y2='{at}' stroke='{colour}' stroke-width='{width}'{dash}/>\n\
             <text x='{}' y='{}'>{}</text>",
            end + 6.0,
            at + 4.0,
            escape(&s.name)
        );
    }
    picture((WIDTH, HEIGHT), title, y_name, &body)
}

/// Text as SVG takes it.
pub fn escape(s: &str) -> String {
    s.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// All of it, with the title and the y axis' name.
fn picture((width, height): (f64, f64), title: &str, y_name: &str, body: &str) -> String {
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0}' height='{height:.0}' font-family='sans-serif' font-size='12'>\n\
         <rect width='100%' height='100%' fill='white'/>\n<text x='10' y='22' font-size='15'>{}</text>\n\
         <text x='16' y='{}' transform='rotate(-90 16 {})' text-anchor='middle'>{}</text>\n{body}</svg>\n",
        escape(title),
        HEIGHT / 2.0,
        HEIGHT / 2.0,
        escape(y_name)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_predicted_rightly_is_on_the_line_and_a_quarter_off_on_the_next() {
        let points = vec![(100.0, 100.0), (1000.0, 1000.0), (400.0, 300.0), (0.0, 5.0)];
        let series = [Series { name: "a<b".into(), points, bold: false }];
        let svg = predicted_over_measured("calls", "µs", &series);
        assert!(svg.contains("a&lt;b") && svg.contains("100 µs") && svg.contains("1000 µs"), "{svg}");
        let number = |line: &str, name: &str| -> f64 {
            let rest = line.split(&format!(" {name}='")).nth(1).unwrap();
            rest.split('\'').next().unwrap().parse().unwrap()
        };
        let dots: Vec<(f64, f64)> =
            svg.lines().filter(|l| l.starts_with("<circle")).map(|l| (number(l, "cx"), number(l, "cy"))).collect();
        // A time of nothing has no place.
        assert_eq!(dots.len(), 3);
        let lines: Vec<[f64; 4]> = svg
            .lines()
            .filter(|l| l.starts_with("<line") && l.contains("#888"))
            .map(|l| ["x1", "y1", "x2", "y2"].map(|n| number(l, n)))
            .collect();
        let height = |[x1, y1, x2, y2]: [f64; 4], x: f64| y1 + (y2 - y1) * (x - x1) / (x2 - x1);
        for (dot, line) in dots.iter().zip([0, 0, 1]) {
            let off = dot.1 - height(lines[line], dot.0);
            assert!(off.abs() < 0.5, "{dot:?} {:?}", lines[line]);
        }
        assert!(predicted_over_measured("none", "µs", &[]).starts_with("<svg"));
    }
}
