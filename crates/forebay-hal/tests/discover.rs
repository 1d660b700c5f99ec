//! Which devices there are: each once, whatever interfaces it has.

mod stand_in;

use forebay_hal::{Kind, PciAddress, discover};

/// What is seen with these kinds, and what is told of the rest.
fn seen(kinds: &[Kind]) -> (Vec<String>, Vec<String>) {
    let (devices, missing) = discover(kinds);
    let named = |d: &std::sync::Arc<dyn forebay_hal::Device>| format!("{} {}", d.info().kind, d.info().name);
    (devices.iter().map(named).collect(), missing.iter().map(|(kind, why)| format!("{kind}: {why}")).collect())
}

/// Names those of which a context was made.
const CONTEXTS: &str = "STAND_IN_CONTEXTS";

/// Runs a test with both stand-ins, of which the first GPU is the same, and with this variable.
fn again(name: &str, variable: impl FnOnce(&std::path::Path) -> (&'static str, String)) {
    let Some(dir) = stand_in::build() else { return };
    let library = dir.join(stand_in::OPENCL).display().to_string();
    let contexts = dir.join(format!("contexts-{name}-{}", std::process::id())).display().to_string();
    let (more, value) = variable(dir);
    let variables =
        [("OPENCL_DYLIB_PATH", &library[..]), ("STAND_IN_BUS", "65"), (CONTEXTS, &contexts), (more, &value)];
    stand_in::again_with(name, &variables);
    std::fs::remove_file(contexts).unwrap();
}

#[test]
fn a_gpu_that_cuda_cannot_compile_for_is_opencls() {
    const NAME: &str = "a_gpu_that_cuda_cannot_compile_for_is_opencls";
    if !stand_in::is_here() {
        return again(NAME, |dir| ("FOREBAY_NVRTC", dir.join("nowhere").display().to_string()));
    }
    let (found, told) = seen(&[Kind::Cuda, Kind::OpenCl]);
    assert_eq!(found, ["opencl first", "opencl second", "opencl third", "opencl processor", "opencl board"]);
    let twice = "(no GPU) at 0000:41:00 is driven through OpenCL";
    assert!(told.iter().any(|t| t.starts_with("cuda") && t.contains(twice)), "{told:?}");
    // For moving data it needs no compiler.
    assert_eq!(seen(&[Kind::Cuda]).0.len(), 1);
}

#[test]
fn a_gpu_that_two_interfaces_show_is_one_device() {
    const NAME: &str = "a_gpu_that_two_interfaces_show_is_one_device";
    if !stand_in::is_here() {
        return again(NAME, |_| ("STAND_IN_DEVICES", "1".into()));
    }
    let contexts = || std::fs::read_to_string(std::env::var_os(CONTEXTS).unwrap()).unwrap();
    let gpu = "cuda stand-in on the host (no GPU)";
    for kinds in [[Kind::OpenCl, Kind::Cuda], [Kind::Cuda, Kind::OpenCl]] {
        let (mut found, told) = seen(&kinds);
        assert_eq!(found.iter().position(|d| d == gpu), Some(if kinds[0] == Kind::Cuda { 0 } else { 4 }), "{found:?}");
        found.retain(|d| d != gpu);
        assert_eq!(found, ["opencl second", "opencl third", "opencl processor", "opencl board"]);
        let [first, again] = &told[..] else { panic!("{told:?}") };
        assert!(first.contains("first at 0000:41:00 is driven through CUDA"), "{first}");
        assert!(again.contains("second again at 0000:61:00 is driven through another platform"), "{again}");
    }
    assert_eq!(contexts(), "second\nthird\nprocessor\nboard\n", "one that is left out takes no memory");
    // Who wants OpenCL has it, on all GPUs, and each is where it says.
    let (found, told) = seen(&[Kind::OpenCl]);
    assert_eq!(found, ["opencl first", "opencl second", "opencl third", "opencl processor", "opencl board"]);
    assert!(told.len() == 1 && told[0].contains("second again"), "{told:?}");
    let places: Vec<_> = discover(&[Kind::OpenCl]).0.iter().map(|d| d.info().pci).collect();
    let at = |domain, bus| Some(PciAddress { domain, bus, device: 0 });
    assert_eq!(places, [at(0, 0x41), at(0, 0x61), at(1, 0x61), None, None]);
    // What is neither GPU nor CPU has cores of its own.
    let cores: Vec<_> = discover(&[Kind::OpenCl]).0.iter().map(|d| d.info().is_cpu).collect();
    assert_eq!(cores, [false, false, false, true, false]);
    let compile: Vec<_> = discover(&[Kind::OpenCl]).0.iter().map(|d| d.compiles().is_ok()).collect();
    assert_eq!(compile, [true, true, true, true, false]);
}
