//! What `bench transfer` draws beside its curves, from its rows: median, p99.9 and slowest of transfers while the machine does
//! something else, and what two streams cost each other. From the rows, so that a committed result can be drawn anew.

use std::collections::BTreeMap;

use crate::bench::schema::Row;
use crate::plot::{self, Range, Ranges};

/// What is told of each case under a load, one row each.
pub const STATS: [&str; 3] = ["median", "p99.9", "slowest"];

/// The name of a row of [`STATS`]. `what`: size, way and direction.
pub fn under(kind: &str, what: &str, load: &str, stat: &str) -> String {
    format!("{kind}, {what} under {load}: {stat}")
}

/// The name of a row about two streams, each by a way in a direction.
pub fn beside(kind: &str, size: &str, one: &str, other: &str) -> String {
    format!("{kind}, {size} by {one} beside {other}")
}

/// Plots by name.
pub fn of(rows: &[Row]) -> Vec<(String, String)> {
    under_load(rows).into_iter().chain(two_streams(rows)).collect()
}

/// A colour for each kind of stream, alone and beside the load: the row's peers, and ours.
const STREAMS: [(&str, Option<&str>); 4] = [
    ("ordinary, alone", Some("ordinary, alone")),
    ("ordinary, loaded", Some("ordinary")),
    ("real-time, alone", Some("alone")),
    ("real-time, loaded", None),
];

/// Of a case, its size, way and direction: what was found of each stream, by [`STATS`].
type Case<'a> = (&'a str, [[Option<f64>; 3]; 4]);
/// The cases of a device and a load.
type Loaded<'a> = BTreeMap<(&'a str, &'a str), Vec<Case<'a>>>;

fn under_load(rows: &[Row]) -> Vec<(String, String)> {
    let mut all: Loaded<'_> = BTreeMap::new();
    for row in rows {
        let Some((rest, stat)) = row.case.rsplit_once(": ") else { continue };
        let Some(stat) = STATS.iter().position(|s| *s == stat) else { continue };
        let Some((rest, load)) = rest.rsplit_once(" under ") else { continue };
        let Some((kind, what)) = rest.split_once(", ") else { continue };
        let cases = all.entry((kind, load)).or_default();
        if cases.last().is_none_or(|c| c.0 != what) {
            cases.push((what, Default::default()));
        }
        let Some((_, found)) = cases.last_mut() else { continue };
        for (found, (_, peer)) in found.iter_mut().zip(STREAMS) {
            found[stat] = peer.map_or(row.ours, |p| row.peers.get(p).copied().flatten());
        }
    }
    let draw = |((kind, load), cases): ((&str, &str), Vec<Case<'_>>)| {
        let range =
            |[median, late, slowest]: [Option<f64>; 3]| Some(Range { low: median?, mark: late?, high: slowest? });
        let groups: Vec<Ranges> = cases
            .iter()
            .map(|(what, found)| Ranges { name: (*what).into(), ranges: found.map(range).to_vec() })
            .collect();
        let title = format!("{kind}: transfers under {load}: median (dot), p99.9 (bar) and slowest of 1000");
        let name = format!("transfer-{kind}-under-{}", load.replace(' ', "-"));
        (name, plot::ranges(&title, "µs", &STREAMS.map(|s| s.0), &groups))
    };
    all.into_iter().map(draw).collect()
}

fn two_streams(rows: &[Row]) -> Vec<(String, String)> {
    // By device: ways and directions, and what a transfer by the first takes beside the second, over what it takes alone.
    let mut all: BTreeMap<&str, Vec<(&str, &str, f64)>> = BTreeMap::new();
    for row in rows {
        let Some((first, other)) = row.case.split_once(" beside ") else { continue };
        let Some((kind, first)) = first.split_once(", ") else { continue };
        let (Some((_, one)), Some(ratio)) = (first.split_once(" by "), row.ratio) else { continue };
        all.entry(kind).or_default().push((one, other, ratio));
    }
    let draw = |(kind, pairs): (&str, Vec<(&str, &str, f64)>)| {
        let mut names: Vec<&str> = Vec::new();
        for n in pairs.iter().flat_map(|p| [p.0, p.1]) {
            if !names.contains(&n) {
                names.push(n);
            }
        }
        let of = |a: &str, b: &str| pairs.iter().find(|p| p.0 == a && p.1 == b).map(|p| p.2);
        let title = format!("{kind}: a megabyte by the row's way beside the column's, times what it takes alone");
        (format!("transfer-{kind}-two-streams"), plot::matrix(&title, &names, of))
    };
    all.into_iter().map(draw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_is_in_the_picture_of_its_device_and_load() {
        let mut rows = Vec::new();
        for kind in ["cpu", "opencl"] {
            for load in ["full CPU load", "memory pressure"] {
                for what in ["4 KiB by engine to device", "1 MiB by engine to host"] {
                    for (i, stat) in STATS.into_iter().enumerate() {
                        let row = Row::new(under(kind, what, load, stat), "µs", Some(10f64.powi(i as i32)));
                        let row = row.peer("alone", Some(2.0)).peer("ordinary", Some(500.0));
                        rows.push(row.peer("ordinary, alone", Some(3.0)));
                    }
                }
            }
            let row = Row::new(beside(kind, "1 MiB", "engine to device", "mapped to host"), "µs", Some(4.0));
            rows.push(Row { ratio: Some(1.75), ..row });
        }
        // What is of no such kind is left out.
        rows.push(Row::new("cpu, to device, pinned, 8 B", "µs", Some(1.0)));
        let plots = of(&rows);
        let names: Vec<&str> = plots.iter().map(|p| p.0.as_str()).collect();
        assert_eq!(
            names,
            [
                "transfer-cpu-under-full-CPU-load",
                "transfer-cpu-under-memory-pressure",
                "transfer-opencl-under-full-CPU-load",
                "transfer-opencl-under-memory-pressure",
                "transfer-cpu-two-streams",
                "transfer-opencl-two-streams",
            ]
        );
        let loaded = &plots[0].1;
        assert!(loaded.contains("4 KiB by engine to device") && loaded.contains("1 MiB by engine to host"), "{loaded}");
        // A dot for each of four streams of two cases.
        assert_eq!(loaded.matches("<circle").count(), 8, "{loaded}");
        assert!(plots[4].1.contains("1.75") && plots[4].1.contains("mapped to host"), "{}", plots[4].1);
    }
}
