//! The service's figures for Prometheus, as text (exposition format 0.0.4).

use std::fmt::Write as _;

use forebay_proto::page::DeviceLoad;
use forebay_proto::wire::{Device, Process};

/// A value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// All figures.
pub fn text(up_ms: u64, devices: &[(Device, DeviceLoad)], processes: &[Process]) -> String {
    let mut out = String::new();
    let mut family = |name: &str, kind: &str, help: &str, lines: &[(String, f64)]| {
        let _ = writeln!(out, "# HELP forebay_{name} {help}\n# TYPE forebay_{name} {kind}");
        for (labels, value) in lines {
            let _ = writeln!(out, "forebay_{name}{labels} {value}");
        }
    };
    let part = |millionths: u64| millionths as f64 / 1e6;
    family("up_seconds", "gauge", "Time since the service started.", &[(String::new(), up_ms as f64 / 1e3)]);
    let of = |f: &dyn Fn(&DeviceLoad) -> f64| -> Vec<(String, f64)> {
        devices.iter().map(|(d, l)| (format!("{{device=\"{}\"}}", escaped(&d.name)), f(l))).collect()
    };
    family(
        "device_up",
        "gauge",
        "1, or 0 for a device that is not there any more.",
        &of(&|l| f64::from(u8::from(l.at_ns > 0))),
    );
    family("device_utilisation_ratio", "gauge", "Part of the device used lately.", &of(&|l| part(l.utilisation)));
    family("device_active_programs", "gauge", "Programs that use the device.", &of(&|l| l.active as f64));
    family("device_waiting_programs", "gauge", "Programs that wait for it.", &of(&|l| l.waiting as f64));
    let each = |f: &dyn Fn(&Process) -> f64| -> Vec<(String, f64)> {
        let labels = |p: &Process| {
            let (name, device) = (escaped(&p.name), escaped(&p.device));
            format!("{{device=\"{device}\",pid=\"{}\",name=\"{name}\",class=\"{}\"}}", p.pid, p.class)
        };
        processes.iter().map(|p| (labels(p), f(p))).collect()
    };
    family("program_used_seconds_total", "counter", "Time had of the device.", &each(&|p| p.spent_ns as f64 / 1e9));
    family("program_used_ratio", "gauge", "Part of the device had lately.", &each(&|p| part(p.used)));
    family("program_share_ratio", "gauge", "Part that it would get now.", &each(&|p| part(p.share)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_proto::wire::{Class, Level, Source};

    #[test]
    fn figures_are_lines_that_names_cannot_break() {
        let device = Device { name: "cpu".into(), index: 0, units: 2, level: Level::Credit };
        let load = DeviceLoad { at_ns: 1, utilisation: 250_000, active: 3, ..DeviceLoad::default() };
        let program = Process {
            pid: 7,
            uid: 0,
            name: "a\"} 1\nforged 2\\".into(),
            device: "cpu".into(),
            class: Class::Custom(1),
            nice: 0,
            active: true,
            waiting: false,
            share: 500_000,
            used: 100_000,
            spent_ns: 1_500_000_000,
            source: Source::Kernel,
            switches: Some(3),
            off_ns: None,
            level: Level::Credit,
            memory_limit: None,
        };
        let t = text(2500, &[(device, load)], &[program]);
        assert!(t.contains("forebay_up_seconds 2.5\n"));
        assert!(t.contains("forebay_device_utilisation_ratio{device=\"cpu\"} 0.25\n"));
        assert!(t.contains(
            "forebay_program_used_seconds_total{device=\"cpu\",pid=\"7\",name=\"a\\\"} 1\\nforged 2\\\\\",class=\"custom\"} 1.5\n"
        ));
        assert!(t.lines().all(|l| l.starts_with("# ") || l.starts_with("forebay_")), "{t}");
    }
}
