//! `forebay top`: the devices and the programs on them, live.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use forebay_proto::client::Connection;
use forebay_proto::page::DeviceLoad;
use forebay_proto::wire::{Device, Process};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Style, Stylize as _};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Sparkline, Table};

use super::{as_percent, connect, ps};

/// Values of a sparkline.
const HISTORY: usize = 120;
/// Width of a program's bar.
const BAR: usize = 24;

/// Options of `forebay top`.
#[derive(clap::Args)]
#[command(after_help = "A program's bar is what it has had of the device lately; the mark in it is its share.
Keys: q ends. Examples:
  forebay top
  forebay top --once --json")]
pub struct Options {
    /// Print once and end
    #[arg(long)]
    once: bool,
    /// With --once: for machines
    #[arg(long, requires = "once")]
    json: bool,
    /// Milliseconds between two pictures
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(20..=60_000))]
    interval: u64,
}

struct View {
    devices: Vec<(Device, Option<DeviceLoad>)>,
    processes: Vec<Process>,
}

fn look(c: &Connection) -> Result<View, String> {
    let text = |e: forebay_proto::client::Error| e.to_string();
    let global = c.global().map_err(text)?;
    let devices = c.devices().map_err(text)?;
    let devices = devices.into_iter().map(|d| (global.device(d.index.into()), d)).map(|(l, d)| (d, l)).collect();
    Ok(View { devices, processes: c.processes().map_err(text)? })
}

/// Use as a bar with a mark at the share.
fn bar(used: u64, share: u64) -> String {
    let at = |v: u64| ((v as usize * BAR + 500_000) / 1_000_000).min(BAR);
    let (full, mark) = (at(used), at(share).min(BAR - 1));
    let one = |i: usize| match (i < full, i == mark) {
        (_, true) => '┃',
        (true, false) => '█',
        (false, false) => '·',
    };
    (0..BAR).map(one).collect()
}

fn draw(f: &mut Frame<'_>, v: &View, history: &BTreeMap<u8, VecDeque<u64>>) {
    let heights = v.devices.iter().map(|_| Constraint::Length(3)).chain([Constraint::Min(3)]);
    let areas = Layout::vertical(heights).split(f.area());
    for ((d, load), area) in v.devices.iter().zip(areas.iter()) {
        let [head, line, _] =
            Layout::vertical([Constraint::Length(1), Constraint::Length(1), Constraint::Length(1)]).areas(*area);
        let text = match load {
            Some(l) => format!(
                "{}  {} used, {} active, {} waiting; interactive {}, custom {}, normal {}, background {}, suspended {}",
                d.name,
                as_percent(l.utilisation),
                l.active,
                l.waiting,
                l.classes[0],
                l.classes[1],
                l.classes[2],
                l.classes[3],
                l.classes[4]
            ),
            None => described(d, None),
        };
        f.render_widget(Paragraph::new(text), head);
        let values: Vec<u64> = history.get(&d.index).into_iter().flatten().copied().collect();
        let width = usize::from(line.width);
        let last = &values[values.len().saturating_sub(width)..];
        f.render_widget(Sparkline::default().data(last).max(1_000_000).style(Style::new().fg(Color::Green)), line);
    }
    let (devices, width) = ps::device_column(&v.processes, 24);
    let rows = v.processes.iter().zip(devices).map(|(p, device)| {
        let color = match ps::state(p) {
            "running" => Color::Green,
            "waiting" => Color::Yellow,
            _ => Color::DarkGray,
        };
        let cells: Vec<Cell<'_>> = vec![
            p.pid.to_string().into(),
            p.name.clone().into(),
            device.into(),
            p.class.to_string().into(),
            Line::from(Span::styled(bar(p.used, p.share), Style::new().fg(color))).into(),
            as_percent(p.used).into(),
            as_percent(p.share).into(),
            ps::state(p).into(),
        ];
        Row::new(cells)
    });
    let widths = [8, 16, width as u16, 11, BAR as u16, 8, 8, 8].map(Constraint::Length);
    let head = Row::new(["PID", "NAME", "DEVICE", "CLASS", "USED ┃ SHARE", "USED", "SHARE", "STATE"]);
    let table = Table::new(rows, widths).header(head.style(Style::new().bold()));
    if let Some(area) = areas.last() {
        f.render_widget(table, *area);
    }
}

/// A device in a line.
fn described(d: &Device, l: Option<&DeviceLoad>) -> String {
    let Some(l) = l else { return format!("{}: not there any more", d.name) };
    let used = as_percent(l.utilisation);
    format!("{}: {used} used, {} active, {} waiting", d.name, l.active, l.waiting)
}

/// Shows it until q is pressed, or once.
pub fn run(o: &Options) -> Result<(), String> {
    let mut c = connect()?;
    if o.once {
        let (v, memory) = (look(&c)?, ps::Memory::now());
        if o.json {
            let device = |(d, l): &(Device, Option<DeviceLoad>)| {
                let (is_there, l) = (l.is_some(), l.unwrap_or_default());
                serde_json::json!({
                    "name": d.name, "units": d.units, "is_there": is_there, "utilisation": l.utilisation, "active": l.active,
                    "waiting": l.waiting, "classes": l.classes, "task_ns": l.task_ns,
                })
            };
            let all = serde_json::json!({
                "devices": v.devices.iter().map(device).collect::<Vec<_>>(),
                "processes": v.processes.iter().map(|p| ps::json(p, &memory)).collect::<Vec<_>>(),
            });
            crate::say(&serde_json::to_string_pretty(&all).map_err(|e| e.to_string())?);
        } else {
            for (d, l) in &v.devices {
                crate::say(&described(d, l.as_ref()));
            }
            crate::say(&ps::table(&v.processes, &memory));
        }
        return Ok(());
    }
    use std::io::IsTerminal as _;
    if !std::io::stdout().is_terminal() {
        return Err("this is no terminal: use --once".into());
    }
    let mut history: BTreeMap<u8, VecDeque<u64>> = BTreeMap::new();
    let mut terminal = ratatui::init();
    let result = loop {
        let v = match look(&c) {
            Ok(v) => v,
            // The service may have been restarted.
            Err(_) => match connect().map(|again| c = again).and_then(|()| look(&c)) {
                Ok(v) => v,
                Err(e) => break Err(e),
            },
        };
        for (d, l) in &v.devices {
            let h = history.entry(d.index).or_default();
            h.push_back(l.map_or(0, |l| l.utilisation));
            if h.len() > HISTORY {
                h.pop_front();
            }
        }
        if let Err(e) = terminal.draw(|f| draw(f, &v, &history)) {
            break Err(e.to_string());
        }
        match event::poll(Duration::from_millis(o.interval)).and_then(|some| some.then(event::read).transpose()) {
            Ok(Some(Event::Key(k)))
                if k.code == KeyCode::Char('q')
                    || (k.code == KeyCode::Char('c') && k.modifiers.contains(KeyModifiers::CONTROL)) =>
            {
                break Ok(());
            }
            Ok(_) => {}
            Err(e) => break Err(e.to_string()),
        }
    };
    ratatui::restore();
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_proto::wire::{Class, Level, Source};

    #[test]
    fn bars_show_use_and_mark_the_share() {
        assert_eq!(bar(500_000, 250_000), "██████┃█████············");
        assert_eq!(bar(0, 0), format!("┃{}", "·".repeat(BAR - 1)));
        assert!(bar(2_000_000, 2_000_000).ends_with('┃'));
    }

    #[test]
    fn the_picture_names_everybody() {
        let device = Device { name: "cpu".into(), index: 0, units: 2, level: Level::Credit };
        let load = DeviceLoad { at_ns: 1, utilisation: 930_000, active: 2, ..DeviceLoad::default() };
        let process = |pid, name: &str| Process {
            pid,
            uid: 0,
            name: name.into(),
            device: "cpu".into(),
            class: Class::Normal,
            nice: 0,
            active: true,
            waiting: false,
            share: 500_000,
            used: 480_000,
            spent_ns: 1,
            source: Source::Kernel,
            switches: Some(3),
            off_ns: None,
            level: Level::Credit,
            memory_limit: None,
        };
        let v = View { devices: vec![(device, Some(load))], processes: vec![process(11, "one"), process(12, "two")] };
        let mut t = ratatui::Terminal::new(ratatui::backend::TestBackend::new(110, 10)).unwrap();
        t.draw(|f| draw(f, &v, &BTreeMap::from([(0, VecDeque::from([1, 2, 3]))]))).unwrap();
        let text = t.backend().to_string();
        for part in ["93.0 % used", "one", "two", "48.0 %", "50.0 %", "running"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
