//! The six workloads as tasks of StarPU, with our functions for cores and our kernels, in a process of its own for each policy.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use forebay::hal::portable::OPENCL_PRELUDE;
use forebay::{Arg, Impl, Kind, Launch, Source};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use tempfile::TempDir;

use super::super::{LEARN, Result, WHILE, Work, rate_of, text};
use super::{plugin, told, under};
use crate::bench::peers::{Peer, build};
use crate::workloads::mix::{self, Plain};

/// `struct argument` of starpu_mix.c.
#[repr(C)]
struct Argument {
    is_buffer: u32,
    value: u32,
}

/// `struct step` of starpu_mix.c.
#[repr(C)]
struct Step {
    entry: *const c_char,
    arguments: *const Argument,
    count: usize,
    global: [usize; 3],
    local: [usize; 3],
}

/// `struct work` of starpu_mix.c.
#[repr(C)]
struct Codelet {
    name: *const c_char,
    source: *const c_char,
    steps: *const Step,
    step_count: usize,
    buffers: *const *mut c_void,
    bytes: *const usize,
    buffer_count: usize,
    in_place: usize,
    on_core: unsafe extern "C" fn(*const c_void, *const *mut c_void),
    context: *const c_void,
}

/// What a codelet's function on a core is given.
struct OnCore {
    plain: &'static Plain,
    /// Which buffer each input is; none for the one that is changed in place.
    inputs: Vec<Option<usize>>,
    /// Sizes of the buffers, the written one last.
    bytes: Vec<usize>,
}

/// # Safety
/// `context` is an [`OnCore`], and `buffers` has as many as that says, of these sizes, aligned to 4 bytes; nobody else writes
/// them, and nobody else reads the last one.
unsafe extern "C" fn on_core(context: *const c_void, buffers: *const *mut c_void) {
    // SAFETY: as the caller promises.
    let c = unsafe { &*context.cast::<OnCore>() };
    // SAFETY: as the caller promises.
    let at = |i: usize| unsafe { (*buffers.add(i)).cast::<u8>() };
    let input = |i: &Option<usize>| -> &[u8] {
        // SAFETY: as the caller promises.
        i.map_or(&[], |i| unsafe { std::slice::from_raw_parts(at(i), c.bytes[i]) })
    };
    let inputs: Vec<&[u8]> = c.inputs.iter().map(input).collect();
    let last = c.bytes.len() - 1;
    // SAFETY: as the caller promises.
    let output = unsafe { std::slice::from_raw_parts_mut(at(last), c.bytes[last]) };
    (c.plain.on_core)(&inputs, output);
}

/// Lives as long as this process, which ends with the measurement.
fn kept<T>(what: T) -> &'static T {
    Box::leak(Box::new(what))
}

fn string(s: &str) -> Result<*const c_char> {
    CString::new(s).map(|s| kept(s).as_ptr()).map_err(|e| e.to_string())
}

/// The kernels for OpenCL of a workload's task.
fn launches(w: &Work) -> Result<Vec<Launch>> {
    let found = std::cell::RefCell::new(Vec::new());
    let _ = (w.task)().keep(|i| {
        if let Impl::Kernels(Kind::OpenCl, l) = i {
            found.borrow_mut().extend(l.iter().cloned());
        }
        true
    });
    Some(found.into_inner()).filter(|l| !l.is_empty()).ok_or_else(|| format!("{} has no kernels", w.name))
}

fn step(w: &Work, ports: &[&str], launch: &Launch) -> Result<Step> {
    let wrong = |what: &dyn std::fmt::Debug| format!("{}: StarPU's program cannot pass {what:?}", w.name);
    let geometry = launch.geometry().ok_or_else(|| wrong(&"no geometry"))?;
    let number = |value| Ok(Argument { is_buffer: 0, value });
    let argument = |a: &Arg| match a {
        Arg::Port(name) => {
            let at = ports.iter().position(|p| p == name).ok_or_else(|| wrong(a))?;
            Ok(Argument { is_buffer: 1, value: at as u32 })
        }
        Arg::Records(name) => {
            let at = w.plain.ports.iter().position(|p| p == name).ok_or_else(|| wrong(a))?;
            number(w.inputs.get(at).ok_or_else(|| wrong(a))?.records() as u32)
        }
        Arg::Items(d) => number(geometry.items[*d] as u32),
        Arg::U32(v) => number(*v),
        other => Err(wrong(other)),
    };
    let arguments = kept(launch.args().iter().map(argument).collect::<Result<Vec<_>>>()?);
    let local = geometry.group_or_default();
    let global = std::array::from_fn(|d| geometry.items[d].max(1).next_multiple_of(local[d]));
    Ok(Step { entry: string(launch.entry())?, arguments: arguments.as_ptr(), count: arguments.len(), global, local })
}

/// A workload and what it writes to.
struct Made {
    codelet: Codelet,
    output: *mut u32,
}

fn made(w: &'static Work) -> Result<Made> {
    let (last, names) = w.plain.ports.split_last().ok_or("no ports")?;
    let ports: Vec<&str> = names.iter().filter(|n| *n != last).chain([last]).copied().collect();
    let mut output = vec![0u32; w.plain.bytes / 4];
    let (mut buffers, mut bytes) = (Vec::new(), Vec::new());
    for (name, block) in names.iter().zip(&w.inputs) {
        let data = block.as_bytes().map_err(text)?;
        if name == last {
            bytemuck::cast_slice_mut(&mut output).copy_from_slice(data);
        } else {
            // StarPU only reads it.
            buffers.push(data.as_ptr().cast_mut().cast::<c_void>());
            bytes.push(data.len());
        }
    }
    let output = Vec::leak(output).as_mut_ptr();
    buffers.push(output.cast());
    bytes.push(w.plain.bytes);
    let launches = launches(w)?;
    let Some(Source::Portable(source)) = launches.first().map(Launch::source) else {
        return Err(format!("{}: kernels that are not portable", w.name));
    };
    let steps = kept(launches.iter().map(|l| step(w, &ports, l)).collect::<Result<Vec<_>>>()?);
    let inputs = names.iter().map(|n| ports[..ports.len() - 1].iter().position(|p| p == n)).collect();
    let context: &OnCore = kept(OnCore { plain: &w.plain, inputs, bytes });
    let codelet = Codelet {
        name: string(&format!("forebay_mix_{}", w.name))?,
        source: string(&format!("{OPENCL_PRELUDE}{source}"))?,
        steps: steps.as_ptr(),
        step_count: steps.len(),
        buffers: kept(buffers).as_ptr(),
        bytes: context.bytes.as_ptr(),
        buffer_count: context.bytes.len(),
        in_place: usize::from(w.plain.in_place()),
        on_core,
        context: (&raw const *context).cast(),
    };
    Ok(Made { codelet, output })
}

/// Whether StarPU's result is what our function on a core gives after as many calls.
fn check(w: &Work, output: *const u32, calls: usize) -> Result<()> {
    // SAFETY: `made` has leaked so many words, and StarPU has given them back.
    let got = unsafe { std::slice::from_raw_parts(output, w.plain.bytes / 4) };
    let inputs = w.inputs.iter().map(|b| b.as_bytes().map_err(text)).collect::<Result<Vec<_>>>()?;
    let mut wanted = vec![0u32; got.len()];
    if w.plain.in_place() {
        bytemuck::cast_slice_mut(&mut wanted).copy_from_slice(inputs[0]);
    }
    for _ in 0..if w.plain.in_place() { calls } else { 1 } {
        (w.plain.on_core)(&inputs, bytemuck::cast_slice_mut(&mut wanted));
    }
    let far = |(a, b): (&u32, &u32)| {
        let (x, y) = (f64::from(f32::from_bits(*a)), f64::from(f32::from_bits(*b)));
        let close = (x - y).abs() <= w.tolerance * x.abs().max(y.abs()).max(1.0);
        a != b && !close
    };
    match got.iter().zip(&wanted).position(far) {
        None => Ok(()),
        Some(at) => Err(format!("{}: StarPU's result differs at word {at} after {calls} calls", w.name)),
    }
}

/// The process: all workloads at once under the policy that the environment names; says how many calls in a second.
pub fn be(library: &Path) -> Result<()> {
    let works: &'static Vec<Work> = kept(mix::all(2).map_err(text)?);
    let made = works.iter().map(made).collect::<Result<Vec<_>>>()?;
    let (codelets, outputs): (Vec<_>, Vec<_>) = made.into_iter().map(|m| (m.codelet, m.output)).unzip();
    let failed = |e: libloading::Error| format!("{}: {e}", library.display());
    // SAFETY: it is the library that our parent has built; it does nothing when it is loaded. Everybody sees its symbols: a
    // policy that is preloaded finds StarPU among them.
    let library = unsafe { Library::open(Some(library), RTLD_NOW | RTLD_GLOBAL) }.map_err(failed)?;
    // SAFETY: the types are those of starpu_mix.c.
    let begin = unsafe { library.get::<unsafe extern "C" fn(*const Codelet, usize) -> c_int>(b"mix_begin") };
    // SAFETY: the same.
    let call = unsafe { library.get::<unsafe extern "C" fn(usize) -> c_int>(b"mix_call") }.map_err(failed)?;
    // SAFETY: the same.
    let end = unsafe { library.get::<unsafe extern "C" fn()>(b"mix_end") }.map_err(failed)?;
    let (call, codelets) = (*call, kept(codelets));
    // SAFETY: all that the codelets point to is leaked, and of the stated lengths.
    let begun = unsafe { begin.map_err(failed)?(codelets.as_ptr(), codelets.len()) };
    if begun != 0 {
        return Err("StarPU does not start here".into());
    }
    let counts: Vec<AtomicUsize> = works.iter().map(|_| AtomicUsize::new(0)).collect();
    let names: Vec<&str> = works.iter().map(|w| w.name).collect();
    let call = |i: usize| {
        counts[i].fetch_add(1, Ordering::Relaxed);
        // SAFETY: it has begun, and each workload has one thread that calls it.
        match unsafe { call(i) } {
            0 => Ok(()),
            code => Err(format!("{}: StarPU's error {code}", names[i])),
        }
    };
    (0..works.len()).try_for_each(|i| (0..LEARN).try_for_each(|_| call(i)))?;
    let rate = rate_of(works, WHILE, &|i, _| call(i))?;
    // SAFETY: nobody calls any more.
    unsafe { end() };
    for ((w, output), n) in works.iter().zip(outputs).zip(counts) {
        check(w, output, n.into_inner())?;
    }
    crate::say(&format!("rate {rate}"));
    Ok(())
}

/// Its parent.
pub struct Mix {
    library: Peer,
    /// StarPU's models.
    home: TempDir,
}

impl Mix {
    /// Builds it, and has dmda measure its models, without load as its manual says.
    pub fn new() -> Result<Self> {
        plugin()?;
        let library = build("starpu_mix.c", "gcc", "starpu-1.3", &["-lOpenCL", "-shared", "-fPIC"])?;
        let mix = Mix { library, home: tempfile::tempdir().map_err(|e| e.to_string())? };
        mix.run("dmda", true)?;
        Ok(mix)
    }

    fn run(&self, policy: &str, calibrate: bool) -> Result<f64> {
        let mut c = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
        c.args(["bench", "placement-starpu"]).arg(self.library.path());
        under(&mut c, policy, self.home.path(), calibrate)?;
        // By itself it has no worker for one core for each OpenCL device, and this mix is slower with it then.
        c.env("STARPU_NCPU", std::thread::available_parallelism().map_or(1, |n| n.get()).to_string());
        told(c, policy, "rate")
    }

    /// Calls in a second under a policy, the geometric mean of all workloads.
    pub fn rate(&self, policy: &str) -> Result<f64> {
        self.run(policy, false)
    }
}
