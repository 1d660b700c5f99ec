//! NVIDIA's run-time compiler, opened at run time.
//!
//! It is looked for in `$FOREBAY_NVRTC` (a file or a folder), by its usual names, beside a CUDA toolkit, and where PyPI's
//! packages put it (`nvidia-cuda-nvrtc`, which PyTorch brings along): in the active environment, for the user, for all. Its
//! `builtins` library lies beside it and is loaded by absolute path first, since the compiler otherwise fails with
//! BUILTIN_OPERATION_FAILURE when it is not on the loader's path.
//!
//! Of several versions the newest is taken whose code the driver is sure to take: one of the driver's own CUDA version or an
//! older one. For a GPU that is newer than the compiler it makes PTX, which the driver compiles further.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::{Error, Kind, Result};

type Program = *mut c_void;

macro_rules! table {
    ($($field:ident / $symbol:literal : $ty:ty;)*) => {
        /// The compiler's functions. Its libraries stay loaded for the life of the process.
        pub struct Nvrtc {
            $($field: $ty,)*
        }

        impl Nvrtc {
            fn bind(library: libloading::Library) -> Result<Nvrtc> {
                let nvrtc = Nvrtc {
                    // SAFETY: nvrtc.h declares the functions with these types.
                    $($field: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }
                        .map_err(|_| Error::NoSymbol { library: "libnvrtc", symbol: $symbol })?,)*
                };
                std::mem::forget(library);
                Ok(nvrtc)
            }
        }

        /// The functions' names and what they are taken for.
        #[cfg(test)]
        pub(super) fn types() -> Vec<(&'static str, &'static str)> {
            vec![$(($symbol, std::any::type_name::<$ty>())),*]
        }
    };
}

table! {
    version / "nvrtcVersion": unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    create / "nvrtcCreateProgram": unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int,
        *const *const c_char, *const *const c_char) -> c_int;
    destroy / "nvrtcDestroyProgram": unsafe extern "C" fn(*mut Program) -> c_int;
    compile / "nvrtcCompileProgram": unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
    log_size / "nvrtcGetProgramLogSize": unsafe extern "C" fn(Program, *mut usize) -> c_int;
    log / "nvrtcGetProgramLog": unsafe extern "C" fn(Program, *mut c_char) -> c_int;
    cubin_size / "nvrtcGetCUBINSize": unsafe extern "C" fn(Program, *mut usize) -> c_int;
    cubin / "nvrtcGetCUBIN": unsafe extern "C" fn(Program, *mut c_char) -> c_int;
    ptx_size / "nvrtcGetPTXSize": unsafe extern "C" fn(Program, *mut usize) -> c_int;
    ptx / "nvrtcGetPTX": unsafe extern "C" fn(Program, *mut c_char) -> c_int;
    known / "nvrtcGetNumSupportedArchs": unsafe extern "C" fn(*mut c_int) -> c_int;
    architectures / "nvrtcGetSupportedArchs": unsafe extern "C" fn(*mut c_int) -> c_int;
}

/// Major versions of NVRTC that are looked for, and what its library is called.
const VERSIONS: [(u32, &str); 3] = [(13, "13"), (12, "12"), (11, "11.2")];
/// More architectures than any NVRTC knows.
const MAX_ARCHITECTURES: usize = 256;

/// The names of its library: with a driver of this major version those that suit it come first, the newest of them first.
fn names(driver: Option<u32>) -> Vec<String> {
    let mut versions = VERSIONS;
    versions.sort_by_key(|(v, _)| (driver.is_some_and(|d| *v > d), std::cmp::Reverse(*v)));
    versions.iter().map(|(_, name)| format!("libnvrtc.so.{name}")).collect()
}

/// The major version of CUDA that the driver has, if there is one.
fn driver() -> Option<u32> {
    let (d, mut version) = (super::sys::driver().ok()?, 0);
    // SAFETY: `version` is valid; the call needs no initialisation.
    let code = unsafe { (d.cuDriverGetVersion)(&mut version) };
    (code == super::sys::SUCCESS).then_some(version as u32 / 1000)
}

/// For which architecture of those that a compiler knows code is made for compute capability `cc`, and whether as PTX: for the
/// newest one that is older, where it is not known itself.
fn target(known: &[c_int], cc: u32) -> Option<(u32, bool)> {
    let known = known.iter().filter_map(|a| u32::try_from(*a).ok());
    let best = known.filter(|a| *a <= cc).max()?;
    Some((best, best != cc))
}

/// Files to try: what the variable names and nothing else, or what the loader knows and all usual places.
fn candidates(driver: Option<u32>) -> Vec<PathBuf> {
    let names = names(driver);
    if let Some(p) = std::env::var_os("FOREBAY_NVRTC").filter(|p| !p.is_empty()).map(PathBuf::from) {
        return if p.is_dir() { names.iter().map(|n| p.join(n)).collect() } else { vec![p] };
    }
    let mut out: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let toolkit = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).map(|d| d.join("lib64"));
    let usual = ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/usr/lib/x86_64-linux-gnu"];
    let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable);
    let prefixes = prefixes.chain(variable("HOME").map(|h| h.join(".local"))).filter(|p| is_own(p));
    let prefixes: Vec<PathBuf> = prefixes.chain(["/usr/local", "/usr", "/opt/conda"].map(PathBuf::from)).collect();
    let packages = prefixes.iter().flat_map(|p| std::iter::once(p.join("lib")).chain(in_packages(p)));
    for dir in toolkit.chain(usual.map(PathBuf::from)).chain(packages) {
        out.extend(names.iter().map(|n| dir.join(n)));
    }
    out
}

/// Whether a folder is this user's: root does not load what another user's environment names.
fn is_own(dir: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let user = rustix::process::geteuid().as_raw();
    std::fs::metadata(dir).is_ok_and(|m| m.uid() == user || m.uid() == 0)
}

/// Folders of NVIDIA's packages for Python beneath a prefix: the newest first, of Python's and of theirs.
fn in_packages(prefix: &Path) -> Vec<PathBuf> {
    let below = |dir: PathBuf, wanted: fn(&str) -> bool| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut found: Vec<PathBuf> =
            entries.filter(|e| e.file_name().to_str().is_some_and(wanted)).map(|e| e.path()).collect();
        found.sort();
        found.reverse();
        found
    };
    let pythons = below(prefix.join("lib"), |n| n.starts_with("python3"));
    let sites = pythons.into_iter().flat_map(|p| ["site-packages", "dist-packages"].map(|s| p.join(s).join("nvidia")));
    // `cuda_nvrtc` up to 12, `cu13` from then on.
    let has_it = |n: &str| n == "cuda_nvrtc" || n.strip_prefix("cu").is_some_and(|v| v.parse::<u32>().is_ok());
    let packages = sites.flat_map(|s| below(s, has_it));
    packages.map(|p| p.join("lib")).filter(|p| p.is_dir()).collect()
}

impl Nvrtc {
    /// The compiler, opened once.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] naming what was tried.
    pub fn get() -> Result<&'static Nvrtc> {
        static NVRTC: OnceLock<Result<Nvrtc>> = OnceLock::new();
        NVRTC.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Nvrtc> {
        let mut why = String::new();
        for path in candidates(driver()) {
            let mut libraries = Vec::new();
            if let Some(dir) = path.parent().filter(|d| !d.as_os_str().is_empty()) {
                for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                    let name = entry.file_name();
                    let name = name.to_string_lossy();
                    if name.starts_with("libnvrtc-builtins.so") {
                        // SAFETY: a data library without initialisers of note.
                        libraries.extend(unsafe { libloading::Library::new(entry.path()) });
                        break;
                    }
                }
            }
            // SAFETY: loading the compiler runs its initialisers, as for every program that links it.
            match unsafe { libloading::Library::new(&path) } {
                Ok(library) => {
                    // The compiler needs its builtins for as long as it is there.
                    libraries.into_iter().for_each(std::mem::forget);
                    return Self::bind(library);
                }
                // The first that was tried says most, unless a later one is there and does not work.
                Err(e) if why.is_empty() || path.is_file() => why = e.to_string(),
                Err(_) => {}
            }
        }
        Err(Error::NoLibrary {
            kind: Kind::Cuda,
            library: "libnvrtc.so.13 / .12 / .11.2".into(),
            why: format!("{why} (pip install nvidia-cuda-nvrtc, or FOREBAY_NVRTC=<its folder>)"),
        })
    }

    /// Major and minor version.
    pub fn version(&self) -> (i32, i32) {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are valid.
        unsafe { (self.version)(&mut major, &mut minor) };
        (major, minor)
    }

    /// The architectures that it knows; none where it does not say.
    fn known(&self) -> Vec<c_int> {
        let (mut n, mut all) = (0, [0; MAX_ARCHITECTURES]);
        // SAFETY: both are valid, and there is room for that many.
        unsafe {
            if (self.known)(&mut n) != 0
                || n < 0
                || n as usize > all.len()
                || (self.architectures)(all.as_mut_ptr()) != 0
            {
                return Vec::new();
            }
        }
        all[..n as usize].to_vec()
    }

    /// Compiles CUDA C++ for compute capability `cc` (90 for Hopper) with these options: to a cubin, or to PTX, which ends in a
    /// NUL, for a device that the compiler does not know yet.
    ///
    /// # Errors
    /// [`Error::Compile`] with the log and the source lines it names.
    pub fn compile(&self, source: &str, entry: &str, cc: u32, options: &[&str], device: &str) -> Result<Vec<u8>> {
        let failed = |log: String| Error::Compile { device: device.into(), entry: entry.into(), log };
        let text = CString::new(source).map_err(|_| failed("the source contains a NUL byte".into()))?;
        let name = c"kernel.cu";
        let mut p: Program = std::ptr::null_mut();
        // SAFETY: strings are NUL-terminated; no headers are passed.
        let made =
            unsafe { (self.create)(&mut p, text.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null()) };
        if made != 0 {
            return Err(failed(format!("nvrtcCreateProgram: status {made}")));
        }
        let _guard = Destroy(self, p);
        let known = self.known();
        let (arch, as_ptx) = match target(&known, cc) {
            Some(target) => target,
            None if known.is_empty() => (cc, false),
            None => {
                let (major, minor) = self.version();
                return Err(failed(format!("NVRTC {major}.{minor} makes no code for a device as old as sm_{cc}")));
            }
        };
        let arch = format!("--gpu-architecture={}_{arch}", if as_ptx { "compute" } else { "sm" });
        let arch = CString::new(arch).unwrap_or_default();
        let options: Vec<CString> = options.iter().filter_map(|o| CString::new(*o).ok()).collect();
        let mut pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        pointers.push(arch.as_ptr());
        // SAFETY: `pointers` holds that many valid strings.
        let status = unsafe { (self.compile)(p, pointers.len() as c_int, pointers.as_ptr()) };
        if status != 0 {
            let mut n = 0usize;
            // SAFETY: the size is that of the log that follows.
            let log = unsafe {
                (self.log_size)(p, &mut n);
                let mut log = vec![0u8; n + 1];
                (self.log)(p, log.as_mut_ptr().cast());
                CStr::from_bytes_until_nul(&log).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
            };
            return Err(failed(format!("status {status}\n{}", crate::opencl::annotate(&log, source))));
        }
        let (size, get) = if as_ptx { (self.ptx_size, self.ptx) } else { (self.cubin_size, self.cubin) };
        let mut n = 0usize;
        // SAFETY: as above.
        unsafe {
            if size(p, &mut n) != 0 || n == 0 {
                return Err(failed("the compiler made no code".into()));
            }
            let mut out = vec![0u8; n];
            get(p, out.as_mut_ptr().cast());
            Ok(out)
        }
    }
}

struct Destroy<'a>(&'a Nvrtc, Program);

impl Drop for Destroy<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `create`, destroyed once.
        unsafe { (self.0.destroy)(&mut self.1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::portable;

    #[test]
    fn packages_for_python_are_found_the_newest_first() {
        let root = std::env::temp_dir().join(format!("forebay-nvrtc-{}", std::process::id()));
        let make = |at: &str| {
            let dir = root.join("lib").join(at);
            std::fs::create_dir_all(&dir).unwrap();
            dir
        };
        let old = make("python3.11/site-packages/nvidia/cuda_nvrtc/lib");
        let new = make("python3.13/site-packages/nvidia/cu13/lib");
        make("python3.13/site-packages/nvidia/cudnn/lib");
        make("python3.13/site-packages/numpy/lib");
        make("python2.7/site-packages/nvidia/cu13/lib");
        make("python3.12/dist-packages/nvidia/cu14");
        assert_eq!(in_packages(&root), [new, old]);
        assert!(in_packages(&root.join("nothing")).is_empty());
        assert!(is_own(&root) && !is_own(&root.join("nothing")));
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn the_version_suits_the_driver_and_the_architecture_the_device() {
        assert_eq!(names(None), ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"]);
        assert_eq!(names(Some(13)), names(None));
        assert_eq!(names(Some(12)), ["libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so.13"]);
        let known = [75, 80, 90, 100];
        assert_eq!(target(&known, 90), Some((90, false)));
        assert_eq!(target(&known, 89), Some((80, true)));
        assert_eq!(target(&known, 103), Some((100, true)));
        assert_eq!((target(&known, 70), target(&[], 90)), (None, None));
    }

    #[test]
    fn compiles_without_a_gpu_and_reports_the_source_line() {
        let nvrtc = match Nvrtc::get() {
            Ok(n) => n,
            Err(e) => {
                eprintln!("skipped: {e}");
                return;
            }
        };
        let good = format!(
            "{}KERNEL void f(GLOBAL float *a, uint n) {{ if (gid_x() < n) a[gid_x()] *= 2; }}",
            portable::CUDA_PRELUDE
        );
        let compile = |text: &str, cc| nvrtc.compile(text, "f", cc, &portable::NVRTC_OPTIONS_HERE, "test");
        let cubin = compile(&good, 90).unwrap();
        assert_eq!(&cubin[..4], b"\x7fELF");
        // One that nobody has built yet, and one that nobody has any more.
        let ptx = compile(&good, 9999).unwrap();
        assert!(ptx.starts_with(b"//") && ptx.ends_with(&[0]), "{}", String::from_utf8_lossy(&ptx));
        let old = compile(&good, 20).unwrap_err().to_string();
        assert!(old.contains("as old as sm_20"), "{old}");
        let bad = format!("{}KERNEL void f(GLOBAL float *a) {{\n  a[0] = nonsense;\n}}", portable::CUDA_PRELUDE);
        let e = compile(&bad, 90).unwrap_err().to_string();
        assert!(e.contains("nonsense") && e.contains("source line 2"), "{e}");
    }
}
