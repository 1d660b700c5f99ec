//! How often each byte value occurs.

use forebay::{Arg, Geometry, Kind, Launch, Source, Task, Template};

/// Bytes that a work-item counts before it adds to everybody's bins.
const EACH: usize = 1024;

const SOURCE: &str = "
KERNEL void clear(GLOBAL uint *bins) {
  if (gid_x() < 256) bins[gid_x()] = 0;
}
KERNEL void count(GLOBAL const uchar *data, GLOBAL uint *bins, uint n) {
  const uint begin = gid_x() * 1024;
  for (uint i = begin; i < n && i < begin + 1024; i++) ATOMIC_INC(&bins[data[i]]);
}
";

/// The task, for `n` bytes: `data` to 256 `bins`.
pub fn task(n: usize) -> Task {
    let source = || Source::Portable(SOURCE.into());
    let launches = || {
        [
            Launch::new(source(), "clear", [Arg::port("bins")]).over(Geometry::linear(256)),
            Launch::new(source(), "count", [Arg::port("data"), Arg::port("bins"), Arg::records("data")])
                .over(Geometry::linear(n.div_ceil(EACH))),
        ]
    };
    Task::new("histogram")
        .input("data", Template::array::<u8>([n]))
        .output("bins", Template::array::<u32>([256]))
        .kernels(Kind::OpenCl, launches())
        .kernels(Kind::Cuda, launches())
        .host(|inv| {
            count(inv.input("data")?, inv.output("bins")?);
            Ok(())
        })
}

/// The same on the core that calls.
pub fn count(data: &[u8], bins: &mut [u32]) {
    bins.fill(0);
    // Four sets: equal neighbours do not wait for each other.
    let mut sets = [[0u32; 256]; 4];
    for four in data.chunks(4) {
        four.iter().zip(&mut sets).for_each(|(b, set)| set[*b as usize] += 1);
    }
    for set in sets {
        bins.iter_mut().zip(set).for_each(|(to, n)| *to += n);
    }
}
