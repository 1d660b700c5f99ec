//! The header is what the source says, and a C program does with it what docs/c.md says.

#[path = "../../../crates/forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// The header as cbindgen makes it now. `FOREBAY_WRITE_HEADER=1 cargo test -p forebay-c` keeps it.
#[test]
fn the_header_is_what_the_source_says() {
    let config = cbindgen::Config::from_file(Path::new(HERE).join("cbindgen.toml")).unwrap();
    // Its modules are found from there.
    let builder = cbindgen::Builder::new().with_config(config).with_src(Path::new(HERE).join("src/lib.rs"));
    let mut made = Vec::new();
    builder.generate().unwrap().write(&mut made);
    // What Rust's readers are told of safety is for them.
    let text = String::from_utf8(made).unwrap();
    let mut lines: Vec<&str> = Vec::new();
    let mut skip = false;
    for l in text.lines() {
        skip = l.starts_with("// # Safety") || (skip && l.starts_with("//"));
        if skip {
            if lines.last() == Some(&"//") {
                lines.pop();
            }
        } else {
            lines.push(l);
        }
    }
    let made = lines.join("\n") + "\n";
    let path = Path::new(HERE).join("include/forebay.h");
    if std::env::var_os("FOREBAY_WRITE_HEADER").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == made, "write it anew with FOREBAY_WRITE_HEADER=1");
    assert_eq!(made.matches("forebay_push(").count(), 1, "said once");
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"))
}

/// The library, built as whoever uses it does.
fn library() -> PathBuf {
    let built = run(Command::new(env!("CARGO")).args(["build", "-q", "-p", "forebay-c"]));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let exe = std::env::current_exe().unwrap();
    // target/PROFILE/deps/test
    let found = exe.ancestors().nth(3).unwrap().join("debug");
    assert!(found.join("libforebay_c.so").exists(), "{}", found.display());
    found
}

/// Compiles `source` as C or C++ and runs it; none without a compiler.
fn compiled(compiler: &str, standard: &str, source: &str, name: &str, arguments: &[&str]) -> Option<Output> {
    let dir = std::env::temp_dir().join(format!("forebay-c-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let library = library();
    let program = dir.join("program");
    let mut c = Command::new(compiler);
    c.args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-O1", "-g"]);
    c.arg("-I").arg(Path::new(HERE).join("include")).arg(Path::new(HERE).join(source)).arg("-o").arg(&program);
    c.arg("-L").arg(&library).arg("-lforebay_c").arg(format!("-Wl,-rpath,{}", library.display()));
    match c.output() {
        Err(e) => {
            eprintln!("skipped: no {compiler}: {e}");
            return None;
        }
        Ok(o) => assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr)),
    }
    let mut c = Command::new(&program);
    c.args(arguments).env("FOREBAY_SOCKET", "").env("FOREBAY_MODELS", &dir);
    let out = match arguments {
        // There is no GPU here; what there is has its driver's place.
        ["cuda"] => stand_in::output_under(stand_in::build()?, c),
        _ => run(&mut c),
    };
    std::fs::remove_dir_all(dir).unwrap();
    Some(out)
}

fn good(o: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr));
    assert!(o.status.success(), "{:?}\n{out}{err}", o.status);
    out.into_owned()
}

#[test]
fn the_example_runs_on_every_device_that_there_is() {
    for device in ["cpu", "opencl"] {
        let Some(o) = compiled("gcc", "-std=c99", "../../examples/c/hello.c", device, &[device]) else { return };
        if o.status.code() == Some(77) {
            eprintln!("skipped: {}", String::from_utf8_lossy(&o.stderr));
            continue;
        }
        assert_eq!(good(&o), "0 1 4 9 16 25 36 49\n", "{device}");
    }
}

#[test]
fn a_loop_goes_round_as_often_as_it_is_told() {
    let Some(o) = compiled("gcc", "-std=c99", "../../examples/c/loop.c", "loop", &[]) else { return };
    let said = (1..=5).map(|n| format!("3 doubled {n} times: {}\n", 3 << n));
    assert_eq!(good(&o), said.collect::<String>());
}

#[test]
fn tasks_go_to_a_grid() {
    let Some(o) = compiled("gcc", "-std=c99", "../../examples/c/grid.c", "grid", &["cpu"]) else { return };
    if o.status.code() == Some(77) {
        eprintln!("skipped: {}", String::from_utf8_lossy(&o.stderr));
        return;
    }
    assert_eq!(good(&o), "square: 144\ntree: 4096\na thousand trees: 8000\n");
}

#[test]
fn data_is_moved_by_hand() {
    for device in ["cpu", "opencl"] {
        let Some(o) =
            compiled("gcc", "-std=c99", "../../examples/c/transfer.c", &format!("transfer-{device}"), &[device])
        else {
            return;
        };
        if o.status.code() == Some(77) {
            eprintln!("skipped: {}", String::from_utf8_lossy(&o.stderr));
            continue;
        }
        assert_eq!(good(&o), "device\n9\n9\n", "{device}");
    }
}

#[test]
fn mistakes_are_errors_with_reasons_and_nothing_leaks_or_crashes() {
    let graph = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/6_graph_file.toml");
    let Some(o) = compiled("gcc", "-std=c99", "tests/mistakes.c", "mistakes", &[graph]) else { return };
    assert!(good(&o).ends_with("all as it should be\n"));
}

#[test]
fn the_header_is_good_cpp_as_well() {
    let Some(o) = compiled("g++", "-std=c++11", "tests/header.cpp", "cpp", &[]) else { return };
    assert_eq!(good(&o).trim(), env!("CARGO_PKG_VERSION"));
}
