//! Programs that fork: the child is another program to the service, and the first one's presence is the first one's.

mod common;

use std::time::Duration;

use common::{Program, Service, spin, until};
use forebay::place::Accelerated;
use forebay::{Datablock, Runtime, Task, Template};
use forebay_proto::client::Session;
use forebay_proto::wire::Class;

fn tasks() -> Accelerated {
    let word = Template::scalar::<u64>();
    let task = || {
        Task::new("t").input("x", word).output("y", word).host(move |inv| {
            spin(Duration::from_micros(500));
            inv.output::<u64>("y")?[0] = inv.value::<u64>("x")?;
            Ok(())
        })
    };
    Runtime::builder().cpu_only().build().unwrap().accelerate(1, task).unwrap()
}

fn call_for_ever(t: &Accelerated, mut each: impl FnMut(u64)) -> ! {
    let x = Datablock::scalar(1u64).unwrap();
    for n in 1.. {
        t.call(std::slice::from_ref(&x)).unwrap();
        each(n);
    }
    unreachable!()
}

/// Not a test: a program that forks, and both call a task for ever. It says in the file `RESULT` how often it has.
#[test]
#[ignore = "a program that other tests start"]
fn program() {
    let (session, t) = (Session::open("beside").unwrap(), tasks());
    let result = std::env::var("RESULT").unwrap();
    // SAFETY: the child lets go of what it has, makes its own, and never returns.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: a plain call.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            drop((session, t));
            call_for_ever(&tasks(), |_| {})
        }
        _ => call_for_ever(&t, |n| {
            assert!(session.is_served() && session.found() == 1);
            std::fs::write(&result, n.to_string()).unwrap();
        }),
    }
}

#[test]
fn a_forked_child_is_a_program_of_its_own() {
    let s = Service::start(&[]);
    let result = s.dir.join("result");
    let p = Program::start(&s, "program", &[("RESULT", result.to_str().unwrap().to_owned())]);
    let all = || s.connect().processes().unwrap();
    until("both have joined", || all().len() == 2);
    let child = all().iter().map(|c| c.pid).find(|pid| *pid != p.pid()).unwrap();
    let spent = |pid| s.process(pid).unwrap().spent_ns;
    let works = |pid, what: &str| {
        let before = spent(pid);
        until(what, || spent(pid) > before + 5_000_000);
    };
    works(p.pid(), "the first works");
    works(child, "the second works");
    // What is done to one is not done to the other.
    s.set(p.pid(), Class::Suspended);
    works(child, "the second works while the first may not");
    std::thread::sleep(Duration::from_millis(100));
    let done = || std::fs::read_to_string(&result).unwrap().parse::<u64>().unwrap_or(0);
    let before = done();
    std::thread::sleep(Duration::from_millis(200));
    assert!(done() <= before + 1, "it goes on although it is suspended");
    s.set(p.pid(), Class::Normal);
    until("the first goes on", || done() > before + 10);
    s.set(child, Class::Suspended);
    works(p.pid(), "the first works while the second may not");
}
