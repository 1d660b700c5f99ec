//! Pictures of graphs: DOT for tools, SVG for people.

use std::fmt::Write as _;

use super::{End, Graph, PortKind};
use crate::run::Snapshot;

const BOX_W: usize = 150;
const GAP_X: usize = 90;
const GAP_Y: usize = 26;
const ROW: usize = 16;
const MARGIN: usize = 30;

fn escape(s: &str) -> String {
    s.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Task and port; none for the program.
type PortAt = Option<(usize, usize)>;

/// Everything that a picture needs; kept apart from the graph, which running consumes.
#[derive(Clone, Debug)]
pub struct Drawing {
    name: String,
    tasks: Vec<Node>,
    /// From (task, output port), to (task, input port); none is the program. With the channel's template.
    edges: Vec<(PortAt, PortAt, String)>,
}

#[derive(Clone, Debug)]
struct Node {
    name: String,
    inputs: Vec<String>,
    outputs: Vec<String>,
    runs_on: String,
}

impl Graph {
    /// A drawing of the graph as it is now.
    pub fn drawing(&self) -> Drawing {
        let tasks =
            self.tasks.iter().map(|t| Node {
                name: t.name.clone(),
                inputs: t
                    .inputs
                    .iter()
                    .map(|p| {
                        if p.kind == PortKind::Input {
                            p.name.clone()
                        } else {
                            format!("{} ({})", p.name, p.kind.name())
                        }
                    })
                    .collect(),
                outputs: t.outputs.iter().map(|p| p.name.clone()).collect(),
                runs_on: t.impls.iter().map(super::Impl::describe).collect::<Vec<_>>().join(", "),
            });
        let end = |e: End| match e {
            End::Task { task, port } => Some((task as usize, port as usize)),
            End::Host => None,
        };
        let edges = self.channels.iter().map(|c| (end(c.from), end(c.to), c.template.to_string()));
        Drawing { name: self.name.clone(), tasks: tasks.collect(), edges: edges.collect() }
    }
}

impl Drawing {
    fn label(&self, channel: usize, live: Option<&Snapshot>) -> String {
        match live.and_then(|s| s.channels.get(channel)) {
            Some(c) => format!("{}/{} · {} passed", c.len, c.capacity, c.passed),
            None => self.edges[channel].2.clone(),
        }
    }

    /// The graph in DOT; with a snapshot, channels show how full they are.
    pub fn dot(&self, live: Option<&Snapshot>) -> String {
        let quote = |s: &str| s.replace('\\', "\\\\").replace('"', "\\\"");
        let mut out = format!("digraph \"{}\" {{\n  rankdir=LR;\n  node [shape=box];\n", quote(&self.name));
        for (i, t) in self.tasks.iter().enumerate() {
            let _ = writeln!(out, "  t{i} [label=\"{}\\n{}\"];", quote(&t.name), quote(&t.runs_on));
        }
        for (i, (from, to, _)) in self.edges.iter().enumerate() {
            let mut end = |e: &PortAt, side: &str| match e {
                Some((t, _)) => format!("t{t}"),
                None => {
                    let _ = writeln!(out, "  {side}{i} [shape=plaintext, label=\"program\"];");
                    format!("{side}{i}")
                }
            };
            let (f, t) = (end(from, "f"), end(to, "d"));
            let _ = writeln!(out, "  {f} -> {t} [label=\"{}\"];", quote(&self.label(i, live)));
        }
        out.push_str("}\n");
        out
    }

    /// Column of each task: one right of the rightmost task that feeds it, ways back left out.
    fn columns(&self) -> Vec<usize> {
        let n = self.tasks.len();
        let mut column = vec![0usize; n];
        // Tasks are numbered in order of addition, which mostly is the direction of the data: edges to lower numbers
        // are ways back.
        for _ in 0..n {
            let mut changed = false;
            for (from, to, _) in &self.edges {
                if let (Some((f, _)), Some((t, _))) = (from, to)
                    && f < t
                    && column[*t] <= column[*f]
                {
                    column[*t] = column[*f] + 1;
                    changed = true;
                }
            }
            if !changed {
                break;
            }
        }
        column
    }

    /// The graph as SVG; with a snapshot, channels show how full they are and tasks how often they ran.
    pub fn svg(&self, live: Option<&Snapshot>) -> String {
        let columns = self.columns();
        let mut next_y: Vec<usize> = Vec::new();
        let mut place = Vec::new();
        for (i, t) in self.tasks.iter().enumerate() {
            let c = columns[i];
            if next_y.len() <= c {
                next_y.resize(c + 1, MARGIN + 20);
            }
            let rows = t.inputs.len().max(t.outputs.len()).max(1);
            let h = 40 + rows * ROW;
            place.push((MARGIN + GAP_X + c * (BOX_W + GAP_X), next_y[c], h));
            next_y[c] += h + GAP_Y;
        }
        let width = 2 * MARGIN + GAP_X + next_y.len().max(1) * (BOX_W + GAP_X);
        let height = next_y.iter().copied().max().unwrap_or(0) + MARGIN;
        let mut out = format!(
            "<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' font-family='sans-serif' font-size='11'>\n\
             <rect width='100%' height='100%' fill='white'/>\n<text x='{MARGIN}' y='22' font-size='15'>{}</text>\n",
            escape(&self.name)
        );
        let port_y = |t: usize, p: usize| place[t].1 + 48 + p * ROW;
        for (i, (from, to, _)) in self.edges.iter().enumerate() {
            let a = from.map(|(t, p)| (place[t].0 + BOX_W, port_y(t, p)));
            let b = to.map(|(t, p)| (place[t].0, port_y(t, p)));
            let (Some((x1, y1)), Some((x2, y2))) =
                (a.or(b.map(|(x, y)| (x.saturating_sub(GAP_X - 20), y))), b.or(a.map(|(x, y)| (x + GAP_X - 20, y))))
            else {
                continue;
            };
            let full = live.and_then(|s| s.channels.get(i)).map_or(0.0, |c| c.len as f64 / c.capacity as f64);
            let colour = if full >= 1.0 {
                "#d62728"
            } else if full > 0.0 {
                "#ff7f0e"
            } else {
                "#555"
            };
            // A way back, or past other tasks, runs beneath the boxes.
            let skips = matches!((from, to), (Some((f, _)), Some((t, _))) if columns[*t] > columns[*f] + 1);
            let around = x2 + 10 < x1 || skips;
            let low = height - MARGIN / 2;
            let path = if around {
                format!("M{x1},{y1} C{},{low} {},{low} {x2},{y2}", x1 + 60, x2.saturating_sub(60))
            } else {
                let mid = (x1 + x2) / 2;
                format!("M{x1},{y1} C{mid},{y1} {mid},{y2} {x2},{y2}")
            };
            let _ = writeln!(out, "<path d='{path}' fill='none' stroke='{colour}' stroke-width='1.5'/>");
            let _ = writeln!(out, "<circle cx='{x2}' cy='{y2}' r='3' fill='{colour}'/>");
            let label = escape(&self.label(i, live));
            let _ = writeln!(
                out,
                "<text x='{}' y='{}' font-size='8' fill='#555' text-anchor='middle'>{label}</text>",
                (x1 + x2) / 2,
                if around { low - (low - y1.max(y2)) / 4 - 4 } else { (y1 + y2) / 2 - 4 }
            );
        }
        for (i, t) in self.tasks.iter().enumerate() {
            let (x, y, h) = place[i];
            let _ = writeln!(
                out,
                "<rect x='{x}' y='{y}' width='{BOX_W}' height='{h}' rx='5' fill='#eef4fb' stroke='#1f77b4'/>"
            );
            let _ = writeln!(out, "<text x='{}' y='{}' font-weight='bold'>{}</text>", x + 8, y + 16, escape(&t.name));
            let ran = live
                .and_then(|s| s.tasks.get(i))
                .map_or(t.runs_on.clone(), |s| format!("{} runs, {}", s.invocations, s.state));
            let _ =
                writeln!(out, "<text x='{}' y='{}' font-size='9' fill='#555'>{}</text>", x + 8, y + 29, escape(&ran));
            for (p, name) in t.inputs.iter().enumerate() {
                let _ =
                    writeln!(out, "<text x='{}' y='{}' font-size='9'>{}</text>", x + 6, port_y(i, p) + 3, escape(name));
            }
            for (p, name) in t.outputs.iter().enumerate() {
                let at = x + BOX_W - 6;
                let y = port_y(i, p) + 3;
                let _ = writeln!(out, "<text x='{at}' y='{y}' font-size='9' text-anchor='end'>{}</text>", escape(name));
            }
        }
        out.push_str("</svg>\n");
        out
    }
}
