//! What a graph file can say, each thing once, and what it must not.

use std::time::Duration;

use forebay::graph::{Library, load, parse};
use forebay::hal::Kind;
use forebay::{Datablock, Drain, Element, Error, Feed, Graph, Running, Runtime, Signals, Template};

fn cpu() -> Runtime {
    Runtime::builder().cpu_only().build().unwrap()
}

fn feed(g: &Graph, port: &str) -> Feed {
    g.feeds().into_iter().find(|(name, _)| name == port).unwrap_or_else(|| panic!("no feed {port}")).1
}

fn drain(g: &Graph, port: &str) -> Drain {
    g.drains().into_iter().find(|(name, _)| name == port).unwrap_or_else(|| panic!("no drain {port}")).1
}

fn push<T: Element>(run: &Running, to: Feed, v: T) {
    run.push(to, Datablock::scalar(v).unwrap()).unwrap();
}

fn pull<T: Element>(run: &Running, from: Drain) -> Vec<T> {
    run.pull_timeout(from, Duration::from_secs(20)).unwrap().as_slice::<T>().unwrap().to_vec()
}

/// A loop whose way back and exit are two channels of one port; how often it goes round is said by the file, or by a port.
#[test]
fn a_loop_goes_round_as_often_as_the_file_or_a_port_says() {
    let library = Library::new().with("double", || {
        Box::new(|inv| {
            inv.output::<u64>("y")?[0] *= 2;
            Ok(())
        })
    });
    for by_port in [false, true] {
        let (times, port, fed) = match by_port {
            false => ("iterations = 5", "", ""),
            true => ("", r#", { name = "n", kind = "iterations" }"#, "[[feed]]\nto = \"step.n\""),
        };
        let text = format!(
            r#"
[[task]]
name = "step"
inputs = [{{ name = "x0", kind = "initializer", of = "x" }}, {{ name = "x", type = "u64" }}{port}]
outputs = [{{ name = "y", of = "x" }}]
host = "double"
{times}
[[channel]]
from = "step.y"
to = "step.x"
capacity = 1
when = "unless end-iteration"
[[feed]]
to = "step.x0"
{fed}
[[drain]]
from = "step.y"
when = "only end-iteration"
"#
        );
        let g = parse(&text, &library).unwrap();
        let (x0, y) = (feed(&g, "step.x0"), drain(&g, "step.y"));
        let n = by_port.then(|| feed(&g, "step.n"));
        let run = cpu().start(g).unwrap();
        for v in 1..10u64 {
            n.into_iter().for_each(|n| push(&run, n, v));
            push(&run, x0, 3u64);
            assert_eq!(pull::<u64>(&run, y), [3 << if by_port { v } else { 5 }]);
        }
    }
}

#[test]
fn gates_open_and_close_at_the_marks_that_the_file_names() {
    let g = |when: &str| {
        let text = format!(
            r#"
[[task]]
name = "t"
inputs = [{{ name = "x", type = "u64" }}]
outputs = [{{ name = "y", type = "u64" }}]
host = "copy"
[[feed]]
to = "t.x"
capacity = 8
[[drain]]
from = "t.y"
capacity = 8
when = "{when}"
"#
        );
        parse(&text, &Library::standard())
    };
    for (when, want) in [
        ("open-from begin-stream", &[1u64, 2, 3, 4][..]),
        ("close-after end-stream", &[0, 1, 2, 3]),
        ("always", &[0, 1, 2, 3, 4]),
    ] {
        let g = g(when).unwrap();
        let (x, y) = (feed(&g, "t.x"), drain(&g, "t.y"));
        let run = cpu().start(g).unwrap();
        let marks = [Signals::NONE, Signals::BEGIN_STREAM, Signals::NONE, Signals::END_STREAM, Signals::NONE];
        for (v, s) in marks.into_iter().enumerate() {
            run.push(x, Datablock::scalar(v as u64).unwrap().with_signals(s)).unwrap();
        }
        let got: Vec<u64> = want.iter().flat_map(|_| pull::<u64>(&run, y)).collect();
        assert_eq!(got, want, "{when}");
        assert!(run.pull_timeout(y, Duration::from_millis(20)).is_err(), "{when}");
    }
    for (when, why) in
        [("sometimes end-stream", "a predicate is"), ("only later", "a predicate is"), ("never", "a predicate is")]
    {
        assert!(g(when).err().unwrap().to_string().contains(why), "{when}");
    }
}

/// Sizes, spaces, a value that stays, a number for the function, and a datablock that is written in place.
#[test]
fn ports_of_every_kind_do_what_their_words_say() {
    const TEXT: &str = r#"
[[task]]
name = "make"
inputs = [
    { name = "count", kind = "size", of = "out" },
    { name = "space", kind = "geometry" },
    { name = "base", type = "u32", kind = "sticky" },
    { name = "step", type = "u32", kind = "meta" },
]
outputs = [{ name = "out", type = "u32<=100" }]
host = "make"
[[task]]
name = "turn"
inputs = [{ name = "x", type = "u32<=100", kind = "inout" }]
host = "turn"
priority = 3
[[channel]]
from = "make.out"
to = "turn.x"
[[feed]]
to = "make.count"
[[feed]]
to = "make.space"
[[feed]]
to = "make.base"
[[feed]]
to = "make.step"
[[drain]]
from = "turn.x"
"#;
    let library = Library::new()
        .with("make", || {
            Box::new(|inv| {
                let (n, rows) = (inv.out("out")?.records(), inv.geometry().items[0] as u32);
                let (base, step) = (inv.value::<u32>("base")?, inv.value::<u32>("step")?);
                let out = inv.output::<u32>("out")?;
                out[..n].iter_mut().enumerate().for_each(|(i, v)| *v = base + step * i as u32 + 1000 * rows);
                Ok(())
            })
        })
        .with("turn", || {
            Box::new(|inv| {
                let n = inv.out("x")?.records();
                inv.output::<u32>("x")?[..n].reverse();
                Ok(())
            })
        });
    let g = parse(TEXT, &library).unwrap();
    let [count, space, base, step] = ["count", "space", "base", "step"].map(|p| feed(&g, &format!("make.{p}")));
    let x = drain(&g, "turn.x");
    let run = cpu().start(g).unwrap();
    push(&run, base, 7u32);
    for n in [3u64, 0, 5] {
        push(&run, count, n);
        run.push(space, Datablock::from_slice(Template::array::<u64>([3]), &[n + 1, 1, 1]).unwrap()).unwrap();
        push(&run, step, 10u32);
        let want: Vec<u32> = (0..n as u32).rev().map(|i| 7 + 10 * i + 1000 * (n as u32 + 1)).collect();
        assert_eq!(pull::<u32>(&run, x), want);
    }
}

/// A kernel that takes all kinds of arguments, over a space that the file says, in the file and beside it.
#[test]
fn a_kernel_gets_its_arguments_in_the_file_or_beside_it() {
    const KERNEL: &str =
        "KERNEL void blend(GLOBAL const float *x, GLOBAL float *kept, GLOBAL float *y, uint columns, uint rows,
                 uint records, uint k, int i0, float f, ulong w, uint plus, int minus, float times) {
  uint i = gid_y() * columns + gid_x();
  if (gid_x() >= columns || gid_y() >= rows) return;
  kept[i] = i < records ? x[i] * times : 0.0f;
  y[i] = kept[i] + (float)(k + plus) + (float)minus + (float)i0 + f + (float)(w >> 33);
}";
    let text = |kernel: &str| {
        format!(
            r#"
[[task]]
name = "t"
inputs = [{{ name = "x", type = "f32<=8" }}, {{ name = "k", type = "u32", kind = "meta" }},
    {{ name = "i", type = "i32", kind = "meta" }}, {{ name = "f", type = "f32", kind = "meta" }},
    {{ name = "w", type = "u64", kind = "meta" }}]
outputs = [{{ name = "y", type = "f32[8]" }}]
scratch = [{{ name = "kept", bytes = 32 }}]
geometry = [4, 2]
[task.kernel]
{kernel}
entry = "blend"
args = ["x", "kept", "y", "items.x", "items.y", "records.x", "meta.k", "meta.i", "meta.f", "meta.w", "u32:100", "i32:-30", "f32:0.5"]
[[feed]]
to = "t.x"
[[feed]]
to = "t.k"
[[feed]]
to = "t.i"
[[feed]]
to = "t.f"
[[feed]]
to = "t.w"
[[drain]]
from = "t.y"
"#
        )
    };
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("blend.cl"), KERNEL).unwrap();
    std::fs::write(dir.path().join("g.toml"), text("file = \"blend.cl\"")).unwrap();
    std::fs::write(dir.path().join("none.toml"), text("file = \"none.cl\"")).unwrap();
    let why = load(&dir.path().join("none.toml"), &Library::new()).err().unwrap().to_string();
    assert!(why.contains("none.toml:10") && why.contains("none.cl"), "{why}");
    for kind in [Kind::OpenCl, Kind::Cuda] {
        let graphs = [
            load(&dir.path().join("g.toml"), &Library::new()).unwrap(),
            parse(&text(&format!("source = '''{KERNEL}'''")), &Library::new()).unwrap(),
        ];
        for g in graphs {
            let rt = match Runtime::builder().only(kind) {
                Ok(b) => b.build().unwrap(),
                Err(e) => {
                    eprintln!("skipped: {e}");
                    continue;
                }
            };
            let [x, k, i, f, w] = ["t.x", "t.k", "t.i", "t.f", "t.w"].map(|p| feed(&g, p));
            let y = drain(&g, "t.y");
            let run = rt.start(g).unwrap();
            for n in [5usize, 8, 1] {
                let data: Vec<f32> = (0..n).map(|i| i as f32).collect();
                run.push(x, Datablock::from_slice(Template::records::<f32>(8), &data).unwrap()).unwrap();
                push(&run, k, 9u32);
                push(&run, i, -5i32);
                push(&run, f, 0.25f32);
                push(&run, w, 3u64 << 33);
                let want: Vec<f32> = (0..8).map(|i| if i < n { i as f32 * 0.5 } else { 0.0 } + 77.25).collect();
                assert_eq!(pull::<f32>(&run, y), want, "{kind}");
            }
        }
    }
}

/// The example of the documentation.
#[test]
fn the_documented_file_is_a_good_one() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/graph-files.md")).unwrap();
    let example = text.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("g.toml"), example).unwrap();
    std::fs::write(dir.path().join("blur.cl"), "").unwrap();
    let g = load(&dir.path().join("g.toml"), &Library::new()).unwrap();
    g.check().unwrap();
    assert_eq!((g.name(), g.size()), ("smooth", (1, 3)));
}

#[test]
fn mistakes_of_each_part_have_their_place() {
    let task =
        |rest: &str| format!("[[task]]\nname = \"t\"\noutputs = [{{ name = \"y\", type = \"f32[4]\" }}]\n{rest}\n");
    let kernel = |k: &str| task(&format!("kernel = {{ {k} }}"));
    let cases = [
        (task("inputs = [{ name = \"x\" }]"), 4, "port \"x\" needs a type"),
        (task("inputs = [{ name = \"x\", type = \"f32\", kind = \"stucky\" }]"), 4, "unknown kind of port \"stucky\""),
        (task("inputs = [{ name = \"x\", kind = \"initializer\" }]"), 4, "initializer port \"x\" needs `of`"),
        (task("inputs = [{ name = \"x\", kind = \"size\" }]"), 4, "size port \"x\" needs `of`"),
        (task("inputs = [{ name = \"x\", kind = \"size\", of = \"y\" }]"), 1, "fixed size"),
        (task("inputs = [{ name = \"x\", type = \"f64\", kind = \"meta\" }]"), 4, "cannot hold f64"),
        (task("geometry = []"), 1, "one to three numbers"),
        (task("geometry = [1, 2, 3, 4]"), 1, "one to three numbers"),
        (task("geometry = [0]"), 1, "one to three numbers"),
        (task("iterations = 0"), 1, "iterations"),
        (kernel("entry = \"k\", args = []"), 4, "either a `file` or a `source`"),
        (kernel("file = \"k.cl\", source = \"\", entry = \"k\", args = []"), 4, "either a `file` or a `source`"),
        (kernel("file = \"k.cl\", entry = \"k\", args = []"), 4, "without a file cannot name"),
        (kernel("source = \"\", entry = \"k\", args = [\"u32:x\"]"), 4, "\"u32:x\" is no u32"),
        (kernel("source = \"\", entry = \"k\", args = [\"i8:1\"]"), 4, "constants are"),
        (kernel("source = \"\", entry = \"k\", args = [\"items.w\"]"), 4, "dimension"),
        (kernel("source = \"\", entry = \"k\", args = [\"sizes.y\"]"), 4, "known prefixes"),
        (task("host = \"copy\"\n[[drain]]\nfrom = \"t\""), 6, "task.port"),
    ];
    for (text, line, why) in cases {
        match parse(&text, &Library::standard()) {
            Err(Error::File { line: l, column, why: w, .. }) => {
                assert!(w.contains(why), "{text}\n{w}");
                assert!(l == line && column >= 1, "{text}\nline {l}: {w}");
            }
            Err(e) => panic!("{text}\nno place in: {e}"),
            Ok(_) => panic!("{text}\naccepted"),
        }
    }
}

/// `copy` is of bytes, which may be another port's elements, and of no more than there is room for.
#[test]
fn copies_of_other_types_are_as_long_as_their_bytes() {
    let copied = |from: &str, to: &str, given: &[f64]| {
        let text = format!(
            "[[task]]\nname = \"c\"\nhost = \"copy\"\ninputs = [{{ name = \"x\", type = \"{from}\" }}]\n\
             outputs = [{{ name = \"y\", type = \"{to}\" }}]\n[[feed]]\nto = \"c.x\"\n[[drain]]\nfrom = \"c.y\"\n"
        );
        let g = parse(&text, &Library::standard()).unwrap();
        let (x, y) = (feed(&g, "c.x"), drain(&g, "c.y"));
        let run = cpu().start(g).unwrap();
        run.push(x, Datablock::from_slice(from.parse().unwrap(), given)?)?;
        Ok::<_, Error>(run.pull_timeout(y, Duration::from_secs(20))?.as_bytes()?.to_vec())
    };
    let numbers = [1.5f64, -2.5, 1e300, 0.0];
    let bytes: Vec<u8> = numbers.iter().flat_map(|v| v.to_ne_bytes()).collect();
    for (from, to) in [("f64[4]", "u8[32]"), ("f64<=4", "u8<=100"), ("f64[4]", "f64<=9"), ("f64<=9", "f64[2x2]")] {
        assert_eq!(copied(from, to, &numbers).unwrap(), bytes, "{from} {to}");
    }
    let many = [1.0; 64];
    for (from, to) in
        [("f64[64]", "u8[64]"), ("f64<=100", "u8<=100"), ("f64<=64", "f64[65]"), ("f64[64]", "record7<=99")]
    {
        let why = copied(from, to, &many).unwrap_err().to_string();
        assert!(why.contains("512 B"), "{from} {to}: {why}");
    }
}
