//! What else a machine may be doing while data is moved: processes of their own, as in the paper.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};

/// Kinds of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Load {
    /// Twice as many computing threads as there are cores
    Cpu,
    /// A thread a core that writes through memory larger than any cache
    Memory,
    /// Pairs of threads that send each other small messages through pipes, in the manner of hackbench
    Pipes,
}

impl Load {
    /// All of them.
    pub const ALL: [Load; 3] = [Load::Cpu, Load::Memory, Load::Pipes];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Load::Cpu => "full CPU load",
            Load::Memory => "memory pressure",
            Load::Pipes => "a storm of pipes",
        }
    }
}

/// Memory that a thread writes through.
const MEMORY: usize = 96 << 20;
/// Pairs of threads with a pipe in each direction.
const PAIRS: usize = 20;
const MESSAGE: usize = 100;

/// A process that is such a load, until it is dropped.
pub struct Running(Child);

impl Running {
    /// Starts it, and waits until it runs.
    pub fn start(load: Load) -> Result<Self, String> {
        let exe = std::env::current_exe().map_err(|e| e.to_string())?;
        let name = format!("{load:?}").to_lowercase();
        let mut command = Command::new(exe);
        command.args(["bench", "transfer-load", &name]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("cannot start a load: {e}"))?;
        let mut ready = [0u8; 1];
        let said = child.stdout.as_mut().map(|o| o.read_exact(&mut ready));
        let running = Running(child);
        match said {
            Some(Ok(())) => Ok(running),
            _ => Err(format!("the load {name} did not start")),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Is the load, until whoever started it has gone.
pub fn be(load: Load) -> Result<(), String> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    match load {
        Load::Cpu => (0..2 * cores).for_each(|_| {
            std::thread::spawn(|| {
                let mut x = 1u64;
                loop {
                    x = std::hint::black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
                }
            });
        }),
        Load::Memory => (0..cores).for_each(|_| {
            std::thread::spawn(|| {
                let mut memory = vec![1u8; MEMORY];
                for value in (0..=u8::MAX).cycle() {
                    memory.fill(value);
                    std::hint::black_box(&mut memory);
                }
            });
        }),
        Load::Pipes => {
            for _ in 0..PAIRS {
                let text = |e: std::io::Error| e.to_string();
                let ((mut a_in, mut a_out), (mut b_in, mut b_out)) =
                    (std::io::pipe().map_err(text)?, std::io::pipe().map_err(text)?);
                std::thread::spawn(move || {
                    let mut m = [0u8; MESSAGE];
                    while a_in.read_exact(&mut m).and_then(|()| b_out.write_all(&m)).is_ok() {}
                });
                std::thread::spawn(move || {
                    let mut m = [0u8; MESSAGE];
                    while a_out.write_all(&m).and_then(|()| b_in.read_exact(&mut m)).is_ok() {}
                });
            }
        }
    }
    std::io::stdout().write_all(b"!").and_then(|()| std::io::stdout().flush()).map_err(|e| e.to_string())?;
    // Whoever started it holds the other end.
    let _ = std::io::stdin().read(&mut [0u8; 1]);
    Ok(())
}
