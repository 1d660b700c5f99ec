//! The operations of figure 11 as graphs of kernels: trees, rectangles, and real computations.

use forebay::{Geometry, Kind};

use super::kernels::{CHUNKS, GROUPS, PARTS};

/// One operation: floats in, floats out.
pub struct Op {
    pub entry: &'static str,
    /// Numbers of values: graph inputs first, then outputs of earlier operations.
    pub inputs: Vec<usize>,
    /// The first input is overwritten and is the output.
    pub in_place: bool,
    /// Scalar arguments, behind the buffers.
    pub numbers: Vec<u32>,
    /// Iteration space.
    pub space: Geometry,
    /// Floats of the output.
    pub size: usize,
}

/// A graph of operations; the last one's output is the result. Every graph input has `n`×`n` floats.
pub struct Dag {
    pub name: String,
    pub n: usize,
    pub sources: usize,
    pub ops: Vec<Op>,
}

impl Dag {
    fn new(n: usize, sources: usize) -> Self {
        Dag { name: String::new(), n, sources, ops: Vec::new() }
    }

    fn named(mut self, name: String) -> Self {
        self.name = format!("{name} {}²", self.n);
        self
    }

    /// Floats of a value.
    pub fn size(&self, value: usize) -> usize {
        if value < self.sources { self.n * self.n } else { self.ops[value - self.sources].size }
    }

    /// Bytes of the largest value.
    pub fn largest(&self) -> usize {
        4 * self.ops.iter().map(|o| o.size).fold(self.n * self.n, usize::max)
    }

    fn op(&mut self, entry: &'static str, inputs: &[usize], numbers: &[usize], space: Geometry, size: usize) -> usize {
        let numbers = numbers.iter().map(|&n| n as u32).collect();
        self.ops.push(Op { entry, inputs: inputs.to_vec(), in_place: false, numbers, space, size });
        self.sources + self.ops.len() - 1
    }

    /// An operation whose output is a whole matrix.
    fn matrix(&mut self, entry: &'static str, inputs: &[usize]) -> usize {
        let n = self.n;
        let numbers: &[usize] = if entry == "madd" { &[n, n] } else { &[n] };
        self.op(entry, inputs, numbers, Geometry::new(n, n, 1), n * n)
    }

    /// An operation whose output is a vector.
    fn vector(&mut self, entry: &'static str, inputs: &[usize], more: &[usize]) -> usize {
        let n = self.n;
        self.op(entry, inputs, &[&[n], more].concat(), Geometry::linear(n), n)
    }

    /// The sum of squares of a vector, in parts.
    fn partial(&mut self, v: usize) -> usize {
        self.op("partial", &[v], &[self.n, PARTS], Geometry::linear(PARTS), PARTS)
    }

    /// The matrix' transpose times `t`, over the square of `t`'s length: two operations.
    fn transposed(&mut self, r: usize, t: usize) -> usize {
        let q = self.partial(t);
        self.vector("transposed", &[r, t, q], &[PARTS])
    }

    /// Adds up values of `w`×`h` floats, pair by pair.
    fn sum(&mut self, mut ends: Vec<usize>, w: usize, h: usize) {
        while ends.len() > 1 {
            let (a, b) = (ends.remove(0), ends.remove(0));
            ends.push(self.op("madd", &[a, b], &[w, h], Geometry::new(w, h, 1), w * h));
        }
    }
}

/// A binary tree of `leaves` inputs.
fn tree(entry: &'static str, leaves: usize, n: usize) -> Dag {
    let mut d = Dag::new(n, leaves);
    let mut level: Vec<usize> = (0..leaves).collect();
    while level.len() > 1 {
        level = level.chunks(2).map(|pair| d.matrix(entry, pair)).collect();
    }
    d.named(format!("{entry} tree {leaves}"))
}

/// `width` chains of `depth`, summed up at the end so that there is one result. Operations of two inputs take the
/// chain's first value as the second one.
fn rectangle(entry: &'static str, width: usize, depth: usize, n: usize) -> Dag {
    let mut d = Dag::new(n, width);
    let ends = (0..width).map(|w| {
        (0..depth).fold(w, |at, _| match entry {
            "mcopy" => d.matrix(entry, &[at]),
            _ => d.matrix(entry, &[at, w]),
        })
    });
    let ends = ends.collect();
    d.sum(ends, n, n);
    d.named(format!("{entry} rectangle {width}×{depth}"))
}

/// All stages of a bitonic sort, one task each.
fn sort(n: usize) -> Dag {
    let mut d = Dag::new(n, 1);
    let mut k = 2;
    while k <= n * n {
        let mut j = k / 2;
        while j > 0 {
            d.op("bitonic", &[d.ops.len()], &[n, k, j], Geometry::new(n, n, 1), n * n);
            j /= 2;
        }
        k *= 2;
    }
    d.ops.iter_mut().for_each(|o| o.in_place = true);
    let tasks = d.ops.len();
    d.named(format!("bitonic sort, {tasks} tasks,"))
}

/// Leap-frog steps of a two-field grid: each field's step needs both.
fn fdtd(steps: usize, n: usize) -> Dag {
    let mut d = Dag::new(n, 2);
    let (mut e, mut h) = (0, 1);
    for _ in 0..steps {
        h = d.matrix("fdtd_h", &[e, h]);
        e = d.matrix("fdtd_e", &[h, e]);
    }
    d.matrix("madd", &[e, h]);
    d.named(format!("fdtd, {steps} steps,"))
}

/// Power steps for each component.
const POWER_STEPS: usize = 4;

/// Principal components by power iteration and deflation (NIPALS), after standardising the columns: 22 tasks for each
/// of `components` and nine more, 229 for 10 and 1197 for 54. The result is what is left of each column's mean square,
/// plus where two more power steps would lead: nothing, once there are as many components as columns.
pub fn pca(components: usize, n: usize) -> Dag {
    let mut d = Dag::new(n, 1);
    let mean = d.vector("col_mean", &[0], &[]);
    let centred = d.matrix("center", &[0, mean]);
    let square = d.vector("col_square", &[centred], &[]);
    let mut r = d.matrix("standardise", &[centred, square]);
    let mut t = d.vector("column", &[r], &[0]);
    for c in 0..components {
        let mut p = t;
        for _ in 0..POWER_STEPS {
            p = d.transposed(r, t);
            let s = d.partial(p);
            p = d.vector("unit", &[p, s], &[PARTS]);
            t = d.vector("times", &[r, p], &[]);
        }
        r = d.matrix("deflate", &[r, t, p]);
        t = d.vector("column", &[r], &[(c + 1) % n]);
    }
    let left = d.vector("col_square", &[r], &[]);
    let next = d.vector("times", &[r, t], &[]);
    let next = d.vector("times", &[r, next], &[]);
    d.sum(vec![left, next], n, 1);
    d.named(format!("pca, {components} components,"))
}

/// Groups the values of four columns by a hash of them, and sums up each group: count, scan, scatter, reduce.
fn group_by(n: usize) -> Dag {
    let mut d = Dag::new(n, 4);
    let table = Geometry::new(GROUPS, CHUNKS, 1);
    let totals = (0..4).map(|v| {
        let key = d.op("hash", &[v], &[n, GROUPS], Geometry::new(n, n, 1), n * n);
        let counts = d.op("count", &[key], &[n, GROUPS, CHUNKS], table, GROUPS * CHUNKS);
        let at = d.op("scan", &[counts], &[GROUPS, CHUNKS], table, GROUPS * CHUNKS);
        let sorted = d.op("scatter", &[v, key, at], &[n, GROUPS, CHUNKS], table, n * n);
        let parts = Geometry::new(GROUPS, PARTS, 1);
        let sums = d.op("group_sum", &[sorted, at], &[n, GROUPS, PARTS], parts, GROUPS * PARTS);
        d.op("group_total", &[sums], &[GROUPS, PARTS], Geometry::linear(GROUPS), GROUPS)
    });
    let totals = totals.collect();
    d.sum(totals, GROUPS, 1);
    d.named("group-by".into())
}

/// A chain of copies so small that only the launches count.
pub fn chain(tasks: usize) -> Dag {
    let mut d = Dag::new(16, 1);
    (0..tasks).fold(0, |at, _| d.matrix("mcopy", &[at]));
    d.named(format!("chain of {tasks}"))
}

/// The set for one size; `heavy` has what grows faster than `n`² too.
pub fn of_size(n: usize, heavy: bool) -> Vec<Dag> {
    let mut out = Vec::new();
    if heavy {
        out.extend([tree("gemm", 8, n), rectangle("gemm", 4, 4, n)]);
    }
    out.extend([tree("madd", 16, n), rectangle("madd", 4, 6, n)]);
    out.extend([rectangle("mcopy", 4, 6, n), rectangle("mcopy", 8, 16, n)]);
    out.extend([fdtd(8, n), pca(10, n), group_by(n)]);
    if heavy {
        out.extend([sort(n), pca(54, n)]);
    }
    out
}

/// The set for a kind of device; `full` has the 1024² sizes too.
pub fn all(full: bool, kind: Kind) -> Vec<Dag> {
    let sizes: &[usize] = if full { &[64, 256, 1024] } else { &[64, 256] };
    // Heavy work of the largest size says nothing about the runtime on a CPU, only takes minutes.
    sizes.iter().flat_map(|&n| of_size(n, n <= 256 || kind == Kind::Cuda)).collect()
}
