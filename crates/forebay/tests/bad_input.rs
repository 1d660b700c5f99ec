//! Every mistake gives one clear error that names what is involved, at build time where that is possible.

use forebay::{Arg, Datablock, Error, Geometry, Graph, Kind, Launch, Predicate, Runtime, Source, Task, Template};

fn t() -> Template {
    Template::array::<f32>([16])
}

fn copy(name: &str) -> Task {
    Task::new(name).input("x", t()).output("y", t()).host(|_| Ok(()))
}

/// The error's text contains all of `words`.
#[track_caller]
fn names<T>(r: Result<T, Error>, words: &[&str]) {
    let e = match r {
        Ok(_) => panic!("accepted"),
        Err(e) => e.to_string(),
    };
    for w in words {
        assert!(e.contains(w), "{w:?} is not in: {e}");
    }
}

#[test]
fn mismatched_templates_name_both_ends_and_the_difference() {
    let other = [
        (Template::array::<u32>([16]), "elements differ"),
        (Template::array::<f32>([17]), "dimensions differ"),
        (Template::records::<f32>(16), "layouts differ"),
        (t().with_stride(128), "strides differ"),
    ];
    for (template, why) in other {
        let mut g = Graph::new("g");
        let a = g.add(copy("a")).unwrap();
        let b = g.add(Task::new("b").input("in", template).host(|_| Ok(()))).unwrap();
        names(g.connect((a, "y"), (b, "in")), &["a.y", "b.in", "f32[16]", &template.to_string(), why]);
    }
}

#[test]
fn wrong_ports_directions_and_second_channels() {
    let mut g = Graph::new("g");
    let (a, b) = (g.add(copy("a")).unwrap(), g.add(copy("b")).unwrap());
    names(g.connect((a, "z"), (b, "x")), &["\"a\"", "\"z\"", "x, y"]);
    names(g.connect((a, "x"), (b, "x")), &["a.x", "input"]);
    names(g.connect((a, "y"), (b, "y")), &["b.y", "output"]);
    g.connect((a, "y"), (b, "x")).unwrap();
    names(g.feed((b, "x"), 1), &["b.x", "a.y"]);
    let other = Graph::new("other");
    assert!(other.find("a").is_none());
    let mut empty = Graph::new("empty");
    names(empty.feed((a, "x"), 1), &["task", "empty"]);
}

#[test]
fn capacities_and_sizes_have_bounds() {
    let mut g = Graph::new("g");
    let (a, b) = (g.add(copy("a")).unwrap(), g.add(copy("b")).unwrap());
    names(g.connect_with((a, "y"), (b, "x"), 0, Predicate::Always), &["capacity 0", "a.y", "b.x"]);
    names(g.connect_with((a, "y"), (b, "x"), usize::MAX, Predicate::Always), &["capacity"]);
    names(
        g.add(Task::new("c").input("big", Template::array::<f64>([usize::MAX, 3])).host(|_| Ok(()))),
        &["c.big", "larger"],
    );
    names(g.add(Task::new("d").input("none", Template::array::<u8>([0])).host(|_| Ok(()))), &["d.none", "zero"]);
    names(Datablock::zeroed(Template::raw(usize::MAX)).map(|_| ()), &["larger"]);
    names(Datablock::from_bytes(t(), &[0; 63]).map(|_| ()), &["f32[16]", "63"]);
}

#[test]
fn unbound_ports_and_cycles_are_found_by_check_all_at_once() {
    let mut g = Graph::new("g");
    let (a, b) = (g.add(copy("a")).unwrap(), g.add(copy("b")).unwrap());
    names(g.check(), &["a.x", "a.y", "b.x", "b.y", "4 errors"]);
    g.connect((a, "y"), (b, "x")).unwrap();
    g.connect((b, "y"), (a, "x")).unwrap();
    names(g.check(), &["cycle", "a → b → a", "initializer"]);
    // With an initializer the same cycle is fine.
    let mut g = Graph::new("g");
    let a = g.add(Task::new("a").input("x", t()).initializer("x0", "x").output("y", t()).host(|_| Ok(()))).unwrap();
    let b = g.add(copy("b")).unwrap();
    g.connect((a, "y"), (b, "x")).unwrap();
    g.connect((b, "y"), (a, "x")).unwrap();
    g.feed((a, "x0"), 1).unwrap();
    g.check().unwrap();
}

#[test]
fn names_and_declarations_that_contradict_themselves() {
    let mut g = Graph::new("g");
    g.add(copy("a")).unwrap();
    names(g.add(copy("a")), &["\"a\"", "another task"]);
    names(g.add(copy("")), &["empty"]);
    names(g.add(copy("a.b")), &["dot"]);
    names(g.add(copy(&"n".repeat(1000))), &["longer"]);
    names(g.add(copy("b").input("x", t())), &["b.x", "another port"]);
    names(g.add(copy("c").initializer("i", "nothing")), &["\"i\"", "\"nothing\""]);
    names(g.add(copy("d").meta_size("n", "y")), &["\"n\"", "fixed size"]);
    names(g.add(copy("e").iterations(0)), &["iterations"]);
    let launch = Launch::new(Source::Portable("".into()), "k", [Arg::port("q")]);
    names(g.add(copy("f").kernels(Kind::OpenCl, [launch])), &["\"f\"", "\"q\"", "\"k\""]);
    let launch = Launch::new(Source::OpenClC("".into()), "k", []);
    names(g.add(copy("h").kernels(Kind::Cuda, [launch])), &["\"h\"", "cuda", "OpenClC"]);
}

#[test]
fn a_kernel_that_does_not_compile_shows_the_log_and_the_line() {
    let rt = match Runtime::builder().only(Kind::OpenCl) {
        Ok(b) => b.build().unwrap(),
        Err(e) => {
            eprintln!("skipped: {e}");
            return;
        }
    };
    let source = "KERNEL void k(GLOBAL const float *x, GLOBAL float *y) {\n  y[0] = x[0] +;\n}";
    let mut g = Graph::new("g");
    let a = g.add(Task::new("broken").input("x", t()).output("y", t()).portable(source, "k")).unwrap();
    let (_, _) = (g.feed((a, "x"), 1).unwrap(), g.drain((a, "y"), 1).unwrap());
    names(rt.start(g).map(|_| ()), &["broken", "source line 2", "y[0] = x[0] +;"]);
    let mut g = Graph::new("g");
    let many = Launch::new(Source::Portable("KERNEL void k() {}".into()), "k", vec![Arg::U32(0); 49]);
    let a = g.add(Task::new("many").output("y", t()).kernels(Kind::OpenCl, [many])).unwrap();
    let _ = g.drain((a, "y"), 1).unwrap();
    names(rt.start(g).map(|_| ()), &["many", "\"k\"", "more than 48 arguments"]);
    // Wrong arguments are refused when the kernel is first called, and end that graph alone.
    let source = "KERNEL void k(GLOBAL const float *x, GLOBAL float *y, uint n) { if (n) y[0] = x[0]; }";
    let mut g = Graph::new("g");
    let a = g.add(Task::new("short").input("x", t()).output("y", t()).portable(source, "k")).unwrap();
    let (x, y) = (g.feed((a, "x"), 1).unwrap(), g.drain((a, "y"), 1).unwrap());
    let run = rt.start(g).unwrap();
    run.push(x, Datablock::zeroed(t()).unwrap()).unwrap();
    names(run.pull(y), &["short", "2 arguments", "3"]);
}

#[test]
fn a_task_for_other_devices_says_what_it_has_and_what_is_here() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let mut g = Graph::new("g");
    let launch = Launch::new(Source::CudaCpp("".into()), "k", []);
    let a = g.add(Task::new("gpu").input("x", t()).kernels(Kind::Cuda, [launch])).unwrap();
    g.feed((a, "x"), 1).unwrap();
    names(rt.start(g).map(|_| ()), &["\"gpu\"", "cuda", "cpu"]);
}

#[test]
fn wrong_blocks_wrong_types_and_foreign_handles_at_run_time() {
    let rt = Runtime::builder().cpu_only().build().unwrap();
    let mut g = Graph::new("g");
    let a = g
        .add(Task::new("a").input("x", t()).output("y", t()).host(|inv| {
            inv.output::<u64>("y")?;
            Ok(())
        }))
        .unwrap();
    let (x, y) = (g.feed((a, "x"), 1).unwrap(), g.drain((a, "y"), 1).unwrap());
    let run = rt.start(g).unwrap();
    names(run.push(x, Datablock::zeroed(Template::array::<f32>([15])).unwrap()), &["a.x", "f32[16]", "f32[15]"]);
    run.push(x, Datablock::zeroed(t()).unwrap()).unwrap();
    names(run.pull(y), &["\"a\"", "u64", "f32[16]"]);
    let mut g = Graph::new("larger");
    let ids: Vec<_> = (0..3).map(|i| g.add(copy(&format!("t{i}"))).unwrap()).collect();
    g.connect((ids[0], "y"), (ids[1], "x")).unwrap();
    g.connect((ids[1], "y"), (ids[2], "x")).unwrap();
    let foreign = g.drain((ids[2], "y"), 1).unwrap();
    names(run.pull(foreign), &["drain", "\"g\""]);
    names(run.set_geometry(ids[2], Some(Geometry::linear(1))), &["task", "\"g\""]);
}
