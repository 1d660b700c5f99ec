//! NVIDIA's own compiler takes the device code, too: for programs that are built with it. Where there is a GPU they run.

use std::path::{Path, PathBuf};
use std::process::Command;

use forebay::hal::{Kind, discover};
use forebay::resident::Builder;

/// Turing to Blackwell.
const ARCHITECTURES: [&str; 4] = ["sm_75", "sm_80", "sm_90", "sm_100"];

/// A folder of the checkout, or of the bundle that the tests are in.
fn folder(name: &str) -> PathBuf {
    let places = [concat!(env!("CARGO_MANIFEST_DIR"), "/../.."), "."].map(|p| Path::new(p).join(name));
    places.into_iter().find(|p| p.exists()).unwrap_or_else(|| panic!("there is no folder {name} here"))
}

/// `nvcc` by `FOREBAY_NVCC`, on the path, or where its installer puts it; and where its libraries are.
fn nvcc() -> Option<Command> {
    let by_name = std::env::var_os("FOREBAY_NVCC").map(PathBuf::from);
    let places = by_name.into_iter().chain(["nvcc".into(), "/usr/local/cuda/bin/nvcc".into()]);
    let runs = |p: &PathBuf| Command::new(p).arg("--version").output().is_ok_and(|o| o.status.success());
    let Some(found) = places.into_iter().find(runs) else {
        eprintln!("skipped: no nvcc here (FOREBAY_NVCC says where it is)");
        return None;
    };
    let mut c = Command::new(&found);
    // Packages of single parts have the libraries in `lib`, where nvcc does not look.
    if let Some(home) = found.parent().and_then(Path::parent) {
        c.arg("-L").arg(home.join("lib"));
    }
    c.args(["-Werror", "all-warnings", "-I"]).arg(folder("device"));
    Some(c)
}

fn compile(mut c: Command) {
    let out = c.output().unwrap();
    assert!(out.status.success(), "{c:?}\n{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn the_grid_and_the_copying_kernel_compile() {
    let dir = tempfile::tempdir().unwrap();
    let grid = Builder::new("TASK(f) { *(u64 *)fb_result(c) = t->first; }\nTASK_PER_THREAD(g) {}\nTASK_PER_WARP(h) {}");
    let copy = include_str!("../../../device/copy.cu");
    for (name, text) in [("grid", grid.functions(["f", "g", "h"]).heap(1 << 20).text()), ("copy", copy.into())] {
        let source = dir.path().join(name).with_extension("cu");
        std::fs::write(&source, text).unwrap();
        for architecture in ARCHITECTURES {
            let Some(mut c) = nvcc() else { return };
            c.arg("-cubin")
                .arg(format!("-arch={architecture}"))
                .arg("-o")
                .arg(source.with_extension("cubin"))
                .arg(&source);
            compile(c);
        }
    }
}

/// A multiprocessor has 65 536 registers: those of the largest block that may be asked for are not more.
#[test]
fn the_largest_blocks_have_room() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("grid.cu");
    let grid = Builder::new("TASK(f) {}\nTASK_PER_THREAD(g) {}\nTASK_PER_WARP(h) {}").functions(["f", "g", "h"]);
    std::fs::write(&source, grid.threads(1024).text()).unwrap();
    for architecture in ARCHITECTURES {
        let Some(mut c) = nvcc() else { return };
        c.args(["-cubin", "-Xptxas", "-v", "-o"]).arg(source.with_extension("cubin"));
        let out = c.arg(format!("-arch={architecture}")).arg(&source).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{said}");
        let of_grid = said.split("'fb_grid'").nth(1).unwrap_or_else(|| panic!("{said}"));
        let used = of_grid.split("Used ").nth(1).and_then(|s| s.split(' ').next()?.parse().ok());
        let used: u32 = used.unwrap_or_else(|| panic!("{said}"));
        assert!(used * 1024 <= 65536, "{used} registers on {architecture}");
    }
}

/// The heap in a program that knows nothing else of Forebay.
#[test]
fn the_heap_is_there_for_any_program() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("heap");
    for architecture in ARCHITECTURES {
        let Some(mut c) = nvcc() else { return };
        c.arg(format!("-arch={architecture}")).arg("-o").arg(&program).arg(folder("examples/cuda").join("heap.cu"));
        compile(c);
    }
    if discover(&[Kind::Cuda]).0.is_empty() {
        return;
    }
    let mut c = nvcc().unwrap();
    c.args(["-arch=native", "-o"]).arg(&program).arg(folder("examples/cuda").join("heap.cu"));
    compile(c);
    let out = Command::new(&program).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
}
