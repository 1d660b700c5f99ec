//! C: breadth-first search that stays on the device: levels follow each other by dependency counters, without the host.

use std::collections::VecDeque;

use forebay::resident::{Call, Grid, Result};

use super::{drop_completion, seconds};
use crate::bench::schema::Row;

/// A graph by rows.
pub(super) struct Csr {
    pub(super) offsets: Vec<u32>,
    pub(super) edges: Vec<u32>,
}

/// `Search` of tasks.cu.
#[repr(C)]
struct Search {
    offsets: *const u32,
    edges: *const u32,
    distances: *mut u32,
    frontier: [*mut u32; 2],
    count: [u32; 2],
}

/// Random numbers that are the same everywhere (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }
}

impl Csr {
    /// Of undirected edges.
    fn new(n: usize, pairs: &[(u32, u32)]) -> Self {
        let mut offsets = vec![0u32; n + 1];
        for &(a, b) in pairs {
            offsets[a as usize + 1] += 1;
            offsets[b as usize + 1] += 1;
        }
        for i in 0..n {
            offsets[i + 1] += offsets[i];
        }
        let (mut at, mut edges) = (offsets.clone(), vec![0; pairs.len() * 2]);
        for &(a, b) in pairs {
            for (from, to) in [(a, b), (b, a)] {
                edges[at[from as usize] as usize] = to;
                at[from as usize] += 1;
            }
        }
        Csr { offsets, edges }
    }

    pub(super) fn chain(n: u32) -> Self {
        Self::new(n as usize, &(1..n).map(|v| (v - 1, v)).collect::<Vec<_>>())
    }

    /// A square of places of which every eighth is a hole.
    pub(super) fn holes(side: u32) -> Self {
        let hole = |v: u32| v != 0 && v.wrapping_mul(2_654_435_761) >> 16 & 7 == 7;
        let mut pairs = Vec::new();
        for v in (0..side * side).filter(|v| !hole(*v)) {
            let right = (v % side + 1 < side).then_some(v + 1);
            let below = (v / side + 1 < side).then_some(v + side);
            pairs.extend(right.into_iter().chain(below).filter(|w| !hole(*w)).map(|w| (v, w)));
        }
        Self::new((side * side) as usize, &pairs)
    }

    /// Graph500's: 2^scale vertices, 16 edges for each, quarters of the matrix by 0.57, 0.19, 0.19, 0.05.
    pub(super) fn kronecker(scale: u32) -> Self {
        let mut random = Random(scale.into());
        let edge = |_| {
            let (mut a, mut b) = (0u32, 0);
            for _ in 0..scale {
                let (right, below) = match random.next() % 100 {
                    0..57 => (0, 0),
                    57..76 => (1, 0),
                    76..95 => (0, 1),
                    _ => (1, 1),
                };
                (a, b) = (a << 1 | right, b << 1 | below);
            }
            (a, b)
        };
        Self::new(1 << scale, &(0..16usize << scale).map(edge).collect::<Vec<_>>())
    }

    /// Erdős and Rényi's: 8 edges for each of `n` vertices, anywhere.
    pub(super) fn anywhere(n: u32) -> Self {
        let mut random = Random(n.into());
        let mut vertex = || (random.next() % u64::from(n)) as u32;
        Self::new(n as usize, &(0..8 * n).map(|_| (vertex(), vertex())).collect::<Vec<_>>())
    }

    pub(super) fn vertices(&self) -> usize {
        self.offsets.len() - 1
    }

    /// One after the other, on one core.
    pub(super) fn serial(&self) -> Vec<u32> {
        let mut distances = vec![u32::MAX; self.vertices()];
        let mut queue = VecDeque::from([0u32]);
        distances[0] = 0;
        while let Some(v) = queue.pop_front() {
            let row = self.offsets[v as usize] as usize..self.offsets[v as usize + 1] as usize;
            for &w in &self.edges[row] {
                if distances[w as usize] == u32::MAX {
                    distances[w as usize] = distances[v as usize] + 1;
                    queue.push_back(w);
                }
            }
        }
        distances
    }
}

/// Begins a search at vertex 0, and has `f` do it; then the distances are compared.
fn search(graph: &Csr, expected: &[u32], f: impl FnOnce(*mut Search) -> Result<()>) -> Result<()> {
    let n = graph.vertices();
    let (mut distances, mut a, mut b) = (vec![u32::MAX; n], vec![0u32; n], vec![0u32; n]);
    distances[0] = 0;
    let mut s = Search {
        offsets: graph.offsets.as_ptr(),
        edges: graph.edges.as_ptr(),
        distances: distances.as_mut_ptr(),
        frontier: [a.as_mut_ptr(), b.as_mut_ptr()],
        count: [1, 0],
    };
    f(&raw mut s)?;
    assert_eq!(distances, expected, "a breadth-first search went wrong");
    Ok(())
}

pub(super) fn run(grid: &Grid, rows: &mut Vec<Row>) -> Result<()> {
    let (level, one_level) = (grid.function("level")?, grid.function("one_level")?);
    let graphs = [
        ("a chain of 20 000", Csr::chain(20_000)),
        ("a square of 600 with holes", Csr::holes(600)),
        ("Kronecker, scale 16", Csr::kronecker(16)),
        ("Kronecker, scale 18", Csr::kronecker(18)),
        ("Erdős–Rényi, 2^17 vertices", Csr::anywhere(1 << 17)),
    ];
    for (name, graph) in graphs {
        let expected = graph.serial();
        let ours = seconds(|| {
            search(&graph, &expected, |s| {
                let args = [s as u64, 0];
                let ticket = grid.submit(Call::new(level).args(bytemuck::cast_slice(&args)))?;
                grid.wait(ticket).map(drop_completion)
            })
        })?;
        let by_level = seconds(|| {
            search(&graph, &expected, |s| {
                for l in 0u64.. {
                    let args = [s as u64, l];
                    // SAFETY: the grid has nothing to do with the search between levels.
                    let n = unsafe {
                        (*s).count[(l as usize + 1) & 1] = 0;
                        (*s).count[l as usize & 1]
                    };
                    if n == 0 {
                        break;
                    }
                    let call = Call::new(one_level).args(bytemuck::cast_slice(&args)).range(0, n.into());
                    grid.wait(grid.submit(call)?)?;
                }
                Ok(())
            })
        })?;
        let serial = seconds(|| {
            std::hint::black_box(graph.serial());
            Ok(())
        })?;
        let row = Row::new(format!("C, cpu: search of {name}"), "ms", Some(ours * 1e3));
        rows.push(
            row.peer("host waits for each level", Some(by_level * 1e3)).peer("loop on one core", Some(serial * 1e3)),
        );
    }
    Ok(())
}
