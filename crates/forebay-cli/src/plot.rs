//! Line plots with logarithmic axes, as SVG.

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
    let escape = |s: &str| s.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let points = || series.iter().flat_map(|s| &s.points).filter(|p| p.0 > 0.0 && p.1 > 0.0);
    let bounds = |get: fn(&(f64, f64)) -> f64| {
        let (min, max) = points().map(get).fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(v), b.max(v)));
        (min.log2(), if max > min { max.log2() } else { min.log2() + 1.0 })
    };
    let ((x0, x1), (y0, y1)) = (bounds(|p| p.0), bounds(|p| p.1));
    let x = |v: f64| LEFT + (v.log2() - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT);
    let y = |v: f64| HEIGHT - BOTTOM - (v.log2() - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM);
    let mut body = String::new();
    let grid = "stroke='#ddd' stroke-width='1'";
    for i in (0..31).filter(|i| f64::from(*i) >= x0 && f64::from(*i) <= x1 + 1e-9 && i % 4 == 0) {
        let at = x(f64::from(i).exp2());
        let (top, bottom) = (TOP, HEIGHT - BOTTOM);
        let _ = writeln!(body, "<line x1='{at:.1}' y1='{top}' x2='{at:.1}' y2='{bottom}' {grid}/>");
        let label = bytes(f64::from(i).exp2());
        let _ = writeln!(body, "<text x='{at:.1}' y='{}' text-anchor='middle'>{label}</text>", bottom + 18.0);
    }
    for i in -6..12 {
        let v = 10f64.powi(i);
        if v.log2() < y0 || v.log2() > y1 {
            continue;
        }
        let (at, right) = (y(v), WIDTH - RIGHT);
        let _ = writeln!(body, "<line x1='{LEFT}' y1='{at:.1}' x2='{right}' y2='{at:.1}' {grid}/>");
        let _ = writeln!(body, "<text x='{}' y='{:.1}' text-anchor='end'>{v}</text>", LEFT - 6.0, at + 4.0);
    }
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
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' font-family='sans-serif' font-size='12'>\n\
         <rect width='100%' height='100%' fill='white'/>\n<text x='10' y='22' font-size='15'>{}</text>\n\
         <text x='16' y='{}' transform='rotate(-90 16 {})' text-anchor='middle'>{}</text>\n{body}</svg>\n",
        escape(title),
        HEIGHT / 2.0,
        HEIGHT / 2.0,
        escape(y_name)
    )
}
