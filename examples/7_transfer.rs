//! Moving data by hand: the transfer engine takes the way that is fastest for the size, and a real-time stream does it
//! with real-time priority, from locked memory. Graphs move their data by the same engine.

use std::time::Duration;

use forebay::transfer::{Budget, Direction, Engine, Host, Range};
use forebay::{Kind, Result};

/// Runs the example.
pub fn main() -> Result<()> {
    // An accelerator if there is one.
    let (devices, _) = forebay::hal::discover(&[Kind::Cpu, Kind::OpenCl, Kind::Cuda]);
    let Some(device) = devices.into_iter().next_back() else { return Ok(()) };
    println!("{}: {}", device.info().kind, device.info().name);
    // The first time on a machine this measures for two seconds.
    let engine = Engine::open(device)?;
    for bytes in [64, 64 << 10, 16 << 20] {
        let plan = engine.plan(Direction::ToDevice, bytes, Host::Pinned);
        let ways: Vec<_> = plan.pieces.iter().map(|p| p.way.name()).collect();
        println!("{bytes} B go by {}, in about {:.1} µs", ways.join(" and "), plan.cost.median as f64 / 1e3);
    }

    let memory = engine.memory(1 << 20)?;
    let mut stream = engine.stream()?;
    stream.write(&memory, 0, &b"hello, device"[..])?;
    let mut back = [0u8; 6];
    stream.read(&memory, 7, &mut back[..])?;
    assert_eq!(&back, b"device");

    // Many small pieces for one wait.
    let pieces: Vec<_> = (0..100).map(|i| Range { host: i * 10, device: i * 1000, bytes: 10 }).collect();
    stream.write_batch(&memory, &vec![7u8; 1000], &pieces)?;

    // Begun now, awaited later.
    let mut image = engine.pinned(1 << 19)?;
    image.fill(9);
    let under_way = stream.start_write(&memory, 1 << 19, image)?;
    let image = stream.finish(under_way)?;
    assert_eq!(image[0], 9);

    let mut urgent = engine.real_time(Budget::default())?;
    println!("real time: {}", urgent.protection().scheduling);
    let mut frame = urgent.pinned(4096)?;
    urgent.stream().set_deadline(Some(Duration::from_millis(1)));
    urgent.write(&memory, 0, &frame)?;
    urgent.read(&memory, 0, &mut frame)?;
    Ok(())
}
