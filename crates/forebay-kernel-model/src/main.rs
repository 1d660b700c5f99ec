//! Runs a program on the model of NVIDIA's kernel driver.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::Parser;
use forebay_kernel_model::{Kernel, objects_of_cuda};
use forebay_rm::fake::{FakeRm, Load};

/// Runs a program on a model of NVIDIA's kernel driver: it sees /dev/nvidiactl and GPUs that take turns. Takes root.
#[derive(Parser)]
#[command(after_help = "Example: two programs that saturate the GPU with kernels of 1 and 5 ms, and the service\n  \
    forebay-kernel-model --kernel-us 1000 --kernel-us 5000 -- forebayd --gpu 0")]
struct Arguments {
    /// GPUs of the machine
    #[arg(long, default_value_t = 1)]
    gpus: usize,
    /// A program beside it that keeps the first GPU busy with kernels of this length, µs; may be said several times
    #[arg(long)]
    kernel_us: Vec<u64>,
    /// A GPU that falls off the bus, and after how many seconds; may be said several times
    #[arg(long, value_name = "GPU=SECONDS", value_parser = fall)]
    lose: Vec<(usize, f64)>,
    /// Write each call into this file
    #[arg(long)]
    calls: Option<PathBuf>,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

fn fall(text: &str) -> Result<(usize, f64), String> {
    let parsed = text.split_once('=').and_then(|(gpu, after)| Some((gpu.parse().ok()?, after.parse().ok()?)));
    let is_time = |after: &f64| (0.0..1e6).contains(after);
    parsed.filter(|(_, after)| is_time(after)).ok_or_else(|| "say GPU=SECONDS, as in 1=5".into())
}

fn run(a: &Arguments) -> std::io::Result<ExitCode> {
    let kernel = Kernel::new(FakeRm::with_gpus(a.gpus.max(1)))?;
    kernel.keep_time();
    if let Some(path) = &a.calls {
        kernel.tell(Box::new(std::fs::File::create(path)?));
    }
    for &(gpu, after) in &a.lose {
        let rm = kernel.rm().clone();
        let fall = move || {
            std::thread::sleep(Duration::from_secs_f64(after));
            rm.lose_gpu(gpu);
        };
        // At once where no time is to pass: whatever is run finds it so.
        if after > 0.0 { drop(std::thread::spawn(fall)) } else { fall() }
    }
    let mut beside = Vec::new();
    for us in &a.kernel_us {
        let mut c = Command::new("/bin/sleep");
        c.arg("86400");
        kernel.put_in(&mut c)?;
        objects_of_cuda(&mut c, 2, 5);
        let child = c.spawn()?;
        kernel.rm().set_load(child.id(), Load::saturating(*us));
        eprintln!("process {}: kernels of {us} µs", child.id());
        beside.push(child);
    }
    let mut c = Command::new(&a.command[0]);
    c.args(&a.command[1..]);
    let status = kernel.put_in(&mut c).and_then(|()| c.status());
    for mut child in beside {
        let held = kernel.rm().gpu_time(child.id()).unwrap_or(0);
        eprintln!("process {}: held the GPU for {} ms", child.id(), held / 1000);
        child.kill()?;
        child.wait()?;
    }
    let status = status?;
    Ok(ExitCode::from(status.code().or(status.signal().map(|s| 128 + s)).unwrap_or(1) as u8))
}

fn main() -> ExitCode {
    run(&Arguments::parse()).unwrap_or_else(|why| {
        eprintln!("forebay-kernel-model: {why}");
        ExitCode::FAILURE
    })
}
