//! The command as a person runs it.

#[path = "../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn forebay(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_forebay")).args(args).output().unwrap()
}

fn stdout(o: &Output) -> String {
    String::from_utf8_lossy(&o.stdout).into_owned()
}

fn example() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/6_graph_file.toml").display().to_string()
}

fn scratch(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("forebay-cli-{}-{name}", std::process::id()))
}

#[test]
fn the_demo_reports_what_it_did() {
    let trace = scratch("demo.pftrace");
    let args = ["demo", "gesture", "--device", "cpu", "--frames", "8", "--rate", "max", "--json", "--trace"];
    let o = forebay(&[&args[..], &[&trace.display().to_string()]].concat());
    assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
    let v: serde_json::Value = serde_json::from_str(&stdout(&o)).unwrap();
    assert_eq!(v["frames"], 8);
    // Two frames warm up.
    assert_eq!(v["tasks"]["xform"]["cpu"], 10);
    assert!(v["gestures"].as_u64().unwrap() > 0 && v["fps"].as_f64().unwrap() > 0.0);
    assert!(std::fs::metadata(&trace).unwrap().len() > 1000);
    std::fs::remove_file(trace).unwrap();
}

#[test]
fn a_device_that_is_not_here_and_options_that_make_no_sense_are_refused() {
    for (args, word) in [
        (&["demo", "gesture", "--device", "abacus"][..], "abacus"),
        (&["demo", "gesture", "--rate", "0"], "rate"),
        (&["demo", "gesture", "--rate", "1e-300"], "0.001"),
        (&["demo", "gesture", "--frames", "0"], "frames"),
        (&["demo", "gesture", "--camera", "/dev/null"], "/dev/null"),
        (&["demo", "gesture", "--calibration", "/dev/null"], "--camera"),
        (&["demo", "gesture", "--mode", "random"], "first-available"),
        (&["graph", "check", "/nonexistent.toml"], "/nonexistent.toml"),
    ] {
        let o = forebay(args);
        assert!(!o.status.success());
        let e = String::from_utf8_lossy(&o.stderr).into_owned();
        assert!(e.contains(word) && !e.contains("panicked"), "{args:?}: {e}");
    }
}

/// PoCL's compiler says on its own that a source is wrong, of the one that is meant to be.
#[test]
fn the_doctor_says_what_is_here_and_nothing_of_what_its_checks_have_refused() {
    let o = forebay(&["doctor"]);
    let (said, aside) = (stdout(&o), String::from_utf8_lossy(&o.stderr).into_owned());
    assert!(
        o.status.success() && said.starts_with("cpu: ") && said.contains("conformance: all checks passed"),
        "{said}"
    );
    assert!(!aside.contains("error"), "{aside}");
}

/// For seconds nothing comes out.
#[test]
fn a_graph_file_runs_to_its_end_however_long_its_kernels_take() {
    if stdout(&forebay(&["doctor"])).contains("opencl: not usable") {
        return eprintln!("skipped: no opencl device");
    }
    let text = r#"
name = "slow"
[[task]]
name = "t"
inputs = [{ name = "x", type = "u32" }]
outputs = [{ name = "y", type = "u32" }]
[task.kernel]
entry = "slow"
args = ["x", "y"]
source = """
KERNEL void slow(GLOBAL const uint *x, GLOBAL uint *y) {
  if (gid_x() > 0) return;
  uint v = x[0] + 1;
  for (uint i = 0; i < 900000000u; i++) { v ^= v << 13; v ^= v >> 17; v ^= v << 5; }
  y[0] = v;
}"""
[[feed]]
to = "t.x"
[[drain]]
from = "t.y"
"#;
    let file = scratch("slow.toml");
    std::fs::write(&file, text).unwrap();
    let o = forebay(&["graph", "run", &file.display().to_string(), "--device", "opencl", "--blocks", "4"]);
    assert!(stdout(&o).contains("t.y: 4 datablocks"), "{}{}", stdout(&o), String::from_utf8_lossy(&o.stderr));
    std::fs::remove_file(file).unwrap();
}

#[test]
fn graph_files_are_checked_run_and_drawn() {
    let file = example();
    assert!(stdout(&forebay(&["graph", "check", &file])).contains("3 tasks, 6 channels"));
    let (a, b) = (scratch("a.bin"), scratch("b.bin"));
    let raw = |v: f32| std::iter::repeat_n(v.to_le_bytes(), 8).flatten().collect::<Vec<u8>>();
    std::fs::write(&a, raw(3.0)).unwrap();
    std::fs::write(&b, raw(4.0)).unwrap();
    let feeds = [format!("--feed=split.in={}", a.display()), format!("--feed=add.b={}", b.display())];
    let o = forebay(&["graph", "run", &file, "--blocks", "3", &feeds[0], &feeds[1]]);
    assert!(
        stdout(&o).contains("multiply.product: 3 datablocks") && stdout(&o).contains("[21.0, 21.0"),
        "{}",
        stdout(&o)
    );
    let o = forebay(&["graph", "run", &file, "--device", "cpu", "--mode", "fifo", "--json", &feeds[0], &feeds[1]]);
    let v: serde_json::Value = serde_json::from_str(&stdout(&o)).unwrap();
    assert_eq!((&v["drains"][0]["datablocks"], &v["drains"][0]["last"]["first"][0]), (&1.into(), &21.0.into()), "{v}");
    assert_eq!(v["tasks"].as_array().unwrap().len(), 3, "{v}");
    let o = forebay(&["graph", "run", &file, "--mode", "last"]);
    assert!(String::from_utf8_lossy(&o.stderr).contains("data-aware") && !o.status.success());
    // Nothing comes of it that could be counted.
    let none = scratch("none.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(
        &none,
        text.replace("from = \"multiply.product\"", "from = \"multiply.product\"\nwhen = \"only end-stream\""),
    )
    .unwrap();
    let o = forebay(&["graph", "run", &none.display().to_string(), "--blocks", "3"]);
    let said = stdout(&o);
    assert!(said.contains("multiply.product: 0 datablocks") && said.contains("task multiply: 3 invocations"), "{said}");
    // More than there is room for, so that what is pushed elsewhere would wait for it.
    std::fs::write(&b, &raw(4.0)[..31]).unwrap();
    let o = forebay(&["graph", "run", &file, "--blocks", "30", &feeds[0], &feeds[1]]);
    let e = String::from_utf8_lossy(&o.stderr).into_owned();
    assert!(!o.status.success() && e.contains("add.b") && e.contains("31 B") && e.contains("f32[8]"), "{e}");
    let (svg, dot) = (scratch("g.svg"), scratch("g.dot"));
    for picture in [&svg, &dot] {
        let o = forebay(&["graph", "draw", &file, "-o", &picture.display().to_string(), "--run", "5"]);
        assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
        let text = std::fs::read_to_string(picture).unwrap();
        assert!(text.contains("multiply") && text.contains("5 passed"), "{text}");
    }
    // A picture of another kind is refused before anything runs, for hours.
    let o = forebay(&["graph", "draw", &file, "-o", "g.png", "--run", "1000000000000"]);
    assert!(!o.status.success() && String::from_utf8_lossy(&o.stderr).contains(".svg or .dot"));
    let typo = scratch("typo.toml");
    std::fs::write(&typo, std::fs::read_to_string(&file).unwrap().replace("add.sum", "add.summ")).unwrap();
    let o = forebay(&["graph", "check", &typo.display().to_string()]);
    let e = String::from_utf8_lossy(&o.stderr).into_owned();
    assert!(!o.status.success() && e.contains(":31:1:") && e.contains("\"summ\""), "{e}");
    for f in [a, b, svg, dot, typo, none] {
        std::fs::remove_file(f).unwrap();
    }
}

#[test]
fn a_reader_that_goes_away_ends_the_command_quietly() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["demo", "gesture", "--device", "cpu", "--frames", "8", "--rate", "max"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    assert!(!String::from_utf8_lossy(&out.stderr).contains("panicked"));
}

/// The service of a benchmark or a demonstration does not stay behind, however that ends; nor do its programs.
#[test]
fn a_service_and_programs_of_a_demonstration_end_with_it() {
    let dir = scratch("left");
    std::fs::create_dir_all(&dir).unwrap();
    let socket = dir.join("socket");
    let this = env!("CARGO_BIN_EXE_forebay");
    let plain = stdout(&forebay(&["doctor"])).contains("opencl: pthread");
    let programs = format!(
        "{this} service --with-parent --socket {} 2>/dev/null >/dev/null & echo $!\n{}\nexec sleep 60",
        socket.display(),
        if plain {
            format!("{this} demo sharing-plain --device opencl >/dev/null 2>&1 & echo $!")
        } else {
            String::new()
        }
    );
    let mut shell = Command::new("sh").args(["-c", &programs]).stdout(Stdio::piped()).spawn().unwrap();
    let mut out = std::io::BufReader::new(shell.stdout.take().unwrap());
    let pids: Vec<u32> = (0..1 + usize::from(plain))
        .map(|_| {
            let mut line = String::new();
            std::io::BufRead::read_line(&mut out, &mut line).unwrap();
            line.trim().parse().unwrap()
        })
        .collect();
    let wait = |what: &str, until: &dyn Fn() -> bool| {
        let begun = std::time::Instant::now();
        while !until() {
            assert!(begun.elapsed().as_secs() < 20, "{what}");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    };
    // A process that nobody has waited for is there, and is none any more.
    let is_there = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|s| !s.is_empty() && !s.starts_with('Z'))
    };
    wait("the service is there", &|| socket.exists());
    // The other one has begun to work by then.
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert!(pids.iter().all(is_there), "{pids:?}");
    shell.kill().unwrap();
    shell.wait().unwrap();
    wait("they end", &|| !pids.iter().any(is_there));
    std::fs::remove_dir_all(dir).unwrap();
}

/// A benchmark's part that fails, dies or hangs costs what it would have found and nothing else.
#[test]
fn a_benchmark_goes_on_behind_parts_that_fail_die_or_hang() {
    let dir = scratch("trial");
    let begun = std::time::Instant::now();
    let o = forebay(&["bench", "trial", "--json", "--out", &dir.display().to_string()]);
    assert!(begun.elapsed().as_secs() < 50, "nobody waits for what the one that died has left behind");
    let said = String::from_utf8_lossy(&o.stderr).into_owned();
    assert!(!o.status.success() && said.contains("did not come to their end: fails, dies, hangs"), "{said}");
    let v: serde_json::Value = serde_json::from_str(&stdout(&o)).unwrap();
    let rows = v["rows"].as_array().unwrap();
    let cases: Vec<&str> = rows.iter().map(|r| r["case"].as_str().unwrap()).collect();
    assert_eq!(cases[..3], ["first", "before it failed", "fails: of its own accord"]);
    assert!(cases[3].starts_with("dies: it ended with signal: 6"), "{cases:?}");
    assert_eq!(cases[4..], ["hangs: it had not ended after 0.5 s", "last"]);
    assert!(rows[2..5].iter().all(|r| r["met"] == false), "{rows:?}");
    // And it is all written down.
    let machine = std::fs::read_dir(&dir).unwrap().next().unwrap().unwrap().path();
    let written: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(machine.join("trial.json")).unwrap()).unwrap();
    assert_eq!(written["rows"], v["rows"]);
    assert!(v["machine"]["stolen_percent"].as_f64().is_some_and(|p| (0.0..=100.0).contains(&p)), "{}", v["machine"]);
    std::fs::remove_dir_all(dir).unwrap();
}

/// Every way of running the gesture pipeline finds the same gestures, and says what it used.
#[test]
fn the_ways_of_the_gesture_benchmark_agree() {
    let run = |way: &str| -> serde_json::Value {
        let o = forebay(&["bench", "gesture-way", way, "cpu", "4"]);
        assert!(o.status.success(), "{way}: {}", String::from_utf8_lossy(&o.stderr));
        serde_json::from_str(&stdout(&o)).unwrap()
    };
    let by_hand = run("hand-coded");
    assert!(by_hand["gestures"].as_u64().unwrap() > 0, "{by_hand}");
    for way in ["host-based", "modular", "pipes"] {
        let v = run(way);
        assert_eq!(v["gestures"], by_hand["gestures"], "{way}");
        assert_eq!(v["latency_ms"].as_array().unwrap().len(), 4, "{way}");
        assert!(v["memory_mib"].as_f64().unwrap() > 1.0 && v["user"].as_f64().unwrap() > 0.0, "{way}: {v}");
    }
    // Three stages with two workers each, and the cameras' process.
    assert!(run("pipes")["threads"].as_u64() > by_hand["threads"].as_u64());
    assert_eq!(run("dataflow")["latency_ms"].as_array().unwrap().len(), 4);
}

/// The demo's kernels as CUDA C++, and everything between them and the command, on the stand-in for the driver; on the GPU
/// because it is there, too, with no option changed.
#[test]
fn the_demo_runs_on_cuda_with_the_stand_in() {
    let Some(dir) = stand_in::build() else { return };
    for options in [&["--device", "cuda"][..], &[]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["demo", "gesture", "--frames", "2", "--rate", "max", "--json"]).args(options);
        let o = stand_in::output_under(dir, command);
        assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
        let v: serde_json::Value = serde_json::from_str(&stdout(&o)).unwrap();
        let on_gpu = ["xform", "filter"].map(|task| v["tasks"][task]["cuda"].clone());
        assert_eq!((&v["frames"], &on_gpu), (&2.into(), &[4.into(), 4.into()]), "{options:?}: {}", v["tasks"]);
    }
}

/// A GPU's driver and nothing that compiles for it: everything runs on the CPU then, and says why.
#[test]
fn the_demo_runs_where_no_kernel_can_be_compiled_and_says_why_the_gpu_is_idle() {
    let Some(dir) = stand_in::build() else { return };
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        // No OpenCL either, which a machine with another GPU may have.
        command.args(args).env("FOREBAY_NVRTC", dir.join("nowhere")).env("OCL_ICD_VENDORS", dir.join("nowhere"));
        let o = stand_in::output_under(dir, command);
        let said = String::from_utf8_lossy(&o.stderr).into_owned();
        (o, said)
    };
    let (o, said) = run(&["demo", "gesture", "--frames", "2", "--rate", "max", "--json"]);
    assert!(o.status.success() && said.contains("(no GPU) is not used: cuda: cannot open libnvrtc"), "{said}");
    let v: serde_json::Value = serde_json::from_str(&stdout(&o)).unwrap();
    assert_eq!(v["tasks"]["xform"]["cpu"], 4, "{v}");
    let (_, said) = run(&["graph", "run", &example(), "--blocks", "2"]);
    assert!(said.contains("is not used"), "{said}");
    let (o, said) = run(&["demo", "gesture", "--device", "cuda", "--frames", "2"]);
    assert!(!o.status.success() && said.contains("pip install nvidia-cuda-nvrtc"), "{said}");
    let (o, said) = run(&["doctor"]);
    let all = stdout(&o);
    assert!(o.status.success() && all.contains("no kernel can be compiled") && !all.contains("FAILED"), "{all}{said}");
}

/// On a server that others use one GPU may have no memory left: the other is taken, or the CPU, and no option is needed.
#[test]
fn the_demo_goes_elsewhere_if_a_gpu_is_full_and_fails_if_that_one_is_asked_for() {
    let Some(dir) = stand_in::build() else { return };
    for (gpus, device, on) in [("1", "auto", Some("cpu")), ("2", "auto", Some("cuda (device 2)")), ("1", "cuda", None)]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["demo", "gesture", "--frames", "2", "--rate", "max", "--json", "--device", device]);
        command.envs([("STAND_IN_DEVICES", gpus), ("STAND_IN_FULL", "0")]);
        let o = stand_in::output_under(dir, command);
        let said = String::from_utf8_lossy(&o.stderr);
        assert!(said.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{said}");
        assert_eq!(o.status.success(), on.is_some(), "{said}");
        if let Some(on) = on {
            let v: serde_json::Value = serde_json::from_str(&stdout(&o)).unwrap();
            assert!(said.contains("is not used") && v["tasks"]["xform"][on] == 4, "{v}");
        }
    }
}

/// As another user, of whom there is nobody else: for root the system's limit does not hold.
#[test]
fn where_no_thread_can_be_had_it_is_said() {
    let limited = |n: &str, args: &[&str]| {
        let mut c = Command::new("setpriv");
        c.args(["--reuid=54321", "--clear-groups", "prlimit", &format!("--nproc={n}"), env!("CARGO_BIN_EXE_forebay")]);
        c.args(args).env("OCL_ICD_VENDORS", "/nowhere").output()
    };
    let able = limited("100", &["--version"]).is_ok_and(|o| o.status.success());
    if !able {
        return eprintln!("skipped: it takes root, and a place that others may look into");
    }
    for args in [&["demo", "gesture", "--frames", "2"][..], &["graph", "run", &example(), "--blocks", "2"]] {
        // One for the command, and one worker.
        let o = limited("2", args).unwrap();
        let said = String::from_utf8_lossy(&o.stderr);
        assert!(!o.status.success() && said.contains("no thread can be started"), "{said}");
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
fn one_gpu_of_several_is_asked_for_by_its_number() {
    let Some(dir) = stand_in::build() else { return };
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(args).env("STAND_IN_DEVICES", "2");
        stand_in::output_under(dir, command)
    };
    let o = run(&["doctor"]);
    assert!(stdout(&o).contains("cuda:0: ") && stdout(&o).contains("cuda:1: "), "{}", stdout(&o));
    let demo = ["demo", "gesture", "--frames", "2", "--rate", "max", "--json", "--device"];
    let o = run(&[&demo[..], &["cuda:1"]].concat());
    assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
    let v: serde_json::Value = serde_json::from_str(&stdout(&o)).unwrap();
    assert_eq!(v["tasks"]["xform"]["cuda"], 4, "{v}");
    // Both of one name, and what each has done is told.
    let file = scratch("two.toml");
    let tasks = ["a", "b", "c", "d"].map(|t| {
        let source = "KERNEL void k(GLOBAL const float *x, GLOBAL float *y) { uint i = gid_x(); if (i < 8u) y[i] = x[i]; }";
        format!(
            "[[task]]\nname = \"{t}\"\ninputs = [{{ name = \"x\", type = \"f32[8]\" }}]\noutputs = [{{ name = \"y\", type = \
             \"f32[8]\" }}]\nkernel = {{ source = \"{source}\", entry = \"k\", args = [\"x\", \"y\"] }}\n[[feed]]\nto = \
             \"{t}.x\"\n[[drain]]\nfrom = \"{t}.y\"\n"
        )
    });
    std::fs::write(&file, format!("name = \"two\"\n{}", tasks.concat())).unwrap();
    let on_both =
        ["graph", "run", &file.display().to_string(), "--blocks", "50", "--device", "cuda", "--json"].map(String::from);
    let o = run(&on_both.each_ref().map(String::as_str));
    assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
    let v: serde_json::Value = serde_json::from_str(&stdout(&o)).unwrap();
    let mut devices: Vec<String> = Vec::new();
    for task in v["tasks"].as_array().unwrap() {
        let on = task["on"].as_object().unwrap();
        let all: u64 = on.values().filter_map(serde_json::Value::as_u64).sum();
        assert_eq!((task["invocations"].as_u64(), all), (Some(50), 50), "{v}");
        devices.extend(on.keys().cloned());
    }
    devices.sort();
    devices.dedup();
    assert!(devices.len() == 2 && devices.iter().all(|d| d.contains(" (device ")), "{devices:?}");
    std::fs::remove_file(file).unwrap();
    let o = run(&[&demo[..], &["cuda:2"]].concat());
    let said = String::from_utf8_lossy(&o.stderr);
    assert!(!o.status.success() && said.contains("there is no cuda:2, only cuda:0 "), "{said}");
}

#[test]
fn the_grids_experiments_hold_on_cuda_with_the_stand_in() {
    let Some(dir) = stand_in::build() else { return };
    the_grids_experiments_hold(dir, &[]);
}

/// What they search, allocate and compute is checked, and here by what a GPU would run.
#[test]
fn the_grids_experiments_hold_with_nvidias_compiler() {
    let (Some(dir), Some(ptx)) = (stand_in::build(), stand_in::as_ptx()) else { return };
    the_grids_experiments_hold(dir, &ptx);
}

fn the_grids_experiments_hold(dir: &std::path::Path, variables: &[(&str, String)]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["bench", "resident", "--device", "cuda", "--quick", "--json"]).envs(variables.iter().cloned());
    let o = stand_in::output_under(dir, command);
    assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
    let v: serde_json::Value = serde_json::from_str(&stdout(&o)).unwrap();
    let cases: Vec<_> = v["rows"].as_array().unwrap().iter().map(|r| r["case"].as_str().unwrap()).collect();
    for experiment in ["A, ", "B, ", "C, ", "D, ", "E, ", "F, "] {
        assert!(cases.iter().any(|c| c.starts_with(experiment)), "{experiment}: {cases:?}");
    }
}

/// The order of the driver's calls, on the stand-in: nobody is left locked by what is refused.
#[test]
fn a_process_is_moved_off_its_gpu_and_back_with_the_stand_in() {
    let Some(dir) = stand_in::build() else { return };
    let states = scratch("checkpoint");
    std::fs::create_dir_all(&states).unwrap();
    let forebay = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(args).env("FOREBAY_STAND_IN_STATES", &states);
        let o = stand_in::output_under(dir, command);
        (o.status.success(), stdout(&o) + &String::from_utf8_lossy(&o.stderr))
    };
    let state = |pid: u32| std::fs::read_to_string(states.join(pid.to_string())).unwrap();
    std::fs::write(states.join("41"), "0").unwrap();
    std::fs::write(states.join("42"), "0").unwrap();
    std::fs::write(states.join("42.shared"), "").unwrap();
    let (good, said) = forebay(&["checkpoint", "41", "42", "43"]);
    assert!(!good && said.contains("41: its memory is off the GPU"), "{said}");
    assert!(said.contains("42 was refused, and goes on") && said.contains("43 is no CUDA process"), "{said}");
    assert_eq!((state(41), state(42)), ("2".into(), "0".into()));
    assert!(forebay(&["checkpoint", "41"]).1.contains("already"));
    assert!(forebay(&["restore", "42"]).1.contains("was not moved"));
    std::fs::write(states.join("41.full"), "").unwrap();
    let (good, said) = forebay(&["restore", "41"]);
    assert!(!good && said.contains("Is there room") && state(41) == "2", "{said}");
    std::fs::remove_file(states.join("41.full")).unwrap();
    assert_eq!(forebay(&["restore", "41"]), (true, "41: goes on\n".into()));
    assert_eq!(state(41), "0");
    // Locked by somebody else, as the service has it where channels are out of reach: for a moment, or longer.
    std::fs::write(states.join("41"), "1").unwrap();
    let (good, said) = forebay(&["checkpoint", "--patience", "0.2", "41"]);
    assert!(!good && said.contains("locked by somebody else") && state(41) == "1", "{said}");
    let (good, said) = std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(300));
            // In one step: a state that is being written is none.
            std::fs::write(states.join("new"), "0").unwrap();
            std::fs::rename(states.join("new"), states.join("41")).unwrap();
        });
        forebay(&["checkpoint", "41"])
    });
    assert!(good && state(41) == "2", "{said}");
    // What has something on the GPU that does not end is not waited for longer than was said, however short that is.
    std::fs::write(states.join("44"), "0").unwrap();
    std::fs::write(states.join("44.long"), "").unwrap();
    let begun = std::time::Instant::now();
    let (good, said) = forebay(&["checkpoint", "--patience", "0", "44"]);
    assert!(!good && said.contains("was not done in time") && state(44) == "0", "{said}");
    assert!(begun.elapsed() < std::time::Duration::from_secs(60));
    std::fs::write(states.join("41.unlocked"), "").unwrap();
    assert_eq!(forebay(&["restore", "41"]), (true, "41: goes on\n".into()));
    std::fs::remove_dir_all(states).unwrap();
}

#[test]
fn models_are_shown_drawn_and_forgotten() {
    let dir = scratch("models");
    std::fs::create_dir_all(&dir).unwrap();
    let sample = |size: u64| format!("[[samples]]\nsize = {size}\nhint = 0.0\nns = {}.0\n", size * 10);
    let samples: String = [1024, 1024, 1024, 4096, 4096, 4096].map(sample).concat();
    for (file, device) in [("a", "cpu some"), ("b", "opencl other 1.2")] {
        let text = format!("version = 1\ntask = \"blur/3\"\ndevice = \"{device}\"\n{samples}");
        std::fs::write(dir.join(file).with_extension("toml"), text).unwrap();
    }
    std::fs::write(dir.join("broken.toml"), "version = ").unwrap();
    let model = |args: &[&str]| {
        let out =
            Command::new(env!("CARGO_BIN_EXE_forebay")).arg("model").args(args).env("FOREBAY_MODELS", &dir).output();
        let out = out.unwrap();
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        stdout(&out)
    };
    let shown = model(&["show"]);
    for part in ["blur/3 on cpu some: 6 samples", "blur/3 on opencl other 1.2", "1 KiB", "20.5 µs", "2 KiB", "41.0 µs"]
    {
        assert!(shown.contains(part), "{part:?} is not in {shown}");
    }
    let json: serde_json::Value = serde_json::from_str(&model(&["show", "blur/3", "--json"])).unwrap();
    assert_eq!((json.as_array().unwrap().len(), json[0]["predicted"][0]["size"].as_u64()), (2, Some(1024)));
    assert_eq!(model(&["show", "other", "--json"]).trim(), "[]");
    for command in ["show", "plot", "reset"] {
        let said = model(&[command, "other"]);
        assert!(said.contains("\"other\"") && said.contains("blur/3"), "{command}: {said}");
    }
    let drawn = model(&["plot", "--out", &dir.display().to_string()]);
    let svg = std::fs::read_to_string(drawn.trim()).unwrap();
    assert!(drawn.contains("model-blur_3.svg") && svg.contains("opencl, predicted"));
    assert_eq!(model(&["reset", "blur/3"]).trim(), "3 models removed");
    assert!(model(&["show"]).contains("Nothing has been learned"));
    std::fs::remove_dir_all(dir).unwrap();
}

/// What a GPU's first hour is to measure must not be what fails in it.
#[test]
fn the_programs_that_share_a_gpu_are_measured_on_cuda_with_the_stand_in() {
    let Some(dir) = stand_in::build() else { return };
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["bench", "sharing", "--device", "cuda", "--quick", "--json"]);
    let o = stand_in::output_under(dir, command);
    assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
    let v: serde_json::Value = serde_json::from_str(&stdout(&o)).unwrap();
    let rows = v["rows"].as_array().unwrap();
    for (case, target) in [
        ("shares 40:30:20:10: farthest", "≤ 1.5 points"),
        ("shares 97:1:1:1: total", "≥ 1.08"),
        ("shares 25:25:25:10:10:5: farthest", "≤ 1.5 points"),
        ("rests: of its time", "≥ 0.9"),
        ("rests: slowest first kernel", "≤ 90 ms"),
        ("every 3 to 7 ms beside ones of 20 ms: p99", "≤ 320 µs"),
        ("what these have of the GPU", "≥ 0.97"),
        ("back to back", "≤ 1.2"),
    ] {
        let row = rows.iter().find(|r| r["case"].as_str().unwrap().contains(case));
        let row = row.unwrap_or_else(|| panic!("{case}: {rows:?}"));
        assert!(row["ours"].as_f64().is_some() && row["target"].as_str().unwrap().contains(target), "{row}");
    }
    // Four programs have their parts of one device, whatever these are.
    let total = rows.iter().find(|r| r["case"].as_str().unwrap().ends_with("40:30:20:10: total, in GPUs")).unwrap();
    assert!(total["peers"]["default"].as_f64().unwrap() > 0.1, "{total}");
}

#[test]
fn transfers_are_measured_against_cudas_own_calls_with_the_stand_in() {
    let Some(dir) = stand_in::build() else { return };
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["bench", "transfer", "--device", "cuda", "--quick", "--json"]);
    let o = stand_in::output_under(dir, command);
    assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
    let v: serde_json::Value = serde_json::from_str(&stdout(&o)).unwrap();
    let rows = v["rows"].as_array().unwrap();
    for (case, target) in [
        ("cuda, to device, pinned, 8 B to 4 KiB: cudaMemcpy / ours", "≥ 5 times"),
        ("cuda, to device, pageable, 64 KiB: cudaMemcpy / ours", "≥ 2 times"),
        ("cuda, to host, pinned, 8 B to 1 KiB: cudaMemcpy / ours", "≥ 5 times"),
        ("cuda, to host, pinned, 64 MiB and more", "≥ 54 GB/s"),
        ("cuda, to device, pageable, 64 MiB: cudaMemcpy / ours", "≥ 3 times"),
        ("cuda, to device, pinned: slowest against cudaMemcpyAsync + synchronise", "≤ 1"),
        ("cuda, to host, pageable, 1 MiB: p99.9", ""),
    ] {
        let row = rows.iter().find(|r| r["case"].as_str().unwrap().starts_with(case));
        let row = row.unwrap_or_else(|| panic!("{case}"));
        assert!(row["ours"].as_f64().is_some_and(|v| v > 0.0) && row["target"] == target, "{row}");
    }
    // Both kinds of calls bring the bytes, and take their time.
    let row = rows.iter().find(|r| r["case"] == "cuda, to device, pinned, 64 MiB").unwrap();
    for peer in ["cudaMemcpy", "cudaMemcpyAsync + synchronise"] {
        assert!(row["peers"][peer].as_f64().unwrap() > 100.0, "{row}");
    }
}

/// The benchmark's own way: the same functions and kernels under StarPU, which gives back what they give without it.
#[test]
fn the_six_workloads_give_the_same_under_starpu() {
    let flags = Command::new("pkg-config").args(["--cflags", "--libs", "starpu-1.3"]).output();
    let Some(flags) = flags.ok().filter(|o| o.status.success()) else {
        eprintln!("skipped: no StarPU here");
        return;
    };
    let library = scratch("starpu_mix").with_extension("so");
    let made = Command::new("gcc")
        .args(["-O2", "-w", "-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/peers/starpu_mix.c"))
        .args(String::from_utf8_lossy(&flags.stdout).split_whitespace())
        .arg("-lOpenCL")
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let home = scratch("starpu_home");
    let o = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["bench", "placement-starpu"])
        .arg(&library)
        .envs([("STARPU_SCHED", "eager"), ("STARPU_SILENT", "1"), ("STARPU_OPENCL_ON_CPUS", "1")])
        .env("STARPU_HOME", &home)
        .output()
        .unwrap();
    let said = stdout(&o);
    let rate = said.lines().find_map(|l| l.strip_prefix("rate ")?.parse::<f64>().ok());
    assert!(o.status.success() && rate.is_some_and(|r| r > 0.0), "{said} {}", String::from_utf8_lossy(&o.stderr));
    let _ = (std::fs::remove_file(library), std::fs::remove_dir_all(home));
}
