//! The module under a real interpreter: its own tests, and the example.

#[path = "../../../crates/forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

use std::path::PathBuf;
use std::process::{Command, Output};

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// A folder from which `import forebay` works; none without Python 3.11 or later.
fn module(name: &str) -> Option<PathBuf> {
    let version = Command::new("python3").args(["-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).status();
    if !version.is_ok_and(|s| s.success()) {
        eprintln!("skipped: no Python 3.11 here");
        return None;
    }
    let built = Command::new(env!("CARGO")).args(["build", "-q", "-p", "forebay-python"]).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let exe = std::env::current_exe().unwrap();
    // target/PROFILE/deps/test
    let library = exe.ancestors().nth(3).unwrap().join("debug/libforebay_python.so");
    let dir = std::env::temp_dir().join(format!("forebay-python-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::copy(&library, dir.join("forebay.abi3.so")).unwrap();
    Some(dir)
}

fn command(dir: &PathBuf, arguments: &[&str]) -> Command {
    let before = std::env::var("PYTHONPATH").unwrap_or_default();
    let mut c = Command::new("python3");
    c.args(arguments).env("PYTHONPATH", format!("{}:{before}", dir.display()));
    c.env("FOREBAY_SOCKET", "").env("FOREBAY_MODELS", dir);
    c
}

fn python(dir: &PathBuf, arguments: &[&str]) -> Output {
    command(dir, arguments).output().unwrap()
}

fn text(o: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr))
}

#[test]
fn what_the_modules_own_tests_say() {
    let Some(dir) = module("own") else { return };
    let o = python(&dir, &["-m", "unittest", "discover", "-v", "-s", &format!("{HERE}/tests")]);
    let said = text(&o);
    println!("{said}");
    assert!(o.status.success() && said.contains("OK"), "{said}");
    for what in ["blocks", "graphs", "calls", "ends", "grid", "transfer"] {
        assert!(said.contains(&format!("(test_{what}.")), "{what} are not among them: {said}");
    }
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn the_examples_run_on_every_device_that_there_is() {
    let Some(dir) = module("example") else { return };
    let example = format!("{HERE}/../../examples/python/hello.py");
    for device in [&[][..], &["cpu"], &["opencl"]] {
        let o = python(&dir, &[&[example.as_str()], device].concat());
        if device == ["opencl"] && text(&o).contains("opencl:") {
            eprintln!("skipped: {}", text(&o));
            continue;
        }
        assert_eq!(text(&o), "[1.0, 4.0, 9.0, 16.0, 25.0, 36.0, 49.0, 64.0]\n", "{device:?}");
    }
    let said = text(&python(&dir, &[&format!("{HERE}/../../examples/python/grid.py"), "cpu"]));
    match said.contains("no C++ compiler") {
        true => eprintln!("skipped: {said}"),
        false => assert_eq!(said, "square: 144\ntree: 4096\na thousand trees: 8000\n"),
    }
    std::fs::remove_dir_all(dir).unwrap();
}

/// Mypy's own test of stubs: names, parameters, defaults.
#[test]
fn what_type_checkers_are_told_is_what_is_there() {
    let Some(dir) = module("stub") else { return };
    if !command(&dir, &["-c", "import mypy"]).output().unwrap().status.success() {
        eprintln!("skipped: mypy is not here");
        std::fs::remove_dir_all(dir).unwrap();
        return;
    }
    std::fs::copy(format!("{HERE}/forebay.pyi"), dir.join("forebay.pyi")).unwrap();
    // Python before 3.12 does not show that something has a buffer.
    std::fs::write(dir.join("allowed"), "forebay\\..*\\.__buffer__\n").unwrap();
    let allowed = dir.join("allowed").display().to_string();
    let mypy = |arguments: &[&str]| {
        let mut c = command(&dir, arguments);
        let o = c.env("MYPYPATH", &dir).current_dir(&dir).output().unwrap();
        assert!(o.status.success() && text(&o).contains("Success"), "{}", text(&o));
    };
    let unused = ["--ignore-unused-allowlist", "--ignore-disjoint-bases"];
    mypy(&[&["-m", "mypy.stubtest", "forebay", "--allowlist", &allowed], &unused[..]].concat());
    for example in ["hello", "grid"] {
        let example = format!("{HERE}/../../examples/python/{example}.py");
        mypy(&["-m", "mypy", "--strict", "--allow-untyped-defs", &example]);
    }
    std::fs::remove_dir_all(dir).unwrap();
}

/// On the stand-in for a GPU.
#[test]
fn memory_of_a_cuda_device_is_an_array_for_others() {
    const PROGRAM: &str = "
import forebay
e = forebay.Engine('cuda')
m, p = e.memory(4096), e.pinned(64)
a = m.__cuda_array_interface__
assert a == {'shape': (4096,), 'typestr': '|u1', 'data': (m.address, False), 'version': 3}, a
memoryview(p)[8:11] = b'abc'
back = bytearray(3)
with e.stream() as s:
    s.write(m, memoryview(p)[8:], offset=100)
    s.read(m, back, offset=100)
print(bytes(back), m.address > 0)
";
    let (Some(dir), Some(driver)) = (module("cuda"), stand_in::build()) else { return };
    let o = stand_in::output_under(driver, command(&dir, &["-c", PROGRAM]));
    assert_eq!(text(&o), "b'abc' True\n");
    std::fs::remove_dir_all(dir).unwrap();
}

/// On the stand-in.
#[test]
fn grids_and_transfers_that_are_waited_for_later_work_on_a_cuda_device() {
    let (Some(dir), Some(driver)) = (module("grid"), stand_in::build()) else { return };
    let mut c = command(&dir, &["-m", "unittest", "-v", &format!("{HERE}/tests/test_grid.py")]);
    c.env("FOREBAY_TEST_GRID", "cuda");
    let o = stand_in::output_under(driver, c);
    let said = text(&o);
    // But for the one of forks.
    assert!(o.status.success() && said.contains("OK (skipped=1)"), "{said}");
    let later = "test_transfer.Transfers.test_what_is_begun_is_waited_for_later";
    let mut c = command(&dir, &["-m", "unittest", "-v", later]);
    c.current_dir(format!("{HERE}/tests"));
    let o = stand_in::output_under(driver, c);
    let said = text(&o);
    assert!(o.status.success() && said.contains("OK") && !said.contains("skipped: cuda"), "{said}");
    std::fs::remove_dir_all(dir).unwrap();
}

/// On two stand-ins.
#[test]
fn one_of_several_gpus_is_taken_by_its_number() {
    const PROGRAM: &str = "
import forebay
from array import array
one, two = forebay.Engine('cuda:0'), forebay.Engine('cuda:1')
a, b = one.memory(4096), two.memory(4096)
back = bytearray(4)
with one.stream() as s, two.stream() as t:
    s.write(a, b'abcd', offset=7)
    s.relay(a, 7, t, b, 9, 4)
    t.read(b, back, offset=9)
print(bytes(back))
for device, n in [('cuda', 3), ('cuda:1', 2), ('cuda:0', 2)]:
    assert len(forebay.Runtime(device).devices()) == n, device
t = forebay.Task('t', inputs={'x': 'u32[1000]'}, outputs={'y': 'u32[1000]'})
t.kernel('KERNEL void more(GLOBAL const uint *x, GLOBAL uint *y) { uint i = gid_x(); if (i < 1000) y[i] = x[i] + 1u; }', 'more')
g = forebay.Graph('g')
g.add(t); g.feed('t.x'); g.drain('t.y')
with forebay.Runtime('cuda:1').start(g) as run:
    run.push(array('I', range(1000)))
    assert memoryview(run.pull())[999] == 1000
    print(run.tasks()[0]['by_device'])
try:
    forebay.Engine('cuda:2')
except RuntimeError as e:
    print('there is no cuda:2, only cuda:0 ' in str(e) and ', cuda:1 ' in str(e))
";
    let (Some(dir), Some(driver)) = (module("several"), stand_in::build()) else { return };
    let mut c = command(&dir, &["-c", PROGRAM]);
    c.env("STAND_IN_DEVICES", "2");
    let o = stand_in::output_under(driver, c);
    assert_eq!(text(&o), "b'abcd'\n[0, 1]\nTrue\n");
    std::fs::remove_dir_all(dir).unwrap();
}

/// What is pushed goes into the feed's own memory. The stand-in takes away the file that names the call which found no memory; then any
/// memory does.
#[test]
fn what_is_pushed_is_page_locked_where_there_is_a_gpu() {
    const PROGRAM: &str = "
import forebay, os, sys
from array import array
t = forebay.Task('t', inputs={'x': 'u32[1000]'}, outputs={'y': 'u32[1000]'})
t.kernel('KERNEL void more(GLOBAL const uint *x, GLOBAL uint *y) { uint i = gid_x(); if (i < 1000) y[i] = x[i] + 1u; }', 'more')
g = forebay.Graph('g')
g.add(t); g.feed('t.x'); g.drain('t.y')
with forebay.Runtime('cuda').start(g) as run:
    with open(sys.argv[1], 'w') as f:
        f.write('cuMemHostAlloc')
    run.push(array('I', range(1000)))
    print(os.path.exists(sys.argv[1]))
    assert memoryview(run.pull())[999] == 1000
    for n in range(50):
        run.push(array('I', [n] * 1000))
        run.push(array('I', [n + 7] * 1000))
        assert [memoryview(run.pull())[999] for _ in range(2)] == [n + 1, n + 8], n
    print('done')
";
    let (Some(dir), Some(driver)) = (module("pinned"), stand_in::build()) else { return };
    let file = dir.join("call");
    let mut c = command(&dir, &["-c", PROGRAM, &file.display().to_string()]);
    c.env("STAND_IN_NO_MEMORY_FOR", &file).env("STAND_IN_DELAYS", "1");
    let o = stand_in::output_under(driver, c);
    assert_eq!(text(&o), "False\ndone\n");
    std::fs::remove_dir_all(dir).unwrap();
}
