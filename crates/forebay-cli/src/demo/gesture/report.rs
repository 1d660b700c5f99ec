//! The demo's result as a table and as JSON.

use std::fmt::Write as _;

use forebay::Runtime;

use super::Measured;
use crate::bench::schema::quantile;

impl Measured {
    /// Frames per second.
    pub fn fps(&self) -> f64 {
        self.frames as f64 / self.seconds
    }
}

pub(super) fn table(m: &Measured, rt: &Runtime) -> String {
    let mut out = String::new();
    let (p50, p99) = (quantile(m.latency_ms.clone(), 0.5), quantile(m.latency_ms.clone(), 0.99));
    let cpu = (m.cpu.0 + m.cpu.1) / m.seconds * 100.0;
    let _ = writeln!(out, "frames      {} in {:.2} s, {} gestures", m.frames, m.seconds, m.gestures);
    let _ = writeln!(
        out,
        "rate        {:.1} fps, {:.1} MB/s of camera data",
        m.fps(),
        m.fps() * m.frame_bytes as f64 / 1e6
    );
    let _ = writeln!(out, "latency     p50 {p50:.2} ms, p99 {p99:.2} ms from the second image to the gestures");
    let _ = writeln!(out, "CPU         {cpu:.0} % of a core (user {:.2} s, system {:.2} s)", m.cpu.0, m.cpu.1);
    for (i, (name, kind)) in rt.devices().iter().enumerate() {
        let _ = writeln!(out, "device {i}    {kind}: {name}");
    }
    let _ = writeln!(out, "copied      {:.1} MB to and from devices", m.copied as f64 / 1e6);
    let _ = writeln!(out, "\ntask        ran on");
    for (task, on) in &m.placed {
        let on: Vec<String> = on.iter().map(|(k, n)| format!("{k} ×{n}")).collect();
        let _ = writeln!(out, "{task:<11} {}", on.join(", "));
    }
    out
}

pub(super) fn json(m: &Measured) -> String {
    let placed: serde_json::Map<String, serde_json::Value> = m
        .placed
        .iter()
        .map(|(t, on)| {
            (t.clone(), on.iter().map(|(k, n)| (k.clone(), (*n).into())).collect::<serde_json::Map<_, _>>().into())
        })
        .collect();
    serde_json::json!({
        "demo": "gesture",
        "frames": m.frames,
        "seconds": m.seconds,
        "fps": m.fps(),
        "mb_per_s": m.fps() * m.frame_bytes as f64 / 1e6,
        "latency_ms": { "p50": quantile(m.latency_ms.clone(), 0.5), "p99": quantile(m.latency_ms.clone(), 0.99) },
        "cpu_percent": (m.cpu.0 + m.cpu.1) / m.seconds * 100.0,
        "gestures": m.gestures,
        "copied_bytes": m.copied,
        "tasks": placed,
    })
    .to_string()
}
