//! Tasks that are submitted many at a time, or many times.

use forebay::resident::Ticket;

use super::*;

#[test]
fn many_are_submitted_together() {
    let Some(g) = start(builder().blocks(2).ring(16)) else { return };
    let (by_lane, by_block) = (word(), word());
    // More than the table has room for; some of them for all lanes of a block, some ranges.
    let n = 10_000u64;
    let calls: Vec<Call> = (0..n)
        .map(|i| match i % 100 {
            0 => call(&g, "sum", &[address(by_block)]).range(i, 1),
            1 => call(&g, "thread_adds", &[address(by_lane)]).range(i, 3),
            _ => call(&g, "thread_adds", &[address(by_lane)]).range(i, 1),
        })
        .collect();
    for round in 1..=2u64 {
        let tickets = g.submit_all(calls.iter().copied()).unwrap();
        assert_eq!(tickets.len(), calls.len().div_ceil(TOGETHER));
        for t in tickets {
            g.wait(t).unwrap();
        }
        let blocks: u64 = (0..n).step_by(100).sum();
        let more: u64 = (1..n).step_by(100).map(|i| 2 * i + 3).sum();
        assert_eq!(by_block.load(Ordering::Relaxed), round * blocks);
        assert_eq!(by_lane.load(Ordering::Relaxed), round * ((0..n).sum::<u64>() - blocks + more));
    }
    assert!(g.submit_all([]).unwrap().is_empty());
    // What is wrong with one is known before any of its ticket is submitted; what goes wrong with one, all of its ticket hear.
    assert!(matches!(g.submit_all([calls[0], Call::new(99)]), Err(Error::NoFunction { .. })));
    // Each takes a unit for itself, and no more, however they are divided among the blocks.
    g.wait(g.submit_all(calls[..1000].iter().map(|c| c.fuel(1))).unwrap().remove(0)).unwrap();
    let endless = [call(&g, "endless", &[]).fuel(1), calls[2].fuel(1), calls[3].fuel(1)];
    let limited = g.wait(g.submit_all(endless).unwrap().remove(0)).unwrap_err();
    assert!(matches!(limited, Error::OutOfFuel { .. }), "{limited}");
    // One grid at a time is loaded.
    drop(g);
    let Some(g) = start(builder().blocks(1).aside(0).queue(2)) else { return };
    let large = [call(&g, "sum", &[address(by_block)]); 1000];
    let full = g.wait(g.submit_all(large).unwrap().remove(0)).unwrap_err();
    assert!(matches!(full, Error::NoRoom), "{full}");
}

/// Behind one that takes as long as it likes there is room for so many, and whoever does not wait is told so.
#[test]
fn some_are_submitted_together_if_there_is_room() {
    let Some(g) = start(builder().blocks(1).ring(16)) else { return };
    let (gate, sum) = (word(), word());
    let deaf = g.submit(call(&g, "deaf", &[address(gate), 0])).unwrap();
    let some = vec![call(&g, "thread_adds", &[address(sum)]).range(1, 1); TOGETHER];
    let mut tickets = Vec::new();
    let full = loop {
        match g.try_submit_together(&some) {
            Ok(t) => tickets.push(t),
            Err(e) => break e,
        }
    };
    assert!(matches!(full, Error::Full(4096)), "{full}");
    assert_eq!(tickets.len(), 4);
    gate.store(1, Ordering::Release);
    g.wait(deaf).unwrap();
    tickets.into_iter().for_each(|t| _ = g.wait(t).unwrap());
    assert_eq!(sum.load(Ordering::Relaxed), 4 * TOGETHER as u64);
    g.wait(g.try_submit_together(&some[..7]).unwrap()).unwrap();
    assert_eq!(sum.load(Ordering::Relaxed), 4 * TOGETHER as u64 + 7);
    for n in [0, TOGETHER + 1] {
        let e = g.try_submit_together(&vec![some[0]; n]).unwrap_err();
        assert!(matches!(e, Error::Setting { is, .. } if is == n as u64), "{e}");
    }
}

#[test]
fn pieces_of_the_table_are_each_one_writers_and_come_back() {
    let Some(g) = start(builder().blocks(2).ring(16)) else { return };
    let sum = word();
    let adds = |n: u64| vec![call(&g, "thread_adds", &[address(sum)]).range(1, 1); n as usize];
    let all_done = |tickets: Vec<Ticket>| {
        for t in tickets {
            g.wait(t).unwrap();
        }
    };
    // More often than there are pieces: what gives tasks panics, or gives one that is refused.
    for _ in 0..10 {
        let mut left = 3;
        let panics = std::iter::from_fn(|| {
            left -= 1;
            assert!(left > 0, "as told");
            Some(adds(1)[0])
        });
        let submitted = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| g.submit_all(panics).map(drop)));
        assert!(submitted.is_err());
        assert!(g.submit_all([adds(1)[0], Call::new(99)]).is_err());
    }
    // What gives tasks submits others itself, deeper than there are pieces, and from more threads.
    fn nested(g: &Grid, depth: u64, one: Call) -> Call {
        let inner = (0..2).map(|_| if depth == 0 { one } else { nested(g, depth - 1, one) });
        for t in g.submit_all(inner).unwrap() {
            g.wait(t).unwrap();
        }
        one
    }
    std::thread::scope(|s| {
        for _ in 0..6 {
            s.spawn(|| nested(&g, 5, adds(1)[0]));
        }
    });
    // Of each thread's, two at each depth for each one above.
    let so_far = 6 * (1..=6u32).map(|d| 1u64 << d).sum::<u64>();
    assert_eq!(sum.load(Ordering::Relaxed), so_far);
    // Several at a time, all of whose tasks are done once.
    std::thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| all_done(g.submit_all(adds(20_000)).unwrap()));
        }
    });
    assert_eq!(sum.load(Ordering::Relaxed), so_far + 3 * 20_000);
}

/// A task every word of which follows from `i`, and that answers with one more.
fn is_whole(g: &Grid, i: u64) -> Call {
    let words = [0, 1, 2, 3].map(|k| i.wrapping_mul(2 * k + 3));
    let c = Call::new(g.function("is_whole").unwrap()).args(bytemuck::cast_slice(&words)).range(i, 1);
    if i.is_multiple_of(3) { c.urgent() } else { c }
}

/// Slots of both rings, of which so many are filled by two producers that blocks take many at a time, in blocks of two sizes.
#[test]
fn slots_that_are_taken_many_at_a_time_are_whole() {
    for (threads, ring) in [(64, 128), (128, 1024)] {
        let Some(g) = start(builder().blocks(4).threads(threads).ring(ring)) else { return };
        let all = if on_a_gpu::is_here() { 1_000_000u64 } else { 3000 };
        std::thread::scope(|s| {
            for producer in 0..2u64 {
                let g = &g;
                s.spawn(move || {
                    let mut on_their_way = std::collections::VecDeque::new();
                    for n in 0..all {
                        let i = (2 * n + producer).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                        on_their_way.push_back((i, g.submit(is_whole(g, i)).unwrap()));
                        // The rings are full most of the time, and the oldest ticket's completion may be kept for it.
                        let (i, oldest) = match on_their_way.len() > ring {
                            true => on_their_way.pop_front().unwrap(),
                            false => continue,
                        };
                        assert_eq!(g.wait(oldest).unwrap().result_as::<u64>(), i.wrapping_add(1));
                    }
                    for (i, t) in on_their_way {
                        assert_eq!(g.wait(t).unwrap().result_as::<u64>(), i.wrapping_add(1));
                    }
                });
            }
        });
    }
}

/// Slots that are used again and again, by one task at a time, which a block that waits sees at once, and by several.
#[test]
fn a_slot_is_taken_whole_whether_somebody_waits_for_it_or_not() {
    let Some(g) = start(builder().blocks(3).ring(4)) else { return };
    let rounds = if on_a_gpu::is_here() { 100_000u64 } else { 2000 };
    for round in 0..rounds {
        let tickets: Vec<_> = (0..1 + round % 4)
            .map(|k| {
                let i = (4 * round + k).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                (i, g.submit(is_whole(&g, i)).unwrap())
            })
            .collect();
        for (i, t) in tickets {
            assert_eq!(g.wait(t).unwrap().result_as::<u64>(), i.wrapping_add(1), "round {round}");
        }
    }
}
