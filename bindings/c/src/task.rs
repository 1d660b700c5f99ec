//! Tasks: ports, and what does the work.

use std::ffi::{c_char, c_void};

use forebay::{Arg, Geometry, Invocation, Kind, Task, TaskError};

use crate::block::template;
use crate::{Failure, free, give, invalid, known, put, status, text};

/// A task under construction; each call replaces what is inside.
pub struct forebay_task(pub(crate) Task);

/// One invocation of a task's function.
pub struct forebay_invocation {
    /// A borrow of the runtime's, for the length of the call.
    inner: *mut Invocation<'static>,
    failed: Option<String>,
}

/// A function that does a task's work on the CPU: 0 for success. It may be called on any thread, never twice at once.
pub type forebay_function = Option<unsafe extern "C" fn(invocation: *mut forebay_invocation, user: *mut c_void) -> i32>;
/// Is called with `user` when the function is no longer needed.
pub type forebay_release = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// What C gave us to pass on, and take back at the end.
pub(crate) struct User {
    pub(crate) user: *mut c_void,
    pub(crate) release: forebay_release,
}

// SAFETY: C was told that any thread may use it, one at a time.
unsafe impl Send for User {}

impl Drop for User {
    fn drop(&mut self) {
        if let Some(f) = self.release {
            // SAFETY: C's function, with what it belongs to, once.
            unsafe { f(self.user) };
        }
    }
}

/// Replaces the task by what `f` makes of it.
///
/// # Safety
/// NULL, or a task that nobody else uses now.
unsafe fn with(task: *mut forebay_task, f: impl FnOnce(Task) -> Task) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    let t = unsafe { known(task, "the task")? };
    // In between there is another one in its place; `f` cannot fail and leave that there.
    let old = std::mem::replace(&mut t.0, Task::new("gone"));
    t.0 = f(old);
    Ok(())
}

/// Makes a task of this name.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_task_new(name: *const c_char, task: *mut *mut forebay_task) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { give(task, forebay_task(Task::new(text(name, "the name")?))) })
}

/// Gives a task back that was not added to a graph.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_task_free(task: *mut forebay_task) {
    // SAFETY: C's promise.
    unsafe { free(task) };
}

/// Adds an input port.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_task_input(task: *mut forebay_task, port: *const c_char, of: *const c_char) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let (port, t) = (text(port, "the port")?, template(of)?);
        with(task, |k| k.input(port, t))
    })
}

/// Adds an input port that keeps its block until another one comes.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_task_sticky(task: *mut forebay_task, port: *const c_char, of: *const c_char) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let (port, t) = (text(port, "the port")?, template(of)?);
        with(task, |k| k.sticky(port, t))
    })
}

/// Adds an output port.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_task_output(task: *mut forebay_task, port: *const c_char, of: *const c_char) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let (port, t) = (text(port, "the port")?, template(of)?);
        with(task, |k| k.output(port, t))
    })
}

/// Adds a port whose block comes in, is changed, and goes out.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_task_inout(task: *mut forebay_task, port: *const c_char, of: *const c_char) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let (port, t) = (text(port, "the port")?, template(of)?);
        with(task, |k| k.inout(port, t))
    })
}

/// Adds a port of any kind. `kind` is "input", "sticky", "output", "inout" or "meta" (one number that kernels may take), with the
/// port's template as `of`; "size", with the output that the number at it sizes; "initializer", with the input that it stands in
/// for at the start; "in-place", an output, with the input whose block it is; "geometry" (three u64: the iteration space) or
/// "iterations" (one u64: how many invocations come as a group), with NULL.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_task_port(
    task: *mut forebay_task,
    kind: *const c_char,
    port: *const c_char,
    of: *const c_char,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let (kind, port) = (text(kind, "the kind")?, text(port, "the port")?);
        let of = if of.is_null() { "" } else { text(of, "what it is of")? };
        known(task, "the task")?.0.add_port(kind, port, of).map_err(|why| invalid(&why))
    })
}

/// Has invocations come in groups of `n`: outputs of the first carry FOREBAY_BEGIN_ITERATION, of the last
/// FOREBAY_END_ITERATION, and initializers stand in at the start of each group.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_task_iterations(task: *mut forebay_task, n: u64) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { with(task, |k| k.iterations(n)) })
}

/// Lets a function do the work on the CPU. `release` (or NULL) is called with `user` when the function is no longer needed,
/// also when this call fails.
///
/// # Safety
/// As the rules say; function and user data may be used from any thread until they are released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_task_host(
    task: *mut forebay_task,
    function: forebay_function,
    user: *mut c_void,
    release: forebay_release,
) -> i32 {
    let user = User { user, release };
    status(|| {
        let function = function.ok_or_else(|| invalid("the function is NULL"))?;
        let call = move |inv: &mut Invocation<'_>| -> Result<(), TaskError> {
            // The whole of it belongs to this closure, not its fields one by one.
            let user = &user;
            let inner = std::ptr::from_mut(inv).cast::<Invocation<'static>>();
            let mut i = forebay_invocation { inner, failed: None };
            // SAFETY: C's function as it was given; what it gets lives until it returns.
            let code = unsafe { function(&mut i, user.user) };
            match (i.failed, code) {
                (Some(why), _) => Err(why.into()),
                (None, 0) => Ok(()),
                (None, code) => Err(format!("the function returned {code}").into()),
            }
        };
        // SAFETY: C's promise.
        unsafe { with(task, |k| k.host(call)) }
    })
}

/// Lets a kernel do the work on devices of one kind, "opencl" (OpenCL C) or "cuda" (CUDA C++), or on both with NULL (a text
/// in the subset of both: KERNEL, GLOBAL, gid_x(); docs/c.md). `args` are the kernel's arguments, with spaces between them:
/// ports ("x"), numbers ("u32:5", "i32:-5", "f32:0.5"), "items.x" to "items.z" of the iteration space, "records.x" of a port;
/// with NULL the ports in the order in which they were declared, inputs first.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_task_kernel(
    task: *mut forebay_task,
    kind: *const c_char,
    source: *const c_char,
    entry: *const c_char,
    args: *const c_char,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let (source, entry) = (text(source, "the source")?, text(entry, "the entry point")?);
        let args = match args.is_null() {
            true => None,
            false => {
                let words = text(args, "the arguments")?.split_whitespace();
                Some(words.map(str::parse).collect::<Result<Vec<Arg>, String>>().map_err(|why| invalid(&why))?)
            }
        };
        let kind = match kind.is_null() {
            true => None,
            false => Some(text(kind, "the kind")?.parse::<Kind>().map_err(|why| invalid(&why))?),
        };
        Ok(known(task, "the task")?.0.add_kernel(kind, source, entry, args)?)
    })
}

/// Sets the static priority: more comes first.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_task_priority(task: *mut forebay_task, priority: i32) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { with(task, |k| k.priority(priority)) })
}

/// Sets the iteration space instead of the one that the templates imply.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_task_geometry(task: *mut forebay_task, x: usize, y: usize, z: usize) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { with(task, |k| k.geometry(Geometry::new(x, y, z))) })
}

/// The runtime's invocation.
///
/// # Safety
/// NULL, or what a task's function was called with, during that call.
unsafe fn inside<'a>(
    i: *mut forebay_invocation,
) -> Result<(&'a mut forebay_invocation, &'a mut Invocation<'static>), Failure> {
    // SAFETY: the caller's promise.
    let i = unsafe { known(i, "the invocation")? };
    // SAFETY: lives as long as the call, which is now; the lifetime is only longer in name, and nothing of it is kept.
    let inner = unsafe { &mut *i.inner };
    Ok((i, inner))
}

fn of_task(e: TaskError) -> Failure {
    Failure(crate::FOREBAY_FAILED, e.to_string())
}

/// The bytes at an input port, for reading.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_invocation_input(
    invocation: *mut forebay_invocation,
    port: *const c_char,
    data: *mut *const c_void,
    len: *mut usize,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let port = text(port, "the port")?;
        let b = inside(invocation)?.1.block(port).map_err(of_task)?.as_bytes()?;
        put(data, b.as_ptr().cast())?;
        put(len, b.len())
    })
}

/// The bytes at an output port, for writing; once in an invocation.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_invocation_output(
    invocation: *mut forebay_invocation,
    port: *const c_char,
    data: *mut *mut c_void,
    len: *mut usize,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let port = text(port, "the port")?;
        let b = inside(invocation)?.1.output_bytes(port).map_err(of_task)?;
        put(data, b.as_mut_ptr().cast())?;
        put(len, b.len())
    })
}

/// Sets how many elements go out at a port of records or bytes.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_invocation_set_records(
    invocation: *mut forebay_invocation,
    port: *const c_char,
    n: usize,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let port = text(port, "the port")?;
        Ok(inside(invocation)?.1.out(port).map_err(of_task)?.set_records(n)?)
    })
}

/// Which invocation of its group this is, from 0.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_invocation_iteration(invocation: *mut forebay_invocation, n: *mut u64) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { put(n, inside(invocation)?.1.iteration()) })
}

/// Has a task without inputs end: this is its last invocation.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_invocation_finish(invocation: *mut forebay_invocation) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        inside(invocation)?.1.finish();
        Ok(())
    })
}

/// Says why the function fails; it then returns anything.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_invocation_fail(invocation: *mut forebay_invocation, why: *const c_char) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let why = text(why, "the reason")?;
        inside(invocation)?.0.failed = Some(why.into());
        Ok(())
    })
}
