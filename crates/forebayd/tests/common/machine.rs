//! A machine with one GPU or several, a model whose time passes as fast as the clock's, and services on it: they ask it over
//! a socket, or, as on hardware, by the driver's files and ioctls.

use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_kernel_model::{Kernel, objects_of_cuda};
use forebay_proto::wire::Level;
use forebay_rm::fake::{FakeRm, Load, remote};

use super::Service;

/// A machine with one GPU, or several.
pub struct Machine {
    pub rm: FakeRm,
    pub path: PathBuf,
    /// The driver's files, where the service is to use these.
    pub kernel: Option<Arc<Kernel>>,
    stop: Arc<AtomicBool>,
    pub programs: Vec<Child>,
    /// One machine with files at a time: its service would find the programs of others.
    _turn: Option<MutexGuard<'static, ()>>,
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
        Self::of(rm, path, None)
    }

    /// One whose services and programs use the driver's files and calls; none without root.
    pub fn with_the_drivers_files(gpus: usize) -> Option<Self> {
        let rm = FakeRm::with_gpus(gpus);
        match Kernel::new(rm.clone()) {
            Ok(kernel) => Some(Self::of(rm, PathBuf::new(), Some(Arc::new(kernel)))),
            Err(why) => {
                eprintln!("skipped: no model of the kernel's driver: {why}");
                None
            }
        }
    }

    fn of(rm: FakeRm, path: PathBuf, kernel: Option<Arc<Kernel>>) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = kernel.is_some().then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
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
        Machine { rm, path, kernel, stop, programs: Vec::new(), _turn: turn }
    }

    /// A process that uses the GPU.
    pub fn program(&mut self, kernel_us: u64) -> u32 {
        self.program_with(Load::saturating(kernel_us))
    }

    pub fn program_with(&mut self, load: Load) -> u32 {
        let mut command = Command::new("/bin/sleep");
        command.arg("600");
        if let Some(kernel) = &self.kernel {
            kernel.put_in(&mut command).unwrap();
            objects_of_cuda(&mut command, 2, 5);
        }
        let child = command.spawn().unwrap();
        let pid = child.id();
        match self.kernel {
            Some(_) => self.rm.set_load(pid, load),
            None => self.rm.start(pid, 2, 5, load),
        }
        self.programs.push(child);
        pid
    }

    pub fn service(&self) -> Service {
        match &self.kernel {
            Some(kernel) => Service::start_on(kernel.clone(), &["--gpu", "all"]),
            None => Service::start(&["--gpu", "0", "--fake-rm", self.path.to_str().unwrap()]),
        }
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
