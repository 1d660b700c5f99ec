//! Random programs: several threads submit whatever there is, one by one and together, and wait, forget, or leave a function to be
//! called; on grids of every size. Each task is done once, and answers its own ticket.

use std::sync::mpsc::{Receiver, Sender, channel};

use forebay::resident::{Completion, Ticket};
use proptest::prelude::*;

use super::*;

/// What is submitted.
#[derive(Clone, Copy, Debug)]
enum What {
    Add(u64),
    Sum(u64, u64),
    ThreadAdds(u64, u64),
    WarpAdds(u64, u64),
    Tree(u64),
    Diamond(u64),
    Gather(u64),
    Heap(u64),
    Fails,
    Unknown,
    Endless(u32),
    /// A tree that may not end.
    Limited(u64, u32),
    /// So many of one item for a lane each, submitted together.
    Together(u64),
}

/// How it is awaited.
#[derive(Clone, Copy, Debug)]
enum How {
    Wait,
    /// Once this thread has submitted all of its own, the latest first.
    Later,
    /// With a limit that may be too short, and again.
    Shortly,
    Forget,
    Call,
    /// When the grid has ended.
    Keep,
}

/// How the grid ends, with tasks that nobody has waited for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Drain,
    Stop,
    Drop,
}

#[derive(Clone, Debug)]
struct Case {
    blocks: usize,
    ring: u32,
    nodes: u32,
    queue: u32,
    aside: usize,
    grain: u64,
    heap: bool,
    end: End,
    threads: Vec<Vec<(What, How, bool)>>,
}

const THREADS: usize = 3;
const EACH: usize = 30;

fn what() -> impl Strategy<Value = What> {
    let range = || (0u64..5000, prop_oneof![0u64..3, 3u64..300, Just(3000u64)]);
    prop_oneof![
        3 => any::<u32>().prop_map(|x| What::Add(x.into())),
        2 => range().prop_map(|(first, n)| What::Sum(first, n)),
        2 => range().prop_map(|(first, n)| What::ThreadAdds(first, n)),
        1 => range().prop_map(|(first, n)| What::WarpAdds(first, n)),
        2 => (0u64..8).prop_map(What::Tree),
        2 => (1u64..40).prop_map(What::Diamond),
        1 => (1u64..500).prop_map(What::Gather),
        1 => (0u64..40).prop_map(What::Heap),
        1 => Just(What::Fails),
        1 => Just(What::Unknown),
        1 => (1u32..100).prop_map(What::Endless),
        1 => (0u64..8, 1u32..300).prop_map(|(depth, fuel)| What::Limited(depth, fuel)),
        2 => (1u64..1500).prop_map(What::Together),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let how = prop_oneof![
        Just(How::Wait),
        Just(How::Later),
        Just(How::Shortly),
        Just(How::Forget),
        Just(How::Call),
        Just(How::Keep)
    ];
    let each = prop::collection::vec((what(), how, any::<bool>()), 1..EACH);
    let aside = prop_oneof![0usize..4, Just(64usize)];
    let sizes = (1usize..5, 1u32..8, 1u32..9, 1u32..9, aside, 1u64..200, any::<bool>());
    let end = prop_oneof![Just(End::Drain), Just(End::Stop), Just(End::Drop)];
    let all = (sizes, end, prop::collection::vec(each, 1..=THREADS));
    all.prop_map(|((blocks, ring, nodes, queue, aside, grain, heap), end, threads)| Case {
        blocks,
        ring,
        nodes,
        queue,
        aside,
        grain,
        heap,
        end,
        threads,
    })
}

fn calls(g: &Grid, what: What, count: &AtomicU64, spare: &AtomicU64) -> Vec<Call> {
    let (at, spare) = (address(count), address(spare));
    let one = |name: &str, args: &[u64]| call(g, name, args);
    vec![match what {
        What::Add(x) => one("add", &[x, 1]),
        What::Sum(first, n) => one("sum", &[at]).range(first, n),
        What::ThreadAdds(first, n) => one("thread_adds", &[at]).range(first, n),
        What::WarpAdds(first, n) => one("warp_adds", &[at]).range(first, n),
        What::Tree(depth) => one("tree", &[depth, at, spare]),
        What::Diamond(n) => one("diamond", &[n, at]),
        What::Gather(n) => one("gather", &[at, n]),
        What::Heap(n) => one("heap", &[n, 0]),
        What::Fails => one("fails", &[]),
        What::Unknown => one("unknown", &[]),
        What::Endless(fuel) => one("endless", &[]).fuel(fuel),
        What::Limited(depth, fuel) => one("tree", &[depth, at, spare]).fuel(fuel),
        What::Together(n) => return (0..n).map(|i| one("thread_adds", &[at]).range(i, 1)).collect(),
    }]
}

/// What its word has to say once it is done; none if that depends.
fn counted(what: What) -> Option<u64> {
    match what {
        What::Sum(first, n) | What::ThreadAdds(first, n) | What::WarpAdds(first, n) => Some((first..first + n).sum()),
        What::Together(n) => Some((0..n).sum()),
        What::Tree(depth) => Some(1 << depth),
        What::Add(_) | What::Heap(_) | What::Fails | What::Unknown | What::Endless(_) => Some(0),
        What::Diamond(_) | What::Gather(_) | What::Limited(..) => None,
    }
}

/// Whether that can be what came of it.
fn judge(c: &Case, what: What, came: &Result<Completion, Error>, count: u64) {
    let right = match (what, came) {
        (What::Add(x), Ok(d)) => d.result_as::<u64>() == x + 1,
        // Nobody else's word, of which several tickets may be under way.
        (What::Together(_), Ok(_)) => true,
        (What::Sum(..) | What::ThreadAdds(..) | What::WarpAdds(..) | What::Tree(_), Ok(_)) => {
            Some(count) == counted(what)
        }
        (What::Diamond(n) | What::Gather(n), Ok(d)) => (d.result_as::<u64>(), count) == (1, n),
        // No room for its node, or for what it is to become.
        (What::Diamond(_) | What::Gather(_), Err(Error::Failed { status: FIRST_OWN, .. })) => count == 0,
        (What::Heap(n), Ok(d)) => {
            let made = if c.heap { n } else { 0 };
            d.result_as::<[u64; 2]>() == [made, made * made.saturating_sub(1) / 2]
        }
        (What::Fails, Err(Error::Failed { status, .. })) => *status == FIRST_OWN << 3,
        (What::Unknown, Err(Error::UnknownFunction { .. })) => true,
        (What::Endless(_), Err(Error::OutOfFuel { .. })) => true,
        // With less than a unit for each task it may still be enough, if there was no room for some.
        (What::Limited(depth, _), Ok(_)) => count == 1 << depth,
        (What::Limited(depth, fuel), Err(Error::OutOfFuel { .. })) => {
            u64::from(fuel) < (2 << depth) - 1 && count <= 1 << depth
        }
        _ => false,
    };
    assert!(right, "of {what:?} came {came:?}, and it counted {count}");
}

type Told = (usize, Result<Completion, Error>);

/// One thread's part: what it has submitted, and keeps.
fn submit(
    g: &Grid,
    c: &Case,
    ops: &[(What, How, bool)],
    words: &'static [AtomicU64],
    first: usize,
    tell: &Sender<Told>,
) -> Vec<(usize, Ticket)> {
    let count = |i: usize| words[2 * i].load(Ordering::Relaxed);
    let (mut later, mut kept) = (Vec::new(), Vec::new());
    for (at, (what, how, urgent)) in ops.iter().enumerate() {
        let i = first + at;
        let all = calls(g, *what, &words[2 * i], &words[2 * i + 1]);
        let all: Vec<Call> = all.into_iter().map(|c| if *urgent { c.urgent() } else { c }).collect();
        if let (How::Call, [one]) = (how, &all[..]) {
            let tell = tell.clone();
            g.submit_then(*one, move |came| tell.send((i, came)).unwrap()).unwrap();
            continue;
        }
        let tickets = match &all[..] {
            [one] if at % 2 == 0 => loop {
                match g.try_submit(*one) {
                    Err(Error::Full(_)) => std::thread::yield_now(),
                    other => break vec![other.unwrap()],
                }
            },
            [one] => vec![g.submit(*one).unwrap()],
            _ => g.submit_all(all.iter().copied()).unwrap(),
        };
        for mut ticket in tickets {
            match how {
                How::Wait => judge(c, *what, &g.wait(ticket), count(i)),
                How::Later => later.push((i, *what, ticket)),
                How::Shortly => loop {
                    match g.wait_for(ticket, Duration::from_micros(30)) {
                        Err((Error::TimedOut { .. }, Some(again))) => ticket = again,
                        other => break judge(c, *what, &other.map_err(|(e, _)| e), count(i)),
                    }
                },
                How::Forget => drop(ticket),
                How::Keep | How::Call => kept.push((i, ticket)),
            }
        }
    }
    for (i, what, ticket) in later.into_iter().rev() {
        judge(c, what, &g.wait(ticket), count(i));
    }
    kept
}

/// So much, until it stands still, in which case that is said.
fn hear(from: &Receiver<Told>) -> Told {
    from.recv_timeout(Duration::from_secs(60)).expect("a function was not called")
}

fn run(c: &Case, words: &'static [AtomicU64]) -> bool {
    words.iter().for_each(|w| w.store(0, Ordering::Relaxed));
    let b = builder().blocks(c.blocks).ring(1 << c.ring).nodes(1 << c.nodes).queue(1 << c.queue);
    let b = b.aside(c.aside).grain(c.grain);
    let Some(mut g) = start(if c.heap { b.heap(4 << 20) } else { b }) else { return false };
    let (tell, told) = channel();
    let firsts: Vec<usize> = c.threads.iter().scan(0, |n, ops| Some(std::mem::replace(n, *n + ops.len()))).collect();
    let kept: Vec<(usize, Ticket)> = std::thread::scope(|s| {
        let parts = c.threads.iter().zip(&firsts).map(|(ops, &first)| {
            let (g, tell) = (&g, tell.clone());
            s.spawn(move || submit(g, c, ops, words, first, &tell))
        });
        let parts: Vec<_> = parts.collect();
        parts.into_iter().flat_map(|p| p.join().unwrap()).collect()
    });
    drop(tell);
    let all: Vec<(What, How)> = c.threads.iter().flatten().map(|(what, how, _)| (*what, *how)).collect();
    let count = |i: usize| words[2 * i].load(Ordering::Relaxed);
    let is_drained = c.end == End::Drain;
    match c.end {
        End::Drain => g.drain().unwrap(),
        End::Stop => g.stop().unwrap(),
        End::Drop => {
            drop(g);
            return true;
        }
    }
    let may_be = |i: usize, came: Result<Completion, Error>| match came {
        Err(Error::Stopped) => assert!(!is_drained, "{:?} was not done", all[i].0),
        came => judge(c, all[i].0, &came, count(i)),
    };
    kept.into_iter().for_each(|(i, t)| may_be(i, g.wait(t)));
    let single = |(what, how): &&(What, How)| matches!(how, How::Call) && !matches!(what, What::Together(n) if *n > 1);
    for _ in 0..all.iter().filter(single).count() {
        let (i, came) = hear(&told);
        may_be(i, came);
    }
    assert!(told.recv_timeout(Duration::from_secs(60)).is_err(), "a function was called twice");
    if is_drained {
        for (i, (what, _)) in all.iter().enumerate() {
            assert!(counted(*what).is_none_or(|n| n == count(i)), "{what:?} counted {}", count(i));
        }
    }
    true
}

#[test]
fn random_programs_are_done_once_and_answer_their_own_tickets() {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    let config = ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 40, ..Default::default() };
    let words = words(2 * THREADS * EACH);
    proptest!(config, |(c in case())| {
        // One that stands still is to be seen.
        let (done, ended) = channel::<()>();
        let text = format!("{c:?}");
        let watch = std::thread::spawn(move || {
            if let Err(std::sync::mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(Duration::from_secs(120)) {
                eprintln!("stands still: {text}");
                std::process::abort();
            }
        });
        let is_here = run(&c, words);
        drop(done);
        watch.join().unwrap();
        if !is_here {
            return Ok(());
        }
    });
}
