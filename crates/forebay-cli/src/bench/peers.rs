//! Programs of others that we are measured against: built from `benches/peers` when they are wanted, with what is there.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A peer's program. Its file goes with it.
pub struct Peer {
    dir: TempDir,
}

impl Peer {
    fn new() -> Result<Self, String> {
        Ok(Peer { dir: TempDir::with_prefix("forebay-peer-").map_err(|e| e.to_string())? })
    }

    /// Where the program is.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("program")
    }

    /// Runs the compiler, which is to make the program.
    fn made_by(self, mut compiler: Command) -> Result<Self, String> {
        match compiler.output() {
            Ok(o) if o.status.success() => Ok(self),
            Ok(o) => {
                let said = String::from_utf8_lossy(&o.stderr).into_owned();
                Err(said.lines().find(|l| l.contains("error")).unwrap_or("it does not compile").to_owned())
            }
            Err(e) => Err(format!("{}: {e}", compiler.get_program().to_string_lossy())),
        }
    }
}

/// A file of `benches/peers`.
pub fn source(name: &str) -> Result<PathBuf, String> {
    let places = ["benches/peers", "peers"];
    #[cfg(test)]
    let places = places.into_iter().chain([concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/peers")]);
    let file = places.into_iter().map(|d| Path::new(d).join(name)).find(|p| p.exists());
    file.ok_or_else(|| format!("{name} is not here (run from the checkout)"))
}

/// Builds a peer with what a package asks for, and `more`.
pub fn build(name: &str, compiler: &str, package: &str, more: &[&str]) -> Result<Peer, String> {
    let (file, peer) = (source(name)?, Peer::new()?);
    let flags = Command::new("pkg-config").args(["--cflags", "--libs", package]).output();
    let flags = flags.ok().filter(|o| o.status.success()).ok_or_else(|| format!("{package} is not installed"))?;
    let flags = String::from_utf8_lossy(&flags.stdout).into_owned();
    let mut c = Command::new(compiler);
    c.args(["-O2", "-o"]).arg(peer.path()).arg(file).args(flags.split_whitespace());
    // StarPU's headers say that OpenCL 1.2 is deprecated.
    c.arg("-w").args(more);
    peer.made_by(c)
}

/// `nvcc` by `FOREBAY_NVCC`, on the path, or where its installer puts it; and where its libraries are.
fn nvcc() -> Result<Command, String> {
    let by_name = std::env::var_os("FOREBAY_NVCC").map(PathBuf::from);
    let places = by_name.into_iter().chain(["nvcc".into(), "/usr/local/cuda/bin/nvcc".into()]);
    let runs = |p: &PathBuf| Command::new(p).arg("--version").output().is_ok_and(|o| o.status.success());
    let found = places.into_iter().find(runs).ok_or("no nvcc is here (FOREBAY_NVCC says where it is)")?;
    let mut c = Command::new(&found);
    // Packages of single parts have the libraries in `lib`, where nvcc does not look.
    if let Some(home) = found.parent().and_then(Path::parent) {
        c.arg("-L").arg(home.join("lib"));
    }
    Ok(c)
}

/// Builds a peer in CUDA C++ for `architecture`, behind `text`.
pub fn build_cuda(name: &str, text: &str, architecture: &str) -> Result<Peer, String> {
    let (file, peer, mut c) = (source(name)?, Peer::new()?, nvcc()?);
    let own = std::fs::read_to_string(file).map_err(|e| e.to_string())?;
    let whole = peer.dir.path().join("program.cu");
    std::fs::write(&whole, format!("{text}\n{own}")).map_err(|e| e.to_string())?;
    // Kernels that steer their graph need the device's part of the runtime, and that is linked.
    c.arg("-O3").arg("-rdc=true").arg(format!("-arch={architecture}"));
    c.arg("-o").arg(peer.path()).arg(whole).arg("-lcudadevrt");
    peer.made_by(c)
}
