//! A machine with one GPU or several, a model whose time passes as fast as the clock's, and services on it.

use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_proto::wire::Level;
use forebay_rm::fake::{FakeRm, Load, remote};

use super::Service;

/// A machine with one GPU, or several.
pub struct Machine {
    pub rm: FakeRm,
    pub path: PathBuf,
    stop: Arc<AtomicBool>,
    pub programs: Vec<Child>,
}

impl Machine {
    pub fn new(name: &str) -> Self {
        Self::with_gpus(name, 1)
    }

    /// A machine with so many of them.
    pub fn with_gpus(name: &str, gpus: usize) -> Self {
        let rm = FakeRm::with_gpus(gpus);
        let path = std::env::temp_dir().join(format!("forebay-rm-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        remote::serve(rm.clone(), &path).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (gpu, end) = (rm.clone(), stop.clone());
        std::thread::spawn(move || {
            let (begun, mut ran) = (Instant::now(), 0);
            while !end.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_micros(500));
                let now = begun.elapsed().as_micros() as u64;
                gpu.run(now - ran);
                ran = now;
            }
        });
        Machine { rm, path, stop, programs: Vec::new() }
    }

    /// A process that uses the GPU.
    pub fn program(&mut self, kernel_us: u64) -> u32 {
        self.program_with(Load::saturating(kernel_us))
    }

    pub fn program_with(&mut self, load: Load) -> u32 {
        let child = Command::new("/bin/sleep").arg("600").spawn().unwrap();
        let pid = child.id();
        self.rm.start(pid, 2, 5, load);
        self.programs.push(child);
        pid
    }

    pub fn service(&self) -> Service {
        Service::start(&["--gpu", "0", "--fake-rm", self.path.to_str().unwrap()])
    }

    pub fn suspended(&self) -> Vec<u32> {
        self.programs.iter().map(Child::id).filter(|p| self.rm.is_suspended(*p)).collect()
    }

    /// What each process gets of the GPU's time, in percent of the sum.
    pub fn shares(&self, pids: &[u32], time: Duration) -> Vec<f64> {
        let now = || pids.iter().map(|p| self.rm.gpu_time(*p).unwrap_or(0)).collect::<Vec<_>>();
        let before = now();
        std::thread::sleep(time);
        let used: Vec<f64> = now().iter().zip(before).map(|(a, b)| (a - b) as f64).collect();
        used.iter().map(|u| u / used.iter().sum::<f64>() * 100.0).collect()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for p in &mut self.programs {
            let _ = p.kill();
            let _ = p.wait();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether all of these processes are steered.
pub fn known(s: &Service, pids: &[u32]) -> bool {
    let all = s.connect().processes().unwrap();
    pids.iter().all(|p| all.iter().any(|q| q.pid == *p && q.level == Level::Hardware))
}
