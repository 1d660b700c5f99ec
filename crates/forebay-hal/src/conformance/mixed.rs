//! A queue is in order, whatever it does side by side: random commands over few buffers, against a model that does them
//! one by one.

use std::ptr::NonNull;

use super::{ensure, source, text, words};
use crate::{Arg, Buffer, Device, Geometry, Listed, Queue, Recorded};

/// Words of a buffer: more than what any device copies beside its kernels from (`Device::copies_beside`).
const WORDS: usize = 100_000;
const BUFFERS: usize = 3;
const COMMANDS: usize = 250;

struct Random(u64);

impl Random {
    /// SplitMix64.
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % n as u64) as usize
    }

    /// All of a buffer, a large part, or a small one.
    fn part(&mut self) -> (usize, usize) {
        match self.below(3) {
            0 => (0, WORDS),
            1 => (self.below(20_000), 75_000),
            _ => (self.below(WORDS - 50), 50),
        }
    }
}

/// What a function of the host gets.
struct Address(NonNull<u8>);
// SAFETY: used by one function at a time, in the queue's order.
unsafe impl Send for Address {}

struct Side {
    buffers: Vec<Buffer>,
    model: Vec<Vec<u32>>,
}

/// A part of one side's buffer into the other's, in the model.
fn copy(from: &Side, i: usize, to: &mut Side, j: usize, (at, n): (usize, usize)) {
    to.model[j][at..at + n].copy_from_slice(&from.model[i][at..at + n]);
}

pub(super) fn mixed(d: &dyn Device) -> std::result::Result<(), String> {
    for seed in 0..3 {
        one(d, seed).map_err(|e| format!("seed {seed}: {e}"))?;
    }
    in_place(d)
}

/// A kernel writes into memory of the host, which a copy then takes from there; and the other way round.
fn in_place(d: &dyn Device) -> std::result::Result<(), String> {
    let Ok((h, shared)) = d.alloc_shared(4 * WORDS) else { return Ok(()) };
    let k = d.compile(&source(d.info().kind, "twice"), "twice").map_err(text)?;
    let mut q = d.queue().map_err(text)?;
    let made = (0..3).map(|_| d.alloc(4 * WORDS)).collect::<crate::Result<Vec<_>>>().map_err(text)?;
    let [a, b, copied] = &made[..] else { return Err("three buffers".into()) };
    let launch = |q: &mut dyn Queue, from: &Buffer, to: &Buffer| {
        q.launch(&k, &Geometry::linear(WORDS), &[Arg::Buffer(from), Arg::Buffer(to), Arg::U32(WORDS as u32)])
    };
    q.fill(a, 0, 4 * WORDS, 0).map_err(text)?;
    q.copy(&h, 0, copied, 0, 4 * WORDS).map_err(text)?;
    for round in 0..8 {
        // So many before it that it is not done when the copy is issued.
        for _ in 0..9 {
            launch(&mut *q, a, b).map_err(text)?;
        }
        let from = if round % 2 == 0 { a } else { b };
        launch(&mut *q, from, &shared).map_err(text)?;
        q.copy(&h, 0, copied, 0, 4 * WORDS).map_err(text)?;
        launch(&mut *q, a, &shared).map_err(text)?;
        let back = super::read(d, &mut *q, copied).map_err(text)?;
        let right = if round % 2 == 0 { 1 } else { 3 };
        ensure(back.iter().all(|&v| v == right), || format!("round {round}: not {right}, as the kernel wrote"))?;
    }
    Ok(())
}

fn one(d: &dyn Device, seed: u64) -> std::result::Result<(), String> {
    let k = d.compile(&source(d.info().kind, "twice"), "twice").map_err(text)?;
    let mut q = d.queue().map_err(text)?;
    let mut random = Random(seed);
    let side = |buffers: Vec<Buffer>| Side { model: vec![vec![0; WORDS]; buffers.len()], buffers };
    let alloc = |f: &dyn Fn() -> crate::Result<Buffer>| (0..BUFFERS).map(|_| f()).collect::<crate::Result<Vec<_>>>();
    let mut there = side(alloc(&|| d.alloc(4 * WORDS)).map_err(text)?);
    let mut here = side(alloc(&|| d.alloc_host(4 * WORDS)).map_err(text)?);
    // Host memory that kernels reach stands on both sides: the last of each.
    if let Ok((h, t)) = d.alloc_shared(4 * WORDS) {
        here.buffers.push(h);
        there.buffers.push(t);
    }
    for b in &there.buffers[..BUFFERS] {
        q.fill(b, 0, 4 * WORDS, 0).map_err(text)?;
    }
    here.model.resize(here.buffers.len(), vec![0; WORDS]);
    there.model.resize(there.buffers.len(), vec![0; WORDS]);
    let is_shared = |i: usize| i == BUFFERS;
    let mut recorded = [Recorded::default(), Recorded::default()];
    for step in 0..COMMANDS {
        let (i, j) = (random.below(there.buffers.len()), random.below(here.buffers.len()));
        let k2 = (i + 1 + random.below(there.buffers.len() - 1)) % there.buffers.len();
        let (at, n) = random.part();
        // Shared memory is the kernels' and the host's; copies take it for host memory.
        let only_kernels = is_shared(i);
        let (mut wrote_there, mut wrote_here) = (None, None);
        match random.below(20) {
            0..=3 if !only_kernels => {
                q.copy(&here.buffers[j], 4 * at, &there.buffers[i], 4 * at, 4 * n).map_err(text)?;
                copy(&here, j, &mut there, i, (at, n));
                wrote_there = Some(i);
            }
            4..=6 if !only_kernels => {
                q.copy(&there.buffers[i], 4 * at, &here.buffers[j], 4 * at, 4 * n).map_err(text)?;
                copy(&there, i, &mut here, j, (at, n));
                wrote_here = Some(j);
            }
            7..=10 => {
                let args = [Arg::Buffer(&there.buffers[i]), Arg::Buffer(&there.buffers[k2]), Arg::U32(WORDS as u32)];
                q.launch(&k, &Geometry::linear(WORDS), &args).map_err(text)?;
                there.model[k2] = there.model[i].iter().map(|v| v.wrapping_mul(2).wrapping_add(1)).collect();
                wrote_there = Some(k2);
            }
            11 if !only_kernels => {
                q.fill(&there.buffers[i], 4 * at, 4 * n, step as u8).map_err(text)?;
                there.model[i][at..at + n].fill(u32::from_ne_bytes([step as u8; 4]));
                wrote_there = Some(i);
            }
            12..=14 => {
                let p = here.buffers[j].host_ptr().ok_or("host memory without an address")?;
                let (p, value) = (Address(p), step as u32);
                q.host_fn(Box::new(move || {
                    let p = p;
                    // SAFETY: within the buffer, which outlives the queue's commands; the queue's order makes it ours now.
                    unsafe { std::slice::from_raw_parts_mut(p.0.cast::<u32>().add(at).as_ptr(), n) }.fill(value);
                }))
                .map_err(text)?;
                here.model[j][at..at + n].fill(value);
                wrote_here = Some(j);
            }
            15 => {
                q.fence().map_err(text)?;
            }
            _ => {
                let all = there.buffers.len();
                let steps: Vec<(usize, usize)> = (0..2 + random.below(3))
                    .map(|_| (random.below(all), 1 + random.below(all - 1)))
                    .map(|(from, on)| (from, (from + on) % all))
                    .collect();
                let buffer = |i: usize| Arg::Buffer(&there.buffers[i]);
                let args: Vec<_> =
                    steps.iter().map(|(from, to)| [buffer(*from), buffer(*to), Arg::U32(WORDS as u32)]).collect();
                let geometry = Geometry::linear(WORDS);
                let list: Vec<_> =
                    args.iter().map(|args| Listed { kernel: &k, geometry, args, writes: 0b10 }).collect();
                q.launch_list(&list, &mut recorded[step % 2]).map_err(text)?;
                for (from, to) in &steps {
                    there.model[*to] = there.model[*from].iter().map(|v| v.wrapping_mul(2).wrapping_add(1)).collect();
                }
                wrote_there = steps.iter().map(|(_, to)| *to).find(|to| is_shared(*to));
            }
        }
        // Shared memory is one under two names.
        if wrote_there.is_some_and(is_shared) {
            here.model[BUFFERS] = there.model[BUFFERS].clone();
        }
        if wrote_here.is_some_and(is_shared) {
            there.model[BUFFERS] = here.model[BUFFERS].clone();
        }
        if step % 80 == 79 {
            check(&mut *q, &here, &there, step)?;
        }
    }
    check(&mut *q, &here, &there, COMMANDS)
}

fn check(q: &mut dyn Queue, here: &Side, there: &Side, step: usize) -> std::result::Result<(), String> {
    let back = |b: &Buffer, q: &mut dyn Queue| -> crate::Result<Vec<u32>> {
        let h = crate::cpu::HostMemory::buffer(b.len())?;
        q.copy(b, 0, &h, 0, b.len())?;
        let f = q.fence()?;
        q.wait(f)?;
        Ok(words(&h))
    };
    for (i, (b, model)) in there.buffers[..BUFFERS].iter().zip(&there.model).enumerate() {
        let got = back(b, q).map_err(text)?;
        let wrong = got.iter().zip(model).position(|(g, m)| g != m);
        ensure(wrong.is_none(), || format!("before step {step}, device buffer {i} differs at {wrong:?}"))?;
    }
    for (j, (b, model)) in here.buffers.iter().zip(&here.model).enumerate() {
        let wrong = words(b).iter().zip(model).position(|(g, m)| g != m);
        ensure(wrong.is_none(), || format!("before step {step}, host buffer {j} differs at {wrong:?}"))?;
    }
    Ok(())
}
